"""Send many prompts to a server at a given concurrency and keep what came back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sglang_diffkv.access import OPEN, Access
from sglang_diffkv.evaluate import forcing


class RequestError(RuntimeError):
    """The server refused or ended a request; the message has its words."""


@dataclass
class Record:
    """One reply of ``/generate``.

    ``logprobs`` has the log-probability of each output token, ``top_logprobs`` for each output position the
    most likely tokens as ``(logprob, token id)``, best first; ``input_logprobs`` and ``input_top_logprobs`` are
    those of prompt tokens. They are empty unless they were asked for.
    """

    text: str
    output_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    latency: float
    finish_reason: str
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    input_top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)


def ask(
    url: str,
    input_ids: Sequence[int],
    max_new_tokens: int,
    *,
    top_logprobs: int = 0,
    fields: Mapping[str, Any] | None = None,
    timeout: float = 1800.0,
    access: Access = OPEN,
) -> Record:
    """Greedy continuation of one prompt; ``top_logprobs`` > 0 asks for log-probabilities as well.

    With ``max_new_tokens`` 0 the prompt is only read, and joins the prefix cache. ``fields``: more of ``/generate``.
    Raises RequestError.
    """
    payload: dict[str, Any] = {
        **(fields or {}),
        "input_ids": list(input_ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens},
    }
    if top_logprobs:
        payload.update(return_logprob=True, top_logprobs_num=top_logprobs)
    return _post(url, payload, timeout, access)


def score(
    url: str,
    input_ids: Sequence[int],
    start: int,
    *,
    top_logprobs: int = 0,
    fields: Mapping[str, Any] | None = None,
    timeout: float = 1800.0,
    access: Access = OPEN,
) -> Record:
    """Log-probabilities of ``input_ids[start + 1:]`` as ``input_logprobs``; no token is generated.

    ``top_logprobs`` > 0 asks for the most likely tokens at their positions as well, as ``input_top_logprobs``.

    Tokens before ``start`` come from the prefix cache as far as it has them; SGLang gives none for the token at
    ``start`` itself. ``fields``: more of ``/generate``. Raises RequestError.
    """
    payload: dict[str, Any] = {
        **(fields or {}),
        "input_ids": list(input_ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": start,
    }
    if top_logprobs:
        payload["top_logprobs_num"] = top_logprobs
    return _post(url, payload, timeout, access)


def force(
    url: str,
    prompt_ids: Sequence[int],
    reply_ids: Sequence[int],
    sink: int,
    *,
    top_logprobs: int = 0,
    timeout: float = 1800.0,
    access: Access = OPEN,
) -> Record:
    """Make the server reply ``reply_ids`` (``evaluate/forcing``); ``logprobs`` and ``top_logprobs`` are what it would
    have said itself. Raises RequestError, also if the reply is another."""
    start = time.perf_counter()
    payload = forcing.payload(prompt_ids, reply_ids, sink, top_logprobs)
    reply = _reply(url, payload, timeout, access)
    found = record(reply, time.perf_counter() - start)
    if found.output_ids != list(reply_ids):
        raise RequestError(f"a reply was not the forced one: the server needs {' '.join(forcing.SERVER_ARGS)}")
    told = forcing.thoughts(reply["meta_info"], reply_ids, sink, top_logprobs)
    found.logprobs, found.top_logprobs = told.logprobs, told.tops
    return found


def _post(url: str, payload: dict[str, Any], timeout: float, access: Access) -> Record:
    start = time.perf_counter()
    reply = _reply(url, payload, timeout, access)
    return record(reply, time.perf_counter() - start)


def _reply(url: str, payload: dict[str, Any], timeout: float, access: Access) -> dict[str, Any]:
    response = access.post(url, "/generate", payload, timeout=timeout)
    if not response.ok:
        raise RequestError(f"/generate answered {response.status_code}: {response.text[:500]}")
    decoded: dict[str, Any] = response.json()
    return decoded


def record(reply: dict[str, Any], latency: float = 0.0) -> Record:
    """The decoded JSON of a reply. Raises RequestError if the server ended the request."""
    meta = reply["meta_info"]
    reason = meta["finish_reason"]
    if reason["type"] == "abort":
        raise RequestError(f"the server aborted a request: {reason.get('message')}")
    return Record(
        text=reply["text"],
        output_ids=reply["output_ids"],
        prompt_tokens=meta["prompt_tokens"],
        completion_tokens=meta["completion_tokens"],
        cached_tokens=meta["cached_tokens"],
        latency=latency,
        finish_reason=reason["type"],
        logprobs=[entry[0] for entry in meta.get("output_token_logprobs") or ()],
        top_logprobs=_tops(meta.get("output_top_logprobs") or ()),
        input_logprobs=[entry[0] for entry in (meta.get("input_token_logprobs") or ())[1:]],
        input_top_logprobs=_tops((meta.get("input_top_logprobs") or ())[1:]),
    )


def _tops(positions: Sequence[Any]) -> list[list[tuple[float, int]]]:
    return [[(entry[0], entry[1]) for entry in position] for position in positions]


def run(
    url: str,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    concurrency: int = 8,
    top_logprobs: int = 0,
    fields: Sequence[Mapping[str, Any]] | None = None,
    access: Access = OPEN,
) -> list[Record]:
    """Ask all prompts, at most ``concurrency`` at a time; the records are in the prompts' order. ``fields``: more of
    each one's request."""
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(limits)} values of max_new_tokens")
    more: Sequence[Mapping[str, Any]] = [{}] * len(prompts) if fields is None else fields
    if len(more) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(more)} sets of fields")
    pool = ThreadPoolExecutor(concurrency)
    futures = [
        pool.submit(ask, url, ids, limit, top_logprobs=top_logprobs, fields=own, access=access)
        for ids, limit, own in zip(prompts, limits, more)
    ]
    try:
        return [future.result() for future in futures]
    finally:  # without waiting: what is under way ends with the server, which the caller stops
        pool.shutdown(wait=False, cancel_futures=True)
