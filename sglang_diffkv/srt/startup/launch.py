"""A launch's configuration: from the command line or the environment to the processes that serve."""

from __future__ import annotations

import json
import logging
import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sglang_diffkv.calibration import Resolution, served, sources_of
from sglang_diffkv.config import CONFIG_ENV, CONFIG_OPTION, DiffKVConfig, read_config, source_of
from sglang_diffkv.errors import ConfigError, UnsupportedError
from sglang_diffkv.srt.models.scaling import stated_spans
from sglang_diffkv.srt.models.speculation import check_drafts, drafts_by_model, drafts_of
from sglang_diffkv.srt.startup import own_choice, preflight
from sglang_diffkv.srt.startup.draft_model import choose_backend
from sglang_diffkv.srt.startup.optional_parts import PARTS
from sglang_diffkv.srt.startup.prefill_graphs import choose_graphs
from sglang_diffkv.srt.startup.validation import check_policy, check_server_args, scores_whole_heads
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.versions.selection import BACKEND, is_selected

logger = logging.getLogger(__name__)

ENGINE_ARGUMENT = "diffkv_config"
"""What an ``Engine`` is given its configuration with."""

ORIGINS_ENV = "SGLANG_DIFFKV_CONFIG_ORIGINS"
"""From a launch to its processes: where the parts of the resolved configuration come from, for reports alone."""
MOST_TEXT = 120_000
"""Of the configuration as processes get it: Linux gives a variable of the environment 128 KiB."""


def on_gpu() -> bool:
    """Whether servers of this process run on a GPU."""
    return torch.cuda.is_available() and os.environ.get("SGLANG_USE_CPU_ENGINE") != "1"


@dataclass(frozen=True)
class Launch:
    """What the last launch of this process put into the environment for its children, and what a user had there."""

    model_path: str
    text: str
    users: str
    command: bool = False
    """Whether a command line was parsed, whose process may end with a line."""


_launched: Launch | None = None


def _left_there() -> Launch | None:
    """The launch whose configuration the environment still holds."""
    return _launched if _launched is not None and os.environ.get(CONFIG_ENV) == _launched.text else None


def users_configuration() -> str:
    """The environment's configuration, empty if there is none; not what a launch left there."""
    launch = _left_there()
    return os.environ.get(CONFIG_ENV, "") if launch is None else launch.users


def configure(
    server_args: Any, given: str | None = None, *, given_by: str = CONFIG_OPTION, command: bool = False
) -> None:
    """Hand the configuration for the model to the processes to come: the one given with the launch, else the
    environment's. Raises ConfigError or UnsupportedError.

    Args:
        given_by: what the launch was given it with. command: whether the launch is the command of a server.
    """
    global _launched
    users = users_configuration()
    text, given_by = (users, CONFIG_ENV) if given is None else (given, given_by)
    found = served(text, server_args.model_path, given_by)
    if (taken := own_choice.instead(server_args, found.config)) is not None:
        found = taken.resolution(found)
    report = found.report()
    logger.info("DiffKV configuration (%s): %s", found.origin, json.dumps(report))
    if found.warning:
        logger.warning("%s", found.warning)
    _check(server_args, *own_choice.candidates(server_args, found.config))
    text = found.config.as_text()
    if len(text) > MOST_TEXT:
        raise ConfigError(
            f"the configuration has {len(text):,} characters with all that it names; the processes of a server can be "
            f"given {MOST_TEXT:,}: write the numbers of head_scale or pattern with fewer digits"
        )
    _launched = Launch(str(server_args.model_path), text, users, command)
    os.environ[CONFIG_ENV] = text
    del report["values"]
    os.environ[ORIGINS_ENV] = json.dumps({"of": _digest(text), **report})


def take_choice(taken: own_choice.Taken) -> None:
    """This process, and those that it starts, serve with what was taken where the model was to choose."""
    global _launched
    before = json.loads(os.environ.get(ORIGINS_ENV) or "{}")
    found = taken.resolution(Resolution(taken.config, "", before.get("sources", {}), before.get("files", {})))
    launch, text, report = _left_there(), taken.config.as_text(), found.report()
    logger.info("DiffKV configuration (%s): %s", taken.source, json.dumps(report))
    _launched = _launched if launch is None else replace(launch, text=text)
    os.environ[CONFIG_ENV] = text
    del report["values"]
    os.environ[ORIGINS_ENV] = json.dumps({"of": _digest(text), **report})


def _digest(text: str) -> int:
    return zlib.crc32(text.encode())


def configuration_report() -> dict[str, Any]:
    """The configuration that this process runs, whole, and where its parts come from: as ``Resolution.report``."""
    text = os.environ.get(CONFIG_ENV, "")
    origins = json.loads(os.environ.get(ORIGINS_ENV) or "{}")
    config = read_config()
    if origins.pop("of", None) != _digest(text):  # no launch of ours came before: the environment alone says it
        sources = sources_of(config, dict.fromkeys(config.model_fields_set, source_of(text, CONFIG_ENV)))
        return Resolution(config, "those of the configuration given", sources).report()
    return {"values": config.whole(), **origins}


def _check(server_args: Any, *configs: DiffKVConfig) -> None:
    """Raise UnsupportedError unless a server may run any of ``configs``."""
    choose_graphs(server_args)
    compat.decline_hybrid_swa_pools(server_args)
    choose_backend(server_args)
    args = compat.resolved(server_args)
    drafts = drafts_of(args)
    attention_spans = stated_spans(server_args) if drafts or any(map(scores_whole_heads, configs)) else ()
    checks: list[Callable[[], None]] = []
    for config in configs:
        checks.append(partial(check_server_args, server_args, config))
        checks.append(partial(check_policy, config, attention_spans))
        if drafts:
            checks.append(partial(check_drafts, config, attention_spans, by_model=drafts_by_model(args)))
    _refuse_at_once(checks)
    for part in PARTS:
        part.decline(server_args)
    compat.hand_out_single_slots(server_args)


def _refuse_at_once(checks: Sequence[Callable[[], None]]) -> None:
    """Raise UnsupportedError with what all checks say, a line each."""
    said: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except UnsupportedError as error:
            said[str(error)] = None
    if said:
        raise UnsupportedError("\n".join(said))


def configure_unless_done(server_args: Any) -> None:
    """``configure`` for a launch that parsed no arguments: an ``Engine``. Where it has been done, SGLang may have
    decided something since that is refused."""
    launch = _left_there()
    if launch is None or launch.model_path != str(server_args.model_path):
        configure(server_args)
    else:
        _check(server_args, *own_choice.candidates(server_args, read_config()))


def ask_before_loading(server_args: Any, first: Callable[[], None]) -> None:
    """What every launch does before it starts processes: configure unless that is done, and refuse what the processes
    would. Raises ConfigError or UnsupportedError; the command of a server ends with its message.

    Args:
        first: asked before all else. It raises UnsupportedError.
    """
    try:
        first()
        configure_unless_done(server_args)
        _take_instead(server_args)
        preflight.ask(server_args, *own_choice.candidates(server_args, read_config()))
    except (ConfigError, UnsupportedError) as error:
        launch = _left_there()
        if launch is not None and launch.command:
            sys.exit(f"sglang_diffkv: {error}")
        raise


def _take_instead(server_args: Any) -> None:
    """What a server runs that was not told what, if the model's files say that it could not choose. Raises
    UnsupportedError if it has to."""
    given = read_config()
    if not given.chosen_at_start:
        return
    why = preflight.cannot_read(server_args)
    if why and given.chosen_or_refused:
        raise own_choice.refusal(why)
    if (taken := own_choice.instead(server_args, given, why)) is not None:
        logger.warning("DiffKV: thresholds are %s", taken.origin)
        own_choice.tell(taken)
        take_choice(taken)


class EngineArguments:
    """Stands where SGLang's ``Engine`` has the class of its arguments, and takes ``diffkv_config`` beside them.

    Args:
        original: SGLang's class.
    """

    def __init__(self, original: Callable[..., Any]):
        self.original = original

    def __call__(self, *args: Any, diffkv_config: Mapping[str, Any] | str | None = None, **kwargs: Any) -> Any:
        """SGLang's arguments. ``diffkv_config``: a preset's name, a mapping, JSON or the path of a file; None for the
        environment's. Raises ConfigError or UnsupportedError."""
        server_args = self.original(*args, **kwargs)
        if diffkv_config is None:
            withdraw()
            return server_args
        if not is_selected(server_args):
            raise ConfigError(f'{ENGINE_ARGUMENT} has no effect without attention_backend="{BACKEND}"')
        if not isinstance(diffkv_config, (str, Mapping)):
            raise ConfigError(
                f"{ENGINE_ARGUMENT} is a {type(diffkv_config).__name__}: allowed is a dict, a preset's name, JSON or "
                "the path of a file"
            )
        text = diffkv_config if isinstance(diffkv_config, str) else json.dumps(dict(diffkv_config))
        configure(server_args, text, given_by=ENGINE_ARGUMENT)
        return server_args


def withdraw() -> None:
    """The environment has the user's configuration again, and not what the last launch left there."""
    global _launched
    launch, _launched = _left_there(), None
    if launch is not None:
        os.environ[CONFIG_ENV] = launch.users
        os.environ.pop(ORIGINS_ENV, None)


def configure_from_cli(server_args: Any, given: str | None) -> None:
    """``configure`` with the value of ``--diffkv-config``, None if there is none; a problem ends the process with its
    message."""
    if not is_selected(server_args):
        if given is not None:
            sys.exit(f"sglang_diffkv: --diffkv-config has no effect without --attention-backend {BACKEND}")
        return
    try:
        configure(server_args, given, command=True)
    except (ConfigError, UnsupportedError) as error:
        sys.exit(f"sglang_diffkv: {error}")
