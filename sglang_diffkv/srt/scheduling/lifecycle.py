"""A request's life: admitted, its prompt begun, steps planned, its prompt ended and published, and its row given up.

SGLang's hooks call this, and tests drive it without a server. A page has one owner at a time:

- the *ring*: nobody reads it; its next owner gets it empty;
- a *request's row*: from the pass that computes or copies its tokens until they are shared or the row is released
  (finish, retraction and abort alike). It alone writes these pages;
- a *pending segment*: a prompt's new pages between its last pass and the insertion, where the request goes on with a
  copy (exact fidelity). Nobody writes them;
- a *segment of the prefix cache*: what was inserted, until it is evicted. Rows that matched it hold references, and the
  page returns to the ring with the last of these. Nobody writes it.

Of a retracted request the *host* has copies of its pages, until it runs again (``tree/retracted.py``).

Optional parts listen to these events (``tree/events.py``, which gives their order), and the tree is known by
``tree/interface.py`` alone.

Pages that an admitted prompt may still take are *promised*: they are in the ring, and the ledger counts them as used.
Locks on the tree are SGLang's; the one of a request is moved only where it lets go of what it has copied.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from sglang_diffkv.layout.geometry import Path, path_end
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.mem_pool.steps import PlannedStep
from sglang_diffkv.mem_pool.table_space import TableFull
from sglang_diffkv.mem_pool.usage import UsageMeter
from sglang_diffkv.ops.decisions import compacts
from sglang_diffkv.srt.scheduling.errors import FATAL
from sglang_diffkv.srt.scheduling.fidelity import Fidelity
from sglang_diffkv.srt.scheduling.joint_admission import AdmissionRule
from sglang_diffkv.srt.scheduling.mixed_chunks import MixedChunks
from sglang_diffkv.srt.scheduling.receiving import Receiving
from sglang_diffkv.srt.scheduling.sending import Sending
from sglang_diffkv.srt.tree.events import RequestListener, let_go
from sglang_diffkv.srt.tree.interface import NoTree, PrefixTree
from sglang_diffkv.srt.tree.parts import Parts
from sglang_diffkv.srt.versions import compat

logger = logging.getLogger(__name__)


class BatchRefused(RuntimeError):
    """A prefill batch cannot be prepared because of an ``error``.

    Attributes:
        cause: the request that raises it; None for one of the batch that is not known.
        batch: SGLang's batch, set by who prepares it.
    """

    def __init__(self, cause: Any, error: Exception):
        super().__init__(str(error))
        self.cause, self.error = cause, error
        self.batch: Any = None


@dataclass(frozen=True)
class Admission:
    """Whether a prompt of ``needed`` tokens behind a matched ``path`` has room.

    Attributes:
        blocks: table blocks that it takes until its first decode step. growth: what its generated tokens are expected
            to take. fits: with nothing compressed. fits_compacted: if it is compacted after each chunk of ``chunk``
            tokens, by which it is expected to take ``saved`` tokens less; 0 if it may not be.
    """

    path: Path
    needed: int
    blocks: int
    growth: compat.Growth
    fits: bool
    fits_compacted: bool
    chunk: int
    saved: int


class RequestLifecycle:
    """What becomes of requests, over a ledger of pages. Until ``connect`` there is no tree and no optional part.

    Attributes:
        tree: the prefix cache. admission_rule: by which prompts are admitted. fidelity: what requests ask for.
        compression, states, exact, retracted, sources: optional parts, see ``Parts``.
        sending, receiving: rows on their way between servers; None where one server does all.
    """

    def __init__(self, ledger: PageLedger, usage: UsageMeter | None = None, fidelity: Fidelity | None = None):
        self.ledger, self.manager, self.usage = ledger, ledger.manager, usage
        self.fidelity = fidelity or Fidelity(ledger)
        halves = self.manager.transfer is not None
        self.sending = Sending(self.manager) if halves else None
        self.receiving = Receiving(ledger) if halves else None
        self.connect(NoTree(ledger), Parts(), AdmissionRule(ledger))
        self.refused: list[Any] = []
        """Requests that were taken out of a batch; the scheduler has yet to tell their clients."""
        self.preempted: list[Any] = []
        """Requests that made room for more urgent ones in the pass that is being scheduled."""
        self.mixed = MixedChunks(self.manager.counts)

    def connect(self, tree: PrefixTree, parts: Parts, rule: AdmissionRule) -> None:
        """The tree and the parts that requests meet from now on. Nothing runs."""
        self.tree, self.admission_rule, self.compression = tree, rule, parts.compression
        self.states, self.exact, self.retracted = parts.states, parts.exact, parts.retracted
        self.sources = parts.sources
        if self.receiving is not None:
            self.receiving.tree = tree
        self.listeners: Sequence[RequestListener] = parts.listeners
        self._hear_chunks = [x for x in self.listeners if type(x).chunk_planned is not RequestListener.chunk_planned]

    def reports(self) -> dict[str, Mapping[str, float]]:
        """What the optional parts tell, by the names under which ``/server_info`` has it."""
        return {name: told for part in self.listeners for name, told in part.reports().items()}

    def path(self, req: Any) -> Path:
        """What the request has matched in the prefix cache."""
        return self.tree.path(req.last_node)

    # Admission

    def check_spare(
        self, req: Any, chunk: int, running: Sequence[Any], ratio: float = 1.0, left: int = 0
    ) -> Admission | None:
        """``check`` of a prompt of one chunk for which nothing has to be evicted, so that its path need not be locked.
        None if something may have to, or if requests hold budgets."""
        ledger, needed = self.ledger, compat.prompt_len(req) - compat.prefix_len(req)
        if self.admission_rule.budget or chunk < needed or not ledger.has_spare(needed):
            return None
        path = self.path(req)
        blocks = ledger.blocks_for(path, needed)
        if ledger.table_starved(blocks):
            return None
        self._forget_refused()
        growth, fits = self._growth(req, needed, running, ratio, left)
        return Admission(path, needed, blocks, growth, fits=fits, fits_compacted=False, chunk=chunk, saved=0)

    def check(self, req: Any, chunk: int, running: Sequence[Any], ratio: float = 1.0, left: int = 0) -> Admission:
        """Whether a request's prompt has room, evicting what may go. Its matched path must be locked.

        Args:
            chunk: tokens of a chunk that a pass has to itself. running: requests that run or are admitted already.
            ratio: of the tokens that running requests may still generate, those that SGLang expects. left: tokens that
            the request may compute in the pass that is being made up.
        """
        ledger = self.ledger
        self._forget_refused()
        needed = compat.prompt_len(req) - compat.prefix_len(req)
        path = self.path(req)
        blocks = ledger.blocks_for(path, needed)
        self.tree.make_table_blocks(blocks)
        self.tree.make_kv_slots(needed)
        fits_pages = ledger.admits(needed, blocks)
        compacts = chunk < needed and self._may_compact(req, path, needed, running)
        growth, fits = self._growth(req, needed, running, ratio, left)
        return Admission(
            path,
            needed,
            blocks,
            growth,
            fits=fits and fits_pages,
            fits_compacted=compacts and ledger.admits_compacting(needed, chunk),
            chunk=chunk,
            saved=needed - ledger.compacting_tokens(needed, chunk) if compacts else 0,
        )

    def _growth(
        self, req: Any, needed: int, running: Sequence[Any], ratio: float, left: int
    ) -> tuple[compat.Growth, bool]:
        """What the request's generated tokens take, less what its prompt gives back in the same pass, and whether there
        is room for it. Until then the prompt needs its pages, which ``PageLedger.admits`` looks for."""
        growth, fits = self.admission_rule.check(req, needed, running, ratio)
        whole = compat.keeps_high(req) or compat.own_window(req) or self.exact.keeps_prompts
        whole = whole or not compacts(self.manager.state, self.manager.policy)
        if whole or needed > left or self.admission_rule.budget:
            return growth, fits
        given_back = self.ledger.given_back(needed)
        return lambda length, more: max(growth(length, more) - given_back, 0.0), fits

    def _may_compact(self, req: Any, path: Path, needed: int, running: Iterable[Any]) -> bool:
        """Whether a prompt may be compacted between chunks. Not where its exact form is wanted, or all of it in the
        high tier, nor where tokens would be pruned for good before all of the prompt has seen them."""
        ledger, policy = self.ledger, self.manager.policy
        if compat.keeps_high(req) or policy.prunes or self.exact.keeps_prompts:
            return False
        if not compacts(self.manager.state, policy):
            return False
        most = 0
        for other in running:
            if other.finished():
                continue  # its place in the tree may be gone
            held = self.path(other)
            most = max(most, ledger.most_pages(held, compat.longest_len(other) - path_end(held)))
        return ledger.may_compact(path, needed, most)

    def admit(self, req: Any, admission: Admission, *, compacted: bool = False) -> None:
        """The request runs: promise it what its prompt may take, and evict until free pages cover all promises and the
        next step. ``compacted``: it is compacted between chunks."""
        if compacted:
            self.ledger.compact_between_chunks(req, admission.chunk)
        self.ledger.promise(req, admission.needed, admission.blocks)
        self.tree.make_pages(0, partly=True)

    def turn_away(self, req: Any, admission: Admission) -> bool:
        """The request waits for room. True if there may be some now: with nothing running, only the segments that its
        own prefix locks as a whole can make it, and these were evicted."""
        ledger, tree = self.ledger, self.tree
        refused = compat.tokens_wanted(req, admission.growth) - admission.saved
        self.wait(req, refused)
        self.admission_rule.refuse(req, admission.needed)
        if not admission.path or not ledger.idle:
            return False
        for part in self.listeners:
            part.does_not_fit_alone(req)
        prompt = compat.prompt_len(req)
        wanted = math.ceil(refused) + compat.prefix_len(req) + self.manager.fmt.high.tokens
        tree.make_tokens(max(wanted - ledger.available(), 0))
        tree.make_pages(ledger.prompt_pages(prompt), partly=True)
        tree.make_table_blocks(ledger.blocks_for([], prompt))
        tree.make_kv_slots(prompt)
        return True

    def waits_to_be_restored(self, req: Any) -> bool:
        """Whether a retracted request that SGLang is about to admit waits for room to be restored."""
        tokens = self.retracted.waits_for_room(req)
        if tokens is None:
            return False
        self.wait(req, tokens)
        return True

    def wait(self, req: Any, tokens: float) -> None:
        """The request waits until so many tokens are free."""
        self.ledger.refuse(tokens, first=not getattr(req, "diffkv_waited", False))
        req.diffkv_waited = True

    def preempting(self, preempted: list[Any]) -> None:
        """SGLang lists in ``preempted`` the requests that make room for a more urgent one."""
        self.preempted = preempted

    def _forget_refused(self) -> None:
        self.ledger.forget_refused()
        self.admission_rule.forget_refused()

    def room_for_refused(self, scheduler: Any) -> bool:
        """Whether the last refused request would fit by now."""
        return self.admission_rule.has_room(scheduler)

    def next_chunk_fits(self, req: Any, chunk: int) -> bool:
        """Whether an admitted prompt's next chunk has room. Always where all of its pages are promised; one that is
        compacted between chunks may have to wait."""
        ledger = self.ledger
        if req not in ledger.chunks:
            return True
        ledger.allow_chunk(req, chunk)
        ledger.promise(req, compat.prompt_len(req) - compat.prefix_len(req))
        if ledger.uncommitted_pages() < 0:
            self.manager.counts.settle()  # the last chunk's compaction may have made room
            self.tree.make_pages(0, partly=True)
        return ledger.uncommitted_pages() >= 0

    def tokens_to_branch(self, req: Any) -> int | None:
        """Tokens that the request's next chunk has at most, to end where its prompt branches off from others; None if
        that does not matter."""
        left = getattr(req, "diffkv_branch", 0) - compat.prefix_len(req)
        return left if left > 0 else None

    # Steps

    def begin_states(self, reqs: list[Any]) -> None:
        """A prefill of ``reqs`` is about to be prepared."""
        for part in self.listeners:
            part.prefill_begins(reqs)

    def prefill_planned(self, reqs: list[Any]) -> None:
        """A prefill of ``reqs`` is prepared and planned: those whose prompt ends there may be batched again."""
        for req in reqs:
            if compat.extend_end(req) == compat.prompt_len(req):
                req.diffkv_apart = False
        self.mixed.prompts_planned()

    def pass_launched(self) -> None:
        """The planned pass is on the stream, and no other behind it."""
        for part in self.listeners:
            part.pass_launched()

    def pass_over(self) -> None:
        """The results of the pass that was launched are on their way."""
        self.manager.end_pass()

    def plan_prefill(self, reqs: list[Any]) -> PlannedStep:
        """The next pass computes the requests' next chunks: attach the prefixes they have matched, and make room.

        Raises BatchRefused.
        """
        rows, starts, counts, prompts, ending, compacting = [], [], [], [], [], []
        with self.refusing(reqs), self.manager.device.attaching_together():
            for req in reqs:
                row, start, end = compat.allocated_row_of(req), compat.prefix_len(req), compat.extend_end(req)
                prompt = compat.prompt_len(req)
                if compat.keeps_high(req):
                    self.manager.high.keep(row)
                if window := compat.own_window(req):
                    self.manager.windows.keep(row, window)
                if start and row not in self.manager.rows:
                    with self.refusing(reqs, req):
                        self.begin_prompt(req)
                if end == prompt:
                    ending.append(row)
                elif req in self.ledger.chunks:
                    compacting.append(row)
                self.ledger.promise(req, prompt - end)
                rows.append(row)
                starts.append(start)
                counts.append(end - start)
                prompts.append(prompt)
        with self.refusing(reqs):
            step = self.manager.plan_step(rows, counts, starts, prompts=prompts, ending=ending, compacting=compacting)
        alone = [self.retracted.reads_alone(req) for req in reqs]
        for part in self._hear_chunks:
            for req, row, alone_, count, start in zip(reqs, rows, alone, counts, starts, strict=True):
                with self.refusing(reqs, req) if part.refuses or self.manager.ranks.alone else nullcontext():
                    part.chunk_planned(req, row, start + count, ends=row in step.ending, alone=alone_)
        return step

    def begin_prompt(self, req: Any) -> None:
        """The request's row refers to the pages of its matched prefix from now on. Raises TableFull."""
        row = compat.allocated_row_of(req)
        self.manager.attach_prefix(row, self.path(req))
        alone = self.retracted.reads_alone(req)
        for part in self.listeners:
            part.prompt_begun(req, row, alone=alone)

    def without_room(self, reqs: list[Any]) -> dict[int, str]:
        """Indices of the requests whose next token has no table block or KV slot, and why."""
        rows = {compat.allocated_row_of(req): index for index, req in enumerate(reqs)}
        found = self.manager.space.refused(list(rows), self.manager.counts.step_tokens)
        slots, tree = self.ledger.draft_slots, self.tree
        wanted = {row: compat.kv_slots_wanted(reqs[rows[row]], slots) for row in rows if row not in found}
        room = self.ledger.kv_slots_free()
        if sum(wanted.values()) > room:
            room = max(room, self.ledger.uncommitted_kv_slots() + tree.evictable_tokens())
        while wanted and sum(wanted.values()) > room:
            found[wanted.popitem()[0]] = "no KV slot is free"
        if sum(wanted.values()) > self.ledger.kv_slots_free():
            tree.make_kv_slots(sum(wanted.values()))
        return {rows[row]: reason for row, reason in found.items()}

    def may_relieve_later(self) -> bool:
        """Whether pages that a compression under pressure borrows are left behind the next step. Where few requests
        run, a step may otherwise take the last of them. Evicts what may go for it."""
        pressure = self.manager.pressure
        return pressure is None or self.tree.make_pages(pressure.lent, partly=True)

    def relieve(self, reqs: list[Any]) -> bool:
        """The next token of each request does not fit, or leaves no pages to borrow. Whether any of them has given up
        bytes: not where table blocks or KV slots are short, of which compression frees none, nor where a pass is
        planned already."""
        pressure, ledger = self.manager.pressure, self.ledger
        if pressure is None or ledger.table_starved() or ledger.uncommitted_kv_slots() < len(reqs):
            return False
        rows, before = (compat.row_of(req) for req in reqs if not req.finished()), pressure.compressions
        relieved = bool(pressure.relieve(row for row in rows if row is not None))
        if relieved and not before:
            logger.info(
                "DiffKV: the pool is full: running requests are compressed once more, with a window of %d, before one "
                'is retracted ("pressure_window")', pressure.rule.window,
            )  # fmt: skip
        return relieved

    def decode_begins(self, batch: Any) -> None:
        """SGLang is about to prepare a decode step of its ``batch``."""
        for part in self.listeners:
            part.decode_begins(batch)

    def plan_decode(self, reqs: list[Any], starts: list[int]) -> PlannedStep:
        """The next pass computes one token of each request, at positions ``starts``, beside the prompts that are
        planned for it if SGLang mixes the two."""
        rows = [compat.allocated_row_of(req) for req in reqs]
        if self.mixed.joins(reqs):
            return self.manager.decode_beside_prompts(rows, starts)
        return self.manager.plan_step(rows, [1] * len(rows), starts)

    def plan_verification(self, reqs: list[Any]) -> PlannedStep:
        """The next pass verifies drafts of each request, behind what the device has of it."""
        return self.manager.plan_verification([compat.allocated_row_of(req) for req in reqs])

    def step_ended(self, reqs: list[Any]) -> list[Any]:
        """A pass's results are about to go out. Those of its requests that lost tokens to an empty ring."""
        self.manager.counts.report()
        return [req for req in reqs if compat.row_of(req) in self.manager.counts.faulted]

    def verified(self, reqs: list[Any]) -> None:
        """The results of a verification are out: those of its requests that still run have the tokens it accepted."""
        for req in reqs:
            row, rows = compat.row_of(req), self.manager.rows
            if row is None or row not in rows or rows.in_prompt(row) or req.is_retracted:
                continue  # it has left, and perhaps come back
            rows.accepted(row, compat.committed_len(req), self.manager.most_accepted)

    def after_step(self, reqs: list[Any], others: Sequence[Any] = ()) -> None:
        """The results of a pass are out. ``others``: running requests that may not have been in it."""
        running = [req for req in reqs if not req.finished()]
        for part in self.listeners:
            part.results_out(running)
        every = {id(req): req for req in (*running, *others, *self.mixed.decoding)}
        unfinished = [req for req in every.values() if not req.finished()]
        for part in self.listeners:
            part.runs_on(unfinished)

    def results_processed(self, scheduler: Any) -> None:
        """SGLang's ``scheduler`` has done all that follows from the results."""
        for part in self.listeners:
            part.results_processed(scheduler)

    def ranks_meet(self) -> None:
        """All ranks pass here, before anything is scheduled, or adds up pages: they exchange what their devices have
        counted. One alone looks whenever it asks."""
        if not self.manager.ranks.alone:
            self.manager.counts.meet()

    def scheduling_begins(self, waiting: Iterable[Any]) -> None:
        """SGLang is about to choose the next pass, while the requests of ``waiting`` wait."""
        for part in self.listeners:
            part.queue_seen(waiting)
        for part in self.listeners:
            part.scheduling_begins()

    # The end

    def leave(self, req: Any, row: int, *, counted: bool) -> None:
        """The request gives up its row: it has finished, or was retracted or aborted.

        Args:
            counted: whether it counts among the requests served.
        """
        self.ledger.forget(req)
        if self.sending is not None and self.receiving is not None:
            self.sending.left(req)
            self.receiving.left(req)
        let_go(self.listeners, self.manager, req, row)
        if row in self.manager.rows:
            if counted and self.usage is not None:
                self.usage.finish(row)
            self.manager.release(row)
            for part in self.listeners:
                part.row_released()
        self.manager.high.forget(row)
        self.manager.windows.forget(row)
        for part in self.listeners:
            part.left(req, row)

    def retracting(self, req: Any) -> None:
        """SGLang is about to retract the request, which still has its row."""
        for part in self.listeners:
            part.retracting(req)

    def starts_over(self, req: Any, node: Any) -> bool:
        """Whether a request that does not fit alone, and has given up its row, may try once more.

        Its tokens may lie in small segments: those that other requests read while theirs ended were not joined. So its
        path in the tree, up to ``node``, is evicted, and it computes all of its tokens in dense pages.
        """
        if getattr(req, "diffkv_started_over", False) or not self.tree.evict_branch(node):
            return False
        req.diffkv_started_over = True
        self.ledger.start_over()
        return True

    def weights_change(self) -> None:
        """The model's weights are about to change."""
        for part in self.listeners:
            part.weights_change()

    # Checks

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree and all parts agree."""
        self.ledger.promised.check_integrity()
        self.tree.check_integrity()
        for part in self.listeners:
            part.check_integrity()

    def digest(self) -> list[Any]:
        """What ranks have to agree on, beside what the ledger and the page manager hold."""
        return [self.admission_rule.refused, *(part.digest() for part in self.listeners)]

    # Errors

    @contextmanager
    def refusing(self, reqs: list[Any], req: Any = None) -> Iterator[None]:
        """An error inside becomes BatchRefused: because of ``req``, of the request whose row has no table blocks, or of
        the only one of ``reqs``. With several ranks only an error that all of them meet may, or they would part."""
        try:
            yield
        except BatchRefused:
            raise
        except FATAL:
            raise
        except Exception as error:
            if not self.manager.ranks.alone and isinstance(error, torch.OutOfMemoryError):
                raise
            logger.exception("DiffKV: a prefill batch cannot be prepared")
            if req is None and len(reqs) == 1:
                (req,) = reqs
            if req is None and isinstance(error, TableFull):
                req = next((x for x in reqs if compat.row_of(x) == error.row), None)
            raise BatchRefused(req, error) from error
