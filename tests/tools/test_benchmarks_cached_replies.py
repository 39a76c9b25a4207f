"""The report of replies to cached prompts: what counts as the same, and the row of a run."""

from __future__ import annotations

from benchmarks.serving.cached_replies import first_difference, summary


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2


def test_the_row_of_a_run():
    def question(right: tuple[bool, bool], place: int | None) -> dict:
        computed = {"tokens": 5, "right": right[0], "cached_tokens": 0}
        return {
            "question": "q", "prompt_tokens": 100, "first_difference": place, "computed": computed,
            "cached": {"tokens": 5, "right": right[1], "cached_tokens": 99},
        }  # fmt: skip

    questions = [question((True, True), None), question((True, False), 0), question((False, True), 2)]
    name, n, cached, same, *right, changed = summary({"name": "x", "questions": questions})
    assert (name, n, cached, same, changed) == ("x", "3", "99%", "1 of 3", "+1 -1")
    assert [x.partition(" ")[0] for x in right] == ["66.7", "66.7"]
