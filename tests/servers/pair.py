"""Two servers of which one computes prompts and the other goes on with them, and what a router does between them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmarks.paths import NANO
from sglang_diffkv.evaluate.ports import Port
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.srt.versions import compat
from tests.servers.loopback.mooncake.engine import SECONDS_ENV
from tests.servers.shared import START_TIMEOUT, STRICT, stats_of

MARKS = [
    pytest.mark.server,
    pytest.mark.skipif(not compat.installed().disaggregation, reason="this SGLang is refused with it"),
]
"""Of tests with a pair."""
ENGINE = Path(__file__).parent / "loopback"
_ROOMS = itertools.count((os.getpid() << 32) + 1)


def of_ranks(ranks: int) -> dict[str, str]:
    """Variables of a server of so many ranks: SGLang wants the cores of each named on a CPU."""
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * ranks)} if ranks > 1 else {}


class Pair:
    """A prefill server and a decode server.

    Args:
        config, decode_config: the plugin's configuration of both, or of the second one alone. args, decode_args: the
            same of further arguments. seconds: that each write between them takes. env: further variables of both.
        ranks, decode_ranks: of each, or of the second one alone.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        args: Sequence[str] = (),
        *,
        decode_config: Mapping[str, Any] | None = None,
        decode_args: Sequence[str] = (),
        seconds: float = 0.0,
        env: Mapping[str, str] | None = None,
        ranks: int = 1,
        decode_ranks: int = 0,
    ):
        self.bootstrap, self._args, self._seconds, self._env = Port(), args, seconds, env or {}
        self._ranks = ranks
        self._threads = ThreadPoolExecutor(64)
        self.prefill = self._server("prefill", config, ())
        self.decode = self._server("decode", decode_config or config, decode_args, decode_ranks)

    def _server(self, mode: str, config: Mapping[str, Any], args: Sequence[str], ranks: int = 0) -> Server:
        ranks = ranks or self._ranks
        paths = os.pathsep.join([str(ENGINE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        env = {
            **STRICT,
            "PYTHONPATH": paths,
            "SGLANG_HOST_IP": "127.0.0.1",
            SECONDS_ENV: str(self._seconds),
            **of_ranks(ranks),
            **self._env,
        }
        own = ["--disaggregation-mode", mode, "--disaggregation-transfer-backend", "mooncake"]
        own += ["--disaggregation-bootstrap-port", str(self.bootstrap.number), "--tp-size", str(ranks)]
        own += [*self._args, *args]
        return Server(NANO, "diffkv", own, diffkv_config=config, env=env, timeout=START_TIMEOUT)

    def another_decode(self, config: Mapping[str, Any], ranks: int = 0) -> Server:
        """A further decode server, which is to be entered. ``ranks``: others than those of the pair."""
        return self._server("decode", config, (), ranks)

    def __enter__(self) -> Pair:
        with ThreadPoolExecutor(2) as threads:
            for started in [threads.submit(x.start) for x in (self.prefill, self.decode)]:
                started.result()
        return self

    def __exit__(self, *_: object) -> None:
        with ThreadPoolExecutor(2) as threads:
            for stopped in [threads.submit(x.stop, 0.0) for x in (self.prefill, self.decode)]:
                stopped.result()

    def send(
        self, payload: Mapping[str, Any], *, decode: Server | None = None, timeout: float = 120.0
    ) -> tuple[Future[requests.Response], Future[requests.Response]]:
        """Both servers' responses to one request, as a router sends it to both. ``decode``: in the place of its own."""
        room = {
            "bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap.number, "bootstrap_room": next(_ROOMS),
        }  # fmt: skip
        first, second = (
            self._threads.submit(server.post, "/generate", {**payload, **room}, timeout=timeout)
            for server in (self.prefill, decode or self.decode)
        )
        return first, second

    def ask(self, payload: Mapping[str, Any], *, decode: Server | None = None) -> requests.Response:
        """The decode server's response, once both have answered."""
        first, second = self.send(payload, decode=decode)
        first.result()
        return second.result()

    def reply(self, prompt: Sequence[int], new_tokens: int, **more: Any) -> list[int]:
        """Output tokens, greedily."""
        response = self.ask(request(prompt, new_tokens, **more))
        assert response.ok, response.text
        return list(response.json()["output_ids"])

    def until_retracted(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Iterator[list[list[int]]]:
        """Replies to all prompts at once, until a retracted request has come back: of each prompt one, two or three.

        How many requests meet is the machine's choice: replies may end before other prompts have come. Of many requests
        some always wait for room.

        Raises:
            AssertionError: none was retracted, one was lost, or one did not come back.
        """

        def transfer() -> dict[str, int]:
            return dict(stats_of(self.decode)["transfer"])

        before = found = transfer()
        for times in (1, 2, 2, 3, 3):
            crowd = [x for x in prompts for _ in range(times)]
            with ThreadPoolExecutor(len(crowd)) as threads:
                replies = list(threads.map(lambda x: self.reply(x, new_tokens), crowd))
            found = transfer()
            for k in range(times):
                yield replies[k::times]
            if found["retracted_kept"] > before["retracted_kept"]:
                break
        kept = found["retracted_kept"]
        assert kept == found["retracted_restored"] > before["retracted_kept"] and not found["retracted_lost"], found


def request(prompt: Sequence[int], new_tokens: int, **more: Any) -> dict[str, Any]:
    """A request for so many tokens, greedily."""
    parameters = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, **more}
    return {"input_ids": list(prompt), "sampling_params": parameters}
