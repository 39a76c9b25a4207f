"""Calibration files: what ships, which entry a model finds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.paths import NANO
from sglang_diffkv.calibration import (
    FILE_NAME,
    CalibratedThresholds,
    CalibrationError,
    CalibrationFile,
    ModelGeometry,
    lookup,
    model_name,
    read_file,
    shipped_files,
)
from sglang_diffkv.config import DiffKVConfig, DiffKVPolicyConfig
from sglang_diffkv.policies.diffkv import DiffKVPolicy

PAIR = ("K8V4", "K4V2")


def write_model(folder: Path, **config: int) -> Path:
    """A model folder with nothing but its shape."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def published(**changes: object) -> CalibratedThresholds:
    fields = {"models": ["x"], "tiers": PAIR, "alpha_high": 2.0, "alpha_low": 0.0, "source": "published"}
    return CalibratedThresholds.model_validate({**fields, **changes})


@pytest.mark.parametrize(
    ("model", "tiers", "alphas"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", PAIR, (1.0, 0.02)),
        ("meta-llama/Llama-3.1-70B-Instruct", PAIR, (1.0, 0.0)),
        ("Qwen/Qwen2.5-7B-Instruct", ("K8V4",), (None, 0.04)),
        ("qwen/qwen2.5-32b", PAIR, (3.0, 0.0)),
        ("/models/QwQ-32B/", PAIR, (3.0, 0.0)),
    ],
)
def test_the_paper_s_thresholds_ship_as_published(model, tiers, alphas):
    assert lookup(model) is None, "not for its name alone"
    found = lookup(model, source="published")
    assert found is not None
    assert (found.tiers, (found.alpha_high, found.alpha_low), found.window) == (tiers, alphas, 64)
    assert found.source == "published" and "not measured with this package" in found.note
    assert found.provenance is None and found.chosen is None
    policy = found.config().build_policy()
    assert isinstance(policy, DiffKVPolicy)
    assert policy.alpha_low == alphas[1] and (alphas[0] is None or policy.alpha_high == alphas[0])
    assert found.config().tiers == tiers and (policy.sinks, found.config().rotate) == (0, "none"), (
        "the paper has neither"
    )


def test_tiers_choose_the_entry():
    assert lookup("QwQ-32B", ["k8v4", "K4V2"], source="published") is not None
    assert lookup("QwQ-32B", ["K8V4"], source="published") is None
    assert lookup("Qwen2.5-7B", PAIR, source="published") is None, "its low tier is off"


@pytest.mark.parametrize("name", ["Qwen2.5-7B-Instruct-AWQ", "my-QwQ-32B", "Qwen2.5-Coder-7B-Instruct", "", "nano"])
def test_other_names_find_nothing(name):
    assert lookup(name) is None and lookup(name, source="published") is None


def test_a_name_alone_is_not_enough_for_another_shape(tmp_path):
    shape = {"num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "hidden_size": 5120}
    assert lookup(write_model(tmp_path / "a" / "QwQ-32B", **shape), source="published") is not None
    assert (
        lookup(write_model(tmp_path / "b" / "QwQ-32B", **{**shape, "num_key_value_heads": 40}), source="published")
        is None
    )


def test_the_model_s_own_file_comes_first(tmp_path):
    shape = {"num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "hidden_size": 5120}
    folder = write_model(tmp_path / "QwQ-32B", **shape)
    own = CalibrationFile(entries=(published(alpha_high=7.0), published(tiers=("K8V4", "K4V4"), alpha_high=4.0)))
    (folder / FILE_NAME).write_text(own.model_dump_json())
    found = lookup(folder, source="published")
    assert found is not None and found.alpha_high == 7.0
    other = lookup(folder, ("K8V4", "K4V4"), source="published")
    assert other is not None and other.alpha_high == 4.0
    assert lookup(folder, ("K8V4", "K8V2"), source="published") is None
    copied = published(geometry={"layers": 1, "query_heads": 1, "kv_heads": 1, "head_dim": 64}, alpha_high=9.0)
    (folder / FILE_NAME).write_text(CalibrationFile(entries=(copied,)).model_dump_json())
    found = lookup(folder, source="published")
    assert found is not None and found.alpha_high == 3.0, "the file is another model's, so the shipped entry counts"


def test_an_unusable_file_is_named(tmp_path):
    (tmp_path / FILE_NAME).write_text('{"format": 2, "entries": []}')
    with pytest.raises(CalibrationError, match=FILE_NAME):
        lookup(tmp_path)


def test_what_a_file_leaves_out_is_the_server_s_default():
    """There is one source of defaults."""
    plain = DiffKVPolicyConfig()
    for tiers, alpha in ((PAIR, plain.alpha_high), (("K8V4",), None)):
        config = published(tiers=tiers, alpha_high=alpha).config()
        policy = config.policy
        assert isinstance(policy, DiffKVPolicyConfig)
        assert (policy.window, policy.sinks, policy.horizon) == (plain.window, plain.sinks, plain.horizon)
        assert config.rotate == DiffKVConfig(tiers=tiers).rotate


def test_geometry_is_read_from_the_model():
    assert ModelGeometry.of(NANO) == ModelGeometry(layers=6, query_heads=4, kv_heads=2, head_dim=64)
    assert ModelGeometry.of("Qwen/QwQ-32B") is None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/QwQ-32B", "QwQ-32B"),
        ("/models/nano/", "nano"),
        ("/cache/hub/models--Qwen--QwQ-32B/snapshots/976055f8c83f", "QwQ-32B"),
    ],
)  # fmt: skip
def test_model_names(path, name):
    assert model_name(path) == name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "measured"}, "provenance"),
        ({"alpha_high": None}, "two tiers"),
        ({"tiers": ["K8V4"]}, "two tiers"),
        ({"alpha_low": 3.0}, "alpha_low"),
        ({"tiers": ["K8V4", "K9V2"]}, "tiers"),
        ({"models": []}, "models"),
        ({"head_scale": [[1.0], [0.0]]}, "head_scale"),
        (
            {"head_scale": [[1.0]], "geometry": {"layers": 2, "query_heads": 2, "kv_heads": 1, "head_dim": 64}},
            "head_scale",
        ),
        ({"beta": 1}, "beta"),
    ],
)
def test_unusable_thresholds_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        published(**changes)


LEAN = {"models": ["x"], "tiers": PAIR, "policy": {"name": "leankv"}, "source": "published"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "measured"}, "provenance"),
        ({"tiers": ["K8V4", "K4V4", "K4V2"]}, "two tiers"),
        ({"policy": {"name": "none"}}, "none"),
        ({"alpha_high": 1.0}, "alpha_high"),
        (
            {
                "policy": {"name": "xkv", "layer_fractions": [0.1]},
                "geometry": {"layers": 2, "query_heads": 2, "kv_heads": 1, "head_dim": 64},
            },
            "layer_fractions is of 1 layers",
        ),
    ],
)
def test_unusable_policies_are_refused(changes, message):
    assert CalibrationFile.model_validate({"entries": [LEAN]}).entries[0].config().tiers == PAIR
    with pytest.raises(ValueError, match=message):
        CalibrationFile.model_validate({"entries": [{**LEAN, **changes}]})


def test_shipped_files_are_valid_and_name_each_model_once():
    names = [name for path in shipped_files() for entry in read_file(path).entries for name in entry.models]
    assert len(names) >= 5 and len(names) == len({name.casefold() for name in names})
