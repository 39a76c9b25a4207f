"""What is asked of the optional parts around a prefix cache. Each class here stands for a server without the part: it
gives the answers that hold then.

This module, ``events.py`` and ``interface.py`` are what scheduling knows of ``tree/``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_diffkv.mem_pool.growth import Expected
from sglang_diffkv.srt.tree.events import RequestListener

MOST_PARTS = 64
"""A path of more parts is joined where that costs nobody anything: each part takes launches of its own to be read."""


class NodeStates(RequestListener):
    """States that nodes have at their end; here layers have none, and a match may end anywhere.

    Attributes:
        of_nodes: state slots (int64 [1]) of the nodes that have one.
    """

    of_nodes: Mapping[Any, torch.Tensor] = {}

    def match_end(self, req: Any, node: Any, most: int, served: Callable[[Any], int]) -> int:
        """Position where a match ends whose key has ``most`` tokens.

        Args:
            req: SGLang's request; None if the match is for none.
            node: where its longest prefix in the tree ends.
            served: up to which position a row may read the path to a node.
        """
        return served(node)

    def may_end(self, node: Any) -> bool:
        """Whether a match may end with the node."""
        return True

    def last(self, node: Any) -> Any:
        """The last node on the path to ``node`` that a request may go on from."""
        return node

    def used(self, node: Any) -> None:
        """A request waits that will go on from ``node``, or from a node before it."""

    def take_slot(self) -> torch.Tensor | None:
        """A slot (int64 [1]) for a state that comes back; None if there is none that the tree may give."""
        return None

    def give_slot(self, slot: torch.Tensor) -> None:
        """Nothing came to a slot that was taken."""

    def came_back(self, node: Any, slot: torch.Tensor) -> None:
        """The state behind ``node`` is in a slot that was taken."""

    def drop(self, node: Any) -> None:
        """The node leaves the tree."""

    def report(self) -> dict[str, int]:
        """For ``/server_info``."""
        return {}

    def reports(self) -> dict[str, dict[str, int]]:
        return {"states": self.report()}

    def check_nodes(self, nodes: set[Any]) -> None:
        """Raise AssertionError unless each state has one of the tree's ``nodes``."""


class SessionRule(RequestListener):
    """Which nodes sessions refer to; here they refer to none. ``session`` is an id that a client chose."""

    def open(self, session: str) -> int:
        """A session begins, perhaps anew. Its generation."""
        return 0

    def generation(self, session: str) -> int:
        """That of the session, which is opened if it is not."""
        return 0

    def close(self, session: str) -> None:
        """The session refers to nothing any more."""

    def referenced(self, node: Any) -> bool:
        """Whether a session refers to the path through the node."""
        return False

    def split(self, parent: Any, child: Any) -> None:
        """The first tokens of the node ``child`` are a node of their own, ``parent``, from now on."""

    def gone(self, node: Any) -> None:
        """A leaf is about to leave the tree."""

    def check_nodes(self, nodes: set[Any]) -> None:
        """Raise AssertionError unless references are to the tree's ``nodes``."""


class KeepRule(RequestListener):
    """Which prefixes requests ask to keep; here none may be."""

    def report(self) -> dict[str, object]:
        """For ``/server_info``."""
        return {}


class PathRule(RequestListener):
    """Whether small segments of a path become one; here they do not.

    Attributes:
        joined: paths joined so far. settled: earlier turns that were compressed.
    """

    joined = settled = 0

    def settle(self, node: Any, length: int) -> None:
        """A prompt of ``length`` tokens has come, whose path in the tree ends at ``node``."""

    def join(self, node: Any, *, evict: bool) -> bool:
        """Join parts of the path to ``node`` that take more table entries than their tokens need. False if none are.

        Args:
            evict: whether what nobody reads may be evicted to make room.
        """
        return False


class ExactRule(RequestListener):
    """Whether the prefix cache keeps prompts exactly; here it keeps none so.

    Attributes:
        keeps_prompts: whether it does. outcomes: prompts so far, by what was done with them; empty where the page
            manager counts them.
    """

    keeps_prompts = False
    outcomes: Mapping[str, int] = {}

    def joins(self, row: int) -> bool:
        """Whether the prefix cache may take the tokens of a request that ends."""
        return True

    def prefix_given_up(self) -> None:
        """A request holds nothing of the prefix cache any more, though it runs on."""


class PrefixSource(RequestListener):
    """What is kept of tokens that the tree has lost, and comes back when SGLang admits a request; here nothing is kept.
    A match asks all sources, in the order of ``Parts.sources``. The first that brings something back answers.
    """

    def expect(self, tokens: Callable[[], Iterable[Expected]]) -> None:
        """``tokens`` tells from now on what running requests are expected to generate yet."""

    def tell_events(self, store: Callable[..., None], remove: Callable[..., None]) -> None:
        """``store``, ``remove``: SGLang's ways to record that a node has come to a medium, or gone from it."""

    # Of the tree's nodes

    def came(self, node: Any) -> None:
        """A node was inserted, with a segment of its own."""

    def settled(self, node: Any) -> None:
        """The earlier turns whose segment a node names take fewer pages from now on."""

    def leaving(self, nodes: list[Any]) -> None:
        """Nodes of one segment are about to be evicted, the first of them a leaf."""

    def state_came(self, node: Any) -> None:
        """A node got a state."""

    def state_leaving(self, node: Any) -> None:
        """A node of the tree is about to lose its state alone."""

    def state_changing(self, slot: torch.Tensor) -> None:
        """The slot of a node's state (int64 [1]) is about to be given back."""

    def used(self, key: Any) -> None:
        """A request waits for what is kept of SGLang's RadixKey ``key``."""

    # Of requests

    @contextmanager
    def admitting(self, req: Any) -> Iterator[None]:
        """Inside, SGLang matches the request that it admits next."""
        yield

    def match(self, params: Any) -> Any:
        """The match (SGLang's MatchResult) of the request that is being admitted, with what came back of it. None if
        nothing is kept of it, or of another request."""
        return None

    def waits_for(self, req: Any) -> bool:
        """Whether a request that was just matched waits for what is on its way to it. Others are admitted meanwhile."""
        return False

    @contextmanager
    def retracting_all(self) -> Iterator[None]:
        """Inside, SGLang retracts all requests for a pause, with the promise that they are computed again."""
        yield


class Restoring(PrefixSource):
    """What becomes of retracted requests; here they are computed again."""

    def waits_for_room(self, req: Any) -> float | None:
        """High-tier tokens for which a request waits to be restored; None if it does not."""
        return None

    @contextmanager
    def results_come(self, reqs: Sequence[Any], tokens: Callable[[], Sequence[int]] | None) -> Iterator[None]:
        """Inside, SGLang looks at the results of a pass of ``reqs``. ``tokens``: what it sampled for each of them; None
        behind a pass over prompts."""
        yield

    def reads_alone(self, req: Any) -> bool:
        """Whether the request has matched a restored prefix that no other finds."""
        return False


class NodeListener:
    """Who is told of nodes that requests may find; here nobody is."""

    def end_came(self, node: Any) -> None:
        """A node was inserted, or got a state."""

    def end_went(self, node: Any) -> None:
        """A node lost its state or a child."""

    def ends_changed(self, node: Any) -> None:
        """Of the node and those behind it, other ones than before may be found: none more, perhaps fewer."""

    def gone(self, node: Any) -> None:
        """A node has left the tree, or is not found any more."""

    def split(self, parent: Any, child: Any) -> None:
        """The first tokens of the node ``child`` are a node of their own, ``parent``, from now on."""


@dataclass(frozen=True)
class Parts:
    """The optional parts of a server, each as it is without it unless given.

    Attributes:
        compression: who compresses running requests that hold a budget. kept_elsewhere: who keeps what the tree evicts.
    """

    compression: RequestListener = field(default_factory=RequestListener)
    states: NodeStates = field(default_factory=NodeStates)
    sessions: SessionRule = field(default_factory=SessionRule)
    kept: KeepRule = field(default_factory=KeepRule)
    exact: ExactRule = field(default_factory=ExactRule)
    joiner: PathRule = field(default_factory=PathRule)
    retracted: Restoring = field(default_factory=Restoring)
    kept_elsewhere: tuple[PrefixSource, ...] = ()

    @property
    def sources(self) -> tuple[PrefixSource, ...]:
        """Those that bring back what the tree has lost."""
        return self.retracted, *self.kept_elsewhere

    @property
    def listeners(self) -> Sequence[RequestListener]:
        """All of them, in the order in which they hear of events."""
        first = self.compression, self.states, self.sessions, self.kept
        return *first, self.exact, self.joiner, *self.sources
