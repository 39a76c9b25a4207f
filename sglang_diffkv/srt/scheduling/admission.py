"""Hooks on SGLang's admission of prompts: by pages, whatever its own arithmetic of tokens says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang_diffkv.srt.models.hybrids import has_states
from sglang_diffkv.srt.scheduling.allocator import requests_of
from sglang_diffkv.srt.versions import compat


def add_one_req(original: Any, self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Admit a prompt only if its pages fit, whatever SGLang's token arithmetic says; one that fits only if it is
    compacted between chunks is."""
    requests = requests_of(self)
    if requests is None:
        return original(self, req, *args, **kwargs)
    from sglang.srt.managers.schedule_policy import AddReqResult

    if any(part.waits_for(req) for part in requests.sources):
        return AddReqResult.CONTINUE  # not added; others are asked meanwhile
    if requests.waits_to_be_restored(req):
        return AddReqResult.NO_TOKEN
    if _apart(self, req):
        return AddReqResult.OTHER
    ledger = requests.ledger
    running = [] if self.running_batch is None else self.running_batch.reqs
    if requests.fidelity.waits(req, [*running, *self.can_run_list], self.new_token_ratio):
        # The next one is looked at, unless SGLang has given this one a state, which it takes back at the end only.
        return AddReqResult.OTHER if has_states(self.tree_cache.req_to_token_pool) else AddReqResult.CONTINUE
    chunked = self.new_chunked_req is not None or kwargs.get("has_chunked_req", False)
    result, compacted = AddReqResult.NO_TOKEN, False
    cut = None if chunked else requests.tokens_to_branch(req)
    left = min(x for x in (cut, self.rem_chunk_tokens, 1 << 62) if x is not None)
    with ledger.checking():
        asked = req, _whole_chunk(self), [*running, *self.can_run_list], self.new_token_ratio, left
        admission = requests.check_spare(*asked)
        if admission is None:
            with compat.node_locked(self, req.last_node):
                admission = requests.check(*asked)
        if chunked and getattr(self, "diffkv_cut", False) and admission.needed > self.rem_chunk_tokens:
            return AddReqResult.OTHER  # SGLang follows one prompt of several chunks at a time
        with (
            compat.estimated(req, admission.growth, budget=requests.admission_rule.budget),
            _ending_within(self, cut),
            ledger.charging((x, compat.extend_end(x) - compat.prefix_len(x)) for x in self.can_run_list),
        ):
            if admission.fits:
                result = original(self, req, *args, **kwargs)
            if admission.fits_compacted and result == AddReqResult.NO_TOKEN and not _added(self, req):
                compacted = True
                with ledger.credited(admission.saved):
                    result = original(self, req, *args, **kwargs)
    if _added(self, req):
        requests.admit(req, admission, compacted=compacted)
        result = self.budget_state() if cut is not None else result
        if result == AddReqResult.NO_TOKEN and requests.admission_rule.budget:
            return AddReqResult.OTHER  # no other is refused yet: SGLang would ask none until a request ends
    elif result == AddReqResult.NO_TOKEN and requests.turn_away(req, admission):
        return AddReqResult.OTHER
    return result


@contextmanager
def _ending_within(adder: Any, tokens: int | None) -> Iterator[None]:
    """Inside, the next chunk has at most so many tokens; None: as many as the pass allows."""
    allowed = adder.rem_chunk_tokens
    if tokens is None or allowed is None or allowed <= tokens:
        yield
        return
    adder.rem_chunk_tokens = tokens
    try:
        yield
    finally:
        adder.diffkv_cut = adder.rem_chunk_tokens < tokens
        adder.rem_chunk_tokens += allowed - tokens


def _apart(adder: Any, req: Any) -> bool:
    """Whether a request waits for a pass of its own, or those of this pass have one: a batch could not be prepared
    because of one of its requests."""
    return bool(adder.can_run_list) and any(getattr(x, "diffkv_apart", False) for x in (req, *adder.can_run_list))


def _added(adder: Any, req: Any) -> bool:
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req


def _whole_chunk(adder: Any) -> int:
    """Tokens of a chunk that a pass has to itself."""
    if not hasattr(adder, "diffkv_chunk"):
        adder.diffkv_chunk = adder.rem_chunk_tokens or 1 << 62
    return adder.diffkv_chunk


def add_chunked_req(original: Any, self: Any, req: Any) -> Any:
    """A prompt's next chunk is as long as the pass allows: its pages are promised. One that is compacted between chunks
    waits where its next chunk does not fit, and running requests are retracted for it."""
    requests = requests_of(self)
    if requests is None:
        return original(self, req)
    fits = requests.next_chunk_fits(req, _whole_chunk(self))
    if not fits and self.running_batch is not None and self.running_batch.reqs:
        return req
    with requests.ledger.unlimited(), _ending_within(self, requests.tokens_to_branch(req)):
        return original(self, req)


def get_running_request_total_token_offset(original: Any, self: Any, req: Any) -> Any:
    """What a running request is expected to take yet, by the growth estimate; its part of what all take together where
    they hold budgets."""
    offset, requests = original(self, req), requests_of(self)
    return offset if requests is None else requests.admission_rule.taken_by(req, offset, self)


def preempt_to_schedule(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Running requests make room for a more urgent one, if it is admitted."""
    requests = requests_of(self)
    if requests is not None:
        requests.preempting(self.preempt_list)
    return original(self, *args, **kwargs)


HOOKS = (add_one_req, add_chunked_req, preempt_to_schedule, get_running_request_total_token_offset)
