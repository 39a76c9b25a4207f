"""Which configuration a server runs: the user's, or the thresholds calibrated for its model."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.paths import NANO
from sglang_diffkv.calibration import FILE_NAME, ModelGeometry, lookup, resolution, resolve
from sglang_diffkv.config import CONFIG_ENV, DiffKVConfig, DiffKVPolicyConfig, load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate.configuration import parse_configuration
from sglang_diffkv.policies.leankv import LeanKVPolicyConfig
from sglang_diffkv.srt.hooks import table as hooks
from sglang_diffkv.srt.startup import launch

SHAPE = {"num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "hidden_size": 5120}
FIGURES = ("accuracy", "accuracy_error", "difference", "difference_error", "p", "ratio_pages", "ratio_tokens")
MEASURED = {
    "models": ["mine"],
    "tiers": ["K8V4", "K4V2"],
    "alpha_high": 2.5,
    "alpha_low": 0.0,
    "window": 32,
    "source": "measured",
    "chosen": {
        **dict.fromkeys(FIGURES, 0.3),
        **{"n": 9, "tiers": ["K8V4", "K4V2"], "alpha_high": 2.5, "alpha_low": 0.0},
    },
    "provenance": {
        **{"date": "2025-01-01", "procedure": "paper", "tolerance_points": 1, "task_file": "f", "task_sha256": "0"},
        **{"n": 9, "selection": {}, "bf16_accuracy": 1, "bf16_accuracy_error": 0, "versions": {}, "device": "cpu"},
        "grid": [],
    },
}
PUBLISHED = {**MEASURED, "source": "published", "chosen": None, "provenance": None}
QWQ, ASKED = "Qwen/QwQ-32B", '{"thresholds": "published"}'


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    """``os.environ`` is put back as it was, without a configuration in the tests."""
    monkeypatch.setenv(CONFIG_ENV, "")


def model(folder: Path, entry: dict[str, object] | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    if entry is not None:
        (folder / FILE_NAME).write_text(json.dumps({"format": 1, "entries": [entry]}))
    return folder


def alphas(config: DiffKVConfig) -> tuple[float, float, int]:
    assert isinstance(config.policy, DiffKVPolicyConfig)
    return config.policy.alpha_high, config.policy.alpha_low, config.policy.window


def test_without_a_configuration_the_model_s_own_file_counts(tmp_path):
    config, origin = resolve(None, model(tmp_path / "mine", MEASURED))
    assert alphas(config) == (2.5, 0.0, 32)
    assert origin.startswith("calibrated for mine, measured with this package (") and origin.endswith(f"{FILE_NAME})")


def test_thresholds_that_prune_are_taken_only_when_asked_for(tmp_path, caplog):
    own = model(tmp_path / "mine", {**MEASURED, "alpha_low": 0.01})
    config, origin = resolve(None, own)
    assert config == DiffKVConfig() and "built-in defaults" in origin and "prune" in origin
    assert f"{own / FILE_NAME}" in caplog.text and '--diffkv-config \'{"thresholds": "calibrated"}\'' in caplog.text
    caplog.clear()
    assert alphas(resolve('{"thresholds": "calibrated"}', own)[0]) == (2.5, 0.01, 32)
    assert not caplog.records


@pytest.mark.parametrize("name", [QWQ, "Qwen/Qwen2.5-32B-Instruct", "meta-llama/Llama-3.1-8B", "Meta-Llama-3-70B"])
def test_published_thresholds_are_taken_only_when_asked_for(name, caplog):
    """A model's name asks for nothing."""
    config, origin = resolve(None, name)
    assert config == DiffKVConfig() and origin.startswith("the built-in defaults") and ASKED in origin
    asked, origin = resolve(ASKED, name)
    assert asked.policy is not None and asked.policy.window == 64 and "published, not measured here" in origin
    with pytest.raises(ConfigError, match=r'none are measured for .*"thresholds": "published"'):
        resolve('{"thresholds": "calibrated"}', name)
    assert not caplog.records


def test_published_thresholds_of_the_model_s_own_file(tmp_path):
    own = model(tmp_path / "mine", PUBLISHED)
    assert resolve(None, own)[0] == DiffKVConfig()
    config, origin = resolve(ASKED, own)
    assert alphas(config) == (2.5, 0.0, 32) and origin.endswith(f"{FILE_NAME})")
    measured = model(tmp_path / "other", MEASURED)
    with pytest.raises(ConfigError, match='"thresholds": "published": none are on file for other'):
        resolve(ASKED, measured)


def test_published_thresholds_are_found_by_name_without_a_download():
    config, origin = resolve(ASKED, QWQ)
    assert alphas(config) == (3.0, 0.0, 64) and config.rotate == "none" and config.policy.sinks == 0
    assert "published, not measured here" in origin and "published.json" in origin


def test_a_model_without_thresholds_runs_the_defaults():
    config, origin = resolve(None, "someone/else-7B")
    assert config == DiffKVConfig() and "built-in defaults" in origin


def test_an_empty_configuration_is_none(tmp_path):
    """So ``evaluate --config 'default={}'`` measures what a plain server runs."""
    own = model(tmp_path / "mine", MEASURED)
    assert resolve("{}", own) == resolve(None, own) and alphas(resolve(" { } ", own)[0]) == (2.5, 0.0, 32)
    assert parse_configuration("default={}", str(own)).diffkv == resolve(None, own)[0]
    assert resolve('{"thresholds": "default"}', own)[0] == DiffKVConfig()


@pytest.mark.parametrize("text", ['{"thresholds": "default"}', '{"page_tokens": 16}', '{"tiers": ["K8V4"]}'])
def test_a_given_configuration_means_what_it_says(text, monkeypatch, tmp_path):
    own = model(tmp_path / "mine", MEASURED)
    assert resolve(text, own)[0] == read_plain(text)
    monkeypatch.setenv(CONFIG_ENV, text)
    assert resolve(None, own)[0] == read_plain(text), "the environment is a given configuration too"


def read_plain(text: str) -> DiffKVConfig:
    return DiffKVConfig.model_validate_json(text)


def test_published_thresholds_beside_other_fields():
    config, _ = resolve('{"thresholds": "published", "gpu_ops": "reference", "page_tokens": 16}', "QwQ-32B")
    assert alphas(config) == (3.0, 0.0, 64) and (config.gpu_ops, config.page_tokens) == ("reference", 16)
    assert config.thresholds == "default" and "thresholds" not in config.model_dump(mode="json")
    assert load_config(config.model_dump_json(exclude_none=True)) == config, "what travels to the scheduler"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"thresholds": "calibrated"}', "none are on file for else-7B"),
        ('{"thresholds": "calibrated", "tiers": ["K8V4"]}', "drop tiers"),
        ('{"thresholds": "calibrated", "policy": {"name": "diffkv"}}', "drop policy"),
        (ASKED, "none are on file for else-7B"),
        ('{"thresholds": "paper"}', '"calibrated", "published", "default"'),
    ],
)
def test_calibrated_thresholds_that_cannot_be_had_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        resolve(text, "someone/else-7B")


LEAN = {
    "models": ["mine"],
    "tiers": ["K4V2", "K4V1"],
    "policy": {"name": "leankv", "mass_high": 0.1},
    "source": "measured",
    "provenance": {"date": "2025-01-01"},
}


def test_a_named_file_counts_before_the_model_s_own(tmp_path):
    own = model(tmp_path / "mine", MEASURED)
    other = {"layers": 2, "query_heads": 4, "kv_heads": 2, "head_dim": 64}
    path = tmp_path / "task.json"
    entries = [{**MEASURED, "geometry": other, "alpha_high": 9.0}, LEAN]
    path.write_text(json.dumps({"format": 1, "entries": entries}))
    config, origin = resolve(json.dumps({"thresholds": str(path), "page_tokens": 16}), own)
    assert config.tiers == ("K4V2", "K4V1") and config.policy == LeanKVPolicyConfig(mass_high=0.1)
    assert config.page_tokens == 16 and origin == f"calibrated for mine, measured with this package ({path})"
    path.write_text(json.dumps({"format": 1, "entries": entries[:1]}))
    with pytest.raises(ConfigError, match=r'task.json" has none for a model of the shape of mine'):
        resolve(json.dumps({"thresholds": str(path)}), own)
    for given, message in (("none.json", 'none.json" is not a usable'), ("none.txt", "ends in .json")):
        with pytest.raises(ConfigError, match=message):
            resolve(json.dumps({"thresholds": given}), own)
    with pytest.raises(ConfigError, match="drop policy"):
        resolve(json.dumps({"thresholds": str(path), "policy": {"name": "diffkv"}}), own)


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"policy": {"name": "leankv", "mass_low": 0.01}}, False),
        ({"policy": {"name": "xkv", "layer_fractions": [0.5] * 64}}, False),
    ],
)
def test_another_method_is_taken_unasked_only_if_it_does_not_prune(tmp_path, changes, taken):
    own = model(tmp_path / "mine", {**LEAN, **changes})
    config, origin = resolve(None, own)
    assert (config.tiers == ("K4V2", "K4V1")) == taken and ("built-in" in origin) != taken
    asked, _ = resolve('{"thresholds": "calibrated"}', own)
    assert asked.policy is not None and asked.policy.name == {**LEAN, **changes}["policy"]["name"]


def test_without_a_model_calibrated_thresholds_are_refused():
    with pytest.raises(ConfigError, match="looked up for a model"):
        load_config('{"thresholds": "calibrated"}')


def test_an_unusable_file_is_named_with_a_way_out(tmp_path):
    folder = model(tmp_path / "mine")
    (folder / FILE_NAME).write_text("{")
    with pytest.raises(ConfigError, match=f'(?s){FILE_NAME}.*"thresholds": "default"'):
        resolve(None, folder)
    assert resolve('{"thresholds": "default"}', folder)[0] == DiffKVConfig()


def test_a_hub_name_s_shape_comes_from_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert ModelGeometry.of("Qwen/QwQ-32B") is None and lookup(QWQ, source="published") is not None
    repository = tmp_path / "models--Qwen--QwQ-32B"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({**SHAPE, "num_key_value_heads": 40}))
    assert lookup(QWQ, source="published") is None, "another shape by the same name"
    (snapshot / FILE_NAME).write_text(json.dumps({"format": 1, "entries": [MEASURED]}))
    found = lookup(QWQ)
    assert found is not None and found.alpha_high == 2.5


def start(given: str | None, path: str) -> None:
    """``from_cli_args`` as SGLang calls it, up to the processes. No model would choose: weights are random."""
    server_args = SimpleNamespace(attention_backend="diffkv", model_path=path, load_format="dummy")
    hooks.from_cli_args(lambda cls, args: server_args, object, SimpleNamespace(diffkv_config=given))


def test_the_server_looks_up_once_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(launch, "check_server_args", lambda args, gpu_ops: None)
    monkeypatch.setattr(launch, "choose_graphs", lambda args: None)
    monkeypatch.setattr(launch.compat, "decline_hybrid_swa_pools", lambda args: None)
    with caplog.at_level(logging.INFO):
        start(ASKED, QWQ)
    assert alphas(load_config(os.environ[CONFIG_ENV])) == (3.0, 0.0, 64)
    assert "calibrated for QwQ-32B, published, not measured here" in caplog.text
    start(None, QWQ)
    assert load_config() == DiffKVConfig()
    start('{"thresholds": "default"}', "Qwen/QwQ-32B")
    assert load_config() == DiffKVConfig()
    with pytest.raises(SystemExit, match="none are on file for nano"):
        start('{"thresholds": "calibrated"}', str(NANO))


def test_an_engine_without_arguments_looks_up_too(monkeypatch, caplog, tmp_path):
    """``sglang.Engine`` takes no ``--diffkv-config``: a launch configures what parsing has not."""
    monkeypatch.setattr(launch, "check_server_args", lambda args, gpu_ops: None)
    monkeypatch.setattr(launch, "choose_graphs", lambda args: None)
    monkeypatch.setattr(launch.compat, "decline_hybrid_swa_pools", lambda args: None)
    monkeypatch.setattr(launch, "_launched", None)
    server_args = SimpleNamespace(attention_backend="diffkv", model_path=str(model(tmp_path / "mine", MEASURED)))
    with caplog.at_level(logging.INFO):
        hooks.check_server_args(lambda self: None, server_args)
        assert alphas(load_config(os.environ[CONFIG_ENV])) == (2.5, 0.0, 32)
        hooks.check_server_args(lambda self: None, server_args)
    assert caplog.text.count("DiffKV configuration") == 1
    monkeypatch.setenv(CONFIG_ENV, '{"thresholds": "calibrated"}')
    with pytest.raises(ConfigError, match="none are on file for nano"):
        hooks.check_server_args(lambda self: None, SimpleNamespace(attention_backend="diffkv", model_path=str(NANO)))
    monkeypatch.delenv(CONFIG_ENV)
    hooks.check_server_args(lambda self: None, SimpleNamespace(attention_backend="triton", model_path=str(NANO)))
    assert CONFIG_ENV not in os.environ


def test_a_launch_does_not_inherit_what_an_earlier_one_found(monkeypatch, tmp_path):
    """Each launch of a process takes its own arguments, the user's environment, or its model's thresholds."""
    monkeypatch.setattr(launch, "check_server_args", lambda args, gpu_ops: None)
    monkeypatch.setattr(launch, "choose_graphs", lambda args: None)
    monkeypatch.setattr(launch.compat, "decline_hybrid_swa_pools", lambda args: None)
    monkeypatch.setattr(launch, "_launched", None)
    monkeypatch.delenv(CONFIG_ENV, raising=False)
    own = str(model(tmp_path / "mine", MEASURED))
    calibrated = SimpleNamespace(attention_backend="diffkv", model_path=own, load_format="dummy")
    other = SimpleNamespace(attention_backend="diffkv", model_path=str(NANO), load_format="dummy")
    for server_args, expected in ((calibrated, 32), (other, DiffKVConfig().build_policy().window), (calibrated, 32)):
        hooks.check_server_args(lambda self: None, server_args)
        assert load_config().build_policy().window == expected
    start('{"page_tokens": 16}', str(NANO))
    hooks.check_server_args(lambda self: None, other)
    assert load_config().page_tokens == 16, "the launch keeps what its command line gave"
    start(None, str(NANO))
    assert load_config() == DiffKVConfig(policy=load_config().policy), "the next one does not"
    monkeypatch.setenv(CONFIG_ENV, '{"page_tokens": 8}')
    start('{"page_tokens": 16}', str(NANO))
    hooks.check_server_args(lambda self: None, calibrated)
    assert load_config().page_tokens == 8, "the user's environment comes back"


def sources(text: str | None, path: object, given_by: str = "--diffkv-config") -> dict[str, str]:
    """Fields that are no default, with their source."""
    found = resolution(text, path, given_by)
    assert set(found.sources) == flat(found.config.whole())
    return {name: source for name, source in found.sources.items() if source != "default"}


def flat(values: dict[str, object]) -> set[str]:
    policy = values["policy"]
    assert isinstance(policy, dict)
    return {*(values.keys() - {"policy"}), *(f"policy.{name}" for name in policy)}


def test_each_part_of_the_configuration_has_a_source(tmp_path, monkeypatch):
    own, option = model(tmp_path / "mine", MEASURED), "--diffkv-config"
    assert sources(None, "someone/else-7B") == {}
    given = '{"page_tokens": 16, "policy": {"name": "diffkv", "alpha_high": 5}}'
    wanted = ("page_tokens", "policy.name", "policy.alpha_high")
    assert sources(given, own) == dict.fromkeys(wanted, option)
    monkeypatch.setenv(CONFIG_ENV, given)
    assert sources(None, own) == dict.fromkeys(wanted, CONFIG_ENV)
    monkeypatch.setenv(CONFIG_ENV, "")
    found = sources('{"thresholds": "calibrated", "page_tokens": 16}', own)
    assert (found["page_tokens"], found["tiers"], found["rotate"], found["policy.alpha_high"]) == (
        *(option, "calibrated", "calibrated", "calibrated"),
    )
    assert resolution(None, own).report()["files"] == {"calibrated": str(own / FILE_NAME)}
    assert set(sources(ASKED, QWQ).values()) == {"published"}
    path = tmp_path / "configuration.json"
    path.write_text(given)
    assert resolution(str(path), own).report()["files"] == {option: str(path)}


def test_the_report_has_all_that_is_run():
    """Numbers are numbers, and the default policy is written out."""
    report = resolution(None, "someone/else-7B").report()
    policy = DiffKVPolicyConfig().model_dump() | {"observe_every": 4, "alpha_between": []}
    assert report["values"]["policy"] == policy and report["values"]["rotate"] == "both"
    assert {*report["values"]} == {*DiffKVConfig.model_fields} - {"thresholds"}
    assert DiffKVConfig.model_validate(report["values"]).build_policy() == DiffKVConfig().build_policy()
    alone = DiffKVConfig(tiers=("K8V4",)).whole()
    assert (alone["policy"], alone["rotate"]) == ({"name": "uniform"}, "none")
    assert json.loads(json.dumps(report)) == report


def test_an_evaluation_compares_calibrated_thresholds():
    found = parse_configuration(f"c={ASKED}", QWQ).diffkv
    assert found is not None and alphas(found) == (3.0, 0.0, 64)
    assert parse_configuration("d={}", QWQ).diffkv == DiffKVConfig()
    with pytest.raises(ConfigError, match="looked up for a model"):
        parse_configuration('c={"thresholds": "calibrated"}')
