"""LongBench and RULER: what is read, how it is asked, and which score a reply has."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from sglang_diffkv.evaluate import cli
from sglang_diffkv.evaluate.prompts import chat_ids, without_middle
from sglang_diffkv.evaluate.tasks import Options, TaskFileError, load_task, longbench, scores
from tests.tools.evaluation import DATA, results, run, tokenizer, tokenizer_of
from tests.tools.fake_server import FakeServer

QASPER = DATA / "longbench" / "qasper.jsonl"


def load(kind, path, **options):
    task = load_task(f"{kind}={path}", Options(**options))
    return task, {example.id: example for example in task.examples}


def test_f1_and_rouge():
    assert scores.words("The wind, at nine Harbours!") == ["wind", "at", "nine", "harbours"]
    assert scores.f1(["wind", "wind", "sea"], ["wind", "sea", "sky", "sky"]) == pytest.approx(2 * 2 / 7)
    assert scores.f1([], ["wind"]) == scores.f1(["sea"], ["wind"]) == scores.rouge_l([], []) == 0
    assert scores.characters("答案是、 Oslo。") == list("答案是oslo")
    assert scores.rouge_l(list("abcd"), list("bxda")) == pytest.approx(2 * 2 / 8)
    assert scores.rouge_l(list("dcba"), list("abcd")) == pytest.approx(2 / 8), "order counts"


def test_classes_numbers_and_lines():
    classes = ["Person", "City", "Group of Person"]
    assert scores.classified("City", "City", classes) == 1
    assert scores.classified("City or Person", "City", classes) == 0.5
    assert scores.classified("Group of Person", "Group of Person", classes) == 1, "a part of the name does not count"
    assert scores.classified("City", "Person", classes) == scores.classified("none", "City", classes) == 0
    assert scores.numbered("Paragraph 12, not 7", "Paragraph 12") == 0.5
    assert scores.numbered("none", "3") == 0 and scores.numbered("13", "3") == 0
    assert scores.similar_line("```python\n# add\n    return a + b\nreturn 0", "    return a + b") == 1
    assert scores.similar_line("return a", "    return a + b") == pytest.approx(2 * 8 / 24, abs=0.01)
    assert scores.similar_line("```", "return") == 0


def test_longbench_is_asked_as_its_data_sets_say():
    task, found = load("longbench", DATA / "longbench")
    assert task.metric == "score" and len(found) == 4
    qasper, trec, lcc = (found[f"{name}.jsonl/1"] for name in ("qasper", "trec", "lcc_e"))
    assert (qasper.max_new_tokens, trec.max_new_tokens, lcc.task) == (128, 64, "lcc")
    assert "wind at {input} nine harbours" in qasper.prompt, "fields of a text are not filled in"
    assert qasper.prompt.count("What was measured?") == 1
    assert not qasper.plain and trec.plain and trec.prompt.endswith("Who was Ada Lovelace?\nType:")
    asked = {question.id: question for question in task.questions(tokenizer())}
    assert list(asked[qasper.id].prompt_ids) == chat_ids(tokenizer(), qasper.prompt)
    assert list(asked[trec.id].prompt_ids) == tokenizer().encode(trec.prompt)
    assert asked[trec.id].limit(4096) == 64 and asked[trec.id].limit(10) == 10


def test_longbench_scores_by_data_set():
    task, _ = load("longbench", DATA / "longbench")
    assert task.grade("Wind.", ("qasper.jsonl/1",)) == 1, "the best of the answers"
    assert task.grade("the wind", ("qasper.jsonl/1",)) == 1
    assert task.grade("Wind at sea", ("qasper.jsonl/1",)) == pytest.approx(2 * 2 / 7)
    assert task.grade("\nPerson\nType: City", ("trec.jsonl/1",)) == 1, "the first line alone"
    assert task.grade("    return a + b\n", ("lcc_e.jsonl/1",)) == 1
    assert longbench.DATA_SETS.keys() >= {"narrativeqa", "gov_report", "passage_retrieval_zh", "repobench-p"}
    assert all("{context}" in x.prompt for x in longbench.DATA_SETS.values())


def test_longbench_s_own_prompts_are_taken_from_the_folder(tmp_path):
    shutil.copy(QASPER, tmp_path)
    plain = load("longbench", tmp_path)[0].fingerprint()
    (tmp_path / "dataset2prompt.json").write_text(json.dumps({"qasper": "Paper: {context}\nQ: {input}"}))
    task, found = load("longbench", tmp_path)
    assert found["qasper.jsonl/2"].prompt == "Paper: It was not cold.\nQ: Was it cold?"
    assert task.fingerprint() != plain
    (tmp_path / "dataset2prompt.json").write_text('{"qasper": "no field"}')
    with pytest.raises(TaskFileError, match=r"dataset2prompt\.json: expected an object of prompts"):
        load("longbench", tmp_path)


def test_long_prompts_lose_their_middle():
    text = " ".join(str(x) for x in range(400))
    cut = without_middle(tokenizer(), text, 60)
    ids = tokenizer().encode(text, add_special_tokens=False)
    assert cut == tokenizer().decode(ids[:30]) + tokenizer().decode(ids[-30:])
    assert without_middle(tokenizer(), "short", 60) == "short"
    task, _ = load("longbench", QASPER, max_prompt_tokens=20)
    whole, _ = load("longbench", QASPER)
    assert task.fingerprint() == {**whole.fingerprint(), "max_prompt_tokens": 20}
    for few, all_ in zip(task.questions(tokenizer()), whole.questions(tokenizer())):
        assert len(few.prompt_ids) < len(all_.prompt_ids)


def test_ruler_s_tasks_have_its_scores_and_limits():
    task, found = load("ruler", DATA / "ruler")
    by_task = {example.task: example for example in found.values()}
    assert {name: x.max_new_tokens for name, x in by_task.items()} == {"niah_multivalue": 128, "vt": 30, "qa_1": 32}
    assert by_task["niah_multivalue"].reply_prefix == " They are"
    assert task.grade("3315 only", by_task["niah_multivalue"].answers) == 0.5
    assert task.grade("ab, cd", by_task["vt"].answers) == 1
    assert task.grade("In norway", by_task["qa_1"].answers) == 1 and task.grade("?", by_task["qa_1"].answers) == 0
    one, _ = load("ruler", DATA / "ruler" / "vt" / "validation.jsonl")
    assert [x.task for x in one.examples] == ["vt"]


@pytest.mark.parametrize(
    ("kind", "name", "changes", "message"),
    [
        ("longbench", "x.jsonl", {"dataset": "poems"}, r"x\.jsonl, line 1: unknown data set 'poems'"),
        ("longbench", "x.jsonl", {"answers": []}, "line 1: 'answers' must be a list"),
        ("longbench", "x.jsonl", {"dataset": "trec"}, "line 1: 'all_classes' does not have the answer 'wind'"),
        ("longbench", "x.jsonl", {"dataset": "passage_count"}, "line 1: an answer of passage_count has a number"),
        ("ruler", "vt.jsonl", {"outputs": []}, r"vt\.jsonl, line 1: 'outputs' must be a list"),
        ("ruler", "poems.jsonl", {"outputs": ["x"]}, "'poems' is no task of RULER"),
    ],
)
def test_unusable_files_are_refused_by_line(kind, name, changes, message, tmp_path):
    base = {"input": "i", "context": "c", "answers": ["wind"], "dataset": "qasper", "all_classes": None}
    (tmp_path / name).write_text(json.dumps({**base, **changes}) + "\n")
    with pytest.raises(TaskFileError, match=message):
        load(kind, tmp_path / name)
    (tmp_path / name).unlink()
    with pytest.raises(TaskFileError, match="no JSON Lines file"):
        load(kind, tmp_path)


def test_scores_are_means_with_paired_errors(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "load_tokenizer", tokenizer_of)
    options = ["--task", f"longbench={QASPER}", "--task", f"ruler={DATA / 'ruler'}", "--max-prompt-tokens", "300"]

    def reply(ids):
        return "wind no 9082 AB Norway"

    def worse(ids):
        return "wind and sea" if "measured" in tokenizer().decode(ids) else "9082"

    with FakeServer(reply, context=4096, share=None) as first, FakeServer(worse, context=4096) as second:
        assert run(first, tmp_path, "first", *options) == 0
        assert run(second, tmp_path, "second", *options) == 0
        assert {x["sampling_params"]["max_new_tokens"] for x in first.requests} == {128, 30, 32}
    found = results(tmp_path)["second"]  # of the last suite, RULER
    gains = [0.0, -0.5, -1.0]
    spread = math.sqrt(sum((x + 0.5) ** 2 for x in gains) * 3 / 2) / 3
    assert (found["metric"], found["score"]["n"], found["score"]["mean"]) == ("score", 3, pytest.approx(1 / 6))
    assert found["difference"] == {"n": 3, "mean": -0.5, "error": pytest.approx(spread), "won": 0, "lost": 2, "p": 0.5}
    out = capsys.readouterr().out
    assert "| configuration | n | score % |" in out and "### Score %, mean over task files" in out
    assert "### ruler/ruler: score % by task" in out
