"""A name for what a server computes: of its weights, of all that changes what they compute, and of how the plugin
stores it. Two servers of one name may read each other's pages."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from sglang_diffkv import __version__
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.key_means import AUTO
from sglang_diffkv.mem_pool.segment_object import canonical
from sglang_diffkv.srt.versions import compat

logger = logging.getLogger(__name__)

READ_WHOLE = 512 << 20
"""Bytes of weights that are read to the last one. Of more, samples are."""

SAMPLE_BYTES, SAMPLES = 64 << 10, 64
"""Of each file, at its beginning, at its end and between."""

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
FROM_FILES = ("auto", "safetensors", "pt", "npcache", "mistral", "fastsafetensors")
"""SGLang's ``--load-format`` whose weights are those of the model's files."""

DRAWN = "dummy"
"""The one whose weights SGLang draws, always from the same seed, but for integers: these are what memory had."""
DRAWN_BY = ("device", "dtype", "tp_size", "ep_size", "dp_size", "enable_dp_attention")
"""Arguments on which it depends what is drawn."""

CHANGING = (
    "quantization", "load_format", "json_model_override_args", "model_loader_extra_config", "torchao_config",
    "weight_version", "context_length", "modelopt_quant", "quantize_and_serve", "custom_weight_loader", "model_impl",
    "rl_quant_profile", "quantization_param_path",
)  # fmt: skip
"""Of SGLang's arguments: those that change what weights compute."""

PATHS = (
    "_name_or_path", "_commit_hash", "transformers_version", "original_num_attention_heads",
    "original_total_num_kv_heads",
)  # fmt: skip
"""Of a model's configuration: what says nothing of the weights. SGLang notes the last two on a CPU, once it serves."""

BLOB = re.compile("[0-9a-f]{64}")


def configuration_digest(config: DiffKVConfig, own_means: str = "", own_shaping: str = "") -> str:
    """Of the plugin's configuration, the files that it names, and both programs. ``own_means``, ``own_shaping``: names
    of the key means and of the matrices that the server found itself."""
    import sglang

    means = None if config.key_means == AUTO else config.key_means
    paths = (means, config.key_rotation, config.value_rotation)
    files = [hashlib.blake2b(Path(path).read_bytes() if path is not None else b"").hexdigest() for path in paths]
    return _digest([__version__, sglang.__version__, config.whole(), own_means, own_shaping, *files])


LOCAL = (
    "host_gib", "share_min_tokens", "high_requests", "keep_seconds", "gpu_ops", "prefill", "decode", "prefix_fidelity",
)  # fmt: skip
"""Fields of the plugin's configuration that change nothing in a row once its prompt has ended."""


def row_facts(config: DiffKVConfig, own_means: str = "", own_shaping: str = "") -> dict[str, Any]:
    """What two servers must have in common to go on with each other's rows, beside the model and the shape of pages:
    programs, and fields of the configuration. ``digest``: of all that, and of the files that it names."""
    import sglang

    found = {name: value for name, value in config.whole().items() if name not in LOCAL}
    own = {"own_means": own_means, "own_shaping": own_shaping}
    found = {"sglang_diffkv": __version__, "sglang": sglang.__version__, **own, **found}
    paths = ("key_means", "key_rotation", "value_rotation")
    named = [found[name] for name in paths if found.get(name) not in (None, AUTO)]
    files = [hashlib.blake2b(Path(path).read_bytes()).hexdigest() for path in named]
    for name in paths:  # a file may lie elsewhere there
        found.pop(name, None)
    return {**found, "digest": _digest([found, files])}


def model_digest(server_args: Any, model: Any) -> str:
    """Of a model, SGLang's ModelConfig. Where nothing says which weights a server has, it is a name of this process
    alone, and the log says so."""
    obstacle, found = known_digest(server_args, model)
    if found is None:
        logger.warning("DiffKV: %s, so what this server stores is found by itself only, until it ends.", obstacle)
        return secrets.token_hex(16)
    return found


def known_digest(server_args: Any, model: Any) -> tuple[str, str | None]:
    """As ``model_digest``; None, and why, where nothing says which weights a server has."""
    view = compat.resolved(server_args)
    obstacle, weights = _weights(view, model)
    if weights is None:
        return obstacle, None
    described = {name: value for name, value in model.hf_config.to_dict().items() if name not in PATHS}
    changing = {name: getattr(view, name, None) for name in CHANGING}
    return "", _digest([_plain(described), _plain(changing), weights])


def _weights(view: Any, model: Any) -> tuple[str, list[Any] | None]:
    """The weight files of a model by name, with a digest of each; None, and why, if they are not known."""
    form = str(getattr(getattr(view, "load_format", "auto"), "value", getattr(view, "load_format", "auto")))
    if form == DRAWN:
        described = model.hf_config.to_dict()
        told = any(described.get(name) for name in ("quantization_config", "compression_config"))
        if told or any(getattr(x, "quantization", None) for x in (view, model)):
            return f"--load-format {form} does not draw all of quantised weights", None
        return "", [form, torch.__version__, *(str(getattr(view, name, None)) for name in DRAWN_BY)]
    if form not in FROM_FILES:
        return f"--load-format {form} does not say which weights these are", None
    folder = _folder(str(model.model_path), getattr(model, "revision", None))
    if folder is None:
        return "the folder of the model's weights is not known", None
    files = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern) if path.is_file()})
    if not files:
        return "the model's folder has no weights of a known form", None
    try:
        whole = sum(path.stat().st_size for path in files) <= READ_WHOLE
        return "", [[path.name, path.stat().st_size, *_of_file(path, whole)] for path in files]
    except OSError as error:
        return f"the model's weights cannot be read ({error})", None


def _folder(path: str, revision: str | None) -> Path | None:
    if os.path.isdir(path):
        return Path(path)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except Exception:
        return None


def _of_file(path: Path, whole: bool) -> list[Any]:
    """What says which bytes a file has. In the Hugging Face cache it is the name of its blob, a digest. Else it is a
    digest of all of it, or of samples together with the time of its last change."""
    blob = path.resolve()
    if path.is_symlink() and blob.parent.name == "blobs" and BLOB.fullmatch(blob.name):
        return [blob.name]
    running = xxhash.xxh3_128()
    for piece in _pieces(path, whole):
        running.update(piece)
    return [running.hexdigest()] if whole else [running.hexdigest(), path.stat().st_mtime_ns]


def _pieces(path: Path, whole: bool) -> Iterator[bytes]:
    with open(path, "rb") as file:
        if whole:
            while piece := file.read(1 << 24):
                yield piece
            return
        size = os.fstat(file.fileno()).st_size
        for index in range(SAMPLES):
            file.seek(max(size - SAMPLE_BYTES, 0) * index // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)


def _digest(value: Any) -> str:
    return hashlib.blake2b(canonical(value), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """A value as JSON has it; what JSON has not is written as text."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
