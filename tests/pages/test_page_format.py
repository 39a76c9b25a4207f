"""The page format: segments, byte counts, tiers that are refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from sglang_diffkv.mem_pool.page_format import SUPPORTED_HEAD_DIMS, PageFormat, Tier, TierLayout
from sglang_diffkv.mem_pool.state import PageState
from tests.helpers import make_format

NAMES = ["BF16", *(f"K{k}V{v}" for k in (8, 4, 2, 1) for v in (8, 4, 2, 1))]
DIMS = list(itertools.product(SUPPORTED_HEAD_DIMS, repeat=2))


def segments(layout: TierLayout) -> list[tuple[int, int]]:
    """Start and end byte of the segments of a page, in memory order."""
    meta = 0 if layout.tier.is_raw else 4
    sizes = [
        (layout.key_offset, layout.key_bytes),
        (layout.value_offset, layout.value_bytes),
        (layout.key_meta_offset, meta),
        (layout.value_meta_offset, meta),
        (layout.score_offset, 4),
        (layout.position_offset, 4),
    ]
    return [(at, at + layout.tokens * size) for at, size in sizes]


@pytest.mark.parametrize("page_tokens", [4, 5, 7, 32, 33, 256])
@pytest.mark.parametrize("name", NAMES)
def test_fields_are_disjoint_aligned_and_inside(name, page_tokens):
    for head_dim, v_head_dim in DIMS:
        fmt = PageFormat(head_dim, v_head_dim, (Tier.parse(name),), page_tokens)
        layout = fmt.layouts[0]
        cuts = segments(layout)
        assert layout.tokens >= page_tokens
        assert cuts[0][0] == 0
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(cuts))
        assert cuts[-1][1] == layout.end <= fmt.page_bytes
        assert layout.key_offset % 16 == layout.value_offset % 16 == layout.key_meta_offset % 16 == 0
        assert all(start % 4 == 0 for start, _ in cuts[2:])
        assert fmt.page_bytes % 16 == 0
        payload = head_dim * layout.tier.k_bits + v_head_dim * layout.tier.v_bits
        assert (layout.key_bytes + layout.value_bytes) * 8 == payload


@pytest.mark.parametrize("page_tokens", [4, 5, 32, 256])
def test_lower_tier_fills_the_same_page(page_tokens):
    for (head_dim, v_head_dim), (high, low) in itertools.product(DIMS, itertools.permutations(NAMES, 2)):
        tiers = Tier.parse(high), Tier.parse(low)
        sizes = [t.token_bytes(head_dim, v_head_dim) for t in tiers]
        if sizes[0] <= sizes[1]:
            with pytest.raises(ValueError, match="ever fewer bytes"):
                PageFormat(head_dim, v_head_dim, tiers, page_tokens)
            continue
        fmt = PageFormat(head_dim, v_head_dim, tiers, page_tokens)
        layout = fmt.low
        assert fmt.high.tokens >= page_tokens
        assert page_tokens <= layout.tokens <= fmt.page_bytes // sizes[1]
        assert layout.end <= fmt.page_bytes
        fuller = TierLayout.build(tiers[1], layout.tokens + 1, head_dim, v_head_dim)
        assert fuller.end > fmt.page_bytes, "one token more would fit"


def test_bytes_of_a_token():
    assert make_format(head_dim=128, v_head_dim=128).bf16_token_bytes == 512
    assert Tier(8, 4).token_bytes(128, 128) == 208
    assert Tier(4, 2).token_bytes(128, 128) == 112
    assert Tier(16, 16).token_bytes(128, 128) == 520
    assert Tier(8, 4).token_bytes(256, 64) == 256 + 32 + 16


def test_default_page():
    fmt = make_format(head_dim=128, v_head_dim=128, page_tokens=32)
    assert fmt.page_bytes == 32 * 208
    assert [x.tokens for x in fmt.layouts] == [32, 59]


@pytest.mark.parametrize("name", ["", "K8", "K8V", "V4K8", "K16V4", "K8V16", "K3V4", "K8V0", "K8V4 ", "FP8", "bf 16"])
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
    ],
)
def test_impossible_formats_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_format(**{"head_dim": 128, "v_head_dim": 128, **changes})


@pytest.mark.parametrize("tiers", [("K8V4", "K4V2"), ("BF16", "K2V1"), ("K4V4",)], ids="-".join)
def test_views_cover_the_segments(tiers):
    """Writing through the views of ``TierView`` touches exactly the bytes that the layout names."""
    fmt = make_format(tiers, 96, 64, 7)
    for tier, layout in enumerate(fmt.layouts):
        state = PageState.create(fmt, num_pages=2, num_rows=1, num_layers=1, num_heads=1, max_blocks=1, num_blocks=2)
        view = state.tiers[tier]
        fields = [view.keys, view.values, view.key_meta, view.value_meta, view.scores, view.positions]
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
