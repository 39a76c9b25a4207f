"""Entry point of the group ``sglang.srt.plugins``: SGLang calls ``register`` in every process, before it
parses arguments. The only module that touches SGLang's registries."""

from __future__ import annotations

import logging
import sys
from typing import Any

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.srt.hooks.applied import WANTED, verify_hooks
from sglang_diffkv.srt.versions.compat import require_tested_version
from sglang_diffkv.srt.versions.places import told_of_import
from sglang_diffkv.srt.versions.selection import BACKEND, is_selected

logger = logging.getLogger(__name__)


def register() -> None:
    """Make ``--attention-backend diffkv`` known. If that cannot work, selecting it fails with the reason."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices([BACKEND])
    try:
        require_tested_version()
        from sglang.srt.mem_cache.registry import register_radix_cache_backend

        from sglang_diffkv.srt.hooks import table as hooks
        from sglang_diffkv.srt.startup import build
    except Exception as error:
        said = UnsupportedError(told_of_import(error)) if isinstance(error, ImportError) else error
        _refuse(register_attention_backend, HookRegistry, HookType, said)
        return

    def create(runner: Any) -> Any:
        verify_hooks()
        return build.create_backend(runner)

    register_attention_backend(BACKEND)(create)
    register_radix_cache_backend(BACKEND, build.create_prefix_cache)
    for target, hook in hooks.HOOKS.items():
        HookRegistry.register(target, hook, HookType.AROUND)
        WANTED[target] = hook.__name__
    extend_engine()


def extend_engine() -> None:
    """Let ``Engine`` take ``diffkv_config``. It loads plugins when its first one is made, so its module is there by
    then; a process that has not imported it makes none."""
    from sglang_diffkv.srt.startup.launch import EngineArguments

    engine = getattr(sys.modules.get("sglang.srt.entrypoints.engine"), "Engine", None)
    if engine is not None and not isinstance(engine.server_args_class, EngineArguments):
        engine.server_args_class = EngineArguments(engine.server_args_class)


def _refuse(register_attention_backend: Any, registry: Any, hook_type: Any, error: Exception) -> None:
    """Keep the backend's name known, and say why it cannot be used as soon as someone selects it; to whoever uses
    another backend it is no news."""
    reason = f"sglang_diffkv: --attention-backend {BACKEND} is not available: {error}"
    logger.info("%s", reason)

    def from_cli_args(original: Any, cls: Any, args: Any) -> Any:
        if is_selected(args):
            raise SystemExit(reason)
        return original(cls, args)

    def create(runner: Any) -> Any:
        raise UnsupportedError(reason) from error

    register_attention_backend(BACKEND)(create)
    registry.register("sglang.srt.server_args.ServerArgs.from_cli_args", from_cli_args, hook_type.AROUND)
