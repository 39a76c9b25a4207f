"""Speculative decoding: which settings of SGLang's are served, and its NGRAM worker over pages.

A pass verifies a *chain* of drafts of each request: the token sampled last and the ``k - 1`` that its n-grams propose.
Drafts stay outside the pages until the sampler has accepted them (``VerifyWrapper``), so nothing is rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import UnsupportedError

CHAIN = "--speculative-ngram-min-bfs-breadth 1 --speculative-ngram-max-bfs-breadth 1"
USUAL_DRAFTS = 12
"""SGLang's number where none is given."""
MOST_DRAFTS = 16
"""Tokens that a pass verifies of a request at most."""


def drafts_of(args: Any) -> int:
    """Tokens of a chain, 0 without speculation."""
    if not getattr(args, "speculative_algorithm", None):
        return 0
    return int(getattr(args, "speculative_num_draft_tokens", None) or USUAL_DRAFTS)


def check_drafts(config: DiffKVConfig, reaches: Sequence[int] = ()) -> None:
    """Refuse what is not served with drafts: of a configuration, or a model with layers of these ``reaches``."""
    problem = _unlike_chains(config, reaches)
    if problem:
        raise UnsupportedError(f"--attention-backend diffkv does not work with {problem}")


def _unlike_chains(config: DiffKVConfig, reaches: Sequence[int]) -> str | None:
    if config.prefix_fidelity == "exact":
        return '"prefix_fidelity": "exact" with speculative decoding: use "compressed"'
    if config.build_policy().running is not None:
        return "a policy that holds requests to a budget while they run with speculative decoding: use another"
    if any(reaches):
        return "layers with a sliding window with speculative decoding: drop --speculative-algorithm"
    return None


def chain_worker(worker: type) -> type:
    """SGLang's NGRAM worker, for chains over pages."""

    class ChainWorker(worker):
        def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
            """Where the n-grams have too few proposals, SGLang fills up with tokens 0 behind the first one. Here each
            token follows the one before it, so that any of them is judged at the position where it stands."""
            drafts, _ = super()._prepare_draft_tokens(batch)
            chain = np.tril(np.ones((self.draft_token_num, self.draft_token_num), dtype=bool))
            return drafts, np.tile(chain.ravel(), len(batch.reqs))

        def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            verifies = batch.forward_mode.is_decode()
            result = super().forward_batch_generation(batch, *args, **kwargs)
            if verifies and result.accept_lens is not None:
                self.model_runner.attn_backend.verify.commit(result.accept_lens)
            return result

    ChainWorker.__name__ = ChainWorker.__qualname__ = f"DiffKV{worker.__name__}"
    return ChainWorker
