"""Requests that hold a budget are compressed when they have reached their limit: behind the step that brings them
there, or, where the policy is asynchronous, *scored* beside the next pass and compressed behind that.

A request that is being scored is *parked* where the next pass is a decode step. It is left out of SGLang's batch while
that step is prepared and launched, and is in it again when results are processed. So whatever looks at running requests
otherwise (admission, retraction, aborts, a pause) finds it among them. It misses one step, not as many as the device
takes: ranks agree without asking one another, and the step after that comes behind the scoring on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_diffkv.layout.geometry import Path, path_end, split_path
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.mem_pool.running import RunningCompression
from sglang_diffkv.srt.tree.events import RequestListener
from sglang_diffkv.srt.tree.interface import PrefixTree
from sglang_diffkv.srt.tree.parts import ExactRule
from sglang_diffkv.srt.versions import compat


class CompressionScheduler(RequestListener):
    """When running requests are compressed.

    Attributes:
        scored: row -> request that is scored beside the pass that comes next, or was launched last.
    """

    def __init__(self, ledger: PageLedger, tree: PrefixTree, exact: ExactRule, budgets: RunningCompression):
        self.ledger, self.manager, self.tree, self.exact, self.budgets = ledger, ledger.manager, tree, exact, budgets
        self.scored: dict[int, Any] = {}
        self._parked: Any = None  # SGLang's batch of those that were left out of the step launched last

    # Behind a pass

    def results_out(self, reqs: Sequence[Any]) -> None:
        """As ``compress_scored``."""
        self.compress_scored()

    def runs_on(self, reqs: Sequence[Any]) -> None:
        """As ``follow``: behind a pass over prompts the next decode step has been launched already, and behind its own
        results the one after it. A request that is compressed at its limit, whatever runs beside it, has to be seen
        behind each pass."""
        self.follow(reqs)

    def compress_scored(self) -> None:
        """Compress what was scored. One that finds no pages or blocks for it goes on, and is scored again."""
        for row, req in [*self.scored.items()]:
            path = self._path(req, row)
            if path is None or not self._compress(req, row, path):
                self.budgets.drop_scoring(row)
        self.scored.clear()

    def follow(self, reqs: Sequence[Any]) -> None:
        """Results are out, and ``reqs`` run on. Those that have reached their limit are compressed, where
        they are or, if they share pages, in a copy of their own, or scored beside the next pass. One whose copy finds
        no pages goes on and is looked at again behind the next step."""
        for req in reqs:
            row = compat.row_of(req)
            if row is None or row in self.manager.prompts.pending or not self.budgets.follow(row):
                continue
            path = self._path(req, row)
            if path is None:
                continue
            if self.budgets.rule.asynchronous and self.budgets.score_beside(row):
                self.scored[row] = req
            else:
                self._compress(req, row, path)

    def _path(self, req: Any, row: int) -> Path | None:
        """What the prefix cache holds of a request that may be compressed now; None where it has to wait, for pages or
        table blocks or for what it gave the prefix cache."""
        budgets, manager, ledger, tree = self.budgets, self.manager, self.ledger, self.tree
        if budgets.alone(row):
            return []
        pages = budgets.pages_to_compress(row)
        with ledger.compressing():
            room = not pages or ledger.uncommitted_pages() >= pages
            if not (room and manager.segments.rows_free):
                room = tree.make_segment_rows(1) and (room or tree.make_pages(pages))
        blocks = budgets.copy_blocks(row)
        if room:
            tree.make_table_blocks(blocks)
        if not room or ledger.table_starved(blocks):
            budgets.wait()
            return None
        shared = manager.rows.shared(row)
        path, _ = split_path(tree.path(req.last_node), shared)
        return path if path_end(path) == shared else None

    def _compress(self, req: Any, row: int, path: Path) -> bool:
        """Whether there was a segment row and table blocks for it."""
        shared = self.manager.rows.shared(row)
        if not self.budgets.compress(row, path):
            return False
        if shared:
            self.tree.detach(req, 0)
            self.exact.prefix_given_up()
        return True

    def letting_go(self, row: int) -> None:
        """It is not scored any more."""
        if self.scored.pop(row, None) is not None:
            self.budgets.drop_scoring(row)

    # Around a decode step

    def decode_begins(self, batch: Any) -> None:
        """As ``leave_out``."""
        self.leave_out(batch)

    def results_processed(self, scheduler: Any) -> None:
        """As ``rejoin``."""
        self.rejoin(scheduler)

    def leave_out(self, batch: Any) -> None:
        """A decode step of ``batch`` is about to be prepared: park those that are scored. Where nobody else is in it,
        or SGLang cannot part the batch, they are compressed before it instead."""
        chosen = [index for index, req in enumerate(batch.reqs) if compat.row_of(req) in self.scored]
        if not chosen:
            return
        possible = self._parked is None and len(chosen) < len(batch.reqs)
        parked = compat.part_batch(batch, chosen) if possible else None
        if parked is None:
            self.compress_scored()
        else:
            self._parked = parked

    def rejoin(self, scheduler: Any) -> None:
        """The step is launched: those that were left out run with the others again."""
        parked, self._parked = self._parked, None
        if parked is not None:
            compat.join_batch(scheduler, parked)
