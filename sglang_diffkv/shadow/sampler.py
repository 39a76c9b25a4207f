"""Samples wait here, some at most, for threads that judge them. Who puts one in never waits."""

from __future__ import annotations

import logging
import queue
import threading

from sglang_diffkv.shadow.exchange import Exchange, LeftOut
from sglang_diffkv.shadow.judge import Judge
from sglang_diffkv.shadow.tally import Tally

logger = logging.getLogger(__name__)


class Sampler:
    """Judges exchanges beside whatever else runs.

    Args:
        most: exchanges that wait at most; others are left out. threads: how many are judged at once.
    """

    def __init__(self, judge: Judge, tally: Tally, *, most: int, threads: int = 1):
        self.judge, self.tally = judge, tally
        self._waiting: queue.Queue[Exchange | None] = queue.Queue(most)
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def offer(self, exchange: Exchange) -> None:
        """Judge it, unless too many wait already. Never waits."""
        try:
            self._waiting.put_nowait(exchange)
        except queue.Full:
            self.tally.leave_out("queue_full")
            return
        self.tally.wait(1)

    def put(self, exchange: Exchange) -> None:
        """Judge it; waits while too many wait."""
        self._waiting.put(exchange)
        self.tally.wait(1)

    def finish(self) -> None:
        """Wait until all that wait are judged. Nothing is taken afterwards."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (exchange := self._waiting.get()) is not None:
            self.tally.wait(-1)
            try:
                self.tally.add(self.judge.judge(exchange))
            except LeftOut as error:
                self.tally.leave_out(error.reason)
            except Exception as error:  # it must not end the thread, and its text may quote a prompt
                logger.error("sglang_diffkv.shadow: a sample was not judged: %s", type(error).__name__)
                self.tally.leave_out("failed")
