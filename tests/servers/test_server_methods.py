"""Methods that prune prompts on a real server, under overlap scheduling and with prompts in chunks: answers, what was
pruned, shared prefixes and several samples of a prompt."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import splits
from benchmarks.paths import DATA, NANO
from sglang_diffkv.calibrate.layers import cli as layers
from sglang_diffkv.calibration import read_file
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.policies.xkv import XKVPolicyConfig
from tests.servers.shared import STRICT, stats_of, tokens

pytestmark = [pytest.mark.server, pytest.mark.full]
"""``make test`` has the same at page level, and a server of another method that scores whole heads."""

CONFIGS: dict[str, tuple[dict[str, Any], float, float]] = {
    "xkv": ({"tiers": ["BF16"], "policy": {"name": "xkv", "keep": 0.6}}, 0.38, 0.41),
    "xkv, exact": (
        {"tiers": ["K8V8"], "policy": {"name": "xkv", "min_retention": 0.8}, "prefix_fidelity": "exact"},
        0.5,
        0.95,
    ),
    "pyramidkv": ({"tiers": ["BF16"], "policy": {"name": "pyramidkv", "fraction": 0.6}}, 0.38, 0.41),
}
"""Name -> configuration, and between what shares a prompt of 1,195 tokens and its short reply are pruned."""
ARGS = ["--max-total-tokens", "6000", "--chunked-prefill-size", "128"]


@pytest.mark.parametrize(
    ("config", "least", "most"),
    [pytest.param(*x, id=name) for name, x in CONFIGS.items()],
)
def test_questions_behind_one_prompt(
    config: dict[str, Any], least: float, most: float, server_of: Callable[..., Server]
) -> None:
    server = server_of("diffkv", ARGS, config=config, env=STRICT)
    items = [x for x in splits.load("dev") if x.group == "medium-1"][:6]
    ids = [chat_ids(load_tokenizer(NANO), x.prompt) for x in items]
    server.flush_cache()
    before = stats_of(server)["finished"]
    first = client.ask(server.url, ids[0], 160)
    after = stats_of(server)["finished"]
    high, pruned = (after[name] - before[name] for name in ("high", "pruned"))
    assert least < pruned / (high + pruned) < most, "the first prompt, which nobody shared yet, was cut otherwise"
    others = client.run(server.url, ids[1:], 160, concurrency=3)
    right = sum(reference.grade(r.text, x.answers) for r, x in zip([first, *others], items, strict=True))
    assert right >= 5
    assert all(record.cached_tokens >= 1190 for record in others), "the shared part was not found"
    parameters = {"temperature": 0, "max_new_tokens": 30, "n": 3}
    samples = server.generate({"input_ids": ids[0][:700], "sampling_params": parameters})
    assert [len(x["output_ids"]) > 0 for x in samples] == [True] * 3


def test_a_server_keeps_what_a_sample_of_a_task_said(tmp_path: Path, server_of: Callable[..., Server]) -> None:
    """XKV's sampling from end to end: one command writes the file, a server that is given it cuts every layer alike."""
    path, task = tmp_path / "task.json", f"reference={DATA / 'calib.jsonl.xz'}"
    given = ["--model", str(NANO), "--task", task, "--sample", "0.02", "--keep", "0.3", "--output", str(path)]
    assert layers.main(given) == 0
    (entry,) = read_file(path).entries
    policy = entry.config().policy
    assert isinstance(policy, XKVPolicyConfig) and policy.layer_fractions is not None
    server = server_of("diffkv", ARGS, config={"thresholds": str(path)}, env=STRICT)
    server.flush_cache()
    client.ask(server.url, tokens(600, 1), 0)
    by_head = stats_of(server)["by_head"]
    assert by_head["tokens"] == 600
    kept = [[policy.window + math.ceil(x * (600 - policy.window))] * 2 for x in policy.layer_fractions]
    assert len({first for first, _ in kept}) > 3 and by_head["high"] == kept


@pytest.mark.parametrize("name", ["knorm", "random"])
def test_a_server_cuts_prompts_without_attention(name: str, server_of: Callable[..., Server]) -> None:
    """Each head keeps its budget, whatever chunks a prompt came in."""
    policy = {"name": name, "fraction": 0.3, "window": 32}
    server = server_of("diffkv", ARGS, config={"tiers": ["BF16"], "policy": policy}, env=STRICT)
    server.flush_cache()
    client.ask(server.url, tokens(600, 1), 0)
    by_head = stats_of(server)["by_head"]
    assert by_head["tokens"] == 600 and by_head["high"] == [[180] * 2] * 6
    assert len(client.ask(server.url, tokens(600, 1), 8).output_ids) == 8, "behind the cached prompt"
