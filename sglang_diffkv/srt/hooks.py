"""The hooks on SGLang, one function each: arguments and what a server builds at its start here, the rest in
``scheduler_hooks`` and ``admission_hooks``. All are no-ops unless diffkv is the selected backend."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch

from sglang_diffkv.calibration import resolve
from sglang_diffkv.config import CONFIG_ENV, load_config
from sglang_diffkv.errors import ConfigError, UnsupportedError
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.plan import MemoryPlan
from sglang_diffkv.srt import compat
from sglang_diffkv.srt.allocator import DiffKVAllocator
from sglang_diffkv.srt.backend import DiffKVAttnBackend
from sglang_diffkv.srt.compat_tree import prefix_cache_class
from sglang_diffkv.srt.kv_canary import CANARY_HOOKS, register_canary
from sglang_diffkv.srt.pool import DiffKVPool
from sglang_diffkv.srt.scaling import layer_scalings
from sglang_diffkv.srt.scheduler_hooks import SCHEDULER_HOOKS, SERVED, SRT
from sglang_diffkv.srt.validation import BACKEND, check_layers, check_model, check_server_args, is_selected

logger = logging.getLogger(__name__)

POOL_SIZES = SRT + "model_executor.pool_configurator.DefaultPoolConfigurator."
CONFIGURATOR = SRT + "mem_cache.kv_cache_configurator.KVCacheConfigurator."


def on_gpu() -> bool:
    return torch.cuda.is_available() and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1"


def create_backend(runner: Any) -> DiffKVAttnBackend:
    check_layers(runner.model)
    backend = DiffKVAttnBackend(runner, layer_scalings(runner.model))
    pool, exact = runner.token_to_kv_pool, load_config().prefix_fidelity == "exact"
    budget = _sized[0] if _sized is not None and _sized[1] == pool.size else None
    logger.info("%s", pool.footprint(exact=exact).describe(budget))
    return backend


def add_cli_args(original: Any, parser: Any) -> Any:
    result = original(parser)
    parser.add_argument(
        "--diffkv-config",
        default=None,
        help="DiffKV: tiers, policy and page size, as inline JSON or the path of a JSON file "
        f"(default: environment variable {CONFIG_ENV}, else the thresholds calibrated for the model where there are "
        "any, else the built-in configuration).",
    )
    return result


@dataclass(frozen=True)
class Launch:
    """What the last launch of this process put into the environment for its children, and what a user had there."""

    model_path: str
    text: str
    users: str


_launched: Launch | None = None


def left_there() -> Launch | None:
    """The launch whose configuration the environment still holds."""
    return _launched if _launched is not None and os.environ.get(CONFIG_ENV) == _launched.text else None


def users_configuration() -> str:
    """The environment's configuration, empty if there is none; not what a launch left there."""
    launch = left_there()
    return os.environ.get(CONFIG_ENV, "") if launch is None else launch.users


def configure(server_args: Any, given: str) -> None:
    """Hand the configuration for the model to the processes to come. Raises ConfigError or UnsupportedError."""
    global _launched
    config, origin = resolve(given, server_args.model_path)
    compat.decline_prefill_graphs(server_args)
    check_server_args(server_args, config.gpu_ops)
    text = config.model_dump_json(exclude_none=True)
    _launched = Launch(str(server_args.model_path), text, users_configuration())
    os.environ[CONFIG_ENV] = text
    logger.info("DiffKV thresholds: %s: tiers %s, %s", origin, config.tiers, config.build_policy())


def launch_check(original: Any, self: Any) -> Any:
    """``check_server_args`` is what every launch calls, of a server or of an ``Engine``, which parses no arguments."""
    result = original(self)
    if is_selected(self):
        launch = left_there()
        if launch is None or launch.model_path != str(self.model_path):
            configure(self, users_configuration())
    return result


def from_cli_args(original: Any, cls: Any, args: Any) -> Any:
    given = getattr(args, "diffkv_config", None)
    server_args = original(cls, args)
    if is_selected(server_args):
        try:
            configure(server_args, users_configuration() if given is None else given)
        except (ConfigError, UnsupportedError) as error:
            sys.exit(f"sglang_diffkv: {error}")
    elif given is not None:
        sys.exit(f"sglang_diffkv: --diffkv-config has no effect without --attention-backend {BACKEND}")
    return server_args


def support_triton(original: Any, backend: str) -> bool:
    """SGLang takes its Triton paths for every backend it does not know; on a CPU there are none."""
    return original(backend) and (backend != BACKEND or on_gpu())


_sized: tuple[int, int] | None = None
"""Bytes that SGLang had for the last pool, and how many tokens fit."""


def compute_cell_size(original: Any, self: Any, configurator: Any, num_layers: int) -> int:
    if not is_selected(configurator.server_args):
        return original(self, configurator, num_layers)
    check_model(configurator)
    self.diffkv = configurator, num_layers
    return MemoryPlan.of(configurator, load_config(), num_layers).token_bytes


def calculate_pool_sizes(original: Any, self: Any, available_bytes: int, *args: Any, **kwargs: Any) -> Any:
    """As many tokens as fit with all else that the plugin puts on the device."""
    global _sized
    if not hasattr(self, "diffkv"):
        return original(self, available_bytes, *args, **kwargs)
    configurator, num_layers = self.diffkv
    plan = MemoryPlan.of(configurator, load_config(), num_layers)
    context = configurator.model_config.context_len + compat.CONTEXT_SLACK
    capacity = plan.capacity_in(available_bytes, lambda tokens: compat.request_rows(configurator, tokens), context)
    _sized = available_bytes, capacity
    return original(self, capacity * self._cell_size, *args, **kwargs)


def build_mha_kv_pool(original: Any, self: Any, **kwargs: Any) -> Any:
    if not is_selected(self.server_args):
        return original(self, **kwargs)
    compat.decline_prefill_graphs(self.server_args)
    check_server_args(self.server_args, load_config().gpu_ops)
    check_model(self)
    register_canary()
    return DiffKVPool(
        kwargs["max_total_num_tokens"],
        self.kv_cache_dtype,
        self.layer_info.num_effective_layers,
        self.device,
        False,
        self.layer_info.start_layer,
        self.layer_info.end_layer,
    )


def build_allocator(original: Any, self: Any, **kwargs: Any) -> Any:
    pool = kwargs["token_to_kv_pool"]
    if not isinstance(pool, DiffKVPool):
        if is_selected(self.server_args):
            raise UnsupportedError(
                f"--attention-backend diffkv: SGLang built a {type(pool).__name__} for this model, which the "
                "plugin does not replace. Use another --attention-backend for it."
            )
        return original(self, **kwargs)
    config = load_config()
    rows = kwargs["req_to_token_pool"]
    plan = MemoryPlan.of(self, config, self.layer_info.num_effective_layers)
    geometry = plan.geometry(pool.size, rows.req_to_token.shape[0], rows.max_context_len)
    ranks = compat.tensor_parallel_ranks()
    sizes = (pool.size, geometry.num_pages, geometry.heads, geometry.num_rows, geometry.num_blocks)
    ranks.require_equal("capacity, pages, heads, rows or table blocks (set --max-total-tokens)", sizes)
    policy = plan.policy(ranks.rank, ranks.size)
    manager = PageManager(geometry, policy, dtype=self.kv_cache_dtype, device=self.device, ranks=ranks)
    footprint = plan.footprint(geometry, pool.size)
    ledger = PageLedger(manager, pool.size)
    pool.bind(manager, ledger.names, footprint)
    allocator = rows.diffkv_allocator = DiffKVAllocator(
        ledger,
        dtype=self.kv_cache_dtype,
        device=self.device,
        kvcache=pool,
        need_sort=False,
    )
    SERVED[BACKEND] = allocator
    logger.info("DiffKV plan: %s", plan.describe(geometry, pool.size))
    return allocator


def default_radix_cache_factory(original: Any, ctx: Any) -> Any:
    if not isinstance(ctx.params.token_to_kv_pool_allocator, DiffKVAllocator):
        return original(ctx)
    if ctx.disable_radix_cache and not compat.disabled_prefix_cache_needs_tree():
        return original(ctx)
    return create_prefix_cache(ctx)


def create_prefix_cache(ctx: Any) -> Any:
    config = load_config()
    exact = config.prefix_fidelity == "exact"
    return prefix_cache_class()(ctx.params, config.share_min_tokens, exact=exact)


def enable_fused_set_kv_buffer(original: Any, forward_batch: Any) -> bool:
    """Some models let the rotary embedding's kernel write K and V into SGLang's buffers, which the pool does not
    have: their K and V go to the attention backend as those of all others do."""
    from sglang.srt.models.utils import get_token_to_kv_pool

    return not isinstance(get_token_to_kv_pool(), DiffKVPool) and original(forward_batch)


HOOKS = {
    SRT + "utils.common.support_triton": support_triton,
    SRT + "models.utils.enable_fused_set_kv_buffer": enable_fused_set_kv_buffer,
    SRT + "server_args.ServerArgs.add_cli_args": add_cli_args,
    SRT + "server_args.ServerArgs.from_cli_args": from_cli_args,
    SRT + "server_args.ServerArgs.check_server_args": launch_check,
    POOL_SIZES + "_compute_cell_size": compute_cell_size,
    POOL_SIZES + "calculate_pool_sizes": calculate_pool_sizes,
    CONFIGURATOR + "_build_mha_kv_pool": build_mha_kv_pool,
    CONFIGURATOR + "_build_token_to_kv_pool_allocator": build_allocator,
    SRT + "mem_cache.registry.default_radix_cache_factory": default_radix_cache_factory,
    **SCHEDULER_HOOKS,
    **CANARY_HOOKS,
}
"""Target in SGLang -> AROUND hook."""
