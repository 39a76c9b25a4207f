"""Random lives of requests through the tree, with paths joined between the operations."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from sglang_diffkv.mem_pool.geometry import Path
from tests.helpers import needs_requests
from tests.test_prefix_cache import ExactTreeMachine, TreeMachine, machine_settings

pytestmark = needs_requests


class JoiningMachine(TreeMachine):
    """Any path may be joined at any time."""

    def __init__(self) -> None:
        super().__init__()
        ledger = self.allocator.ledger
        admits = ledger.admits

        def settled(path: Path, new_tokens: int) -> bool:
            """Waiting for the device while pages are evicted must not look a step further than admission did."""
            self.manager.tracker.settle()
            return admits(path, new_tokens)

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


class ExactJoiningMachine(JoiningMachine, ExactTreeMachine):
    """The same with exact fidelity."""

    exact = True


JoiningMachine.TestCase.settings = ExactJoiningMachine.TestCase.settings = machine_settings(60)
TestJoining = JoiningMachine.TestCase
TestExactJoining = ExactJoiningMachine.TestCase
