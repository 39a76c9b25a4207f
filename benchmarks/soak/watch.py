"""Looks at a server under load from outside: queue, pages, memory of its processes, what its log says."""

from __future__ import annotations

import asyncio
import re
import time
from statistics import linear_regression
from typing import Any

import aiohttp
import psutil

MIB = 2**20
WRONG_IN_LOG = re.compile(
    r"Traceback|Leak Detected|memory leak detected|double free|use-after-free|AssertionError|"
    r"Out of memory even after|pool of pages was empty|watchdog timeout",
    re.IGNORECASE,
)
"""Lines that no log may have."""

Sample = dict[str, Any]


def resident(pid: int | None) -> dict[str, float]:
    """Resident memory in MiB of a server's processes by role; the main process is ``http``. Nothing of a server that
    was not started here, whose ``pid`` is None."""
    if pid is None:
        return {}
    main = psutil.Process(pid)
    found: dict[str, float] = {}
    for process in [main, *main.children(recursive=True)]:
        try:
            title = " ".join(process.cmdline())
            size = process.memory_info().rss / MIB
        except psutil.Error:
            continue
        role = "http" if process.pid == pid else title.partition("sglang::")[2].split(" ")[0]
        if role:
            found[role] = found.get(role, 0.0) + size
    return found


def pages(stats: dict[str, Any] | None) -> Sample:
    """What of DiffKV's figures belongs in a sample."""
    if stats is None:
        return {}
    return {"segments": stats["segments"], "faults": stats.get("faults"), **stats["owners"]}


class Watch:
    """Samples of one server, in the order taken. ``time`` counts seconds from ``start``."""

    def __init__(self, url: str, pid: int | None, session: aiohttp.ClientSession):
        self.url, self.pid, self.session = url, pid, session
        self.start = time.monotonic()
        self.samples: list[Sample] = []

    async def look(self, **more: Any) -> Sample:
        """Take a sample; ``more`` is added to it. Raises aiohttp.ClientError if the server does not answer."""
        sample: Sample = {"time": round(time.monotonic() - self.start, 1), **more}
        sample |= await self.queue()
        sample |= pages(await self.stats())
        sample["rss"] = {role: round(size, 1) for role, size in resident(self.pid).items()}
        self.samples.append(sample)
        return sample

    async def stats(self) -> dict[str, Any] | None:
        """The ``diffkv`` entry of ``/server_info``, None of a server without it."""
        async with self.session.get(f"{self.url}/server_info") as response:
            found = await response.json()
        return (found.get("internal_states") or [{}])[0].get("diffkv")

    async def queue(self) -> dict[str, int]:
        """Requests that run and that wait."""
        async with self.session.get(f"{self.url}/v1/loads") as response:
            response.raise_for_status()
            loads = (await response.json())["loads"]
        return {name: sum(x[f"num_{name}_reqs"] for x in loads) for name in ("running", "waiting")}

    async def idle(self, patience: float) -> bool:
        """Wait until nothing runs or waits, ``patience`` seconds at most; whether it came to that."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not any((await self.queue()).values()):
                return True
            await asyncio.sleep(0.5)
        return False


def slope(times: list[float], values: list[float]) -> float:
    """Least-squares slope of values over time, per unit of time; 0 of less than two times."""
    return linear_regression(times, values).slope if len(set(times)) > 1 else 0.0


def growth(samples: list[Sample]) -> dict[str, float]:
    """MiB a minute by which each process grew in the second half of the samples, when all is warm."""
    late = samples[len(samples) // 2 :]
    times = [x["time"] / 60 for x in late]
    return {role: slope(times, [x["rss"][role] for x in late]) for role in sorted(late[0]["rss"])} if late else {}


def wrong_lines(log: str, most: int = 20) -> list[str]:
    """Lines of a server's log that must not be there."""
    return [line.strip()[:300] for line in log.splitlines() if WRONG_IN_LOG.search(line)][:most]
