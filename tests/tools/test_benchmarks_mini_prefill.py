"""Mini-prefill beside judging at the end: the tokens that a server keeps, and bytes counted by hand."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.paths import NANO
from benchmarks.quality import mini_prefill, whole_prompts
from benchmarks.quality.mini_prefill import AT_END, MINI, most_alive
from benchmarks.quality.prompt_passes import Cache, Reader, chosen, scored_at_end, sizes
from benchmarks.quality.prompt_passes import mini_prefill as two_passes
from benchmarks.serving.geometries import PRESETS
from sglang_diffkv.calibrate.layers.measure import Rule
from tests.deciding import classify_prompt
from tests.policies import xkv_policy

LAYERS, HEADS, DIM = 6, 2, 64
"""Of the nano model."""


def test_a_cache_counts_what_it_holds() -> None:
    cache = Cache(10)
    for layer in (0, 1):
        for count in (6, 4):
            keys, values = cache.write(layer, *torch.randn(2, HEADS, count, DIM))
            assert keys.shape == values.shape == (HEADS, 6 if count == 6 else 10, DIM)
        if layer == 0:
            cache.cut(0, torch.tensor([[1, 2, 9], [0, 8, 9]]))
            torch.testing.assert_close(cache.layers[0][0][0], keys[0, [1, 2, 9]], rtol=0, atol=0)
            torch.testing.assert_close(cache.layers[0][1][1], values[1, [0, 8, 9]], rtol=0, atol=0)
    token = 2 * HEADS * DIM * 4
    assert cache.held == cache.peak == (3 + 10) * token
    cache.check_integrity()
    cache.cut(1, torch.tensor([[9], [9]]))
    assert (cache.held, cache.peak) == (4 * token, 13 * token)
    cache.check_integrity()


def test_what_stays_is_what_a_server_keeps() -> None:
    scores = torch.rand(4, HEADS, 90, generator=torch.Generator().manual_seed(2)) ** torch.tensor([1, 2, 4, 8]).view(
        4, 1, 1
    )
    rule = Rule(8, 7, keep=0.3)
    outside = {layer: scores[layer, :, :82].contiguous() for layer in range(4)}
    tier = classify_prompt(xkv_policy(keep=0.3), scores, torch.arange(90).expand(4, HEADS, -1), 90, 1)
    for layer, size in enumerate(sizes(outside, rule)):
        kept = torch.zeros(HEADS, 90, dtype=torch.bool).scatter_(1, chosen(outside[layer], size, rule), True)
        assert torch.equal(kept, tier[layer] == 0)


def test_most_alive_is_the_most_at_one_time() -> None:
    def work() -> torch.Tensor:
        first = torch.empty(1000)
        second = torch.empty(3000)
        del first
        return second + 1

    assert 4 * 6000 <= most_alive(work, torch.device("cpu")) < 4 * 6000 + 64, "a scalar beside two tensors"


def test_chunks_of_any_size_keep_nearly_the_same_tokens() -> None:
    """A last chunk shorter than the window too."""
    reader, rule = Reader(str(NANO), torch.float32), Rule(8, 7, keep=0.3)
    ids = mini_prefill.prompt_ids(str(NANO), 205)
    whole = scored_at_end(reader, ids, rule, 205)
    chunked = scored_at_end(reader, ids, rule, 50)
    assert [x.shape for x in whole.kept] == [(HEADS, x.shape[1]) for x in whole.kept]
    assert mini_prefill.others(whole.kept, chunked.kept, 205) <= 2
    assert chunked.cache.peak == whole.cache.peak and chunked.cache.held == whole.cache.held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_ways_keep_the_same_tokens(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(NANO), "--lengths", "100", "300", "--chunks", "512", "128", "--keep", "0.4"]
    assert mini_prefill.main([*arguments, "--repeat", "1", "--dtype", dtype, "--output", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "mini_prefill.json").read_text())
    token = 2 * HEADS * DIM * (4 if dtype == "float32" else 2)
    found = [(x["way"], x["tokens"], x["chunk"]) for x in content["rows"]]
    assert found == [(AT_END, 100, 100), (MINI, 100, 100), (AT_END, 300, 300), (AT_END, 300, 128), (MINI, 300, 300)]
    for row in content["rows"]:
        tokens, kept = row["tokens"], row["kept"]
        assert row["whole_bytes"] == LAYERS * tokens * token
        assert row["end_bytes"] == sum(kept) * token
        assert sum(kept) == math.ceil(0.4 * LAYERS * (tokens - 8)) + LAYERS * 8
        if row["way"] == AT_END:
            assert row["peak_bytes"] == row["whole_bytes"] and len(row["seconds"]) == 1
        else:
            assert row["peak_bytes"] == max(sum(kept[:layer]) + tokens for layer in range(LAYERS)) * token
            assert row["peak_bytes"] < 0.65 * row["whole_bytes"] and len(row["seconds"]) == 2
        if row["chunk"] == tokens:
            assert row["other_tokens"] == 0
        assert row["alive_bytes"] > row["peak_bytes"]
    text = capsys.readouterr().out
    assert text.strip() == (tmp_path / "mini_prefill.md").read_text().strip()
    assert "| 300 | mini-prefill | 300 |" in text and "Computed, not measured" in text


def test_what_is_alive_does_not_depend_on_what_ran_before() -> None:
    reader, rule = Reader(str(NANO), torch.float32), Rule(8, 7, keep=0.9)
    ids = mini_prefill.prompt_ids(str(NANO), 256)
    for way in (partial(scored_at_end, reader, ids, rule, 64), partial(two_passes, reader, ids, rule)):
        first = most_alive(way, ids.device)
        assert most_alive(way, ids.device) == most_alive(way, ids.device) == pytest.approx(first, abs=4096)


def test_prompts_must_be_longer_than_the_window(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--lengths", "8"], ["--keep", "0"], ["--pool", "4"]):
        with pytest.raises(SystemExit):
            mini_prefill.parse_args(["--model", str(NANO), *arguments])
    assert "--window" in capsys.readouterr().err


def test_requests_that_fit_by_hand() -> None:
    """A pool of two prompts of 32,768 tokens, and of 16 of 4,096."""
    shape = PRESETS["llama3-8b"]
    assert whole_prompts.token_bytes(shape) == 128 << 10
    found = {prompt: whole_prompts.served(prompt, shape, 8 << 30, 0.38) for prompt in (4096, 32768)}
    assert [x.requests for x in found[4096]] == [40, 42, 42, 42]
    assert 39 * 0.38 + 1 <= 16 < 40 * 0.38 + 1 and 41 * 0.38 + 0.38 + 0.62 / 32 <= 16
    assert [x.requests for x in found[32768]] == [3, 5, 3, 4]
    assert found[4096][0].longest == 65536 and found[4096][0].throughput == 1
    assert found[4096][1].throughput == pytest.approx(1 / (1 + 0.5 * 40 / 42))
    piece = found[32768][2]
    assert piece.beside_bytes == (32768 - 8192) * 2 * (2 * 4096 + 3 * 14336)
    reading = piece.reading_bytes / 32768
    assert (piece.longest - 8192) * piece.beside_bytes / 24576 + piece.longest * reading <= 8 << 30
    assert whole_prompts.served(70000, shape, 8 << 30, 0.38)[0].requests == 0
