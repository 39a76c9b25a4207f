"""Questions that are made without a file: what is asked for is in the text, and nowhere else; costs are told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.paths import NANO
from sglang_diffkv.evaluate import runner
from sglang_diffkv.evaluate.client import RequestError
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.runner import Suite
from sglang_diffkv.evaluate.store import Answer, Store
from sglang_diffkv.evaluate.task import Outcome, Question
from sglang_diffkv.evaluate.tasks import Options, TaskFileError, load_task, made
from sglang_diffkv.evaluate.tasks.generation import GenerationTask


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(NANO))


@pytest.fixture(scope="module")
def questions(tokenizer: Any) -> list[Question]:
    return load_task("made=1500", Options(n=25)).questions(tokenizer)


def text_of(question: Question, tokenizer: Any) -> str:
    return str(tokenizer.decode(question.prompt_ids))


def test_prompts_have_about_the_tokens_asked_for(questions: list[Question]) -> None:
    assert len(questions) == 25 and {x.task for x in questions} == set(made.KINDS)
    assert all(1300 < len(x.prompt_ids) < 1700 for x in questions)
    assert len({x.id for x in questions}) == 25


def test_each_run_asks_the_same_and_fewer_are_the_first(tokenizer: Any, questions: list[Question]) -> None:
    assert load_task("made=1500", Options(n=25)).questions(tokenizer) == questions
    fewer = load_task("made=1500", Options(n=10)).questions(tokenizer)
    assert len(fewer) == 10 and set(fewer) < set(questions)
    assert not set(load_task("made=1500", Options(n=10, seed=1)).questions(tokenizer)) & set(questions)


def test_answers_stand_in_the_text_once(questions: list[Question], tokenizer: Any) -> None:
    for question in questions:
        text, _, asked = text_of(question, tokenizer).rpartition("\n\nQuestion: ")
        context = text.partition("\n\nQuestion: ")[0]
        for answer in question.answers:
            assert re.search(rf"\b{answer}\b", context) and not re.search(rf"\b{answer}\b", asked), question.id
            if question.task != "variables":
                assert len(re.findall(rf"\b{answer}\b", context)) == 1, question.id


def test_keys_ask_for_one_of_many(questions: list[Question], tokenizer: Any) -> None:
    question = next(x for x in questions if x.task == "keys")
    text = text_of(question, tokenizer)
    found = dict(re.findall(r"The secret number of the (.+?) is (\d+)\.", text))
    name = re.search(r"What is the secret number of the (.+?)\?", text)
    assert name is not None and found[name[1]] == question.answers[0] and len(found) > 10
    assert len(set(found.values())) == len(found)


def test_variables_are_one_chain_and_its_order_can_be_followed(questions: list[Question], tokenizer: Any) -> None:
    for question in (x for x in questions if x.task == "variables"):
        text, values = text_of(question, tokenizer), {}
        for name, value in re.findall(r"Let (V\w+) be (\w+)\.", text):
            values[name] = values[value] if value.startswith("V") else value
        number = re.search(r"names have the number (\d+)", text)
        assert number is not None and len(values) == made.CHAIN * made.CHAINS
        assert {x for x, value in values.items() if value == number[1]} == set(question.answers)


def test_turns_share_a_text_and_have_the_answers_before_them(questions: list[Question], tokenizer: Any) -> None:
    turns = [x for x in questions if x.id.startswith("turns/0/")]
    texts = [text_of(x, tokenizer) for x in turns]
    assert len(turns) == made.TURNS and len({x.partition("\n\nQuestion: ")[0] for x in texts}) == 1
    for number, text in enumerate(texts):
        assert text.count("\n\nQuestion: ") == number + 1
        assert all(f"Answer: {before.answers[0]}" in text for before in turns[:number])


def test_a_reply_s_score_is_the_share_that_was_found() -> None:
    question = Question("values/0", "values", (1, 2), ("111111", "222222"))
    task = load_task("made=1024", Options())

    def reply(text: str) -> Outcome:
        record = SimpleNamespace(
            text=text, prompt_tokens=2, completion_tokens=3, cached_tokens=0, latency=0.1, finish_reason="stop"
        )
        return task.ask(question, SimpleNamespace(generate=lambda ids, limit: record))  # type: ignore[arg-type]

    assert reply("They are 222222 and 111111.").score == 1.0 and reply("It is 111111").score == 0.5
    assert reply("").score == 0.0

    def fails(*_: Any) -> Any:
        raise RequestError("full")

    ended = task.ask(question, SimpleNamespace(generate=fails))  # type: ignore[arg-type]
    assert ended.error == "full" and ended.score == 0.0


@pytest.mark.parametrize("given", ["", "many", "12", "-4096", "99999999999", "4_096"])
def test_tokens_that_make_no_text_are_refused(given: str) -> None:
    with pytest.raises(TaskFileError, match="give the tokens of a prompt"):
        load_task(f"made={given}", Options())
    with pytest.raises(TaskFileError, match="no kind is left"):
        load_task("made=4096", Options(only=["riddles"]))
    assert load_task("made=4096", Options(only=["keys"])).questions  # one kind may be chosen


RECORD = {
    "_id": "a1", "context": "A long text about tides.", "question": "When is high water?", "choice_A": "at one",
    "choice_B": "at two", "choice_C": "at three", "choice_D": "never", "answer": "B", "length": "short",
}  # fmt: skip


@pytest.mark.parametrize("lines", [False, True])
def test_longbench_v2(lines: bool, tmp_path: Path) -> None:
    records = [RECORD, {**RECORD, "_id": "a2", "answer": "D", "length": "long"}]
    path = tmp_path / "data.json"
    path.write_text("\n".join(map(json.dumps, records)) if lines else json.dumps(records), encoding="utf-8")
    task = load_task(f"longbench_v2={path}", Options(max_prompt_tokens=50))
    assert isinstance(task, GenerationTask) and task.max_prompt_tokens == 50
    found = {x.id: x for x in task.examples}
    assert found["a1"].answers == ("B",) and found["a2"].task == "long"
    assert "about tides.\n\nWhen is high water?\n\n(A) at one\n(B) at two" in found["a1"].prompt
    assert task.grade("The answer is (B).", ("B",)) and not task.grade("The answer is (C).", ("B",))
    path.write_text(json.dumps([{**RECORD, "answer": "E"}]), encoding="utf-8")
    with pytest.raises(TaskFileError, match="entry 1: the answer is 'E' of 4 choices"):
        load_task(f"longbench_v2={path}", Options())
    path.write_text(json.dumps([{"_id": 1}]), encoding="utf-8")
    with pytest.raises(TaskFileError, match="entry 1: no field 'context'"):
        load_task(f"longbench_v2={path}", Options())


def test_mrcr(tmp_path: Path, tokenizer: Any) -> None:
    chat = [("user", "Write a poem about tides."), ("assistant", "Tides rise."), ("user", "Repeat it behind xQ.")]
    messages = [{"role": role, "content": text} for role, text in chat]
    record = {
        "prompt": json.dumps(messages),
        "answer": "xQTides rise.",
        "random_string_to_prepend": "xQ",
        "n_needles": 2,
    }
    path = tmp_path / "mrcr.jsonl"
    path.write_text(json.dumps(record), encoding="utf-8")
    task = load_task(f"mrcr={path}", Options())
    assert isinstance(task, GenerationTask)
    (question,) = task.questions(tokenizer)
    text = text_of(question, tokenizer)
    assert all(x in text for _, x in chat) and text.index("Tides rise.") < text.index("Repeat it")
    assert question.task == "2 needles"
    assert [task.grade(x, question.answers) for x in ("xQTides rise.", "Tides rise.", "")] == [1.0, 0.0, 0.0]
    assert 0 < task.grade("xQTides fall.", question.answers) < 1
    for wrong in ("[]", "hello", json.dumps(messages[:2]), json.dumps([{"role": "tool", "content": "x"}])):
        path.write_text(json.dumps({**record, "prompt": wrong}), encoding="utf-8")
        with pytest.raises(TaskFileError, match="line 1: "):
            load_task(f"mrcr={path}", Options())


def test_what_is_left_to_ask_is_told(tmp_path: Path) -> None:
    task = load_task("made=1024", Options())
    asked = Question("a", "t", tuple(range(10)), max_new_tokens=5)
    forced = Question("b", "t", tuple(range(20)), reply_ids=(1, 2, 3))
    scored = Question("c", "t", tuple(range(30)), cached_tokens=4)
    suites = [Suite(task, (asked, forced, scored))]
    with Store(tmp_path) as store:
        text = runner.cost(store, ["one", "two"], suites, 100)
        assert text.startswith("to ask: 6 questions, with 120 tokens of prompts and at most 16 of replies")
        store.add(Answer(configuration="one", suite=task.name, id="b", task="t", outcome=Outcome(20)))
        assert "5 questions, with 100 tokens of prompts and at most 13" in runner.cost(
            store, ["one", "two"], suites, 100
        )
