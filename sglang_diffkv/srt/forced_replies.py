"""A custom logit processor that makes a server take a given reply, token by token, and still tell its own mind.

``sglang_diffkv.evaluate`` measures the generation phase with it: every configuration decodes the same tokens, so that
their distributions at one position are of the same text.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

BOOST = 20.0
"""Nats by which the forced token exceeds all others together: certain to be taken, and what it takes from the others'
log-probabilities (2e-9) is less than their rounding."""


class ForcedReply(CustomLogitProcessor):
    """Takes ``reply_ids[i]`` as output token ``i``; beyond them the model chooses.

    SGLang tells log-probabilities of the logits that a processor has changed. The forced token's becomes the
    log-sum-exp of all plus ``BOOST``, so those of the others fall by ``BOOST`` and by nothing else; its own logit
    before goes to the token ``sink``, whose own is lost. Parameters of a request: ``reply_ids``,
    ``sink`` (not among them).

    The number of a request's output tokens must be exact, so overlap scheduling has to be off.
    """

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        rows, tokens, sinks = [], [], []
        for row, params in enumerate(custom_param_list or ()):
            at = len(params["__req__"].output_ids)
            if at < len(params["reply_ids"]):
                rows.append(row)
                tokens.append(params["reply_ids"][at])
                sinks.append(params["sink"])
        if rows:
            at_rows, forced, sink = (torch.tensor(x, device=logits.device) for x in (rows, tokens, sinks))
            before = logits[at_rows]  # [rows, vocabulary]
            logits[at_rows, sink] = before.gather(1, forced[:, None])[:, 0]
            logits[at_rows, forced] = before.logsumexp(1) + BOOST
        return logits
