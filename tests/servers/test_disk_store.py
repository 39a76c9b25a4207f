"""SGLang's options of its file store, as they are read, and the names of what a server computes. No server runs."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sglang.srt.environ import envs

from benchmarks.paths import NANO
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import ConfigError, UnsupportedError
from sglang_diffkv.mem_pool.object_folder import FOLDER
from sglang_diffkv.mem_pool.object_values import ObjectValues
from sglang_diffkv.srt.startup import disk_store, host_memory, model_identity, mooncake_store
from sglang_diffkv.srt.startup.mooncake_store import MooncakeValues
from tests.servers.test_server_flags import _args

CONFIG = DiffKVConfig()


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (disk_store.FOLDER_ENV, disk_store.SIZE_ENV, *disk_store.OTHERS.values()):
        monkeypatch.delenv(name, raising=False)


def asked(extra: Any = None, **changes: Any) -> SimpleNamespace:
    text = extra if extra is None or isinstance(extra, str) else json.dumps(extra)
    given = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file", "hicache_ratio": 2.0, **changes}
    return _args(hicache_storage_backend_extra_config=text, **given)


def said(args: SimpleNamespace) -> str:
    return "; ".join(host_memory.problems(args, CONFIG))


def test_a_folder_and_a_size_are_read_as_sglang_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = asked({"file_storage_path": str(tmp_path), "max_size": "1.5k", "prefetch_threshold": 64})
    found = disk_store.asked_for(args)
    assert (found.path, found.most, found.prefetch.threshold) == (str(tmp_path), 1500, 64) and said(args) == ""
    assert (tmp_path / FOLDER).is_dir()
    monkeypatch.setenv(disk_store.FOLDER_ENV, str(tmp_path / "other"))
    monkeypatch.setenv(disk_store.SIZE_ENV, "2Ki")
    assert disk_store.asked_for(args).path == str(tmp_path / "other")
    assert disk_store.asked_for(asked()).most == 2048 and said(asked("")) == ""
    (tmp_path / "extra.json").write_text('{"max_size": 77, "prefetch_timeout_base": 2}', encoding="utf-8")
    found = disk_store.asked_for(asked(f"@{tmp_path}/extra.json", hicache_storage_prefetch_policy="timeout"))
    assert found.most == 77 and found.prefetch.seconds(1024) == 2.25 and found.prefetch.seconds(10**9) == 60


@pytest.mark.parametrize("size", ["1KB", "1GB", "10GiB", "1e9", "-1", "0", 0, -5, 1.5, True, None, "", [], "lots"])
def test_a_size_that_would_be_no_bound_is_refused(size: Any, tmp_path: Path) -> None:
    text = said(asked({"file_storage_path": str(tmp_path), "max_size": size}))
    assert ("max_size is" in text and "for example 200G" in text) == (size is not None)


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        (None, "no folder is named"), ({"file_storage_path": " "}, "no folder is named"),
        ({"file_storage_path": 7}, "no folder is named"), ({"file_storage_path": "/proc/x"}, "cannot be used"),
        ("{", "is not valid JSON"), ("[]", "give an object"), ("@/none/such", "cannot be read"),
        ({"min_free_space": "1G"}, '"min_free_space"'), ({"enable_metadata_cache": True}, "leave it out"),
        ({"file_storage_path": "/tmp", "prefetch_threshold": 0}, "prefetch_threshold"),
        ({"file_storage_path": "/tmp", "prefetch_timeout_base": "1"}, "prefetch_timeout_base"),
        ({"file_storage_path": "/tmp", "prefetch_timeout_per_ki_token": -1}, "prefetch_timeout_per_ki_token"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_served_is_refused_with_what_to_do(extra: Any, what: str) -> None:
    assert what in said(asked(extra))


def test_what_does_not_go_together_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"file_storage_path": str(tmp_path)}
    assert "without --enable-hierarchical-cache: add it" in said(asked(extra, enable_hierarchical_cache=False))
    assert "with LoRA" in said(asked(extra, enable_lora=True)) and "with LoRA" in said(asked(extra, lora_paths=["a"]))
    drafts = asked(extra, speculative_algorithm="EAGLE", speculative_num_draft_tokens=4)
    assert "with a draft model, of whose cache host memory alone has copies: drop" in said(drafts)
    assert not disk_store.problems(asked(extra, speculative_algorithm="NGRAM"))
    monkeypatch.setenv(disk_store.OTHERS["MIN_FREE_SPACE"], "1G")
    assert "MIN_FREE_SPACE is not served: unset it" in said(asked(extra))
    images = SimpleNamespace(model_config=SimpleNamespace(is_multimodal=True))
    with pytest.raises(UnsupportedError, match="takes images"):
        disk_store.check_model(asked(extra), images)
    disk_store.check_model(_args(), images)


# Mooncake's store


MASTER = {"master_server_address": "127.0.0.1:1", "protocol": "tcp"}


def mooncake(extra: Any = None, **changes: Any) -> SimpleNamespace:
    return asked(extra, hicache_storage_backend="mooncake", **changes)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Mooncake's package is imported by; none of the user's settings is in the environment."""
    for name in [name for name in os.environ if "MOONCAKE" in name]:
        monkeypatch.delenv(name)
    for name in ("mooncake", "mooncake.store"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ({}, "mooncake: no master is named: set MOONCAKE_MASTER"), ({**MASTER, "standalone_storage": True}, "leave it"),
        ({**MASTER, "max_size": "1G"}, '"max_size"'), ({"master_server_adress": "a:1"}, "correct it or leave it out"),
        ({**MASTER, "enable_group_semantics": True}, "leave it out"),
        ({**MASTER, "global_segment_size": "4 gib"}, 'size is "4 gib": give bytes, 0 or more, or GiB as "4gb"'),
        ({**MASTER, "prefetch_threshold": 0}, "prefetch_threshold"), (MASTER, "start it first"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_of_mooncake_that_cannot_be_served_are_refused(extra: Any, what: str, package: None) -> None:
    assert what in said(mooncake(extra))


@pytest.mark.parametrize(
    ("field", "values", "what"),
    [
        ("master_server_address", ("127.0.0.1", 5, "", ":1", "a:0", "a:65536", "a:1x", " a:1", ["a:1"]), "HOST:PORT"),
        ("global_segment_size", (-1, "-1", 1.5, 1e30, True, None, [1], "", "gb", "4 lots", "1.5gb"), "give bytes"),
        ("check_server", ("false", 0, None), "give true or false"),
        ("master_metrics_port", ("9003", True, 1.0, None), "give a whole number"),
        *((name, (5, None, True, {"a": 1}), "give text") for name in ("protocol", "device_name", "local_hostname")),
        *((name, (5, None, True, {"a": 1}), "give text") for name in ("metadata_server", "tenant_id")),
        ("extra_backend_tag", (5, None, {"a": 1}), "give text"),
    ],
)  # fmt: skip
def test_settings_of_mooncake_of_another_type_are_refused(
    field: str, values: tuple[Any, ...], what: str, package: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SGLang would misread them or fail once the weights are loaded. A file's fields are no better."""
    path = tmp_path / "mooncake.json"
    monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", str(path))
    for value in values:
        text = said(mooncake({**MASTER, field: value}))
        assert f"{field} is " in text and what in text, (value, text)
        path.write_text(json.dumps({**MASTER, field: value}), encoding="utf-8")
        text = said(mooncake())
        assert f"{field} is " in text and what in text, (value, text)


@pytest.mark.parametrize("address", ["10.0.0.1:50051", "[::1]:50051", "master.example:1", "etcd://a:1;b:1"])
def test_masters_are_named_by_host_and_port_or_a_service(address: str, package: None) -> None:
    found = mooncake_store.settings({"master_server_address": address, "global_segment_size": " 4 GB "})
    assert (found.master_server_address, found.global_segment_size) == (address, 4 << 30)


def test_settings_that_sglang_would_not_read_are_refused(
    package: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It reads one place alone, the one that names the master: a tenant elsewhere would share its prefixes with all."""
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:1")
    text = said(mooncake({"tenant_id": "a", "global_segment_size": 0}))
    assert "SGLang reads global_segment_size, tenant_id of" in text and "add master_server_address too" in text
    assert "set MOONCAKE_GLOBAL_SEGMENT_SIZE, MOONCAKE_TENANT_ID in the environment" in text
    for name, variable in mooncake_store.VARIABLES.items():
        assert f"only beside master_server_address: add master_server_address too, or set {variable} in" in said(
            mooncake({name: "a"})
        )
        assert hasattr(envs, variable)
    assert {*mooncake_store.VARIABLES, "master_server_address", "extra_backend_tag"} == set(mooncake_store.KNOWN)
    assert "start it first" in said(mooncake({"extra_backend_tag": "a", "prefetch_threshold": 7}))
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "4 gib")
    assert 'global_segment_size is "4 gib"' in said(mooncake())
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1")
    assert 'master_server_address is "127.0.0.1": give HOST:PORT' in said(mooncake())
    path = tmp_path / "mooncake.json"
    monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", str(path))
    assert "or write it to the file that SGLANG_HICACHE_MOONCAKE" in said(mooncake({"tenant_id": "a"}))
    for written, what in ((None, "cannot be read"), ("[]", "give an object of JSON"), ("{}", "master_server_address")):
        path.unlink(missing_ok=True) if written is None else path.write_text(written, encoding="utf-8")
        assert what in said(mooncake())


def test_a_client_that_cannot_be_set_up_says_what_to_check(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its codes do not."""
    store = SimpleNamespace(setup=lambda *_, **__: -600)
    monkeypatch.setattr(sys.modules["mooncake.store"], "MooncakeDistributedStore", lambda: store, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as master:
        given = {"master_server_address": f"127.0.0.1:{master.getsockname()[1]}", "protocol": "tpc"}
        with pytest.raises(ConfigError, match=r"-600.*: check protocol, device_name, metadata_server, local_hostname"):
            mooncake_store.connect(given, rank=0, ranks=1)


def test_settings_of_mooncake_are_read_as_sglang_reads_them(
    package: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as master:
        address = f"127.0.0.1:{master.getsockname()[1]}"
        given = {**MASTER, "master_server_address": address, "global_segment_size": "2gb", "prefetch_threshold": 7}
        assert said(mooncake(given)) == "" and disk_store.bytes_lent(mooncake(given)) == 2 << 30
        assert disk_store.asked_for(mooncake(given), "mooncake").prefetch.threshold == 7
        assert f"Mooncake's store at {address}, which has 2.00 GiB" in str(disk_store.describe(mooncake(given)))
        monkeypatch.setenv("MOONCAKE_MASTER", address)
        monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "0")
        assert said(mooncake()) == "" and disk_store.bytes_lent(mooncake()) == 0
        monkeypatch.setenv("MOONCAKE_ENABLE_SSD_OFFLOAD", "1")
        assert "enable_ssd_offload is not served" in said(mooncake())
        (tmp_path / "mooncake.json").write_text(json.dumps({**given, "global_segment_size": 3}), encoding="utf-8")
        monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", str(tmp_path / "mooncake.json"))
        assert said(mooncake()) == "" and disk_store.bytes_lent(mooncake()) == 3
    monkeypatch.setattr(host_memory, "free_host_memory", lambda: 3 << 30)
    configurator = SimpleNamespace(
        server_args=mooncake({**MASTER, "global_segment_size": "4gb"}, tp_size=1), model_config=SimpleNamespace()
    )
    with pytest.raises(UnsupportedError, match="global_segment_size takes"):
        host_memory.host_tier(configurator)


def test_a_package_that_cannot_be_imported_is_named(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    text = said(mooncake(MASTER))
    assert "cannot be imported" in text and "pip install" in text and "(Debian: libibverbs1)" in text
    assert "without a GPU: mooncake-transfer-engine-non-cuda" in text


class Client:
    """Mooncake's, which answers with codes: values are bytes by address."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.unfinished: set[str] = set()  # another client is writing these
        self.fails: int | None = None

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.values) if self.fails is None else self.fails for key in keys]

    def batch_put_from(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        if self.fails is not None:
            return [self.fails for _ in keys]
        for key, pointer, size in zip(keys, pointers, sizes, strict=True):
            if key not in self.unfinished:
                self.values.setdefault(key, ctypes.string_at(pointer, size))
        return [0 for _ in keys]

    def batch_get_into(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        if self.fails is not None:
            return [self.fails for _ in keys]
        answers = []
        for key, pointer, size in zip(keys, pointers, sizes, strict=True):
            value = self.values.get(key)
            absent = -703 if key in self.unfinished else -704
            answers.append(absent if value is None else -600 if len(value) > size else len(value))
            if answers[-1] > 0:
                ctypes.memmove(pointer, value, len(value or b""))
        return answers

    def remove(self, key: str, force: bool = False) -> int:
        assert force, "the lease of who has just read it keeps it"
        return 0 if self.values.pop(key, None) else -704


def over(client: Client, known: list[int]) -> MooncakeValues:
    """A client, and the sizes of what it knows."""
    backend = SimpleNamespace(store=client, register_buffer=lambda tensor: known.append(tensor.nbytes))
    backend._tag_keys = lambda keys: [f"mine_{key}" for key in keys]
    return MooncakeValues(backend)


def test_two_servers_write_a_prefix_at_once() -> None:
    """What the other has not finished is not there yet, and no error. Else each such write would be one."""
    client, key = Client(), "1" * 32
    client.unfinished = {f"mine_diffkv-{key}-0"}
    objects = ObjectValues(over(client, []))
    assert objects.write(key, "2" * 32, [b"mine"], 4) and f"mine_diffkv-{key}-1" in client.values
    (name,) = objects.names(key)
    file, size = objects.open(key, name)
    assert file.read(size) == b"mine" and objects.has(key, "2" * 32)


def test_what_mooncake_answers_is_understood() -> None:
    client, known = Client(), list[int]()
    values = over(client, known)
    keys, data = ["a", "b"], [memoryview(bytearray(b"one")), memoryview(bytearray(b"seven!!"))]
    assert values.has(keys) == [False, False] and values.put(keys, data) == [True, True]
    assert client.values == {"mine_a": b"one", "mine_b": b"seven!!"} and values.has(keys) == [True, True]
    targets = [memoryview(bytearray(size)) for size in (3, 6, 4)]
    assert values.fetch(["a", "b", "a"], targets) == [True, False, False], "a value of another size is taken"
    assert [bytes(x) for x in targets] == [b"one", bytes(6), bytes(4)] and values.fetch(["c"], targets[:1]) == [False]
    values.forget("a")
    assert values.has(keys) == [False, True] and known == [MooncakeValues.at_once << 20]
    client.fails = -200
    assert values.put(keys, data) == [False, False], "a full store is an error"
    client.fails = -901
    for call in (lambda: values.has(keys), lambda: values.put(keys, data), lambda: values.fetch(keys, targets[:2])):
        with pytest.raises(OSError, match="-901"):
            call()


# What a server computes


def model(folder: Path, **changes: Any) -> Any:
    config = SimpleNamespace(to_dict=lambda: {"hidden": 8, "_name_or_path": str(folder), **changes})
    return SimpleNamespace(model_path=str(folder), revision=None, hf_config=config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for index in range(2):
        (path / f"model-{index}.safetensors").write_bytes(bytes([index]) * 300_000)
    return path


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_is_named_by_its_weights_and_what_changes_them(
    whole: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        monkeypatch.setattr(model_identity, "READ_WHOLE", 0)

    def name(path: Path = folder, **changes: Any) -> str:
        return model_identity.model_digest(_args(load_format="auto", **changes), model(path))

    known = name()
    assert known == name(), "a name does not last"
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
        os.utime(copy / file.name, ns=(0, file.stat().st_mtime_ns))
    assert name(copy) == known, "a copy of the same weights has another name"
    assert name(quantization="fp8") != known and name(json_model_override_args='{"a": 1}') != known
    assert model_identity.model_digest(_args(load_format="auto"), model(folder, hidden=9)) != known
    data = bytearray((copy / "model-1.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model-1.safetensors").write_bytes(data)
    assert name(copy) != known
    (folder / "model-2.safetensors").write_bytes(b"more")
    assert name() != known


@pytest.mark.parametrize("what", ["sharded", "quantised", "described", "no weights", "unknown"])
def test_weights_that_are_not_known_are_named_for_one_process(
    what: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    path = {"no weights": tmp_path / "empty", "unknown": tmp_path / "none"}.get(what, folder)
    form = {"sharded": "sharded_state", "quantised": "dummy", "described": "dummy"}.get(what, "auto")
    args = _args(load_format=form, quantization="awq" if what == "quantised" else None)
    about: dict[str, Any] = {"quantization_config": {"quant_method": "gptq"}} if what == "described" else {}
    assert model_identity.model_digest(args, model(path, **about)) != model_identity.model_digest(
        args, model(path, **about)
    )
    assert "found by itself only" in caplog.text


def test_dummy_weights_are_named_by_what_they_are_drawn_by(folder: Path) -> None:
    """SGLang draws them from one seed, for each parameter alike."""

    def name(hidden: int = 8, **more: Any) -> str:
        return model_identity.model_digest(_args(load_format="dummy", **more), model(folder, hidden=hidden))

    assert name() == name()
    others = [name(tp_size=2), name(device="cuda"), name(dtype="float16"), name(ep_size=2)]
    assert len({name(), name(hidden=9), *others}) == 6
    assert name() != model_identity.model_digest(_args(load_format="auto"), model(folder))


def test_a_blob_of_the_hub_s_cache_is_named_by_its_name(folder: Path, tmp_path: Path) -> None:
    """And not read."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (blobs / ("a" * 64)).write_bytes(b"weights")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blobs / ("a" * 64))
    assert model_identity._of_file(link, True) == ["a" * 64]
    assert model_identity._of_file(blobs / ("a" * 64), True) != ["a" * 64]


def test_a_configuration_is_named_by_all_that_it_says(tmp_path: Path) -> None:
    means = tmp_path / "means.safetensors"
    means.write_bytes(b"one")
    configs = [CONFIG, DiffKVConfig(page_tokens=16), DiffKVConfig(prefix_fidelity="exact"), DiffKVConfig(rotate="keys")]
    configs += [DiffKVConfig(**{name: str(means)}) for name in ("key_means", "key_rotation", "value_rotation")]
    names = [model_identity.configuration_digest(x) for x in configs]
    names += [model_identity.configuration_digest(CONFIG, *own) for own in (("a", ""), ("", "a"), ("a", "a"))]
    names += [model_identity.configuration_digest(DiffKVConfig(noise_shaping="auto"))]
    means.write_bytes(b"two")
    names += [model_identity.configuration_digest(x) for x in configs[-3:]]
    assert len(set(names)) == len(names) and names[0] == model_identity.configuration_digest(DiffKVConfig())


def test_the_test_s_model_has_a_lasting_name() -> None:
    model_ = SimpleNamespace(model_path=str(NANO), revision=None, hf_config=SimpleNamespace(to_dict=dict))
    assert model_identity._weights(_args(load_format="auto"), model_)[1]
