from dataclasses import replace

import pytest

from benchmarks import splits
from benchmarks.quality.fewshot import apply_rule, enlarge, read_rule
from sglang_diffkv.evaluate.tasks import reference


@pytest.mark.parametrize("split", splits.SPLITS)
def test_every_group_follows_the_rule_of_its_examples(split: str) -> None:
    for name, items in reference.groups(splits.load(split)).items():
        more = enlarge(items, 64)
        assert more[: len(items)] == items
        assert len({item.prompt for item in more}) == len({item.id for item in more}) == 64
        assert {item.group for item in more} == {name}
        rule = read_rule(items[0].prompt)
        for item in more[len(items) :]:
            head, _, words = item.prompt.rpartition("in: ")
            assert items[0].prompt.startswith(head)
            assert item.answers[0] == apply_rule(rule, words.split())
            assert reference.grade(item.reply, item.answers)


def test_fewer_questions_are_those_of_the_file() -> None:
    items = next(iter(reference.groups(splits.load("dev")).values()))
    assert enlarge(items, 3) == items[:3]


def test_a_wrong_answer_is_found() -> None:
    items = next(iter(reference.groups(splits.load("dev")).values()))
    with pytest.raises(ValueError, match="does not follow the rule"):
        enlarge([*items[:2], replace(items[2], answers=("x",))], 20)


@pytest.mark.parametrize(
    "prompt",
    ["in: a b out: 1\nNow you.\nin: a", "in: a out: 1\nin: a out: 2\nNow you.\nin: a", "in: a out: 1", "Now you."],
)
def test_prompts_without_a_rule_are_refused(prompt: str) -> None:
    with pytest.raises(ValueError):
        read_rule(prompt)
