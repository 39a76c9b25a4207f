"""Whatever stands in a configuration, in a calibration or in a file that they name: it is used, or refused at once by a
ConfigError."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sglang_diffkv.calibration import (
    FILE_NAME,
    CalibratedPolicy,
    CalibratedThresholds,
    GridPoint,
    Provenance,
    resolution,
    resolve,
)
from sglang_diffkv.config import CONFIG_ENV, DiffKVConfig, load_config, read_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.fitted_rotation import read_rotation
from sglang_diffkv.key_means import read_key_means
from sglang_diffkv.policies.registry import PolicyConfig

SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}
SECRET = "not-to-be-told"
CONFIDENTIAL = f"root:x:0:0:{SECRET}:/root:/bin/bash\n"

INPUTS: dict[str, bytes] = {
    "not UTF-8": b'{"page_tokens": "\xff\xfe"}',
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"policy": ' * 5_000 + b"1" + b"}" * 5_000,
    "nested in reach of the parser": b'{"policy": ' + b"[" * 400 + b"]" * 400 + b"}",
    "an integer of thousands of digits": b'{"page_tokens": ' + b"9" * 5_000 + b"}",
    "a fraction of thousands of digits": b'{"host_gib": 0.' + b"9" * 5_000 + b"}",
    "a large exponent": b'{"host_gib": 1e999}',
    "NaN": b'{"host_gib": NaN}',
    "Infinity": b'{"policy": {"name": "diffkv", "alpha_high": Infinity}}',
    "keys twice": b'{"page_tokens": 16, "page_tokens": 32}',
    "keys twice inside": b'{"policy": {"name": "diffkv", "window": 64, "window": 128}}',
    "cut off": b'{"tiers": ',
    "nothing": b"",
    "a list": b"[]",
    "null": b"null",
    "a byte order mark": b"\xef\xbb\xbf{}",
    "a NUL": b'{"key_means": "a\x00b"}',
    "too long": b'{"page_tokens": 16' + b" " * (1 << 20) + b"}",
}


@contextmanager
def at_once(seconds: float = 1.0) -> Iterator[None]:
    start = time.process_time()
    yield
    took = time.process_time() - start
    assert took < seconds, f"took {took:.2f} s"


def refusal(call: Callable[[], Any], lines: int = 1) -> str:
    """What is refused with: one line that can be printed, or so many."""
    with at_once(), pytest.raises(ConfigError) as found:
        call()
    told = str(found.value)
    assert told.count("\n") < lines and len(told) < 700 and told.replace("\n", "").isprintable(), told
    assert "pydantic" not in told and "Input should" not in told and "validated data" not in told, told
    return told


def model(folder: Path, *entries: dict[str, Any], content: bytes | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    if entries:
        content = json.dumps({"format": 1, "entries": entries}).encode()
    if content is not None:
        (folder / FILE_NAME).write_bytes(content)
    return folder


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_ENV, "")


@pytest.mark.parametrize("what", INPUTS)
def test_raw_configurations(what: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(INPUTS[what])
    refusal(lambda: read_config(str(path)))
    if what not in ("nothing", "not UTF-8", "nested lists", "a list", "null", "a byte order mark"):
        refusal(lambda: read_config(INPUTS[what].decode()))


@pytest.mark.parametrize("what", INPUTS)
def test_raw_calibrations(what: str, tmp_path: Path) -> None:
    own = model(tmp_path / "mine", content=INPUTS[what])
    assert FILE_NAME in refusal(lambda: resolve(None, own))
    named = json.dumps({"thresholds": str(own / FILE_NAME)})
    assert FILE_NAME in refusal(lambda: resolve(named, own))


@pytest.mark.parametrize("what", INPUTS)
def test_a_model_s_own_configuration_is_not_trusted(what: str, tmp_path: Path) -> None:
    """Its shape is then not known here; SGLang says what is wrong with it."""
    own = model(tmp_path / "mine")
    (own / "config.json").write_bytes(INPUTS[what])
    with at_once():
        assert resolve(None, own)[0] == DiffKVConfig()


@pytest.mark.parametrize(
    "shape",
    [{**SHAPE, "num_attention_heads": 0}, {**SHAPE, "num_hidden_layers": []}, [SHAPE], {**SHAPE, "hidden_size": {}}],
)
def test_a_model_s_shape_may_be_anything(shape: Any, tmp_path: Path) -> None:
    own = model(tmp_path / "mine")
    (own / "config.json").write_text(json.dumps(shape))
    assert resolve(None, own)[0] == DiffKVConfig()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [_fifo, _folder, _device, _loop])
def test_what_is_no_regular_file(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    make(path)
    refusal(lambda: read_config(str(path)))
    refusal(lambda: resolve(json.dumps({"thresholds": str(path)}), tmp_path))
    refusal(lambda: read_key_means(str(path), 2, 2, 64))
    refusal(lambda: read_rotation("key_rotation", str(path), 2, 2, 64))
    refusal(lambda: read_config(json.dumps(duo(str(path)))))


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "x" * 5_000, "", "no/such/file.json"])
def test_impossible_paths(path: str, tmp_path: Path) -> None:
    if path:
        refusal(lambda: read_config(path))
        refusal(lambda: read_key_means(path, 2, 2, 64))
        refusal(lambda: read_rotation("key_rotation", path, 2, 2, 64))
    refusal(lambda: resolve(json.dumps({"thresholds": path}), tmp_path))
    refusal(lambda: read_config(json.dumps(duo(path))))


def duo(pattern: Any) -> dict[str, Any]:
    return {"tiers": ["BF16"], "policy": {"name": "duo", "pattern": pattern}}


def duo_entry(pattern: str) -> dict[str, Any]:
    return {"models": ["mine"], "source": "published", **duo(pattern)}


# Paths named by a calibration


@pytest.mark.parametrize("kind", ["FIFO", "folder", "dangling link", "loop"])
@pytest.mark.parametrize("text", ["", '{"thresholds": "calibrated"}'])
def test_a_model_s_calibration_that_is_no_file_is_not_passed_over(tmp_path: Path, kind: str, text: str) -> None:
    own = model(tmp_path / "mine")
    if kind == "FIFO":
        os.mkfifo(own / FILE_NAME)
    elif kind == "folder":
        (own / FILE_NAME).mkdir()
    else:
        (own / FILE_NAME).symlink_to("missing" if kind == "dangling link" else FILE_NAME)
    assert FILE_NAME in refusal(lambda: resolve(text, own))


def test_a_calibration_that_names_many_files_is_refused_at_once(tmp_path: Path) -> None:
    own = model(tmp_path / "mine", *(duo_entry("pattern.tsv") for _ in range(256)))
    line = "\t".join(["0.25"] * 128)
    (own / "pattern.tsv").write_text("\n".join([line] * 128) + "\n")
    assert "8 files" in refusal(lambda: resolve("", own), lines=260)


def test_messages_name_the_way_by_which_a_configuration_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_ENV, '{"page_token": 1}')
    with pytest.raises(ConfigError, match=f"^{CONFIG_ENV}"):
        resolution(None, model(tmp_path / "mine"), CONFIG_ENV)
    with pytest.raises(ConfigError, match=r"^--diffkv-config"):
        resolution('{"page_token": 1}', tmp_path / "mine")


def test_a_pattern_beside_the_calibration_is_read(tmp_path: Path) -> None:
    own = model(tmp_path / "mine", duo_entry("heads/pattern.tsv"))
    (own / "heads").mkdir()
    (own / "heads" / "pattern.tsv").write_text("0.1\t0.9\n0.8\t0.2\n")
    config, _ = resolve('{"thresholds": "published"}', own)
    assert config.policy is not None and config.policy.model_dump()["pattern"] == ((0.1, 0.9), (0.8, 0.2))
    assert load_config(config.model_dump_json(exclude_none=True)) == config, "what travels to the scheduler has it all"


def test_a_snapshot_of_the_hub_s_cache_is_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There each file is a link to one of the repository's blobs."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--mine"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    for folder in (repository / "refs", snapshot, blobs):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    entry = {"format": 1, "entries": [duo_entry("pattern.tsv")]}
    for name, content in (("config.json", SHAPE), (FILE_NAME, entry), ("pattern.tsv", "0.1\t0.9\n0.8\t0.2\n")):
        (blobs / f"{name}.blob").write_text(content if isinstance(content, str) else json.dumps(content))
        (snapshot / name).symlink_to(f"../../blobs/{name}.blob")
    for path in ("someone/mine", snapshot):
        assert resolve('{"thresholds": "published"}', path)[0].policy is not None
    other = tmp_path / "models--someone--other"
    (other / "blobs").mkdir(parents=True)
    (other / "blobs" / "pattern").write_text(CONFIDENTIAL)
    (snapshot / "pattern.tsv").unlink()
    (snapshot / "pattern.tsv").symlink_to("../../../models--someone--other/blobs/pattern")
    assert "outside" in refusal(lambda: resolve('{"thresholds": "published"}', snapshot))


@pytest.mark.parametrize("form", ["absolute", "parent", "link", "linked folder", "inside and out"])
def test_a_calibration_names_nothing_outside_its_folder(form: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "passwd").write_text(CONFIDENTIAL)
    own = model(tmp_path / "mine")
    (own / "heads").mkdir()
    (own / "link").symlink_to(outside / "passwd")
    (own / "linked").symlink_to(outside)
    named = {
        "absolute": str(outside / "passwd"),
        "parent": "../outside/passwd",
        "link": "link",
        "linked folder": "linked/passwd",
        "inside and out": "heads/../../outside/passwd",
    }
    model(own, duo_entry(named[form]))
    for text in (None, '{"thresholds": "calibrated"}', json.dumps({"thresholds": str(own / FILE_NAME)})):
        told = refusal(lambda given=text: resolve(given, own))
        assert "pattern" in told and SECRET not in told and ":0:0:" not in told, told
        assert FILE_NAME in told and "folder" in told, told


def test_a_calibration_that_is_a_link_out_of_the_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secrets.json").write_text(json.dumps({SECRET: SECRET}))
    own = model(tmp_path / "mine")
    (own / FILE_NAME).symlink_to(tmp_path / "secrets.json")
    told = refusal(lambda: resolve(None, own))
    assert SECRET not in told and "outside" in told


@pytest.mark.parametrize(
    "content",
    [
        CONFIDENTIAL.encode(),
        json.dumps({SECRET: 1}).encode(),
        json.dumps([[SECRET]]).encode(),
        json.dumps({"pattern": SECRET}).encode(),
        json.dumps({"pattern": [[1, 2], [SECRET, 1]]}).encode(),
        f"0.1\t{SECRET}\n".encode(),
        b"0.1\tnan\n0.1\t0.2",
        b"[[1, 2], [3]]",
        b"\xff" + SECRET.encode(),
        b"0.1\t0.2\n" * (1 << 20),
        b"",
    ],
)
def test_messages_quote_no_content(content: bytes, tmp_path: Path) -> None:
    own = model(tmp_path / "mine", duo_entry("pattern"))
    (own / "pattern").write_bytes(content)
    assert SECRET not in refusal(lambda: resolve(None, own))
    assert SECRET not in refusal(lambda: read_config(json.dumps(duo(str(own / "pattern")))))
    broken = model(tmp_path / "broken", content=content)
    assert SECRET not in refusal(lambda: resolve(None, broken), lines=3)


@pytest.mark.parametrize(
    "changes",
    [
        {"note": 1, "models": [SECRET]},
        {SECRET: 1},
        {"rotate": SECRET},
        {"tiers": [SECRET]},
        {"policy": {"name": SECRET}},
        {"policy": {"name": "duo", "pattern": [[1.0]], SECRET: 1}},
        {"policy": {"name": "diffkv", "alpha_high": SECRET}},
        {"policy": SECRET},
        {"source": SECRET},
    ],
)
def test_nor_what_a_calibration_says(changes: dict[str, Any], tmp_path: Path) -> None:
    told = refusal(lambda: resolve(None, model(tmp_path / "mine", {**duo_entry("p"), **changes})), lines=3)
    assert SECRET not in told and FILE_NAME in told


def test_a_calibration_cannot_name_key_means(tmp_path: Path) -> None:
    """Nor anything else that is a path: ``pattern`` alone is one."""
    entry = {**duo_entry("p"), "key_means": "/etc/hostname"}
    assert "unknown" in refusal(lambda: resolve(None, model(tmp_path / "mine", entry)), lines=3)


# Key means


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.full((2, 2, 64), 3e38), "10,000"),
        (torch.full((2, 2, 64), -10_001.0), "10,000"),
        (torch.full((2, 2, 64), float("nan")), "not finite"),
        (torch.zeros(2, 2, 64, dtype=torch.int64), "I64"),
        (torch.zeros(2, 2, 64, dtype=torch.bool), "BOOL"),
        (torch.zeros(2, 2, 64).to(torch.float8_e4m3fn), "F8"),
        (torch.zeros(2, 3, 64), "[2, 3, 64]"),
        (torch.zeros(4), "[4]"),
    ],
)
def test_key_means_that_cannot_be(tensor: torch.Tensor, says: str, tmp_path: Path) -> None:
    save_file({"key_means": tensor}, tmp_path / "means.safetensors")
    assert says in refusal(lambda: read_key_means(str(tmp_path / "means.safetensors"), 2, 2, 64))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_key_means_that_can_be(kind: torch.dtype, tmp_path: Path) -> None:
    save_file({"key_means": torch.full((2, 2, 64), 300.0, dtype=kind)}, tmp_path / "means.safetensors")
    assert read_key_means(str(tmp_path / "means.safetensors"), 2, 2, 64).eq(300).all()


# Anything at all

WORDS = st.sampled_from(
    [
        *(
            "diffkv",
            "duo",
            "zipage",
            "xkv",
            "snapkv",
            "h2o",
            "streaming",
            "leankv",
            "pyramidkv",
            "uniform",
            "K8V4",
            "K4V2",
        ),
        *(
            "BF16",
            "K1V1",
            "exact",
            "both",
            "calibrated",
            "cuda",
            "published",
            "measured",
            "grid",
            "text",
            "kl",
            "/dev/zero",
        ),
        *("../x", "\0", "\ud800", "K" + "9" * 5000 + "V1", "x" * 3000, "\x1b[2J", "1e9", "3"),
    ]
)
NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([0, -1, 10**19, -(10**19), 1 << 31, 1 << 63, 10**39, 1e-320, 1e300, 0.5, 4096, 1e10]),
    st.floats(allow_nan=False, allow_infinity=False),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=8))
VALUES = st.recursive(LEAVES, lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=4), x, max_size=3))


def objects(*names: str, **fields: Any) -> Any:
    """Objects with any of the fields, each usable or anything."""
    known = dict.fromkeys(names, VALUES)
    known |= {name: inner | VALUES for name, inner in fields.items()}
    return st.fixed_dictionaries({}, optional={**known, "other": VALUES})


def _fields(kind: Any) -> set[str]:
    return set(kind.model_fields)


def _policies() -> Any:
    found = []
    for kind in get_args(PolicyConfig):
        name = kind.model_fields["name"].default
        found.append(
            st.builds(lambda fields, name=name: {**fields, "name": name}, objects(*(_fields(kind) - {"name"})))
        )
    return st.one_of(found)


POLICIES = _policies()
TIERS = st.lists(WORDS, max_size=5)
CONFIGURATIONS = objects(*_fields(DiffKVConfig), policy=POLICIES, tiers=TIERS)


def _entries() -> Any:
    point, found = objects(*_fields(GridPoint)), objects(*_fields(Provenance))
    names = _fields(CalibratedThresholds) | _fields(CalibratedPolicy) - {"policy"}
    return objects(*names, policy=POLICIES, tiers=TIERS, chosen=point, provenance=found)


CALIBRATIONS = objects("format", entries=st.lists(_entries(), max_size=3))

fuzz = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def used(config: DiffKVConfig) -> None:
    """What a start does with it before there is a model's memory."""
    config.build_policy()
    config.check_heads(2, 2)
    config.page_format(64, 64, 4096)
    if config.key_means is not None:
        read_key_means(config.key_means, 2, 2, 64)
    if config.thresholds == "default":
        assert load_config(config.model_dump_json(exclude_none=True)) == config


@fuzz
@given(data=CONFIGURATIONS | VALUES)
def test_any_configuration_is_used_or_refused(data: Any) -> None:
    with at_once():
        try:
            used(read_config(" " + json.dumps(data)) if isinstance(data, dict) else read_config(json.dumps(data)))
        except ConfigError as error:
            assert str(error).replace("\n", "").isprintable() and len(str(error)) < 4000


@fuzz
@example(data={"entries": [{"tiers": [None]}]}, text=None)
@given(data=CALIBRATIONS | VALUES, text=st.sampled_from([None, '{"thresholds": "calibrated"}', "named"]))
def test_any_calibration_is_used_or_refused(data: Any, text: str | None, tmp_path: Path) -> None:
    own = model(tmp_path / "mine", content=json.dumps(data).encode())
    given_text = json.dumps({"thresholds": str(own / FILE_NAME)}) if text == "named" else text
    with at_once():
        try:
            used(resolve(given_text, own)[0])
        except ConfigError as error:
            assert str(error).replace("\n", "").isprintable() and len(str(error)) < 4000


@fuzz
@example(content=b"X")
@given(content=st.binary(max_size=200) | st.text().map(lambda x: x.encode("utf-8", "surrogatepass")))
def test_any_file_is_used_or_refused(content: bytes, tmp_path: Path) -> None:
    own = model(tmp_path / "mine", content=content)
    (own / "means").write_bytes(content)
    calls: list[Callable[[], Any]] = [
        lambda: used(read_config(str(own / FILE_NAME))),
        lambda: resolve(None, own),
        lambda: read_key_means(str(own / "means"), 2, 2, 64),
        lambda: read_rotation("key_rotation", str(own / "means"), 2, 2, 64),
        lambda: used(read_config(json.dumps(duo(str(own / "means"))))),
    ]
    for call in calls:
        with at_once():
            try:
                call()
            except ConfigError as error:
                assert str(error).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(duo([["x"] * 1000] * 200)),
        json.dumps({"policy": {"name": "diffkv", "head_scale": [[-1] * 1000] * 200}}),
        json.dumps({"tiers": ["x"] * 200_000}),
        json.dumps({str(x): 1 for x in range(50_000)}),
        json.dumps({"policy": {"name": "diffkv", "alpha_between": ["1"] * 200_000}}),
    ],
)
def test_a_million_mistakes_take_no_longer_than_one(text: str, tmp_path: Path) -> None:
    with at_once(), pytest.raises(ConfigError) as found:
        read_config(text)
    assert len(str(found.value)) < 4000


def test_a_calibration_of_a_million_mistakes(tmp_path: Path) -> None:
    entry = {**duo_entry("p"), "provenance": {"grid": [{}] * 20_000}}
    for entries in ([{}] * 200_000, [entry], [{"chosen": {}, "provenance": {"grid": [{}] * 20_000}}]):
        own = model(tmp_path / "mine", content=json.dumps({"entries": entries}).encode())
        with at_once(), pytest.raises(ConfigError) as found:
            resolve(None, own)
        assert len(str(found.value)) < 4000
