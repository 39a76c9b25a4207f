"""A request's life: admitted, its prompt begun, steps planned, its prompt ended and published, and its row given up.

SGLang's hooks call this, and tests drive it without a server. A page has one owner at a time:

- the *ring*: nobody reads it; its next owner gets it empty;
- a *request's row*: from the pass that computes or copies its tokens until they are shared or the row is released
  (finish, retraction and abort alike). It alone writes these pages;
- a *pending segment*: a prompt's new pages between its last pass and the insertion, where the request goes on with a
  copy (exact fidelity). Nobody writes them;
- a *segment of the prefix cache*: what was inserted, until it is evicted. Rows that matched it hold references, and the
  page returns to the ring with the last of these. Nobody writes it.

Of a retracted request the *host* has copies of its pages, until it runs again (``Retracted``).

Pages that an admitted prompt may still take are *promised*: they are in the ring, and the ledger counts them as used.
Locks on the tree are SGLang's; the one of a request is moved only where it lets go of what it has copied.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_diffkv.layout.geometry import Path, path_end
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.mem_pool.steps import PlannedStep
from sglang_diffkv.mem_pool.table_space import TableFull
from sglang_diffkv.mem_pool.usage import UsageMeter
from sglang_diffkv.ops.decisions import compacts
from sglang_diffkv.srt.scheduling.joint_admission import JointAdmission
from sglang_diffkv.srt.scheduling.mixed_chunks import MixedChunks
from sglang_diffkv.srt.scheduling.running_compression import CompressionScheduler
from sglang_diffkv.srt.versions import compat

if TYPE_CHECKING:
    from sglang_diffkv.srt.tree.exact_prompts import ExactPrompts
    from sglang_diffkv.srt.tree.kept_states import KeptStates
    from sglang_diffkv.srt.tree.prefix_cache import DiffKVPrefixCache
    from sglang_diffkv.srt.tree.retracted import Retracted

logger = logging.getLogger(__name__)

FATAL: tuple[type[Exception], ...] = tuple(
    x for x in (getattr(torch, "AcceleratorError", None), getattr(torch.cuda, "CudaError", None)) if x is not None
)
"""Errors after which the device is of no more use."""


class BatchRefused(RuntimeError):
    """A prefill batch cannot be prepared because of some of its requests, the ``causes``."""

    def __init__(self, causes: list[Any], reason: str):
        super().__init__(reason)
        self.causes, self.reason = causes, reason
        self.batch: Any = None
        """SGLang's batch, set by who prepares it."""


@dataclass(frozen=True)
class Admission:
    """Whether a prompt of ``needed`` tokens behind a matched ``path`` has room.

    Attributes:
        growth: what its generated tokens are expected to take. fits: with nothing compressed. fits_compacted: if it is
            compacted after each chunk of ``chunk`` tokens, by which it is expected to take ``saved`` tokens less; 0 if
            it may not be.
    """

    path: Path
    needed: int
    growth: compat.Growth
    fits: bool
    fits_compacted: bool
    chunk: int
    saved: int


class RequestLifecycle:
    """What becomes of requests, over a ledger of pages. ``tree`` is set when SGLang has made its prefix cache."""

    def __init__(self, ledger: PageLedger, usage: UsageMeter | None = None):
        self.ledger, self.manager, self.usage = ledger, ledger.manager, usage
        self.tree: DiffKVPrefixCache | None = None
        self.retracted: Retracted | None = None
        """Who keeps retracted requests in host memory; None where they are computed again."""
        self.refused: list[Any] = []
        """Requests that were taken out of a batch; the scheduler has yet to tell their clients."""
        self.preempted: list[Any] = []
        """Requests that made room for more urgent ones in the pass that is being scheduled."""
        running = self.manager.running
        self.budgets = None if running is None else CompressionScheduler(self, running)
        self.joint = None if running is None else JointAdmission(self, running)
        self.mixed = MixedChunks(self.manager.counts)

    @property
    def states(self) -> KeptStates | None:
        """States that the prefix cache keeps; None of a model without, or with the prefix cache off."""
        return None if self.tree is None else self.tree.states

    @property
    def exact(self) -> ExactPrompts | None:
        """Who decides on prompts that the prefix cache keeps exactly; None if it keeps none so."""
        return None if self.tree is None else self.tree.exact

    def path(self, req: Any) -> Path:
        """What the request has matched in the prefix cache."""
        return [] if self.tree is None else self.tree.path(req.last_node)

    # Admission

    def judge(self, req: Any, chunk: int, running: Sequence[Any], ratio: float = 1.0) -> Admission:
        """Whether a request's prompt has room, evicting what may go. Its matched path must be locked.

        Args:
            chunk: tokens of a chunk that a pass has to itself. running: requests that run or are admitted already.
            ratio: of the tokens that running requests may still generate, those that SGLang expects.
        """
        ledger, path, joint = self.ledger, self.path(req), self.joint
        self._forget_refused()
        needed = compat.prompt_len(req) - compat.prefix_len(req)
        if self.tree is not None:
            self.tree.evict_table_blocks(path, needed)
            self.tree.evict_kv_slots(needed)
        compacts = chunk < needed and self._may_compact(path, needed, running)
        growth, fits = (ledger.growth, True) if joint is None else joint.judge(req, needed, running, ratio)
        return Admission(
            path,
            needed,
            growth,
            fits=fits and ledger.admits(path, needed),
            fits_compacted=compacts and ledger.admits_compacting(needed, chunk),
            chunk=chunk,
            saved=needed - ledger.compacting_tokens(needed, chunk) if compacts else 0,
        )

    def _may_compact(self, path: Path, needed: int, running: Iterable[Any]) -> bool:
        """Whether a prompt may be compacted between chunks. Not where its exact form is wanted, nor where tokens would
        be pruned for good before all of the prompt has seen them."""
        ledger, policy = self.ledger, self.manager.policy
        if not compacts(self.manager.state, policy) or policy.prunes or self.exact is not None:
            return False
        most = 0
        for req in running:
            if req.finished():
                continue  # its place in the tree may be gone
            held = self.path(req)
            most = max(most, ledger.most_pages(held, compat.longest_len(req) - path_end(held)))
        return ledger.may_compact(path, needed, most)

    def admit(self, req: Any, admission: Admission, *, compacted: bool = False) -> None:
        """The request runs: set aside what its prompt may take. ``compacted``: it is compacted between chunks."""
        if compacted:
            self.ledger.chunks[req] = admission.chunk
            self.ledger.compacted += 1
        self.ledger.promise(req, admission.path, admission.needed)
        if self.tree is not None:
            self.tree.evict_uncovered()

    def turn_away(self, req: Any, admission: Admission) -> bool:
        """The request waits for room. True if there may be some now: with nothing running, only the segments that its
        own prefix locks as a whole can make it, and these were evicted."""
        ledger, tree = self.ledger, self.tree
        refused = compat.tokens_wanted(req, admission.growth) - admission.saved
        self.wait(req, refused)
        if self.joint is not None:
            self.joint.refuse(req, admission.needed)
        if tree is None or not admission.path or not ledger.idle:
            return False
        if self.retracted is not None:
            self.retracted.give_up(req)
        prompt = compat.prompt_len(req)
        wanted = math.ceil(refused) + compat.prefix_len(req) + self.manager.fmt.high.tokens
        tree.evict(EvictParams(num_tokens=max(wanted - ledger.available(), 0)))
        tree.evict_pages(ledger.prompt_pages(prompt))
        tree.evict_table_blocks([], prompt)
        tree.evict_kv_slots(prompt)
        return True

    def wait(self, req: Any, tokens: float) -> None:
        """The request waits until so many tokens are free."""
        self.ledger.refused = tokens
        if not getattr(req, "diffkv_waited", False):
            req.diffkv_waited = True
            self.ledger.waited += 1

    def _forget_refused(self) -> None:
        self.ledger.refused = None
        if self.joint is not None:
            self.joint.refused = None

    def room_for_refused(self, scheduler: Any) -> bool:
        """Whether the last refused request would fit by now."""
        if self.joint is None:
            return self.ledger.room_for_refused(compat.expected_tokens(scheduler))
        return self.joint.room_for_refused(scheduler.running_batch.reqs, compat.expected_ratio(scheduler))

    def next_chunk_fits(self, req: Any, chunk: int) -> bool:
        """Whether an admitted prompt's next chunk has room. Always where all of its pages are promised; one that is
        compacted between chunks may have to wait."""
        ledger = self.ledger
        if req not in ledger.chunks:
            return True
        ledger.chunks[req] = max(ledger.chunks[req], chunk)
        ledger.promise(req, [], compat.prompt_len(req) - compat.prefix_len(req))
        if ledger.uncommitted_pages() < 0:
            self.manager.counts.settle()  # the last chunk's compaction may have made room
            if self.tree is not None:
                self.tree.evict_uncovered()
        return ledger.uncommitted_pages() >= 0

    def tokens_to_branch(self, req: Any) -> int | None:
        """Tokens that the request's next chunk has at most, to end where its prompt branches off from others; None if
        that does not matter."""
        left = getattr(req, "diffkv_branch", 0) - compat.prefix_len(req)
        return left if left > 0 else None

    # Steps

    def begin_states(self, reqs: list[Any]) -> None:
        """A prefill of ``reqs`` is about to be prepared: those that go on from a prefix get its state."""
        if self.states is not None:
            self.states.begin(reqs)

    def pass_launched(self) -> None:
        """The planned pass is on the stream, and no other behind it."""
        if self.states is not None:
            self.states.copy_due()

    def plan_prefill(self, reqs: list[Any]) -> PlannedStep:
        """The next pass computes the requests' next chunks: attach the prefixes they have matched, and make room.

        Raises BatchRefused.
        """
        rows, starts, counts, prompts, ending, compacting = [], [], [], [], [], []
        for req in reqs:
            row, start, end = compat.allocated_row_of(req), compat.prefix_len(req), compat.extend_end(req)
            prompt = compat.prompt_len(req)
            if start and row not in self.manager.rows:
                with self.refusing(reqs, req):
                    self.begin_prompt(req)
            if end == prompt:
                ending.append(row)
            elif req in self.ledger.chunks:
                compacting.append(row)
            self.ledger.promise(req, [], prompt - end)
            rows.append(row)
            starts.append(start)
            counts.append(end - start)
            prompts.append(prompt)
        with self.refusing(reqs):
            step = self.manager.plan_step(rows, counts, starts, prompts=prompts, ending=ending, compacting=compacting)
        if self.states is not None:
            for row, req in zip(rows, reqs, strict=True):
                self.states.plan(req, row, compat.extend_end(req), shared=self.manager.rows.shared(row))
        if self.exact is not None:
            for row, req in zip(rows, reqs, strict=True):
                if row in step.ending:
                    insertable = not (getattr(req, "skip_radix_cache_insert", False) or self._reads_alone(req))
                    with self.refusing(reqs, req):
                        self.exact.plan(row, req.last_node, brief=brief_reply(req), insertable=insertable)
        if self.retracted is not None:
            for req in reqs:
                self.retracted.started(req)
        return step

    def begin_prompt(self, req: Any) -> None:
        """The request's row refers to the pages of its matched prefix from now on. Raises TableFull."""
        row = compat.allocated_row_of(req)
        self.manager.attach_prefix(row, self.path(req))
        if self.exact is not None:
            self.exact.attached(row, req.last_node, restored=self._reads_alone(req))

    def _reads_alone(self, req: Any) -> bool:
        """Whether the request's prefix was restored for it alone."""
        return self.retracted is not None and self.retracted.reads_alone(req)

    def without_room(self, reqs: list[Any]) -> dict[int, str]:
        """Indices of the requests whose next token has no table block or KV slot, and why."""
        rows = {compat.allocated_row_of(req): index for index, req in enumerate(reqs)}
        found = self.manager.space.refused(list(rows), self.manager.counts.step_tokens)
        drafts, tree = self.manager.drafts, self.tree
        wanted = {row: compat.kv_slots_wanted(reqs[rows[row]], drafts) for row in rows if row not in found}
        room = self.ledger.kv_slots_free()
        if tree is not None and sum(wanted.values()) > room:
            room = max(room, self.ledger.uncommitted_kv_slots() + tree.evictable_tokens())
        while wanted and sum(wanted.values()) > room:
            found[wanted.popitem()[0]] = "no KV slot is free"
        if tree is not None and sum(wanted.values()) > self.ledger.kv_slots_free():
            tree.evict_kv_slots(sum(wanted.values()))
        return {rows[row]: reason for row, reason in found.items()}

    def relieve(self, reqs: list[Any]) -> bool:
        """The next token of each request does not fit. Whether any of them has given up bytes: not where table blocks
        or KV slots are short, of which compression frees none, nor where a pass is planned already."""
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
            rows.accepted(row, compat.committed_len(req), self.manager.drafts)

    def _follow(self, req: Any, row: int) -> None:
        """What the host knows of a row that is about to be shared or given up: of a verification whose results are just
        being looked at, too. Nothing beside the passes reads it any more."""
        if self.budgets is not None:
            self.budgets.let_go(row)
        rows = self.manager.rows
        if self.manager.drafts and row in rows and not rows.in_prompt(row):
            rows.accepted(row, max(rows.length(row), compat.committed_len(req)))

    def after_step(self, reqs: list[Any], others: Sequence[Any] = ()) -> None:
        """The results of a pass are out: see what the requests that left make possible for the others.

        Budgets look at ``others`` too, running requests that may not have been in it. Behind a pass over prompts the
        next decode step has been launched already, and behind its own results the one after it. A request is compressed
        at its limit, whatever runs beside it, so it has to be seen behind each pass.
        """
        running = [req for req in reqs if not req.finished()]
        if self.budgets is not None:
            self.budgets.compress_judged()
        if self.exact is not None:
            self.exact.copy_alone(running)
        if self.budgets is not None:
            found = {id(req): req for req in (*running, *others, *self.mixed.decoding)}
            self.budgets.follow([req for req in found.values() if not req.finished()])

    def tidy(self) -> None:
        """Before anything is scheduled: join what requests that have ended left in small segments."""
        if self.tree is not None:
            self.tree.joiner.tidy()

    # Publication

    def publishable_to(self, req: Any) -> int:
        """Position up to which a running request's prompt may join the prefix cache now; 0 if it may not."""
        row = compat.row_of(req)
        end = None if row is None else self.manager.prompts.publishable_to(row)
        return 0 if end is None or end > compat.extend_end(req) else end

    def publish(self, req: Any, insertion: Any, *, running: bool) -> bool:
        """Run SGLang's ``insertion`` of a request's tokens into the prefix cache, with pages of its row: of a running
        one those up to ``publishable_to``. False, running nothing, where they do not join now: a prompt too short to be
        shared alone, no room, a row with a fault."""
        tree, row = self.tree, compat.row_of(req)
        assert tree is not None
        if row is None or (running and not self.publishable_to(req)):
            return False
        if not running:
            self._follow(req, row)
        if row in self.manager.counts.faulted or not self._joins(row, running):
            return False
        if not tree.make_room_to_share(row) or not self._joins(row, running):  # room may be made by evicting the prompt
            return False
        tree.inserting_row, tree.inserted = row, (0, tree.root_node)
        try:
            insertion()
        finally:
            tree.inserting_row = None
        length, leaf = tree.inserted
        if self.states is not None and length:
            self.states.inserted(req, row, leaf, length, ended=not running)
        if not running:
            tree.joiner.look_at(leaf)
        return True

    def _joins(self, row: int, running: bool) -> bool:
        return running or self.exact is None or self.exact.joins(row)

    def prompt_published(self, req: Any) -> None:
        """SGLang has had its chance to insert the prompt: the request lets go of what it has copied."""
        if self.exact is not None:
            self.exact.prompt_ended(req)

    # The end

    def leave(self, req: Any, row: int, *, counted: bool) -> None:
        """The request gives up its row: it has finished, or was retracted or aborted.

        Args:
            counted: whether it counts among the requests served.
        """
        self.ledger.forget(req)
        self._follow(req, row)
        if row in self.manager.rows:
            if counted and self.usage is not None:
                self.usage.finish(row)
            self.manager.release(row)
            if self.tree is not None:
                self.tree.pack_replies()
        if self.exact is not None:
            self.exact.forget(row)
        if self.tree is not None:
            self.tree.give_up_states(req, row)
            self.tree.joiner.look_at(req.last_node)
        if self.retracted is not None:
            self.retracted.left(row)

    def starts_over(self, req: Any, node: Any) -> bool:
        """Whether a request that does not fit alone, and has given up its row, may try once more.

        Its tokens may lie in small segments: those that other requests read while theirs ended were not joined. So its
        path in the tree, up to ``node``, is evicted, and it computes all of its tokens in dense pages.
        """
        tree = self.tree
        if tree is None or node in (None, tree.root_node) or getattr(req, "diffkv_started_over", False):
            return False
        if node.segment is not None:
            tree.evict_branch(node)
        req.diffkv_started_over = True
        self.ledger.started_over += 1
        return True

    # Errors

    @contextmanager
    def refusing(self, reqs: list[Any], req: Any = None) -> Iterator[None]:
        """An error inside becomes BatchRefused: because of ``req``, of the request whose row has no table blocks, or,
        where neither is known, of all. With several ranks only an error that all of them meet may, or they would
        part."""
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
            causes = [req] if req is not None else list(reqs)
            if req is None and isinstance(error, TableFull):
                causes = [x for x in reqs if compat.row_of(x) == error.row] or causes
            raise BatchRefused(causes, str(error)) from error


def brief_reply(req: Any) -> bool:
    """Whether the request ends with its first token."""
    return req.sampling_params.max_new_tokens <= 1
