"""Figures 4 and 5: how many tokens hold most of the attention, by layer and by KV head, across requests.

Measured by a forward pass of the Hugging Face model over the prompts, not on a server: the question is what the
model attends to, before any compression. A server knows which tier a token is in, summed over the requests of the
moment; it has neither the attention of single tokens nor figures of single requests.

A token's significance is DiffKV's: the mean attention from later tokens, maximum over the query heads of its KV
head. The critical tokens of a head are the fewest that hold ``--mass`` of the sum of all significances.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from tqdm import tqdm

from benchmarks.figures import style
from sglang_diffkv.calibration import model_name
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.runner import Suite
from sglang_diffkv.evaluate.server import has_gpu

FIGURES = ("fig4", "fig5")


class CriticalTokens(BaseModel):
    """What both figures are drawn from.

    Attributes:
        settings: all that the counts depend on.
        tokens: of each request. critical: counts [request][layer][KV head].
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["figure"] = "figure"
    figure: str
    model: str
    settings: dict[str, Any]
    tokens: list[int]
    critical: list[list[list[int]]]
    about: dict[str, Any] = {}

    def percent(self) -> np.ndarray:
        """[requests, layers, heads]: critical tokens in % of the request's tokens."""
        return 100 * np.array(self.critical, dtype=float) / np.array(self.tokens, dtype=float)[:, None, None]


def significance(weights: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[KV heads, N] from attention weights [query heads, N queries, N keys], causal: 0 for the last token."""
    heads, n, _ = weights.shape
    weights = weights.float()
    later = weights.sum(1) - weights.diagonal(dim1=1, dim2=2)
    mean = later / torch.arange(n - 1, -1, -1, device=weights.device).clamp(min=1)
    return mean.view(kv_heads, heads // kv_heads, n).amax(1)


def critical_counts(scores: torch.Tensor, mass: float) -> torch.Tensor:
    """[heads]: the fewest tokens whose scores [heads, N] sum to at least ``mass`` of all."""
    ordered = scores.double().sort(dim=-1, descending=True).values.cumsum(-1)
    return (ordered < mass * ordered[:, -1:]).sum(-1) + 1


@contextmanager
def attention_of(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collects each layer's significances, and frees its attention weights, while the model runs."""
    found: list[torch.Tensor] = []
    layers = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    if len(layers) != model.config.num_hidden_layers:
        raise EvaluationError(f"{len(layers)} of {model.config.num_hidden_layers} layers have a module self_attn")

    def keep(module: Any, inputs: Any, output: Any) -> Any:
        found.append(significance(output[1][0], model.config.num_key_value_heads))
        return (output[0], None, *output[2:])

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def load_model(path: str) -> Any:
    """The model in bfloat16, as a server has it, on the GPU if there is one; nothing is downloaded."""
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.bfloat16, "attn_implementation": "eager", "local_files_only": True}
    return AutoModelForCausalLM.from_pretrained(path, **options).to("cuda" if has_gpu() else "cpu").eval()


@torch.inference_mode()
def measure(model: Any, prompts: Sequence[Sequence[int]], mass: float) -> list[list[list[int]]]:
    """Critical tokens [request][layer][KV head]."""
    counts = []
    for ids in tqdm(prompts, desc="attention", unit="prompt"):
        with attention_of(model) as scores:
            model(torch.tensor([list(ids)], device=model.device), use_cache=False)
        counts.append([critical_counts(x, mass).tolist() for x in scores])
    return counts


def collect(args: Any, suites: Sequence[Suite], figure: str, about: dict[str, Any]) -> CriticalTokens:
    """From a pass over the prompts, or from the other figure's file if that has the same settings."""
    questions = [question for suite in suites for question in suite.questions]
    prompts = [question.prompt_ids[: args.max_tokens] for question in questions]
    settings = {
        "tasks": {suite.task.name: {**suite.task.fingerprint(), "n": len(suite.questions)} for suite in suites},
        "seed": args.seed,
        "questions": [question.id for question in questions],
        "mass": args.mass,
        "max_tokens": args.max_tokens,
        "cut": sum(len(x.prompt_ids) > args.max_tokens for x in questions),
    }
    name = model_name(args.model)
    for other in FIGURES:
        held = read(args.output / f"{other}.json")
        if held is not None and (held.model, held.settings) == (name, settings):
            return held.model_copy(update={"figure": figure})
    critical = measure(load_model(args.model), prompts, args.mass)
    tokens = [len(x) for x in prompts]
    return CriticalTokens(figure=figure, model=name, settings=settings, tokens=tokens, critical=critical, about=about)


def read(path: Path) -> CriticalTokens | None:
    """A figure's file; None if there is none or it is of another form."""
    try:
        return CriticalTokens.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def subject(data: CriticalTokens) -> str:
    """Task files, request lengths and what was measured."""
    tokens, cut = np.array(data.tokens), data.settings["cut"]
    files = ", ".join(f"{name} n = {task['n']}" for name, task in data.settings["tasks"].items())
    lengths = f"{tokens.min()} tokens each"
    if tokens.min() < tokens.max():
        lengths = f"{tokens.min()} to {tokens.max()} tokens, median {np.median(tokens):.0f}"
    what = f"the fewest tokens that hold {data.settings['mass']:.0%} of the summed mean attention from later tokens"
    return (
        f"{data.model}; {files}; {lengths}" + (f" ({cut} cut)" if cut else "") + f". Critical: {what}; "
        "bars: standard deviation over requests."
    )


def draw_layers(data: CriticalTokens, path: Path) -> None:
    """Figure 4: mean over the KV heads of each layer."""
    values = data.percent().mean(2)
    layers = values.shape[1]
    figure, axes = style.canvas(1, 1, (max(5.0, 0.24 * layers + 1.5), 3.4))
    axis = axes[0][0]
    axis.errorbar(range(layers), values.mean(0), values.std(0), color=style.BLUE, marker="o", markersize=4, capsize=3)
    axis.set(xlabel="layer", ylabel="critical tokens, % of the request", ylim=(0, None))
    axis.set_xticks(range(0, layers, max(1, layers // 16)))
    style.grid(axis)
    style.finish(figure, path, f"Critical tokens by layer\n{data.model}, n = {len(data.tokens)}", subject(data))


def draw_heads(data: CriticalTokens, path: Path) -> None:
    """Figure 5: each KV head of the first, the middle and the last layer."""
    values = data.percent()
    layers = sorted({0, values.shape[1] // 2, values.shape[1] - 1})
    heads = values.shape[2]
    figure, axes = style.canvas(1, len(layers), (3.0, max(1.8, 0.3 * heads + 0.8)), sharex=True, sharey=True)
    for axis, layer in zip(axes[0], layers):
        mean, spread = values[:, layer].mean(0), values[:, layer].std(0)
        axis.barh(range(heads), mean, xerr=spread, color=style.SKY, edgecolor=style.BLACK, linewidth=0.5, capsize=3)
        axis.set(xlabel="critical tokens,\n% of the request", title=f"layer {layer}")
        style.grid(axis)
    axes[0][0].set(ylabel="KV head", yticks=range(heads), xlim=(0, None))
    axes[0][0].invert_yaxis()
    style.finish(figure, path, f"Critical tokens by KV head\n{data.model}, n = {len(data.tokens)}", subject(data))
