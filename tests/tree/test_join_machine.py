"""Random lives of requests through the tree, with paths joined between the operations."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from sglang_diffkv.kernels.table import max_entries, row_table
from sglang_diffkv.layout.state import PageState
from tests.policies import diffkv_policy
from tests.tree.test_prefix_cache import WINDOW, ExactTreeMachine, TreeMachine, machine_settings


def entries_taken(state: PageState, row: int, lo: int, hi: int) -> list[int]:
    """Entries of each tier, at most, of the pages of a row that hold a token of [lo, hi)."""
    most = []
    for tier, view in enumerate(state.tiers):
        rows = torch.tensor([row])
        page, page_lo, page_hi = (x[0] for x in row_table(state, rows, tier, max_entries(state, rows, tier)))
        at = view.positions[page]
        held = (at >= page_lo.clamp(min=lo).unsqueeze(3)) & (at < page_hi.clamp(max=hi).unsqueeze(3))
        most.append(int(held.any(3).sum(2).max()))
    return most


class JoiningMachine(TreeMachine):
    """Any path may be joined at any time."""

    def __init__(self) -> None:
        super().__init__()
        ledger = self.allocator.ledger
        admits = ledger.admits

        def settled(new_tokens: int, blocks: int) -> bool:
            """Waiting for the device while pages are evicted must not look a step further than admission did."""
            self.manager.counts.settle()
            return admits(new_tokens, blocks)

        ledger.admits = settled  # type: ignore[method-assign]

    @rule(which=st.integers(0, 50), evict=st.booleans())
    def join(self, which: int, evict: bool) -> None:
        stack, nodes = list(self.tree.root_node.children.values()), []
        while stack:
            node = stack.pop()
            nodes.append(node)
            stack.extend(node.children.values())
        if nodes:
            nodes.sort(key=lambda n: n.id)
            node = nodes[which % len(nodes)]
            before = len(self.tree.path(node))
            if self.tree.joiner.join(node, evict=evict):
                assert before >= 2

    @rule()
    def tidy(self) -> None:
        """The scheduler comes round: paths of requests that have ended are looked at."""
        self.requests.scheduling_begins([])

    @invariant()
    def reads_are_bounds(self) -> None:
        """A row that reads a part of a segment takes no more table entries than the host says."""
        for segment in self.manager.segments.cached:
            for lo, hi in segment.reads:
                start = max(lo, segment.lo)
                if start < min(hi, segment.hi):
                    part = (segment, start, min(hi, segment.hi))
                    taken = entries_taken(self.manager.state, segment.row, *part[1:])
                    assert all(n <= m for n, m in zip(taken, self.manager.space.part_entries(*part), strict=True))


class ExactJoiningMachine(JoiningMachine, ExactTreeMachine):
    """The same with exact fidelity."""

    exact = True


class TurnsMachine(JoiningMachine):
    """The same where earlier turns are compressed behind the window."""

    policy = diffkv_policy(1.0, 0.0, WINDOW, turn_window=2)


TurnsMachine.TestCase.settings = machine_settings(60)
JoiningMachine.TestCase.settings = ExactJoiningMachine.TestCase.settings = machine_settings(60)
TestJoining = JoiningMachine.TestCase
TestTurns = TurnsMachine.TestCase
TestExactJoining = ExactJoiningMachine.TestCase
