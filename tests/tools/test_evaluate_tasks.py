"""Task files: what is read from them, which questions are chosen, and which replies are right."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from benchmarks import splits
from benchmarks.paths import DATA as SPLITS_FOLDER
from benchmarks.paths import NANO
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.tasks import (
    Options,
    TaskFileError,
    aime,
    choices,
    gsm8k,
    load_task,
    math_problems,
    needle,
    reference,
)
from sglang_diffkv.evaluate.tasks.files import sha256
from sglang_diffkv.evaluate.tasks.generation import GenerationTask
from sglang_diffkv.evaluate.tasks.math_problems import last_boxed
from sglang_diffkv.evaluate.tasks.wikitext import PerplexityTask

DATA = Path(__file__).parents[1] / "data" / "evaluate"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(NANO)


def load(spec: str, **options: object) -> GenerationTask:
    kind, _, name = spec.partition("=")
    task = load_task(f"{kind}={DATA / name}", Options(**options))  # type: ignore[arg-type]
    assert isinstance(task, GenerationTask)
    return task


def ids(task: GenerationTask) -> list[str]:
    return [example.id for example in task.examples]


def test_reference_selection():
    task = load("reference=reference.jsonl", levels=["easy"], exclude=["few"])
    assert task.name == "reference/reference"
    assert sorted(ids(task)) == ["t-add-easy-0", "t-add-easy-1", "t-sort-easy-0"]
    assert ids(load("reference=reference.jsonl", levels=["easy"], exclude=["few"], n=2)) == ids(task)[:2]
    assert ids(load("reference=reference.jsonl", only=["sort"])) == ["t-sort-easy-0"]
    assert ids(load("reference=reference.jsonl", seed=1)) != ids(load("reference=reference.jsonl"))


def test_reference_selection_is_that_of_the_splits():
    path = SPLITS_FOLDER / "calib.jsonl.xz"
    task = load_task(f"reference={path}", Options(n=30, levels=["easy"], exclude=["vars"], seed=2))
    expected = reference.select(splits.load("calib"), levels=["easy"], exclude=["vars"], n=30, seed=2)
    assert isinstance(task, GenerationTask) and task.name == "reference/calib"
    assert ids(task) == [item.id for item in expected]


def test_a_prompt_is_the_chat_template_s(tokenizer):
    question = load("reference=reference.jsonl", only=["sort"]).questions(tokenizer)[0]
    assert list(question.prompt_ids) == chat_ids(tokenizer, "Sort: 3 1 2.")
    assert (question.task, question.answers) == ("sort", ("1 2 3",))


def test_reference_judges_the_last_answer():
    assert reference.grade("1+1 is 3\nAnswer: 3\nno, Answer: 2\n", ("2",))
    assert not reference.grade("2", ("2",))


def test_shared_questions_come_group_by_group():
    task = load("shared=reference.jsonl")
    groups = [example.group for example in task.examples]
    assert len(groups) == 4 and groups in (["a", "a", "b", "b"], ["b", "b", "a", "a"])
    assert [example.id[-1] for example in task.examples] == ["0", "1", "0", "1"]
    assert ids(load("shared=reference.jsonl", n=3)) == ids(task)[:3]


def test_gsm8k_reads_and_strips_its_mark():
    task = load("gsm8k=gsm8k.jsonl")
    assert {example.answers[0] for example in task.examples} == {"39", "10000", "-5"}
    assert all("####" not in example.prompt.split("\n")[0] for example in task.examples)


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("There are 48, so 48 - 9 = 39.\n#### 39", "39", True),
        ("#### 10,000 kg", "10000", True),
        ("#### 39.0", "39", True),
        ("#### 40\nWait.\n#### 39", "39", True),
        ("#### 39 jars, not 48", "39", True),
        ("#### none", "39", False),
        (r"So \boxed{39} of the 48", "39", True),
        ("It is 48 - 9, which makes 39.", "39", True),
        ("39 of 48", "39", False),
        ("It falls to -5 degrees", "-5", True),
        ("It falls to 5 degrees", "-5", False),
        ("no number", "39", False),
    ],
)
def test_gsm8k_judge(text, answer, right):
    assert gsm8k.grade(text, (answer,)) is right


def test_last_boxed_balances_braces():
    assert last_boxed(r"\boxed{1} and \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{1} and then \boxed{2") == "1"
    assert last_boxed(r"\fbox {x}") == "x"
    assert last_boxed("boxed 3") is None


def test_math_reads_lines_and_folders():
    task = load("math=math.jsonl")
    assert {example.answers[0] for example in task.examples} == {r"2\sqrt{2}", r"\dfrac{1}{2}"}
    assert {example.task for example in task.examples} == {"Geometry", "Counting & Probability"}
    folder = load("math=math")
    assert sorted(ids(folder)) == ["first", "second"]
    assert folder.fingerprint()["sha256"] != task.fingerprint()["sha256"]


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        (r"\dfrac12", r"\frac{1}{2}"),
        ("1/2", r"\frac{1}{2}"),
        (r"-\frac{3}{4}", r"\frac{-3}{4}"),
        (r"\left( 3,\, 4 \right)", "(3,4)"),
        ("x = 5", "5"),
        (r"12\text{ cm}^2", "12"),
        (r"120^\circ", "120"),
        (r"\$1,250.50", "1250.5"),
        (".5", "0.5"),
        ("3.00", "3"),
        (r"25\%", "25"),
        (r"\text{Tuesday}", "Tuesday"),
        (r"2\sqrt2", r"2\sqrt{2}"),
        ("7.", "7"),
        ("100,000", "100000"),
    ],
)
def test_math_forms_that_mean_the_same(given, answer):
    assert math_problems.grade(rf"so \boxed{{{given}}}", (answer,))


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("0.5", r"\frac{1}{2}"),
        ("(1,2)", "12"),
        ("-3", "3"),
        (r"\frac{1}{3}", r"\frac{3}{1}"),
        ("100", "1"),
        ("", "0"),
        (r"x^2", "2"),
        ("1,23", "123"),
    ],
)
def test_math_forms_that_differ(given, answer):
    assert not math_problems.grade(rf"so \boxed{{{given}}}", (answer,))
    assert not math_problems.grade(answer, (answer,)), "a reply without a box is not right"


def test_needle_needs_every_value(tokenizer):
    task = load("needle=niah.jsonl")
    by_id = {example.id: example for example in task.examples}
    assert by_id["2"].answers == ("9082", "3315") and by_id["2"].task == "niah"
    assert needle.grade("3315 and 9082.", by_id["2"].answers)
    assert not needle.grade("Only 3315.", by_id["2"].answers)
    assert needle.grade("it is ab-C", ("AB-c",))
    question = next(x for x in task.questions(tokenizer) if x.id == "1")
    text = tokenizer.decode(question.prompt_ids)
    assert text.endswith("<|assistant|> The special number for lantern is")


def test_wikitext_windows_score_every_token_once(tokenizer):
    task = load_task(f"wikitext={DATA / 'prose.txt'}", Options(prefix_tokens=40, window_tokens=16))
    assert isinstance(task, PerplexityTask)
    questions = sorted(task.questions(tokenizer), key=lambda q: int(q.id))
    tokens = tokenizer.encode((DATA / "prose.txt").read_text(), add_special_tokens=False)
    scored = []
    for question in questions:
        assert question.prompt_ids[0] == tokenizer.bos_token_id
        assert len(question.prompt_ids) == 40 + 1 + 16 and question.cached_tokens == 40
        at = int(question.id)
        assert list(question.prompt_ids[1:]) == tokens[at : at + 56]
        scored += range(at + 40, at + 56)
    assert len(questions) > 5 and scored == list(range(40, 40 + 16 * len(questions)))
    assert len(tokens) - scored[-1] <= 16, "the text's end is left out"
    few = load_task(f"wikitext={DATA / 'prose.txt'}", Options(n=2, prefix_tokens=40, window_tokens=16))
    assert [q.id for q in few.questions(tokenizer)] == [q.id for q in task.questions(tokenizer)][:2]


def test_wikitext_needs_a_long_enough_text(tokenizer):
    task = load_task(f"wikitext={DATA / 'prose.txt'}", Options())
    with pytest.raises(TaskFileError, match=r"fewer than the 1152 of one window"):
        task.questions(tokenizer)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("So it is 4. The answer is (B).", "B"),
        ("The answer is (A)? No: it is heavier. The answer is (C)", "C"),
        ("**Answer: D**", "D"),
        ("Answer: **J**", "J"),
        (r"the answer is $\boxed{E}$.", "E"),
        (r"Hence \boxed{\text{(F)}}", "F"),
        ("The answer is B because A is not", "B"),
        ("The answer is A.", "A"),
        ("The answer is a number", None),
        ("The answer is A number", None),
        ("answer: I think so", None),
        ("The answer is Berlin", None),
        (" (b). ", "B"),
        ("no idea", None),
    ],
)
def test_the_letter_that_a_reply_names(text, letter):
    assert choices.letter(text) == letter


def test_mmlu_is_read_in_its_three_forms(tmp_path):
    rows = ['"Which, of these, is even?",1,3,4,7,C', "What is 1 + 1?,2,3,4,5,A"]
    for name in ("high_school_algebra_test.csv", "anatomy_test.csv"):
        (tmp_path / name).write_text("\n".join(rows) + "\n")
    folder = load_task(f"mmlu={tmp_path}", Options())
    assert [x.task for x in folder.examples].count("anatomy") == 2 and len(folder.examples) == 4
    one = load_task(f"mmlu={tmp_path / 'anatomy_test.csv'}", Options())
    even = next(x for x in one.examples if "even" in x.prompt)
    assert even.answers == ("C",) and "Which, of these, is even?\n\n(A) 1\n(B) 3\n(C) 4\n(D) 7\n" in even.prompt
    before = folder.fingerprint()["sha256"]
    (tmp_path / "anatomy_test.csv").write_text(rows[0] + "\n")
    assert load_task(f"mmlu={tmp_path}", Options()).fingerprint()["sha256"] != before
    lines = tmp_path / "mmlu.jsonl"
    record = {"question": "Which is even?", "choices": ["1", "3", "4", "7"], "answer": 2, "subject": "algebra"}
    lines.write_text(json.dumps(record) + "\n")
    (found,) = load_task(f"mmlu={lines}", Options()).examples
    assert (found.task, found.answers) == ("algebra", ("C",))
    lines.write_text(json.dumps({**record, "answer": 4}) + "\n")
    with pytest.raises(TaskFileError, match="line 1: the answer is 'E' of 4 choices"):
        load_task(f"mmlu={lines}", Options())
    (tmp_path / "anatomy_test.csv").write_text("a,b,c\n")
    with pytest.raises(TaskFileError, match=r"anatomy_test\.csv, line 1: expected a question, four choices"):
        load_task(f"mmlu={tmp_path}", Options())


def test_mmlu_pro_has_up_to_ten_choices(tmp_path):
    path = tmp_path / "pro.jsonl"
    record = {"question": "?", "options": [f"o{i}" for i in range(10)], "answer": "J", "category": "law"}
    path.write_text(json.dumps(record) + "\n")
    (found,) = load_task(f"mmlu_pro={path}", Options()).examples
    assert found.answers == ("J",) and found.task == "law" and "(J) o9" in found.prompt


def test_gpqa_s_choices_are_in_an_order_of_their_own(tmp_path):
    path = tmp_path / "gpqa.csv"
    header = "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3,High-level domain\n"
    path.write_text(header + "".join(f"q{i},right,w1,w2,w3,Physics\n" for i in range(40)))
    examples = load_task(f"gpqa={path}", Options()).examples
    assert {x.answers[0] for x in examples} == set("ABCD") and {x.task for x in examples} == {"Physics"}
    assert all(f"({x.answers[0]}) right" in x.prompt for x in examples)
    assert examples == load_task(f"gpqa={path}", Options()).examples
    path.write_text("Question,Answer\n")
    with pytest.raises(TaskFileError, match="no column 'Correct Answer'"):
        load_task(f"gpqa={path}", Options())


def test_aime(tmp_path):
    path = tmp_path / "aime.jsonl"
    path.write_text('{"ID": "2024-I-1", "Problem": "p", "Answer": 25}\n{"problem": "q", "answer": "073"}\n')
    examples = load_task(f"aime={path}", Options()).examples
    assert {(x.id, x.answers[0]) for x in examples} == {("2024-I-1", "25"), ("2", "073")}
    assert aime.grade(r"so \boxed{73}.", ("073",)) and aime.grade("it is 1, no: 73", ("073",))
    assert not aime.grade(r"73, so \boxed{37}", ("073",)) and not aime.grade("no idea", ("073",))
    path.write_text('{"problem": "q", "answer": "x"}\n')
    with pytest.raises(TaskFileError, match="line 1: the answer 'x' is no number"):
        load_task(f"aime={path}", Options())


def test_compressed_files_are_read(tmp_path):
    path = tmp_path / "gsm8k.jsonl.xz"
    path.write_bytes(lzma.compress((DATA / "gsm8k.jsonl").read_bytes()))
    task = load_task(f"gsm8k={path}", Options())
    assert isinstance(task, GenerationTask) and len(task.examples) == 3
    assert task.name == "gsm8k/gsm8k" and task.fingerprint()["sha256"] == sha256(path)


@pytest.mark.parametrize(
    ("kind", "record", "message"),
    [
        ("reference", {"id": "1", "task": "t", "level": "easy", "prompt": "p"}, "line 1: no field 'answer'"),
        ("gsm8k", {"question": "q", "answer": "39"}, "does not end with ####"),
        ("math", {"problem": "p", "solution": "4"}, r"no \\boxed"),
        ("needle", {"input": "i", "outputs": []}, "at least one value"),
        ("shared", {"id": "1", "task": "t", "level": "easy", "prompt": "p", "answer": "a"}, "no question has a group"),
        ("needle", ["input"], "expected an object"),
        (
            "reference",
            {"id": [], "task": "t", "level": "easy", "prompt": "p", "answer": "a"},
            "'id' is no text or number",
        ),
        (
            "reference",
            {"id": "1", "task": "t", "level": "easy", "prompt": None, "answer": "a"},
            "'prompt' is not text, but null",
        ),
        (
            "reference",
            {"id": "1", "task": "t", "level": "easy", "prompt": "p", "answer": "a", "reference": 7},
            "'reference' is not text",
        ),
        (
            "replies",
            {"id": [], "task": "t", "prompt_ids": [1], "reply_ids": [1, 2]},
            "'id' is no text or number",
        ),
        ("gsm8k", {"question": 5, "answer": "#### 5"}, "'question' is not text, but 5"),
        ("math", {"problem": "p", "solution": {}}, "'solution' is not text, but {}"),
        ("aime", {"problem": [1], "answer": 4}, r"'problem' is not text, but \[1\]"),
        ("mmlu_pro", {"question": "q", "options": "ab", "answer": "A"}, "its choices are a list"),
        (
            "replies",
            {"id": "1", "task": "t", "prompt_ids": "x", "reply_ids": [1, 2]},
            "'prompt_ids' is no list of token ids",
        ),
        (
            "replies",
            {"id": "1", "task": "t", "prompt_ids": [1], "reply_ids": [1.5, 2]},
            "'reply_ids' is no list of token",
        ),
    ],
)
def test_unusable_files_are_refused_by_name(tmp_path, kind, record, message):
    path = tmp_path / "file.jsonl"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    with pytest.raises(TaskFileError, match=message) as error:
        load_task(f"{kind}={path}", Options())
    assert "file.jsonl" in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("file.jsonl", b"\xf9\xf8", "file.jsonl is no text in UTF-8"),
        ("file.jsonl.xz", b"no archive", "file.jsonl.xz is damaged, or not compressed as its name says"),
        ("file.jsonl.xz", lzma.compress(b"{}" * 99)[:-9], "file.jsonl.xz is damaged"),
        ("file.jsonl.gz", b"no archive", "file.jsonl.gz is damaged, or not compressed as its name says"),
        ("file.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:-9], "file.jsonl.gz is damaged"),
        ("folder/file.jsonl", b"", "folder cannot be read: Is a directory"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, tokenizer, name, content, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    for kind in ("gsm8k", "wikitext"):
        with pytest.raises(TaskFileError, match=message):
            load_task(f"{kind}={path if path.parent == tmp_path else path.parent}", Options()).questions(tokenizer)


@pytest.mark.parametrize(
    ("spec", "message"),
    [("poetry=x.jsonl", "KIND=PATH"), ("gsm8k", "KIND=PATH"), ("gsm8k=/no/such.jsonl", "no file")],
)
def test_unusable_specifications_are_refused(spec, message):
    with pytest.raises(TaskFileError, match=message):
        load_task(spec, Options())


def test_other_problems_of_a_file_are_named(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text("{\n", encoding="utf-8")
    with pytest.raises(TaskFileError, match="line 1: not valid JSON"):
        load_task(f"gsm8k={path}", Options())
    path.write_text("", encoding="utf-8")
    with pytest.raises(TaskFileError, match="no questions"):
        load_task(f"gsm8k={path}", Options())
    line = (DATA / "reference.jsonl").read_text(encoding="utf-8").splitlines()[0]
    path.write_text(f"{line}\n{line}\n", encoding="utf-8")
    with pytest.raises(TaskFileError, match="two questions have the id 't-add-easy-0'"):
        load_task(f"reference={path}", Options())
    with pytest.raises(TaskFileError, match="unknown tasks: nope"):
        load("reference=reference.jsonl", only=["nope"])
