"""Random lives of requests where a layer has a sliding window: whatever a row has matched, it finds all that its next
query may see, and holds little more."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from sglang_diffkv.layout import spans as attention_span
from sglang_diffkv.layout.geometry import Segment
from sglang_diffkv.layout.page_format import Tier
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.layout.spans import joined_end, retained_tokens, served_end
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.uniform import UniformPolicy
from tests.helpers import visible
from tests.tree.test_prefix_cache import TreeMachine, machine_settings

REACH, SLACK = 6, 5


class SlidingTreeMachine(TreeMachine):
    """With compressed fidelity. The slack is small, so that much is dropped."""

    attention_spans = (REACH, 0)

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.usual, attention_span.SLACK = attention_span.SLACK, SLACK
        super().__init__(ranks)

    def teardown(self) -> None:
        attention_span.SLACK = self.usual

    def check_step(self, batch: list[Any]) -> None:
        for req in batch:
            row = req.kv.req_pool_idx
            if row not in self.manager.prompts.untouched:
                seen = visible(self.manager.state, row).at(0, 0)
                assert seen.own.sum() <= retained_tokens(REACH), (
                    "a sliding layer holds more than its window and the slack"
                )


class ExactSlidingTreeMachine(SlidingTreeMachine):
    """With exact fidelity and nothing dropped from the other layer."""

    exact = True
    tiers = (Tier(8, 4),)
    policy: Policy = UniformPolicy()


SlidingTreeMachine.TestCase.settings = ExactSlidingTreeMachine.TestCase.settings = machine_settings(60)
TestSlidingTree = SlidingTreeMachine.TestCase
TestExactSlidingTree = ExactSlidingTreeMachine.TestCase


def segment(lo: int, hi: int, end: int, *, as_computed: bool = False) -> tuple[Segment, int, int]:
    return Segment(0, lo, hi, end=end, as_computed=as_computed), lo, hi


@pytest.mark.parametrize(
    ("path", "served"),
    [
        ([segment(0, 300, 300)], 300),
        ([segment(0, 280, 300)], 280),  # within the slack of 32
        ([segment(0, 267, 300)], 0),
        ([segment(0, 200, 900, as_computed=True)], 200),
        ([segment(0, 20, 35)], 20),  # nothing of so short a sequence was dropped
        ([segment(0, 100, 100), segment(100, 150, 300)], 100),
        ([segment(0, 60, 200), segment(60, 70, 70)], 0),  # ends in what the first part has dropped
        ([segment(0, 60, 200), segment(60, 70, 70), segment(70, 90, 90)], 90),
        ([segment(0, 60, 200), segment(60, 71, 71, as_computed=True)], 71),
        ([segment(0, 60, 200), segment(60, 68, 68, as_computed=True)], 0),
        ([], 0),
    ],
)
def test_a_match_ends_where_the_windows_are_whole(path: list[Any], served: int) -> None:
    assert served_end(path, (0, 12)) == served
    assert served_end(path, ()) == sum(hi - lo for _, lo, hi in path)


def test_a_joined_segment_serves_where_its_parts_do() -> None:
    parts = [segment(0, 60, 200), segment(60, 90, 95), segment(90, 99, 99, as_computed=True)]
    end = joined_end(parts, 12)
    assert end == max(99, 60 + 11 + attention_span.SLACK, 95)
    assert joined_end(parts[2:], 12) == 99


def test_a_prompt_that_is_asked_again_is_found_and_a_branch_in_its_middle_computes_anew() -> None:
    """With compressed fidelity; behind the branch both are found to their ends."""
    machine = SlidingTreeMachine()
    try:
        first = array("q", [1] * 40 + [2] * 40)
        other = array("q", [1] * 40 + [3] * 30)
        for tokens, found in ((first, 0), (other, 0), (first, 79), (other, 69)):
            machine.admit_tokens(array("q", tokens))
            assert machine.running[-1].prefix_len == found
            while any(x.prefilling for x in machine.running):
                machine.extend(49)
            machine.structures_are_consistent()
            machine.every_row_reads_its_own_tokens()
            machine._leave(machine.running[-1], insert=True)
    finally:
        machine.teardown()
