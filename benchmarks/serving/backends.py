"""What the serving benchmark compares: stock attention backends with a KV dtype, and DiffKV configurations.

Flags that stand in a backend's name are for its server alone: ``fa3:fp8_e4m3 --chunked-prefill-size 2048``.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.serving.memory import DTYPE_BYTES, GIB, KVShape, diffkv_tokens, stock_tokens
from sglang_diffkv.config import DiffKVConfig, load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate.server import has_gpu

GPU_BACKENDS = ("flashinfer:bf16", "flashinfer:fp8_e4m3", "triton:bf16")
CPU_BACKENDS = ("torch_native:bf16",)
DRAFT_DTYPE = "--speculative-draft-kv-cache-dtype"


@dataclass(frozen=True)
class Backend:
    """A row of the table. ``config`` is None for a stock backend, whose cache has ``dtype``; ``flags`` are its own."""

    name: str
    attention: str
    dtype: str
    config: DiffKVConfig | None = None
    flags: tuple[str, ...] = ()

    @property
    def drafts(self) -> str:
        """The dtype of what layers have that draft."""
        usual = "bf16" if self.config is not None else self.dtype
        named = [value for flag, value in pairwise(self.flags) if flag == DRAFT_DTYPE]
        return named[-1] if named else usual

    def tokens(self, kv_bytes: int, shape: KVShape, max_running: int) -> int:
        """Tokens for ``--max-total-tokens``. Raises ValueError if the bytes are too few."""
        if self.config is not None:
            return diffkv_tokens(kv_bytes, shape, self.config, max_running, self.drafts)
        return stock_tokens(kv_bytes, shape, self.dtype)

    def untold(self, tokens: int, shape: KVShape) -> int:
        """Bytes that a server of so many tokens leaves out when it says what its cache takes: of layers that draft."""
        return 0 if self.config is not None else tokens * shape.draft_bytes(self.drafts)

    def server_args(self, tokens: int) -> list[str]:
        """The arguments that only this backend gets, except for its name, its configuration and ``flags``."""
        dtype = [] if self.dtype not in DTYPE_BYTES or self.dtype == "bf16" else ["--kv-cache-dtype", self.dtype]
        return ["--max-total-tokens", str(tokens), *dtype]

    def config_json(self) -> str | None:
        """The value of ``--diffkv-config``."""
        return None if self.config is None else self.config.model_dump_json(exclude_none=True)


def parted(name: str) -> tuple[str, tuple[str, ...]]:
    """A backend's name up to the flags that stand in it, from its first ``--`` on, and these."""
    bare, dashes, flags = name.partition(" --")
    return bare.strip(), tuple(shlex.split(dashes + flags))


def parse_backend(text: str) -> Backend:
    """``ATTENTION:DTYPE [FLAGS]`` of a stock server, for example ``flashinfer:fp8_e4m3``."""
    bare, flags = parted(text)
    attention, colon, dtype = bare.partition(":")
    dtype = dtype if colon else "bf16"
    if not attention or dtype not in DTYPE_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not ATTENTION:DTYPE with a dtype of {', '.join(DTYPE_BYTES)}")
    if attention == "diffkv":
        raise argparse.ArgumentTypeError("name DiffKV configurations by --diffkv NAME=JSON")
    return Backend(" ".join([attention, dtype, *flags]), attention, dtype, flags=flags)


def diffkv_backend(name: str, text: str) -> Backend:
    """A DiffKV server of one configuration. Raises ConfigError for an unusable one."""
    return Backend(name, "diffkv", "diffkv", load_config(text), parted(name)[1])


def parse_diffkv(text: str) -> Backend:
    """``NAME [FLAGS]=JSON``."""
    found = re.fullmatch(r"(.+?)=\s*(\{.*)", text, re.DOTALL)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected NAME=JSON, got {text!r}")
    name, value = found.groups()
    try:
        return diffkv_backend(name, value)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def pinned_backends(path: Path, model: str) -> list[Backend]:
    """The configurations that ``pin_shares`` found. Raises ValueError if they are another model's or not found."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found, missed, configs = data["model"], data["missed"], data["configs"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path.name} is no result of pin_shares: {error}") from error
    if found != model:
        raise ValueError(f"{path.name} was found for {found}, not for {model}")
    if missed:
        raise ValueError(f"{path.name}: no thresholds were found for the high shares {missed}")
    return [diffkv_backend(name, json.dumps(config)) for name, config in configs.items()]


@cache
def server_flags() -> frozenset[str]:
    """All flags that the installed SGLang's server knows."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return frozenset(parser._option_string_actions)


def common_args(max_running: int, log_interval: int, *, dummy: bool, gpu: bool, known: frozenset[str]) -> list[str]:
    """Server arguments that all backends get, so that only cache and attention differ."""
    args = [
        "--random-seed",
        "0",
        "--max-running-requests",
        str(max_running),
        "--decode-log-interval",
        str(log_interval),
    ]
    if dummy:
        args += ["--load-format", "dummy"]
    if gpu:
        args += ["--dtype", "bfloat16", "--mem-fraction-static", "0.8", "--cuda-graph-max-bs-decode", str(max_running)]
        if "--disable-prefill-cuda-graph" in known:
            args += ["--disable-prefill-cuda-graph"]
    return args


def default_backends() -> list[Backend]:
    """The stock servers to compare with on this machine."""
    return [parse_backend(text) for text in (GPU_BACKENDS if has_gpu() else CPU_BACKENDS)]


def gib(kv_bytes: float) -> float:
    """Bytes in GiB."""
    return kv_bytes / GIB
