"""The answers that a calibration compares: of stock SGLang and of settings, each on a server of its own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import Any

from sglang_diffkv.calibrate.arguments import selection
from sglang_diffkv.config import DiffKVConfig, load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate import report, runner
from sglang_diffkv.evaluate.configuration import STOCK, Configuration, device_name
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.jobs import Connect, evaluate_all
from sglang_diffkv.evaluate.store import Store
from sglang_diffkv.evaluate.task import Task


class Answers:
    """What a store holds of stock and of settings on some suites, and asks for what it lacks."""

    def __init__(self, args: argparse.Namespace, store: Store, suites: Sequence[runner.Suite]):
        self.args, self.store, self.suites = args, store, suites
        self._asked: set[tuple[str, str]] = set()
        runner.register(store, suites)
        self._server(Configuration(STOCK))
        if next(iter(store.configurations)) != STOCK:
            raise EvaluationError(f"{store.path} compares with another configuration than {STOCK}: use a new --work")

    def ask(self, settings: Mapping[str, DiffKVConfig], suites: Sequence[runner.Suite] | None = None) -> None:
        """Have stock and the settings, by name, answer what the store does not hold of the suites, by default all of
        them; each is asked once, ``--jobs`` of them at once."""
        asked = self.suites if suites is None else suites
        wanted = [Configuration(STOCK), *(Configuration(name, config) for name, config in settings.items())]
        new = {(x.name, suite.task.name) for x in wanted for suite in asked} - self._asked
        servers = {x.name: self._server(x) for x in wanted if x.name in {name for name, _ in new}}
        evaluate_all(servers, asked, self.store, self.args.concurrency, self.args.jobs)
        self._asked |= new

    def _server(self, configuration: Configuration) -> Connect:
        args = self.args
        self.store.add_configuration(configuration.name, configuration.fingerprint(args.model, args.server_args))
        return partial(runner.start, configuration, args.model, args.server_args)


def configured(base: str, fields: Mapping[str, Any]) -> DiffKVConfig:
    """A configuration of what is searched for and, for everything else, ``--base``. Raises ConfigError."""
    given = load_config(base).model_dump(exclude_unset=True)
    if searched := given.keys() & {"tiers", "policy", "rotate"}:
        raise ConfigError(f"--base sets {' and '.join(sorted(searched))}, which are what is searched for")
    return load_config(json.dumps({**given, **fields}))


def circumstances(args: argparse.Namespace, task: Task) -> dict[str, Any]:
    """When, how and on what a calibration was made, as files say it."""
    file = task.fingerprint()
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "procedure": args.procedure,
        "tolerance_points": args.tolerance,
        "margin": args.margin,
        "task_file": file["file"],
        "task_sha256": file["sha256"],
        "selection": {**selection(args), "max_new_tokens": args.max_new_tokens},
        "versions": report.environment()["versions"],
        "device": device_name(),
    }
