"""The page format: segments, byte counts, tiers that are refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.kernels.allocate.reference import add_own_pages
from sglang_diffkv.kernels.measure.reference import measure
from sglang_diffkv.kernels.table import put_entries, row_table, table_index
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.page_format import (
    PADDING_STEPS,
    SUPPORTED_HEAD_DIMS,
    PageFormat,
    Tier,
    TierLayout,
    position_bytes_for,
)
from sglang_diffkv.layout.state import PageState, Positions
from tests.helpers import PAIR, make_format

NAMES = ["BF16", "K7V5", "K6V3", "K3V2", *(f"K{k}V{v}" for k in (8, 4, 2, 1) for v in (8, 4, 2, 1))]
DIMS = list(itertools.product(SUPPORTED_HEAD_DIMS, repeat=2))


def segments(layout: TierLayout) -> list[tuple[int, int]]:
    """Start and end byte of the segments of a page, in memory order."""
    meta = 0 if layout.tier.is_raw else 4
    scores = (layout.position_offset, 0) if layout.score_offset is None else (layout.score_offset, 4)
    sizes = [
        (layout.key_offset, layout.key_bytes),
        (layout.value_offset, layout.value_bytes),
        (layout.key_meta_offset, meta),
        (layout.value_meta_offset, meta),
        scores,
        (layout.position_offset, layout.position_bytes),
    ]
    return [(at, at + layout.tokens * size) for at, size in sizes]


@pytest.mark.parametrize("page_tokens", [4, 5, 7, 32, 33, 256])
@pytest.mark.parametrize("name", NAMES)
def test_fields_are_disjoint_aligned_and_inside(name, page_tokens):
    for (head_dim, v_head_dim), scored, position_bytes in itertools.product(DIMS, (0, 1), (2, 4)):
        fmt = PageFormat(head_dim, v_head_dim, (Tier.parse(name),), page_tokens, scored, position_bytes)
        layout = fmt.layouts[0]
        cuts = segments(layout)
        assert layout.tokens == page_tokens and (layout.score_offset is None) == (not scored)
        assert sum(end - start for start, end in cuts) == page_tokens * layout.token_bytes
        assert layout.token_bytes == layout.tier.token_bytes(head_dim, v_head_dim, 4 * scored, position_bytes)
        assert cuts[0][0] == 0
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(cuts))
        assert cuts[-1][1] == layout.end <= fmt.page_bytes
        assert layout.key_offset % 16 == layout.value_offset % 16 == layout.key_meta_offset % 16 == 0
        assert all(start % 4 == 0 for start, _ in cuts[2:])
        assert fmt.page_bytes % 16 == 0
        payload = head_dim * layout.tier.k_bits + v_head_dim * layout.tier.v_bits
        assert (layout.key_bytes + layout.value_bytes) * 8 == payload


@pytest.mark.parametrize(("scored", "position_bytes"), [(2, 4), (1, 4), (1, 2), (0, 2)])
@pytest.mark.parametrize("page_tokens", [4, 5, 32, 256])
def test_lower_tier_fills_the_same_page(page_tokens, scored, position_bytes):
    given = {"scored": scored, "position_bytes": position_bytes}
    step = 2 if position_bytes == 2 else 1
    for (head_dim, v_head_dim), (high, low) in itertools.product(DIMS, itertools.permutations(NAMES, 2)):
        tiers = Tier.parse(high), Tier.parse(low)
        sizes = [t.token_bytes(head_dim, v_head_dim) for t in tiers]
        if sizes[0] <= sizes[1]:
            with pytest.raises(ValueError, match="ever fewer bytes"):
                PageFormat(head_dim, v_head_dim, tiers, page_tokens, **given)
            continue
        fmt = PageFormat(head_dim, v_head_dim, tiers, page_tokens, **given)
        layout = fmt.low
        assert fmt.high.tokens == page_tokens <= layout.tokens
        assert fmt.high.end <= fmt.page_bytes <= fmt.high.end + 16 * (PADDING_STEPS + 1)
        assert layout.end <= fmt.page_bytes
        assert position_bytes == 4 or layout.tokens in (layout.tokens // 2 * 2, page_tokens)
        assert layout.position_offset % 4 == 0
        whole = 1 << (page_tokens * sizes[0] // sizes[1] - 1).bit_length()
        assert layout.tokens <= whole, "a larger tile than with all fields"
        kind = {"scored": scored > 1, "position_bytes": position_bytes}
        fuller = TierLayout.build(tiers[1], layout.tokens + step, head_dim, v_head_dim, **kind)
        assert fuller.end > fmt.page_bytes or fuller.tokens > whole, "more tokens would fit"


def test_bytes_of_a_token():
    assert make_format(head_dim=128, v_head_dim=128).bf16_token_bytes == 512
    assert Tier(8, 4).token_bytes(128, 128) == 208
    assert Tier(4, 2).token_bytes(128, 128) == 112
    assert Tier(6, 3).token_bytes(128, 128) == 96 + 48 + 16
    assert Tier(7, 5).token_bytes(96, 64) == 84 + 40 + 16
    assert Tier(16, 16).token_bytes(128, 128) == 520
    assert Tier(8, 4).token_bytes(256, 64) == 256 + 32 + 16
    assert Tier(4, 2).token_bytes(128, 128, score_bytes=0, position_bytes=2) == 64 + 32 + 8 + 2


@pytest.mark.parametrize(
    ("head_dim", "scored", "position_bytes", "page_bytes", "tokens", "token_bytes"),
    [
        (128, 2, 4, 32 * 208, [32, 59], [208, 112]),
        (128, 1, 4, 32 * 208, [32, 61], [208, 108]),
        (128, 2, 2, 32 * 206 + 16, [32, 60], [206, 110]),
        (128, 1, 2, 32 * 206, [32, 62], [206, 106]),
        (128, 0, 2, 32 * 202, [32, 60], [202, 106]),
        (64, 2, 4, 32 * 112, [32, 56], [112, 64]),
        (64, 1, 2, 32 * 110, [32, 60], [110, 58]),
        (64, 0, 2, 32 * 106, [32, 58], [106, 58]),
    ],
)
def test_default_page(head_dim, scored, position_bytes, page_bytes, tokens, token_bytes):
    """Sizes by hand, and no more slots than a tile of 64."""
    fmt = make_format(PAIR, head_dim, head_dim, 32, scored, position_bytes)
    assert fmt.page_bytes == page_bytes
    assert [x.tokens for x in fmt.layouts] == tokens
    assert [x.token_bytes for x in fmt.layouts] == token_bytes


def test_the_longest_sequence_decides_how_positions_are_stored():
    assert [position_bytes_for(x) for x in (1, 65535, 65536, 131072)] == [2, 2, 4, 4]
    assert make_format(position_bytes=2).max_tokens == 65535 < make_format(position_bytes=4).max_tokens


@pytest.mark.parametrize("name", ["", "K8", "K8V", "V4K8", "K16V4", "K8V16", "K9V4", "K8V0", "K8V4 ", "FP8", "bf 16"])
def test_impossible_tiers_are_refused(name):
    with pytest.raises(ValueError, match="impossible tier"):
        Tier.parse(name)


@pytest.mark.parametrize("name", NAMES)
def test_names_parse_to_themselves(name):
    assert Tier.parse(name).name == Tier.parse(name.lower()).name == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 80}, "head_dim 80"),
        ({"v_head_dim": 512}, "v_head_dim 512"),
        ({"tiers": ()}, "0 tiers"),
        ({"tiers": ("BF16", "K8V4", "K4V4", "K4V2", "K4V1")}, "5 tiers"),
        ({"tiers": ("BF16", "K8V4", "K8V4")}, "ever fewer bytes"),
        ({"tiers": ("K4V2", "K8V4")}, "ever fewer bytes"),
        ({"tiers": ("K8V4", "K8V4")}, "ever fewer bytes"),
        ({"tiers": ("K8V4", "K4V8")}, "ever fewer bytes"),
        ({"page_tokens": 3}, "page_tokens 3"),
        ({"page_tokens": 257}, "page_tokens 257"),
        ({"scored": 5}, "scored 5"),
        ({"position_bytes": 3}, "position_bytes 3"),
    ],
)
def test_impossible_formats_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_format(**{"head_dim": 128, "v_head_dim": 128, **changes})


@pytest.mark.parametrize("position_bytes", [2, 4])
@pytest.mark.parametrize("tiers", [("K8V4", "K4V2"), ("BF16", "K2V1"), ("K4V4",), ("K6V3", "K3V2")], ids="-".join)
def test_views_cover_the_segments(tiers, position_bytes):
    """Writing through the views of ``TierView`` touches exactly the bytes that the layout names."""
    fmt = make_format(tiers, 96, 64, 7, 1, position_bytes)
    for tier, layout in enumerate(fmt.layouts):
        state = PageState.create(fmt, num_pages=2, num_rows=1, num_layers=1, num_heads=1, max_blocks=1, num_blocks=2)
        view = state.tiers[tier]
        fields = [view.keys, view.values, view.key_meta, view.value_meta, view.scores, view.positions.stored]
        for field, (start, end) in zip(fields, segments(layout)):
            state.pages.zero_()
            if field is None:
                assert start == end
                continue
            field[1] = torch.ones_like(field[1]) if field.dtype.is_floating_point else -1
            touched = state.pages[1].nonzero().squeeze(1)
            assert touched.numel() and start <= int(touched.min()) and int(touched.max()) < end
            assert field[1].nbytes == end - start
            assert not state.pages[0].any() and not state.pages[2].any()


@pytest.mark.parametrize("kind", [torch.int16, torch.int32])
def test_positions_read_as_they_were_written(kind):
    """All of them, those above the largest int16 too, and -1."""
    every = torch.cat([torch.arange(65535), torch.tensor([-1, -1])]).view(1, -1).int()
    positions = Positions(torch.zeros(every.shape, dtype=kind))
    positions[:] = every
    assert positions[:].dtype == torch.int32 and torch.equal(positions[:], every)
    positions[0, 40_000] = -1
    positions[0, torch.tensor([7, 8])] = torch.tensor([65534, 32768])
    assert positions[0, torch.tensor([6, 7, 8, 40_000])].tolist() == [6, 65534, 32768, -1]


@pytest.mark.parametrize(("longest", "dtype"), [(32_767, torch.int16), (65_535, torch.int16), (65_536, torch.int32)])
def test_a_range_in_the_page_table_holds_the_last_position(longest: int, dtype: torch.dtype) -> None:
    """The end of a page that its owner wrote is above the last position, and any end is read as it was written."""
    fmt = DiffKVConfig().page_format(64, 64, longest)
    state = PageState.of(Geometry(fmt, 1, 1, num_pages=6, num_rows=2, num_segments=1, max_tokens=longest))
    assert state.range_lo.dtype == state.range_hi.dtype == dtype
    table = (state.page_table, state.range_lo, state.range_hi)
    assert fmt.entry_bytes == sum(x.itemsize for x in table)
    state.row_blocks[1, 0], rows, last = 1, torch.tensor([1]), longest - 1
    add_own_pages(state, rows, 0, torch.tensor([[[2]]]), 2)
    page, lo, hi = row_table(state, rows, 0, 2)
    assert lo.dtype == hi.dtype == torch.int32 and (lo == 0).all() and (hi > last).all()
    state.tiers[0].positions[page.flatten(), 0] = torch.tensor([last - 1, last])
    asked = torch.tensor([last]), torch.tensor([longest])
    assert measure(state, rows, *asked)[0, 0, 0].tolist() == [1, 0, 1]
    where = table_index(state, rows, 0, torch.tensor([[[[0, 1]]]])).flatten()
    put_entries(state, where, page.flatten(), torch.tensor([last - 1, last]), torch.tensor([last, longest]))
    _, lo, hi = row_table(state, rows, 0, 2)
    assert lo.flatten().tolist() == [last - 1, last] and hi.flatten().tolist() == [last, longest]
    assert measure(state, rows, *asked)[0, 0, 0].tolist() == [1, 0, 1]
