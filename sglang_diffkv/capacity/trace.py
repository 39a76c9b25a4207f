"""Hit rates of a prefix cache, from a trace of requests without their text.

A trace is in the format of Mooncake's: JSON, a line a request, with ``input_length``, ``output_length`` (tokens) and
``hash_ids``, a number for each block of 512 prompt tokens; equal numbers mean equal prefixes.

The cache is ideal: one, least recently used, of blocks, requests one after another, and a block counts only behind its
prefix. A request's last blocks are the first to go, as leaves of a tree are. So what a small cache finds, a larger one
finds too, and a second tier behind the first finds what both together would, less what the first finds.
"""

from __future__ import annotations

import json
import lzma
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import check_file, named

BLOCK = 512
"""Prompt tokens of a block."""
MOST_TRACE_BYTES = 1 << 31
MOST_LINE = 1 << 24
MOST_LENGTH = 1 << 30


@dataclass(frozen=True)
class Request:
    """Of a trace: tokens of prompt and reply, and the numbers of its prompt's blocks."""

    prompt: int
    reply: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Trace:
    """Requests in their order."""

    requests: tuple[Request, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(x.prompt for x in self.requests)

    @property
    def mean_prompt(self) -> int:
        """Tokens."""
        return round(self.prompt_tokens / len(self.requests))


def read_trace(path: Path) -> Trace:
    """A trace in Mooncake's format, as text or compressed by xz. Raises ConfigError, which names the line."""
    try:
        check_file(path, MOST_TRACE_BYTES)
        found = tuple(_requests(path))
    except ConfigError as error:
        raise ConfigError(f"--trace {named(path)} {error}") from None
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {named(path)} cannot be read: {str(error)[:80]}") from None
    if not found:
        raise ConfigError(f"--trace {named(path)} has no request")
    return Trace(found)


def _requests(path: Path) -> Iterator[Request]:
    opened: Any = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        number = 0
        while line := file.readline(MOST_LINE + 1):
            number += 1
            if len(line) > MOST_LINE:
                raise ConfigError(f"line {number:,} has more than {MOST_LINE:,} characters")
            if line.strip():
                yield _request(line, number)


def _request(line: str, number: int) -> Request:
    where = f"line {number:,}"
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):  # ValueError: also a number of thousands of digits
        raise ConfigError(f"{where} is no JSON") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is no object with input_length, output_length and hash_ids")
    prompt, reply = data.get("input_length"), data.get("output_length")
    if not (_is_length(prompt) and _is_length(reply)):
        raise ConfigError(f"{where}: input_length and output_length must be whole numbers of tokens")
    blocks = data.get("hash_ids")
    if not isinstance(blocks, list) or not all(isinstance(x, int) for x in blocks):
        raise ConfigError(f"{where}: hash_ids must be a list of whole numbers")
    if len(blocks) > -(-prompt // BLOCK):
        raise ConfigError(f"{where}: {len(blocks):,} hash_ids for {prompt:,} tokens, in blocks of {BLOCK}")
    return Request(prompt, reply, tuple(blocks))


def _is_length(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_LENGTH


def found_tokens(trace: Trace, capacity: float) -> int:
    """Prompt tokens that a cache of ``capacity`` tokens finds, over all requests."""
    cache: OrderedDict[int, int] = OrderedDict()
    held = found = 0
    for request in trace.requests:
        hit = True
        sizes = _sizes(request)
        for block, size in zip(request.blocks, sizes, strict=True):
            hit = hit and block in cache
            found += size if hit else 0
        for block, size in zip(reversed(request.blocks), reversed(sizes)):
            before = cache.pop(block, 0)
            cache[block] = max(size, before)
            held += cache[block] - before
        while held > capacity and cache:
            held -= cache.popitem(last=False)[1]
    return found


def _sizes(request: Request) -> Sequence[int]:
    """Tokens of each block."""
    return [min(BLOCK, request.prompt - BLOCK * x) for x in range(len(request.blocks))]


@dataclass(frozen=True)
class HitRates:
    """Shares of all prompt tokens that are found in the GPU's memory, and in a host tier behind it."""

    gpu: float
    host: float


def hit_rates(trace: Trace, gpu_tokens: float, host_tokens: float) -> HitRates:
    """Of a cache of so many tokens on the GPU, and so many in the host's memory."""
    every = max(trace.prompt_tokens, 1)
    near = found_tokens(trace, gpu_tokens)
    both = found_tokens(trace, gpu_tokens + host_tokens) if host_tokens else near
    return HitRates(near / every, (both - near) / every)
