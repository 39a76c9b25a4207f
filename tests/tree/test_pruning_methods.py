"""Random lives of requests, as in ``test_prefix_cache.py``, under methods that prune prompts: chunks, shared prefixes
at both fidelities, several samples of a prompt, replies that end, are aborted or retracted, evictions.
"""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from hypothesis.stateful import invariant, precondition, rule

from sglang_diffkv.layout.page_format import Tier
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.policies.base import Policy, Random, Redundancy
from sglang_diffkv.policies.budget import Budget, PyramidBudget
from sglang_diffkv.policies.knorm import KnormPolicy
from sglang_diffkv.policies.random_eviction import RandomPolicy
from sglang_diffkv.srt.scheduling.running_compression import CompressionScheduler
from tests.late import run_late
from tests.policies import pyramidkv_policy, snapkv_policy, xkv_policy, zipage_policy
from tests.tree.test_prefix_cache import WINDOW, TreeMachine, machine_settings

METHODS: dict[str, Policy] = {
    "snapkv": snapkv_policy(Budget(0, 0.5), WINDOW, 3),
    "pyramidkv": pyramidkv_policy(PyramidBudget(0, 0.5), WINDOW, 7),
    "knorm": KnormPolicy(Budget(0, 0.5), WINDOW, 2),
    "random": RandomPolicy(Budget(0, 0.5), WINDOW, 2, Random(0)),
    "xkv by size": xkv_policy(WINDOW, 7, keep=0.3),
    "xkv by retention": xkv_policy(WINDOW, 3, min_retention=0.6),
    "xkv in two tiers": xkv_policy(WINDOW, 3, keep=0.5, high=0.4),
    "zipage": zipage_policy(24, 36, WINDOW, pool=3, redundancy=Redundancy(0.2, 0.4, block=12)),
    "zipage in two tiers": zipage_policy(24, 36, WINDOW, high=14, pool=3, slots=0.2),
    "zipage beside": zipage_policy(
        24, 36, WINDOW, pool=3, redundancy=Redundancy(0.2, 0.4, block=12), asynchronous=True
    ),
    "zipage beside, in two tiers": zipage_policy(24, 36, WINDOW, high=14, pool=3, slots=0.5, asynchronous=True),
    "xkv by layer": xkv_policy(WINDOW, 7, layer_fractions=(0.6, 0.1)),
}


class PruningMachine(TreeMachine):
    """What a head keeps of a prompt is never stored twice, and the newest token always is. What runs beside the passes
    runs as late as it may."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        super().__init__(ranks)
        run_late(self.manager.device)

    def decoding(self) -> list[Any]:
        """those that are scored are parked, unless nobody else would run."""
        batch, budgets = super().decoding(), self.requests.compression
        if not isinstance(budgets, CompressionScheduler):
            return batch
        rest = [r for r in batch if r.kv.req_pool_idx not in budgets.scored]
        if not rest:
            budgets.compress_scored()
        return rest or batch

    @invariant()
    def budgets_are_consistent(self) -> None:
        """Query slots and judgements."""
        if self.manager.running is not None:
            self.manager.running.check_integrity()

    def check_stored(self, req: Any, times: torch.Tensor) -> None:
        assert (times <= 1).all(), "a token is stored twice"
        assert req.prefilling or (times[..., -1:] == 1).all(), "the newest token is missing"

    def check_step(self, batch: list[Any]) -> None:
        """No request holds more than its budget says; what the host believes it holds is no less."""
        running = self.manager.running
        if running is None:
            return
        state = self.manager.state
        for req in batch:
            row = req.kv.req_pool_idx
            rows, length = torch.tensor([row]), self.manager.rows.length(row)
            held = self.manager.ops.measure(rows, torch.tensor([0]), torch.tensor([length]))
            most = int(held[0, ..., :-1].sum(2).max())
            if self.manager.rows.shared(row) == 0:
                assert most <= running.held(row), "a row holds more than the host believes"
            if running.held(row) < running.rule.limit and self.manager.rows.shared(row) == 0:
                assert most < running.rule.limit, "a row holds more than its budget"
            outlook = running.outlook(row, 10, 10, 0)
            if outlook is not None and self.manager.rows.shared(row) == 0 and row not in self.manager.prompts.pending:
                pages = self.manager.device.pages_of(row) / self.manager.geometry.heads
                assert pages <= outlook.pages + 1, "a row has more pages than admission believes"
                assert outlook.pages <= pages + 1 + len(state.fmt.tiers), (
                    "a row has fewer pages than admission believes"
                )

    @precondition(lambda self: any(not r.prefilling for r in self.running))
    @rule()
    def sample_again(self) -> None:
        """Another sample of a prompt that runs: what SGLang makes of ``n`` above 1 once the prompt is cached."""
        req = next(r for r in self.running if not r.prefilling)
        count = len(self.running)
        self.admit_tokens(array("q", req.origin_input_ids))
        while any(r.prefilling for r in self.running[count:]):
            self.extend(49)


def machine(policy_of: str, exact_prompts: bool) -> Any:
    class Machine(PruningMachine):
        exact = exact_prompts
        policy = METHODS[policy_of]
        tiers = (Tier(8, 4), Tier(4, 2)) if "two tiers" in policy_of else (Tier(8, 4),)

    Machine.TestCase.settings = machine_settings(40)
    return Machine


@pytest.mark.parametrize("exact", [False, True], ids=["compressed", "exact"])
@pytest.mark.parametrize("method", METHODS)
def test_lives_of_requests(method: str, exact: bool) -> None:
    machine(method, exact).TestCase("runTest").runTest()
