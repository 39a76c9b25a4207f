"""The resolved memory plan: from a model's geometry and a configuration to pages and capacity."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.fitted_rotation import read_rotation
from sglang_diffkv.key_means import AUTO, read_key_means
from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.page_format import PageFormat
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.layout.spans import retained_tokens
from sglang_diffkv.layout.state import TABLE_BLOCK, PageState
from sglang_diffkv.mem_pool.footprint import MIB, Footprint
from sglang_diffkv.mem_pool.host_pages import GIB
from sglang_diffkv.mem_pool.ledger import pages_for
from sglang_diffkv.mem_pool.page_copies import staging_pages
from sglang_diffkv.mem_pool.running import query_cache
from sglang_diffkv.mem_pool.saved_slots import staged_slots
from sglang_diffkv.ops import Ops, ReferenceOps
from sglang_diffkv.policies.base import Policy, kv_slots_of

USUAL_HOST_SHARE, LEAST_HOST_BYTES, MOST_HOST_BYTES = 4, GIB // 4, 4 * GIB
"""Host memory for retracted requests, unless the configuration says how much: this part of the pool's pages, at least
so many bytes, and at most so many."""

CONTEXT_SLACK = 4
"""Positions that SGLang adds to a model's context in its table of requests."""

SLOTS_A_REQUEST = 3
"""State slots for each request that SGLang lets run where there is a prefix cache: two are for what that keeps."""


def planned_request_rows(max_running_requests: int | None, capacity: int, context: int) -> int:
    """Rows of SGLang's table of requests for a pool of ``capacity`` tokens and a model of ``context`` tokens, the
    padding row included, by SGLang's rule."""
    usual = max(min(int(capacity / context * 512), 4096), 2048)
    return max(min(max_running_requests or usual, capacity // 2), 1) + 1


STATES_TO_CACHE = 0.9
"""SGLang's ``--mamba-full-memory-ratio`` unless told otherwise."""


class StateRoom(NamedTuple):
    """Room for the states of a model whose layers do not all attend: state ``slots``, the bytes of all, ``taken``, and
    ``most``, how many requests run with them."""

    slots: int
    taken: int
    most: int


def state_room(
    budget: int, size: int, ratio: float, asked: int | None = None, *, shared: bool = True, drafts: int = 0,
    running: int | None = None,
) -> StateRoom:  # fmt: skip
    """What SGLang sets aside for states out of ``budget`` bytes.

    Args:
        size: bytes of a request's states. ratio: of all states to keys and values (``--mamba-full-memory-ratio``).
        asked: slots that the user names. shared: whether there is a prefix cache, which holds states too.
        drafts: of a pass; there is room for a state behind each of them, of up to ``running`` requests.
    """
    each, part = SLOTS_A_REQUEST if shared else 1, budget * ratio / (1 + ratio)
    slots = asked or math.floor((part - size * (1 + drafts)) / (size * (1 + drafts / each)))
    most = slots // each
    behind = (min(most, running or most) + 1) * drafts
    return StateRoom(slots, (slots + 1 + behind) * size, most)


class HostRoom(Protocol):
    """Host memory that an optional part needs. Retracted requests share it.

    Attributes:
        guests: whose pages lie there beside those. write_policy: when they are copied.
    """

    @property
    def guests(self) -> str: ...

    @property
    def write_policy(self) -> str: ...

    def bytes_for(self, pool: int) -> int:
        """Bytes beside so many of the device, of pages and what goes to the host with them."""

    def describe(self, pool: int) -> str:
        """What becomes of the guests, for the log and the doctor."""


@dataclass(frozen=True)
class MemoryPlan:
    """Page format and heads of one rank, and on what it runs."""

    config: DiffKVConfig
    fmt: PageFormat
    num_layers: int
    num_heads: int
    q_heads: int
    gpu: bool
    ranks: int = 1
    attention_spans: tuple[int, ...] = ()
    draft_bytes: int = 0
    """Bytes that a draft model's keys and values take for each KV slot; 0 without one."""
    matrix_bytes: int = 0
    """Of matrices that were fitted to the model."""
    keeps_retracted: bool = False
    """Whether what retracted requests hold goes to host memory."""
    host_room: HostRoom | None = None
    """Host memory of an optional part; None without one."""
    slot_bytes: int = 0
    """Bytes that go to the host with their pages, of a state slot, or of a draft model's KV slot; 0 if none do."""
    transfers: bool = False
    """Whether rows go to another server, or come from one."""
    mixed_chunks: bool = False
    """Whether requests decode in passes over prompts too."""

    @classmethod
    def of(
        cls,
        configurator: Any,
        config: DiffKVConfig,
        num_layers: int,
        max_tokens: int,
        attention_spans: tuple[int, ...] = (),
        draft_bytes: int = 0,
    ) -> MemoryPlan:
        """Plan for the model of SGLang's KVCacheConfigurator. With more ranks than KV heads several have the same one.
        ``max_tokens``, ``attention_spans``: as of ``Geometry``.

        Raises ConfigError for unsupported head sizes, and for a method, key means or rotations that cannot serve this
        model.
        """
        model, ranks = configurator.model_config, configurator.server_args.tp_size
        fmt = config.page_format(model.head_dim, model.v_head_dim or model.head_dim, max_tokens)
        config.check_heads(num_layers, model.get_total_num_kv_heads())
        if config.key_means not in (None, AUTO):
            read_key_means(config.key_means, num_layers, model.get_total_num_kv_heads(), model.head_dim)
        on_gpu = torch.device(configurator.device).type == "cuda"
        heads = (model.get_num_kv_heads(ranks), model.num_attention_heads // ranks)
        matrix_bytes = 0
        for name, dim in (("key_rotation", fmt.head_dim), ("value_rotation", fmt.v_head_dim)):
            if path := getattr(config, name):
                found = read_rotation(name, path, num_layers, model.get_total_num_kv_heads(), dim)
                matrix_bytes += 2 * num_layers * min(found.shape[1], heads[0]) * dim * dim
            if config.noise_shaping is not None:  # of KV heads, and what undoes them, of query heads
                matrix_bytes += 2 * num_layers * sum(heads) * dim * dim
        return cls(
            config, fmt, num_layers, *heads, gpu=on_gpu, ranks=ranks, attention_spans=attention_spans,
            draft_bytes=draft_bytes, matrix_bytes=matrix_bytes,
        )  # fmt: skip

    @property
    def heads(self) -> int:
        return self.num_layers * self.num_heads

    @property
    def token_bytes(self) -> int:
        """Bytes that a high-tier token takes in all layers and heads, its share of the page table included."""
        page = self.fmt.page_bytes + 3 * self.fmt.entry_bytes + 8
        return -(-page * self.heads // self.fmt.high.tokens)

    def geometry(self, capacity: int, num_rows: int, max_tokens: int) -> Geometry:
        """Sizes for ``capacity`` high-tier tokens and ``num_rows`` request rows of up to ``max_tokens``."""
        segments = max(64, min(8192, capacity // (4 * self.fmt.high.tokens)))
        return Geometry(
            fmt=self.fmt,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_pages=pages_for(capacity, self.fmt.high.tokens, self.heads, len(self.fmt.tiers)),
            num_rows=num_rows,
            num_segments=segments,
            max_tokens=max_tokens,
            attention_spans=self.attention_spans,
        )

    def host_slots(self, geometry: Geometry, slots: int) -> int:
        """Slots for which host memory has room, beside pages: as many for those ``slots`` of the device as for its
        pages."""
        if not self.slot_bytes:
            return 0
        beside = slots * self.slot_bytes
        pool = geometry.num_pages * self.fmt.page_bytes + beside
        return int(self._host_bytes(geometry, pool) * beside // pool // self.slot_bytes)

    def host_pages(self, geometry: Geometry, slots: int = 0) -> int:
        """Pages of all host memory, beside ``host_slots``."""
        pool, beside = geometry.num_pages * self.fmt.page_bytes, slots * self.slot_bytes
        return self._host_bytes(geometry, pool + beside) * pool // (pool + beside) // self.fmt.page_bytes

    def _host_bytes(self, geometry: Geometry, pool: int) -> int:
        """Of host memory, beside so many bytes of the device, of pages and what goes to the host with them."""
        if self.host_room is not None:
            return self.host_room.bytes_for(pool)
        return self.retracted_pages(geometry) * self.fmt.page_bytes if self.keeps_retracted else 0

    def retracted_pages(self, geometry: Geometry) -> int:
        """Pages of host memory for retracted requests, where they are kept."""
        pool = geometry.num_pages * self.fmt.page_bytes
        usual = min(max(pool // USUAL_HOST_SHARE, LEAST_HOST_BYTES), MOST_HOST_BYTES)
        asked = self.config.host_gib
        return (usual if asked is None else int(asked * GIB)) // self.fmt.page_bytes

    def policy(self, rank: int = 0, ranks: int = 1) -> Policy:
        """The policy for the heads of one of so many ranks."""
        return self.config.build_policy().of_rank(rank, ranks, self.num_heads)

    def ops(self, state: PageState, geometry: Geometry, policy: Policy) -> Ops:
        """The kernels of a server, with all that they hold on the state's device."""
        if self.gpu and self.config.gpu_ops == "triton":
            from sglang_diffkv.ops.gpu import build_ops

            config = self.config
            return build_ops(
                state, policy, geometry, self.q_heads, config.prefill, config.decode, mixed_chunks=self.mixed_chunks
            )  # fmt: skip
        return ReferenceOps(state, policy, self.config.lossless)

    def kv_slots(self, policy: Policy, geometry: Geometry, capacity: int) -> int:
        """KV slots of a pool of ``capacity`` high-tier tokens."""
        owning = self.draft_bytes > 0
        return kv_slots_of(policy, capacity, self.fmt, geometry.max_tokens, self.attention_spans, owning=owning)

    def footprint(self, geometry: Geometry, capacity: int) -> Footprint:
        """What a server will hold, from objects without memory."""
        policy = self.policy()
        state = PageState.of(geometry, device="meta")
        ops = self.ops(state, geometry, policy)
        ops.decisions.use_ranks(Ranks(self.ranks), state, policy, geometry.max_tokens)
        exact, kv_slots = self.config.prefix_fidelity == "exact", self.kv_slots(policy, geometry, capacity)
        queries = query_cache(policy, geometry, self.q_heads, device="meta")
        host_pages, page_bytes = self.host_pages(geometry), self.fmt.page_bytes
        staged = staging_pages(self.fmt, geometry.num_pages) if self.gpu and host_pages else 0
        staged = staged * page_bytes * (1 if self.host_room is None else 2)
        if self.gpu and host_pages and self.slot_bytes:
            staged += 2 * staged_slots(self.slot_bytes) * self.slot_bytes
        if self.gpu and self.transfers:
            staged += staging_pages(self.fmt, geometry.num_pages) * page_bytes
        return Footprint.of(
            state, geometry, ops, kv_slots=kv_slots, exact=exact, queries=queries, draft_bytes=self.draft_bytes,
            staging_bytes=staged, host_bytes=host_pages * page_bytes,
            guests="" if self.host_room is None else self.host_room.guests, matrix_bytes=self.matrix_bytes,
        )  # fmt: skip

    def capacity_in(self, budget: int, num_rows: Callable[[int], int], max_tokens: int) -> int:
        """Most high-tier tokens with which everything on the device stays within ``budget`` bytes; 0 if there are none.

        Args:
            num_rows: rows of requests for a capacity, the padding row included.
        """

        def fits(capacity: int) -> bool:
            geometry = self.geometry(capacity, num_rows(capacity), max_tokens)
            return self.footprint(geometry, capacity).total <= budget

        low, high = 0, max(budget, 0) // (self.fmt.page_bytes * self.heads // self.fmt.high.tokens) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def describe(self, geometry: Geometry, capacity: int) -> str:
        """One line for the log: tiers, bytes a token, pages, capacity against bf16."""
        fmt, config = self.fmt, self.config
        tiers = ", ".join(f"{x.tier.name} {x.token_bytes} B/token/head, {x.tokens} tokens/page" for x in fmt.layouts)
        pool = geometry.num_pages * fmt.page_bytes
        bf16 = pool // (fmt.bf16_token_bytes * self.heads)
        return (
            f"tiers [{tiers}]; policy {config.build_policy()}; bf16 {fmt.bf16_token_bytes} B/token/head; "
            f"{geometry.num_pages} pages of {fmt.page_bytes} B for {self.num_layers} layers x {self.num_heads} "
            f"KV heads = {pool / MIB:.1f} MiB, page table of {geometry.num_blocks} blocks of {TABLE_BLOCK}; "
            f"capacity {capacity} tokens at the high tier, bf16 in the same bytes: {bf16}; "
            f"rotation {config.rotate}{self._fitted()}; key means {config.key_means or 'none'}; "
            f"prefix fidelity {config.prefix_fidelity}{self._windows()}"
        )

    def _fitted(self) -> str:
        """Of matrices that were fitted, for the log."""
        named = (("keys", self.config.key_rotation), ("values", self.config.value_rotation))
        shaped = "" if self.config.noise_shaping is None else f"; noise shaping {self.config.noise_shaping}"
        return "".join(f", {what} by {path}" for what, path in named if path) + shaped

    def _windows(self) -> str:
        """Of layers with a sliding window, for the log."""
        found = [retained_tokens(x) for x in self.attention_spans if x]
        if not found:
            return ""
        kept = " or ".join(f"{x}" for x in sorted(set(found)))
        return f"; {len(found)} of {self.num_layers} layers have a sliding window and keep their newest {kept} tokens"
