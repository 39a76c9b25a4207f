"""The table of long replies: divergence by the position in a reply, beside measured bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import long_replies
from benchmarks.quality.long_replies import METHODS, PARTS, REFERENCE, by_part, configurations, table
from sglang_diffkv.config import load_config
from sglang_diffkv.evaluate import cli
from sglang_diffkv.evaluate.distribution import pack


def thoughts(probabilities: list[float]) -> str:
    """Two tokens at each position, the first with these probabilities."""
    return pack([sorted([(math.log(p), 1), (math.log(1 - p), 2)], reverse=True) for p in probabilities])


def test_divergence_by_part_of_a_reply() -> None:
    first = {"0": thoughts([0.5] * 8), "7": thoughts([0.5] * 8)}
    other = {"0": thoughts([0.5] * 6 + [0.75] * 2), "7": thoughts([0.5] * 8)}
    found = by_part(first, other)
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert found.shape == (2, PARTS) and found[0].tolist() == pytest.approx([0, 0, 0, expected], abs=1e-5)
    assert found[1].tolist() == pytest.approx([0] * PARTS, abs=1e-6)
    text = table({REFERENCE: first, "diffkv": other}, {"diffkv": 0.351}, 8)
    assert "tokens 7 to 8" in text and REFERENCE not in text
    assert f"| diffkv | 0.351 | 0.0 ± 0.0 | 0.0 ± 0.0 | 0.0 ± 0.0 | {500 * expected:.1f} ±" in text


def test_methods_are_compared_with_chance_on_the_same_replies() -> None:
    first = {"0": thoughts([0.5] * 8), "7": thoughts([0.5] * 8)}
    drawn = {"0": thoughts([0.75] * 8), "7": thoughts([0.9] * 8)}
    better = {"0": thoughts([0.75] * 8), "7": thoughts([0.75] * 8)}
    text = table({REFERENCE: first, "random": drawn, "snapkv": better}, {"random": 0.31, "snapkv": 0.32}, 8)
    header, _, control, other = text.splitlines()
    assert header.endswith("| to random, all tokens; lower in |") and control.endswith("|  |")
    gain = 500 * (math.log(0.75 / 0.9) + math.log(0.25 / 0.1))
    assert other.endswith(f"| {-gain / 2:+.1f} ± {gain / 2:.1f}; 1 of 2 |")


def test_methods_are_served_and_the_controls_are_among_them() -> None:
    import json

    given = configurations(1024, 2048)
    found = {name: load_config(json.dumps(config)).build_policy() for name, config in given.items()}
    assert {"random", "knorm", "diffkv", "leankv", "zipage", "xkv", "snapkv"} < found.keys() == set(METHODS)
    assert not any(x.prunes for name, x in found.items() if name in ("K8V4", "diffkv", "leankv"))


@pytest.mark.parametrize(("prompt", "reply"), [(1024, 2048), (1024, 1024), (1024, 512), (4096, 1024)])
def test_what_drops_tokens_keeps_as_many_at_a_reply_s_end(prompt: int, reply: int) -> None:
    given = {name: config.get("policy", {}) for name, config in configurations(prompt, reply).items()}
    kept = 0.75 * (prompt + reply)
    assert given["zipage"]["max_blocks"] * given["zipage"]["block"] == kept
    shares = [given["xkv"]["keep"], *(given[name]["fraction"] for name in ("snapkv", "knorm", "random"))]
    assert [prompt * share + reply for share in shares] == pytest.approx([kept] * 4, rel=1e-3)


def test_lengths_at_which_nothing_of_the_prompt_is_left_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        long_replies.parse_args(["--text", "x.txt", "--output", "out", "--prefix-tokens", "512"])
    assert "--prefix-tokens" in capsys.readouterr().err


def test_one_command_asks_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(cli, "run", lambda args: asked.append(args) or 1)
    assert long_replies.main(["--text", "prose.txt", "--output", str(tmp_path), "--methods", "diffkv", "random"]) == 1
    (args,) = asked
    assert args.task == ["continuation=prose.txt"] and [x.partition("=")[0] for x in args.config] == [
        REFERENCE, "diffkv", "random",
    ]  # fmt: skip
    assert (args.prefix_tokens, args.window_tokens, args.url) == (1024, 2048, None)
