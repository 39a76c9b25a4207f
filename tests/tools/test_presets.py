"""Configurations by name, wherever one is given."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.paths import NANO, REPOSITORY
from sglang_diffkv.calibration import resolution
from sglang_diffkv.config import CONFIG_ENV, DiffKVConfig, load_config, read_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate.configuration import parse_configuration
from sglang_diffkv.presets import PRESETS
from sglang_diffkv.srt.hooks.registration import extend_engine
from sglang_diffkv.srt.startup import launch


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch of no other test, and no configuration in the environment."""
    monkeypatch.setenv(CONFIG_ENV, "")
    monkeypatch.setenv(launch.ORIGINS_ENV, "")
    monkeypatch.setattr(launch, "_launched", None)


def test_what_each_preset_is() -> None:
    found = {name: load_config(name) for name in PRESETS if name != "auto"}
    assert list(PRESETS) == ["auto", *found] and list(found) == ["lossless", "careful", "safe", "balanced", "small"]
    assert found["lossless"].lossless
    assert found["careful"].tiers == ("K8V5",) and found["careful"].rotate == "both"
    assert found["safe"].tiers == ("K8V4",) and not found["safe"].build_policy().compresses
    assert found["balanced"].whole() == {**DiffKVConfig().whole(), "key_means": "auto"}, "the default, with key means"
    small = found["small"]
    assert small.tiers == found["balanced"].tiers and not small.build_policy().scored_tiers(2), "a window alone"
    assert small.key_means == "auto" and found["safe"].key_means is found["lossless"].key_means is None
    assert not any(x.build_policy().prunes for x in found.values())


@pytest.mark.parametrize("name", PRESETS)
def test_a_report_names_the_preset(name: str) -> None:
    found = resolution(name, NANO)
    assert not found.files and read_config(found.config.as_text()) == found.config, "what travels to the scheduler"
    if name == "auto":
        assert found.config.chosen_at_start and "once it is loaded" in found.origin
        return
    assert found.origin == f"those of the preset {name}"
    assert {x for x, source in found.sources.items() if source == f"preset {name}"} >= {"tiers"}
    assert set(found.sources.values()) <= {f"preset {name}", "default"}


def test_a_preset_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_ENV, " small\n")
    assert load_config() == load_config("small")
    assert launch.configuration_report()["sources"]["tiers"] == "preset small"


def test_a_file_of_a_preset_s_name_is_given_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name means the same in every folder."""
    monkeypatch.chdir(tmp_path)
    Path("small").write_text('{"page_tokens": 8}', encoding="utf-8")
    Path("mine").write_text('{"page_tokens": 16}', encoding="utf-8")
    assert load_config("small").page_tokens == 32
    assert load_config("./small").page_tokens == 8 and load_config(str(tmp_path / "small")).page_tokens == 8
    assert load_config("mine").page_tokens == 16, "any other name is a file's, if there is one"


@pytest.mark.parametrize(("given", "meant"), [("smal", "small"), ("Balanced", "balanced"), ("loss-less", "lossless")])
def test_a_misspelt_preset(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f'did you mean "{meant}"') as found:
        load_config(given)
    assert "\n" not in str(found.value)
    with pytest.raises(
        ConfigError, match=r'--diffkv-config: "fastest" is no preset \(auto, lossless, .*, small\), JSON or file\.'
    ):
        load_config("fastest")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config("./smal")


def test_an_evaluation_takes_presets() -> None:
    assert parse_configuration("safe").diffkv == parse_configuration("mine=safe").diffkv == load_config("safe")
    assert parse_configuration("safe").name == "safe"
    with pytest.raises(ConfigError, match="'balanced'"):
        parse_configuration("save")


@pytest.mark.parametrize("given", ["small", {"tiers": ["K8V8"]}, '{"tiers": ["K8V8"]}'])
def test_an_engine_takes_a_preset_a_dict_and_json(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one of the process does not inherit it."""
    monkeypatch.setattr(launch, "_check", lambda args, config: None)
    monkeypatch.setenv(CONFIG_ENV, "safe")
    arguments = launch.EngineArguments(SimpleNamespace)
    mine = {"attention_backend": "diffkv", "model_path": str(NANO)}
    assert not hasattr(arguments(**mine, diffkv_config=given), "diffkv_config")
    text = given if isinstance(given, str) else json.dumps(given)
    assert load_config() == load_config(text)
    assert launch.configuration_report()["sources"]["tiers"] in ("preset small", "diffkv_config")
    arguments(**mine)
    assert os.environ[CONFIG_ENV] == "safe"


def test_what_an_engine_refuses() -> None:
    arguments = launch.EngineArguments(SimpleNamespace)
    with pytest.raises(ConfigError, match="no effect without attention_backend"):
        arguments(attention_backend="triton", model_path=str(NANO), diffkv_config="small")
    with pytest.raises(ConfigError, match="is a list: allowed is a dict, a preset's name"):
        arguments(attention_backend="diffkv", model_path=str(NANO), diffkv_config=["small"])
    with pytest.raises(ConfigError, match=r"^diffkv_config \(inline JSON\).*did you mean page_tokens"):
        arguments(attention_backend="diffkv", model_path=str(NANO), diffkv_config={"page_token": 8})


def test_sglang_s_engine_is_extended_once() -> None:
    from sglang.srt.entrypoints.engine import Engine

    extend_engine()
    extended = Engine.server_args_class
    extend_engine()
    assert Engine.server_args_class is extended and isinstance(extended, launch.EngineArguments)


def test_the_page_has_each_preset_as_it_is() -> None:
    page = (REPOSITORY / "docs" / "choose.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\{.*?\})` \|", page, re.MULTILINE))
    assert {name: read_config(text).whole() for name, text in rows.items()} == {
        name: read_config(name).whole() for name in PRESETS
    }
