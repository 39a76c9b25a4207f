"""The kernel benchmark without a GPU: cases, skipped ones, baselines' arguments, page management and report."""

import argparse
import json
import time

import pytest
import torch

from benchmarks.budget import Budget
from benchmarks.kernels import attention as kernel_attention
from benchmarks.kernels import budgets, chunks, uneven
from benchmarks.kernels import cli as kernels
from benchmarks.kernels import management as kernel_management
from benchmarks.kernels import prompts as kernel_prompts
from benchmarks.kernels import report as kernel_report
from benchmarks.kernels.baselines import BASELINES, Missing, baseline_bytes, sglang_triton_decode, shuffled_slots
from benchmarks.kernels.cases import Case, build_state
from benchmarks.kernels.timing import MIN_BYTES, cpu_median_ms, lacking, layers_for
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.kernels.table import table_column
from sglang_diffkv.layout.state import TABLE_BLOCK

TIERS = "K8V4 K4V2"


def once(run, calls):
    """A timer for tests: runs, and says one millisecond."""
    run()
    return 1.0


def test_grid():
    cases = kernel_attention.all_cases()
    assert {(c.q_heads, c.kv_heads) for c in cases} == {(32, 8), (40, 8), (8, 8)}
    assert {c.length for c in cases} >= {512, 32768} and {c.batch for c in cases} >= {1, 128}
    assert cases[:6] == kernel_attention.quick_cases()


def test_command_line():
    args = kernels.parse_args(["--quick"])
    assert len(args.cases) == 6 and args.step_batches == [1, 16, 64]
    args = kernels.parse_args(["--heads", "64/8", "--lengths", "1024", "--batches", "2", "--step-batches", "4"])
    assert Case(2, 64, 8, 128, 1024, TIERS, 1.0) in args.cases and args.step_batches == [4]
    for text in ("32", "32/5", "a/b", "8/0"):
        with pytest.raises(argparse.ArgumentTypeError):
            kernels.heads_pair(text)


def test_inputs_exceed_the_cache_for_all_mixes_alike():
    cases = [Case(1, 32, 8, 128, 512, TIERS, high) for high in (1.0, 0.5, 0.0)]
    assert len({c.layers() for c in cases}) == len({c.max_blocks() for c in cases}) == 1
    assert all(c.layers() * c.kv_bytes() > 150e6 for c in cases)
    assert layers_for(int(MIN_BYTES)) == 1 and layers_for(1) == 512


def test_what_does_not_fit_is_named():
    assert lacking(90, 100) is None
    assert lacking(int(95e9), int(100e9)) == "needs 95.0 GB, 100.0 GB are free"
    case = Case(128, 32, 8, 128, 32768, TIERS, 1.0)
    assert case.state_bytes(1) > case.kv_bytes()
    assert baseline_bytes("flashinfer_bf16", case) > case.bf16_bytes() > baseline_bytes("flashinfer_fp8", case) / 2


def test_skipped_cases_have_their_reason(monkeypatch):
    def run_out(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    small, large = (Case(1, 4, 2, 64, n, TIERS, 1.0) for n in (64, 2**20))
    rows = []
    baselines = kernel_attention.Baselines(once, free=lambda: int(6e8))
    monkeypatch.setattr(kernel_attention, "attention_row", run_out)
    kernel_attention.attention_rows([small, small, large], 1.0, Budget(None), rows.append, baselines, once)
    assert [row["skipped"].split(" ")[0] for row in rows] == ["CUDA", "needs"]
    kernel_attention.attention_rows([small], 1.0, Budget(0), rows.append, baselines, once)
    assert "0 s of 0 s left" in rows[-1]["skipped"]


def test_baselines_are_measured_once_and_missing_ones_noted(monkeypatch):
    asked = []

    def absent(case):
        asked.append(case)
        raise Missing("not installed")

    monkeypatch.setitem(BASELINES, "flashinfer_bf16", absent)
    baselines = kernel_attention.Baselines(once, free=lambda: int(1e12))
    for high in (1.0, 0.5):
        assert baselines.ms("flashinfer_bf16", Case(1, 4, 2, 64, 64, TIERS, high)) is None
    assert len(asked) == 1 and list(baselines.notes) == ["flashinfer_bf16: not installed"]
    baselines.free = lambda: 0
    assert baselines.ms("flashinfer_fp8", Case(1, 4, 2, 64, 64, TIERS, 1.0)) is None
    assert "flashinfer_fp8 at batch 1, length 64: needs" in list(baselines.notes)[1]


def test_slots_are_shuffled_pages():
    slots = shuffled_slots(Case(3, 4, 2, 64, 40, TIERS, 1.0), "cpu")
    assert slots.shape == (3, 40) and slots.unique().numel() == 120 and int(slots.max()) < 3 * 48
    assert torch.equal(slots[:, 1:16] - slots[:, :15], torch.ones(3, 15, dtype=torch.int64))


def error_of(found):
    """Relative error of a baseline's result against dense attention in float32."""
    found.run()
    group = found.q.shape[1] // found.last()[0].shape[1]
    keys, values = (x[found.slots].float().repeat_interleave(group, 2) for x in found.last())
    logits = torch.einsum("bhd,bnhd->bhn", found.q.float(), keys) * found.q.shape[2] ** -0.5
    expected = torch.einsum("bhn,bnhd->bhd", logits.softmax(-1), values)
    return float((found.out.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (10, 2)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sglang_triton_decode_is_called_right(heads):
    if torch.cuda.is_available():
        pytest.skip("runs in Triton's interpreter")
    torch.manual_seed(0)
    try:
        found = sglang_triton_decode(Case(2, *heads, 64, 70, TIERS, 0.5), "cpu", calls=2, dtype=torch.float16)
    except Missing as error:
        pytest.skip(str(error))
    assert error_of(found) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8), (40, 8), (8, 8)])
@pytest.mark.parametrize("name", BASELINES)
def test_baselines_are_called_right(name, heads):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    torch.manual_seed(0)
    try:
        found = BASELINES[name](Case(3, *heads, 128, 1000, TIERS, 0.5))
    except Missing as error:
        pytest.skip(str(error))
    assert error_of(found) < (5e-2 if name.endswith("fp8") else 1e-2)


@pytest.mark.parametrize(
    "tiers, high", [(TIERS, 0.5), ("BF16", 1.0), ("K8V4 K4V4 K4V2", 0.25), ("K8V8 K8V4 K4V4 K4V2", 0.1)]
)
def test_state_holds_the_case(tiers, high):
    case = Case(2, 4, 2, 64, 1400, tiers, high)
    state = build_state(case, 3, free_pages=5, device="cpu")
    counts = case.page_counts()
    assert state.entries[1:].flatten(0, 2).unique(dim=0).tolist() == [list(counts)] and min(counts) > 0
    assert 2 * 3 * 2 * sum(counts) == state.num_pages - 5
    positions, pages = [], []
    for tier, count in enumerate(counts):  # as a reader of row 2 in layer 1 finds them
        column = table_column(state, tier, torch.arange(count))
        block = state.row_blocks[2, column // TABLE_BLOCK].long()
        pages += (found := state.page_table[block, 1, 1, column % TABLE_BLOCK].long()).tolist()
        positions += state.tiers[tier].positions[found].flatten().tolist()
    assert len(set(pages)) == sum(counts)
    assert sorted(x for x in positions if x >= 0) == list(range(case.length))
    assert sum(case.tokens) == case.length and case.tokens[0] == round(high * case.length)


@pytest.fixture
def small_step(monkeypatch):
    for name, value in {"LAYERS": 2, "Q_HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 64}.items():
        monkeypatch.setattr(kernel_management, name, value)
    monkeypatch.setattr(kernel_management, "diffkv_ms", lambda *args: 2.0)
    torch.manual_seed(0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_management_row(small_step):
    if torch.cuda.is_available():
        pytest.skip("runs in Triton's interpreter")
    row = kernel_management.management_row(2, 128, device="cpu", timer=once)
    assert row["attention_ms"] == 4.0 and row["share"] == pytest.approx(0.2)
    assert row["cpu_management_ms"] > 0 and row["cpu_threads"] >= 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_cpu_and_triton_steps_do_the_same(small_step):
    if torch.cuda.is_available():
        pytest.skip("runs in Triton's interpreter")
    states = []
    for make in (kernel_management.gpu_step, kernel_management.cpu_step):
        torch.manual_seed(1)
        state = build_state(kernel_management.held_case(2), 2, 100, "cpu")
        kernel_management.spread(state)
        before = state.own_tokens.clone()
        make(state, 2)[1]()
        states.append(state)
        assert torch.equal(state.own_tokens[1:, ..., 1], before[1:, ..., 1] + 1)
        assert state.hole[1:].unique().tolist() == [3]
    for name in ("own_tokens", "entries", "hole", "counters"):
        assert torch.equal(getattr(states[0], name), getattr(states[1], name)), name


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_prompts_of_cpu_and_triton_end_alike(small_step):
    """Half of the tokens outside the window go down, and the pages that fall free are in the ring again."""
    if torch.cuda.is_available():
        pytest.skip("runs in Triton's interpreter")
    case = kernel_prompts.held_case(3, 300)
    states = []
    for make in (kernel_prompts.gpu_pass, kernel_prompts.cpu_pass):
        torch.manual_seed(1)
        state = kernel_prompts.empty_state(case, "cpu")
        torch.manual_seed(2)
        made = make(state, case)
        made.take()
        kernel_prompts.fill(state, case)
        assert state.own_tokens[1:, ..., 0].unique().tolist() == [300]
        made.compact()
        states.append(state)
    for name in ("own_tokens", "entries", "hole", "fault"):
        assert torch.equal(getattr(states[0], name), getattr(states[1], name)), name
    high, low = states[0].own_tokens[1:].unbind(3)
    assert torch.equal(high + low, torch.full_like(high, 300)) and 150 < high.float().mean() < 215
    taken, put = states[0].counters.tolist()
    assert states[0].num_pages - (put - taken) == int(states[0].entries.sum()), "no page is lost"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_prompt_row(small_step):
    if torch.cuda.is_available():
        pytest.skip("runs in Triton's interpreter")
    row = kernel_prompts.prompt_row(2, 128, device="cpu", clock=time.perf_counter, repeats=1)
    assert row.keys() == kernel_report.PROMPTS.keys()
    assert row["management_ms"] == row["reserve_ms"] + row["compact_ms"] > 0 < row["cpu_ratio"]
    assert kernel_prompts.needed_bytes(2, 128) > 0


def test_management_checks_that_pages_last(small_step):
    state = build_state(kernel_management.held_case(2), 2, 0, "cpu")
    with pytest.raises(RuntimeError, match="did not last"):
        kernel_management.step_ms(state, kernel_management.cpu_step(state, 2), cpu_median_ms)


def test_report(tmp_path):
    case = Case(64, 32, 8, 128, 4096, TIERS, 1.0)
    figures = {"ms": 0.1, "ms_scores": 0.2, "gb_s": 4000.0, "fraction": 0.85}
    row = {**kernel_attention.place(case), "by": "Triton", **figures}
    for name in BASELINES:
        row |= {f"{name}_ms": 0.25, f"to_{name}": 2.5, f"to_{name}_scores": 1.25}
    managed = dict.fromkeys(kernel_report.MANAGEMENT, 1.0)
    prompted = dict.fromkeys(kernel_report.PROMPTS, 2.0)
    data = {
        "kind": "kernels",
        "provenance": {"gpus": ["GPU"], "cpu": "CPU", "versions": {"torch": "2"}, "command": "python"},
        "read_gb_s": 4700.0,
        "step_length": 1024,
        "notes": ["sglang_triton: not installed"],
        "attention": [row, *[{**kernel_attention.place(case), "skipped": "needs 9 GB"}] * 2],
        "management": [{**managed, "batch": 1}, {**managed, "batch": 4}, {"batch": 256, "skipped": "needs 8 GB"}],
        "prompts": [{**prompted, "batch": 1}, {**prompted, "batch": 4}, {"batch": 64, "skipped": "needs 7 GB"}],
    }
    kernel_report.write_tables(data, tmp_path)
    kernel_report.write_charts(data, tmp_path)
    text = (tmp_path / "kernels.md").read_text(encoding="utf-8")
    assert "| K8V4+K4V2 all high | 64 | 32/8 | 4096 | Triton | 0.1 | 4000 |" in text
    place = "K8V4+K4V2 all high, batch 64, length 4096"
    assert f"- attention, heads 32/8, {place} to {place} (2 cases): needs 9 GB" in text
    assert "| 4 | 2 | 2 | 2 | 2 | 2 | 2 |" in text and "- prompts, batch 64: needs 7 GB" in text
    assert "- management, batch 256: needs 8 GB" in text and "- sglang_triton: not installed" in text
    assert {x.name for x in tmp_path.glob("*.png")} == {"kernels.png", "kernels_grid.png", "kernels_management.png"}


def test_without_a_gpu_the_exit_code_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert kernels.main(["--quick"]) == 1 and "GPU" in capsys.readouterr().err


@pytest.mark.parametrize("high", [0.0, 0.3, 1.0])
def test_a_shortened_row_refers_to_pages_that_it_had(high):
    state = build_state(Case(3, 4, 2, 64, 300, TIERS, high), 1, device="cpu")
    before = state.entries.clone()
    uneven.shorten(state, [[1 / 16, 0.4], [0.5, 0.5], [1.0, 1.0]])
    assert torch.equal(state.entries[3], before[3])
    assert (state.entries <= before).all() and torch.equal(state.entries > 0, before > 0)


@pytest.mark.parametrize(
    "shape", [x if x in ("lognormal", "heads") else pytest.param(x, marks=pytest.mark.full) for x in uneven.SHAPES]
)
def test_uneven_batches_are_of_as_many_bytes(monkeypatch, shape):
    sizes = torch.tensor(uneven.sizes_of(shape, 40))
    assert sizes.shape == (40, uneven.KV_HEADS) and abs(sizes.mean() - 1) < 1e-5 and sizes.min() > 0
    assert (sizes.std() > 0.3) == (shape != "equal") and (sizes.std(1).max() > 0.1) == (shape == "heads")
    if torch.cuda.is_available():
        pytest.skip("runs in Triton's interpreter")
    for name, value in {"KV_HEADS": 2, "Q_HEADS": 4, "HEAD_DIM": 64, "TOKENS": 400}.items():
        monkeypatch.setattr(uneven, name, value)
    monkeypatch.setattr("benchmarks.kernels.cases.Case.layers", lambda case: 1)
    calls = []
    monkeypatch.setattr(
        uneven, "held_bytes", lambda state, batch: calls.append(int(state.entries[1 : batch + 1].sum())) or 1e6
    )
    found = uneven.rate(shape, 4, 0.5, scores=True, timer=lambda run, layers: run() or 2.0, device="cpu")
    assert found == 0.5 and calls[0] >= 400 // 32 * 2
    header = {"lengths": shape, "batch": 4, "high": 0.5, "with scores": 90.0}
    assert uneven._cell(header, {"with scores": 100.0}, "with scores") == "90 (90%)"


def small_budgets(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("runs in Triton's interpreter")
    for name, value in {"LAYERS": 2, "KV_HEADS": 2, "Q_HEADS": 4, "HEAD_DIM": 64, "BLOCK": 32}.items():
        monkeypatch.setattr(budgets, name, value)


@pytest.mark.parametrize("way", budgets.WAYS)
def test_a_compression_s_parts_are_timed(monkeypatch, way):
    small_budgets(monkeypatch)
    found = budgets.compressions("BF16", 64, way, 2, layers=2, device="cpu", clock=time.perf_counter)
    assert found.keys() == {"judge_ms", "move_ms", "together_ms", "memory_bytes"} and all(x > 0 for x in found.values())


def test_a_compression_is_timed_by_layer_stride(monkeypatch, tmp_path, capsys):
    small_budgets(monkeypatch)
    more = ["--tiers", "BF16", "--tokens", "64", "--redundancy", "lightning", "--repeats", "1", "--device", "cpu"]
    assert budgets.main([*more, "--layer-stride", "1", "2", "--output", str(tmp_path / "found.json")]) == 0
    one, two = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert (one["layer_stride"], two["layer_stride"]) == (1, 2) and two["memory_bytes"] == 2 * one["memory_bytes"]
    assert min(one["together_ms"], two["together_ms"]) > 0 and "| layer stride |" in capsys.readouterr().out


def test_a_chunk_behind_compressed_tokens_is_what_plain_pytorch_computes():
    """Of a layer whose pass is as in a server, from a projection's slices."""
    shape = {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "chunk_tokens": 24}
    config = DiffKVConfig.model_validate({"policy": {"name": "diffkv", "window": 8, "observe_every": 4}})
    found = chunks.errors(chunks.Chunk.parse("c40+12"), config, "triton", "cpu", **shape)
    assert found["output"] < chunks.LIMIT and found["scores"] < chunks.LIMIT
    assert found["tokens held by one alone"] == 0


def test_chunks_are_named_and_a_difference_fails(monkeypatch, tmp_path):
    assert chunks.Chunk.parse("0+5") == chunks.Chunk(0, 5) and str(chunks.Chunk.parse("c12+5")) == "c12+5"
    for wrong in ("5", "5+0", "x+5", "5+", "c+5"):
        with pytest.raises(argparse.ArgumentTypeError):
            chunks.Chunk.parse(wrong)
    argv = ["--check", "--cases", "0+5", "c12+5", "--prefill", "triton", "--output", str(tmp_path / "found.json")]
    for output, status in ((0.001, 0), (0.5, 1)):
        monkeypatch.setattr(chunks, "errors", lambda *case, off=output, **shape: {"output": off})
        assert chunks.main(argv) == status
    assert [x["case"] for x in json.loads((tmp_path / "found.json").read_text())["rows"]] == ["0+5", "c12+5"]
