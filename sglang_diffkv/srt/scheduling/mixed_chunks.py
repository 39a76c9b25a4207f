"""Mixed chunks (``--enable-mixed-chunk``): in a pass over prompts SGLang lets running requests decode too, so that
they do not wait for it.

SGLang prepares the prompts first, then takes all that run into their pass, without asking whether their next tokens fit
as it does before a decode step. Here it asks: where they do not, the pass is one over prompts alone, and requests are
retracted before the next decode step, as without mixed chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglang_diffkv.mem_pool.counts import PageCounts


class MixedChunks:
    """Whether those that run decode in the pass over prompts that SGLang is preparing.

    Attributes:
        passes: over prompts in which others decoded. left_out: those in which they did not for want of room.
        decoding: requests that decode in the pass that was scheduled last, if it is one over prompts. SGLang's running
            batch is without them until it schedules the next.
    """

    def __init__(self, counts: PageCounts):
        self.counts = counts
        self.passes = self.left_out = 0
        self.decoding: list[Any] = []
        self._scheduler: Any = None
        self._running: Any = None

    @contextmanager
    def scheduling(self, scheduler: Any, running: Any) -> Iterator[None]:
        """Inside, SGLang's ``scheduler`` may prepare a pass over prompts, with what ``running`` decodes in it.

        A prompt of several chunks that has begun goes on in each pass, in what those that run leave of a chunk. Where
        that is nothing, the pass is one over prompts alone.
        """
        mixes = scheduler.is_mixed_chunk
        self._scheduler, self._running, self.decoding = scheduler, running, []
        if mixes and scheduler.chunked_req is not None and len(running.reqs) >= scheduler.chunked_prefill_size:
            scheduler.is_mixed_chunk = False
            self.left_out += 1
        try:
            yield
        finally:
            scheduler.is_mixed_chunk = mixes
            self.counts.wait_for_device(True)
            self._scheduler = self._running = None

    def prompts_planned(self) -> None:
        """A pass over prompts is planned: may requests decode in it? What the device has counted since it was is for
        the next pass to know: to wait for that is to wait for the pass that runs."""
        running = self._running
        if running is None or not self._scheduler.is_mixed_chunk or running.is_empty():
            return
        self.counts.wait_for_device(False)
        if not running.check_decode_mem():
            self._scheduler.is_mixed_chunk = False
            self.left_out += 1

    def joins(self, reqs: Sequence[Any]) -> bool:
        """Whether the decode step of ``reqs`` that is planned now is part of a pass over prompts; it counts then."""
        joins = self._running is not None and self.counts.upcoming is not None
        if joins:
            self.passes += 1
            self.decoding = list(reqs)
        return joins

    def report(self) -> dict[str, int]:
        """For ``/server_info``."""
        return {"passes": self.passes, "left_out": self.left_out}
