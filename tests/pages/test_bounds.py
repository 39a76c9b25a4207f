"""Every number of a configuration has a range: what is within runs, what is outside is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from sglang_diffkv.calibration import CalibratedPolicy, CalibratedThresholds, CalibrationFile
from sglang_diffkv.config import DiffKVConfig, load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.mem_pool.integrity import check_integrity
from sglang_diffkv.plan import MemoryPlan
from sglang_diffkv.policies.registry import PolicyConfig
from sglang_diffkv.refusals import Kind, kind_of
from tests.dense import Session
from tests.helpers import make_manager
from tests.policies import documented_methods

LAYERS, HEADS = 2, 2
POLICIES: dict[str, type[BaseModel]] = {kind.model_fields["name"].default: kind for kind in get_args(PolicyConfig)}
OUTSIDE = re.compile("allowed is (a whole|a) number")
ALONE = {"min_retention": "keep", "layer_fractions": "keep"}
"""Fields that stand in the place of another."""


def numbers(model: type[BaseModel]) -> Iterator[tuple[str, Kind, int]]:
    """The numeric fields of a model: the name, the number's type, and how many lists it lies in."""
    for name in model.model_fields:
        kind, depth = kind_of(model, name), 0
        while kind.item is not None:
            kind, depth = kind.item, depth + 1
        if kind.choices[0] in (int, float):
            yield name, kind, depth


def limits(kind: Kind) -> tuple[float, float, bool]:
    """The least number, the largest, and whether the least is outside."""
    return kind.limits.get("ge", kind.limits.get("gt")), kind.limits["le"], "gt" in kind.limits


def models(model: Any, seen: set[Any]) -> Iterator[type[BaseModel]]:
    """A model and those that its fields hold."""
    if not isinstance(model, type) or not issubclass(model, BaseModel) or model in seen:
        return
    seen.add(model)
    yield model
    for name in model.model_fields:
        kind: Kind | None = kind_of(model, name)
        while kind is not None:
            for choice in kind.choices:
                yield from models(choice, seen)
            kind = kind.item


def test_every_number_has_two_bounds() -> None:
    """Of configurations, of methods and of calibration files."""
    found = 0
    for model in models(DiffKVConfig, seen := set()):
        found += len(list(_bounded(model)))
    for model in (*models(CalibrationFile, seen), *models(CalibratedThresholds, seen), *models(CalibratedPolicy, seen)):
        found += len(list(_bounded(model)))
    assert found > 100 and set(POLICIES.values()) <= seen


def _bounded(model: type[BaseModel]) -> Iterator[str]:
    for name, kind, _ in numbers(model):
        assert "le" in kind.limits and ("ge" in kind.limits or "gt" in kind.limits), (model.__name__, name)
        yield name


def value(number: float, name: str, depth: int) -> Any:
    """A number where the field has it."""
    if name == "alpha_between":
        return [number]
    by_layer = [number] * LAYERS
    return number if depth == 0 else by_layer if depth == 1 else [[number] * HEADS for _ in range(LAYERS)]


def configuration(policy: str, **fields: Any) -> dict[str, Any]:
    """One of a method, in tiers that it can have."""
    tiers = {"diffkv": ["K8V4", "K4V2"], "leankv": ["K8V4", "K4V2"]}.get(policy, ["K8V4"])
    if "alpha_between" in fields:
        tiers = ["BF16", "K8V4", "K4V2"]
    example = documented_methods(LAYERS, HEADS)[policy]
    needed = {k: v for k, v in example.items() if not any(ALONE.get(x) == k for x in fields)}
    return {"tiers": tiers, "policy": {**needed, **fields}}


def run(config: DiffKVConfig) -> None:
    """A prompt and some steps of the reference, with what attention gives compared with finite numbers."""
    config.check_heads(LAYERS, HEADS)
    fmt, policy = config.page_format(64, 64, 600), config.build_policy()
    plan = MemoryPlan(config, fmt, LAYERS, HEADS, 4, gpu=False, keeps_retracted=True)
    geometry = plan.geometry(10_000, 4, 600)
    assert plan.footprint(geometry, 10_000).total > 0 and plan.host_pages(geometry) >= 0
    manager = make_manager(fmt, policy=policy, pages=600, q_heads=4)
    session = Session(manager)
    session.extend({1: 40, 2: 3}, check=False)
    for row in (1, 2):
        session.manager.prompts.end(row)
    if policy.running is None:
        for _ in range(3):
            session.step([1, 2], check=False)
    check_integrity(manager)


CASES = [(policy, name) for policy, kind in POLICIES.items() for name, _, _ in numbers(kind)]


@pytest.mark.parametrize(("policy", "name"), CASES, ids=lambda x: str(x))
def test_the_ends_of_each_range_run_and_what_is_beyond_is_refused(policy: str, name: str) -> None:
    [(kind, depth)] = [(kind, depth) for found, kind, depth in numbers(POLICIES[policy]) if found == name]
    low, high, above = limits(kind)
    whole = kind.choices[0] is int
    least = math.nextafter(low, high) if above else low
    ran = 0
    for number in (least, high, low + 1e-320, (low + high) // 2 if whole else (low + high) / 2):
        given = int(number) if whole else float(number)
        try:
            config = load_config(json.dumps(configuration(policy, **{name: value(given, name, depth)})))
        except ConfigError as error:  # in its range, and beside others impossible
            assert not OUTSIDE.search(str(error)), error
            continue
        run(config)
        ran += 1
    assert ran or name in ("alpha_low", "mass_low"), "one at least goes with the defaults of the others"
    beyond = (
        [low - 1, high + 1] if whole else [math.nextafter(high, math.inf), low if above else math.nextafter(low, -9e99)]
    )
    for number in (*beyond, 10**19, -(10**19), 3e38, "3", True):
        with pytest.raises(ConfigError, match=name) as refused:
            load_config(json.dumps(configuration(policy, **{name: value(number, name, depth)})))
        assert OUTSIDE.search(str(refused.value))


@pytest.mark.parametrize("name", [name for name, _, _ in numbers(DiffKVConfig)])
def test_numbers_beside_the_policy(name: str) -> None:
    [kind] = [kind for found, kind, _ in numbers(DiffKVConfig) if found == name]
    low, high, _ = limits(kind)
    for number in (low, high):
        run(load_config(json.dumps({name: number})))
    for number in (low - 1, high + 1, 10**19, "3", True, 4096.0):
        with pytest.raises(ConfigError, match=f"{name} is .*allowed is"):
            load_config(json.dumps({name: number}))


def drawn(policy: str) -> Any:
    """Any fields of a method, each in its range, the ends more often."""

    def one(name: str, kind: Kind, depth: int) -> Any:
        low, high, above = limits(kind)
        if kind.choices[0] is int:
            number = st.sampled_from([int(low), int(high)]) | st.integers(int(low), min(int(high), int(low) + 100))
        else:
            number = st.sampled_from([high] if above else [low, high]) | st.floats(low, high, exclude_min=above)
        return number.map(lambda x: value(x, name, depth))

    optional = {
        name: one(*rest, depth) for name, *rest, depth in ((n, n, k, d) for n, k, d in numbers(POLICIES[policy]))
    }
    return st.fixed_dictionaries({}, optional=optional).map(lambda fields: configuration(policy, **fields))


@settings(deadline=None)
@given(data=st.sampled_from(list(POLICIES)).flatmap(drawn))
def test_any_numbers_within_their_ranges_run_or_are_refused_together(data: dict[str, Any]) -> None:
    torch.manual_seed(0)
    try:
        config = load_config(json.dumps(data))
    except ConfigError as error:
        assert not OUTSIDE.search(str(error))
        return
    run(config)
