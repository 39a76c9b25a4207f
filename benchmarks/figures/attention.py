"""What a model attends to, from a forward pass of the Hugging Face model over prompts: for figures 2 to 5.

Not from a server: the question is what the model attends to before any compression, and a server has neither the
attention of single tokens nor figures of single requests. Any model will do whose attention transformers lets others
compute; head dimensions and groups of query heads are of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from sglang_diffkv.attention.whole import Sight, attention_rows, causal
from sglang_diffkv.calibrate.reading import load, read
from sglang_diffkv.evaluate.runner import Suite

Rows = Iterable[tuple[int, torch.Tensor]]
"""A first query, and attention weights [query heads, queries from it on, tokens]."""


def significance(rows: Rows, kv_heads: int, window: int | None = None) -> torch.Tensor:
    """[KV heads, N] from all causal attention weights: the mean attention from later tokens that see a token, the
    maximum over the query heads of its KV head; 0 for the last token. ``window``: how many tokens a query sees."""
    total = torch.zeros(0)
    for first, weights in rows:
        found = weights.float()
        own = found.diagonal(first, 1, 2)  # [Hq, M]
        later = found.sum(1)
        later[:, first : first + own.shape[1]] -= own
        total = later if first == 0 else total + later
    heads, n = total.shape
    seen_by = torch.arange(n - 1, -1, -1, device=total.device)
    if window is not None:
        seen_by = seen_by.clamp(max=window - 1)
    mean = total.clamp(min=0) / seen_by.clamp(min=1)
    return mean.view(kv_heads, heads // kv_heads, n).amax(1)


Visit = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Is given a layer's number, its tokens' significances [H, N] and its values [H, N, Dv]."""


def visit_layers(path: str, prompts: Sequence[Sequence[int]], visit: Visit, title: str = "attention") -> int:
    """A forward pass over each prompt, ``visit`` called with each of its layers in turn; the number of layers that
    attend. Raises EvaluationError."""
    layer = 0

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        nonlocal layer
        sight = Sight.of(kwargs)
        rows = attention_rows(query[0], key[0], scaling, sight)
        visit(layer, significance(rows, key.shape[1], sight.window), value[0])
        layer += 1
        return causal(query, key, value, scaling, sight), None

    model = load(path, attend)
    for ids in tqdm(prompts, title, unit="prompt"):
        layer = 0
        read(model, list(ids))
    return layer


def asked(args: Any, suites: Sequence[Suite]) -> tuple[list[Sequence[int]], dict[str, Any]]:
    """The prompts that are read, and all that chose them."""
    questions = [question for suite in suites for question in suite.questions]
    return [question.prompt_ids[: args.max_tokens] for question in questions], {
        "tasks": {suite.task.name: {**suite.task.fingerprint(), "n": len(suite.questions)} for suite in suites},
        "seed": args.seed,
        "questions": [question.id for question in questions],
        "max_tokens": args.max_tokens,
        "cut": sum(len(x.prompt_ids) > args.max_tokens for x in questions),
    }


def prompts_read(settings: dict[str, Any], lengths: Sequence[int]) -> str:
    """Task files and how long their prompts are."""
    tokens, cut = np.array(lengths), settings["cut"]
    files = ", ".join(f"{name} n = {task['n']}" for name, task in settings["tasks"].items())
    told = f"{tokens.min()} tokens each"
    if tokens.min() < tokens.max():
        told = f"{tokens.min()} to {tokens.max()} tokens, median {np.median(tokens):.0f}"
    return f"{files}; {told}" + (f" ({cut} cut)" if cut else "")
