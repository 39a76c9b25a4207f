"""Comparisons of the device state with what the dense oracle (``tests/dense.py``) holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_diffkv.kernels.append.reference import read_tokens
from sglang_diffkv.kernels.decode_attention.reference import StepScores
from sglang_diffkv.mem_pool.page_manager import PageManager
from tests.helpers import Visible, visible

if TYPE_CHECKING:
    from tests.dense import Dense, Session


def check_scores(session: Session, rows: list[int]) -> None:
    """Stored scores of own tokens are the dense means; those of shared tokens are what they were. Lower tiers' are
    compared where the policy's steps score them."""
    kept = session.fmt.scored if session.manager.policy.scores_low else min(session.fmt.scored, 1)
    for row in rows:
        seen = visible(session.state, row)
        mine = seen.pick(seen.own & (seen.tier < kept))
        total = session.dense[row].received.numpy()[mine.position, mine.layer, mine.head]
        observers = np.maximum(len(session.dense[row].received) - 1 - mine.position, 1)
        np.testing.assert_allclose(mine.score, total / observers, rtol=1e-3, atol=2e-6)


def check_searches(session: Session, rows: list[int], found: StepScores) -> None:
    """Candidate and least significant token of each head are those that a scan of the pages finds."""
    policy = session.manager.policy
    kept = policy.step_tiers(len(session.fmt.tiers))
    for b, row in enumerate(rows):
        seen = visible(session.state, row)
        leaving = session.manager.rows.length(row) - 1 - session.manager.windows.window_of(row)
        for layer, head in np.ndindex(session.state.num_layers, session.state.num_heads):
            here = seen.at(layer, head)
            here = here.pick(here.own & (here.position <= leaving) & (here.position >= policy.sinks))
            at = ((here.position == leaving) & (here.tier == 0)).nonzero()[0]
            slot = int(found.candidate_slot[b, layer, head])
            assert slot == (int(here.own_slot[at[0]]) if len(at) else -1)
            if len(at):
                assert float(found.candidate_score[b, layer, head]) == (here.score[at[0]] if kept else 0)
            for tier in range(len(session.state.tiers)):
                of_tier = here.pick(here.tier == tier)
                slot = int(found.least_slot[b, layer, head, tier])
                if not len(of_tier.score) or tier >= kept:
                    assert slot == -1
                    continue
                assert of_tier.score[of_tier.own_slot == slot].item() == of_tier.score.min()
                assert float(found.least_score[b, layer, head, tier]) == of_tier.score.min()


def check_contents(manager: PageManager, seen: Visible, dense: Dense, first: int) -> None:
    """Compare the tokens of ``seen`` in memory with ``dense``, whose first token is at position ``first``."""
    for tier, view in enumerate(manager.state.tiers):
        here = seen.pick(seen.tier == tier)
        key, value = read_tokens(view, torch.from_numpy(here.page).long(), torch.from_numpy(here.slot).long())
        index = here.position - first, here.layer, here.head
        assert torch.equal(key, dense.keys[tier + 1][index]), "a stored key is not the token's"
        assert torch.equal(value, dense.values[tier + 1][index]), "a stored value is not the token's"


def check_row(session: Session, row: int) -> None:
    """:func:`check_contents` for all that a row sees."""
    check_contents(session.manager, visible(session.state, row), session.dense[row], 0)
