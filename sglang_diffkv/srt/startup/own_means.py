"""Key means that a server finds itself (``"key_means": "auto"``): its model reads a text that comes with the package.

They are measured once the weights are loaded and before graphs are captured. A file keeps them for later starts, by a
digest of the weights and of all that changes what these compute. Each tensor-parallel rank has those of its heads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_diffkv import __version__
from sglang_diffkv.config import CACHE_ENV
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import named, private_folder, write_privately
from sglang_diffkv.key_means import SINKS, KeySums, impossible, read_key_means, write_key_means
from sglang_diffkv.ladder import text_of
from sglang_diffkv.mem_pool.segment_object import canonical
from sglang_diffkv.ops import Scaling
from sglang_diffkv.srt.models.hybrids import has_states
from sglang_diffkv.srt.startup.model_identity import known_digest
from sglang_diffkv.srt.startup.reading_pass import read
from sglang_diffkv.srt.versions import compat

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised where means of an older package are not to be used."""
TOKENS = 4096
"""To read at most. A pass is no longer than one over prompts."""
LEAST_TOKENS = 256
MEASURE = "measure them with python -m sglang_diffkv.calibrate.means"
TEXT = "reading.txt"
"""From "The Red-Headed League" by Arthur Conan Doyle (1891), with code and records between."""


@dataclass(frozen=True)
class Found:
    """What a start found.

    Attributes:
        means: [layers, KV heads of this rank, head_dim] float32; None without any.
        said: how, or why there are none, in words.
        facts: the same in numbers, for reports.
    """

    means: torch.Tensor | None
    said: str
    facts: dict[str, Any]


_found: Found | None = None
"""Of the server of this process."""


def report() -> dict[str, Any]:
    """Of the last start, for ``/server_info``; empty if it was not asked to find any."""
    return {} if _found is None else {"found": _found.means is not None, "how": _found.said, **_found.facts}


def digest() -> str:
    """A name of the means that this process found, empty without any."""
    means = None if _found is None else _found.means
    return "" if means is None else hashlib.blake2b(means.numpy().tobytes(), digest_size=16).hexdigest()


def find(runner: Any, scalings: Sequence[Scaling], sinks: torch.dtype | None) -> torch.Tensor | None:
    """The means for SGLang's model runner: kept from an earlier start, else measured now. None, with a warning that
    says why, where this model has none or cannot be read. All ranks have to call it.

    Args:
        scalings, sinks: of the model's layers, as of ``DiffKVAttnBackend``.
    """
    global _found
    why, ids = agreed_text(runner, obstacle(runner, scalings, sinks))
    if why:
        _found = _without(why)
        return None
    _found = _kept_or_measured(runner, ids)
    if _found.means is not None:
        logger.info("DiffKV: key means: %s", _found.said)
    return _found.means


def agreed_text(runner: Any, why: str) -> tuple[str, list[int]]:
    """Why no text is read, empty if one is; and its tokens, the same on all ranks. All of them have to call it.

    Args:
        why: this rank cannot read any; empty if it can.
    """
    ranks, ids = runner.token_to_kv_pool.manager.ranks, list[int]()
    if not why:
        why, ids = text_ids(compat.resolved(runner.server_args), runner.model_config)
    if ranks.largest(np.array([bool(why)], dtype=np.int64))[0]:
        return why or "another rank cannot read a text", []
    ranks.require_equal("the tokens of the text that is read", ids)
    return "", ids


def obstacle(runner: Any, scalings: Sequence[Scaling], sinks: torch.dtype | None) -> str:
    """Why this model has no means, or cannot be read at the start of a server; empty if it can."""
    if any(scaling.cap for scaling in scalings):
        return "layers have a logit cap, under which attention would not stay the same"
    if sinks is not None:
        return "layers have attention sinks, whose logits do not move with those of keys"
    why = unread(runner, sinks)
    return f"{why}; {MEASURE}" if "LoRA" in why or "states" in why else why


def unread(runner: Any, sinks: torch.dtype | None) -> str:
    """Why this model cannot be read at the start of a server; empty if it can."""
    if sinks is not None:
        return "layers have attention sinks, with which no text is read at the start"
    if has_states(runner.req_to_token_pool):
        return "layers have states, which only requests have"
    return unreadable(compat.resolved(runner.server_args))


def random_weights(view: Any) -> bool:
    """Whether a server with these resolved arguments loads none of the model's weights."""
    return str(getattr(view.load_format, "value", view.load_format)) == "dummy"


def unreadable(view: Any) -> str:
    """Why models are not read at the start of a server with these resolved arguments; empty if they are."""
    if random_weights(view):
        return "--load-format dummy loads random weights, whose keys say nothing"
    if getattr(view, "enable_lora", False) or getattr(view, "lora_paths", None):
        return "with LoRA texts are not read at the start"
    if str(getattr(view, "moe_a2a_backend", None) or "none") != "none":
        return "with --moe-a2a-backend texts are not read at the start"
    return ""


def text_ids(
    view: Any, model: Any, given: str | None = None, tokens: int = TOKENS, least: int = LEAST_TOKENS
) -> tuple[str, list[int]]:
    """Why there are no tokens to read, empty if there are; and the tokens, with those that the tokenizer puts before
    each text.

    Args:
        view: resolved arguments. model: SGLang's ModelConfig. given: the text, None for that of the means.
        tokens, least: to read at most, and needed at least.
    """
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    if view.skip_tokenizer_init:
        return "with --skip-tokenizer-init there is no tokenizer to read a text with", []
    path = view.tokenizer_path or view.model_path
    options = {"tokenizer_mode": view.tokenizer_mode, "trust_remote_code": view.trust_remote_code}
    try:
        tokenizer = get_tokenizer(path, **options, revision=view.revision)
        ids = list(tokenizer(text() if given is None else given)["input_ids"])
    except Exception as error:  # of whoever wrote the tokenizer
        return f"the tokenizer cannot be used: {error}", []
    chunk = view.chunked_prefill_size or 0
    most = min(tokens, model.context_len, chunk if chunk > 0 else tokens)
    if len(ids[:most]) < least:
        return f"a pass takes {len(ids[:most])} tokens, and {least} are needed", []
    return "", ids[:most]


def text() -> str:
    """The text that is read."""
    return text_of(TEXT)


def _kept_or_measured(runner: Any, ids: list[int]) -> Found:
    manager = runner.token_to_kv_pool.manager
    state, ranks = manager.state, manager.ranks
    shape = (state.num_layers, state.num_heads, state.fmt.head_dim)
    file, why = kept_in("key-means", runner, ids, ranks.rank, ranks.size)
    means = None if file is None else _kept(file, shape)
    if not ranks.largest(np.array([means is None], dtype=np.int64))[0]:
        return Found(means, f"of {named(file)}", {"tokens": len(ids) - SINKS, "file": str(file)})
    began, sums = time.perf_counter(), KeySums()
    try:
        read(runner, ids, lambda layer, keys: sums.add(layer, keys))
    except torch.OutOfMemoryError:
        if not ranks.alone:  # the others are in the pass, and wait for this one
            raise
        return _without("the device has too little memory left to read a text")
    means = sums.means()
    took = time.perf_counter() - began
    if tuple(means.shape) != shape:
        raise RuntimeError(f"diffkv: the text was read with keys of {tuple(means.shape)}, and pages are of {shape}")
    bad = impossible(means)
    if ranks.largest(np.array([bool(bad)], dtype=np.int64))[0]:
        return _without(f"they hold {bad or 'what no means are, on another rank'}")
    if file is not None:
        why = _keep(file, means, len(ids) - SINKS)
    where = f"kept in {named(file)}" if file is not None and not why else f"not kept, since {why}"
    said = f"measured in {took:.1f} s with {len(ids):,} tokens of text; {where}"
    facts = {"tokens": len(ids) - SINKS, "seconds": round(took, 2), "file": None if why else str(file)}
    return Found(means, said, facts)


def _without(why: str) -> Found:
    """No means, and a warning that says why."""
    logger.warning('DiffKV: "key_means": "auto" has no effect: %s. Keys are stored as they are.', why)
    return Found(None, why, {})


def cache_folder() -> Path:
    """Where a server keeps what it has measured."""
    if given := os.environ.get(CACHE_ENV):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang_diffkv"


def kept_in(kind: str, runner: Any, ids: list[int], rank: int, size: int) -> tuple[Path | None, str]:
    """The file that keeps what a rank has found of this ``kind``, and why there is none."""
    why, model = known_digest(runner.server_args, runner.model_config)
    if model is None:
        return None, why
    try:
        folder = private_folder(cache_folder())
    except (ConfigError, RuntimeError) as error:  # or no home
        return None, f"the folder for it (set {CACHE_ENV}) cannot be used: {error}"
    given = [FORMAT, model, str(runner.dtype), SINKS, rank, size, ids]
    name = hashlib.blake2b(canonical(given), digest_size=16).hexdigest()
    return folder / f"{kind}-{name}.safetensors", ""


def _kept(file: Path, shape: tuple[int, int, int]) -> torch.Tensor | None:
    """What an earlier start has kept; None if it has not, or the file is damaged."""
    if not file.exists():
        return None
    try:
        return read_key_means(str(file), *shape)
    except ConfigError as error:
        logger.warning("DiffKV: kept key means are measured again: %s", error)
        return None


def _keep(file: Path, means: torch.Tensor, tokens: int) -> str:
    """Write a file that its user alone may read, whole or not at all; why that is not possible, empty if it is."""
    facts = {"tokens": str(tokens), "text": TEXT, "sglang_diffkv": __version__}
    return write_privately(file, lambda path: write_key_means(path, means, facts))
