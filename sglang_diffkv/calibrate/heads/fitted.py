"""Factors fitted at one or several configurations to the same questions; a search keeps them in its work folder."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from sglang_diffkv.calibrate.heads.capture import load_model
from sglang_diffkv.calibrate.heads.curves import Rule
from sglang_diffkv.calibrate.heads.fit import FACTORS, choose, collect, read
from sglang_diffkv.calibrate.heads.result import HeadProvenance, HeadScaleFile
from sglang_diffkv.calibration import HeadScale, ModelGeometry, model_name
from sglang_diffkv.config import DiffKVConfig, DiffKVPolicyConfig
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate import report
from sglang_diffkv.evaluate.configuration import device_name
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.task import Task


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
