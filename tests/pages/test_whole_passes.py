"""Which passes over prompts are replayed whole, and what a replay does beside the graph."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from sglang_diffkv.attention.bounded import BoundedWrapper
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.layout.transfer import FixedNumbers
from sglang_diffkv.mem_pool.page_manager import PageManager
from sglang_diffkv.ops import ReferenceOps
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies import diffkv
from sglang_diffkv.policies.base import Policy
from sglang_diffkv.policies.uniform import UniformPolicy
from sglang_diffkv.srt import whole_passes
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.whole_passes import EitherGraph, LayerGraphs, WholePasses, capture
from tests.kernels.triton_helpers import make_format, make_manager
from tests.policies import diffkv_policy
from tests.ranks import Pair

SCORED = diffkv_policy(1.0, 0.0, 6, observe_every=1)
SAMPLED = diffkv_policy(1.0, 0.0, 6, observe_every=4)


class Size(NamedTuple):
    """Stands for SGLang's key of a graph."""

    size: int


class Graph:
    """Counts replays."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def make_passes(policy: Policy = SCORED) -> tuple[PageManager, WholePasses]:
    """With graphs of 8 and of 32 tokens, for up to 3 requests that have 100 tokens stored."""
    tiers = "BF16" if isinstance(policy, UniformPolicy) else "K8V4 K4V2"
    manager = make_manager(
        make_format(tiers, 64), policy=policy, make_ops=lambda state: ReferenceOps(state, policy), pages=600
    )  # fmt: skip
    passes = WholePasses(manager, BoundedWrapper(manager.ops, requests=3, tokens=32, stored=100))
    for size in (32, 8):
        passes.add(size, Graph)
    return manager, passes


def replays(passes: WholePasses) -> dict[int, Any]:
    return {size: graph.replays for size, graph in passes.graphs.items() if isinstance(graph, Graph)}


def plan(manager: PageManager, rows: list[int], counts: list[int]) -> None:
    manager.plan_step(rows, counts, [manager.rows.length(row) for row in rows], ending=rows)


def test_the_smallest_graph_that_holds_a_pass_is_replayed_once() -> None:
    manager, passes = make_passes()
    other = Graph()
    either = EitherGraph(passes, other)
    plan(manager, [1, 2], [3, 4])
    assert passes.choose(8, [3, 4])
    assert manager.counts.upcoming is None, "its kernels come next"
    given = passes.wrapper.known.given
    assert given.tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 0], [0, 0, 0], [0, 0, 0]]
    either.replay()
    assert replays(passes) == {32: 0, 8: 1} and other.replays == 0
    manager.end_pass()
    assert not manager.rows.in_prompt(1)
    either.replay()  # nobody chose this one
    assert replays(passes) == {32: 0, 8: 1} and other.replays == 1
    plan(manager, [3], [9])
    assert passes.choose(12, [9])
    either.replay()
    assert replays(passes) == {32: 1, 8: 1}
    assert passes.counts == {"whole": 2, "between_layers": 0}


def test_graphs_of_a_pass_wait_for_bytes_of_their_layers_alone() -> None:
    """What waits is on the stream that replays them, each behind the one before."""
    done: list[Any] = []
    graphs: Any = [(layer, SimpleNamespace(replay=partial(done.append, f"from {layer}"))) for layer in (0, 3, 6)]
    LayerGraphs(graphs, done.append).replay()
    assert done == [0, "from 0", 3, "from 3", 6, "from 6"]


def test_passes_over_prompts_alone_begin_before_all_bytes_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    manager, passes = make_passes()
    monkeypatch.setattr(manager.device, "flush", lambda by_layer=False: asked.append(by_layer))
    plan(manager, [1], [5])
    assert passes.choose(8, [5]) and asked[-1]
    plan(manager, [2], [5])
    manager.launch_step()
    assert not asked[-1]


def test_passes_that_are_not_replayed_whole() -> None:
    """The planned pass is left alone then."""
    manager, passes = make_passes()
    for rows, counts, tokens in (
        ([1], [33], 48),  # more tokens than any graph
        ([1, 2, 3, 4], [1, 1, 1, 1], 4),  # more requests
    ):
        plan(manager, rows, counts)
        assert not passes.choose(tokens, counts)
        assert manager.counts.upcoming is not None
        manager.cancel_step()
        for row in rows:
            manager.release(row)
    plan(manager, [1], [5])
    assert not passes.choose(8, [6]), "SGLang runs another pass than the one that was planned"
    manager.cancel_step()
    assert not passes.choose(8, [5]), "none is planned"
    assert passes.counts == {"whole": 0, "between_layers": 4}
    assert not passes.replay()


@pytest.mark.parametrize("policy", [SCORED, UniformPolicy()], ids=["scored", "raw"])
def test_tokens_that_the_pass_would_score_are_nobody_elses(policy: Policy) -> None:
    """Stored tokens of an earlier chunk get scores from the next one, which graphs do not give."""
    manager, passes = make_passes(policy)
    manager.plan_step([1], [20], [0], prompts=[25])
    manager.launch_step()
    manager.plan_step([1], [5], [20], ending=(1,))
    assert passes.choose(8, [5]) == isinstance(policy, UniformPolicy)


def test_a_shared_prefix_is_scored_by_others_unless_it_is_to_be_copied() -> None:
    manager, passes = make_passes()
    plan(manager, [1], [40])
    launched = manager.launch_step()
    assert launched is not None
    manager.end_prompts(launched)
    segment = manager.segments.share(1, 0, 32)
    assert segment is not None
    for row in (2, 3):
        manager.attach_prefix(row, [(segment, 0, 32)])
    plan(manager, [2], [5])
    assert passes.choose(8, [5])
    manager.prompts.score_shared(3)
    plan(manager, [3], [5])
    assert not passes.choose(8, [5])


@pytest.mark.parametrize("policy", [SCORED, UniformPolicy()], ids=["scored", "raw"])
def test_requests_that_decode_in_the_pass_are_no_prompts(policy: Policy) -> None:
    manager, passes = make_passes(policy)
    plan(manager, [1], [4])
    manager.launch_step()
    manager.rows.end_prompt(1)
    manager.plan_step([2], [3], [0], prompts=[3], ending=(2,))
    manager.decode_beside_prompts([1], [4])
    assert not passes.choose(8, [3, 1])


def test_a_first_chunk_tells_where_its_prompt_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who observes follows from that."""
    monkeypatch.setattr(diffkv, "OBSERVERS", 5)
    manager, passes = make_passes(SAMPLED)
    manager.plan_step([1], [6], [0], prompts=[40])
    assert passes.choose(8, [6])
    observation = SAMPLED.observation
    assert passes.wrapper.known.given[3:, 0].tolist() == [35, *observation.every_of([40])]


def test_passes_in_8_bits_are_left_to_who_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, passes = make_passes()
    asked = []

    def rounds(prefixes: list[int], counts: list[int]) -> bool:
        asked.append((prefixes, counts))
        return True

    monkeypatch.setattr(manager.ops, "rounds_prompts", rounds)
    plan(manager, [1], [5])
    assert not passes.choose(8, [5]) and asked == [([0], [5])]


def test_what_a_pass_was_told_stays_until_the_next() -> None:
    numbers = FixedNumbers(2, 3, device=torch.device("cpu"))
    for round_ in range(2 * FixedNumbers.AHEAD):
        numbers.set([[round_, 7], [1, 2, 3]])
        assert numbers.there.tolist() == [[round_, 7, 0], [1, 2, 3]]
    numbers.set([[], [4]])
    assert numbers.there.tolist() == [[0, 0, 0], [4, 0, 0]]


def test_sizes_that_are_worth_a_graph() -> None:
    _, passes = make_passes()
    passes.graphs.clear()
    sizes = [2048, 1024, 960, 896, 832, 768, 512, 480, 256]
    assert [size for size in sizes if passes.wants(size) and (passes.graphs.update({size: Graph()}) or True)] == [
        1024, 768, 512, 256,
    ]  # fmt: skip


def test_a_pass_of_fewer_tokens_than_any_graph_is_filled_up_to_a_small_one() -> None:
    _, passes = make_passes()
    found = {tokens: passes.filled_up(tokens) for tokens in (0, 1, 7, 8, 9)}
    assert found == {0: None, 1: 8, 7: 8, 8: None, 9: None}
    passes.graphs.clear()
    assert passes.filled_up(1) is None, "there is none"
    passes.graphs[whole_passes.FILLED_UP] = Graph()
    assert passes.filled_up(1) == whole_passes.FILLED_UP
    passes.graphs = {whole_passes.FILLED_UP + 1: Graph()}
    assert passes.filled_up(1) is None, "it computes that many tokens"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_captures(error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """SGLang's graph stays where none of whole passes is worth it, and where memory ends; then others serve still."""
    _, passes = make_passes()
    passes.graphs.clear()

    def record(_runner: Any, _forward: Any, passes: WholePasses, _out: Any) -> Graph:
        if passes.wrapper.tokens == 16:
            raise error("CUDA out of memory")
        return Graph()

    monkeypatch.setattr(whole_passes, "_record", record)
    for size in (2048, 32, 16, 8):
        key = Size(size)
        runner: Any = SimpleNamespace(_graphs={key: Graph()})
        capture(runner, key, lambda: None, passes, None)
        assert isinstance(runner._graphs[key], EitherGraph) == (size < 2048)
    assert sorted(passes.graphs) == [8, 32]
    assert "passes of 16 new tokens do not run as one CUDA graph" in caplog.text and "CUDA out of memory" in caplog.text


def test_ranks_have_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one would fill a pass up, or replay a larger graph, where others do not, and their sums would not fit."""

    def record(_runner: Any, _forward: Any, passes: WholePasses, _out: Any) -> Graph:
        if passes.wrapper.tokens == 16 and passes is members[1]:
            raise torch.OutOfMemoryError
        return Graph()

    def without_graphs(ranks: Ranks) -> WholePasses:
        manager, passes = make_passes()
        manager.ranks = ranks
        passes.graphs.clear()
        return passes

    def captured(passes: WholePasses) -> list[int]:
        for size in (32, 16):
            capture(SimpleNamespace(_graphs={Size(size): Graph()}), Size(size), lambda: None, passes, None)
        return sorted(passes.graphs)

    pair = Pair(without_graphs)
    members = pair.members
    monkeypatch.setattr(whole_passes, "_record", record)
    assert pair.each(captured) == [[32], [32]]


def test_where_a_rank_has_no_memory_for_whole_passes_none_has_any(monkeypatch: pytest.MonkeyPatch) -> None:
    managers: list[PageManager] = []

    def manager_of(ranks: Ranks) -> PageManager:
        manager = make_manager(
            make_format("K8V4 K4V2", 64), policy=SCORED, pages=100, make_ops=lambda state: ReferenceOps(state, SCORED)
        )
        manager.ranks = ranks
        managers.append(manager)
        return manager

    def wrapper_of(ops: Any, **form: Any) -> BoundedWrapper:
        if ops is managers[1].ops:
            raise torch.OutOfMemoryError
        return BoundedWrapper(ops, **form)

    monkeypatch.setattr(whole_passes, "_obstacle", lambda _manager: "")
    monkeypatch.setattr(whole_passes, "BoundedWrapper", wrapper_of)
    monkeypatch.setattr(whole_passes, "TOKENS", 64)
    monkeypatch.setattr(whole_passes, "ROOM_BYTES", 1 << 17)
    assert Pair(manager_of).each(lambda manager: WholePasses.create(manager, {}, 400)) == [None, None]


def no_memory(*_args: Any, **_sizes: Any) -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (None, ""),
        ("ops", "kernels are not Triton's"),
        ("drafts", "they were not tried with drafts"),
        ("version", "they were not tried on a GPU with SGLang "),
        ("library", "new tokens do not attend by FlashAttention-3"),
        ("large", "tokens are too large"),
        ("memory", "no 0 MiB are left"),
    ],
)
def test_where_there_are_none(
    change: str | None, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log says why."""
    caplog.set_level("INFO")
    manager = make_manager(
        make_format("K8V4 K4V2", 64), policy=SCORED, pages=100,
        make_ops=lambda state: ReferenceOps(state, SCORED) if change == "ops" else TritonOps(state, SCORED, 4, 400),
    )  # fmt: skip
    if change != "library":
        monkeypatch.setattr(TritonOps, "bounded_obstacle", lambda _self: "")
    if change != "version":
        monkeypatch.setattr(whole_passes, "GPU_VERSIONS", (compat.sglang_version(),))
    monkeypatch.setattr(manager, "drafts", 3 if change == "drafts" else 0)
    monkeypatch.setattr(whole_passes, "TOKENS", 64)
    monkeypatch.setattr(whole_passes, "ROOM_BYTES", 512 if change == "large" else 1 << 17)
    if change == "memory":
        monkeypatch.setattr(whole_passes, "BoundedWrapper", no_memory)
    found = WholePasses.create(manager, {}, 400)
    assert (found is None) == bool(why)
    said = "short passes over prompts do not run as one CUDA graph: " + why if why else "runs as one CUDA graph"
    assert said in caplog.text
