"""HumanEval+ and MBPP+: what is read, which code is taken from a reply, how it is run and what it may not do."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from sglang_diffkv.evaluate import cli
from sglang_diffkv.evaluate.code_child import RIGHT, agrees, other_reading
from sglang_diffkv.evaluate.code_runner import Check, Limits, verdict
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.tasks import Options, TaskFileError, load_task
from sglang_diffkv.evaluate.tasks.arguments import examples_of, like
from sglang_diffkv.evaluate.tasks.code import parts
from tests.helpers import until
from tests.tools.evaluation import DATA, results, run, tokenizer, tokenizer_of
from tests.tools.fake_server import FakeServer

CONSENT = Options(run_generated_code=True)
ONE = Check("f", reference=("def f(x):\n    return x + 1\n",), inputs=([1], [2.5]))


def examples(kind: str, path: Path | None = None):
    task = load_task(f"{kind}={path or DATA / f'{kind}.jsonl'}", CONSENT)
    return task, {example.id: example for example in task.examples}


@pytest.mark.parametrize("kind", ["humaneval_plus", "mbpp_plus"])
def test_code_is_run_only_with_leave(kind, tmp_path, capsys):
    with pytest.raises(TaskFileError, match=f"{kind}: grading runs the code .* --run-generated-code"):
        load_task(f"{kind}={DATA / f'{kind}.jsonl'}", Options())
    with FakeServer() as fake:
        assert run(fake, tmp_path, "a", "--task", f"{kind}={DATA / f'{kind}.jsonl'}") == 1
        assert not fake.requests
    assert "--run-generated-code" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["humaneval_plus", "mbpp_plus"])
def test_both_forms_take_their_own_solutions_and_no_stub(kind):
    task, found = examples(kind)
    assert len(found) == 2
    for name, example in found.items():
        assert task.grade(example.reply, (name,)), "the file's own solution is right"
        assert not task.grade("```python\npass\n```", (name,))


def test_prompts_name_the_function_and_show_a_call():
    _, humaneval = examples("humaneval_plus")
    assert "def mean_gap(values: List[float]) -> float:" in humaneval["HumanEval/900"].prompt
    _, mbpp = examples("mbpp_plus")
    assert "assert swap_ends((1, 2)) == (2, 1)" in mbpp["Mbpp/900"].prompt
    assert "whole square roots" in mbpp["901"].prompt and "assert roots(5) ==" in mbpp["901"].prompt


def test_plus_inputs_count():
    task, _ = examples("humaneval_plus")
    signed = "```\ndef mean_gap(v):\n    return (v[-1] - v[0]) / (len(v) - 1) if v[1:] else 0.0\n```"
    assert not task.grade(signed, ("HumanEval/900",)), "right for the base inputs alone"


def test_arguments_have_the_types_that_assertions_show():
    tuples = examples_of("assert set(f((3, 4), [(1, 2)])) == {1}\nnot f(0)\nassert f(x)", "f")
    assert tuples == [[(3, 4), [(1, 2)]]]
    assert like(tuples, [[5, 6], [[7, [8]]]]) == [(5, 6), [(7, (8,))]]
    assert like([[(1, (2, 3), 4)]], [[[1], 2, [3, [4]]]]) == [((1,), 2, (3, (4,)))]
    assert like([[{"a": (1, 2)}, 6.0]], [{"b": [3, 4]}, 7]) == [{"b": (3, 4)}, 7]
    assert like([[[{}, {1, 2}]]], [[[], [3]]]) == [[{}, {3}]]
    assert like([[0, 1j]], ["2", "1+2j"]) == [2.0, 1 + 2j]
    assert like([["a", [1]]], ["1j", [[1]]]) == ["1j", [[1]]]
    assert like([[1]], ["jay"]) == ["jay"]
    assert like([], [[1, [2]]]) == [[1, [2]]]


@pytest.mark.parametrize(
    ("name", "inputs", "given", "wanted", "right"),
    [
        ("f", [], 0.1 + 0.2, 0.3, True),
        ("f", [], [1.0, 2.0 + 1e-9], [1.0, 2.0], True),
        ("f", [], (1.0,), [1.0], False),
        ("f", [], 1.01, 1.0, False),
        ("f", [], float("nan"), float("nan"), True),
        ("f", [], 3, 4, False),
        ("f", [], None, 1.0, False),
        ("similar_elements", [], [5, 4], (4, 5), True),
        ("check_str", [], None, False, True),
        ("check_str", [], None, True, False),
        ("find_zero", [[-4.0, 0.0, 1.0]], -2.0, 2.0, True),
        ("find_zero", [[-4.0, 0.0, 1.0]], 1.0, 2.0, False),
    ],
)
def test_results_that_agree(name, inputs, given, wanted, right):
    assert agrees(name, inputs, given, wanted, 0.0) is right


def test_texts_that_are_read_in_two_ways():
    assert other_reading("digit_distance_nums", [23, 156]) == 1 + 3 + 3
    assert other_reading("surface_Area", [6, 4]) == 36 + 4 * 15
    assert other_reading("sum_div", [12]) == 0 and other_reading("f", [12]) is None
    check = Check("sum_div", reference=("def sum_div(n):\n    return n\n",), inputs=([1], [2]))
    assert verdict("q", ["def sum_div(n):\n    return 0 if n > 1 else 1"], check) == RIGHT
    assert verdict("q", ["def sum_div(n):\n    return 3"], check) == "another result for input 0"


def test_the_code_of_a_reply():
    prompt = "def f(x):\n    '''Adds.'''\n"
    fenced = (
        "First:\n```python\nimport os\n```\nthen\n```python\ndef f(x):\n    return 1\n```\nor\n```\nprint(f(1))\n```"
    )
    assert parts(fenced, prompt, "f") == [prompt, "def f(x):\n    return 1\n"]
    assert parts("```python\ndef f(x):\n    return 2", prompt, "f") == [prompt, "def f(x):\n    return 2"], "cut off"
    assert parts("Sure:\ndef f(x):\n    return 3\nThat is it.", prompt, "f")[1] == "def f(x):\n    return 3"
    assert parts("    return 4\nThat is it.", prompt, "f") == [prompt + "    return 4"]
    assert parts("I do not know.", prompt, "f") == [prompt, ""]


def test_code_that_misbehaves_is_wrong_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    short = Limits(seconds=1, wall=20)
    marker = tmp_path / "marker"
    cases = {
        f"import subprocess\nsubprocess.Popen('sleep 600; touch {marker}', shell=True)\nf = None": "TypeError",
        "import os\ndef f(x):\n    os._exit(0)": "without a result",
        "import sys\ndef f(x):\n    print('right'); sys.exit(0)": "SystemExit",
        "def f(x):\n    while True: pass": "without a result",
        "def f(x):\n    return bytearray(8 << 30)": "MemoryError",
        "import os\ndef f(x):\n    return os.environ['API_KEY']": "KeyError",
        "def f(x) return": "SyntaxError",
        "def g(x):\n    return x": "KeyError",
        "def f(x):\n    x.append(1)": "AttributeError",
    }
    for code, why in cases.items():
        assert why in verdict("q", [code], ONE, short), code
    assert verdict("q", ["def f(x):\n    open('left', 'w').write('x')\n    return x + 1"], ONE, short) == RIGHT
    assert not os.path.exists("left")
    until(lambda: not running(str(marker)))  # what the code started has ended with it


def running(words):
    """Processes with these words in their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            found += [path] if words.encode() in path.read_bytes() else []
    return found


def test_code_that_waits_is_ended():
    begin = time.monotonic()
    sleeper = "import time\ndef f(x):\n    time.sleep(60)"
    assert "without a result" in verdict("q", [sleeper], ONE, Limits(wall=2))
    assert time.monotonic() - begin < 30


def test_a_solution_of_the_file_that_fails_is_no_reply_s_fault():
    broken = Check("f", reference=("def f(x):\n    return x / 0\n",), inputs=([1],))
    with pytest.raises(EvaluationError, match="q: the file's own solution fails here: ZeroDivisionError"):
        verdict("q", ["def f(x):\n    return x"], broken)
    crashed = Check("f", reference=("import os\ndef f(x):\n    os.abort()\n",), inputs=([1],))
    with pytest.raises(EvaluationError, match="q: the file's own solution crashed or did not end"):
        verdict("q", ["def f(x):\n    return x"], crashed)


def test_unusable_code_tasks_are_refused_by_line(tmp_path):
    path = tmp_path / "tasks.jsonl"
    good = [json.loads(x) for x in (DATA / "mbpp_plus.jsonl").read_text().splitlines()]

    def refused(kind, record, message):
        path.write_text(json.dumps(good[0]) + "\n" + json.dumps(record) + "\n")
        with pytest.raises(TaskFileError, match=rf"tasks\.jsonl, line 2: {message}"):
            examples(kind, path)

    refused("mbpp_plus", {**good[0], "plus_input": [1]}, "'base_input' and 'plus_input' must be lists of lists")
    refused("mbpp_plus", {**good[0], "canonical_solution": "def f("}, "the solution is not Python")
    refused("mbpp_plus", {**good[1], "test_list": ["assert other(1)"]}, "the first of 'test_list' calls no function")
    refused("mbpp_plus", {"task_id": 1, "prompt": ""}, "no field 'canonical_solution'")


def test_the_command_judges_by_running(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "load_tokenizer", tokenizer_of)
    _, found = examples("humaneval_plus")

    def reply(ids):
        text = tokenizer().decode(ids)
        return found["HumanEval/901"].reply if "vowels" in text else "```python\ndef mean_gap(v):\n    return 0.0\n```"

    with FakeServer(reply, context=4096) as fake:
        assert run(fake, tmp_path, "a", "--task", f"humaneval_plus={DATA / 'humaneval_plus.jsonl'}",
                   "--run-generated-code") == 0  # fmt: skip
    score = results(tmp_path)["a"]["score"]
    assert (score["n"], score["mean"]) == (2, 0.5)
