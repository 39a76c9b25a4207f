"""How many requests run that hold a budget, step by step and without a model: lengths alone decide.

The load is that of ``benchmarks.serving.stationary``, with two admissions: by the sum of what each request may hold,
and by what all hold together (``mem_pool/joint_growth.py``). Compressions come up to ``DELAY`` steps late, by chance.
Example:

    python -m benchmarks.serving.budget_model --capacity 62048 --max-blocks 8

prints, for each, the mean of running requests and the fullest that the pool was.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_diffkv.mem_pool.joint_growth import DELAY, Outlook, Saw, peak_growth
from sglang_diffkv.policies.zipage import HYBRID_SLOTS

GOLDEN = 0.6180339887
EXPECTED = 0.7 * 0.14
"""Of the tokens that a request may still generate, those that SGLang expects when nothing was retracted for long."""
CLIP = 4096
"""Tokens of a reply that SGLang looks at when it admits."""


@dataclass(frozen=True)
class Load:
    """A pool of ``capacity`` tokens, requests of ``prompt`` and ``reply`` tokens that hold ``keep`` to ``limit``, and
    at most ``most`` of them. ``joint``: admission by what they hold together."""

    capacity: int
    prompt: int
    reply: int
    keep: int
    limit: int
    page: int = 32
    most: int = 128
    joint: bool = True
    slots: int = 9
    queries: int = 16
    seed: int = 0
    apart: int = 4
    spread: float = 0.0

    @property
    def saw(self) -> Saw:
        period, free = self.limit - self.keep, -self.keep % self.page
        return Saw(period, free, self.page, 0, slots=self.slots, queries=self.queries)


@dataclass
class Life:
    """A running request. The prefix cache has its prompt until the first compression, which takes pages for what stays
    of that."""

    load: Load
    prompt: int
    left: int
    late: int
    made: int = 0
    waits: int = 0
    shared: bool = True
    kept: int = field(init=False)

    def __post_init__(self) -> None:
        self.kept = min(self.prompt, self.load.keep)

    @property
    def held(self) -> int:
        return self.kept + self.made

    @property
    def pages(self) -> int:
        page = self.load.page
        free = 0 if self.shared else -self.kept % page
        return -(-self.kept // page) + max(-(-(self.made - free) // page), 0)

    def taken(self, made: int) -> int:
        """Pages that a compression behind ``made`` tokens takes for the moment."""
        page = self.load.page
        return max(-(-self.load.keep // page) - -(-made // page), 0) if self.shared else 0

    def outlook(self, *, waits: bool = False) -> Outlook:
        """``waits``: its prompt is yet to run."""
        load = self.load
        free = 0 if self.shared else -self.kept % load.page
        due, kept = max(load.limit - self.held, 0), -(-load.keep // load.page)
        prompt = -(-self.prompt // load.page) if waits else self.pages
        free, taken = (free - self.made) % load.page, self.taken(self.made + due)
        return Outlook(prompt, self.pages, free, kept, due, self.left, self.left, taken)

    def step(self) -> int:
        """Generate a token, and be compressed if it is time. Pages that are held for the moment."""
        self.made, self.left = self.made + 1, self.left - 1
        most = self.pages
        if self.held < self.load.limit:
            return most
        if self.waits < self.late:
            self.waits += 1
            return most
        most += self.taken(self.made)
        self.kept, self.made, self.waits, self.shared = self.load.keep, 0, 0, False
        return most


@dataclass
class Seen:
    """Of each step: requests that ran, and the fullest that the pool was, in pages of a head."""

    running: list[int] = field(default_factory=list)
    fullest: int = 0


def run(load: Load, steps: int) -> Seen:
    """Fill the pool with requests in the midst of their replies, and admit one whenever there is room. Nothing is
    retracted: ``Seen.fullest`` tells whether it would have to be."""
    draw, seen = random.Random(load.seed), Seen()
    running: list[Life] = []
    room, started = load.capacity // load.page, 0
    filling = True
    for step in range(steps):
        while len(running) < load.most and not (filling and step % load.apart):
            reply = int(load.reply * (1 + load.spread * (2 * draw.random() - 1)))
            done = int(reply * (0.5 + GOLDEN * started) % reply) if filling else 0
            new = Life(load, load.prompt + done, reply - done, draw.randrange(DELAY))
            if not _fits(load, running, new, room):
                filling = False
                break
            running.append(new)
            started += 1
            if filling:
                break
        seen.running.append(len(running))
        before = sum(x.pages for x in running)
        for request in running:
            begun = request.pages
            seen.fullest = max(seen.fullest, before - begun + request.step())
            before += request.pages - begun
        running = [x for x in running if x.left > 0]
    return seen


def _fits(load: Load, running: Sequence[Life], new: Life, room: int) -> bool:
    used = sum(x.pages for x in running)
    needed = -(-new.prompt // load.page)
    if load.joint:
        found = [x.outlook() for x in running]
        return not running or used + needed + peak_growth(load.saw, [*found, new.outlook(waits=True)]) <= room
    growth = sum(min(min(x.left, CLIP) * EXPECTED, load.limit - x.held) for x in running if x.held < load.limit)
    growth += min(new.left, load.limit - new.held)
    copy = -(-load.keep // load.page) + 1  # set aside at all times
    return used + needed + copy + growth / load.page <= room


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=62048, help="tokens that fit")
    parser.add_argument("--max-blocks", type=int, default=8)
    parser.add_argument("--block", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--reply", type=int, default=8192)
    parser.add_argument("--max-running", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20000)
    args = parser.parse_args()
    limit = args.max_blocks * args.block
    for joint in (False, True):
        keep, most = limit - args.block, args.max_running
        slots = max(1, round(HYBRID_SLOTS * min(args.capacity / keep, most)))
        load = Load(args.capacity, args.prompt, args.reply, keep, limit, most=most, joint=joint, slots=slots)
        seen = run(load, args.steps)
        settled = seen.running[args.steps // 4 :]
        name = "together" if joint else "one by one"
        print(
            f"admitted {name}: {sum(settled) / len(settled):.1f} running on average, {max(settled)} at most, "
            f"the pool {seen.fullest * load.page / load.capacity:.1%} full at most"
        )


if __name__ == "__main__":
    main()
