"""Extend (prefill) attention on the GPU: packed pages, new tokens, merge, and the prompt's significance scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import triton

from sglang_diffkv.kernels.decode_attention.triton_workspace import tile_tokens
from sglang_diffkv.kernels.device import processors_of
from sglang_diffkv.kernels.extend_attention.reference import MOST_NODES
from sglang_diffkv.kernels.extend_attention.triton_paged import merge_kernel, paged_kernel, ragged_kernel
from sglang_diffkv.kernels.extend_attention.triton_scores import (
    fold_sums_kernel,
    new_scores_kernel,
    page_scores_kernel,
    stored_sums_kernel,
)
from sglang_diffkv.kernels.launch import Launch
from sglang_diffkv.kernels.triton_table import INTERPRETED, layout_constants
from sglang_diffkv.layout.page_format import PageFormat
from sglang_diffkv.layout.state import PageState

ROWS = 64
"""Rows, (query, head of a group) pairs, of a program over new tokens."""
PAGED_ROWS = 16
"""Rows of a program over pages. It has one warp, which takes ``mma.sync``: with four, Triton 3.6 takes ``wgmma``, whose
reads of shared memory go out of bounds in the K4V2 kernel at head_dim 128, and which is slower here besides."""
MOST_SPLITS = 16
"""Programs over pages that share a KV head of a request whose new tokens are not stored."""
SCORE_QUERIES = 32
"""Queries of an iteration of the scores of pages, by two warps for the same reason."""
FOLD_PROGRAMS = 64
"""Programs that share a head of a request where sums are taken into scores."""
NEW_KEYS, NEW_QUERIES = 128, 64
"""Keys of a program of the scores of new tokens, up to head_dim 128, and queries of an iteration. With 128 queries it
takes a fifth longer (H200, 1,000 to 8,000 tokens)."""
STORED_QUERIES = 128
"""The same of the scores of stored tokens, up to head_dim 128. With 64 queries it takes up to a fifth longer (H200)."""


@cache
def _constants(fmt: PageFormat, max_blocks: int, layers: int, heads: int) -> tuple[Mapping[str, Any], ...]:
    """Compile-time constants of each tier's launch."""
    shared = {
        "TIERS": len(fmt.tiers),
        "D": fmt.head_dim,
        "PAGE_BYTES": fmt.page_bytes,
        "MAX_BLOCKS": max_blocks,
        "L": layers,
        "H": heads,
        "ASM": not INTERPRETED,
    }
    tile = 32 if fmt.head_dim > 128 else 64
    return tuple(
        MappingProxyType({**layout_constants(x), **shared, "TIER": tier, "N": tile_tokens(x, tile)})
        for tier, x in enumerate(fmt.layouts)
    )


@cache
def _score_constants(fmt: PageFormat, max_blocks: int, layers: int, heads: int) -> Mapping[str, Any]:
    """Those of the scores of new tokens, which are in the first tier."""
    names = ("TIERS", "TOKENS", "SCORES", "D", "PAGE_BYTES", "MAX_BLOCKS", "L", "H", "ASM")
    first = _constants(fmt, max_blocks, layers, heads)[0]
    return MappingProxyType({name: first[name] for name in names})


def _shape(state: PageState) -> tuple[PageFormat, int, int, int]:
    """What compile-time constants follow from."""
    return state.fmt, state.row_blocks.shape[1], state.num_layers, state.num_heads


def extend_attention(
    state: PageState,
    layer: int,
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    extend_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_extend: int,
    max_prefix: int,
    sm_scale: float,
    *,
    update_scores: bool = False,
    logit_cap: float = 0.0,
    new_part: tuple[torch.Tensor, torch.Tensor] | None = None,
    shared_scores: dict[int, torch.Tensor] | None = None,
    observe_from: torch.Tensor | None = None,
    observe_every: int | torch.Tensor = 0,
    reduce: str = "max",
    attention_span: int = 0,
    sink_logits: torch.Tensor | None = None,
    stored: bool = True,
    ancestors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each request's new tokens, which are already appended to its pages.

    Args:
        q: [tokens, Hq, head_dim], requests one after the other, contiguous but where ``new_part`` is all there is to
            attend. key: [tokens, H, head_dim] and value: [tokens, H, v_head_dim] with a contiguous last dimension.
        rows, starts, extend_lens, prefix_lens: [B] integers on the device: owner, first token in q, new tokens, and
            tokens before them.
        max_extend, max_prefix: host-known maxima; without a prefix no page is read.
        update_scores: record the attention that own tokens received from the new ones, in the tiers that have scores;
            the high one does.
        new_part: output [tokens, Hq, v_head_dim] and lse [tokens, Hq] float32, base 2, of the new tokens' causal
            attention among themselves, where another kernel computed it. Without a prefix they are the result.
        shared_scores: as for the reference; tensors [L, H, n] float32, contiguous.
        observe_from, observe_every, reduce, attention_span: as for the reference; ``new_part`` is of queries that see
            all new tokens before them. sink_logits: [Hq] of any float type.
        stored: False if the new tokens are not appended.
        ancestors: as for the reference, contiguous; only of new tokens that are not stored.

    Returns:
        out [tokens, Hq, v_head_dim] in q's dtype, lse [tokens, Hq] float32, base 2.
    """
    fmt = state.fmt
    tokens, q_heads, dim = q.shape
    heads, batch = state.num_heads, rows.shape[0]
    attended = new_part is not None and not max_prefix
    assert (q.is_contiguous() or (attended and q.stride(2) == 1)) and dim == fmt.head_dim and q_heads % heads == 0
    assert key.shape == (tokens, heads, dim) and key.stride(2) == 1 and key.dtype == q.dtype
    assert value.shape == (tokens, heads, fmt.v_head_dim) and value.stride(2) == 1 and value.dtype == q.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert not fmt.high.tier.is_raw or q.dtype == state.dtype, "the raw tier holds the dtype of q"
    assert starts.shape == extend_lens.shape == prefix_lens.shape == (batch,)
    assert not attention_span or (new_part is None and not update_scores)
    assert fmt.scored or not update_scores, "the high tier has no scores to update"
    assert sink_logits is None or sink_logits.shape == (q_heads,)
    assert stored or (new_part is None and not update_scores)
    if ancestors is not None:
        assert not stored and not attention_span and max_extend <= MOST_NODES
        assert ancestors.shape == (tokens,) and ancestors.dtype == torch.int64 and ancestors.is_contiguous()
    group = q_heads // heads
    common = {"G": group, "HAS_CAP": logit_cap > 0, "SLIDES": attention_span > 0}
    grid = (triton.cdiv(max_extend * group, PAGED_ROWS), heads, batch)
    splits = 1 if stored else _splits(grid, q.device)
    if new_part is not None:
        out, lse = new_part
    else:
        # What is still to be joined with the attention to pages, or with sinks, is not rounded before.
        kind = torch.float32 if max_prefix or sink_logits is not None else q.dtype
        parts = 1 if stored or not max_prefix else 1 + len(fmt.tiers) * splits
        outs = torch.empty(parts, tokens, q_heads, fmt.v_head_dim, dtype=kind, device=q.device)
        lses = torch.empty(parts, tokens, q_heads, device=q.device)
        out, lse = outs[0], lses[0]
    if not tokens:
        return out.to(q.dtype), lse
    if new_part is None:
        ragged_kernel[(batch * heads * triton.cdiv(max_extend * group, ROWS),)](
            q, key, value, key.stride(0), key.stride(1), value.stride(0), value.stride(1), out, lse, starts,
            extend_lens, batch, sm_scale, logit_cap, attention_span, ancestors, D=dim, DV=fmt.v_head_dim, H=heads,
            M=ROWS, N=32 if dim > 128 else 64, ASM=not INTERPRETED, TREE=ancestors is not None, **common, num_warps=4,
            num_stages=2,
        )  # fmt: skip
    if max_prefix:
        tables = (
            state.page_table, state.range_lo, state.range_hi, state.row_blocks, state.entries, state.own_entry,
            state.write_slot,
        )  # fmt: skip
        given = (
            starts,
            extend_lens,
            prefix_lens,
            rows,
            state.pages,
            *tables,
            layer,
            sm_scale,
            logit_cap,
            attention_span,
        )
        common.update(DV=fmt.v_head_dim, M=PAGED_ROWS, STORED=stored, num_warps=1, num_stages=2)
        kind = q.dtype if sink_logits is None else torch.float32
        if stored:
            out, lse = _join_tiers(state, q, out, lse, given, common, grid, kind)
        else:
            out, lse = _join_parts(state, q, outs, lses, given, common, grid, splits, kind)
    if sink_logits is not None:
        out, lse = _with_sinks(out, lse, sink_logits)
        out = out.to(q.dtype)
    if update_scores:
        _update_scores(
            state, layer, q, key, lse, rows, starts, extend_lens, prefix_lens, max_extend, max_prefix, sm_scale,
            logit_cap, shared_scores or {}, observe_from, observe_every, reduce,
        )  # fmt: skip
    return out, lse


def _join_tiers(
    state: PageState, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, given: tuple[Any, ...],
    common: dict[str, Any], grid: tuple[int, int, int], kind: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The attention to new tokens, which lie in the pages too, joined with that to the earlier ones, tier by tier;
    the output is a tensor of ``kind``."""
    *upper, last = _constants(*_shape(state))
    lse_of_all = torch.empty_like(lse)
    for tier in upper:
        target = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        paged_kernel[grid](q, target, lse_of_all, out, lse, *given, 1, 0, **tier, **common)
        out, lse = target, lse_of_all
    joined = torch.empty_like(out, dtype=kind)
    paged_kernel[grid](q, joined, lse_of_all, out, lse, *given, 1, 0, **last, **common)
    return joined, lse_of_all


def _join_parts(
    state: PageState, q: torch.Tensor, outs: torch.Tensor, lses: torch.Tensor, given: tuple[Any, ...],
    common: dict[str, Any], grid: tuple[int, int, int], splits: int, kind: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The attention to new tokens, which lie in no page and are the first of the parts, joined with that to the pages,
    whose tiles ``splits`` programs share; the output is a tensor of ``kind``."""
    (tiles, heads, batch), count = grid, lses[0].numel()
    for tier in _constants(*_shape(state)):
        at = 1 + tier["TIER"] * splits
        paged_kernel[(tiles, heads * splits, batch)](
            q, outs[at], lses[at], outs, lses, *given, splits, count, **tier, **common
        )
    joined = torch.empty_like(outs[0], dtype=kind)
    merge_kernel[(triton.cdiv(count, 4),)](
        joined, lses[0], outs, lses, count, len(outs), DV=state.fmt.v_head_dim, R=4, num_warps=4
    )
    return joined, lses[0]


def _splits(grid: tuple[int, int, int], device: torch.device) -> int:
    """Programs that share a head's pages, for a pass of a few new tokens a request: the ``grid`` alone would leave most
    of the device idle."""
    return max(1, min(MOST_SPLITS, 4 * processors_of(device) // math.prod(grid)))


def _with_sinks(out: torch.Tensor, lse: torch.Tensor, sink_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp with a logit more in each query head's softmax, which has no value."""
    with_sinks = torch.logaddexp2(lse, sink_logits.float() * math.log2(math.e))
    return out * (lse - with_sinks).exp2_().unsqueeze(2), with_sinks


def _update_scores(
    state: PageState, layer: int, q: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor,
    starts: torch.Tensor, extend_lens: torch.Tensor, prefix_lens: torch.Tensor, max_extend: int, max_prefix: int,
    sm_scale: float, logit_cap: float, shared_scores: dict[int, torch.Tensor], observe_from: torch.Tensor | None,
    observe_every: int | torch.Tensor, reduce: str,
) -> None:  # fmt: skip
    lens = (rows, starts, extend_lens, prefix_lens)
    rule: dict[str, Any] = {"observe_from": observe_from, "observe_every": observe_every, "reduce": reduce}
    if max_prefix:
        prepare_score_pages(state, q, *lens, max_prefix, sm_scale, logit_cap, shared_scores, **rule)(layer, q, lse)
    prepare_score_new(state, q, key, lse, *lens, max_extend, sm_scale, logit_cap, **rule)(layer, q, key, lse)


def _scored(
    state: PageState, q: torch.Tensor, extend_lens: torch.Tensor, logit_cap: float,
    observe_from: torch.Tensor | None, observe_every: int | torch.Tensor, reduce: str,
) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:  # fmt: skip
    """``since`` and ``every`` of the kernels of scores, and their compile-time constants."""
    observers, known = _observers(extend_lens, observe_from, observe_every)
    shape = {"G": q.shape[1] // state.num_heads, "HAS_CAP": logit_cap > 0, "MEAN": reduce == "mean"}
    return observers, {**shape, **known}


def _observers(
    extend_lens: torch.Tensor, observe_from: torch.Tensor | None, observe_every: int | torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, bool]]:
    """``since`` and ``every``, [B], and whether there are any."""
    since = extend_lens if observe_from is None else observe_from
    some = isinstance(observe_every, torch.Tensor) or observe_every > 0
    assert since.shape == extend_lens.shape and (not some or observe_from is not None)
    every = observe_every if isinstance(observe_every, torch.Tensor) else torch.full_like(extend_lens, observe_every)
    assert every.shape == extend_lens.shape
    return (since, every), {"WINDOWED": observe_from is not None, "SAMPLED": some}


def prepare_score_pages(
    state: PageState, q: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, extend_lens: torch.Tensor,
    prefix_lens: torch.Tensor, max_prefix: int, sm_scale: float, logit_cap: float, shared_scores: dict[int,
    torch.Tensor], *, observe_from: torch.Tensor | None, observe_every: int | torch.Tensor, reduce: str,
) -> Callable[[int, torch.Tensor, torch.Tensor], None]:  # fmt: skip
    """A function that gives ``extend_attention``'s scores of tokens in pages in a layer. It takes ``q`` of the form of
    this one and ``lse``, [tokens, Hq] float32, base 2, of the queries' logits with keys as they are stored."""
    heads, batch = state.num_heads, rows.shape[0]
    assert q.is_contiguous()
    observers, common = _scored(state, q, extend_lens, logit_cap, observe_from, observe_every, reduce)
    tables = (
        state.pages, state.page_table, state.range_lo, state.range_hi, state.row_blocks, state.entries, state.own_entry,
        state.write_slot,
    )  # fmt: skip
    launches = []
    for tier in _constants(*_shape(state))[: state.fmt.scored]:
        programs = min(64, triton.cdiv(max_prefix, tier["N"]))
        for number, scores in [(None, None), *shared_scores.items()]:
            length = q.shape[1] if scores is None else scores.shape[-1]
            launch = Launch(
                page_scores_kernel,
                (batch if number is None else 1, heads, programs),
                (
                    None, None, starts, extend_lens, prefix_lens, *observers, rows, *tables, None, length, number or 0,
                    None, sm_scale, logit_cap,
                ),
                dict(M=SCORE_QUERIES, SHARED=number is not None, **tier, **common, num_warps=2, num_stages=2),
            )  # fmt: skip
            launches.append((launch, scores))

    def score_again(layer: int, q: torch.Tensor, lse: torch.Tensor) -> None:
        assert lse.is_contiguous()
        for launch, scores in launches:
            launch(q=q, lse=lse, shared_scores=lse if scores is None else scores, layer=layer)

    return score_again


def prepare_score_new(
    state: PageState, q: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor,
    extend_lens: torch.Tensor, prefix_lens: torch.Tensor, max_extend: int, sm_scale: float, logit_cap: float,
    *, observe_from: torch.Tensor | None, observe_every: int | torch.Tensor, reduce: str, lse_unit: float = 1.0,
) -> Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]:  # fmt: skip
    """What gives ``extend_attention``'s scores of new tokens in a layer, from ``q``, ``key`` and ``lse`` of the form of
    these. ``lse``: [tokens, Hq] float32 of any strides, the log-sum-exp of what they give; ``lse_unit`` times it is
    base 2."""
    heads, batch = state.num_heads, rows.shape[0]
    observers, common = _scored(state, q, extend_lens, logit_cap, observe_from, observe_every, reduce)
    tile = NEW_KEYS if q.shape[2] <= 128 else NEW_KEYS // 2
    split = 1 if common["MEAN"] else common["G"]  # a mean is summed in one order
    launch = Launch(
        new_scores_kernel,
        (batch * heads * split * -(-max_extend // tile),),
        (
            None, q.stride(0), q.stride(1), None, key.stride(0), key.stride(1), None, *lse.stride(), lse_unit, starts,
            extend_lens, prefix_lens, *observers, rows, batch, state.write_slot, state.own_entry, state.pages,
            state.page_table, state.row_blocks, None, sm_scale, logit_cap,
        ),
        {
            **_score_constants(*_shape(state)), **common, "SPLIT": split, "M": NEW_QUERIES, "N": tile, "num_warps": 4,
            "num_stages": 2,
        },
    )  # fmt: skip

    def score_again(layer: int, q: torch.Tensor, key: torch.Tensor, lse: torch.Tensor) -> None:
        launch(q=q, key=key, lse=lse, layer=layer)

    return score_again


def prepare_stored_sums(
    state: PageState, q: torch.Tensor, keys: torch.Tensor, lse: torch.Tensor, starts: torch.Tensor,
    extend_lens: torch.Tensor, prefix_lens: torch.Tensor, first: torch.Tensor, into: torch.Tensor, most: int,
    sm_scale: float, logit_cap: float, *, observe_from: torch.Tensor | None, observe_every: int | torch.Tensor,
    reduce: str, lse_unit: float = 1.0,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None]:  # fmt: skip
    """A function of ``q``, ``keys`` and ``lse`` of the form of these, ``sums`` and ``first_head``. It fills the rows of
    ``sums`` that are of the heads of ``keys``: what stored tokens receive from new ones that observe.

    Args:
        q: [tokens, Hq, head_dim]. keys: [all tokens, n, head_dim], of stored tokens and the new ones behind them, of
            the ``n`` KV heads from ``first_head`` on: not rotated, means added. first: [B], the first token of a
            request that counts, and ``most`` of one after it that do. into: [B], a request's first place.
        lse, lse_unit: as for ``prepare_score_new``. sums: [H, all tokens] float32; others' places stay.
    """
    observers, common = _scored(state, q, extend_lens, logit_cap, observe_from, observe_every, reduce)
    total, heads, dim = keys.shape
    assert keys.is_contiguous() and q.stride(2) == 1 and into.shape == extend_lens.shape
    batch, tile = into.shape[0], NEW_KEYS if dim <= 128 else NEW_KEYS // 2
    launch = Launch(
        stored_sums_kernel,
        (batch * heads * triton.cdiv(most, tile),),
        (
            None, q.stride(0), q.stride(1), None, None, *lse.stride(), lse_unit, starts, extend_lens, prefix_lens,
            *observers, first, into, batch, heads, None, total, None, sm_scale, logit_cap,
        ),
        dict(
            D=dim, M=STORED_QUERIES if dim <= 128 else NEW_QUERIES, N=tile, ASM=not INTERPRETED, **common, num_warps=4,
            num_stages=2,
        ),
    )  # fmt: skip

    def sum_again(
        q: torch.Tensor, keys: torch.Tensor, lse: torch.Tensor, sums: torch.Tensor, first_head: int
    ) -> None:  # fmt: skip
        assert sums.is_contiguous() and sums.shape == (state.num_heads, total)
        launch(q=q, keys=keys, lse=lse, sums=sums, first_head=first_head)

    return sum_again


def prepare_fold_sums(
    state: PageState, rows: torch.Tensor, extend_lens: torch.Tensor, prefix_lens: torch.Tensor, into: torch.Tensor,
    total: int, max_prefix: int, shared_scores: dict[int, torch.Tensor], *, observe_from: torch.Tensor | None,
    observe_every: int | torch.Tensor,
) -> Callable[[int, torch.Tensor], None]:  # fmt: skip
    """A function that takes ``sums`` [H, ``total``] of a layer, as ``prepare_stored_sums`` fills them, into the scores
    of stored tokens: those that ``extend_attention`` would give."""
    observers, known = _observers(extend_lens, observe_from, observe_every)
    tables = (
        state.pages, state.page_table, state.range_lo, state.range_hi, state.row_blocks, state.entries, state.own_entry,
        state.write_slot,
    )  # fmt: skip
    names = ("TIER", "TIERS", "TOKENS", "SCORES", "POSITIONS", "PAGE_BYTES", "MAX_BLOCKS", "L", "H", "N")
    launches = []
    for tier in _constants(*_shape(state))[: state.fmt.scored]:
        programs = min(FOLD_PROGRAMS, triton.cdiv(max_prefix, tier["N"]))
        for number, scores in [(None, None), *shared_scores.items()]:
            launch = Launch(
                fold_sums_kernel,
                (len(rows) if number is None else 1, state.num_heads, programs),
                (
                    None, total, into, extend_lens, prefix_lens, *observers, rows, *tables, None,
                    1 if scores is None else scores.shape[-1], number or 0, None,
                ),
                {
                    **{name: tier[name] for name in names}, "SHARED": number is not None,
                    **known, "num_warps": 1,
                },
            )  # fmt: skip
            launches.append((launch, scores))

    def fold_again(layer: int, sums: torch.Tensor) -> None:
        for launch, scores in launches:
            launch(sums=sums, shared_scores=sums if scores is None else scores, layer=layer)

    return fold_again
