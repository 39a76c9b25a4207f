"""What scheduling and page management ask of a prefix tree.

SGLang calls a tree by its own methods (``BasePrefixCache``: match, lock, evict, insert). ``PrefixTree`` is what is
asked beside them. A *node* is the tree's own: SGLang keeps it in ``req.last_node``, and scheduling never looks into it.

A tree tells ``Parts.listeners`` what it takes from rows: ``letting_go``, ``published`` and ``prompt_published``, and
``reset`` before it is emptied. It knows nothing of scheduling.

Sizes: *pages* are pages of one tier, layer and KV head. *Table blocks* are blocks of the page table. *KV slots* name
tokens. *Segment rows* are rows of the page table that segments take. Nothing here waits for the device, unless it says
so.

Another tree can stand here:

- SGLang's unified tree (``docs/architecture.md`` says why it does not): a class like ``DiffKVPrefixCache``
  over that tree's own nodes. Each node refers to a ``Segment``, and the tree counts their pages in the
  ledger (``PageLedger.hold``, ``release``, ``lock``, ``unlock``). ``hooks/table.py`` puts it into SGLang
  (``default_radix_cache_factory``), and ``startup/wiring.py`` makes it.

A tree also tells ``Parts.sources`` of nodes that come and that it is about to evict. It asks them before it is searched
for a request that is being admitted.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from sglang_diffkv.layout.geometry import Path
from sglang_diffkv.mem_pool.ledger import PageLedger


class PrefixTree(Protocol):
    """A tree of prefixes over segments of pages. Methods that make room evict what no request has locked, the least
    valuable first. They return whether there is as much room as asked for.
    """

    ledger: PageLedger

    # Paths

    def path(self, node: Any) -> Path:
        """The pages of a prefix: parts (segment, first position, position after the last) from position 0 to the end of
        ``node``."""

    def pages_read_alone(self, node: Any) -> int:
        """Pages of the path to ``node`` that can be evicted when the request that has locked it lets go."""

    # Room

    def make_pages(self, pages: int, *, partly: bool = False) -> bool:
        """Evict until ``pages`` are free that no request is promised. If that is not possible nothing is evicted;
        ``partly``: all that may go is."""

    def make_table_blocks(self, blocks: int) -> bool:
        """Evict until the page table has ``blocks`` free ones beyond its promises, as far as possible."""

    def make_kv_slots(self, count: int) -> bool:
        """Evict until ``count`` KV slots are free beyond the promises. If that is not possible nothing is evicted."""

    def make_segment_rows(self, count: int) -> bool:
        """Evict until ``count`` segment rows are free, as far as possible."""

    def make_tokens(self, tokens: int) -> bool:
        """Evict until ``tokens`` more high-tier tokens fit than now, as far as possible. May wait for the device."""

    def evictable_tokens(self) -> int:
        """KV slots that eviction can return."""

    # Requests

    def inserting_later(self) -> AbstractContextManager[None]:
        """Inside, what SGLang inserts of running requests waits. It is inserted at the end."""

    def detach(self, req: Any, start: int) -> None:
        """The request has copied its tokens from position ``start`` on: it gets KV slots of its own for them, and locks
        only the path before. Without KV slots it goes on as it is."""

    def evict_branch(self, node: Any) -> bool:
        """Evict the path to ``node`` from its end, as far as nothing branches off and nobody reads it. False if
        ``node`` stands for no tokens: it is the root, or None."""

    # Checks

    def report(self) -> dict[str, object]:
        """For ``/server_info``; empty of a tree that is off. Waits for the device."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree, its segments and the ledger agree."""


class NoTree:
    """A server without a prefix cache, or before SGLang has made it: nothing is shared, and nothing can be evicted."""

    def __init__(self, ledger: PageLedger):
        self.ledger = ledger

    def path(self, node: Any) -> Path:
        return []

    def pages_read_alone(self, node: Any) -> int:
        return 0

    def make_pages(self, pages: int, *, partly: bool = False) -> bool:
        return self.ledger.uncommitted_pages() >= pages

    def make_table_blocks(self, blocks: int) -> bool:
        return not self.ledger.table_starved(blocks)

    def make_kv_slots(self, count: int) -> bool:
        return self.ledger.uncommitted_kv_slots() >= count

    def make_segment_rows(self, count: int) -> bool:
        return self.ledger.manager.segments.rows_free >= count

    def make_tokens(self, tokens: int) -> bool:
        return tokens <= 0

    def evictable_tokens(self) -> int:
        return 0

    def inserting_later(self) -> AbstractContextManager[None]:
        return nullcontext()

    def detach(self, req: Any, start: int) -> None:
        pass

    def evict_branch(self, node: Any) -> bool:
        return False

    def report(self) -> dict[str, object]:
        return {}

    def check_integrity(self) -> None:
        pass
