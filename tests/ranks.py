"""Ranks of a tensor-parallel server as threads of this process, which exchange numbers as a server's processes do."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from sglang_diffkv.layout.ranks import Ranks


class Exchange:
    """The elementwise maximum, and the sum, among threads."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=60)
        self.given: list[Any] = [None] * size

    def ranks(self, rank: int) -> Ranks:
        def largest(numbers: np.ndarray) -> np.ndarray:
            self.given[rank] = numbers
            self.barrier.wait()
            result = np.maximum.reduce(self.given)
            self.barrier.wait()
            return result

        def add(tensor: torch.Tensor) -> None:
            self.given[rank] = tensor.clone()
            self.barrier.wait()
            tensor.copy_(sum(self.given))
            self.barrier.wait()

        return Ranks(len(self.given), rank, largest, add)


class Pair:
    """One thing for each of two ranks, or more, which do everything at the same time."""

    def __init__(self, make: Callable[[Ranks], Any], size: int = 2):
        self.exchange = Exchange(size)
        self.members = [make(self.exchange.ranks(rank)) for rank in range(size)]

    def each(self, act: Callable[[Any], Any]) -> list[Any]:
        """What ``act`` gives on each; the first error, if one of them fails."""

        def guarded(member: Any) -> Any:
            try:
                return act(member)
            except Exception:
                self.exchange.barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.members)) as threads:
            done = [threads.submit(guarded, member) for member in self.members]
        errors = [error for future in done if (error := future.exception())]
        for error in sorted(errors, key=lambda x: isinstance(x, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in done]


Found = TypeVar("Found")


def with_one_sum(act: Callable[[Ranks], Found], size: int) -> list[Found]:
    """What ``act`` gives on each of so many ranks that add up one tensor. Without threads, in which Triton's
    interpreter cannot run: each rank acts twice, first to say what it adds, then with the sum."""
    given: list[torch.Tensor] = []
    for rank in range(size):
        act(Ranks(size, rank, add=lambda tensor: given.append(tensor.clone())))
    assert len(given) == size
    total = functools.reduce(torch.add, given)  # in the same order on every device

    def add(tensor: torch.Tensor) -> None:
        tensor.copy_(total)

    return [act(Ranks(size, rank, add=add)) for rank in range(size)]
