"""What two servers think of one request.

The server is asked once more, greedily, and says how likely each token of its reply and the likeliest others were. It
finds the prompt in its prefix cache, where the first answer left it. The reference is then told prompt and reply, and
says how likely the same tokens are to it (``evaluate/distribution``). That is a pass over a prompt: so it has to store
what the model computes, and needs no option.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import requests

from sglang_diffkv.access import OPEN, Access, AccessError
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.distribution import Comparison, compare, pack
from sglang_diffkv.shadow.exchange import Exchange, LeftOut, Question, Reason, question_of

CHECK_EVERY = 30.0
"""Seconds for which what was found of the reference holds, if it was unfit."""
CHECKED = "The quick brown fox; 12 345 jumps — über den Zaun."
"""A text that both servers are to split into the same tokens."""
EXACT_DTYPES = ("auto", "bfloat16", "bf16", "float16", "half", "float32", "float")


@dataclass(frozen=True)
class Judged:
    """One request: tokens of its prompt, how many of them the server found cached, and the comparison, in which the
    reference comes first. ``parted``: the first token on which they do not agree, None if there is none."""

    prompt_tokens: int
    cached_tokens: int
    comparison: Comparison

    @property
    def parted(self) -> int | None:
        apart = (~self.comparison.agreeing).nonzero()[0]
        return int(apart[0]) if len(apart) else None


@dataclass(frozen=True)
class Asked:
    """A server as the judge sees it, with the reasons for which it leaves requests out."""

    url: str
    access: Access
    timeout: float
    down: Reason
    refused: Reason

    def post(self, path: str, payload: dict[str, Any]) -> Any:
        """The decoded reply. Raises LeftOut."""
        try:
            reply = self.access.post(self.url, path, payload, timeout=self.timeout)
            if reply.ok:
                return reply.json()
        except AccessError:
            raise LeftOut(self.refused) from None
        except (requests.RequestException, ValueError):
            raise LeftOut(self.down) from None
        raise LeftOut(self.refused if reply.status_code < 500 else self.down)

    def generate(self, payload: dict[str, Any]) -> client.Record:
        """Raises LeftOut."""
        try:
            return client.record(self.post("/generate", payload))
        except client.RequestError:
            raise LeftOut(self.refused) from None
        except (LookupError, TypeError, ValueError):
            raise LeftOut(self.down) from None

    def tokenize(self, payload: dict[str, Any]) -> list[int]:
        """Token ids of a prompt or a chat. Raises LeftOut."""
        found = self.post("/v1/tokenize", payload)
        ids = found.get("tokens") if isinstance(found, dict) else None
        if not isinstance(ids, list) or not ids or not all(type(x) is int for x in ids):
            raise LeftOut(self.refused)
        return ids


class Judge:
    """Asks both servers. Several threads may.

    Args:
        url: the server whose traffic it is. reference: one that stores what the model computes. reply_tokens: judged
            of a request, at most. top_logprobs: likeliest tokens that are asked for at each position. timeout: seconds
            for an answer.

    Attributes:
        problem: why the reference is unfit, for reports; empty if it is not known to be.
    """

    def __init__(
        self, url: str, reference: str, *, access: Access = OPEN, reference_access: Access = OPEN,
        reply_tokens: int = 64, top_logprobs: int = 20, timeout: float = 120.0,
    ):  # fmt: skip
        self.server = Asked(url, access, timeout, "server_down", "server_refused")
        self.reference = Asked(reference, reference_access, timeout, "reference_down", "reference_refused")
        self.reply_tokens, self.top_logprobs, self.problem = reply_tokens, top_logprobs, ""
        self._checking, self._fit, self._checked_at = threading.Lock(), False, -CHECK_EVERY

    def judge(self, exchange: Exchange) -> Judged:
        """Raises LeftOut."""
        question = question_of(exchange)
        self.check_reference()
        ids = self._prompt(question)
        reply = self.server.generate(self._again(ids, question))
        if not reply.output_ids or len(reply.output_ids) != len(reply.top_logprobs):
            raise LeftOut("empty")
        known = self.reference.generate(
            {
                "input_ids": [*ids, *reply.output_ids],
                "sampling_params": {"temperature": 0, "max_new_tokens": 0},
                "return_logprob": True,
                "logprob_start_len": len(ids) - 1,
                "top_logprobs_num": self.top_logprobs,
            }
        )
        return Judged(len(ids), reply.cached_tokens, _compared(known.input_top_logprobs, reply.top_logprobs))

    def _prompt(self, question: Question) -> list[int]:
        if question.ids:
            return list(question.ids)
        return self.server.tokenize(dict(question.chat) if question.chat else {"prompt": question.text})

    def _again(self, ids: Sequence[int], question: Question) -> dict[str, Any]:
        """The request to ``/generate`` that asks the server once more."""
        more = dict(question.more or {})
        sampling: dict[str, Any] = {
            "temperature": 0,
            "max_new_tokens": min(self.reply_tokens, question.most_tokens or self.reply_tokens),
        }
        if params := more.pop("custom_params", None):
            sampling["custom_params"] = params
        asked = {"return_logprob": True, "top_logprobs_num": self.top_logprobs}
        return {"input_ids": list(ids), "sampling_params": sampling, **asked, **more}

    def check_reference(self) -> None:
        """Raise LeftOut unless the reference stores what the model computes, and splits text as the server does."""
        with self._checking:
            if self._fit:
                return
            if self.problem and time.monotonic() - self._checked_at < CHECK_EVERY:
                raise LeftOut("reference_unfit")
            self.problem = self._found()
            self._checked_at, self._fit = time.monotonic(), not self.problem
            if self.problem:
                raise LeftOut("reference_unfit")

    def _found(self) -> str:
        try:
            reply = self.reference.access.get(self.reference.url, "/server_info", timeout=self.reference.timeout)
            reply.raise_for_status()
            if problem := obstacle(reply.json()):
                return problem
        except AccessError as error:
            return str(error)
        except requests.HTTPError as error:
            return f"{self.reference.url}/server_info answers {error.response.status_code}: SGLang's has status 200"
        except (requests.RequestException, ValueError):
            raise LeftOut("reference_down") from None
        payload = {"prompt": CHECKED}
        if self.server.tokenize(payload) != self.reference.tokenize(payload):
            return f"{self.reference.url} splits text into other tokens than {self.server.url}: serve the same model"
        return ""


def obstacle(info: Any) -> str:
    """Why a server with this ``/server_info`` is no reference; empty if it is one."""
    if (dtype := str(_within(info, "kv_cache_dtype") or "auto")) not in EXACT_DTYPES:
        return f"the reference rounds its KV cache ({dtype[:20]}): start it without --kv-cache-dtype"
    if _within(info, "attention_backend") != "diffkv":
        return ""
    values = _within(info, "internal_states", 0, "diffkv", "configuration", "values")
    if _within(values, "tiers") == ["BF16"] and _within(values, "policy", "name") == "uniform":
        return ""
    return "the reference compresses: start it with --diffkv-config lossless, or with another attention backend"


def _within(data: Any, *path: str | int) -> Any:
    """What lies in nested data; None where it has another form."""
    for name in path:
        if isinstance(name, int) and isinstance(data, list) and len(data) > name:
            data = data[name]
        else:
            data = data.get(name) if isinstance(data, dict) else None
    return data


Tops = Sequence[Sequence[tuple[float, int]]]


def _compared(reference: Tops, server: Tops) -> Comparison:
    """Positions of one reply. Raises LeftOut where the reference told of others."""
    if len(reference) != len(server) or not all(map(len, reference)):
        raise LeftOut("reference_refused")
    return compare(*(pack([position[: min(map(len, tops))] for position in tops]) for tops in (reference, server)))
