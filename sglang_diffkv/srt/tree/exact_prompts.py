"""When a prompt joins the prefix cache exactly, and what of it a running request reads there or copies.

A private compressed copy takes at least half of the pages that it replaces (112 of 208 bytes a token from K8V4 to
K4V2), so it saves memory only where no other request reads them. The part of a prefix that other running requests hold
too stays shared; the rest is copied with the prompt's new tokens. The copied part of the tree is unlocked, so that it
may be evicted while the request runs. Without room for a copy the new tokens are compressed in place and never join the
tree. When the last other reader of a shared part leaves, the request that stays copies it too, and compresses all it
has in place from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_diffkv.layout.geometry import Path, path_end, split_path
from sglang_diffkv.srt.tree.parts import ExactRule
from sglang_diffkv.srt.tree.prefix_cache import DiffKVPrefixCache
from sglang_diffkv.srt.versions import compat


class ExactPrompts(ExactRule):
    """Decisions of ``prefix_fidelity: exact``, for rows of running requests.

    Args:
        least_published: a prompt with fewer new tokens than this joins the tree with its reply, compressed.
    """

    keeps_prompts = refuses = True

    def __init__(self, tree: DiffKVPrefixCache, least_published: int):
        self.tree, self.least_published = tree, least_published
        self.manager, self.ledger = tree.manager, tree.ledger
        self.ends: dict[int, Any] = {}  # row -> node up to which the tree has its prompt, None if it has not
        self.detaching: dict[int, int] = {}  # row -> position from which on its tokens are its own copy
        self.restored: set[int] = set()
        """Rows of requests that were retracted, over a compressed prefix that they alone read, and that stays as it
        is."""
        self.reader_left = False
        outcomes = ("copied", "shared", "brief", "as computed", "no room", "copied later")
        self.outcomes: dict[str, int] = dict.fromkeys(outcomes, 0)
        """Prompts so far: compressed in a copy; all but a few tokens shared with running requests; left as they are for
        a request that ends with them, or that keeps all in the high tier. Then: compressed in place, or left shared,
        for want of pages; a shared part copied when its last other reader had left."""

    def prompt_begun(self, req: Any, row: int, *, alone: bool) -> None:
        """It scores for itself what it may copy of its prefix, unless that was restored for it alone."""
        if alone:
            self.restored.add(row)
        elif row not in self.manager.high and any(x.lock_ref < 2 for x in self.tree.nodes(req.last_node)):
            self.manager.prompts.score_shared(row)

    def chunk_planned(self, req: Any, row: int, end: int, *, ends: bool, alone: bool) -> None:
        """A prompt that the planned pass ends is copied, or shared, or neither. One that was restored for its request
        alone is not offered to the tree."""
        if ends:
            insertable = not (getattr(req, "skip_radix_cache_insert", False) or alone)
            self.plan(row, req.last_node, brief=req.sampling_params.max_new_tokens <= 1, insertable=insertable)

    def plan(self, row: int, node: Any, *, brief: bool, insertable: bool = True) -> None:
        """The planned pass ends the prompt of a row that holds the path to ``node``: copy, or share, or neither.

        Args:
            brief: the request ends with its first token, so that nothing is gained by compressing it.
            insertable: False if SGLang will not offer the prompt to the tree.
        """
        if not insertable:
            self.ends[row] = None
            return
        manager, prompts = self.manager, self.manager.prompts
        length, shared = manager.rows.length(row), manager.rows.shared(row)
        publish = length - shared >= self.least_published
        self.ends[row] = None if publish else node
        if brief or row in manager.high:
            prompts.leave_as_computed(row)
            self.outcomes["brief" if brief else "as computed"] += 1
            return
        start = self._read_by_others(node)
        kept, copied = split_path(self.tree.path(node), start)
        if not publish and not copied:
            self.outcomes["shared"] += 1
            return
        if self._make_room(row, kept, length - start) and prompts.plan_copy(row, kept, copied, publish=publish):
            self.detaching[row] = start
            self.outcomes["copied"] += 1
        else:
            self.outcomes["no room"] += 1

    def _read_by_others(self, node: Any) -> int:
        """Position up to which other running requests hold the path to ``node`` too."""
        end = 0
        for x in self.tree.nodes(node):
            if x.lock_ref < 2:
                break
            end += len(x.key)
        return end

    def _make_room(self, row: int, kept: Path, tokens: int) -> bool:
        """Whether ``tokens`` of the row can be copied behind ``kept``, evicting what nobody reads."""
        geometry = self.manager.geometry
        if not self.manager.space.fits(kept, geometry.max_tokens):
            return False
        if not (self.tree.make_segment_rows(1) and self.tree.make_pages(geometry.most_pages(tokens))):
            return False
        return not self.ledger.table_starved(self.manager.prompts.blocks_for(row, kept, tokens))

    def joins(self, row: int) -> bool:
        """Whether the tree may take the tokens of a request that ends: it has, or gets, the prompt exactly."""
        if row in self.manager.prompts.pending or row in self.manager.prompts.untouched:
            return True
        node = self.ends.get(row)
        return node is not None and (node is self.tree.root_node or node.segment is not None)

    def prompt_published(self, req: Any) -> None:
        """The request lets go of what it copied."""
        row = compat.allocated_row_of(req)
        if row in self.detaching:
            pending = self.manager.prompts.pending.get(row)
            if self.ends[row] is None and (pending is None or compat.protected_len(req) >= pending.hi):
                self.ends[row] = req.last_node
            self.manager.prompts.drop_pending(row)
            self.tree.detach(req, self.detaching.pop(row))

    def results_out(self, reqs: Sequence[Any]) -> None:
        """Requests that have left may have made others the only readers of pages."""
        self.copy_alone(reqs)

    def copy_alone(self, requests: Sequence[Any]) -> None:
        """Those of the running requests that are left as the only reader of shared pages copy them.

        Called between steps: all that is planned is launched, and nothing of what these rows run is waited for.
        """
        if not self.reader_left:
            return
        self.reader_left = False
        for req in requests:
            row = compat.row_of(req)
            if row is not None and self._may_copy(req, row):
                self._copy_alone(req, row)

    def _may_copy(self, req: Any, row: int) -> bool:
        manager = self.manager
        if manager.rows.in_prompt(row) or row in self.restored:
            return False
        if row in manager.prompts.untouched or row in manager.prompts.pending:
            return False
        left = req.sampling_params.max_new_tokens - len(req.output_ids)
        return manager.rows.shared(row) >= self.least_published and left >= self.least_published

    def _copy_alone(self, req: Any, row: int) -> None:
        prompts, shared = self.manager.prompts, self.manager.rows.shared(row)
        path, _ = split_path(self.tree.path(req.last_node), shared)
        start = min(self._read_by_others(req.last_node), path_end(path))
        kept, copied = split_path(path, start)
        if (
            shared - start < self.least_published
            or self.ledger.uncommitted_kv_slots() < compat.protected_len(req) - start
        ):
            return
        tokens = self.manager.rows.length(row) - start
        if self._make_room(row, kept, tokens) and prompts.copy_running(row, kept, copied):
            self.tree.detach(req, start)
            self.outcomes["copied later"] += 1

    def prefix_given_up(self) -> None:
        """Of what the request shared, another may be the only reader now."""
        self.reader_left = True

    def left(self, req: Any, row: int) -> None:
        """As it is here, and the row is nobody's."""
        self.reader_left = True
        self.ends.pop(row, None)
        self.detaching.pop(row, None)
        self.restored.discard(row)

    def digest(self) -> Any:
        return self.outcomes, self.ends.keys(), self.detaching
