"""The hooks on SGLang, a function each. All are no-ops unless diffkv is the selected backend."""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack
from functools import partial
from typing import Any

from sglang_diffkv.config import CHECK_ENV, CONFIG_ENV, load_config
from sglang_diffkv.mem_pool.integrity import check_bounds, check_integrity, decision_digest
from sglang_diffkv.presets import PRESETS
from sglang_diffkv.srt.backend import DiffKVAttnBackend
from sglang_diffkv.srt.hooks import metrics, request_fields
from sglang_diffkv.srt.hooks.applied import verify_hooks
from sglang_diffkv.srt.pool import DiffKVPool
from sglang_diffkv.srt.scheduling import admission, decode_side, prefill_side
from sglang_diffkv.srt.scheduling.allocator import SERVED, DiffKVAllocator, requests_of, requests_of_tree
from sglang_diffkv.srt.scheduling.lifecycle import BatchRefused, RequestLifecycle
from sglang_diffkv.srt.scheduling.refused_requests import refuse_in_decode, tell_refused, undo_prefill
from sglang_diffkv.srt.startup import (
    build,
    disaggregation,
    draft_model,
    kv_canary,
    launch,
    own_choice,
    own_means,
    own_shaping,
)
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.versions import states as compat_states
from sglang_diffkv.srt.versions.selection import BACKEND, is_selected

# Arguments


def add_cli_args(original: Any, parser: Any) -> Any:
    result = original(parser)
    parser.add_argument(
        "--diffkv-config",
        default=None,
        help=f"DiffKV: a preset ({', '.join(PRESETS)}), inline JSON, or the path of a JSON file with tiers, policy and "
        f"page size. Default: environment variable {CONFIG_ENV}, else the thresholds calibrated for the model where "
        "there are any, else the built-in configuration.",
    )
    return result


def from_cli_args(original: Any, cls: Any, args: Any) -> Any:
    server_args = original(cls, args)
    launch.configure_from_cli(server_args, getattr(args, "diffkv_config", None))
    return server_args


def check_server_args(original: Any, self: Any) -> Any:
    """What every launch calls, of a server or of an ``Engine``, which parses no arguments."""
    result = original(self)
    if is_selected(self):
        launch.ask_before_loading(self, verify_hooks)
    return result


def support_triton(original: Any, backend: str) -> bool:
    """SGLang takes its Triton paths for every backend it does not know; on a CPU there are none."""
    return original(backend) and (backend != BACKEND or launch.on_gpu())


_asking_for_model = False
"""Whether SGLang is checking the arguments by the model's architecture."""


def adjust_to_model(original: Any, server_args: Any) -> Any:
    global _asking_for_model
    if is_selected(server_args):
        compat_states.keep_without_buffers(server_args)
    _asking_for_model = True
    try:
        return original(server_args)
    finally:
        _asking_for_model = False


def attention_backends(original: Any, args: Any) -> Any:
    """SGLang ends the start of models with attention sinks (gpt-oss) on backends that it does not know to have them.
    This one does, so there it passes for one that has."""
    found = original(args)
    return tuple("triton" if x == BACKEND else x for x in found) if _asking_for_model else found


def validate_mamba_no_buffer(original: Any, *args: Any) -> None:
    """SGLang's own prefix cache cannot keep states under overlap scheduling without buffers; this one copies them
    behind their pass."""
    *_, view, _ = args
    if not is_selected(view):
        original(*args)


# What a server builds


def configure_kv_cache_dtype(original: Any, self: Any) -> Any:
    """A checkpoint may ask for an FP8 cache, which SGLang decides once the model is loaded. It comes last of what needs
    the weights and before all that needs sizes: so here the model chooses a configuration, if it is to."""
    result = original(self)
    if is_selected(self.server_args) and not self.is_draft_worker:
        build.choose_configuration(self)
        build.keep_computed_dtype(self)
    return result


def create_memory_pool_configurator(original: Any, configurator: Any) -> Any:
    selected = is_selected(configurator.server_args)
    return build.PoolConfigurator(configurator) if selected else original(configurator)


def build_kv_pool(original: Any, self: Any, **kwargs: Any) -> Any:
    """Of a model that attends in all layers, or in some while the others have states; and of a draft model."""
    if not is_selected(self.server_args):
        return original(self, **kwargs)
    return draft_model.build_pool(original, self, kwargs) if self.is_draft_worker else build.build_pool(self, kwargs)


def build_token_to_kv_pool_allocator(original: Any, self: Any, **kwargs: Any) -> Any:
    pool = kwargs["token_to_kv_pool"]
    if isinstance(pool, DiffKVPool):
        return build.build_allocator(self, pool, kwargs["req_to_token_pool"])
    if is_selected(self.server_args) and self.is_draft_worker:
        draft_model.check_pool(pool)
        draft_model.keep_on_host(pool)
    else:
        build.refuse_pool(self, pool)
    return original(self, **kwargs)


def default_radix_cache_factory(original: Any, ctx: Any) -> Any:
    ours = isinstance(ctx.params.token_to_kv_pool_allocator, DiffKVAllocator)
    off = ctx.disable_radix_cache and not compat.disabled_prefix_cache_needs_tree()
    return build.create_prefix_cache(ctx) if ours and not off else original(ctx)


def create_tree_cache(original: Any, ctx: Any) -> Any:
    """SGLang takes only a tree of its own for ``tlru``, since others would not know how long a branch was. This one
    does."""
    if ctx.params.eviction_policy != "tlru":
        return original(ctx)
    return default_radix_cache_factory(original, ctx)


def enable_fused_set_kv_buffer(original: Any, forward_batch: Any) -> bool:
    """Some models let the rotary embedding's kernel write K and V into SGLang's buffers, which the pool does not
    have: their K and V go to the attention backend as those of all others do."""
    from sglang.srt.models.utils import get_token_to_kv_pool

    return not isinstance(get_token_to_kv_pool(), DiffKVPool) and original(forward_batch)


# Batches


def prepare_for_extend(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Attach the matched prefixes and plan the pass."""
    requests = requests_of(self)
    if requests is None:
        return original(self, *args, **kwargs)
    try:
        with requests.refusing(self.reqs), requests.ledger.prefilling():
            requests.begin_states(self.reqs)
            compat.forget_logprobs(self.reqs)
            taken = partial(compat.have_kv_slots, self.reqs)
            with compat.told_from_host(self.reqs), self.token_to_kv_pool_allocator.handing_out(taken):
                result = original(self, *args, **kwargs)
        requests.plan_prefill(self.reqs)
        requests.prefill_planned(self.reqs)
    except BatchRefused as refused:
        refused.batch = self
        raise
    return result


def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A pass is launched: states that it leaves are copied before the next one changes them."""
    result = original(self, *args, **kwargs)
    if BACKEND in SERVED:
        SERVED[BACKEND].requests.pass_launched()
    return result


def capture_one(original: Any, self: Any, shape_key: Any, forward_fn: Any, *args: Any, **kwargs: Any) -> None:
    """Graphs of passes over prompts of one size are captured: of whole passes too, where they are short."""
    original(self, shape_key, forward_fn, *args, **kwargs)
    backend = getattr(self._model_runner, "attn_backend", None)
    if isinstance(backend, DiffKVAttnBackend):
        backend.capture_whole(self, shape_key, forward_fn)


def can_replay_locally(original: Any, self: Any, **kwargs: Any) -> bool:
    """SGLang replays no graph of more than twice a pass's tokens, so a prompt that is cached but for a token would be
    launched layer by layer. The smallest graph of a whole pass takes less time than that."""
    if original(self, **kwargs):
        return True
    backend = getattr(self.model_runner, "attn_backend", None)
    size = backend.filled_up(kwargs["num_tokens"] or 0) if isinstance(backend, DiffKVAttnBackend) else None
    return size is not None and bool(original(self, **{**kwargs, "num_tokens": size}))


def run_batch(original: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """A pass is launched, and the copy of its results: what ends its prompts comes behind that."""
    result = original(self, batch, *args, **kwargs)
    requests = requests_of(self)
    if requests is not None:
        requests.pass_over()
    return result


def prepare_for_decode(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Plan the decode step, without the requests that are scored beside it or have no room in it."""
    requests = requests_of(self)
    if requests is None:
        return original(self, *args, **kwargs)
    requests.decode_begins(self)
    refuse_in_decode(self, requests)
    if self.is_empty():
        return None
    result = original(self, *args, **kwargs)
    if requests.manager.drafts:
        requests.plan_verification(self.reqs)
    else:
        requests.plan_decode(self.reqs, [length - 1 for length in self.seq_lens_cpu.tolist()])
    return result


def mix_with_running(original: Any, self: Any, running_batch: Any) -> Any:
    """A pass over prompts takes in those that run, unless none of them has room in it."""
    if requests_of(self) is None:
        return original(self, running_batch)
    if running_batch.is_empty():
        return None
    result = original(self, running_batch)
    compat.set_mixed_starts(self, running_batch)
    return result


def check_decode_mem(original: Any, self: Any, selected_indices: Any = None) -> bool:
    """Whether the next step fits. Before requests are retracted, running ones give up bytes."""
    fits: bool = original(self, selected_indices)
    requests = requests_of(self)
    if requests is None or selected_indices is not None or (fits and requests.may_relieve_later()):
        return fits
    return bool(original(self, selected_indices)) if requests.relieve(self.reqs) else fits


def retract_decode(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang gives up the last request of a batch if that has no room alone. It starts over once, if that helps."""
    requests = requests_of(self)
    if requests is None:
        return original(self, *args, **kwargs)
    # A request that gives up its row forgets its node. One that a client has aborted is not to go on.
    nodes = {id(req): req.last_node for req in self.reqs if req.to_finish is None}
    retracted, ratio, given_up = original(self, *args, **kwargs)
    for req in list(given_up):
        if requests.starts_over(req, nodes.get(id(req))):
            req.to_finish = None
            given_up.remove(req)
            retracted.append(req)
    return retracted, ratio, given_up


def free_row(original: Any, self: Any, req: Any) -> Any:
    """A request leaves its row: on finish, abort and retraction alike."""
    allocator = getattr(self, "diffkv_allocator", None)
    if allocator is not None:
        allocator.requests.leave(req, compat.row_of(req), counted=compat.has_finished_well(req))
    return original(self, req)


def release_req(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A request is retracted: what its row holds goes to host memory first, unless SGLang says that it is to be
    computed again."""
    requests = requests_of_tree(kwargs.get("tree_cache"))
    if requests is not None and kwargs.get("offload_kv", True):
        requests.retracting(kwargs["req"])
    return original(*args, **kwargs)


def init_next_round_input(original: Any, self: Any, tree_cache: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A request is matched to be admitted, and not only to be put in order."""
    requests = requests_of_tree(tree_cache)
    if requests is None:
        return original(self, tree_cache, *args, **kwargs)
    self.host_hit_length = 0  # counted to put the queue in order: what comes back now does so before the match
    with ExitStack() as stack:
        for part in requests.sources:
            stack.enter_context(part.admitting(self))
        return original(self, tree_cache, *args, **kwargs)


def pause_generation(original: Any, self: Any, recv_req: Any) -> Any:
    """A pause that retracts all requests promises that they are computed again: nothing kept of any is brought back."""
    requests = requests_of(self)
    if requests is None or recv_req.mode != "retract":
        return original(self, recv_req)
    with ExitStack() as stack:
        for part in reversed(requests.sources):
            stack.enter_context(part.retracting_all())
        return original(self, recv_req)


def change_weights(original: Any, self: Any, recv_req: Any) -> Any:
    """Weights are updated, with a flush or without one. Of SGLang's checks of weights, which come here too, one
    overwrites them."""
    if BACKEND in SERVED and getattr(recv_req, "action", "reset_tensors") == "reset_tensors":
        SERVED[BACKEND].requests.weights_change()
    return original(self, recv_req)


STORE_STAYS = (
    "DiffKV: the store behind the prefix cache is named when the server starts, and stays. To change it, start the "
    "server again with another --hicache-storage-backend, or without one."
)


def change_store(original: Any, self: Any, recv_req: Any) -> Any:
    """A store is to be attached or detached. SGLang knows of no hierarchical cache here, and would say that there is
    none."""
    result = original(self, recv_req)
    if requests_of(self) is not None and not result.success:
        result.message = STORE_STAYS
    return result


# The scheduler's loop


def get_new_batch_prefill(original: Any, self: Any, running_batch: Any) -> Any:
    """A batch that cannot be prepared ends the request that is the cause; the others wait again. Those that made room
    for an urgent request which is not admitted wait again, too."""
    requests = requests_of(self)
    if requests is None:
        return original(self, running_batch)
    for part in requests.sources:
        part.expect(lambda: compat.expected_tokens(self, running_batch))
    requests.preempting([])
    try:
        with requests.mixed.scheduling(self, running_batch):
            plan = original(self, running_batch)
    except BatchRefused as refused:
        undo_prefill(self, refused)
        running_batch.batch_is_full = False
        return compat.no_prefill(running_batch)
    if plan.batch_to_run is None:
        compat.queue_preempted(self, requests.preempted)
    return plan


def get_next_batch_to_run(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Before anything is scheduled, ranks exchange what their devices have counted. Where nothing runs the batch is not
    full, though SGLang marked it so for a request that was refused beside one that was about to end. Nothing else would
    make it look at its queue again."""
    requests = requests_of(self)
    if requests is None:
        return original(self, *args, **kwargs)
    manager = requests.manager
    requests.ranks_meet()
    running = kwargs.get("running_batch", self.running_batch)
    if not manager.rows and running.is_empty():
        running.batch_is_full = False
    requests.scheduling_begins(self.waiting_queue)
    plan = original(self, *args, **kwargs)
    tell_refused(self, requests)
    if not manager.ranks.alone and plan.batch_to_run is None:
        requests.ranks_meet()  # SGLang adds up the pages next, of paths that were just joined too
    return plan


INCOMPLETE = (
    "DiffKV: the pool of pages was empty while this request was running, so its cache is incomplete. Retry it, or give "
    "the server more memory."
)


def process_batch_result(original: Any, self: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
    """Before results go out, end the requests that lost tokens to an empty ring; check all structures if asked. Behind
    them, see what the requests that left make possible."""
    requests = requests_of(self)
    if requests is None:
        return original(self, batch, result, *args, **kwargs)
    if not batch.forward_mode.is_idle():
        for req in requests.step_ended(batch.reqs):
            compat.finish_with_error(req, INCOMPLETE)
            if requests.sending is not None:
                requests.sending.tell_failed(req, INCOMPLETE)
        _check_sometimes(requests)
    manager = requests.manager
    verified = bool(manager.drafts) and batch.forward_mode.is_decode()
    awaited = requests.retracted.results_come(batch.reqs, compat.sampled_tokens(batch, result))
    with manager.rows.looking_at(manager.most_accepted if verified else 0), requests.tree.inserting_later(), awaited:
        returned = original(self, batch, result, *args, **kwargs)
    if verified:
        requests.verified(batch.reqs)
    requests.after_step(batch.reqs, self.running_batch.reqs)
    requests.results_processed(self)
    # SGLang by itself looks at its queue again only when a request ends.
    if self.running_batch.batch_is_full and requests.room_for_refused(self):
        self.running_batch.batch_is_full = False
    return returned


_STEPS = itertools.count(1)
"""Steps with results, which are the same on all ranks."""


def _check_sometimes(requests: RequestLifecycle) -> None:
    every = os.environ.get(CHECK_ENV, "")
    if not every.isdecimal() or not int(every) or next(_STEPS) % int(every):
        return
    manager = requests.manager
    check_bounds(manager)
    check_integrity(manager)
    manager.ranks.require_equal("what they decide on", [decision_digest(requests.ledger, requests.digest())])
    requests.check_integrity()


def validate_beams(original: Any, self: Any, req: Any, recv_req: Any) -> Any:
    """What is wrong with a request for beam search, which needs no option of the server."""
    if requests_of(self) is None:
        return original(self, req, recv_req)
    return (
        "Beam search is not supported with --attention-backend diffkv: beams share K and V by KV slot, and pages "
        "have one writer. Drop beam_width."
    )


# Reports


def get_total_uncached_sizes(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    requests = requests_of(self)
    return original(self, *args, **kwargs) if requests is None else (requests.ledger.uncached(), 0)


def get_internal_state(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    result, requests = original(self, *args, **kwargs), requests_of(self)
    if requests is not None:
        config, pool = load_config(), self.token_to_kv_pool_allocator.get_kvcache()
        report = pool.usage.report()
        report["configuration"] = launch.configuration_report()
        report["memory"] = pool.footprint(exact=config.prefix_fidelity == "exact").report()
        report["admission"] = requests.ledger.report()
        report["fidelity"] = requests.fidelity.report()
        report["prompts"] = metrics.prompt_outcomes(requests)
        parts = {
            "prefix_cache": requests.tree.report(),
            "mixed_chunks": requests.mixed.report() if self.is_mixed_chunk else {},
            "choice": own_choice.report(),
            "key_means": own_means.report(),
            "noise_shaping": own_shaping.report(),
            "transfer": _transfer_report(requests),
            "prompt_graphs": _graphs_report(self),
            **requests.reports(),
        }
        report.update({name: found for name, found in parts.items() if found})
        result.internal_state["diffkv"] = report
    return result


def _graphs_report(scheduler: Any) -> dict[str, int]:
    """Passes over prompts by what was replayed for them."""
    backend = getattr(getattr(scheduler.tp_worker, "model_runner", None), "attn_backend", None)
    passes = backend.whole_passes if isinstance(backend, DiffKVAttnBackend) else None
    return {} if passes is None else dict(passes.counts)


def _transfer_report(requests: RequestLifecycle) -> dict[str, int]:
    """Of rows on their way between servers, and of retracted requests where they are kept as rows."""
    transfer, receiving = requests.manager.transfer, requests.receiving
    if transfer is None or receiving is None:
        return {}
    return {**transfer.report(), **{f"retracted_{name}": count for name, count in receiving.counts.items()}}


def _out_of_window(shares: dict[str, float]) -> str:
    share = shares["share_out_of_window"]
    return f", out of window {share:.0%}" if share else ""


def get_decode_usage_msg_parts(original: Any, self: Any) -> Any:
    parts = original(self)
    if BACKEND in SERVED:
        s = SERVED[BACKEND].get_kvcache().usage.latest().live.summary()
        parts.append(
            f"kv ratio: {s['ratio_pages']:.3f} (high {s['share_high']:.0%}, low {s['share_low']:.0%}, "
            f"pruned {s['share_pruned']:.1%}{_out_of_window(s)})"
        )
    return parts


def log_stats(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The plugin's metrics follow SGLang's."""
    result = original(self, *args, **kwargs)
    if BACKEND in SERVED:
        metrics.update(self, SERVED[BACKEND])
    return result


def report_load(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """What SGLang logs and publishes behind a pass is by what the host knows: while requests run nothing waits for the
    device here."""
    manager = SERVED[BACKEND].requests.manager if BACKEND in SERVED else None
    if manager is None or not manager.rows:
        return original(self, *args, **kwargs)
    with manager.counts.as_known():
        return original(self, *args, **kwargs)


def alloc_page_size(original: Any, batch: Any) -> int:
    """SGLang hands out KV slots by the prefix cache's page size, which is the tree's alone here."""
    return 1 if requests_of(batch) is not None else original(batch)


_HERE = (
    add_cli_args,
    from_cli_args,
    check_server_args,
    validate_mamba_no_buffer,
    adjust_to_model,
    attention_backends,
    support_triton,
    configure_kv_cache_dtype,
    default_radix_cache_factory,
    create_tree_cache,
    enable_fused_set_kv_buffer,
    create_memory_pool_configurator,
    build_kv_pool,
    build_token_to_kv_pool_allocator,
    alloc_page_size,
    release_req,
    init_next_round_input,
    prepare_for_extend,
    forward,
    capture_one,
    can_replay_locally,
    run_batch,
    prepare_for_decode,
    mix_with_running,
    check_decode_mem,
    retract_decode,
    free_row,
    get_new_batch_prefill,
    get_next_batch_to_run,
    process_batch_result,
    get_internal_state,
    pause_generation,
    change_weights,
    change_store,
    validate_beams,
    get_total_uncached_sizes,
    get_decode_usage_msg_parts,
    log_stats,
    report_load,
)

_OF_PARTS = (
    *admission.HOOKS,
    *kv_canary.HOOKS,
    *draft_model.HOOKS,
    *request_fields.HOOKS,
    *prefill_side.HOOKS,
    *decode_side.HOOKS,
    *disaggregation.HOOKS,
)

HOOKS = {target: hook for hook in (*_HERE, *_OF_PARTS) for target in compat.installed().target(hook.__name__)}
"""Target in SGLang -> AROUND hook. What a hook stands around is said by ``releases.py``, by the hook's name."""
