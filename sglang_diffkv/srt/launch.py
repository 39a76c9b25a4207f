"""A launch's configuration: from the command line or the environment to the processes that serve."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_diffkv.calibration import resolve
from sglang_diffkv.config import CONFIG_ENV, DiffKVConfig, load_config
from sglang_diffkv.errors import ConfigError, UnsupportedError
from sglang_diffkv.srt import compat
from sglang_diffkv.srt.draft_model import choose_backend
from sglang_diffkv.srt.prefill_graphs import choose_graphs
from sglang_diffkv.srt.scaling import stated_reaches
from sglang_diffkv.srt.speculation import check_drafts, drafts_by_model, drafts_of
from sglang_diffkv.srt.validation import BACKEND, check_policy, check_server_args, is_selected, judges_whole_heads

logger = logging.getLogger(__name__)


def on_gpu() -> bool:
    """Whether servers of this process run on a GPU."""
    return torch.cuda.is_available() and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1"


@dataclass(frozen=True)
class Launch:
    """What the last launch of this process put into the environment for its children, and what a user had there."""

    model_path: str
    text: str
    users: str


_launched: Launch | None = None


def _left_there() -> Launch | None:
    """The launch whose configuration the environment still holds."""
    return _launched if _launched is not None and os.environ.get(CONFIG_ENV) == _launched.text else None


def users_configuration() -> str:
    """The environment's configuration, empty if there is none; not what a launch left there."""
    launch = _left_there()
    return os.environ.get(CONFIG_ENV, "") if launch is None else launch.users


def configure(server_args: Any, given: str) -> None:
    """Hand the configuration for the model to the processes to come. Raises ConfigError or UnsupportedError."""
    global _launched
    config, origin = resolve(given, server_args.model_path)
    _check(server_args, config)
    text = config.model_dump_json(exclude_none=True)
    _launched = Launch(str(server_args.model_path), text, users_configuration())
    os.environ[CONFIG_ENV] = text
    logger.info("DiffKV thresholds: %s: tiers %s, %s", origin, config.tiers, config.build_policy())


def _check(server_args: Any, config: DiffKVConfig) -> None:
    choose_graphs(server_args)
    compat.decline_hybrid_swa_pools(server_args)
    choose_backend(server_args)
    args = compat.resolved(server_args)
    drafts = drafts_of(args)
    reaches = stated_reaches(server_args) if drafts or judges_whole_heads(config) else ()
    checks = [lambda: check_server_args(server_args, config), lambda: check_policy(config, reaches)]
    if drafts:
        checks.append(lambda: check_drafts(config, reaches, by_model=drafts_by_model(args)))
    _refuse_at_once(checks)


def _refuse_at_once(checks: Sequence[Callable[[], None]]) -> None:
    """Raise UnsupportedError with what all checks say, a line each."""
    said = []
    for check in checks:
        try:
            check()
        except UnsupportedError as error:
            said.append(str(error))
    if said:
        raise UnsupportedError("\n".join(said))


def configure_unless_done(server_args: Any) -> None:
    """``configure`` for a launch that parsed no arguments: an ``Engine``. Where it has been done, SGLang may have
    decided something since that is refused."""
    launch = _left_there()
    if launch is None or launch.model_path != str(server_args.model_path):
        configure(server_args, users_configuration())
    else:
        _check(server_args, load_config())


def configure_from_cli(server_args: Any, given: str | None) -> None:
    """``configure`` with the value of ``--diffkv-config``, None if there is none; a problem ends the process with its
    message."""
    if not is_selected(server_args):
        if given is not None:
            sys.exit(f"sglang_diffkv: --diffkv-config has no effect without --attention-backend {BACKEND}")
        return
    try:
        configure(server_args, users_configuration() if given is None else given)
    except (ConfigError, UnsupportedError) as error:
        sys.exit(f"sglang_diffkv: {error}")
