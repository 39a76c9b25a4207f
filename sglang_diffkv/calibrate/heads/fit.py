"""Curves of all heads over all sequences, and the factors that follow from them, at one or several configurations.

A search keeps factors in its work folder.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from tqdm import tqdm

from sglang_diffkv.calibrate.heads.allocate import allocate
from sglang_diffkv.calibrate.heads.capture import LayerPass, load_model, run
from sglang_diffkv.calibrate.heads.curves import Rule, counted, measure
from sglang_diffkv.calibrate.heads.result import Change, HeadProvenance, HeadScaleFile, Predicted
from sglang_diffkv.calibration import HeadScale, ModelGeometry, model_name
from sglang_diffkv.config import DiffKVConfig, DiffKVPolicyConfig
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate import report
from sglang_diffkv.evaluate.configuration import device_name
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.task import Task
from sglang_diffkv.evaluate.tasks import TaskFileError
from sglang_diffkv.evaluate.tasks.generation import GenerationTask

FACTORS = (1 / 64, 1 / 32, 1 / 16, *(2 ** (step / 2) for step in range(-6, 7)), 16.0, 32.0, 64.0)
"""2^-6 to 2^6: half octaves around 1, which is among them, and octaves beyond 2^-3 and 2^3."""


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt and its reply."""

    ids: tuple[int, ...]
    prompt: int

    def fits(self, window: int, longest: int) -> bool:
        """Whether some query that counts has a token outside the window, and the pass is not too long."""
        return len(self.ids) <= longest and len(counted(len(self.ids), self.prompt, window)) > 0


def read(task: Task, tokenizer: Any) -> Iterator[Text]:
    """Prompts with the replies that the file has, in the order of asking; of a perplexity's windows what is in the
    cache is the prompt."""
    replies = {x.id: x.reply for x in task.examples} if isinstance(task, GenerationTask) else {}
    for question in task.questions(tokenizer):
        reply = replies.get(question.id, "")
        more = tokenizer.encode(reply, add_special_tokens=False) if reply else ()
        yield Text((*question.prompt_ids, *more), question.cached_tokens or len(question.prompt_ids))


def choose(found: Iterator[Text], n: int, window: int, longest: int) -> tuple[list[Text], int]:
    """The first ``n`` that something can be measured on, and how many were passed over. Raises TaskFileError."""
    chosen: list[Text] = []
    skipped = 0
    for text in found:
        if len(chosen) == n:
            break
        if text.fits(window, longest):
            chosen.append(text)
        else:
            skipped += 1
    if not chosen:
        raise TaskFileError(f"no sequence is longer than the window of {window} tokens and within {longest}")
    return chosen, skipped


@dataclass(frozen=True)
class Curves:
    """``error`` and ``size``: [sequences, layers, heads, factors] float64; ``bf16``: [sequences], bytes."""

    error: torch.Tensor
    size: torch.Tensor
    bf16: torch.Tensor
    factors: tuple[float, ...] = FACTORS

    @property
    def _base(self) -> int:
        return self.factors.index(1.0)

    def fit(self) -> torch.Tensor:
        """Number of the factor of each head, [layers, heads], at the bytes of factor 1."""
        error, size = (x.mean(0).flatten(0, 1) for x in (self.error, self.size))
        return allocate(error, size, self._base).view(self.error.shape[1:3])

    def scale(self, taken: torch.Tensor) -> HeadScale:
        """Factors [layers][heads]."""
        return tuple(tuple(self.factors[number] for number in layer) for layer in taken.tolist())

    def change(self, taken: torch.Tensor) -> Change:
        """What ``taken`` [layers, heads] does on these sequences."""
        return Change(before=self._at(torch.full_like(taken, self._base)), after=self._at(taken))

    def _at(self, taken: torch.Tensor) -> Predicted:
        at = taken.expand(len(self.error), -1, -1).unsqueeze(3)
        error, size = (float(x.gather(3, at).sum((1, 2, 3)).mean()) for x in (self.error, self.size))
        return Predicted(error=error, bytes=size, ratio=size / float(self.bf16.mean()))

    def held_out(self) -> Change | None:
        """The change on each half of the sequences with factors fitted to the other half; None for one sequence."""
        if len(self.error) < 2:
            return None
        halves = [
            Curves(self.error[half::2], self.size[half::2], self.bf16[half::2], self.factors) for half in range(2)
        ]
        seen = [half.change(other.fit()) for half, other in zip(halves, reversed(halves))]
        weight = [len(half.error) / len(self.error) for half in halves]

        def mean(side: str) -> Predicted:
            parts = [getattr(x, side).model_dump() for x in seen]
            joined = {name: sum(w * x[name] for w, x in zip(weight, parts)) for name in ("error", "bytes")}
            return Predicted(**joined, ratio=joined["bytes"] / float(self.bf16.mean()))

        return Change(before=mean("before"), after=mean("after"))

    def error_by_head(self) -> HeadScale:
        """[layers][heads], at factor 1."""
        return tuple(map(tuple, self.error[..., self._base].mean(0).tolist()))


def collect(model: Any, texts: Sequence[Text], rule: Rule) -> Curves:
    """A forward pass over each text."""
    found = [_curves(model, text, rule) for text in tqdm(texts, desc="heads", unit="sequence")]
    errors, sizes, plain = zip(*found)
    return Curves(torch.stack(errors), torch.stack(sizes), torch.tensor(plain, dtype=torch.float64))


def _curves(model: Any, text: Text, rule: Rule) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Errors and bytes [layers, heads, factors] of one text, and its bytes in bf16."""
    layers: list[tuple[torch.Tensor, torch.Tensor, float]] = []

    def visit(seen: LayerPass) -> None:
        layers.append((*measure(seen, text.prompt, rule, FACTORS), 2.0 * (seen.k.numel() + seen.v.numel())))

    run(model, text.ids, visit)
    errors, sizes, plain = zip(*layers)
    return torch.stack(errors), torch.stack(sizes), sum(plain)


@dataclass(frozen=True)
class Source:
    """What factors are fitted to: the first ``n`` usable questions of ``task``, of at most ``max_tokens`` each."""

    model: str
    task: Task
    tokenizer: Any
    n: int
    max_tokens: int
    selection: dict[str, Any]

    @property
    def about(self) -> dict[str, Any]:
        """What a fit depends on beside the configuration."""
        file = self.task.fingerprint()
        names = {"model": model_name(self.model), "task_file": file["file"], "task_sha256": file["sha256"]}
        return {**names, "selection": {**self.selection, "max_tokens": self.max_tokens}}


def rule_of(config: DiffKVConfig) -> Rule:
    """What decides which tokens are low. Raises ConfigError where nothing does."""
    if len(config.tiers) < 2:
        raise ConfigError(f"tier {config.tiers[0]} alone: factors move tokens between two tiers")
    if len(config.tiers) > 2:
        raise ConfigError(f"{len(config.tiers)} tiers: factors are fitted for two")
    policy = config.policy
    assert isinstance(policy, DiffKVPolicyConfig)
    high, low = config.parsed_tiers
    return Rule((high, low), policy.alpha_high, policy.alpha_low, policy.window, policy.sinks, config.rotate)


def described(config: DiffKVConfig) -> dict[str, Any]:
    """The configuration as a file of factors names it."""
    return config.model_dump(mode="json", include={"tiers", "policy", "rotate"}, exclude={"policy": {"head_scale"}})


def fit_factors(source: Source, model: Any, config: DiffKVConfig) -> HeadScaleFile:
    """The factors for one configuration. Raises ConfigError and TaskFileError."""
    rule = rule_of(config)
    texts, skipped = choose(read(source.task, source.tokenizer), source.n, rule.window, source.max_tokens)
    curves = collect(model, texts, rule)
    taken = curves.fit()
    prompts, total = sum(x.prompt for x in texts), sum(len(x.ids) for x in texts)
    return HeadScaleFile(
        head_scale=curves.scale(taken),
        provenance=HeadProvenance(
            date=datetime.now(timezone.utc).date().isoformat(),
            **source.about,
            geometry=ModelGeometry.of(source.model),
            n=len(texts),
            skipped=skipped,
            prompt_tokens=prompts,
            reply_tokens=total - prompts,
            rule=described(config),
            factors=FACTORS,
            change=curves.change(taken),
            held_out=curves.held_out(),
            error_by_head=curves.error_by_head(),
            versions=report.environment()["versions"],
            device=device_name(),
        ),
    )


def fit_all(source: Source, configs: Mapping[str, DiffKVConfig], folder: Path) -> dict[str, HeadScale]:
    """Factors by name, read from ``folder`` where they are there already; the model is held only while it is needed.

    Raises:
        ConfigError, TaskFileError: as ``fit_factors``.
        EvaluationError: the model is not supported, or a file in ``folder`` was fitted to something else.
    """
    found: dict[str, HeadScale] = {}
    model = None
    folder.mkdir(parents=True, exist_ok=True)
    for name, config in configs.items():
        path = folder / f"{name}.json"
        if path.exists():
            found[name] = _read(path, source, config)
            continue
        if model is None:
            model = load_model(source.model)
        content = fit_factors(source, model, config)
        path.write_text(content.model_dump_json(indent=1) + "\n", encoding="utf-8")
        found[name] = content.head_scale
    if model is not None:
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def _read(path: Path, source: Source, config: DiffKVConfig) -> HeadScale:
    try:
        content = HeadScaleFile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise EvaluationError(f"{path} is not a file of factors: {error}") from None
    about = content.provenance
    same = all(getattr(about, name) == value for name, value in source.about.items())
    if not same or about.n > source.n or about.rule != described(config):
        raise EvaluationError(f"{path} was fitted to other questions or at another setting: use a new --work")
    return content.head_scale
