"""The soak's load: an endless random mix of requests, drawn from a seed.

Kinds: ``reference`` questions with known answers, ``filler`` text of any length, ``prefix`` groups that begin alike,
``chat`` turns that repeat all that was said before, ``turns`` of a few tokens in long chats, ``samples`` (several
replies of one prompt), ``invalid`` requests. Request ids and ``extra_key`` are chosen to look like names of a server's
own, and like one another's.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.evaluate.tasks.generation import Example

WEIGHTS = {
    "reference": 0.25,
    "filler": 0.25,
    "prefix": 0.15,
    "chat": 0.1,
    "turns": 0.1,
    "samples": 0.1,
    "invalid": 0.05,
}
NAMED_SHARE = 0.3
"""Of the requests, those with an ``extra_key``."""
DISCONNECT, ASK = "disconnect", "abort_request"
WRONG_FIELDS: list[tuple[str, Any]] = [("temperature", -1.0), ("top_p", 7.0), ("regex", "((")]
LONGEST_REPLY = 640
"""Tokens of a reference question's or a chat's reply at most."""


@dataclass(frozen=True)
class Abort:
    """How the client ends a request itself: ``how``, and after how many seconds, or tokens of a streamed reply."""

    how: str
    seconds: float | None = None
    tokens: int | None = None


@dataclass
class Chat:
    """A conversation: all its tokens so far."""

    ids: list[int] = field(default_factory=list)


@dataclass
class Order:
    """One request to send.

    Attributes:
        exact: the reply must have ``new_tokens`` tokens; else it may end earlier.
        wrong: fields that make it invalid: the server must refuse it.
        question: index of the reference question, None for other kinds.
        chat: of a turn. short: whether it is one of short turns.
        rid: its id; empty: the client chooses one. extra_key: its namespace in the prefix cache.
    """

    kind: str
    ids: list[int]
    new_tokens: int
    exact: bool = True
    stream: bool = False
    samples: int = 1
    temperature: float = 0.0
    abort: Abort | None = None
    wrong: dict[str, Any] = field(default_factory=dict)
    question: int | None = None
    chat: Chat | None = None
    short: bool = False
    rid: str = ""
    extra_key: str | None = None

    def payload(self, rid: str) -> dict[str, Any]:
        """The body for ``/generate``."""
        parameters = {"temperature": self.temperature, "max_new_tokens": self.new_tokens, "ignore_eos": self.exact}
        if self.samples > 1:
            parameters["n"] = self.samples
        body: dict[str, Any] = {"input_ids": self.ids, "sampling_params": parameters, "stream": self.stream}
        if self.samples == 1:
            body["rid"] = rid
        if self.extra_key is not None:
            body["extra_key"] = self.extra_key
        parameters.update(self.wrong)
        return body


@dataclass(frozen=True)
class Limits:
    """Sizes in tokens: the model's ``context``, the pool's ``room``, the longest ``prompt`` and ``reply`` to draw."""

    context: int
    room: int
    prompt: int
    reply: int

    @classmethod
    def of(cls, context: int, room: int, reply: int = 512) -> Limits:
        """Every valid request takes well below the pool, so that it can run at least alone."""
        return cls(context, room, min(context, room) * 4 // 10, min(reply, min(context, room) // 6))


class Load:
    """Draws orders. ``references`` are the prompts of the reference questions, ``text`` tokens to cut fillers from."""

    def __init__(
        self,
        seed: int,
        limits: Limits,
        references: Sequence[list[int]],
        openings: Sequence[list[int]],
        text: Sequence[int],
        *,
        abort_share: float = 0.2,
    ):
        self.draw = random.Random(seed)
        self.limits, self.references, self.openings, self.text = limits, references, openings, text
        self.abort_share = abort_share
        self.typical = 5.0
        """Seconds that requests took of late; aborts are spread over them."""
        self._pending: deque[int] = deque()
        self._idle_chats: list[Chat] = []
        self._short_chats: list[Chat] = []
        self._drawn = 0
        self._prefixes = [self._slice(self._length(64, limits.prompt // 2)) for _ in range(6)]

    def next(self) -> Order:
        """The next request."""
        (kind,) = self.draw.choices([*WEIGHTS], [*WEIGHTS.values()])
        order: Order = getattr(self, f"_{kind}")()
        self._drawn += 1
        if kind != "reference":
            self._name(order)
        order.stream = order.stream or self.draw.random() < 0.5
        if kind not in ("reference", "invalid") and self.draw.random() < self.abort_share:
            order.abort = self._abort(order)
        return order

    def _name(self, order: Order) -> None:
        """Ids are numbers, and keys name the ids of others, as a server might."""
        order.rid = f"{self._drawn:08d}"  # of one width: SGLang aborts all whose ids begin with the given one
        if not order.short and self.draw.random() < NAMED_SHARE:
            other = f"{max(self._drawn - self.draw.randrange(8), 0):08d}"
            keys = ["None", "tenant", f"None\0retracted {other}", f"tenant\0retracted {other}", f"retracted {other}"]
            order.extra_key = self.draw.choice(keys)

    def give_back(self, order: Order, reply: Sequence[int] | None) -> None:
        """A request has ended; ``reply`` has the tokens of its one answer, None if it was not answered."""
        if order.question is not None and reply is None:
            self._pending.appendleft(order.question)
        if order.chat is not None and reply is not None:
            order.chat.ids = [*order.ids, *reply]
        if order.chat is not None and len(order.chat.ids) < self.limits.prompt * 3 // 4:
            (self._short_chats if order.short else self._idle_chats).append(order.chat)

    def reference(self, question: int) -> Order:
        """The reference question of that index."""
        ids = self.references[question]
        longest = min(LONGEST_REPLY, self.limits.context - len(ids) - 1, self.limits.room // 3)
        return Order("reference", ids, longest, exact=False, question=question)

    def _reference(self) -> Order:
        if not self._pending:
            self._pending.extend(self.draw.sample(range(len(self.references)), len(self.references)))
        return self.reference(self._pending.popleft())

    def _filler(self) -> Order:
        return Order("filler", self._slice(self._length(4, self.limits.prompt)), self._length(16, self.limits.reply))

    def _prefix(self) -> Order:
        at = self.draw.randrange(len(self._prefixes))
        if self.draw.random() < 0.05:
            self._prefixes[at] = self._slice(self._length(64, self.limits.prompt // 2))
        ids = [*self._prefixes[at], *self._slice(self._length(2, 80))]
        return Order("prefix", ids, self._length(8, self.limits.reply))

    def _chat(self) -> Order:
        chat = Chat()
        if self._idle_chats and self.draw.random() < 0.75:
            chat = self._idle_chats.pop(self.draw.randrange(len(self._idle_chats)))
        ids = [*chat.ids, *self.draw.choice(self.openings)]
        return Order("chat", ids, min(256, self.limits.reply), exact=False, chat=chat)

    def _turns(self) -> Order:
        chat = Chat()
        if self._short_chats and (len(self._short_chats) > 2 or self.draw.random() < 0.9):
            chat = self._short_chats.pop(self.draw.randrange(len(self._short_chats)))
        ids = [*chat.ids, *self._slice(self.draw.randint(1, 8))]
        return Order("turns", ids, self.draw.randint(1, 6), chat=chat, short=True)

    def _samples(self) -> Order:
        ids = self._slice(self._length(16, self.limits.prompt // 3))
        temperature = self.draw.choice([0.0, 0.8])
        reply = self._length(8, self.limits.reply // 2)
        return Order("samples", ids, reply, samples=self.draw.randint(2, 4), temperature=temperature)

    def _invalid(self) -> Order:
        order = Order("invalid", self._slice(self._length(4, 64)), 16)
        kind = self.draw.randrange(5)
        if kind == 0:
            order.ids = self._slice(min(self.limits.context, self.limits.room) + self.draw.randint(1, 400))
        elif kind == 1:
            order.new_tokens = self.limits.context
        else:
            field_name, value = WRONG_FIELDS[kind - 2]
            order.wrong = {field_name: value}
        return order

    def _abort(self, order: Order) -> Abort:
        how = DISCONNECT if order.samples > 1 else self.draw.choice([DISCONNECT, ASK])
        if order.stream and self.draw.random() < 0.5:
            return Abort(how, tokens=self.draw.randint(1, order.new_tokens))
        return Abort(how, seconds=self.draw.uniform(0.0, self.typical))

    def _length(self, least: int, most: int) -> int:
        """Log-uniform, in tokens."""
        return round(math.exp(self.draw.uniform(math.log(least), math.log(max(least, most)))))

    def _slice(self, length: int) -> list[int]:
        start = self.draw.randrange(len(self.text))
        ids = [*self.text[start : start + length]]
        while len(ids) < length:
            ids += self.text[: length - len(ids)]
        return ids


LONGEST_QUESTION, LONGEST_ANSWER = 2000, 500
"""Characters of a reference question and of its worked answer at most: many small ones say more than a few that fill
the pool."""


def choose(items: Sequence[Example], count: int, seed: int) -> list[Example]:
    """Reference questions: three quarters of single ones, the rest in groups of eight that share a prefix."""
    items = [x for x in items if len(x.prompt) <= LONGEST_QUESTION and len(x.reply) <= LONGEST_ANSWER]
    shared = [x for group in reference.groups(items).values() for x in group[:8]][: count // 4 // 8 * 8 or count // 4]
    levels, exclude = ["easy", "medium"], ["chain", "vars", "fewshot_shared"]
    single = reference.select(items, levels=levels, exclude=exclude, n=count - len(shared), seed=seed)
    return single + shared
