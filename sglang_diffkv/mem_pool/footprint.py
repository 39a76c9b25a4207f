"""Where the bytes of a pool go: every allocation of the plugin on the device, by what it is for."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_diffkv.layout.geometry import Geometry
from sglang_diffkv.layout.query_cache import QueryCache
from sglang_diffkv.layout.state import PageState, tensor_bytes
from sglang_diffkv.mem_pool.segment_counts import MEASURE_AT
from sglang_diffkv.mem_pool.usage import COUNT_AT, READ_AT
from sglang_diffkv.ops.base import Ops

MIB = 1 << 20
PAGES = "pages"
KV_SLOT_BYTES = 8
SUMS = 8
"""Rows' worth of counts that a report adds up at once, in int64, beside those of the rows."""


@dataclass(frozen=True)
class Footprint:
    """Bytes by what they are for.

    Attributes:
        held: from start to end. at_most: made and given back while requests run, and bounded. host: in the host's
            memory, and in no sum.
    """

    held: dict[str, int]
    at_most: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        state: PageState,
        geometry: Geometry,
        ops: Ops,
        *,
        kv_slots: int,
        exact: bool,
        queries: QueryCache | None = None,
        draft_bytes: int = 0,
        staging_bytes: int = 0,
        host_bytes: int = 0,
        guests: str = "",
        matrix_bytes: int = 0,
        transfer_bytes: int = 0,
    ) -> Footprint:
        """What ``state`` and ``ops`` take, on the device "meta" too, where it is a plan.

        Args:
            kv_slots: tokens that SGLang may hold at once. exact: whether the prefix cache keeps exact prompts.
            queries: of running requests. draft_bytes: that a draft model's keys and values take for each KV slot.
            staging_bytes: that pages pass through to ``host_bytes`` of host memory, for retracted requests and other
                ``guests``. matrix_bytes: of matrices fitted to the model. transfer_bytes: of host memory for rows on
                their way between servers.
        """
        rows = geometry.num_rows + geometry.num_segments
        counts = (state.entries, state.kept_entry, state.own_entry, state.own_tokens, state.hole, state.write_slot)
        row_bytes = sum(x.nbytes for x in counts) // rows + state.row_blocks.nbytes // rows
        row_bytes += state.fault.itemsize + state.row_sign.itemsize + state.row_window.itemsize
        columns = len(geometry.fmt.tiers) + 1  # tokens of each tier, and pages
        row, ended = 4 * geometry.heads * columns, 8 * COUNT_AT * (columns + 1)
        guests = f"{guests} and retracted requests" if guests else "retracted requests"
        held = {
            PAGES: state.pages.nbytes,
            "free list": state.ring.nbytes + state.counters.nbytes + state.refcount.nbytes,
            "page table": state.page_table.nbytes
            + state.range_lo.nbytes
            + state.range_hi.nbytes
            + state.sliding.nbytes,
            "rows of requests": row_bytes * geometry.num_rows,
            "rows of prefix segments": row_bytes * geometry.num_segments,
            "KV slots": KV_SLOT_BYTES * kv_slots,
            "KV cache of the draft model": draft_bytes * (kv_slots + 1),
            "counts of prefix segments": geometry.num_segments * row * (columns - 1) // columns,
            "counts of ended requests": ended,
            f"staging of {guests}": staging_bytes,
            "fitted matrices": matrix_bytes,
            "queries of running requests": 0 if queries is None else tensor_bytes(queries),
            **ops.memory(),
        }
        measured = (max(min(geometry.num_rows, READ_AT), MEASURE_AT) + SUMS) * row
        at_most = {
            "usage reports": measured + ended,
            "scores of exact prefixes": 4 * geometry.heads * geometry.scored_tokens if exact else 0,
        }
        host = {guests: host_bytes, "rows on their way between servers": transfer_bytes}
        return cls(*({name: size for name, size in part.items() if size} for part in (held, at_most, host)))

    @property
    def total(self) -> int:
        return sum(self.held.values()) + sum(self.at_most.values())

    @property
    def share_outside(self) -> float:
        """The part of all bytes that is not pages."""
        return 1 - self.held[PAGES] / self.total

    def report(self) -> dict[str, object]:
        """For ``/server_info``: bytes."""
        sums = {"total": self.total, "share_outside": self.share_outside}
        return {"held": self.held, "at_most": self.at_most, "host": self.host, **sums}

    def describe(self, budget: int | None = None) -> str:
        """A table, one line for each use. ``budget``: bytes that SGLang set aside, None if it counted tokens."""
        whole = budget or self.total
        lines = [*self.held.items(), *((f"{name}, at most", size) for name, size in self.at_most.items())]
        lines.append(("sum", self.total))
        if budget:
            lines.append(("left of the budget", budget - self.total))
        width = max(len(name) for name, _ in lines)
        table = [f"  {name:<{width}}  {size / MIB:10.2f} MiB  {size / whole:7.2%}" for name, size in lines]
        head = f"DiffKV memory, of {whole / MIB:.1f} MiB; outside the pages: {self.share_outside:.2%}"
        host = [f"  and of the host, at most, for {name}: {size / MIB:.2f} MiB" for name, size in self.host.items()]
        return "\n".join([head, *table, *host])
