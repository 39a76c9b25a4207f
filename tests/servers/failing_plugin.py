"""Servers with a second plugin, of a test, that makes something fail in their processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.paths import NANO
from sglang_diffkv.evaluate.server import Server
from tests.servers.second_plugin import install
from tests.servers.shared import EVERY_STEP, START_TIMEOUT, check_idle


@contextmanager
def failing_server(
    folder: Path,
    source: str,
    config: Mapping[str, Any],
    more_args: Sequence[str] = (),
    *,
    model: Path = NANO,
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server that checks itself after every step; at the end it must be alive and, flushed, hold no page.

    Args:
        folder: empty, for the plugin. source: of its module, whose ``register`` SGLang calls.
    """
    args = ["--max-total-tokens", "12000", "--chunked-prefill-size", "1024", *more_args]
    env = {**EVERY_STEP, **(env or {}), **install(folder, "failing_plugin", source)}
    with Server(model, "diffkv", args, diffkv_config=config, env=env, timeout=START_TIMEOUT) as running:
        yield running
        check_idle(running)
