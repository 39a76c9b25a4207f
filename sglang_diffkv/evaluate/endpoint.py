"""A running server, as a task sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import requests

from sglang_diffkv.access import ADMIN_KEY_OPTION, OPEN, REFUSED, Access, AccessError, cause
from sglang_diffkv.evaluate import client, report

LONG = "finished_1k"
TOTALS = ("finished", LONG)
PATIENCE = 10.0
"""Seconds for which a busy server is asked to empty its prefix cache."""
BUSY = 400
"""The status with which it refuses while requests run."""


class EvaluationError(RuntimeError):
    """The evaluation cannot go on, or would not measure what it says."""


@dataclass(frozen=True)
class Endpoint:
    """Greedy requests to the server at ``url``, whose model takes ``context`` tokens of prompt and reply.

    ``owned`` says that nobody else uses the server, so that its prefix cache has to be emptied where that is asked.
    """

    url: str
    context: int
    owned: bool = False
    timeout: float = 3600.0
    access: Access = OPEN

    @classmethod
    def connect(cls, url: str, owned: bool = False, access: Access = OPEN) -> Endpoint:
        """Ask the server for its model's context. Raises EvaluationError if no SGLang server answers, or it wants
        another key."""
        url = url.rstrip("/")
        try:
            reply = access.get(url, "/v1/models", timeout=60.0)
            reply.raise_for_status()
            return cls(url, int(reply.json()["data"][0]["max_model_len"]), owned, access=access)
        except AccessError as error:
            raise EvaluationError(str(error)) from None
        except requests.RequestException as error:
            raise EvaluationError(f"no SGLang server answers at {url}: {cause(error)}") from None
        except (LookupError, TypeError, ValueError):
            raise EvaluationError(f"no SGLang server answers at {url}: its /v1/models has another form") from None

    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int) -> client.Record:
        """Greedy reply of at most ``max_new_tokens``, fewer where the context ends."""
        room = self.context - len(prompt_ids) - 1
        if room < 1:
            raise EvaluationError(f"a prompt of {len(prompt_ids)} tokens leaves no room in {self.context}")
        return client.ask(self.url, prompt_ids, min(max_new_tokens, room), timeout=self.timeout, access=self.access)

    def cache(self, prompt_ids: Sequence[int]) -> client.Record:
        """Prefill only, so that the prompt is in the prefix cache afterwards."""
        return client.ask(self.url, prompt_ids, 0, timeout=self.timeout, access=self.access)

    def score(self, prompt_ids: Sequence[int], start: int, top_logprobs: int = 0) -> client.Record:
        """Log-probabilities of the prompt's tokens after position ``start``, in ``input_logprobs``, and the
        ``top_logprobs`` likeliest tokens at each of their positions, in ``input_top_logprobs``."""
        return client.score(
            self.url, prompt_ids, start, top_logprobs=top_logprobs, timeout=self.timeout, access=self.access
        )

    def force(
        self, prompt_ids: Sequence[int], reply_ids: Sequence[int], sink: int, top_logprobs: int = 0
    ) -> client.Record:
        """The reply ``reply_ids``, with what the server thought of each token in ``logprobs`` and ``top_logprobs``."""
        if len(prompt_ids) + len(reply_ids) >= self.context:
            raise EvaluationError(f"{len(prompt_ids)} + {len(reply_ids)} tokens do not fit in {self.context}")
        return client.force(
            self.url, prompt_ids, reply_ids, sink, top_logprobs=top_logprobs, timeout=self.timeout, access=self.access
        )

    def forget_prefixes(self) -> str:
        """Empty the server's prefix cache, so that one task file does not profit from another, nor from what others
        asked. Why that was refused, or an empty text; of an owned server EvaluationError.

        SGLang refuses with status 400 while a request is still leaving, so that is tried again for ``PATIENCE`` s.
        """
        deadline = time.monotonic() + PATIENCE
        while not (reply := self._flush()).ok:
            if reply.status_code != BUSY or time.monotonic() > deadline:
                why = f"status {reply.status_code}"
                if reply.status_code in REFUSED:
                    why += f": {ADMIN_KEY_OPTION} may be wanted"
                if self.owned:
                    raise EvaluationError(f"{self.url} does not empty its prefix cache ({why} of /flush_cache)")
                return why
            time.sleep(0.1)
        return ""

    def _flush(self) -> requests.Response:
        try:
            return self.access.post(self.url, "/flush_cache", timeout=60.0)
        except AccessError as error:
            if self.owned or error.response is None:
                raise EvaluationError(str(error)) from None
            return error.response

    def info(self) -> dict[str, Any]:
        """The reply of ``/server_info``. Raises requests.RequestException, AccessError for one."""
        reply = self.access.get(self.url, "/server_info", timeout=300.0)
        reply.raise_for_status()
        return reply.json()

    def totals(self) -> dict[str, dict[str, float]] | None:
        """DiffKV's cumulative figures over finished requests, all and long ones; None without DiffKV."""
        stats = (self.info().get("internal_states") or [{}])[0].get("diffkv")
        found = {key: report.totals(stats, key) for key in TOTALS}
        return {key: value for key, value in found.items() if value is not None} or None


class Meter:
    """What finished requests add to the server's figures from now on."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        self._before = endpoint.totals()

    @property
    def measures(self) -> bool:
        """Whether the server reports figures at all."""
        return self._before is not None

    def read(self) -> dict[str, dict[str, float]]:
        """Totals added so far."""
        if self._before is None:
            return {}
        after = self.endpoint.totals() or {}
        added = {key: report.since(after.get(key), self._before.get(key)) for key in TOTALS}
        return {key: value for key, value in added.items() if value is not None}

    def settle(self, count: int, patience: float = 10.0) -> dict[str, dict[str, float]]:
        """As ``read``, after waiting up to ``patience`` s for ``count`` requests: a request is counted some steps
        after its reply."""
        deadline = time.monotonic() + patience
        while True:
            added = self.read()
            if not added or added["finished"]["requests"] >= count or time.monotonic() > deadline:
                return added
            time.sleep(0.2)
