"""A prefix cache over a small pool, with stand-ins for requests that are driven one operation at a time."""

from __future__ import annotations

import random
from array import array
from typing import Any

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_diffkv.kernels.append.reference import append
from sglang_diffkv.layout.geometry import Geometry, Segment
from sglang_diffkv.layout.page_format import PageFormat, Tier, position_bytes_for
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.mem_pool.ledger import PageLedger, pages_for
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.srt.scheduling.allocator import DiffKVAllocator
from sglang_diffkv.srt.startup.wiring import build_lifecycle, build_prefix_cache
from sglang_diffkv.srt.tree.private_space import HighSpace, WindowSpace
from sglang_diffkv.srt.versions.compat import prefix_len
from tests.helpers import begin_step
from tests.policies import diffkv_policy
from tests.tree.listener import Listener
from tests.tree.stand_in import Match, StandIn, give_row, leave, offer, take_row


class World:
    """A pool, a tree and a manager of one layer and one head; scores stay 0, so only the window of 8 stays high."""

    def __init__(
        self,
        capacity: int,
        *,
        longest: int = 300,
        alpha_high: float = 1.0,
        page_tokens: int = 8,
        exact: bool = True,
        eviction: str = "lru",
        eviction_config: dict[str, int] | None = None,
        sessions: bool = False,
        keeps: bool = False,
        rows: int = 8,
        segments: int = 40,
        share_min: int = 24,
        attention_spans: tuple[int, ...] = (),
        pool: ReqToTokenPool | None = None,
        policy: Policy | None = None,
        tiers: tuple[Tier, ...] = (Tier(8, 4), Tier(4, 2)),
        host_pages: int = 0,
        high_rows: bool = False,
        most_window: int = 0,
        write_policy: str = "",
        page_size: int = 1,
        keeps_retracted: bool = True,
        drafts: int = 0,
    ) -> None:
        policy = policy or diffkv_policy(alpha_high, 0.0, 8)
        scored, position_bytes = policy.scored_tiers(len(tiers)), position_bytes_for(longest)
        fmt = PageFormat(64, 64, tiers, page_tokens, scored, position_bytes)
        geometry = Geometry(
            fmt, 1, 1, pages_for(capacity, page_tokens, 1), rows + 1, segments, longest, attention_spans
        )
        self.manager = PageManager(
            geometry, policy, host_pages=host_pages, write_policy=write_policy, high_rows=high_rows,
            most_window=most_window, keeps_retracted=keeps_retracted, drafts=drafts,
        )  # fmt: skip
        self.pool = pool or ReqToTokenPool(rows, longest, "cpu", False)
        self.made()
        ledger = PageLedger(self.manager, capacity)
        self.requests = build_lifecycle(ledger)
        self.allocator = DiffKVAllocator(
            self.requests, dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=False
        )
        params = CacheInitParams(
            False, self.pool, self.allocator, page_size, eviction_policy=eviction, enable_kv_cache_events=True
        )
        params.enable_session_radix_cache = sessions
        if eviction_config is not None:
            params.eviction_policy_config = eviction_config
        self.tree: Any = build_prefix_cache(params, share_min, exact=exact, keeps=keeps)
        self.listener = Listener(self.tree)
        self.random = random.Random(1)

    def made(self) -> None:
        """There are a manager and a table of requests, and no tree yet."""

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(1000) for _ in range(count)]

    def start(self, tokens: list[int], priority: int = 0, **named: Any) -> Any:
        """A request whose prompt is to run in one pass; ``named``: its ``rid`` and ``extra_key``. One in the namespace
        of those that keep all tokens in the high tier does, and one in that of a window has it."""
        req = self.admit(tokens, priority, **named)
        self.attach(req)
        return req

    def admit(self, tokens: list[int], priority: int = 0, *, rid: str | None = None, extra_key: Any = None) -> Any:
        """A request that has matched and locked its prefix, as others of its batch do before any of them attaches."""
        prompt = array("q", tokens)
        match, row = Match(self.tree, prompt, extra_key=extra_key), take_row(self.pool)
        prefix = len(match)
        req = StandIn(prompt, row, match, len(prompt), rid=rid or str(row), priority=priority)
        req.diffkv_keeps_high = isinstance(extra_key, HighSpace)
        req.diffkv_window = extra_key.window if isinstance(extra_key, WindowSpace) else None
        self.pool.write((row, slice(0, prefix)), match.kv_slots)
        self.pool.write((row, slice(prefix, len(prompt))), self.allocator.alloc(len(prompt) - prefix).int())
        return req

    def attach(self, req: Any) -> None:
        """Give the request's row its prefix."""
        if req.diffkv_keeps_high:
            self.manager.high.keep(req.kv.req_pool_idx)
        if req.diffkv_window:
            self.manager.windows.keep(req.kv.req_pool_idx, req.diffkv_window)
        if req.kv.cache_protected_len:
            self.requests.begin_prompt(req)

    def plan(self, req: Any) -> None:
        """The pass that computes the rest of its prompt."""
        self.requests.plan_prefill([req])

    def launch(self, req: Any) -> None:
        row, prefix = req.kv.req_pool_idx, prefix_len(req)
        count = req.extend_end - prefix
        step = self.manager.launch_step()
        self.manager.ops.reserve(torch.tensor([row]), torch.tensor([count]), count)
        self._write(row, prefix, count)
        self.manager.end_prompts(step)

    def _write(self, row: int, start: int, count: int) -> None:
        at = torch.arange(start, start + count)
        key = torch.ones(count, 1, 64)
        append(self.manager.state, 0, key, key, torch.full((count,), row), at - start, at)

    def decode(self, req: Any) -> None:
        """One step without compaction."""
        row, start = req.kv.req_pool_idx, len(req.tokens)
        req.output_ids.append(5)
        req.tokens.append(5)
        self.pool.write((row, start), self.allocator.alloc(1).int()[0])
        begin_step(self.manager, [row], [1], [start])
        self._write(row, start, 1)

    def leave(self, req: Any, *, insert: bool = True) -> None:
        row = req.kv.req_pool_idx
        leave(self.tree, req, self.manager.rows.length(row), insert=insert)
        self.requests.leave(req, row, counted=False)
        give_row(self.pool, row)
        self.check()

    def check(self) -> None:
        check_integrity(self.manager)
        self.tree.check_integrity()

    def leaf(self, tokens: list[int]) -> Any:
        """The leaf of a prompt that shares nothing."""
        return next(x for x in self.tree.evictable_leaves if x.key.token_ids[0] == tokens[0])

    def prompt(self, tokens: list[int], **named: Any) -> Any:
        """A request whose prompt has run."""
        req = self.start(tokens, **named)
        self.plan(req)
        self.launch(req)
        offer(self.tree, req)
        return req

    def segments(self) -> list[Segment]:
        return sorted(self.manager.segments.cached, key=lambda segment: segment.lo)

    def low_tokens(self, segment: Segment) -> int:
        columns = (torch.tensor([x]) for x in (segment.row, segment.lo, segment.hi))
        return int(self.manager.ops.measure(*columns)[..., 1].sum())
