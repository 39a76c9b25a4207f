"""Cache configurations to compare: stock SGLang in bf16 and fp8, and DiffKV configurations."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sglang_diffkv.access import without_keys
from sglang_diffkv.calibration import resolve
from sglang_diffkv.config import CHOSEN, DiffKVConfig, load_config, read_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate.endpoint import Endpoint, EvaluationError
from sglang_diffkv.evaluate.report import version
from sglang_diffkv.evaluate.server import Server, has_gpu, stock_backend
from sglang_diffkv.files import quoted
from sglang_diffkv.presets import PRESETS, preset_of

STOCK, FP8 = "stock", "fp8"
DEFAULT = "default"
"""How tables name the default configuration, which is no word for one."""
FP8_DTYPE = "fp8_e4m3"
ELEMENT_RATIO = {"auto": 1.0, "bfloat16": 1.0, "fp8_e4m3": 0.5, "fp8_e5m2": 0.5}
"""Bytes of a stock cache's element over those of bf16, by ``--kv-cache-dtype``; fp8 keeps no scales by token."""


SAMPLES, SAMPLE_BYTES = 64, 4096
"""How many parts of a file of weights, spread over it, and how many bytes of each tell it from others."""


@dataclass(frozen=True)
class Configuration:
    """A server to start. ``diffkv`` is the resolved configuration, None for SGLang without the plugin's backend;
    ``origin`` says where its thresholds come from."""

    name: str
    diffkv: DiffKVConfig | None = None
    kv_cache_dtype: str = "auto"
    origin: str = field(default="", compare=False)

    @property
    def backend(self) -> str:
        return stock_backend() if self.diffkv is None else "diffkv"

    def unsupported(self) -> str | None:
        """Why this machine cannot serve it, or None."""
        if not self.kv_cache_dtype.startswith("fp8"):
            return None
        if not has_gpu():
            return "stock SGLang's fp8 KV cache is measured on a GPU, and there is none (on a CPU it needs Intel AMX)"
        import torch

        capability = torch.cuda.get_device_capability()
        if capability < (8, 9):
            return f"the GPU's compute capability {capability[0]}.{capability[1]} is below 8.9, the first with fp8"
        return None

    def server(self, model: str, args: Sequence[str] = ()) -> Server:
        """The server, not started."""
        dtype = [] if self.kv_cache_dtype == "auto" else ["--kv-cache-dtype", self.kv_cache_dtype]
        config = None if self.diffkv is None else self.diffkv.as_text()
        return Server(model, self.backend, [*dtype, *args], diffkv_config=config)

    def fingerprint(self, model: str, args: Sequence[str] = ()) -> dict[str, Any]:
        """All that an answer depends on, as JSON data."""
        return {
            "model": Path(model).name,
            "weights": weights_digest(model),
            "device": device_name(),
            "sglang": version("sglang"),
            "backend": self.backend,
            "kv_cache_dtype": self.kv_cache_dtype,
            "diffkv": None if self.diffkv is None else self.diffkv.whole(),
            "server_args": without_keys(args),
        }


def weights_digest(model: str) -> str | None:
    """Of the weights in a model's folder: by the files' names, sizes and a sample of their bytes. None without any."""
    files = sorted(x for x in Path(model).glob("*") if x.suffix in (".safetensors", ".bin", ".gguf") and x.is_file())
    return _digest(tuple((x, (found := x.stat()).st_size, found.st_mtime_ns) for x in files)) if files else None


@cache
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Of files, given with size and time of their last change: read once, however many configurations there are."""
    digest = hashlib.sha256()
    for path, size, _ in files:
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for at in range(0, size, max(size // SAMPLES, SAMPLE_BYTES)):
                file.seek(at)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def parse_configuration(spec: str, model: str | None = None) -> Configuration:
    """``stock``, ``fp8``, a preset's name, or ``NAME=`` and a DiffKV configuration: JSON, a preset or a file's path.

    Calibrated thresholds are those of ``model``. Raises ConfigError.
    """
    name, equals, source = spec.partition("=")
    if not equals and name == STOCK:
        return Configuration(STOCK)
    if not equals and name == FP8:
        return Configuration(FP8, kv_cache_dtype=FP8_DTYPE)
    if not equals and preset_of(name):
        source = name
    elif not equals or not source.strip():
        presets = ", ".join(map(repr, PRESETS))
        written = f" (write {name}={{}})" if name == DEFAULT else ""
        raise ConfigError(f"expected {STOCK!r}, {FP8!r}, {presets} or NAME=JSON, got {spec!r}{written}")
    if name in (STOCK, FP8):
        raise ConfigError(f"{name!r} is stock SGLang; give the configuration {source!r} another name")
    given_by = f"--config {quoted(name)}"
    config, origin = (read_config(source, given_by), "") if model is None else resolve(source, model, given_by)
    if config.thresholds not in ("default", CHOSEN):
        load_config(source)  # which says that they are looked up for a model
    return Configuration(name, config, origin=origin)


def fingerprint_of(endpoint: Endpoint) -> dict[str, Any]:
    """As ``Configuration.fingerprint`` for a running server, as far as it tells."""
    info = endpoint.info()
    stats = (info.get("internal_states") or [{}])[0].get("diffkv") or {}
    return {
        "model": Path(str(info.get("model_path"))).name,
        "device": info.get("device"),
        "sglang": info.get("version"),
        "backend": info.get("attention_backend"),
        "kv_cache_dtype": info.get("kv_cache_dtype"),
        "diffkv": (stats.get("configuration") or {}).get("values"),
        "server_args": None,
    }


def tokenizer_path(endpoint: Endpoint) -> str:
    """Where the server's tokenizer is. Raises EvaluationError if it does not say."""
    path = endpoint.info().get("tokenizer_path")
    if not path:
        raise EvaluationError(f"{endpoint.url} does not name its tokenizer: give --tokenizer")
    return str(path)


def device_name() -> str:
    """The GPU's name, or ``cpu``."""
    if not has_gpu():
        return "cpu"
    import torch

    return torch.cuda.get_device_name(0)
