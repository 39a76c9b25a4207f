"""How far layers see, and how much of a sequence those with a sliding window hold.

A layer's *attention span* is how many tokens a query may see, itself included; 0 for all. A layer that has one
*slides*: its newest ``retained_tokens(attention_span)`` tokens stay in the high tier, older ones are dropped,
whatever the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_diffkv.layout.geometry import Path, path_end

SLACK = 32
"""Tokens that a sliding layer holds beyond its span: a prompt that is asked again is matched up to its last token, and
with overlap scheduling a request runs a token beyond its end."""


def retained_tokens(attention_span: int) -> int:
    """Newest tokens that a layer of this span (not 0) holds."""
    return attention_span - 1 + SLACK


def longest_span(attention_spans: Sequence[int]) -> int:
    """Of the layers that slide; 0 if none does."""
    return max(attention_spans, default=0)


def whole_tokens(attention_spans: Sequence[int]) -> int:
    """Tokens of a sequence of which no sliding layer has dropped any."""
    return min((retained_tokens(attention_span) for attention_span in attention_spans if attention_span), default=0)


def kept_in_layers(attention_spans: Sequence[int], length: float) -> float:
    """Share of a sequence of ``length`` tokens that layers hold on average, as far as windows go."""
    if not any(attention_spans):
        return 1.0
    return sum(min(retained_tokens(x) / length, 1.0) if x else 1.0 for x in attention_spans) / len(attention_spans)


def served_end(path: Path, attention_spans: Sequence[int]) -> int:
    """The largest end of a match within ``path`` behind which sliding layers find all that they may see.

    A segment as computed holds everything, and so does one of a short sequence; of another one they hold what its
    sequence's last query could see, and ``SLACK`` tokens more.
    """
    parts, attention_span, whole = list(path), longest_span(attention_spans), whole_tokens(attention_spans)
    while attention_span and parts and not _is_served(parts, attention_span, whole):
        parts.pop()
    return path_end(parts)


def _is_served(path: Path, attention_span: int, whole: int) -> bool:
    end = path_end(path)
    return all(
        segment.as_computed or segment.end <= whole or end - attention_span + 1 >= hi or end >= segment.end - SLACK
        for segment, _, hi in path
    )


def joined_end(path: Path, attention_span: int) -> int:
    """``Segment.end`` of a segment that holds the tokens of ``path``: behind it every part serves."""
    ends = [min(segment.end, hi + attention_span - 1 + SLACK) for segment, _, hi in path if not segment.as_computed]
    return max([path_end(path), *ends])
