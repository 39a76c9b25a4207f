"""Whether something that other weights computed may be left, for who keeps pages in host memory."""

from __future__ import annotations

import logging

from sglang_diffkv.mem_pool.page_manager import PageManager

logger = logging.getLogger(__name__)


class OldWeights:
    """Requests that go on while weights change, and prefixes that stay in the tree, are of both.

    Args:
        consequence: what happens until the cache is flushed, for the log.

    Attributes:
        left: whether the tree or a row may hold what other weights computed.
    """

    def __init__(self, manager: PageManager, consequence: str):
        self.manager, self.consequence = manager, consequence
        self.left = False

    def change(self) -> None:
        """The weights are about to change."""
        left = bool(self.manager.rows) or bool(self.manager.segments.cached)
        if left and not self.left:
            logger.warning(
                "DiffKV: weights change while requests run or prefixes are cached: %s until the cache is flushed.",
                self.consequence,
            )
        self.left |= left

    def reset(self) -> None:
        """The tree is empty."""
        self.left = self.left and bool(self.manager.rows)
