"""Speculative decoding: which settings of SGLang's are served, and its workers over pages.

A pass verifies drafts of each request: the token sampled last and the ``k - 1`` that its n-grams, or a draft model,
propose. They form a *chain*, each behind the one before, or a *tree*, in which one may have several behind it.
Drafts stay outside the pages until the sampler has accepted them (``VerifyWrapper``), so nothing is rolled back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.kernels.extend_attention.reference import MOST_NODES
from sglang_diffkv.policies.base import prunes
from sglang_diffkv.releases import seen_on_gpu
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.versions import states as compat_states

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
TREES_GPU_VERSIONS = seen_on_gpu("trees of a model's drafts")
"""Versions of SGLang with which trees of a model's drafts did."""
TREES_SEEN_ON_A_GPU = ("EAGLE",)
"""Algorithms whose trees did."""
MOST_DRAFTS = 16
"""Tokens that a pass verifies of a request at most in a chain, or on a path of a tree."""


def algorithm_of(args: Any) -> str:
    """As SGLang spells it, empty without speculation."""
    return str(getattr(args, "speculative_algorithm", None) or "").upper()


def drafts_by_model(args: Any) -> bool:
    """Whether a model makes the drafts."""
    return algorithm_of(args) in OF_A_MODEL


def drafts_by_own_layer(args: Any) -> bool:
    """Whether a layer that comes with the model itself makes the drafts, which SGLang calls EAGLE then."""
    draft = getattr(args, "speculative_draft_model_path", None)
    return algorithm_of(args) in ("NEXTN", "EAGLE") and draft in (None, "", getattr(args, "model_path", None))


def drafts_of(args: Any) -> int:
    """Tokens of a chain or a tree, 0 without speculation."""
    if not algorithm_of(args):
        return 0
    return int(getattr(args, "speculative_num_draft_tokens", None) or USUAL_DRAFTS)


def _branches(args: Any) -> int:
    """Drafts that may be behind one draft; 0 if that does not depend on SGLang's options."""
    if algorithm_of(args) == NGRAM:
        names = ("speculative_ngram_min_bfs_breadth", "speculative_ngram_max_bfs_breadth")
        return max(int(getattr(args, name, None) or 0) for name in names)
    return int(getattr(args, "speculative_eagle_topk", None) or 0) if drafts_by_model(args) else 0


def drafts_trees(args: Any) -> bool:
    """Whether drafts form trees."""
    return _branches(args) > 1


def tree_sizes(args: Any) -> tuple[int, int]:
    """The fewest and most tokens that a pass may verify in a tree of a model's drafts: a whole path, and all that the
    model drafts. SGLang's first step drafts its branches, and each later one branches behind each of them."""
    steps, branches = int(getattr(args, "speculative_num_steps", None) or 1), _branches(args)
    return steps + 1, min(1 + branches + (steps - 1) * branches**2, MOST_NODES)


def longest_path(args: Any) -> int:
    """Tokens of a tree that a pass accepts at most: those of a path from the root, the token sampled last. 0 for
    chains."""
    if not drafts_trees(args):
        return 0
    steps = int(getattr(args, "speculative_num_steps", None) or 0) if drafts_by_model(args) else 0
    return steps + 1 if steps else drafts_of(args)


def most_accepted(args: Any) -> int:
    """Tokens of a request that a pass accepts at most, 0 without speculation."""
    return longest_path(args) or drafts_of(args)


def draft_slots(args: Any) -> int:
    """KV slots that SGLang sets aside for a request's drafts in a pass. A draft model stores more of them than the
    tree has that is verified."""
    steps = int(getattr(args, "speculative_num_steps", None) or 0)
    branches = int(getattr(args, "speculative_eagle_topk", None) or 0)
    return max(steps * branches, drafts_of(args)) if drafts_of(args) else 0


def draft_room(args: Any) -> int:
    """Tokens for which a row's table has room beside its sequence: what two passes may accept, which are bounds until
    the counts are known."""
    return 2 * most_accepted(args)


def longest_row(context: int, args: Any) -> int:
    """Tokens of a row at most, for a model of this context length."""
    return context + table_slack(args) + draft_room(args)


def table_slack(args: Any) -> int:
    """KV slots behind the longest sequence, for which SGLang's table of requests has room: it writes those of two
    passes there."""
    return compat.CONTEXT_SLACK + 2 * draft_slots(args)


def check_drafts(config: DiffKVConfig, attention_spans: Sequence[int] = (), *, by_model: bool = False) -> None:
    """Refuse what is not served with drafts, all of it at once: of a configuration, or a model with layers of these
    ``attention_spans``. ``by_model``: a model makes the drafts."""
    problems = list(_not_with_drafts(config, attention_spans, by_model))
    if problems:
        raise UnsupportedError("--attention-backend diffkv does not work with " + "; and not with ".join(problems))


def _not_with_drafts(config: DiffKVConfig, attention_spans: Sequence[int], by_model: bool) -> Iterator[str]:
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


def draft_worker(worker: type, *, ngram: bool) -> type:
    """SGLang's worker that drafts and verifies, over pages. ``ngram``: whether it is the one of n-grams."""
    if ngram:
        compat.short_ngram_masks(worker)

    class DraftWorker(worker):
        def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
            with compat_states.no_waits_without_cuda():
                super().alloc_memory_pool(*args, **kwargs)

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
                verify = paged_backend(self.target_worker.model_runner).verify
                verify.commit(result.accept_lens, left, batch.diffkv_path if verify.longest_path else None)
            return result

    class NgramWorker(DraftWorker):
        def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
            """Where the n-grams have too few proposals, SGLang fills up with tokens 0 behind the first one. In a chain
            each follows the one before it, so that any of them is scored at the position where it stands."""
            drafts, mask = super()._prepare_draft_tokens(batch)
            if drafts_trees(compat.resolved(self.server_args)):
                return drafts, mask
            chain = np.tril(np.ones((self.draft_token_num, self.draft_token_num), dtype=bool))
            return drafts, np.tile(chain.ravel(), len(batch.reqs))

    found = NgramWorker if ngram else DraftWorker
    found.__name__ = found.__qualname__ = f"DiffKV{worker.__name__}"
    return found
