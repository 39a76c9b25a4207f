"""The SGLang releases that are supported, one row each: what was tested below them, and how they differ.

A new release is a row here and its list of options (``tests/data/server_args``). The row is the one before it with
``replace``: only what changed is said. Nothing here imports SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

SRT = "sglang.srt."
ARGUMENTS = SRT + "server_args.ServerArgs."
BATCH = SRT + "managers.schedule_batch.ScheduleBatch."
SCHEDULER = SRT + "managers.scheduler.Scheduler."
COMPONENTS = SRT + "managers.scheduler_components."
WEIGHTS = COMPONENTS + "weight_updater.SchedulerWeightUpdaterManager."
ADDER = SRT + "managers.schedule_policy.PrefillAdder."
CONFIGURATOR = SRT + "mem_cache.kv_cache_configurator.KVCacheConfigurator."
SPECULATIVE = SRT + "speculative."
CANARY = SRT + "kv_canary."
PREALLOCATION = SRT + "disaggregation.decode.DecodePreallocQueue."

Targets = Mapping[str, "str | tuple[str, ...] | None"]
"""Name of a hook -> what of SGLang it stands around: one path, several, or None where a release has no such thing."""


@dataclass(frozen=True)
class Stack:
    """Versions of the packages below SGLang; None where a package has no part in what was tested."""

    torch: str
    triton: str
    flashinfer: str | None = None
    sglang_kernel: str | None = None


@dataclass(frozen=True)
class Release:
    """One SGLang release.

    Attributes:
        on_cpu, on_gpu: the packages with which it was tested there; None: not tested there, so refused.
        seen_on_gpu: of what is refused on GPUs elsewhere, what was compared with stock there: ``drafts``, ``trees of a
            model's drafts`` (EAGLE's), ``states``, ``states of a gated delta rule`` alone, ``drafts beside states`` (of
            the model's own layer), ``prefill graphs``, ``prefill graphs beside n-grams``, ``whole passes over prompts``
            (in one graph). ``two servers``: one computes prompts, another goes on; ``two servers of several ranks``.
        targets: hooks whose target differs from ``TARGETS``. classes: classes that are not where ``CLASSES`` says.
        tree: the prefix cache's insertion methods, a class of ``srt/tree/sglang_methods.py``.
        row_on_request: a request has its row and lengths itself, and not in ``req.kv``.
        request_extents: a request has ``prefix_len``, ``extend_end`` and a handle of its lock on the tree.
        declared_arguments: arguments stay as the user gave them; what SGLang decides is declared beside them.
        whole_replies: admission counts replies that ignore their end at their full length.
        queues_preempted: a pass that admits nobody queues the requests it preempted.
        draft_states_on_cpu: a CPU has room for the states behind drafts.
        states_need_cp_sharing: the shape of states depends on ``enable_cp_tp_group_sharing``.
        tree_when_off: a disabled prefix cache is a tree object that holds nothing.
        mixed_starts_wrong: a pass over prompts takes it for granted that what decodes in it was in the pass before.
        abort_from_request: aborts are made of the request, not of its id.
        release_needs_arguments: giving up a request takes the server's arguments.
        canary_on_cpu: the KV canary has code for devices other than CUDA's.
        disaggregation: one server may compute prompts and another go on with them.
        transfer_reasons: a prefill server has one call for a prompt that does not come, with a reason, which Mooncake
            does not carry; a retracted request has a field for what is kept of it.
    """

    version: str
    on_cpu: Stack | None
    on_gpu: Stack | None
    seen_on_gpu: frozenset[str] = frozenset()
    targets: Targets = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    tree: str = "V17"
    row_on_request: bool = True
    request_extents: bool = False
    declared_arguments: bool = False
    whole_replies: bool = False
    queues_preempted: bool = False
    draft_states_on_cpu: bool = False
    states_need_cp_sharing: bool = False
    tree_when_off: bool = False
    mixed_starts_wrong: bool = True
    abort_from_request: bool = False
    release_needs_arguments: bool = True
    canary_on_cpu: bool = False
    disaggregation: bool = False
    transfer_reasons: bool = True

    def target(self, hook: str) -> tuple[str, ...]:
        """Paths in SGLang that a hook stands around; empty where the release has none."""
        found = self.targets[hook] if hook in self.targets else TARGETS[hook]
        return () if found is None else (found,) if isinstance(found, str) else found

    def class_path(self, name: str) -> str:
        """Path in SGLang of a class of ``CLASSES``."""
        return self.classes.get(name, CLASSES[name])


TARGETS: Targets = {
    # Arguments
    "add_cli_args": ARGUMENTS + "add_cli_args",
    "from_cli_args": ARGUMENTS + "from_cli_args",
    "check_server_args": ARGUMENTS + "check_server_args",
    "validate_mamba_no_buffer": SRT + "arg_groups.mamba_hook.validate_mamba_no_buffer",
    "adjust_to_model": SRT + "arg_groups.model_hook.handle_model_specific_adjustments",
    "attention_backends": SRT + "arg_groups.model_override_base.attention_backends_of",
    "support_triton": SRT + "utils.common.support_triton",
    # What a server builds
    "configure_kv_cache_dtype": SRT + "model_executor.model_runner.ModelRunner.configure_kv_cache_dtype",
    "default_radix_cache_factory": SRT + "mem_cache.registry.default_radix_cache_factory",
    "create_tree_cache": SRT + "mem_cache.registry.create_tree_cache",
    "enable_fused_set_kv_buffer": SRT + "models.utils.enable_fused_set_kv_buffer",
    "create_memory_pool_configurator": SRT + "model_executor.pool_configurator.create_memory_pool_configurator",
    "build_kv_pool": (CONFIGURATOR + "_build_mha_kv_pool", CONFIGURATOR + "_build_hybrid_linear_kv_pool"),
    "build_token_to_kv_pool_allocator": CONFIGURATOR + "_build_token_to_kv_pool_allocator",
    # Requests and batches
    "alloc_page_size": SRT + "mem_cache.allocation._alloc_page_size",
    "release_req": SRT + "managers.schedule_batch.release_req",
    "init_next_round_input": SRT + "managers.schedule_batch.Req.init_next_round_input",
    "prepare_for_extend": BATCH + "prepare_for_extend",
    "forward": SRT + "model_executor.model_runner.ModelRunner.forward",
    "capture_one": SRT
    + "model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend.capture_one",
    "can_replay_locally": SRT
    + "model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_replay_locally",
    "prepare_for_decode": BATCH + "prepare_for_decode",
    "mix_with_running": BATCH + "mix_with_running",
    "check_decode_mem": BATCH + "check_decode_mem",
    "retract_decode": BATCH + "retract_decode",
    "free_row": SRT + "mem_cache.memory_pool.ReqToTokenPool.free",
    # Admission
    "add_one_req": ADDER + "add_one_req",
    "add_chunked_req": ADDER + "add_chunked_req",
    "preempt_to_schedule": ADDER + "preempt_to_schedule",
    "get_running_request_total_token_offset": ADDER + "_get_running_request_total_token_offset",
    # The scheduler's loop
    "get_new_batch_prefill": SCHEDULER + "get_new_batch_prefill",
    "get_next_batch_to_run": SCHEDULER + "get_next_batch_to_run",
    "run_batch": SCHEDULER + "run_batch",
    "process_batch_result": SCHEDULER + "process_batch_result",
    "add_request_to_queue": SCHEDULER + "_add_request_to_queue",
    "pause_generation": SCHEDULER + "pause_generation",
    "change_weights": (
        *(WEIGHTS + f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")),
        WEIGHTS + "check_weights",
        WEIGHTS + "begin_weight_update",
        WEIGHTS + "end_weight_update",
    ),
    "change_store": (
        SCHEDULER + "attach_hicache_storage_wrapped",
        SCHEDULER + "detach_hicache_storage_wrapped",
    ),
    "validate_beams": SRT + "beam_search.coordinator.BeamCoordinator.validate_and_init",
    # Reports
    "get_internal_state": SCHEDULER + "get_internal_state",
    "get_total_uncached_sizes": COMPONENTS + "invariant_checker.SchedulerInvariantChecker._get_total_uncached_sizes",
    "get_decode_usage_msg_parts": COMPONENTS + "pool_stats_observer.PoolStats.get_decode_usage_msg_parts",
    "log_stats": SRT + "observability.metrics_collector.SchedulerMetricsCollector.log_stats",
    "report_load": (
        COMPONENTS + "load_inquirer.SchedulerLoadInquirer.get_loads",
        COMPONENTS + "metrics_reporter.SchedulerMetricsReporter.report_prefill_stats",
    ),
    # The KV canary
    "launch_capacities": CANARY + "capacities.CanaryLaunchCapacities.from_args",
    "walk_prefix_cache": CANARY + "radix_cache_walker.walk_radix_cache_for_canary",
    "create_device_stream": CANARY + "runner.canary_manager.create_device_stream",
    "device_to_host": CANARY + "runner.future_tensor.FutureTensors.device_to_host",
    # Draft models
    "create_worker": SPECULATIVE + "spec_info.SpeculativeAlgorithm.create_worker",
    "eagle_sample": SPECULATIVE + "eagle_utils.eagle_sample",
    "get_req_to_token_extra_context_len": SRT + "mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
    "create_decode_backend": SPECULATIVE + "draft_utils.DraftBackendFactory.create_decode_backend",
    "create_draft_extend_backend": SPECULATIVE + "draft_utils.DraftBackendFactory.create_draft_extend_backend",
    "update_mamba_state_after_mtp_verify": SRT
    + "layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
    # Disaggregation: not served with all releases, see ``_DISAGGREGATION``
    **dict.fromkeys(
        (
            "prefill_exceeds",
            "decode_exceeds",
            "check_status",
            "abort_sender",
            "abort_request",
            "clear_sender",
            "on_heartbeat_success",
            "send_kv_chunk",
            "maybe_send_cached_prefix_chunk",
            "process_disagg_prefill_inflight_queue",
            "get_next_disagg_prefill_batch_to_run",
            "required_admission_tokens",
            "prealloc_required_tokens",
            "pre_alloc",
            "match_prefix_and_lock",
            "pop_preallocated",
            "transfer_page_indices",
            "allocatable_token_budgets",
            "send_metadata",
            "poll_with_metadata_gate",
            "resolve_deferred_releases",
            "commit_transfer_to_req",
            "get_next_disagg_decode_batch_to_run",
            "offload_kv_cache",
            "load_kv_cache",
            "try_ensure_parallel_info",
            "resolve_rank_mapping",
            "ensure_prefill_info",
            "init_kv_manager",
        )
    ),
}
"""Hooks of the newest release, by the name of their function."""

CLASSES: Mapping[str, str] = {
    "KVCache": SRT + "mem_cache.memory_pool.KVCache",
    "HybridReqToTokenPool": SRT + "mem_cache.memory_pool.HybridReqToTokenPool",
}
"""Classes of the newest release that are about to move within SGLang, by their names."""

_CPU = Stack("2.13.0", "3.7.1")
_HOPPER = Stack("2.11.0", "3.6.0", "0.6.15.post1", "0.4.5")

_DISAGGREGATION: Targets = {
    "free_row": (str(TARGETS["free_row"]), SRT + "disaggregation.decode.DecodeReqToTokenPool.free"),
    "prefill_exceeds": SRT + "disaggregation.prefill.PrefillBootstrapQueue._check_if_req_exceed_kv_capacity",
    "decode_exceeds": PREALLOCATION + "_check_if_req_exceed_kv_capacity",
    "check_status": SRT + "disaggregation.common.conn.CommonKVManager.check_status",
    "abort_sender": SRT + "disaggregation.common.conn.CommonKVSender.abort",
    "clear_sender": SRT + "disaggregation.common.conn.CommonKVSender.clear",
    "on_heartbeat_success": SRT + "disaggregation.common.conn.CommonKVManager._on_heartbeat_success",
    "send_kv_chunk": SCHEDULER + "send_kv_chunk",
    "maybe_send_cached_prefix_chunk": SCHEDULER + "maybe_send_cached_prefix_chunk",
    "process_disagg_prefill_inflight_queue": SCHEDULER + "process_disagg_prefill_inflight_queue",
    "get_next_disagg_prefill_batch_to_run": SCHEDULER + "get_next_disagg_prefill_batch_to_run",
    "required_admission_tokens": PREALLOCATION + "_required_admission_tokens",
    "prealloc_required_tokens": PREALLOCATION + "_prealloc_required_tokens",
    "pre_alloc": PREALLOCATION + "_pre_alloc",
    "match_prefix_and_lock": PREALLOCATION + "_match_prefix_and_lock",
    "pop_preallocated": PREALLOCATION + "pop_preallocated",
    "transfer_page_indices": PREALLOCATION + "_transfer_page_indices",
    "poll_with_metadata_gate": SRT + "disaggregation.decode.DecodeTransferQueue._poll_with_metadata_gate",
    "resolve_deferred_releases": SRT + "disaggregation.decode.DecodeTransferQueue.resolve_deferred_releases",
    "commit_transfer_to_req": SRT + "disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req",
    "get_next_disagg_decode_batch_to_run": SCHEDULER + "get_next_disagg_decode_batch_to_run",
    "offload_kv_cache": SRT + "managers.schedule_batch.Req.offload_kv_cache",
    "load_kv_cache": SRT + "managers.schedule_batch.Req.load_kv_cache",
    "try_ensure_parallel_info": SRT + "disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info",
    "resolve_rank_mapping": SRT + "disaggregation.common.conn.CommonKVManager._resolve_rank_mapping",
    "ensure_prefill_info": PREALLOCATION + "_ensure_prefill_info",
    "init_kv_manager": (
        SRT + "disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager",
        PREALLOCATION + "_init_kv_manager",
    ),
}
"""Hooks of a release with ``disaggregation``."""

_17 = Release(
    "0.5.17",
    _CPU,
    _HOPPER,
    seen_on_gpu=frozenset(
        {
            "drafts",
            "states",
            "prefill graphs",
            "prefill graphs beside n-grams",
            "whole passes over prompts",
            "two servers",
            "two servers of several ranks",
        }
    ),
    disaggregation=True,
    transfer_reasons=False,
    targets={
        **{
            k: v
            for k, v in _DISAGGREGATION.items()
            if k not in ("required_admission_tokens", "transfer_page_indices", "resolve_deferred_releases")
        },
        "allocatable_token_budgets": PREALLOCATION + "_allocatable_token_budgets",
        "abort_request": SCHEDULER + "abort_request",
        "on_heartbeat_success": SRT + "disaggregation.mooncake.conn.MooncakeKVManager._on_heartbeat_success",
        "send_metadata": SRT + "disaggregation.mooncake.conn.MooncakeKVReceiver.send_metadata",
        "validate_mamba_no_buffer": ARGUMENTS + "_validate_mamba_no_buffer",
        "adjust_to_model": ARGUMENTS + "_handle_model_specific_adjustments",
        "attention_backends": ARGUMENTS + "_resolved_attention_backends",
        "change_weights": TARGETS["change_weights"][:-2],  # type: ignore[index]
        "validate_beams": None,
        "create_device_stream": None,
        "device_to_host": None,
    },
)
_21 = replace(
    _17,
    version="0.5.21",
    on_gpu=None,
    seen_on_gpu=frozenset(),
    targets=_DISAGGREGATION,
    transfer_reasons=True,
    tree="V21",
    row_on_request=False,
    declared_arguments=True,
    draft_states_on_cpu=True,
    mixed_starts_wrong=False,
    abort_from_request=True,
    release_needs_arguments=False,
    canary_on_cpu=True,
)
_22 = replace(
    _21,
    version="0.5.22",
    targets=_DISAGGREGATION,
    tree="V23",
    request_extents=True,
    whole_replies=True,
    queues_preempted=True,
    states_need_cp_sharing=True,
    tree_when_off=True,
)
_23 = replace(
    _22,
    version="0.5.23",
    on_gpu=_HOPPER,
    targets={k: v for k, v in _DISAGGREGATION.items() if k != "resolve_deferred_releases"},  # its ranks agree alone
    seen_on_gpu=frozenset(
        {
            "drafts",
            "trees of a model's drafts",
            "states of a gated delta rule",
            "drafts beside states",
            "prefill graphs",
            "prefill graphs beside n-grams",
            "whole passes over prompts",
        }
    ),
)

RELEASES = {x.version: x for x in (_17, _21, _22, _23)}
TESTED_VERSIONS = tuple(RELEASES)
GPU_VERSIONS = tuple(x.version for x in RELEASES.values() if x.on_gpu is not None)
"""Those of the tested versions that were tested on a GPU."""


def requirement() -> str:
    """What pip may install: the tested releases, and none between, before or after them."""
    first, last = TESTED_VERSIONS[0], TESTED_VERSIONS[-1]
    series = first.rpartition(".")[0]
    between = (f"{series}.{patch}" for patch in range(int(first.split(".")[-1]), int(last.split(".")[-1])))
    others = "".join(f"!={version}.*," for version in between if version not in TESTED_VERSIONS)
    return f"sglang>={first},{others}<={last}"


def seen_on_gpu(what: str) -> tuple[str, ...]:
    """Releases on which ``what`` (see ``Release.seen_on_gpu``) was compared with stock on a GPU."""
    return tuple(x.version for x in RELEASES.values() if what in x.seen_on_gpu)


DISTRIBUTIONS = {
    "torch": ("torch",),
    "triton": ("triton",),
    "flashinfer": ("flashinfer-python",),
    "sglang_kernel": ("sglang-kernel", "sgl-kernel"),
}
"""Names of the packages of a stack, the newest name first."""
TITLES = {"torch": "torch", "triton": "triton", "flashinfer": "FlashInfer", "sglang_kernel": "sglang-kernel"}


def tested_stack(sglang: str | None, *, gpu: bool) -> Stack | None:
    """The packages below this SGLang that were tested on a GPU or on a CPU; None if it was not tested there."""
    release = RELEASES.get(sglang or "")
    if release is None:
        return None
    return release.on_gpu if gpu else release.on_cpu


def untested(sglang: str | None, found: Mapping[str, str | None], *, gpu: bool) -> dict[str, str]:
    """What to warn of, by package, if this stack is not the one that was tested with this SGLang.

    Args:
        found: installed versions, None for none. gpu: whether servers run on one.

    A release that was not tested there gives no warning: it is refused elsewhere.
    """
    stack = tested_stack(sglang, gpu=gpu)
    if not stack:
        return {}
    tested = {name: version for name, version in asdict(stack).items() if version is not None}
    where = f"SGLang {sglang} on a {'GPU' if gpu else 'CPU'}"
    return {
        name: f"{TITLES[name]} {found.get(name) or 'is not installed'}: with {where} {version} was tested"
        for name, version in tested.items()
        if (found.get(name) or "").partition("+")[0] != version
    }
