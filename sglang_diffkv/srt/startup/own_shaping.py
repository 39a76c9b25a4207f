"""Matrices that shape the noise of codes, which a server fits to its model itself (``"noise_shaping": "auto"``).

The model reads the text of the key means once its weights are loaded and before graphs are captured. A file keeps the
matrices for later starts, as for key means. Each tensor-parallel rank has those of its heads.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_diffkv import __version__
from sglang_diffkv.attention.whole import Sight, error_weights
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import named, write_privately
from sglang_diffkv.key_means import SINKS
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.noise_shaping import Moments, NoiseShaping, read_noise_shaping, write_noise_shaping
from sglang_diffkv.srt.models.outputs import products_behind_attention
from sglang_diffkv.srt.startup import own_means
from sglang_diffkv.srt.startup.reading_pass import give_back, read_vectors

logger = logging.getLogger(__name__)

FORMAT = 2
"""Raised where matrices of an older package are not to be used."""


@dataclass(frozen=True)
class Found:
    """What a start found.

    Attributes:
        shaping: of this rank's heads; None without any.
        said: how, or why there is none, in words.
        facts: the same in numbers, for reports.
    """

    shaping: NoiseShaping | None
    said: str
    facts: dict[str, Any]


_found: Found | None = None
"""Of the server of this process."""


def report() -> dict[str, Any]:
    """Of the last start, for ``/server_info``; empty if it was not asked to find any."""
    return {} if _found is None else {"found": _found.shaping is not None, "how": _found.said, **_found.facts}


def digest() -> str:
    """A name of the matrices that this process found, empty without any."""
    shaping = None if _found is None else _found.shaping
    if shaping is None:
        return ""
    running = hashlib.blake2b(digest_size=16)
    for found in (shaping.keys, shaping.values):
        running.update(b"" if found is None else found.numpy().tobytes())
    return running.hexdigest()


def find(runner: Any, sinks: torch.dtype | None) -> NoiseShaping | None:
    """The matrices for SGLang's model runner: kept from an earlier start, else fitted now. None, with a warning that
    says why, where this model cannot be read. All ranks have to call it. ``sinks``: as of ``DiffKVAttnBackend``."""
    global _found
    why, ids = own_means.agreed_text(runner, own_means.unread(runner, sinks))
    if why:
        _found = _without(why)
        return None
    _found = _kept_or_fitted(runner, ids)
    if _found.shaping is not None:
        logger.info("DiffKV: noise shaping: %s", _found.said)
    return _found.shaping


def _note(
    moments: Moments,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    sight: Sight,
) -> None:
    """What a layer attends to, as of ``reading_pass.Seen``."""
    weights = error_weights(query.transpose(0, 1), key.transpose(0, 1), scale, sight)
    moments.add(layer, query, key, value, weights)


def _kept_or_fitted(runner: Any, ids: list[int]) -> Found:
    manager = runner.token_to_kv_pool.manager
    state, ranks = manager.state, manager.ranks
    shape = (state.num_layers, state.num_heads, state.fmt.head_dim, state.fmt.v_head_dim)
    file, why = own_means.kept_in(f"noise-shaping-{FORMAT}", runner, ids, ranks.rank, ranks.size)
    found = None if file is None else _kept(file, shape)
    lacking = ranks.largest(np.array([found is None], dtype=np.int64))[0]
    if found is not None and not lacking:
        found = _alike(found, ranks)
        return Found(found, f"of {named(file)}", _facts(found, ids, file))
    began, moments = time.perf_counter(), Moments()
    try:
        read_vectors(runner, ids, partial(_note, moments))
        found = _alike(moments.fit(products_behind_attention(runner.model, runner.dtype)), ranks)
    except torch.OutOfMemoryError:
        if not ranks.alone:  # the others are in the pass, and wait for this one
            raise
        return _without("the device has too little memory left to read a text")
    finally:
        give_back(runner)  # the products took some too
    took = time.perf_counter() - began
    if tuple(found.keys.shape[:3]) != shape[:3]:
        raise RuntimeError(
            f"diffkv: the text was read with keys of {tuple(found.keys.shape)}, and pages are of {shape}"
        )
    bad = found.impossible()
    if ranks.largest(np.array([bool(bad)], dtype=np.int64))[0]:
        return _without(f"the matrices hold {bad or 'what is of no use, on another rank'}")
    if file is not None:
        why = _keep(file, found, len(ids) - SINKS)
    where = f"kept in {named(file)}" if file is not None and not why else f"not kept, since {why}"
    alone = (
        ""
        if found.values is not None
        else "; for keys alone, since the weights behind attention were not found, or are of no use"
    )
    said = f"fitted in {took:.1f} s with {len(ids):,} tokens of text; {where}{alone}"
    return Found(found, said, {**_facts(found, ids, None if why else file), "seconds": round(took, 2)})


def _alike(found: NoiseShaping, ranks: Ranks) -> NoiseShaping:
    """Of keys alone, where values are of no use on any rank. All ranks have to call it."""
    alone = found.values is None or not found.values.isfinite().all()
    return NoiseShaping(found.keys) if ranks.largest(np.array([alone], dtype=np.int64))[0] else found


def _facts(found: NoiseShaping | None, ids: list[int], file: Path | None) -> dict[str, Any]:
    values = found is not None and found.values is not None
    return {"tokens": len(ids) - SINKS, "values": values, "file": None if file is None else str(file)}


def _without(why: str) -> Found:
    """No matrices, and a warning that says why."""
    logger.warning('DiffKV: "noise_shaping": "auto" has no effect: %s. Keys and values are stored as they are.', why)
    return Found(None, why, {})


def _kept(file: Path, shape: tuple[int, int, int, int]) -> NoiseShaping | None:
    """What an earlier start has kept; None if it has not, or the file is damaged."""
    if not file.exists():
        return None
    try:
        return read_noise_shaping(str(file), *shape)
    except ConfigError as error:
        logger.warning("DiffKV: kept noise shaping is fitted again: %s", error)
        return None


def _keep(file: Path, found: NoiseShaping, tokens: int) -> str:
    """Write a file that its user alone may read, whole or not at all; why that is not possible, empty if it is."""
    facts = {"tokens": str(tokens), "text": own_means.TEXT, "sglang_diffkv": __version__}
    return write_privately(file, lambda path: write_noise_shaping(path, found, facts))
