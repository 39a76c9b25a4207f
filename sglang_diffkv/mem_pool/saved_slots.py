"""What buffers of the device hold by slot, in host memory: states of layers that do not attend, and the keys and values
of a draft model. Of prefixes, and of retracted requests beside them (``SlotStore.guest``).

A slot's numbers are opaque here. They are gathered to a staging buffer and copied out beside the passes, and back in
order with them. Nothing waits for the device.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.mem_pool import host_pages
from sglang_diffkv.mem_pool.device import Beside, PageDevice
from sglang_diffkv.mem_pool.host_pages import HostPages, Run, part_of
from sglang_diffkv.mem_pool.page_copies import parts_of

ALIGNED = 16
"""Bytes: where the numbers of a buffer begin in what the host has of a slot."""

STAGING_BYTES = 16 << 20
"""Of the device, at most, that slots pass through on their way; one slot at least."""


LARGE = 1 << 16
"""Bytes from which on a slot takes whole pages of the operating system, so that it can be pinned alone."""


def slot_bytes(buffers: Sequence[torch.Tensor]) -> int:
    """Bytes that the host takes for a slot of ``buffers``, [layers, slots, ...] each."""
    size = sum(_aligned(buffer[:, :1].nbytes, ALIGNED) for buffer in buffers)
    return size if size < LARGE else _aligned(size, host_pages.ALIGNED)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def staged_slots(size: int) -> int:
    """Slots of so many bytes that a staging buffer has."""
    return max(STAGING_BYTES // size, 1)


@dataclass(eq=False)
class SavedSlots:
    """Slots in host memory. ``runs``: where, in the order in which they were saved."""

    runs: list[Run]

    @property
    def count(self) -> int:
        return sum(count for _, count in self.runs)


@dataclass(eq=False)
class Leaving:
    """Slots (int64 [n]) that are on their way to the host."""

    slots: torch.Tensor
    beside: Beside[None]

    def done(self) -> bool:
        """Whether they are there, as far as is known without waiting."""
        return self.beside.end is None or bool(self.beside.end.query())


class SlotStore:
    """Copies slots to host memory and back.

    Args:
        buffers: of the device, [layers, slots, ...] each. count: of slots for which the host has memory. in_parts: it
            is pinned as it is taken, and not at the start.

    Attributes:
        held: what is saved. bytes_out, bytes_in: copied so far, to the host and back.
    """

    def __init__(
        self, device: PageDevice, buffers: Sequence[torch.Tensor], count: int, ranks: Ranks, *, in_parts: bool = True
    ):
        self.device, self.ranks = device, ranks
        self.buffers = [buffer for buffer in buffers if buffer.numel()]
        self.slot_bytes, on_gpu = slot_bytes(self.buffers), device.state.pages.is_cuda
        self.host = HostPages(count, self.slot_bytes, pinned=on_gpu, in_parts=in_parts)
        if on_gpu and in_parts and not ranks.alone:
            self.host.pin_now(lambda slots: int(ranks.least(np.array([slots]))[0]))
        self.held: set[SavedSlots] = set()
        self.bytes_out = self.bytes_in = 0
        self._guest: SlotStore | None = None
        self._make_room: Callable[[int], None] | None = None
        self._leaving: dict[SavedSlots, Leaving] = {}
        self._out: torch.Tensor | None = None
        self._in: torch.Tensor | None = None
        if on_gpu:
            size = (staged_slots(self.slot_bytes), self.slot_bytes)
            self._out, self._in = (torch.empty(size, dtype=torch.uint8, device=device.state.device) for _ in range(2))

    def guest(self) -> SlotStore:
        """Another store in the same memory, which holds slots of its own."""
        if self._guest is None:
            self._guest = copy.copy(self)
            self._guest.held, self._guest._leaving = set(), {}
        return self._guest

    def share_memory(self, make_room: Callable[[int], None]) -> None:
        """``make_room`` has this store give back slots until so many are free for its guest, as far as possible."""
        self.guest()._make_room = make_room

    @property
    def staging_bytes(self) -> int:
        """Bytes of the device that slots pass through."""
        return sum(x.nbytes for x in (self._out, self._in) if x is not None)

    @property
    def bytes_held(self) -> int:
        """Of host memory, without what a guest holds."""
        return self._count_held * self.slot_bytes

    @property
    def _count_held(self) -> int:
        return sum(saved.count for saved in self.held)

    @property
    def bytes_most(self) -> int:
        return self.host.count * self.slot_bytes

    # To the host

    def save(self, slots: torch.Tensor) -> SavedSlots | None:
        """Copy slots (int64 [n]) to the host, beside the passes; None if it has no memory for them. Nobody may write to
        them before ``changing``."""
        saved = self.take(len(slots))
        if saved is not None:
            self._leaving[saved] = Leaving(slots, self.device.launch_beside(lambda: self.copy_out(saved, slots)))
        return saved

    def take(self, count: int) -> SavedSlots | None:
        """Host memory for so many slots, whose copy the caller launches; None if there is none. Others give back theirs
        only if that can be enough."""
        if self._make_room is not None and self.host.free < count <= self.host.count - self._count_held:
            self._make_room(count)
        runs = self.host.take(count)
        if runs is None:
            return None
        saved = SavedSlots(runs)
        self.held.add(saved)
        return saved

    def copy_now(self, saved: SavedSlots, slots: torch.Tensor) -> SavedSlots:
        """Copy slots (int64 [n]) to memory that was taken, beside the passes. What is launched from now on comes behind
        the copy: it may write to the slots, and restore. Raises torch.OutOfMemoryError; the memory may be dropped then.
        """
        self.device.join(self.device.launch_beside(lambda: self.copy_out(saved, slots)))
        return saved

    def copy_out(self, saved: SavedSlots, slots: torch.Tensor) -> None:
        """Copy slots (int64 [n]), on the stream beside the passes."""
        self.bytes_out += len(slots) * self.slot_bytes
        _read_here(slots)
        for first, host in self._parts(saved.runs, self._out):
            memory = host if self._out is None else self._out[: len(host)]
            for buffer, numbers in self._numbers(memory):
                torch.index_select(buffer, 1, slots[first : first + len(host)], out=numbers)
            if memory is not host:
                host.copy_(memory, non_blocking=True)

    def changing(self, slots: torch.Tensor) -> None:
        """The slots, as they were given to ``save``, are about to be given back: what is launched from now on comes
        behind their copy."""
        for leaving in self._leaving.values():
            if leaving.slots is slots:
                self.device.join(leaving.beside)

    def finish(self) -> None:
        """Take note of what is on the host by now, on all ranks. With several ranks all have to call it."""
        every = list(self._leaving.items())
        if not every:
            return
        late = self.ranks.largest(np.array([not leaving.done() for _, leaving in every], dtype=np.int64)).tolist()
        for saved, _ in itertools.islice(every, (late + [1]).index(1)):  # the others are behind it
            del self._leaving[saved]

    def ready(self, saved: SavedSlots) -> bool:
        """Whether it can be restored, as far as ``save`` has copied it."""
        return saved not in self._leaving

    # Back

    def restore(self, saved: SavedSlots, slots: torch.Tensor, start: int = 0) -> None:
        """What was saved from number ``start`` on goes to other slots (int64 [n]), in order with the passes."""
        runs = list(part_of(saved.runs, start, len(slots)))
        with self.device.launching(reads_pages=False):
            _read_here(slots)
            for first, host in self._parts(runs, self._in):
                memory = host if self._in is None else self._in[: len(host)].copy_(host, non_blocking=True)
                for buffer, numbers in self._numbers(memory):
                    buffer.index_copy_(1, slots[first : first + len(host)], numbers)
        self.bytes_in += len(slots) * self.slot_bytes

    def _parts(self, runs: list[Run], staging: torch.Tensor | None) -> Iterator[tuple[int, torch.Tensor]]:
        return parts_of(self.host, runs, self.host.pages.shape[0] if staging is None else len(staging))

    def _numbers(self, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each buffer, and where its numbers of n slots lie in ``memory`` ([n, slot_bytes]): [layers, n, ...]."""
        at = 0
        for buffer in self.buffers:
            shape = (buffer.shape[0], *buffer.shape[2:])
            size = buffer[:, :1].nbytes
            numbers = memory[:, at : at + size].view(buffer.dtype)
            yield buffer, numbers.unflatten(1, shape).transpose(0, 1)
            at += _aligned(size, ALIGNED)

    # The end

    def drop(self, saved: SavedSlots) -> None:
        """Nobody wants it any more. What is being copied is copied before its memory is written again."""
        leaving = self._leaving.pop(saved, None)
        if leaving is not None:
            self.device.join(leaving.beside)
        self.held.remove(saved)
        self.host.give(saved.runs)

    def drop_all(self) -> None:
        for saved in list(self.held):
            self.drop(saved)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each host slot is free, or of one that is saved."""
        others = set() if self._guest is None else self._guest.held
        self.host.check_integrity([run for saved in (*self.held, *others) for run in saved.runs])
        assert self._leaving.keys() <= self.held, "slots that nobody holds are on their way"


def _read_here(slots: torch.Tensor) -> None:
    """The current stream reads a tensor of another one, whose memory is not given out again before that."""
    if slots.is_cuda:
        slots.record_stream(torch.cuda.current_stream())
