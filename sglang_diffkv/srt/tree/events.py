"""Events of a request's life, to which optional parts listen.

``RequestListener`` does nothing at any event. Each optional part overrides the events that concern it. ``parts.py`` has
the few questions that need an answer from one part.

Listeners hear each event in this order (``Parts.listeners``):

1. ``CompressionScheduler`` (scheduling), where requests hold a budget;
2. ``KeptStates``, of a model with layers that do not attend;
3. ``SessionRefs``, where sessions refer to what they have left;
4. ``KeptPrefixes``, where requests may ask for that;
5. ``ExactPrompts``, with exact prefix fidelity;
6. ``PathJoiner``, where there is a prefix cache;
7. ``Retracted``, where retracted requests go to host memory;
8. others that bring back what the tree has evicted (``Parts.kept_elsewhere``).

The scheduler's events come from ``scheduling/lifecycle.py``. Those of publication and ``reset`` come from the tree,
which SGLang calls. ``startup/wiring.py`` makes the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.srt.versions import compat


class RequestListener:
    """Hears of events in the order in which they are listed here; ``req`` is SGLang's request.

    Attributes:
        refuses: an error in ``chunk_planned`` ends that request alone, on several ranks too, since all ranks meet it.
            Of other listeners that holds on one rank: ranks that do not all meet an error would part.
    """

    refuses: ClassVar[bool] = False

    # Before anything is scheduled

    def queue_seen(self, waiting: Iterable[Any]) -> None:
        """The requests that wait now."""

    def scheduling_begins(self) -> None:
        """SGLang is about to choose the next pass."""

    def does_not_fit_alone(self, req: Any) -> None:
        """The request was refused though nothing runs."""

    # A pass

    def prefill_begins(self, reqs: Sequence[Any]) -> None:
        """SGLang is about to prepare the next chunks of ``reqs``."""

    def prompt_begun(self, req: Any, row: int, *, alone: bool) -> None:
        """The row refers to the prefix that the request has matched. ``alone``: it was restored for this request."""

    def chunk_planned(self, req: Any, row: int, end: int, *, ends: bool, alone: bool) -> None:
        """The planned pass computes the row's prompt up to position ``end``. ``ends``: that is all of it. ``alone``: as
        above."""

    def decode_begins(self, batch: Any) -> None:
        """SGLang is about to prepare a decode step of its ``batch``."""

    def pass_launched(self) -> None:
        """The planned pass is on the stream, and no other behind it."""

    # Behind a pass

    def results_out(self, reqs: Sequence[Any]) -> None:
        """The results of a pass are out. ``reqs``: those of its requests that run on."""

    def runs_on(self, reqs: Sequence[Any]) -> None:
        """Behind ``results_out`` of all listeners: all requests that run on, whether or not they were in the pass."""

    def results_processed(self, scheduler: Any) -> None:
        """SGLang's ``scheduler`` has done all that follows from the results."""

    # Publication

    def letting_go(self, row: int) -> None:
        """The row is about to be shared or given up."""

    def published(self, req: Any, row: int, leaf: Any, length: int, *, ended: bool) -> None:
        """The prefix cache has taken the row's tokens up to its node ``leaf``, where ``length`` of them end. ``ended``:
        the request has ended."""

    def prompt_published(self, req: Any) -> None:
        """SGLang has had its chance to insert the prompt."""

    # The end

    def retracting(self, req: Any) -> None:
        """SGLang is about to retract the request, which still has its row."""

    def row_released(self) -> None:
        """A row has given up its pages."""

    def left(self, req: Any, row: int) -> None:
        """The request has given up its row: it has finished, or was retracted or aborted."""

    # Of a server

    def weights_change(self) -> None:
        """The model's weights are about to change."""

    def reset(self) -> None:
        """The prefix cache is about to be emptied."""

    # Reports and checks

    def reports(self) -> Mapping[str, Mapping[str, float]]:
        """For ``/server_info`` and the metrics: what the part tells, by the names under which it stands there."""
        return {}

    def check_integrity(self) -> None:
        """Raise AssertionError unless what the part holds agrees with the rest."""

    def digest(self) -> Any:
        """What ranks have to agree on."""
        return None


def let_go(listeners: Iterable[RequestListener], manager: PageManager, req: Any, row: int) -> None:
    """The request's row is about to be shared or given up. What is known of it by then counts: of a verification whose
    results are just being looked at, too. Nothing beside the passes reads the row any more."""
    for part in listeners:
        part.letting_go(row)
    if manager.drafts:
        manager.know_committed(row, compat.committed_len(req))
