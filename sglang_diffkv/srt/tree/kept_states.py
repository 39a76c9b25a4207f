"""States of layers that do not attend, which the prefix cache keeps beside its pages.

A request goes on from a matched prefix with a copy of the state at the prefix's very end, so a match ends where a state
is kept. States lie in slots of SGLang's pool, as those of running requests do, and a slot has one owner at a time:

- a *request*, from the pass that begins its prompt until it leaves its row;
- a *snapshot*: a copy of a request's state behind a pass, until the prefix cache has taken the tokens before it;
- a *node* of the prefix cache, which ends where the state stands. With host memory for prefixes a state goes there too
  (``HostTier``), and may come back to a slot of a node.

Copies are launched between the passes that write and read the slots, on their stream: of a prefix before the pass that
goes on from it (SGLang's own copy-on-write), snapshots behind the pass. A request that ends gives its slot to the tree
as it is; with drafts only if no pass has taken the state further, as most have under overlap scheduling. Running
requests come first: one that needs a slot takes the least recently used of the tree's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_diffkv.srt.tree.parts import NodeStates
from sglang_diffkv.srt.tree.prefix_cache import DiffKVPrefixCache
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.versions import states as compat_states

CHUNKS_APART = 4
"""A state between chunks is kept where at least this part of the tokens before it, a quarter, lies behind the last."""


@dataclass(eq=False)
class Snapshot:
    """A copy of the state of a row's request behind its first ``position`` tokens, in ``slot`` (int64 [1])."""

    row: int
    position: int
    slot: torch.Tensor


class KeptStates(NodeStates):
    """Who has which state slot, over SGLang's table of requests and the prefix cache's nodes.

    Args:
        least_apart: a prompt's state is copied where so many tokens lie behind the last one that was, at least.

    Attributes:
        of_nodes: slots (int64 [1]) of the nodes that have a state, the least recently used first.
        snapshots: of rows, by position. due: snapshots of the planned pass and the slots that they copy.
    """

    def __init__(self, tree: DiffKVPrefixCache, least_apart: int):
        self.tree, self.rows, self.least_apart = tree, tree.req_to_token_pool, least_apart
        self.of_nodes: OrderedDict[Any, torch.Tensor] = OrderedDict()
        self.snapshots: dict[int, list[Snapshot]] = {}
        self.due: list[tuple[Snapshot, torch.Tensor]] = []
        self._launched: list[tuple[Snapshot, torch.Tensor]] = []
        self._read: set[Any] = set()

    # Matching

    def last(self, node: Any) -> Any:
        """The last node with a state on the path to ``node``; the root, where no tokens have made one, if there is
        none."""
        while node is not self.tree.root_node and node not in self.of_nodes:
            node = node.parent
        return node

    def match_end(self, req: Any, node: Any, most: int, served: Callable[[Any], int]) -> int:
        """A match ends with a node that has a state, and that a row may read."""
        found, node = self.tree.depth(node), self.last(node)
        while (end := served(node)) < self.tree.depth(node):
            node = self.last(self.tree.node_within(node, end))
        self.matched(req, node, end, found, most)
        return end

    def may_end(self, node: Any) -> bool:
        return node in self.of_nodes

    def used(self, node: Any) -> None:
        if (node := self.last(node)) in self.of_nodes:
            self.of_nodes.move_to_end(node)

    def matched(self, req: Any, node: Any, end: int, found: int, most: int) -> None:
        """A request goes on from ``node``, where ``end`` tokens end. The tree has ``found`` tokens of its prompt.

        Where that is enough more, others part there too. So the request's prefill is to stop there once and leave a
        state. One that generates nothing is there to be gone on from, so it stops at ``most``, as far as another of the
        same prompt may match. ``req`` is None if the match is for none.
        """
        if node in self.of_nodes:
            self.of_nodes.move_to_end(node)
        if req is not None:
            place = found if req.sampling_params.max_new_tokens else most
            req.diffkv_branch = place if place - end >= self.least_apart else 0

    # Passes

    def prefill_begins(self, reqs: Sequence[Any]) -> None:
        """As ``begin``."""
        self.begin(reqs)

    def chunk_planned(self, req: Any, row: int, end: int, *, ends: bool, alone: bool) -> None:
        """As ``plan``."""
        self.plan(req, row, end, shared=self.tree.manager.rows.shared(row))

    def pass_launched(self) -> None:
        """As ``copy_due``."""
        self.copy_due()

    def begin(self, reqs: Sequence[Any]) -> None:
        """A prefill of ``reqs`` is about to be prepared: make room for those that have no slot yet, and give those that
        go on from a prefix one with a copy of its state. SGLang gives the others an empty one.

        Raises RuntimeError if there are fewer slots than requests, which SGLang's limit of running ones rules out.
        """
        self._void_due()
        fresh = [req for req in reqs if compat_states.state_slot(req) is None]
        self._read = {req.last_node for req in fresh if compat.prefix_len(req)}
        if not self._make_room(len(fresh), snapshots=True):
            raise RuntimeError("no state slot is free")
        for req in fresh:
            if compat.prefix_len(req):
                compat_states.give_state(req, self.rows.mamba_allocator.alloc(1), self.of_nodes[req.last_node])

    def plan(self, req: Any, row: int, end: int, *, shared: int) -> None:
        """The planned pass computes the row's tokens up to ``end``. Copy the state behind it, if a slot is free or the
        tree's to give and enough tokens have made it. Between chunks that is a quarter of all, or one long prompt would
        have all slots. ``shared``: tokens that the row found in the prefix cache."""
        taken, least = self.snapshots.get(row, []), self.least_apart
        if end not in (compat.prompt_len(req), getattr(req, "diffkv_branch", 0)):
            least = max(least, end // CHUNKS_APART)
        if end - (taken[-1].position if taken else shared) < least or not self._make_room(1):
            return
        snapshot = Snapshot(row, end, self.rows.mamba_allocator.alloc(1))
        self.snapshots.setdefault(row, []).append(snapshot)
        self.due.append((snapshot, compat_states.state_slot(req).reshape(1)))

    def copy_due(self) -> None:
        """The planned pass is launched: copy what was planned behind it, on the same stream."""
        if not self.due:
            return
        source = torch.cat([source for _, source in self.due])  # [snapshots]
        self.rows.mamba_pool.copy_from(source, torch.cat([snapshot.slot for snapshot, _ in self.due]))
        self._launched, self.due = self.due, []  # slots' numbers stay allocated while they are read

    def _void_due(self) -> None:
        """A pass that was planned before does not run."""
        for snapshot, _ in self.due:
            taken = self.snapshots[snapshot.row]
            taken.remove(snapshot)
            if not taken:
                del self.snapshots[snapshot.row]
            self._free(snapshot.slot)
        self.due = []

    # The prefix cache

    def published(self, req: Any, row: int, leaf: Any, length: int, *, ended: bool) -> None:
        """The path to ``leaf`` gets the snapshots of its tokens, and of a request that has ``ended`` there the state
        itself."""
        if not length:
            return
        later = []
        for snapshot in self.snapshots.pop(row, []):
            if snapshot.position <= length:
                self._keep(self.tree.node_ending(leaf, snapshot.position), snapshot.slot)
            else:
                later.append(snapshot)
        if later:
            self.snapshots[row] = later
        if ended and self._stands_at(req, row, length):
            self._keep(leaf, compat_states.take_state(req))

    def _stands_at(self, req: Any, row: int, length: int) -> bool:
        """Whether the request's state is that behind its first ``length`` tokens, and of use there. With drafts a pass
        that is under way may take it further, a grammar keeps less than a pass has accepted, and nobody asks for the
        tokens that were accepted behind a stop."""
        manager = self.tree.manager
        if manager.rows.length(row) != length:
            return False
        if not manager.drafts:
            return True
        return req.grammar is None and manager.rows.up_to_date(row) and length <= compat.told_tokens(req)

    def _keep(self, node: Any, slot: torch.Tensor) -> None:
        if node in self.of_nodes:
            self._free(slot)
        else:
            self.of_nodes[node] = slot
            self.tree.told.end_came(node)
            for source in self.tree.sources:
                source.state_came(node)
        self.of_nodes.move_to_end(node)

    def drop(self, node: Any) -> None:
        """The node leaves the tree, or its state has to go."""
        slot = self.of_nodes.pop(node, None)
        if slot is not None:
            for source in self.tree.sources:
                source.state_changing(slot)
            self._free(slot)
            self.tree.told.end_went(node)

    def left(self, req: Any, row: int) -> None:
        """The request gives up all states that the tree did not take."""
        self.due = [(snapshot, source) for snapshot, source in self.due if snapshot.row != row]
        for snapshot in self.snapshots.pop(row, []):
            self._free(snapshot.slot)
        compat.free_state(self.rows, req)

    def reset(self) -> None:
        """Give back all that the tree has."""
        for node in list(self.of_nodes):
            self.drop(node)

    # Host memory

    def take_slot(self) -> torch.Tensor | None:
        """Requests that are admitted, but not begun, still have to find the states that they go on from."""
        return self.rows.mamba_allocator.alloc(1) if self._make_room(1, unlocked=True) else None

    def give_slot(self, slot: torch.Tensor) -> None:
        self._free(slot)

    def came_back(self, node: Any, slot: torch.Tensor) -> None:
        self._keep(node, slot)

    # Slots

    def _make_room(self, count: int, *, snapshots: bool = False, unlocked: bool = False) -> bool:
        """Have so many slots free, at the cost of states that no request of the batch goes on from; with ``snapshots``
        of these too. ``unlocked``: only at the cost of what no request reads. False if that is not possible."""
        allocator = self.rows.mamba_allocator
        while allocator.available_size() < count:
            free = [x for x in self.of_nodes if x not in self._read and not (unlocked and x.lock_ref > 0)]
            victim = next((x for x in free if not self.tree.sessions.referenced(x)), free[0] if free else None)
            if victim is not None:
                for source in self.tree.sources:
                    source.state_leaving(victim)
                self.drop(victim)
            elif not (snapshots and self._drop_snapshot()):
                return False
        return True

    def _drop_snapshot(self) -> bool:
        for row, taken in self.snapshots.items():
            self._free(taken.pop(0).slot)
            if not taken:
                del self.snapshots[row]
            return True
        return False

    def _free(self, slot: torch.Tensor) -> None:
        self.rows.mamba_allocator.free(slot)

    # Reports and checks

    def report(self) -> dict[str, int]:
        """Slots by owner, for ``/server_info``."""
        size, free = self.rows.mamba_pool.size, self.rows.mamba_allocator.available_size()
        taken = sum(map(len, self.snapshots.values()))
        return {
            "slots": size,
            "free": free,
            "kept": len(self.of_nodes),
            "snapshots": taken,
            "running": size - free - len(self.of_nodes) - taken,
        }

    def digest(self) -> list[Any]:
        """Which prefixes have states, the least recently used first, and which copies wait: all that ranks have to
        agree on."""
        kept = [(path[-1][0].row, path[-1][2]) for path in map(self.tree.path, self.of_nodes)]
        taken = {row: [x.position for x in found] for row, found in self.snapshots.items()}
        return [self.report(), kept, taken, len(self.due)]

    def check_nodes(self, nodes: set[Any]) -> None:
        """Raise AssertionError unless each slot has one owner, and each state a node of the tree's ``nodes``."""
        assert set(self.of_nodes) <= nodes, "a state is kept for a node that the tree does not have"
        assert not self.snapshots.keys() & set(self.rows.free_slots), "a copied state is that of a row that nobody has"
        for row, taken in self.snapshots.items():
            positions = [snapshot.position for snapshot in taken]
            assert positions and positions == sorted(set(positions)), f"row {row}: states are copied out of order"
        planned = [snapshot for snapshot, _ in self.due]
        assert all(x in self.snapshots.get(x.row, []) for x in planned), "a planned copy is lost"
        owned = {
            "free": self.rows.mamba_allocator.free_slots.tolist(),
            "kept": [int(slot) for slot in self.of_nodes.values()],
            "snapshots": [int(snapshot.slot) for taken in self.snapshots.values() for snapshot in taken],
            "running": list(self._running_slots()),
        }
        found = sorted(slot for slots in owned.values() for slot in slots)
        assert found == list(range(1, self.rows.mamba_pool.size + 1)), f"state slots are lost or held twice: {owned}"

    def _running_slots(self) -> Iterator[int]:
        used = set(range(1, self.rows.req_to_token.shape[0])) - set(self.rows.free_slots)
        yield from self.rows.req_index_to_mamba_index_mapping[sorted(used)].tolist()


class FreedStates(NodeStates):
    """States of running requests alone, of a model that has them: the prefix cache is off and keeps none. ``rows``:
    SGLang's table of requests."""

    def __init__(self, rows: Any):
        self.rows = rows

    def left(self, req: Any, row: int) -> None:
        compat.free_state(self.rows, req)
