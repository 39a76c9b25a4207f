"""The servers that an evaluation starts: their configurations and command lines, and which are needed."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from benchmarks import splits
from benchmarks.paths import NANO
from benchmarks.quality import accuracy
from sglang_diffkv.calibrate import emulated
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate import cli, runner
from sglang_diffkv.evaluate import endpoint as endpoint_module
from sglang_diffkv.evaluate import server as server_module
from sglang_diffkv.evaluate.configuration import Configuration, parse_configuration
from sglang_diffkv.evaluate.endpoint import Endpoint, EvaluationError
from sglang_diffkv.evaluate.prompts import chat_ids
from tests.tools.evaluation import REFERENCE, replies, results, run, tokenizer, tokenizer_of
from tests.tools.fake_server import FakeServer


@pytest.fixture(autouse=True)
def one_tokenizer(monkeypatch):
    monkeypatch.setattr(cli, "load_tokenizer", tokenizer_of)


def test_a_server_for_each_configuration_is_started_once(tmp_path, monkeypatch, capsys):
    started = []

    @contextmanager
    def start(configuration, model, args):
        started.append(configuration.name)
        wrong = () if configuration.diffkv is None else ("t-add-easy-0",)
        with FakeServer(replies(wrong), share=configuration.diffkv and 0.4) as fake:
            yield Endpoint.connect(fake.url, owned=True)
            assert fake.flushes == 1, "each task file starts with an empty prefix cache"

    monkeypatch.setattr(runner, "start", start)
    monkeypatch.setattr("sglang_diffkv.evaluate.configuration.has_gpu", lambda: False)
    args = ["--model", str(NANO), "--task", REFERENCE, "--output", str(tmp_path)]
    assert cli.main(args) == 0
    assert started == ["stock", "diffkv"]
    out, err = capsys.readouterr()
    assert "| fp8 | skipped: stock SGLang's fp8 KV cache is measured on a GPU" in out
    assert "fp8: skipped: " in err and "diffkv: thresholds: the built-in defaults, since none are" in err
    assert results(tmp_path)["diffkv"]["score"]["mean"] == 7 / 8
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["skipped"].keys() == {"fp8"}
    assert data["configurations"]["diffkv"]["diffkv"]["tiers"] == ["K8V4", "K4V2"]
    assert cli.main(args) == 0 and started == ["stock", "diffkv"], "nothing is left to ask"
    assert cli.main([*args, "--config", "stock", "--config", 'k8={"tiers": ["K8V4"]}']) == 0
    assert started == ["stock", "diffkv", "k8"]
    assert list(results(tmp_path)) == ["stock", "diffkv", "k8"]


def test_configurations_are_parsed(tmp_path):
    assert parse_configuration("stock") == Configuration("stock")
    assert parse_configuration("fp8").kv_cache_dtype == "fp8_e4m3"
    assert parse_configuration("a={}").diffkv == DiffKVConfig()
    path = tmp_path / "k8.json"
    path.write_text('{"tiers": ["K8V4"]}')
    configuration = parse_configuration(f"b={path}")
    assert configuration.diffkv is not None and configuration.diffkv.tiers == ("K8V4",)
    for spec in ("a", "stock={}", "a=", 'a={"tier": 1}', "="):
        with pytest.raises(ConfigError):
            parse_configuration(spec)


@pytest.mark.parametrize("model", [None, str(NANO)])
def test_of_several_configurations_the_wrong_one_is_named(model):
    with pytest.raises(ConfigError, match=r'^--config "b" \(inline JSON\): unknown field "tires"'):
        parse_configuration('b={"tires": 1}', model)
    with pytest.raises(ConfigError, match=r'^--config "b" .*unknown field "tires"'):
        emulated.configurations(["a={}", 'b={"tires": 1}'])
    with pytest.raises(ConfigError, match='--config "a": each needs a name of its own'):
        emulated.configurations(["a={}", "a=safe"])
    assert [*emulated.configurations(["a={}", "safe"])] == ["a", "safe"]


def test_server_command_lines(monkeypatch):
    monkeypatch.setattr(server_module, "has_gpu", lambda: False)
    command = parse_configuration('k={"tiers": ["K8V4"]}').server("m", ["--log-level", "error"]).command
    assert command[command.index("--attention-backend") + 1] == "diffkv"
    config = json.loads(command[command.index("--diffkv-config") + 1])
    assert config["tiers"] == ["K8V4"]
    assert command[-2:] == ["--log-level", "error"]
    command = parse_configuration("fp8").server("m").command
    assert command[command.index("--kv-cache-dtype") + 1] == "fp8_e4m3" and "--diffkv-config" not in command
    assert "--kv-cache-dtype" not in parse_configuration("stock").server("m").command


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--model", "m", "--config", "a"],
            "expected 'stock', 'fp8', 'auto', 'lossless', 'careful', 'safe', 'balanced', 'small' or NAME=JSON",
        ),
        (["--model", "m", "--config", "stock", "--config", "stock"], "a name of its own"),
        (["--model", "m", "--task", REFERENCE], "two task files"),
        (["--model", "/no/such"], '--model "/no/such": no config.json there. Name a folder that has one'),
        (["--model", "m", "--config", "default"], "or NAME=JSON, got 'default' (write default={})\n"),
        (["--model", "m", "--config", "default="], "or NAME=JSON, got 'default=' (write default={})\n"),
        (
            ["--url", "http://127.0.0.1:9"],
            "evaluate: no SGLang server answers at http://127.0.0.1:9: connection refused\n",
        ),
    ],
)
def test_unusable_command_lines(tmp_path, capsys, args, message):
    assert cli.main(["--task", REFERENCE, "--output", str(tmp_path), *args]) == 1
    assert message in capsys.readouterr().err


def test_a_running_server_is_flushed_before_it_is_asked(tmp_path, monkeypatch, capsys):
    """What others asked before has no part in the figures, or the tables say that it has."""
    monkeypatch.setattr(endpoint_module, "PATIENCE", 0.2)
    note = "its prefix cache was not emptied"
    with FakeServer(replies()) as fake:
        assert run(fake, tmp_path / "emptied", "x", "--task", REFERENCE) == 0
        assert fake.flushes == 1 and note not in "".join(capsys.readouterr())
    for status, why in ((401, "status 401: --admin-api-key may be wanted"), (404, "status 404"), (400, "status 400")):
        with FakeServer(replies(), flush_status=status) as fake:
            folder = tmp_path / str(status)
            assert run(fake, folder, "x", "--task", REFERENCE) == 0
            found = capsys.readouterr()
            assert note in found.err and why in found.err, "before the questions"
            assert f"{note} ({why}), so figures depend on what was asked before" in found.out
            assert note in (folder / "results.md").read_text()
            assert why in results(folder)["x"]["kept_cache"]
            assert (fake.flushes == 1) == (status != 400), "400 is said while requests run: tried again"
            assert run(fake, folder, "x", "--task", REFERENCE) == 0 and note in capsys.readouterr().out, "it is kept"
    with FakeServer(replies()) as fake:
        assert run(fake, tmp_path / "kept", "x", "--task", REFERENCE, "--keep-cache") == 0
        assert fake.flushes == 0 and f"{note} (--keep-cache)" in capsys.readouterr().out


def test_an_owned_server_that_is_not_flushed_ends_the_evaluation():
    with FakeServer(flush_status=401) as fake:
        endpoint = Endpoint.connect(fake.url, owned=True)
        with pytest.raises(EvaluationError, match="status 401"):
            endpoint.forget_prefixes()


def test_the_benchmark_asks_a_split(tmp_path, monkeypatch, capsys):
    known = {tuple(chat_ids(tokenizer(), x.prompt)): x for x in splits.load("calib")}

    @contextmanager
    def start(configuration, model, args):
        def reply(ids):
            return known[tuple(ids)].reply if configuration.diffkv is None else "Answer: no"

        with FakeServer(reply, context=9000) as fake:
            yield Endpoint.connect(fake.url, owned=True)

    monkeypatch.setattr(runner, "start", start)
    output = tmp_path / "accuracy.json"
    args = ["--exclude", "chain", "vars", "--n", "5", "--concurrency", "16", "--min-tokens", "--config", "stock"]
    assert accuracy.main([*args, "--config", 'K8V4={"tiers":["K8V4"]}', "--output", str(output)]) == 0
    found = {x["configuration"]: x["score"]["mean"] for x in json.loads(output.read_text())["results"]}
    assert found == {"stock": 1.0, "K8V4": 0.0}
    assert "| K8V4 | 5 | 0.0 ± 0.0 |" in capsys.readouterr().out
    assert accuracy.main([*args, "--split", "dev"]) == 1, "those prompts are not known here"


def test_other_weights_in_a_folder_of_the_same_name_are_another_model(tmp_path):
    """Trained further at the same place, say: by whatever part of their file is different."""
    folder = tmp_path / "model"
    folder.mkdir()
    configuration = Configuration("stock")
    assert configuration.fingerprint(str(folder))["weights"] is None
    weights = bytearray(200_000)
    (folder / "model.safetensors").write_bytes(weights)
    before = configuration.fingerprint(str(folder))
    assert before == configuration.fingerprint(str(folder))
    for at in (0, 199_999):
        changed = bytearray(weights)
        changed[at] = 1
        (folder / "model.safetensors").write_bytes(changed)
        after = configuration.fingerprint(str(folder))
        assert {name for name in after if after[name] != before[name]} == {"weights"}, at
    (folder / "model.safetensors").write_bytes(weights + b"0")
    assert configuration.fingerprint(str(folder)) != before
