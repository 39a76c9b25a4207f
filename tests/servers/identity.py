"""Token identity with room for what rounding decides.

A matrix product of another batch size, or attention summed in another order, moves bf16 logits by a step or two of
their format (1/16 between 8 and 16). Where two tokens stand closer than that, stock SGLang does not repeat its own
choice either.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_diffkv.evaluate.client import Record

UNDECIDED = 0.25
"""Nats between the two best tokens up to which rounding may choose: two steps of each logit between 8 and 16."""

EQUAL = 0.75
"""The share of replies that must not differ at all: rounding decides few of them."""


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Position of the first token that differs; None if there is none."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check_tokens(
    found: Sequence[Sequence[int]], expected: Sequence[Record], what: str, *, equal: float = EQUAL
) -> None:
    """``found`` are the tokens of ``expected``; a reply may leave them only where ``expected``, which carries the two
    best log-probabilities of each position, was undecided, and the share ``equal`` of the replies may not at all."""
    assert len(found) == len(expected)
    left = 0
    for index, (tokens, record) in enumerate(zip(found, expected, strict=True)):
        at = first_difference(tokens, record.output_ids)
        if at is None:
            continue
        left += 1
        assert at < min(len(tokens), len(record.output_ids)), f"{what}: reply {index} ends after {at} tokens"
        best, second = record.top_logprobs[at][:2]
        margin = best[0] - second[0]
        assert margin <= UNDECIDED, f"{what}: reply {index} differs at {at}, where {margin:.2f} nats decide"
    assert left <= (1 - equal) * len(expected), f"{what}: {left} of {len(expected)} replies differ"
