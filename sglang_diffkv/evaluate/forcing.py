"""Replies that a server is made to give, and what it thought of each token (``srt/forced_replies`` does it there)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PROCESSOR = json.dumps({"callable": b"csglang_diffkv.srt.forced_replies\nForcedReply\n.".hex()})
"""What ``ForcedReply.to_str()`` gives, a pickle of the class's name, without importing SGLang here."""
SERVER_ARGS = ("--enable-custom-logit-processor", "--disable-overlap-schedule")
"""What a server needs for it: outputs are counted, which overlap scheduling does a step late."""
BOOST = 20.0
"""As in ``srt/forced_replies``, which a test compares."""


@dataclass(frozen=True)
class Thoughts:
    """Of each reply token: its log-probability, and the ``k`` likeliest tokens as ``(logprob, token id)``, best
    first."""

    logprobs: list[float]
    tops: list[list[tuple[float, int]]]


def sink_for(reply_ids: Sequence[int], vocabulary: int) -> int:
    """A token whose own probability may go untold: the last of the vocabulary, a rare or a reserved one, that the reply
    does not have."""
    taken = set(reply_ids)
    return next(token for token in range(vocabulary - 1, -1, -1) if token not in taken)


def payload(prompt_ids: Sequence[int], reply_ids: Sequence[int], sink: int, top_logprobs: int) -> dict[str, Any]:
    """The request to ``/generate``."""
    return {
        "input_ids": list(prompt_ids),
        "custom_logit_processor": PROCESSOR,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": len(reply_ids),
            "ignore_eos": True,
            "custom_params": {"reply_ids": list(reply_ids), "sink": sink},
        },
        "return_logprob": True,
        "token_ids_logprob": [sink],
        "top_logprobs_num": top_logprobs + 2 if top_logprobs else 0,
    }


def thoughts(meta: dict[str, Any], reply_ids: Sequence[int], sink: int, top_logprobs: int) -> Thoughts:
    """The reply's ``meta_info`` put back to the distributions before the token was forced."""
    logprobs = [position[0][0] + BOOST for position in meta["output_token_ids_logprobs"]]
    tops = []
    if top_logprobs:
        for token, own, position in zip(reply_ids, logprobs, meta["output_top_logprobs"], strict=True):
            others = [(value + BOOST, other) for value, other, *_ in position if other not in (token, sink)]
            tops.append(sorted([(own, token), *others], key=lambda x: -x[0])[:top_logprobs])
    return Thoughts(logprobs, tops)
