"""Quantisation and bit packing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_diffkv.kernels.quantize.reference import (
    CUTS,
    FIRST,
    LEAST,
    NEW,
    NEW_CUT,
    UNITS,
    chosen_ends,
    cuts,
    dequantize,
    first_cut,
    in_units,
    most_gain,
    pack,
    planes,
    quantize,
    source_of,
    unpack,
)
from sglang_diffkv.layout.page_format import QUANTISED_BITS, RAW_BITS

BITS = list(QUANTISED_BITS)
SOURCES = (NEW, RAW_BITS)
"""What numbers were stored in before: their ends are cut alike, or each vector's are looked for."""
SLICES = {3: [2, 1], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1]}
DIMS = [64, 96, 128, 256]
HALF_MAX = torch.finfo(torch.float16).max
TINY = 2.0**-24
"""Smallest positive fp16 number."""


def error_bound(x: torch.Tensor, bits: int, source_bits: int) -> torch.Tensor:
    """Half a step, what clipping and the gain may move, and what rounding the scale and the zero point to fp16 adds."""
    x = x.double()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    levels = 2**bits - 1
    scale_error = (high - low) / levels * 2**-11 + TINY
    zero_error = torch.maximum(low.abs(), high.abs()) * 2**-11 + TINY
    cut = cuts(bits, source_bits)[-1] / UNITS
    wider = most_gain(bits, source_bits) if cut else 1.0
    most = (wider / levels / 2 + cut * wider) * (high - low)
    return most + scale_error * (levels + 1) + zero_error


def check_error(x: torch.Tensor, bits: int, source_bits: int) -> torch.Tensor:
    packed, meta = quantize(x, bits, source_bits)
    assert packed.dtype == torch.uint8 and packed.shape == (*x.shape[:-1], x.shape[-1] * bits // 8)
    assert meta.dtype == torch.float16 and meta.shape == (*x.shape[:-1], 2) and meta.isfinite().all()
    back = dequantize(packed, meta, bits)
    assert back.dtype == torch.float32 and back.shape == x.shape
    assert ((back.double() - x.double()).abs() <= error_bound(x, bits, source_bits) * (1 + 1e-5)).all()
    return back


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_pack_round_trip(bits, dim):
    codes = torch.randint(0, 2**bits, (3, 5, dim), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, 5, dim * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)
    assert torch.equal(pack(unpack(packed, bits), bits), packed)


@pytest.mark.parametrize("bits", BITS)
def test_a_plane_is_a_run_of_elements(bits):
    """In each slice of a code, of which there is one where the bits divide 8."""
    codes = torch.randint(0, 2**bits, (96,), dtype=torch.uint8)
    packed = pack(codes, bits)
    begin, low = 0, bits
    for width in SLICES.get(bits, [bits]):
        size, low = 96 * width // 8, low - width
        for element in range(96):
            plane, byte = divmod(element, size)
            digit = int(packed[begin + byte]) >> (plane * width) & (2**width - 1)
            assert digit == int(codes[element]) >> low & (2**width - 1)
        begin += size
    assert (begin, low) == (len(packed), 0)
    size = 96 * min(SLICES.get(bits, [bits])) // 8
    for group, part in enumerate(planes(packed, bits)):
        assert torch.equal(part, codes[group * size : (group + 1) * size])


def test_pack_does_not_change_its_input():
    for bits in BITS:
        codes = torch.randint(0, 2**bits, (64,), dtype=torch.uint8)
        before = codes.clone()
        pack(codes, bits)[:] = 0
        assert torch.equal(codes, before)


def test_pack_refuses_a_ragged_vector():
    with pytest.raises(ValueError, match="do not fill"):
        pack(torch.zeros(7, dtype=torch.uint8), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("source_bits", SOURCES)
def test_error_bound(source_bits, bits, dtype):
    generator = torch.Generator().manual_seed(bits)
    for scale, shift in [(1, 0), (50, 0), (1, 40), (0.01, -3), (1e-3, 0), (300, 5000)]:
        x = (torch.randn(64, 128, generator=generator) * scale + shift).to(dtype)
        check_error(x, bits, source_bits)


NUMBERS = st.lists(st.floats(-65504, 65504, width=32), min_size=8, max_size=8)


@given(NUMBERS, st.sampled_from(BITS), st.sampled_from(SOURCES))
@settings(deadline=None, max_examples=3 * settings.default.max_examples)
def test_error_bound_of_any_vector(numbers, bits, source_bits):
    check_error(torch.tensor(numbers), bits, source_bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("source_bits", SOURCES)
def test_constant_vectors(source_bits, bits):
    """A constant is stored as its fp16 value, which for bf16 input of ordinary size is exact."""
    constants = torch.tensor([0.0, -0.0, 1.0, -3.140625, 1e-3, 1e-7, 300.0, -65280.0]).bfloat16()
    back = check_error(constants.unsqueeze(1).expand(-1, 64), bits, source_bits)
    assert torch.equal(back, constants.half().float().unsqueeze(1).expand(-1, 64))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("source_bits", SOURCES)
def test_extremes_are_reached(source_bits, bits):
    levels, most = 2**bits - 1, cuts(bits, source_bits)[-1] / UNITS
    x = torch.linspace(0, levels, 64)
    packed, meta = quantize(x, bits, source_bits)
    codes = unpack(packed, bits)
    assert (int(codes.min()), int(codes.max())) == (0, levels)
    scale, zero = meta.tolist()
    assert 1 - 2 * most <= scale <= 1
    assert zero + scale * levels / 2 == pytest.approx(levels / 2, abs=levels * most / 2 + 1e-3)


@pytest.mark.parametrize("shift", [0.0, 3.0])
@pytest.mark.parametrize(("bits", "source_bits"), [*((b, RAW_BITS) for b in range(1, 6)), (1, NEW), (2, NEW), (3, NEW)])
def test_clipping_makes_no_vector_shorter(bits, source_bits, shift):
    """In its own direction from the middle of its codes; a mean over many vectors keeps what they have in common."""
    x = torch.randn(400, 128, generator=torch.Generator().manual_seed(bits)) + shift
    packed, meta = quantize(x, bits, source_bits)
    scale, zero = meta.float().split(1, -1)
    middle = zero + scale * (2**bits - 1) / 2
    away, stored = x - middle, dequantize(packed, meta, bits) - middle
    assert torch.allclose((away * stored).sum(-1), away.square().sum(-1), rtol=3e-3)
    common = torch.randn(128, generator=torch.Generator().manual_seed(9))
    many = common + torch.randn(4000, 128, generator=torch.Generator().manual_seed(8))
    mean = dequantize(*quantize(many, bits, source_bits), bits).mean(0)
    assert float(mean @ common / (many.mean(0) @ common)) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e-8, 3e-6, 1e-5])
@pytest.mark.parametrize("source_bits", SOURCES)
def test_tiny_values_stay_tiny(source_bits, bits, size):
    """Steps below what fp16 resolves: the result is off by no more than the fp16 grid."""
    x = torch.randn(32, 64) * size
    back = check_error(x, bits, source_bits)
    assert back.abs().max() <= 2 * x.abs().max() + 2 ** (bits + 1) * TINY


@pytest.mark.parametrize("size", [1e-38, LEAST / 3, LEAST * 1.1, LEAST * 40, 1e30, 9e37, 3e38])
def test_units_are_numbers_of_any_range(size):
    """From 0 to ``UNITS``, or all 0 where the range counts for none."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3)).clamp(-1, 1) * size / 2
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    units, known = in_units(x, low, high)
    assert torch.equal(units.amin(-1, keepdim=True), torch.zeros_like(low))
    assert torch.equal(units.amax(-1, keepdim=True), known * float(UNITS))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e5, 1e30, 3e38])
@pytest.mark.parametrize("source_bits", SOURCES)
def test_huge_values_saturate(source_bits, bits, size):
    """Beyond fp16's range codes and metadata stay finite and keep the order of the elements."""
    x = torch.tensor([-1.0, -0.5, 0.0, 0.25, 1.0]).repeat_interleave(16)[:72] * size
    packed, meta = quantize(x.bfloat16(), bits, source_bits)
    assert meta.isfinite().all() and (meta[..., 0] >= 0).all()
    assert (dequantize(packed, meta, bits).diff() >= 0).all()
    assert bits == 1 or (meta[..., 1] == -HALF_MAX).all()  # a single step covers no more than half of fp16's range


@pytest.mark.parametrize("bits", BITS)
def test_requantising_is_stable(bits):
    """Quantising a dequantised vector again moves it by no more than the rounding of its metadata."""
    x = torch.randn(64, 64)
    once = dequantize(*quantize(x, bits), bits)
    twice = dequantize(*quantize(once, bits, bits), bits)
    assert (once - twice).abs().max() <= 2**-9 * x.abs().max()


@pytest.mark.parametrize(
    ("bits", "most", "most_new"), [(5, 0.95, 1), (4, 0.9, 1), (3, 0.75, 0.85), (2, 0.55, 0.65), (1, 0.65, 0.65)]
)
def test_few_codes_gain_from_clipping(bits, most, most_new):
    """The mean square error of normal numbers, the gain included, against codes from extreme to extreme: of what goes
    down to a lower tier, and of what is new."""
    x = torch.randn(200, 128, generator=torch.Generator().manual_seed(bits))

    def error(source_bits: int) -> float:
        return float((dequantize(*quantize(x, bits, source_bits), bits) - x).square().mean())

    assert cuts(bits, bits) == (0,)
    assert error(RAW_BITS) < most * error(bits)
    assert error(NEW) <= most_new * error(bits)
    assert (NEW_CUT[bits] > 0) == (error(NEW) < error(bits))


def test_only_what_is_rotated_chooses():
    """Of keys that are not, one channel may be far from the others, and all tokens would lose of it alike."""
    keys = torch.randn(400, 128, generator=torch.Generator().manual_seed(5))
    keys[:, 7] += 20
    channel = {}
    for turned in (False, True):
        source = source_of(4, 8, turned=turned)
        stored = dequantize(*quantize(keys, 4, source), 4)
        channel[turned] = float((stored - keys)[:, 7].mean().abs())
    assert source_of(4, 8, turned=False) == NEW and source_of(4, 4, turned=False) == source_of(4, 4, turned=True) == 4
    assert channel[False] < 0.05 < 0.2 < channel[True]


def cut_error(x, bits, below, above):
    """[..., 1] sums of squared errors in float64 of codes whose ends lie so many units inside the extremes."""
    x = x.double()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    start, end = low + (high - low) * below / UNITS, high - (high - low) * above / UNITS
    step = (end - start) / (2**bits - 1)
    stored = start + ((x - start) / step).round().clamp(0, 2**bits - 1) * step
    return (stored - x).square().sum(-1, keepdim=True)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", FIRST)
def test_each_end_is_cut_where_the_error_is_least(bits, dim):
    """First the lower, then the upper, of a symmetric vector and of one with a long tail: against float64."""
    generator = torch.Generator().manual_seed(dim + bits)
    normal, first = torch.randn(200, dim, generator=generator), first_cut(bits, RAW_BITS)
    for x in (normal, normal.exp(), -normal.exp(), 40 + normal):
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        below, above = chosen_ends(in_units(x, low, high)[0], bits, RAW_BITS)
        for found, tried in (
            (cut_error(x, bits, below, first), [cut_error(x, bits, cut, first) for cut in CUTS[bits]]),
            (cut_error(x, bits, below, above), [cut_error(x, bits, below, cut) for cut in CUTS[bits]]),
        ):
            more = found / torch.stack(tried).amin(0)
            assert more.mean() < 1.01 and more.max() < 1.25, "but for what units round"
        assert len(set(below.flatten().tolist())) > 1 and len(set(above.flatten().tolist())) > 1
    assert below.mean() == pytest.approx(above.mean(), abs=40), "neither end comes first"


@pytest.mark.parametrize("bits", FIRST)
def test_errors_are_whole_numbers_that_float32_holds(bits):
    """Else two orders of summing might choose two ends. The worst: all elements lie where most is clipped."""
    levels = 2**bits - 1
    most = max(CUTS[bits][-1], UNITS / levels / 2 + 1)
    assert most**2 * max(DIMS) < 2**24
    for below in (*CUTS[bits], NEW_CUT[bits]):
        for above in (*CUTS[bits], NEW_CUT[bits]):
            width = UNITS - 1 - below - above
            assert width % 2 and levels % 2, "so no unit lies midway between two codes, and no code between two units"


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("source_bits", SOURCES)
def test_vectors_do_not_influence_each_other(source_bits, bits):
    x = torch.randn(4, 6, 64)
    packed, meta = quantize(x, bits, source_bits)
    for index in [(0, 0), (3, 5), (2, 1)]:
        alone, alone_meta = quantize(x[index], bits, source_bits)
        assert torch.equal(alone, packed[index]) and torch.equal(alone_meta, meta[index])
