"""The prompt phase of rows: whose prompt is not through, and what happens behind a pass that ends a chunk or all."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_diffkv.mem_pool.page_manager import PageManager


def _take(marked: set[int], rows: list[int]) -> list[int]:
    """Those of ``rows`` that are marked, and no longer are."""
    taken = [row for row in rows if row in marked]
    marked.difference_update(taken)
    return taken


class PromptPhase:
    """Marks for the next extend pass, compaction, and sealing of what the prefix cache will ask for."""

    def __init__(self, manager: PageManager):
        self.manager = manager
        self.unfinished: set[int] = set()  # rows whose prompt may still be compacted
        self.finishing: set[int] = set()  # rows whose prompt ends with their next extend pass
        self.chunking: set[int] = set()  # rows that are compacted after their next extend pass, which is not the last
        self.outcomes = {"compressed": 0, "as computed": 0}
        """Prompts so far: compressed in place; left as they are, by the policy or as shorter than its window."""
        self.share_min_tokens: int | None = None
        """A prompt with this many own tokens is sealed at its end, ready for the prefix cache; None: never."""

    def take_finishing(self, rows: list[int]) -> list[int]:
        """Those of ``rows`` marked as ending their prompt now; the marks are cleared."""
        return _take(self.finishing, rows)

    def take_chunking(self, rows: list[int]) -> list[int]:
        """Those of ``rows`` marked for a compaction after this chunk; the marks are cleared."""
        return _take(self.chunking, rows)

    def end_chunk(self, row: int) -> None:
        """Compaction of a row whose prompt is not through: tokens that its own attention so far finds unimportant go
        down for good."""
        if self._compact(row):
            self.manager.counts.touch(row)
            self.manager.version += 1

    def end(self, row: int) -> None:
        """Compaction of a row whose last chunk has run.

        With overlap scheduling the next step's token is written before the prefix cache asks for the prompt,
        so a prompt that is worth sharing is sealed here and that token starts a page of its own.
        """
        manager, copies = self.manager, self.manager.copies
        length = manager.lengths[row]
        if row in copies.plans:
            copies.carry_out(row)
        elif row not in copies.untouched:
            self.outcomes["compressed" if self._compact(row) else "as computed"] += 1
        own = length - manager.shared.get(row, 0)
        least = 1 if row in copies.untouched else self.share_min_tokens
        if row not in copies.pending and least is not None and own >= least:
            manager.seal(row)
        copies.judged.pop(row, None)
        manager.counts.touch(row)
        self.unfinished.discard(row)
        manager.version += 1

    def _compact(self, row: int) -> bool:
        """Prompt-phase compaction where the policy has something to decide."""
        manager, policy = self.manager, self.manager.policy
        length = manager.lengths[row]
        if not policy.compresses or length <= policy.window:
            return False
        with manager.launching():
            manager.ops.compact_prompt(manager.state, row, length, policy)
        if manager.tracker.low_grows:
            manager.counts.record(-manager.geometry.heads)
        return True

    def forget(self, row: int) -> None:
        """The row is released."""
        for marked in (self.unfinished, self.finishing, self.chunking):
            marked.discard(row)
