"""The settings that a plan compares: SGLang's own caches, and DiffKV's by the names and JSON that a server takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_diffkv.calibration import resolution
from sglang_diffkv.capacity.speed import Kind
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import quoted

DEFAULT, HIGH, WINDOW = "default", "K8V4", "window 64"
OURS = {
    DEFAULT: "{}",
    HIGH: '{"tiers": ["K8V4"]}',
    WINDOW: '{"policy": {"name": "diffkv", "alpha_high": 1e9, "window": 64}}',
}
"""Configurations that every plan has."""
STOCK: dict[str, tuple[Kind, int]] = {"bf16": ("bf16", 2), "fp8_e4m3": ("fp8", 1)}
"""SGLang's own caches, with bytes of an element."""
OPTION = "--config"
MOST_SETTINGS = 12


@dataclass(frozen=True)
class Setting:
    """What a row of a plan is of. ``config``: None for a cache of SGLang's own, whose elements have ``element`` bytes.
    ``origin``: where thresholds come from, in words."""

    name: str
    kind: Kind
    config: DiffKVConfig | None = None
    element: int = 2
    origin: str = ""


def settings_of(given: Sequence[str], model_path: Path) -> list[Setting]:
    """SGLang's caches, DiffKV's three, and those that the user gives. Thresholds are looked up for the model of a
    ``config.json`` at ``model_path``, as a server does.

    Args:
        given: each as for ``--diffkv-config`` (a name, a file or JSON), or with ``NAME=`` before it.

    Raises ConfigError.
    """
    found = [Setting(name, kind, element=element) for name, (kind, element) in STOCK.items()]
    sources = dict(OURS)
    for text in given:
        name, source = named_source(text)
        if not name.isprintable():
            raise ConfigError(f"{OPTION} {quoted(name)}: a NAME has letters, digits and signs on one line")
        if name in sources or name in STOCK:
            raise ConfigError(f"{OPTION} {quoted(name)} is taken: choose another NAME, as in {OPTION} 'mine={{...}}'")
        sources[name] = source
    if len(sources) > MOST_SETTINGS:
        raise ConfigError(f"{OPTION} is given {len(given)} times: a plan has at most {MOST_SETTINGS} settings")
    for name, source in sources.items():
        resolved = resolution(source, model_path.parent, f"{OPTION} {quoted(name)}")
        if resolved.config.chosen_at_start:
            raise ConfigError(f"{OPTION} {quoted(name)} is chosen once a model is loaded: name what you expect of it")
        found.append(Setting(name, "diffkv", resolved.config, origin=resolved.origin))
    return found


def named_source(text: str) -> tuple[str, str]:
    """A configuration's name in the table, and the configuration as a server takes it."""
    name, equals, source = text.partition("=")
    if equals and not set(name) & set('{["/') and name.strip() and source.strip():
        return name.strip(), source
    if not text.strip():
        raise ConfigError(f"{OPTION} is empty: give NAME=JSON, a file or a name that --diffkv-config takes")
    return text if len(text) <= 40 else f"{text[:37]}...", text
