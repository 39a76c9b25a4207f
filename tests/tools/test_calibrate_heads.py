"""Factors by head: curves on attention made by hand, the allocation, and the command on the nano model."""

from __future__ import annotations

import json
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from benchmarks.paths import DATA as SPLITS
from benchmarks.paths import NANO
from sglang_diffkv.calibrate.arguments import read_head_scale
from sglang_diffkv.calibrate.heads import capture, cli, curves
from sglang_diffkv.calibrate.heads.allocate import allocate, priced
from sglang_diffkv.calibrate.heads.capture import LayerPass
from sglang_diffkv.calibrate.heads.curves import Rule, counted, measure
from sglang_diffkv.calibrate.heads.fit import FACTORS, Curves, Text, choose, read
from sglang_diffkv.calibrate.heads.result import HeadScaleFile
from sglang_diffkv.config import load_config
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.tasks import TaskFileError, load_task
from sglang_diffkv.evaluate.tasks.generation import Options
from sglang_diffkv.layout.page_format import Tier
from tests.tools.test_calibrate import DATA

PAIR = (Tier.parse("K8V4"), Tier.parse("K4V2"))
RULE = Rule(PAIR, alpha_high=1.0, alpha_low=0.0, window=8)
HEADS, GROUP, DIM, COUNT = 3, 2, 64, 120


def seen(gain: tuple[float, ...] = (1.0,) * HEADS, seed: int = 0) -> LayerPass:
    """Random attention of 3 KV heads with 2 query heads each, whose outputs reach the stream times ``gain``."""
    torch.manual_seed(seed)
    q = torch.randn(HEADS * GROUP, COUNT, DIM) * 2
    k, v = torch.randn(HEADS, COUNT, DIM), torch.randn(HEADS, COUNT, DIM)
    weight = torch.randn(96, HEADS, GROUP * DIM) * torch.tensor(gain).view(1, -1, 1)
    return LayerPass(0, q, k, v, DIM**-0.5, weight.flatten(1), torch.randn(COUNT, 96))


def curves_of(*passes: LayerPass) -> Curves:
    found = [measure(x, 60, RULE, FACTORS) for x in passes]
    error, size = (torch.stack([x[part] for x in found]).unsqueeze(1) for part in range(2))
    return Curves(error, size, torch.full((len(found),), 4.0 * HEADS * COUNT * DIM, dtype=torch.float64))


def test_a_sensitive_head_gets_bytes_from_the_others():
    found = curves_of(*(seen((0.1, 1.0, 0.1), seed) for seed in range(3)))
    taken = found.fit()
    (scale,) = found.scale(taken)
    assert scale[1] < 1 and scale[0] > 1 and scale[2] > 1
    change = found.change(taken)
    assert change.error_percent < -20 and -1 < change.bytes_percent <= 0
    held_out = found.held_out()
    assert held_out is not None and held_out.error_percent < -20 and abs(held_out.bytes_percent) < 10
    assert held_out.before.error == pytest.approx(change.before.error)
    assert change.before.ratio == pytest.approx(
        float(found.size[..., FACTORS.index(1.0)].sum()) / float(found.bf16.sum())
    )
    assert torch.tensor(found.error_by_head()).shape == (1, HEADS)
    assert curves_of(seen()).held_out() is None


def test_curves_are_those_of_attention_over_what_the_tiers_keep():
    """Query by query and head by head, with the rule as the docstrings have it."""
    rule = Rule(PAIR, alpha_high=1.1, alpha_low=0.7, window=8, sinks=2, rotate="none")
    x, prompt, factor = seen(), 60, 1.0
    error, size = measure(x, prompt, rule, [0.5, factor])
    assert error.shape == size.shape == (HEADS, 2) and error.dtype == size.dtype == torch.float64
    shown = torch.ones(COUNT, COUNT).tril().bool()
    weights = (x.q @ x.k.repeat_interleave(GROUP, 0).mT * x.scale).masked_fill(~shown, -torch.inf).softmax(-1)
    weights = weights.unflatten(0, (HEADS, GROUP))
    keys, values = (
        curves._stored(tensor, PAIR, bits, turned=False) for tensor, bits in ((x.k, "k_bits"), (x.v, "v_bits"))
    )  # by tier: [H, N, D]
    for head in range(HEADS):
        tier = []
        for j in range(COUNT):
            last = prompt - 1 if j < prompt - 8 else min(j + 8, COUNT - 1)
            queries = weights[head, :, j + 1 : last + 1, j]
            score = float(queries.sum(1).max() / max(1, last - j)) if queries.numel() else 0.0
            mean = 1 / (j + 1 if j < prompt - 8 else j + 9)
            tier.append(0 if j < 2 or score >= 1.1 * mean else 1 if score >= 0.7 * mean else 2)
        table = [*(t.token_bytes(DIM, DIM, position_bytes=2) for t in PAIR), 0]
        assert size[head, 1] == sum(table[0 if j >= COUNT - 8 else t] for j, t in enumerate(tier))
        assert {0, 1, 2} == set(tier), "all cases are met"
        total = 0.0
        for i in range(prompt, COUNT):
            now = [0 if i - j < 8 else t for j, t in enumerate(tier[: i + 1])]
            here = [j for j, t in enumerate(now) if t < 2]
            k, v = (torch.stack([stored[now[j]][head, j] for j in here]) for stored in (keys, values))
            q = x.q.unflatten(0, (HEADS, GROUP))[head, :, i]
            change = (q @ k.T * x.scale).softmax(-1) @ v - weights[head, :, i] @ x.v[head]
            columns = x.out_weight.unflatten(1, (HEADS, -1))[:, head]
            total += float((columns @ change.flatten()).square().sum() / x.stream[i].square().sum())
        assert error[head, 1] == pytest.approx(total / (COUNT - prompt), rel=1e-4)


@pytest.mark.parametrize("name", ["keys", "values", "both"])
def test_rotation_leaves_attention_and_changes_only_errors(name, monkeypatch):
    monkeypatch.setattr(curves, "_stored", lambda x, tiers, bits, turned: [x.float(), x.float()])
    error, _ = measure(seen(), 60, Rule(PAIR, 1.0, 0.0, 8, rotate=name), FACTORS)
    assert float(error.max()) < 1e-9


def test_a_text_without_a_reply_is_all_prompt():
    assert counted(100, 60, 8) == range(60, 100) and counted(100, 4, 8) == range(8, 100)
    assert counted(100, 100, 8) == range(8, 100)
    assert not Text(tuple(range(8)), 4).fits(8, 99) and Text(tuple(range(9)), 4).fits(8, 99)
    assert not Text(tuple(range(9)), 4).fits(8, 8)


def total(values: torch.Tensor, taken: torch.Tensor) -> float:
    return float(values.gather(1, taken.unsqueeze(1)).sum())


def test_no_allocation_has_less_error_at_the_bytes_of_a_price():
    torch.manual_seed(0)
    every = [torch.tensor(x) for x in product(range(5), repeat=4)]
    for _ in range(20):
        size = torch.rand(4, 5, dtype=torch.float64).sort(1, descending=True).values
        error = torch.rand(4, 5, dtype=torch.float64).sort(1).values
        budget = float(size[:, 2].sum())
        hull, taken = priced(error, size, budget), allocate(error, size, 2)
        best = min(total(error, x) for x in every if total(size, x) <= total(size, hull))
        assert total(size, hull) <= budget and total(error, hull) == best
        assert total(size, taken) <= budget
        assert total(error, taken) <= min(total(error, hull), float(error[:, 2].sum()))


def test_many_heads_use_their_bytes():
    torch.manual_seed(0)
    bits = torch.arange(8, 1, -1, dtype=torch.float64).expand(64, -1)
    error = (1000 ** torch.rand(64, 1, dtype=torch.float64)) * 4**-bits
    taken = allocate(error, bits, 3)
    assert total(bits, taken) == 5 * 64 and total(error, taken) < 0.7 * float(error[:, 3].sum())


def test_equal_heads_keep_factor_1_where_nothing_is_gained():
    size = torch.tensor([[4.0, 3.0, 2.0]] * 3, dtype=torch.float64)
    error = torch.tensor([[0.0, 1.0, 3.0]] * 3, dtype=torch.float64)
    assert allocate(error, size, 1).tolist() == [1, 1, 1]
    assert allocate(torch.zeros(3, 3, dtype=torch.float64), size, 1).tolist() == [1, 1, 1]


def test_what_is_captured_gives_the_model_s_own_output():
    model = capture.load_model(str(NANO))
    ids = load_tokenizer(NANO).encode("The cat sat on the mat, and the dog sat on the cat.")
    found: list[LayerPass] = []
    capture.run(model, ids, found.append)
    assert [x.layer for x in found] == list(range(6))
    first, hidden = found[0], model.model.embed_tokens(torch.tensor(ids))
    assert first.q.shape == (4, len(ids), 64) and first.k.shape == first.v.shape == (2, len(ids), 64)
    shown = torch.ones(len(ids), len(ids)).tril().bool()
    logits = first.q.float() @ first.k.float().repeat_interleave(2, 0).mT * first.scale
    out = logits.masked_fill(~shown, -torch.inf).softmax(-1) @ first.v.float().repeat_interleave(2, 0)
    stream = hidden.float() + out.transpose(0, 1).flatten(1) @ first.out_weight.float().T
    torch.testing.assert_close(first.stream.float(), stream, atol=0.05, rtol=0.02)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt_oss"}, "gpt_oss models are not supported: heads are fitted for llama, qwen2, qwen3"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
    ],
)
def test_other_models_are_refused_by_name(config, message):
    with pytest.raises(EvaluationError, match=message):
        capture.check_model(SimpleNamespace(**config))


def test_texts_are_prompts_with_replies(tmp_path):
    tokenizer = load_tokenizer(NANO)
    task = load_task(f"gsm8k={DATA / 'gsm8k.jsonl'}", Options())
    for text, question, example in zip(read(task, tokenizer), task.questions(tokenizer), task.examples):
        assert text.prompt == len(question.prompt_ids) and text.ids[: text.prompt] == question.prompt_ids
        assert example.reply and tokenizer.decode(text.ids[text.prompt :]) == example.reply
    prose = load_task(f"wikitext={DATA / 'prose.txt'}", Options(prefix_tokens=16, window_tokens=4))
    text = next(read(prose, tokenizer))
    assert text.prompt == 16 and len(text.ids) == 21
    assert choose(iter([text] * 3), 2, 16, 99) == ([text] * 2, 0)
    with pytest.raises(TaskFileError, match="longer than the window of 64"):
        choose(iter([text]), 1, 64, 99)


def command(path, *args: str) -> list[str]:
    task = f"reference={SPLITS / 'calib.jsonl.xz'}"
    rule = ["--alpha-high", "3", "--window", "64", "--rotate", "keys"]
    return ["--model", str(NANO), "--task", task, *rule, "--levels", "easy", "--output", str(path), *args]


def test_the_file_is_taken_by_calibrate_and_by_a_configuration(tmp_path, capsys):
    path = tmp_path / "heads.json"
    assert cli.main(command(path, "--n", "2", "--max-tokens", "512")) == 0
    content = HeadScaleFile.model_validate_json(path.read_text())
    found = content.provenance
    assert len(content.head_scale) == 6 and {len(layer) for layer in content.head_scale} == {2}
    assert found.n == 2 and found.model == "nano" and found.task_file == "calib.jsonl.xz"
    assert found.rule["rotate"] == "keys" and found.rule["policy"]["alpha_high"] == 3 and found.held_out is not None
    assert found.change.after.error < found.change.before.error
    assert -2 < found.change.bytes_percent <= 0
    assert "fitted to, n = 2" in capsys.readouterr().out
    assert read_head_scale(path) == content.head_scale
    for given in (json.loads(path.read_text()), content.head_scale):
        config = load_config(json.dumps({"policy": {"name": "diffkv", "head_scale": given}}))
        config.check_heads(6, 2)
        assert config.policy.head_scale == content.head_scale


def test_unfit_files_and_settings_are_refused(tmp_path, capsys):
    dev = tmp_path / "dev.jsonl"
    dev.write_text((DATA / "reference.jsonl").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "gpt2"}')
    for args, message in [
        (["--task", f"reference={dev}"], "fit on another file"),
        (["--tiers", "K8V4"], "alone"),
        (["--alpha-low", "4"], "alpha_low"),
        (["--model", str(other)], "gpt2 models are not supported"),
        (["--model", str(tmp_path / "none")], "none"),
    ]:
        assert cli.main(command(tmp_path / "heads.json", *args)) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "heads.json").exists()
