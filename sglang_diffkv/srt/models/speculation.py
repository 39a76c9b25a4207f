"""Speculative decoding: which settings of SGLang's are served, and its workers over pages.

A pass verifies a *chain* of drafts of each request: the token sampled last and the ``k - 1`` that its n-grams, or a
draft model, propose.
Drafts stay outside the pages until the sampler has accepted them (``VerifyWrapper``), so nothing is rolled back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.policies.base import prunes
from sglang_diffkv.releases import seen_on_gpu
from sglang_diffkv.srt.versions import compat

CHAIN = "--speculative-ngram-min-bfs-breadth 1 --speculative-ngram-max-bfs-breadth 1"
MODEL_CHAIN = "--speculative-eagle-topk 1 --speculative-num-steps 3 --speculative-num-draft-tokens 4"
NGRAM = "NGRAM"
OF_A_MODEL = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Algorithms whose drafts a model makes, which has a KV cache of its own."""
SEEN_ON_A_GPU = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
"""Algorithms that gave stock's tokens on a GPU, in CUDA graphs and under overlap scheduling."""
DRAFTS_GPU_VERSIONS = seen_on_gpu("drafts")
"""Versions of SGLang with which they did."""
USUAL_DRAFTS = 12
"""SGLang's number where none is given."""
MOST_DRAFTS = 16
"""Tokens that a pass verifies of a request at most."""


def algorithm_of(args: Any) -> str:
    """As SGLang spells it, empty without speculation."""
    return str(getattr(args, "speculative_algorithm", None) or "").upper()


def drafts_by_model(args: Any) -> bool:
    """Whether a model makes the drafts."""
    return algorithm_of(args) in OF_A_MODEL


def drafts_of(args: Any) -> int:
    """Tokens of a chain, 0 without speculation."""
    if not algorithm_of(args):
        return 0
    return int(getattr(args, "speculative_num_draft_tokens", None) or USUAL_DRAFTS)


def draft_room(args: Any) -> int:
    """Tokens for which a row's table has room beside its sequence: drafts of two passes, which are bounds until the
    counts are known."""
    return 2 * drafts_of(args)


def longest_row(context: int, args: Any) -> int:
    """Tokens of a row at most, for a model of this context length: SGLang's table of requests has room for a pass's
    drafts too."""
    return context + compat.CONTEXT_SLACK + drafts_of(args) + draft_room(args)


def check_drafts(config: DiffKVConfig, attention_spans: Sequence[int] = (), *, by_model: bool = False) -> None:
    """Refuse what is not served with drafts, all of it at once: of a configuration, or a model with layers of these
    ``attention_spans``. ``by_model``: a model makes the drafts."""
    problems = list(_unlike_chains(config, attention_spans, by_model))
    if problems:
        raise UnsupportedError("--attention-backend diffkv does not work with " + "; and not with ".join(problems))


def _unlike_chains(config: DiffKVConfig, attention_spans: Sequence[int], by_model: bool) -> Iterator[str]:
    if config.prefix_fidelity == "exact":
        yield '"prefix_fidelity": "exact" with speculative decoding: use "compressed"'
    if config.build_policy().running is not None:
        yield "a policy that holds requests to a budget while they run with speculative decoding: use another"
    if by_model and prunes(config.build_policy(), len(config.tiers)):
        yield (
            "a policy that drops tokens with a draft model, in whose cache each of them keeps a place: use another "
            "policy (diffkv with alpha_low 0 drops none), or --speculative-algorithm NGRAM"
        )
    if any(attention_spans):
        yield "layers with a sliding window with speculative decoding: drop --speculative-algorithm"


def paged_backend(runner: Any) -> Any:
    """The attention backend over pages of SGLang's model runner. Of a model with states SGLang has one around it, which
    puts back states that rejected drafts have changed."""
    return getattr(runner.attn_backend, "full_attn_backend", runner.attn_backend)


def chain_worker(worker: type, *, ngram: bool) -> type:
    """SGLang's worker that drafts and verifies, over pages. ``ngram``: whether it is the one of n-grams."""

    class ChainWorker(worker):
        def init_cuda_graphs(self) -> None:
            super().init_cuda_graphs()
            target = self.target_worker.model_runner
            if target.decode_cuda_graph_runner is not None:
                paged_backend(target).capture_commits(target.decode_cuda_graph_runner.capture_bs)

        def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            verifies = batch.forward_mode.is_decode()
            result = super().forward_batch_generation(batch, *args, **kwargs)
            if verifies and result.accept_lens is not None:
                # Grammars under overlap scheduling: SGLang looks at the last results between a pass's plan and its
                # launch, and of a request that ended with them the row is released already.
                left = [index for index, req in enumerate(batch.reqs) if compat.row_of(req) is None]
                paged_backend(self.target_worker.model_runner).verify.commit(result.accept_lens, left)
            return result

    class NgramWorker(ChainWorker):
        def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
            """Where the n-grams have too few proposals, SGLang fills up with tokens 0 behind the first one. Here each
            token follows the one before it, so that any of them is scored at the position where it stands."""
            drafts, _ = super()._prepare_draft_tokens(batch)
            chain = np.tril(np.ones((self.draft_token_num, self.draft_token_num), dtype=bool))
            return drafts, np.tile(chain.ravel(), len(batch.reqs))

    found = NgramWorker if ngram else ChainWorker
    found.__name__ = found.__qualname__ = f"DiffKV{worker.__name__}"
    return found
