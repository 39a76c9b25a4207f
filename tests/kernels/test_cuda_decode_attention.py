"""The first pass of decode attention in CUDA C++ against the reference: on a GPU where there is one, else on a CPU, its
warp as coroutines (``kernels/cuda/warp_host.hpp``)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.kernels.cuda import host
from sglang_diffkv.kernels.cuda.source import CudaSource
from sglang_diffkv.kernels.decode_attention import cuda
from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.kernels.decode_attention.reference import decode_attention as reference
from sglang_diffkv.kernels.decode_attention.triton import FoundTokens, decode_attention
from sglang_diffkv.kernels.decode_attention.triton_workspace import DecodeConfig, DecodeWorkspace, tile_constants
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.ops.gpu import decode_obstacle
from tests.kernels.test_triton_decode_attention import WINDOW, check_against_reference, run_both
from tests.kernels.test_triton_sinks import CASES as SINK_CASES
from tests.kernels.test_triton_sinks import LARGEST, decode_with_a_sink, scores_beside_a_sink
from tests.kernels.triton_helpers import BF16, DEVICE, FOUR, add_prompt, clone_state, close, make_format, make_manager
from tests.policies import diffkv_policy

pytestmark = pytest.mark.skipif(
    cuda.missing() is not None if DEVICE == "cuda" else host.compiler() is None,
    reason="neither a Hopper GPU nor a C++ compiler is there",
)
full = pytest.mark.full

CASES = [
    # tiers, head_dim, v_head_dim, query heads of a KV head, programs
    ("K8V4 K4V2", 128, 128, 4, 8),
    pytest.param("K8V4 K4V2", 64, 64, 4, 13, marks=full),
    ("K8V4 K4V2", 128, 64, 7, 3),
    pytest.param("K8V4 K4V2", 64, 128, 8, 23, marks=full),
    pytest.param("K8V4 K4V2", 128, 128, 1, 3, marks=full),
    ("K8V2 K4V1", 128, 128, 3, 8),
    pytest.param("K8V8 K2V1", 128, 128, 2, 8, marks=full),
    (FOUR, 64, 64, 5, 93),
    pytest.param(FOUR, 128, 128, 8, 13, marks=full),
    pytest.param("K8V4 K4V4 K4V2", 64, 64, 2, 13, marks=full),
    ("K8V6 K5V4", 128, 128, 4, 8),
    ("K8V6 K6V4", 64, 64, 7, 5),
    ("K8V6 K5V3", 128, 128, 8, 13),
    ("K7V7 K6V5 K3V1", 128, 128, 3, 8),
    pytest.param("K8V6 K4V3", 128, 128, 2, 3, marks=full),
    pytest.param("K5V6 K5V4", 64, 64, 1, 8, marks=full),
    pytest.param("K8V5", 128, 128, 4, 8, marks=full),
    pytest.param("K7V6 K6V6", 64, 128, 5, 8, marks=full),
]


@pytest.mark.parametrize(("tiers", "dim", "v_dim", "group", "programs"), CASES)
def test_matches_reference(tiers, dim, v_dim, group, programs):
    manager = make_manager(make_format(tiers, dim, v_dim, page_tokens=8), window=WINDOW)
    check_against_reference(*run_both(manager, tiers, group, programs, 0, cuda=True))


@pytest.mark.cover(1)
@pytest.mark.parametrize("page_tokens", [5, pytest.param(16, marks=full), 33, pytest.param(64, marks=full)])
@pytest.mark.parametrize("position_bytes", [2, 4])
def test_sizes_of_pages(page_tokens, position_bytes):
    """Odd numbers of tokens, whose fields are aligned to 4 bytes; pages that end within 16 slots; 32-bit positions."""
    fmt = make_format("K8V4 K4V2", 64, page_tokens=page_tokens, position_bytes=position_bytes)
    manager = make_manager(fmt, window=WINDOW)
    check_against_reference(*run_both(manager, "K8V4 K4V2", 4, 5, 0, lengths=(157, 0, 9), cuda=True))


@pytest.mark.parametrize(
    "rule",
    [
        {"cap": 0.4},
        {"sinks": 2, "horizon": 5},
        {"reduce": "mean"},
        {"every": 61},
        {"every": 3, "horizon": 5},
        pytest.param({"cap": 3.0, "dtype": torch.float16}, marks=full),
    ],
)
@pytest.mark.parametrize("group", [4, pytest.param(6, marks=full)])
def test_rules_are_the_reference_s(rule, group):
    dtype = rule.get("dtype", BF16)
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=8), window=WINDOW, dtype=dtype)
    check_against_reference(*run_both(manager, "K8V4 K4V2", group, 8, 0, cuda=True, **rule))


@pytest.mark.cover(1)
@pytest.mark.parametrize("tiers", ["K8V4 K4V2", "K8V4"])
@pytest.mark.parametrize("attention_span", [1, 20, 61])
def test_what_is_out_of_reach_is_not_seen(tiers, attention_span):
    """A head whose tokens are all out of one program's reach has no weight there."""
    manager = make_manager(make_format(tiers, page_tokens=8), window=WINDOW)
    results, *_ = run_both(manager, tiers, 4, 13, 0, cuda=True, scores=False, attention_span=attention_span)
    for (out, lse), (ref_out, ref_lse) in results:
        for b in (0, 2):
            assert close(out[b], ref_out[b]) < 6e-3 and (lse[b] - ref_lse[b]).abs().max() < 5e-3


@pytest.mark.cover(1)
@pytest.mark.parametrize("score_low", [True, False])
@pytest.mark.parametrize("programs", [1, 3])
def test_many_pages_and_many_units(programs, score_low):
    """A program that walks more than 32 pages of a tier, looked up 32 at a time, and more than 32 tiers of heads."""
    fmt = replace(make_format("K8V4 K4V2", 64, page_tokens=4), scored=2 if score_low else 1)
    policy = diffkv_policy(1.0, 0.1 if score_low else 0.0, WINDOW)
    geometry = Geometry(fmt, 1, 2, 900, num_rows=14, num_segments=2, max_tokens=400)
    manager = PageManager(geometry, policy, dtype=BF16, device=DEVICE)
    manager.state.pages.view(torch.int16).fill_(0x7FFF)
    generator, state = torch.Generator().manual_seed(3), manager.state
    lengths = [300, 1, 2, 0, 3, 40, 1, 1, 17, 5, 1, 30]
    for row, count in enumerate(lengths, 1):
        add_prompt(manager, row, count, generator)
    batch = len(lengths)
    rows = torch.arange(1, batch + 2, device=DEVICE) % (batch + 1)
    seq_lens = torch.tensor([*lengths, 1], device=DEVICE)
    q = torch.randn(batch + 1, 8, 64, generator=generator).to(DEVICE, BF16)
    valid = torch.tensor([batch], dtype=torch.int32, device=DEVICE)
    config = DecodeConfig(programs=programs, cuda=True)
    workspace = DecodeWorkspace.create(state, batch + 1, 8, max_tokens=400, config=config)
    workspace.partial_out.fill_(float("nan"))
    workspace.partial_lse.fill_(float("nan"))
    workspace.plan(state, rows, valid, score_low=score_low)
    twin = clone_state(state)
    found = FoundTokens.create(state, batch + 1, config, score_low=score_low)
    expected = StepScores.create(state, batch, score_low)
    out, lse = decode_attention(state, 0, q, rows, seq_lens, 0.1, workspace, valid, found=found, window=WINDOW)
    ref_out, ref_lse = reference(twin, 0, q[:-1], rows[:-1], seq_lens[:-1], 0.1, scores=expected, window=WINDOW)
    held = torch.tensor(lengths, device=DEVICE) > 0
    assert not out[-1].any() and not out[:-1][~held].any()
    assert close(out[:-1][held], ref_out[held]) < 6e-3 and (lse[:-1][held] - ref_lse[held]).abs().max() < 5e-3
    got = found.unpack()
    assert torch.equal(got.candidate_slot[:-1], expected.candidate_slot)
    assert torch.equal(got.least_slot[:-1] >= 0, expected.least_slot >= 0)


@pytest.mark.parametrize(
    ("tiers", "std", "count", "sink", "splits", "dtype"),
    [c for c in SINK_CASES if c[0] != "K8V2 K4V1" and "BF16" not in c[0]],
)
def test_sinks(tiers, std, count, sink, splits, dtype):
    decode_with_a_sink(tiers, std, count, sink, splits, dtype, cuda=True)


@pytest.mark.parametrize("std", [0.01, LARGEST])
def test_scores_beside_a_sink(std):
    scores_beside_a_sink(std, cuda=True)


def test_the_smallest_pages_have_a_weight():
    constants = tile_constants(make_format("K4V2", 64, page_tokens=4), DecodeConfig(cuda=True))
    assert min(constants["WEIGHTS"]) > 0 and constants["TURN"] > 0


def test_what_it_does_not_serve_is_named():
    assert cuda.unsupported(make_format("K8V4 K4V2", 128), 8) is None
    assert "more than 8" in str(cuda.unsupported(make_format("K8V4 K4V2", 128), 9))
    assert "96" in str(cuda.unsupported(make_format("K8V4 K4V2", 96), 4))
    assert cuda.unsupported(make_format("K6V3 K3V2", 128), 8) is None
    assert "K5V3" in str(cuda.unsupported(make_format("K8V6 K5V3", 64), 4))
    assert "K3V2" in str(cuda.unsupported(make_format("K6V6 K3V2", 64), 4))
    assert "BF16" in str(cuda.unsupported(make_format("BF16 K8V4", 64), 4))
    assert "K4V1" in str(cuda.unsupported(make_format("K8V2 K4V1", 64), 4))
    assert "more than 128" in str(cuda.unsupported(make_format("K8V4 K4V2", 64, page_tokens=128), 4))


@pytest.mark.parametrize("lacks", ["there is no GPU", "a GPU of compute capability 8.0, not a Hopper GPU"])
def test_without_a_hopper_gpu_triton_takes_its_place(monkeypatch, lacks):
    monkeypatch.setattr(cuda, "missing", lambda: lacks)
    fmt = make_format("K8V4 K4V2", 128)
    assert decode_obstacle(fmt, 4, "auto") == lacks
    with pytest.raises(UnsupportedError, match=f'"decode": "cuda": {lacks}; set "decode" to "triton" or "auto"'):
        decode_obstacle(fmt, 4, "cuda")


def sources() -> dict[str, CudaSource]:
    """The pass for Llama-3-8B's heads: two tiers and four."""
    found = {}
    for tiers, kept in (("K8V4 K4V2", 1), (FOUR, 4)):
        fmt, config = make_format(tiers, 128, page_tokens=32, scored=kept), DecodeConfig(cuda=True)
        count = len(fmt.tiers)
        resident = cuda.resident_of(fmt, config.copies, config.resident, 228 << 10)
        found[tiers] = cuda.split_source(
            fmt, 4, 32, 8, 64, 128, 132 * resident, 13, (13,) * count, tuple(map(cuda.page_slots, fmt.layouts)),
            config.copies, resident, kept, False, False, True, True, True, True,
        )  # fmt: skip
    return found


@pytest.mark.parametrize("tiers", ["K8V4 K4V2", FOUR])
def test_compiles_for_hopper(tmp_path, tiers):
    """By CUDA's compiler, where it is installed, without registers in memory."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    source = tmp_path / "split.cu"
    source.write_text(sources()[tiers].text(host=False))
    command = ["nvcc", "-arch=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v", "-o", "/dev/null", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert spilled and max(spilled) <= 64


def test_lanes_that_part_are_found(tmp_path):
    """The emulation ends a process whose lanes meet in different operations, or wait for what nobody copies."""
    bodies = {
        "lanes have parted": "if (lane_id() < 7) sync_warp(); else any_lane(true);",
        "was not made": "auto* b = (unsigned long long*)shared_memory(); if (!lane_id()) barrier_init(b); sync_warp();"
        " wait_bytes(b, 0);",
    }
    for message, body in bodies.items():
        path = tmp_path / "kernel.cu"
        path.write_text(f"struct Arguments {{ int x; }};\nKERNEL void kernel(const Arguments arg) {{ {body} }}\n")
        run = (
            "import ctypes, pathlib; from sglang_diffkv.kernels.cuda.source import *;"
            "from sglang_diffkv.kernels.cuda.load import load;"
            f"launch = load(CudaSource(pathlib.Path({str(path)!r}), 'kernel', ()), True).prepare(1, 128, False);"
            "launch(type('A', (ctypes.Structure,), {'_fields_': [('x', ctypes.c_int)]})())"
        )
        done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
        assert done.returncode != 0 and message in done.stderr
