"""What differs between SGLang releases, in calls: fields of requests and batches, and how arguments are decided.

Which release has what is in its row of ``releases.py``.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from importlib.metadata import version
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang_diffkv.config import UNTRIED_ENV
from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.mem_pool.growth import Expected
from sglang_diffkv.plan import CONTEXT_SLACK as CONTEXT_SLACK
from sglang_diffkv.releases import GPU_VERSIONS, RELEASES, TESTED_VERSIONS, Release

if TYPE_CHECKING:
    from sglang_diffkv.mem_pool.ledger import PageLedger


@cache
def sglang_version() -> str:
    return version("sglang")


def require_tested_version() -> None:
    """Raise UnsupportedError unless the installed SGLang is one that the plugin was tested with."""
    found = sglang_version()
    if found not in TESTED_VERSIONS:
        raise UnsupportedError(
            f"sglang_diffkv replaces parts of SGLang that change between releases and was not tested with "
            f"SGLang {found}. Install one of: {', '.join(TESTED_VERSIONS)}."
        )


def untested_on_a_gpu(device: Any) -> list[str]:
    """What is wrong with a GPU server on the installed SGLang if it is none of ``GPU_VERSIONS``, and what to do;
    nothing to who wants to try."""
    if not str(device).startswith("cuda") or sglang_version() in GPU_VERSIONS or os.environ.get(UNTRIED_ENV):
        return []
    return [
        f"SGLang {sglang_version()} on a GPU, where it was not tested: install SGLang {', '.join(GPU_VERSIONS)}, serve "
        f"with --device cpu, or set {UNTRIED_ENV}=1 to try it"
    ]


def untried_on_a_gpu(device: Any, what: str, instead: str) -> list[str]:
    """What is wrong on a GPU with something that was seen to be right on a CPU only, and what to do; nothing to who
    wants to try."""
    if not str(device).startswith("cuda") or os.environ.get(UNTRIED_ENV):
        return []
    return [
        f"{what} on a GPU, where it was not seen to be right in all ways: {instead}, or set {UNTRIED_ENV}=1 to try it"
    ]


@cache
def installed() -> Release:
    """The row of the installed SGLang; of one that was not tested, which is refused, the newest row."""
    return RELEASES.get(sglang_version()) or RELEASES[TESTED_VERSIONS[-1]]


def kv_of(req: Any) -> Any:
    """What holds the request's row and ``cache_protected_len``."""
    return req if installed().row_on_request else req.kv


def request_rows(configurator: Any, capacity: int) -> int:
    """Rows of SGLang's table of requests for a pool of ``capacity`` tokens, the padding row included, and those of
    prompts that a decode server expects from others."""
    view = resolved(configurator.server_args)
    expects = getattr(view, "disaggregation_mode", "null") == "decode"
    more = (getattr(view, "disaggregation_decode_extra_slots", 0) or 0) if expects else 0
    with _unsaid(configurator):
        return max(configurator.resolve_max_num_reqs(capacity), 1) + 1 + more


@contextmanager
def _unsaid(configurator: Any) -> Iterator[None]:
    """Inside, SGLang's module of the configurator logs nothing: that states allow fewer requests than asked for it says
    each time that it is asked for their number, and once is enough."""
    log = logging.getLogger(type(configurator).__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def row_of(req: Any) -> int | None:
    """The request's row in ``req_to_token``, None while it has none."""
    return kv_of(req).req_pool_idx


def allocated_row_of(req: Any) -> int:
    """The row of a request that must have one."""
    row = row_of(req)
    if row is None:
        raise RuntimeError(f"diffkv: request {req.rid} has no row")
    return row


def prefix_len(req: Any) -> int:
    """Tokens that the request's next extend pass does not compute."""
    return req.prefix_len if installed().request_extents else len(req.prefix_indices)


def committed_len(req: Any) -> int:
    """Tokens of the request whose keys and values are stored, by the results that SGLang has seen."""
    return int(kv_of(req).kv_committed_len)


def kv_slots_wanted(req: Any, draft_slots: int) -> int:
    """KV slots that SGLang takes for the request's next token; with drafts those of a pass and the one after it, each
    ``draft_slots``, beyond what it holds."""
    if not draft_slots:
        return 1
    return max(committed_len(req) + 2 * draft_slots - int(req.kv.kv_allocated_len), 0)


def extend_end(req: Any) -> int:
    """Position after the last token of the request's next extend pass."""
    return req.extend_end if installed().request_extents else req.extend_range.end


@contextmanager
def filled_to(req: Any, end: int) -> Iterator[None]:
    """Inside, the prefix cache is offered the request's first ``end`` tokens, and not all up to ``extend_end``: for
    ``cache_unfinished_req``, which SGLang has up to 0.5.21."""
    if end == extend_end(req):
        yield
        return
    req.get_fill_ids = lambda: req.full_untruncated_fill_ids[:end]
    try:
        yield
    finally:
        del req.get_fill_ids


def prompt_len(req: Any) -> int:
    """Tokens that prefill has to reach, generated ones of a retracted request included."""
    return len(req.full_untruncated_fill_ids)


def namespace_of(key: Any) -> tuple[str, ...]:
    """What keeps a tree's key apart from equal tokens of others: ``extra_key`` and, where there is one, the salt."""
    return str(key.extra_key or ""), str(getattr(key, "cache_salt", None) or "")


def tokens_of(req: Any) -> int:
    """Tokens of the request's prompt and reply so far, of which SGLang's results tell."""
    return len(req.origin_input_ids) + len(req.output_ids)


def ends_with(req: Any, token: int) -> bool:
    """Whether the request would end with ``token`` behind its reply so far."""
    would = copy.copy(req)
    would.output_ids = req.output_ids[:]
    would.output_ids.append(token)
    would.update_finish_state(1)
    return bool(would.finished())


def sampled_tokens(batch: Any, result: Any) -> Callable[[], list[int]] | None:
    """The tokens that a decode pass without drafts has sampled for each request of its ``batch``, once somebody asks:
    that waits for the pass. None for another pass."""
    if not batch.forward_mode.is_decode() or not batch.spec_algorithm.is_none():
        return None

    def tokens() -> list[int]:
        if result.copy_done is not None:
            result.copy_done.synchronize()
        found = result.next_token_ids
        return [int(token) for token in (found.tolist() if hasattr(found, "tolist") else found)]

    return tokens


def told_tokens(req: Any) -> int:
    """The same, without tokens behind the request's stop, which its client does not get."""
    stop = req.finished_len
    return len(req.origin_input_ids) + (len(req.output_ids) if stop is None else min(stop, len(req.output_ids)))


def keeps_high(req: Any) -> bool:
    """Whether all tokens of the request stay in the high tier, as it has asked: the scheduler set that."""
    return getattr(req, "diffkv_keeps_high", False)


def own_window(req: Any) -> int | None:
    """The window that the request has for itself, as it has asked; None for the server's."""
    return getattr(req, "diffkv_window", None)


def prompt_problem(req: Any) -> str:
    """Why a prompt cannot be computed; empty if it can. It may have no token, as SGLang lets it come among others of a
    batch; embeddings in no form of SGLang's; or a token that is not of the model's vocabulary. Images, in whose place
    SGLang has numbers of its own, and embeddings have other tokens. LoRA adapters have not: SGLang loads none that
    adds some."""
    if not len(req.origin_input_ids):
        return "the prompt is empty: it needs one token at least"
    overrides = getattr(req, "positional_embed_overrides", None)
    if overrides is not None and not hasattr(overrides, "positions"):
        return "positional_embed_overrides is no field of a request over HTTP"
    size = getattr(req, "vocab_size", None)
    if size is None or req.multimodal_inputs is not None or req.input_embeds is not None:
        return ""
    ids = np.asarray(req.origin_input_ids)
    outside = (ids < 0) | (ids >= size)
    if not outside.any():
        return ""
    return f"input_ids has {ids[outside][0]}, which is no token of this model: its tokens are 0 to {size - 1}"


def number_problem(req: Any) -> str:
    """Which number of a request SGLang does not look at before it computes with it, and cannot; empty if there is
    none."""
    most = req.sampling_params.max_new_tokens
    if not isinstance(most, Integral | None):
        return "max_new_tokens is no whole number"
    if not getattr(req, "return_logprob", False):
        return ""
    asked, size = req.logprob, getattr(req, "vocab_size", None)
    top, of = asked.top_logprobs_num, asked.token_ids_logprob or ()
    if not isinstance(top, Integral | None) or not all(isinstance(token, Integral) for token in of):
        return "top_logprobs_num is a whole number, and token_ids_logprob a list of them"
    if req.logprob_start_len < -1:
        return f"logprob_start_len is {req.logprob_start_len}: it is a position, or -1 for none of the prompt"
    if size is None:
        return ""
    if not 0 <= int(top or 0) <= size:
        return f"top_logprobs_num is {top}: this model has {size} tokens"
    if any(not 0 <= token < size for token in of):
        return f"token_ids_logprob has what is no token of this model: its tokens are 0 to {size - 1}"
    return ""


def end_with_error(req: Any, problem: str) -> None:
    """The request ends with an error before it is queued. SGLang computes one token of it all the same, so what the
    error may be about is taken off."""
    if getattr(req, "positional_embed_overrides", None) is not None:
        req.positional_embed_overrides = None
    req.sampling_params.max_new_tokens = 1
    req.set_finish_with_abort(problem)


def grows_whole(req: Any) -> bool:
    """Whether each generated token of the request, until it runs, counts as one of the high tier."""
    return getattr(req, "diffkv_grows_whole", False)


def keep_seconds(req: Any) -> int:
    """For which the request has asked to keep what it leaves; 0 if it has not."""
    return getattr(req, "diffkv_keep", 0)


def findable(req: Any) -> bool:
    """Whether the request goes on later, and SGLang can look for all its tokens in the prefix cache then
    (``looked_for``). It cannot before it has the logprobs of a prompt that are asked for."""
    if getattr(req, "return_logprob", False) and not req.output_ids:
        return False
    if req.finished() or getattr(req, "to_finish", None) is not None:
        return False
    if getattr(req, "input_embeds", None) is not None or getattr(req, "positional_embed_overrides", None) is not None:
        return False
    return not getattr(req, "skip_radix_cache_insert", False)


@contextmanager
def looked_for(req: Any) -> Iterator[None]:
    """Inside, SGLang looks for all tokens of a retracted request in the prefix cache. By itself it computes generated
    ones again where logprobs are asked for, and keeps those that it had before."""
    start = getattr(req, "logprob_start_len", None)
    if start is not None:
        req.logprob_start_len = -1
    try:
        yield
    finally:
        if start is not None:
            req.logprob_start_len = start


def longest_len(req: Any) -> int:
    """Tokens of the request's sequence when it ends, at most."""
    return len(req.origin_input_ids) + req.sampling_params.max_new_tokens


def protected_len(req: Any) -> int:
    """Tokens of the request whose KV slots belong to the tree."""
    return kv_of(req).cache_protected_len


@contextmanager
def told_from_host(reqs: Sequence[Any]) -> Iterator[None]:
    """Inside, SGLang counts a request's cached tokens, by where they were: those that came back from the host for it
    (``diffkv_from_host``) as the host's, but those that had just come there from a store (``diffkv_from_store``)."""
    found = [req for req in reqs if getattr(req, "diffkv_from_host", 0)]
    for req in found:
        req.host_hit_length = req.host_loaded_length = min(req.diffkv_from_host, prefix_len(req))
        req.storage_hit_length = min(getattr(req, "diffkv_from_store", 0), req.host_hit_length)
    try:
        yield
    finally:
        for req in found:
            req.host_hit_length = req.host_loaded_length = req.storage_hit_length = 0


def own_from(tree: Any, req: Any, node: Any, start: int, kv_slots: Any) -> None:
    """From position ``start`` on, where ``node`` ends, tokens get the request's own ``kv_slots`` instead of the tree's;
    it holds the tree up to ``node`` only."""
    rows, row = tree.req_to_token_pool, allocated_row_of(req)
    pool = tree.token_to_kv_pool_allocator.get_kvcache()
    if pool is not None:
        pool.kv_slots_changed(rows.req_to_token[row, start : start + len(kv_slots)], kv_slots)
    rows.write((row, slice(start, start + len(kv_slots))), kv_slots)
    kv_of(req).cache_protected_len = start
    if installed().request_extents:
        tree.unlock(req.lock)
        req.lock = tree.lock(node)
    else:
        tree.dec_lock_ref(req.last_node)
        tree.inc_lock_ref(node)
        kv_slots = rows.req_to_token[row, : len(req.prefix_indices)]
        req.prefix_indices = kv_slots.to(dtype=req.prefix_indices.dtype, copy=True)
    req.last_node = node


def node_locked(adder: Any, node: Any) -> AbstractContextManager[None]:
    """Hold a tree node while an admission is checked."""
    return adder._lock_node(node)


Growth = Callable[[int, int], float]
"""What so many tokens more, behind a length, are expected to take, in high-tier tokens."""


@contextmanager
def estimated(req: Any, growth: Growth, *, budget: bool = False) -> Iterator[None]:
    """Inside, the tokens that a request may still generate count for less, rounded up: what SGLang reserves for it.
    Where there is a ``budget``, ``ignore_eos`` is off, too: without a prefix cache SGLang would reckon such requests,
    and all that run, at their full length."""
    params, made = req.sampling_params, len(req.output_ids)
    before = {name: getattr(params, name) for name in ("max_new_tokens", "ignore_eos")}
    more = max(params.max_new_tokens - made, 0)
    params.max_new_tokens = made + math.ceil(growth(prompt_len(req), more))
    params.ignore_eos = before["ignore_eos"] and not budget
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(params, name, value)


def tokens_wanted(req: Any, growth: Growth) -> float:
    """What admission asks for a request: its prompt, and the tokens it may generate, as ``estimated``."""
    return prompt_len(req) - prefix_len(req) + tokens_to_grow(req, growth) + 1


def tokens_to_grow(req: Any, growth: Growth) -> float:
    """Of it, what its generated tokens are expected to take."""
    return growth(prompt_len(req), min(reply_left(req), _most_expected()))


def reply_left(req: Any) -> int:
    """Tokens that the request may still generate."""
    return max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)


def reply_expected(req: Any, ratio: float) -> int:
    """Of these, those that SGLang expects if it expects ``ratio`` of all; each of them where their end is ignored."""
    left = reply_left(req)
    return left if req.sampling_params.ignore_eos else math.ceil(min(left, _most_expected()) * ratio)


@cache
def _most_expected() -> int:
    """Tokens of a reply that SGLang looks at when it admits requests."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    return CLIP_MAX_NEW_TOKENS


def expected_ratio(scheduler: Any) -> float:
    """Of the tokens that running requests may still generate, those that SGLang expects."""
    return scheduler.new_token_ratio_tracker.current


def most_left(req: Any) -> int:
    """Tokens that a request may generate yet, of which SGLang's admission takes account."""
    return int(min(req.sampling_params.max_new_tokens - len(req.output_ids), _most_expected()))


def expected_tokens(scheduler: Any, running: Any = None) -> Iterator[Expected]:
    """What SGLang expects running requests to generate yet, as its admission does. ``running``: SGLang's running batch,
    where it is not the scheduler's yet."""
    ratio = expected_ratio(scheduler)
    for req in (running or scheduler.running_batch).reqs:
        certain = reply_is_certain(req)
        yield Expected(row_of(req), most_left(req) * (1.0 if certain else ratio), certain)


def reply_is_certain(req: Any) -> bool:
    """Whether SGLang reserves the request's whole reply, whose end is ignored, as long as it runs."""
    return bool(installed().whole_replies and req.sampling_params.ignore_eos)


def growth_of(req: Any, ledger: PageLedger, closed: int = 0) -> Growth:
    """What the request's generated tokens are expected to take, before it has a row. ``closed``: tokens that a prefix
    holds for it."""
    if grows_whole(req):
        return ledger.whole_growth
    certain = reply_is_certain(req) and own_window(req) is None
    return partial(ledger.growth, closed=closed, certain=certain)


def resolved(server_args: Any) -> Any:
    """The arguments with what SGLang has decided so far. From 0.5.21 on the arguments themselves are as the user gave
    them."""
    if not installed().declared_arguments:
        return server_args
    from sglang.srt.arg_groups.model_override_base import resolving_view

    return resolving_view(server_args)


def published_args() -> Any:
    """The arguments of this process's server, of a release with ``declared_arguments``."""
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()


def unread_mask(requests: int, drafts: int, device: Any) -> Any:
    """SGLang's room for the mask of drafts of up to so many requests, for a backend that does not read it."""
    from sglang.srt.layers.attention.verify_mask import maybe_create_verify_mask

    sizes = {"max_bs": requests, "max_context_len": 0, "num_draft_tokens": drafts, "device": device}
    return maybe_create_verify_mask(is_draft_runner=False, skip_prefill=False, is_read=False, **sizes)


def short_ngram_masks(worker: type) -> None:
    """Have SGLang's ``worker`` of n-grams mask drafts among themselves alone. By itself it makes a mask over each
    request's whole sequence too, one request after the other while the GPU waits, for backends that read it."""
    module: Any = sys.modules[worker.__module__]
    if hasattr(module, "USE_FULL_MASK"):
        module.USE_FULL_MASK = False


BETWEEN_LAYERS = "breakable"
"""SGLang's name of graphs of passes over prompts that hold what is between two layers' attention."""


def prefill_graphs(server_args: Any) -> str:
    """What holds CUDA graphs of passes over prompts: SGLang's name of it, ``disabled`` for nothing."""
    config = getattr(resolved(server_args), "cuda_graph_config", None)
    return "disabled" if config is None else str(config.prefill.backend)


def asked_for_prefill_graphs(server_args: Any) -> bool:
    """Whether the user said what holds them."""
    return ("prefill", "backend") in getattr(server_args, "_cuda_graph_config_locked", ())


def decline_prefill_graphs(server_args: Any) -> None:
    """Switch graphs of passes over prompts off. Without effect before SGLang has chosen them and after its processes
    have the arguments."""
    config = resolved(server_args).cuda_graph_config
    if not installed().declared_arguments:
        config.prefill.backend = "disabled"
        return
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    decide(server_args, cuda_graph_config=with_phase(config, Phase.PREFILL, backend=Backend.DISABLED))


def decline_hybrid_swa_pools(server_args: Any) -> bool:
    """Switch SGLang's pools for models with sliding-window layers off, of which one is not the plugin's. Whether they
    were on: then a model with such layers would get them."""
    if resolved(server_args).disable_hybrid_swa_memory:
        return False
    decide(server_args, disable_hybrid_swa_memory=True)
    return True


def has_declined(server_args: Any, **fields: Any) -> bool:
    """Whether just this was decided, where arguments have what was decided."""
    stash = [getattr(server_args, name, None) or [] for name in ("_resolved_overrides", "_runtime_mutations")]
    return any(("sglang_diffkv", fields) in decisions for decisions in stash)


def tree_page_size(server_args: Any) -> int:
    """Tokens of a page of the prefix cache: the user's ``--page-size``, 1 without it. ``server_args``: not
    ``resolved``."""
    return getattr(server_args, "_diffkv_page_size", None) or getattr(server_args, "page_size", None) or 1


def hand_out_single_slots(server_args: Any) -> None:
    """Let SGLang's scheduler and allocator go by single tokens, whatever ``--page-size``: that is the prefix cache's
    alone, and ``tree_page_size`` still tells it."""
    size = getattr(resolved(server_args), "page_size", None) or 1
    if size == 1:
        return
    if not installed().declared_arguments:  # those keep what the user asked for
        server_args._diffkv_page_size = size
    decide(server_args, page_size=1)


@cache
def default_of(option: str) -> Any:
    """What SGLang's option has by default, by its field of ``ServerArgs``."""
    import dataclasses

    from sglang.srt.server_args import ServerArgs

    if dataclasses.is_dataclass(ServerArgs):
        return next(x.default for x in dataclasses.fields(ServerArgs) if x.name == option)
    import msgspec

    return next(x.default for x in msgspec.structs.fields(ServerArgs) if x.name == option)


def decide(server_args: Any, **fields: Any) -> None:
    """Give arguments a value that their user did not ask for."""
    if not installed().declared_arguments:
        server_args.override("sglang_diffkv", **fields)
        return
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(server_args, "sglang_diffkv", **fields)


def tensor_parallel_ranks() -> Ranks:
    """The ranks of this process's tensor-parallel group, which exchange numbers over SGLang's CPU group and add tensors
    over its device group."""
    import torch
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()

    def largest(numbers: np.ndarray) -> np.ndarray:
        shared = torch.from_numpy(numbers.copy())
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=group.cpu_group)
        return shared.numpy()

    def add(tensor: torch.Tensor) -> None:
        torch.distributed.all_reduce(tensor, group=group.device_group)

    return Ranks(group.world_size, group.rank_in_group, largest, add) if group.world_size > 1 else Ranks()


def no_prefill(running_batch: Any) -> Any:
    """What a scheduler that has nothing to prefill plans: to go on with what runs."""
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)


def queue_preempted(scheduler: Any, preempted: Sequence[Any]) -> None:
    """Requests that were taken from the running batch wait again, after a pass that admitted nobody. SGLang queues them
    itself from 0.5.22 on; before, only a pass that admits somebody did."""
    if not installed().queues_preempted:
        for req in preempted:
            scheduler._add_request_to_queue(req)


def set_mixed_starts(batch: Any, running: Any) -> None:
    """0.5.17 takes it for granted that each request which decodes in a pass over prompts was in the pass before, too:
    of one that was not, the token would be one position too far."""
    if installed().mixed_starts_wrong:
        starts = [length - 1 for length in running.seq_lens_cpu.tolist()]
        batch.prefix_lens[-len(starts) :] = starts


def part_batch(batch: Any, indices: Sequence[int]) -> Any:
    """Take the requests at ``indices``, not all, out of a batch that is about to decode. A batch of them, for
    ``join_batch``; None, changing nothing, where SGLang accumulates penalties, which it has for a batch as a whole."""
    if batch.sampling_info.penalizer_orchestrator.is_required:
        return None
    parted = copy.copy(batch)
    parted.sampling_info = copy.copy(batch.sampling_info)
    parted.filter_batch(keep_indices=list(indices))
    batch.filter_batch(keep_indices=[index for index in range(len(batch.reqs)) if index not in indices])
    return parted


def join_batch(scheduler: Any, parted: Any) -> None:
    """The requests that were taken out run with all others again."""
    running = scheduler.running_batch
    if running.is_empty():
        parted.sampling_info.penalizer_orchestrator.batch = parted
        parted.batch_is_full = running.batch_is_full
        scheduler.running_batch = parted
    else:
        running.merge_batch(parted)


def release_request(batch: Any, index: int) -> None:
    """Take from a batch's request all that it holds, as a retraction does; the request may be queued again. One that
    got no KV slots, or not even a row, before its batch failed holds its lock on the tree and perhaps the row."""
    req = batch.reqs[index]
    if _has_kv_slots(req):
        more = {"server_args": _global_server_args()} if installed().release_needs_arguments else {}
        batch.release_req(index, 0, **more)
        return
    if installed().request_extents:
        batch.tree_cache.unlock(req.lock)
    elif req.last_node is not None:
        batch.tree_cache.dec_lock_ref(req.last_node)
    free_state(batch.req_to_token_pool, req)
    if row_of(req) is not None:
        batch.req_to_token_pool.free(req)
    req.reset_for_retract()


def put_back(batch: Any, index: int) -> None:
    """As ``release_request``, of a request that is to wait as if it had not been admitted. It does not count as
    retracted, and its cached tokens are counted when it is admitted again."""
    req = batch.reqs[index]
    count, stain = req.retraction_count, req.retracted_stain
    release_request(batch, index)
    req.retraction_count, req.retracted_stain = count, stain
    if not stain:
        req.cached_tokens, req._cache_breakdown_computed = 0, False


def free_state(rows: Any, req: Any) -> None:
    """Give back the state slot of a request, if it has one: of a model with layers that do not attend. ``rows``:
    SGLang's table of requests."""
    if getattr(kv_of(req), "mamba_pool_idx", None) is not None:
        rows.free_mamba_cache(req)


def forget_logprobs(reqs: Sequence[Any]) -> None:
    """A batch of ``reqs`` is about to be prepared. Those that begin anew get all logprobs of their prompts again: a
    prefill server may have met those of a chunk since they were released."""
    for req in reqs:
        if req.is_retracted:
            req.input_token_logprobs = None
            req.temp_input_top_logprobs_val = req.temp_input_top_logprobs_idx = None
            req.temp_input_token_ids_logprobs_val = req.temp_input_token_ids_logprobs_idx = None


def have_kv_slots(reqs: Sequence[Any]) -> bool:
    """Whether the requests of a prefill batch know of the KV slots that SGLang has allocated for their next chunks."""
    return any(_has_kv_slots(req) and req.kv.kv_allocated_len >= extend_end(req) for req in reqs)


def _has_kv_slots(req: Any) -> bool:
    """Whether SGLang has allocated KV slots for the request, which it does for all of a batch at once."""
    kv = req.kv
    return kv is not None and kv.kv_allocated_len > 0


def _global_server_args() -> Any:
    from sglang.srt.server_args import get_global_server_args

    return get_global_server_args()


def send_abort(scheduler: Any, req: Any) -> None:
    """Tell the client of a request that was released why it ended: ``to_finish``."""
    from sglang.srt.managers import scheduler as module

    reason = req.to_finish.to_json()
    if not installed().abort_from_request:
        answer = module.AbortReq(rid=req.rid, finished_reason=reason)
    else:
        answer = module._make_abort_req(req, finished_reason=reason)
    send = getattr(scheduler, "send_abort_output", None) or scheduler.ipc_channels.send_to_tokenizer.send_output
    send(answer, req)


def has_finished_well(req: Any) -> bool:
    """Whether the request has finished otherwise than by an abort."""
    return req.finished() and (req.finished_reason.to_json() or {}).get("type") != "abort"


def finish_with_error(req: Any, message: str, *, of_input: bool = False) -> None:
    """End a running request with an error that its client sees. ``of_input``: it is about what the client has sent.
    Releases before 0.5.23 would not notice that a request with an adapter ends so, and never unload the adapter."""
    from http import HTTPStatus

    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    if of_input and getattr(req, "lora_id", None) is None:
        req.to_finish = FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")
    else:
        req.to_finish = FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")


def reason_of_end(req: Any) -> str:
    """What the client of a request that ends with an error is told."""
    reason = req.to_finish or req.finished_reason
    return str(getattr(reason, "message", "") or "it has ended")


def disabled_prefix_cache_needs_tree() -> bool:
    """0.5.22 and later have no chunk cache: a disabled radix cache is a tree object that holds nothing."""
    return installed().tree_when_off
