"""Forced replies: what the processor does to logits is undone exactly, and a server that replies them decodes as it
would have by itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from benchmarks.paths import NANO, REPOSITORY
from sglang_diffkv.evaluate import cli, client, forcing, replies
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.evaluate.tasks import Options, TaskFileError, load_task
from sglang_diffkv.srt import forced_replies

VOCABULARY, K = 300, 8


def test_the_name_stands_for_the_class() -> None:
    assert isinstance(CustomLogitProcessor.from_str(forcing.PROCESSOR), forced_replies.ForcedReply)
    assert forcing.BOOST == forced_replies.BOOST


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_thoughts_are_those_before_the_token_was_forced(scale: float) -> None:
    """Rows at several points of their replies, one beyond its reply; the sink's own probability alone is lost."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(4, VOCABULARY, generator=draw) * scale
    before = logits.clone()
    reply, sink = [7, 9, 3], 299
    done = (0, 2, 1, 3)
    params = [{"__req__": SimpleNamespace(output_ids=[0] * n), "reply_ids": reply, "sink": sink} for n in done]
    after = forced_replies.ForcedReply()(logits, params)
    assert after is logits and torch.equal(after[3], before[3]), "beyond the reply the model chooses"
    told = after.log_softmax(-1)
    for row, n in enumerate(done[:3]):
        token = reply[n]
        assert int(after[row].argmax()) == token
        values, ids = told[row].topk(K + 2)
        meta = {
            "output_token_ids_logprobs": [[(told[row, sink].item(), sink, None)]],
            "output_top_logprobs": [[(value, other, None) for value, other in zip(values.tolist(), ids.tolist())]],
        }
        found = forcing.thoughts(meta, [token], sink, K)
        own = before[row].log_softmax(-1)
        assert found.logprobs[0] == pytest.approx(own[token].item(), abs=2e-5 * max(1, scale))
        own[sink] = -1e9
        expected = own.topk(K)
        assert [x[1] for x in found.tops[0]] == expected.indices.tolist()
        assert [x[0] for x in found.tops[0]] == pytest.approx(expected.values.tolist(), abs=2e-5 * max(1, scale))


def test_a_sink_is_no_token_of_the_reply() -> None:
    assert forcing.sink_for([1, 299, 297], VOCABULARY) == 298


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    line = {"id": "a", "task": "t", "prompt_ids": [1, 2], "reply_ids": [3, 4]}
    tokenizer = load_tokenizer(str(NANO))

    def load(*lines: object) -> list[object]:
        path.write_text("".join(json.dumps(x) + "\n" for x in lines))
        return list(load_task(f"replies={path}", Options()).questions(tokenizer))

    assert len(load(line, {**line, "id": "b"})) == 2
    with pytest.raises(TaskFileError, match="two replies have one id"):
        load(line, line)
    with pytest.raises(TaskFileError, match="tokens of another tokenizer"):
        load({**line, "reply_ids": [3, 400_000]})
    with pytest.raises(TaskFileError, match="no replies of two tokens"):
        load({**line, "reply_ids": [3]})


@pytest.mark.server
def test_a_reply_forced_on_stock_is_thought_of_as_its_own() -> None:
    """Stock's own greedy reply forced on stock: the same log-probabilities; and a reply that is not its own."""
    ids = load_tokenizer(str(NANO)).encode("The quick brown fox jumps over the lazy dog. " * 12)
    with Server(str(NANO), "torch_native", [*forcing.SERVER_ARGS, "--chunked-prefill-size", "64"]) as server:
        own = client.ask(server.url, ids, 24, top_logprobs=K)
        sink = forcing.sink_for(own.output_ids, 8192)
        forced = client.force(server.url, ids, own.output_ids, sink, top_logprobs=K)
        assert forced.logprobs == pytest.approx(own.logprobs, abs=1e-4)
        for mine, theirs in zip(forced.top_logprobs, own.top_logprobs, strict=True):
            assert [x[0] for x in mine] == pytest.approx([x[0] for x in theirs], abs=1e-4)
        other = [own.output_ids[0], *ids[5:25]]
        found = client.force(server.url, ids, other, forcing.sink_for(other, 8192), top_logprobs=K)
        assert found.output_ids == other
        scored = client.score(server.url, [*ids, *other], len(ids) - 1)
        assert found.logprobs[1:] == pytest.approx(scored.input_logprobs[1:], abs=0.15), "bf16 in another batch"


@pytest.mark.server
@pytest.mark.full
def test_the_generation_phase_of_configurations(tmp_path: Path) -> None:
    """Replies of stock, forced on the lossless tier and on low tiers; the first loses nothing, the second something."""
    questions = REPOSITORY / "benchmarks" / "data" / "dev.jsonl.xz"
    written = tmp_path / "replies.jsonl"
    asked = ["--model", str(NANO), "--n", "4", "--max-new-tokens", "80", "--server-args", "--max-total-tokens 8000"]
    assert replies.main([*asked, "--task", f"reference={questions}", "--output", str(written)]) == 0
    assert len(written.read_text().splitlines()) == 4
    lossless, low = 'lossless={"tiers":["BF16"]}', 'low={"policy":{"name":"diffkv","alpha_high":1e9,"window":16}}'
    configs = ["--config", "stock", "--config", lossless, "--config", low]
    output = tmp_path / "out"
    assert cli.main([*asked, *configs, "--task", f"replies={written}", "--output", str(output)]) == 0
    results = {x["configuration"]: x for x in json.loads((output / "results.json").read_text())["results"]}
    assert all(x["failed"] == 0 for x in results.values())
    kept, lost = (results[name]["closeness"] for name in ("lossless", "low"))
    assert kept["divergence"]["mean"] < 0.002 < 2 * kept["divergence"]["mean"] + 0.002 < lost["divergence"]["mean"]
    assert kept["agreement"]["mean"] > 0.97
