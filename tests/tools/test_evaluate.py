"""``python -m sglang_diffkv.evaluate`` against a stand-in for the server: figures, resuming, refusals."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_diffkv.evaluate import cli, report
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.store import Answer, Store
from sglang_diffkv.evaluate.summary import difference, nats
from sglang_diffkv.evaluate.task import Outcome
from tests.tools.evaluation import DATA, REFERENCE, answers, replies, results, run, tokenizer_of
from tests.tools.fake_server import FakeServer
from tests.tools.test_page import check_page

PROSE = f"wikitext={DATA / 'prose.txt'}"
WINDOWS = ["--prefix-tokens", "40", "--window-tokens", "16"]


@pytest.fixture(autouse=True)
def one_tokenizer(monkeypatch):
    monkeypatch.setattr(cli, "load_tokenizer", tokenizer_of)


def test_accuracy_bytes_and_paired_test(tmp_path, capsys):
    with FakeServer(replies(), share=None) as stock:
        assert run(stock, tmp_path, "stock") == 0
    capsys.readouterr()
    with FakeServer(replies(wrong=("t-add-easy-0", "t-add-hard-0", "t-sort-easy-0"))) as ours:
        assert run(ours, tmp_path, "ours") == 0
        asked, tokens = len(ours.requests), ours.finished["tokens"]
    assert asked == 8
    found = results(tmp_path)
    assert list(found) == ["stock", "ours"]
    score, change, cache = found["ours"]["score"], found["ours"]["difference"], found["ours"]["cache"]
    assert (score["n"], score["mean"]) == (8, 5 / 8)
    assert score["error"] == pytest.approx(math.sqrt(5 / 8 * 3 / 8 / 8))
    assert (change["won"], change["lost"], change["mean"]) == (0, 3, -3 / 8)
    assert change["p"] == 0.25
    assert found["ours"]["by_task"]["add"]["mean"] == pytest.approx(1 / 3)
    assert found["stock"]["difference"] is None
    assert found["stock"]["cache"] == {**found["stock"]["cache"], "measured": False, "ratio_pages": 1.0}
    assert cache["ratio_pages"] == pytest.approx(0.5, abs=0.01)
    assert cache["ratio_tokens"] == pytest.approx(0.45, abs=0.01)
    assert cache["bytes_per_token"] == pytest.approx(50, abs=1)
    assert (cache["share_high"], cache["share_pruned"]) == (0.6, 0.1)
    assert cache["requests"] == cache["asked"] == 8
    assert tokens > 8
    table = capsys.readouterr().out
    assert "| ours | 8 | 62.5 ± 17.1 |  | -37.5 ± 17.1 (+0 -3, p = 0.25) | 0.500 | 0.450 |" in table
    assert "| add | 3 | 100.0 ± 0.0 | 33.3 ± 27.2 |" in table
    assert (tmp_path / "results.md").read_text() == table
    shown = check_page((tmp_path / "report.html").read_text()).text
    assert "ours 8 62.5 ± 17.1 -37.5 ± 17.1 (+0 -3, p = 0.25) 0.500 0.450" in shown
    assert "add 3 100.0 ± 0.0 33.3 ± 27.2" in shown and "Compared with the first one: stock, ours." in shown
    assert "Ratios of stock caches are those of their element sizes" in shown


def test_a_configuration_s_name_and_key_are_no_html(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["evaluate", "--api-key", "s3cret", "--server-args", "--api-key s3cret"])
    with FakeServer(replies(), keys=lambda path: "s3cret") as fake:
        assert run(fake, tmp_path, "<b>x</b>", "--task", REFERENCE, "--api-key", "s3cret") == 0
    page = (tmp_path / "report.html").read_text()
    assert "<b>x</b>" in check_page(page).text
    assert all("s3cret" not in path.read_text() for path in tmp_path.iterdir())


def test_three_tiers_are_named_in_the_table(tmp_path, capsys):
    with FakeServer(replies()) as ours:
        ours.by_tier = {"BF16": 2, "K8V4": 4, "K4V2": 3}
        assert run(ours, tmp_path, "ours") == 0
    assert results(tmp_path)["ours"]["cache"]["share_by_tier"] == {"BF16": 0.2, "K8V4": 0.4, "K4V2": 0.3}
    assert " | BF16 20 / K8V4 40 / K4V2 30 / pruned 10 | " in capsys.readouterr().out


def test_a_second_run_asks_only_what_is_missing(tmp_path):
    with FakeServer(replies()) as fake:
        assert run(fake, tmp_path, "a", "--task", REFERENCE, "--n", "3") == 0
        assert len(fake.requests) == 3
        assert results(tmp_path)["a"]["score"]["n"] == 3
    with FakeServer(replies()) as fake:
        assert run(fake, tmp_path, "a") == 0
        assert len(fake.requests) == 5
        assert run(fake, tmp_path, "a") == 0
        assert len(fake.requests) == 5
    found = results(tmp_path)["a"]
    assert found["score"]["n"] == found["cache"]["requests"] == 8, "bytes of both runs are counted"


def test_a_cut_off_line_is_asked_again(tmp_path):
    with FakeServer(replies()) as fake:
        run(fake, tmp_path, "a")
        path = tmp_path / "answers.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        last = max(i for i, line in enumerate(lines) if '"kind":"answer"' in line)
        path.write_text("".join(lines[:last]) + lines[last][: len(lines[last]) // 2])
        run(fake, tmp_path, "a")
        assert len(fake.requests) == 9
    with Store(tmp_path) as store:
        assert len(store.answered("a", "reference/reference")) == 8


def test_another_configuration_by_the_same_name_is_refused(tmp_path, capsys):
    with FakeServer(replies(), share=None) as stock:
        run(stock, tmp_path, "a")
    with FakeServer(replies()) as ours:
        assert run(ours, tmp_path, "a") == 1
        assert not ours.requests
    assert "backend was 'torch_native', is 'diffkv'" in capsys.readouterr().err


def test_another_task_file_by_the_same_name_is_refused(tmp_path, capsys):
    with FakeServer(replies()) as fake:
        run(fake, tmp_path / "out", "a")
        other = tmp_path / "reference.jsonl"
        other.write_text((DATA / "reference.jsonl").read_text().replace("42", "43"))
        assert run(fake, tmp_path / "out", "a", "--task", f"reference={other}") == 1
        assert run(fake, tmp_path / "out", "a", "--task", REFERENCE, "--max-new-tokens", "5") == 1
        assert len(fake.requests) == 8
    message = capsys.readouterr().err
    assert "sha256 was" in message and "max_new_tokens was 4096, is 5" in message


def test_replies_may_have_any_line_end(tmp_path):
    text = "one\u2028two\x85three\x0b\x0c\x1c\r\nfour"
    outcome = Outcome(3, text=text, right=True)
    with Store(tmp_path) as store:
        store.add(Answer(configuration="a", suite="b", id="1", task="t", outcome=outcome))
    with Store(tmp_path) as store:
        assert store.answers["a", "b"]["1"].outcome.text == text


def test_one_process_writes_a_folder(tmp_path):
    with Store(tmp_path), pytest.raises(EvaluationError, match="another process"):
        Store(tmp_path)


def test_a_line_that_is_no_record_is_refused(tmp_path):
    (tmp_path / "answers.jsonl").write_text('{"kind": "poem"}\n')
    with pytest.raises(EvaluationError, match="line 1 is not a record"):
        Store(tmp_path)


def test_requests_that_the_server_ends_count_as_wrong_until_they_succeed(tmp_path, capsys):
    with FakeServer(replies(aborted=("t-add-easy-1",))) as fake:
        assert run(fake, tmp_path, "a") == 0
    assert results(tmp_path)["a"]["score"]["mean"] == 7 / 8
    assert "a: the server ended 1 requests, counted as wrong." in capsys.readouterr().out
    with FakeServer(replies()) as fake:
        assert run(fake, tmp_path, "a") == 0
        assert len(fake.requests) == 1
    assert results(tmp_path)["a"]["score"]["mean"] == 1
    assert results(tmp_path)["a"]["failed"] == 0


def test_long_requests_are_those_of_the_first_configuration(tmp_path):
    def long(ids):
        return "." * 2000 + replies()(ids) if answers()[tuple(ids)][0] == "t-sort-easy-0" else "Answer: no"

    with FakeServer(long, context=4096) as first, FakeServer(replies()) as second:
        run(first, tmp_path, "first")
        run(second, tmp_path, "second")
    found = results(tmp_path)
    assert found["first"]["long"] == {"n": 1, "mean": 1.0, "error": 0.0}
    assert found["second"]["long"]["n"] == 1
    assert found["first"]["cache"]["long_ratio_pages"] == pytest.approx(0.5)
    assert found["second"]["cache"]["long_ratio_pages"] is None


def test_replies_are_cut_to_the_context(tmp_path):
    longest = max(map(len, answers()))
    with FakeServer(replies(), context=longest + 5) as fake:
        run(fake, tmp_path, "a")
        limits = {len(x["input_ids"]): x["sampling_params"]["max_new_tokens"] for x in fake.requests}
    assert limits[longest] == 4 and all(n + limit == longest + 4 for n, limit in limits.items())
    with FakeServer(replies(), context=longest) as fake:
        assert run(fake, tmp_path / "b", "b") == 1


def test_shared_prefixes_are_reported(tmp_path):
    with FakeServer(replies()) as fake:
        run(fake, tmp_path, "a", "--task", f"shared={DATA / 'reference.jsonl'}", "--concurrency", "1")
        prompts = [tuple(x["input_ids"]) for x in fake.requests]
    groups = [answers()[ids][0][6] for ids in prompts]
    assert groups in (["a", "a", "b", "b"], ["b", "b", "a", "a"])
    assert 0.3 < results(tmp_path)["a"]["cached"] < 0.7


def test_perplexity_scores_behind_a_cached_prefix(tmp_path, capsys):
    def worse(position):
        return -2.0 if position % 2 else -1.0

    with FakeServer(share=None) as stock, FakeServer(logprob=worse) as ours:
        assert run(stock, tmp_path, "stock", "--task", PROSE, *WINDOWS) == 0
        assert run(ours, tmp_path, "ours", "--task", PROSE, *WINDOWS) == 0
        caching = [x for x in ours.requests if "logprob_start_len" not in x]
        scoring = [x for x in ours.requests if "logprob_start_len" in x]
    assert len(caching) == len(scoring) > 5
    prefixes = {tuple(x["input_ids"]) for x in caching}
    for request in scoring:
        assert request["logprob_start_len"] == 40 and tuple(request["input_ids"][:40]) in prefixes
        assert request["sampling_params"]["max_new_tokens"] == 0
    found = results(tmp_path)
    assert found["stock"]["score"]["mean"] == pytest.approx(1.0)
    assert found["ours"]["score"]["mean"] == pytest.approx(1.5), "16 tokens of each window, half of them worse"
    windows = len(scoring)
    assert (found["ours"]["difference"]["won"], found["ours"]["difference"]["lost"]) == (0, windows)
    assert found["ours"]["difference"]["p"] == pytest.approx(2 / 2**windows)
    assert found["ours"]["cache"]["requests"] == found["ours"]["cache"]["asked"] == 2 * windows
    assert f"| {math.exp(1.5):.3f} ± 0.000 | {1.5 / math.log(2):.4f} ± 0.0000 |" in capsys.readouterr().out


def test_distributions_are_compared_with_the_first_ones(tmp_path, capsys):
    half = math.log(0.5)
    low, lower = math.log(0.25), math.log(0.125)

    def first(position):
        return [(half, 1), (low, 2), (lower, 3)]

    def other(position):
        return first(position) if position % 4 else [(half, 2), (low, 1), (lower, 4)]

    with FakeServer(share=None, tops=first) as stock, FakeServer(tops=other) as ours:
        assert run(stock, tmp_path, "stock", "--task", PROSE, *WINDOWS, "--top-logprobs", "3") == 0
        assert run(ours, tmp_path, "ours", "--task", PROSE, *WINDOWS, "--top-logprobs", "3") == 0
        assert {x.get("top_logprobs_num") for x in ours.requests if "logprob_start_len" in x} == {3}
    found = results(tmp_path)
    assert found["stock"]["closeness"] is None
    close = found["ours"]["closeness"]
    assert close["divergence"]["mean"] == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 4, rel=1e-5)
    assert close["divergence"]["n"] == found["ours"]["score"]["n"] and close["divergence"]["error"] == 0
    assert close["agreement"]["mean"] == 0.75
    assert close["covered"] == pytest.approx((3 * 0.875 + 0.75) / 4)
    out = capsys.readouterr().out
    assert "| KL to the first, nats | same likeliest token % |" in out and "| 0.04332 ± 0.00000 | 75.0 ± 0.0 |" in out
    assert "at least 84% of the first" in out

    with FakeServer() as plain:
        assert run(plain, tmp_path / "b", "a", "--task", PROSE, *WINDOWS, "--top-logprobs", "0") == 0
        assert not any("top_logprobs_num" in x for x in plain.requests)
    assert "KL" not in capsys.readouterr().out


def test_one_question_has_no_spread(tmp_path, capsys):
    def tops(position):
        return [(-0.1, 1), (-2.5, 2), (-4.0, 3)]

    asked = ("--task", REFERENCE, "--task", PROSE, *WINDOWS, "--top-logprobs", "3", "--n", "1")
    with FakeServer(replies(), share=None, tops=tops) as stock, FakeServer(replies(), tops=tops) as ours:
        assert run(stock, tmp_path, "stock", *asked) == 0
        assert run(ours, tmp_path, "ours", *asked) == 0
    out = capsys.readouterr().out
    assert "| ours | 1 | 100.0 |  | +0.0 (+0 -0, p = 1) |" in out
    assert "±" not in out and "nan" not in out
    assert "±" not in (tmp_path / "report.html").read_text()


def test_perplexity_without_a_prefix_hit_is_refused(tmp_path, capsys):
    with FakeServer(caches=False) as fake:
        assert run(fake, tmp_path, "a", "--task", PROSE, *WINDOWS) == 1
    assert "only 0 of 40 prefix tokens came from the prefix cache" in capsys.readouterr().err
    with FakeServer(context=50) as fake:
        assert run(fake, tmp_path, "a", "--task", PROSE, *WINDOWS) == 1
        assert not fake.requests


def window(nll: float, tokens: int) -> Answer:
    outcome = Outcome(prompt_tokens=9, nll=nll, scored_tokens=tokens)
    return Answer(configuration="c", suite="s", id="i", task="t", outcome=outcome)


def test_perplexity_is_weighted_by_tokens():
    first = [window(10.0, 10), window(60.0, 30)]
    assert nats(first).mean == pytest.approx(70 / 40)
    residual = 10 - 10 * 70 / 40
    assert nats(first).error == pytest.approx(math.sqrt(2 * residual**2 * 2) / 40)
    change = difference("perplexity", first, [window(11.0, 10), window(59.5, 30)])
    assert change.mean == pytest.approx(0.5 / 40)
    assert (change.won, change.lost, change.p) == (1, 1, 1.0)
    assert math.isnan(nats(first[:1]).error)


def test_an_unreachable_server_in_mid_run_is_reported(tmp_path, capsys):
    count = []

    def reply(ids):
        count.append(1)
        if len(count) > 2:
            fake._server.shutdown()
            fake._server.server_close()
            raise ConnectionAbortedError
        return replies()(ids)

    with FakeServer(reply) as fake:
        assert run(fake, tmp_path, "a", "--task", REFERENCE, "--concurrency", "1") == 1
    assert capsys.readouterr().err.endswith(
        "sglang_diffkv.evaluate: the server stopped answering: the connection ended\n"
    )
    with FakeServer(replies()) as fake:
        assert run(fake, tmp_path, "a") == 0
        assert len(fake.requests) == 6


def test_the_command_names_no_path_of_this_machine(monkeypatch):
    main = SimpleNamespace(__spec__=SimpleNamespace(name="sglang_diffkv.evaluate.__main__"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["/somewhere/evaluate/__main__.py", "--n", "3"])
    assert report.environment()["command"] == f"{Path(sys.executable).name} -m sglang_diffkv.evaluate --n 3"
