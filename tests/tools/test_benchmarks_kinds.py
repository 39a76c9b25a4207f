"""Token identity of kinds of models, without servers: what is started, compared and called wrong."""

import json
from threading import Barrier, Event
from types import SimpleNamespace

import pytest

from benchmarks.quality import identity, kinds
from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.client import Record
from sglang_diffkv.evaluate.server import ServerError


def record(ids, gap=1.0):
    top = [[(-0.1, token), (-0.1 - gap, token + 1)] for token in ids]
    return Record("", list(ids), 3, len(ids), 2, 0.0, "length", logprobs=[-0.1] * len(ids), top_logprobs=top)


@pytest.fixture
def servers(monkeypatch):
    """Servers by name that answer 1, 2, 3 unless ``wrong`` has another first reply of theirs, or ``replies`` tells all;
    ``broken`` do not start."""
    seen = SimpleNamespace(started=[], stopped=[], wrong={}, broken=set(), moved={}, stopping=lambda server: None)
    seen.logs, seen.fields, seen.replies, seen.scored = {}, {}, {}, {}

    class Fake:
        def __init__(self, model, backend, args, *, diffkv_config, env, timeout, log_path):
            self.name, self.model, self.args, self.config = log_path.stem, str(model), list(args), diffkv_config
            self.url = self.name

        def start(self):
            if self.name in seen.broken:
                raise ServerError("the server ended with status 1 before it was ready\nmuch more")
            seen.started.append(self)

        def stop(self):
            seen.stopping(self)
            seen.stopped.append(self)

        def flush_cache(self):
            pass

        def log_text(self):
            return seen.logs.get(self.name, "")

    def ask(server, args, prompts, size, fields):
        seen.fields[server.name] = fields
        if own := seen.replies.get(server.name):
            return [record(own(ids, more)) for ids, more in zip(prompts, fields, strict=True)]
        reply = seen.wrong.get(server.name, record([1, 2, 3]))
        if isinstance(reply, Exception):
            raise reply
        return [reply] + [record([1, 2, 3]) for _ in prompts[1:]]

    def score(url, ids, start, fields):
        seen.scored.setdefault(url, []).append((start, fields))
        return SimpleNamespace(input_logprobs=[seen.moved.get(url, 0.0)] * len(ids))

    monkeypatch.setattr(kinds, "Server", Fake)
    monkeypatch.setattr(identity, "ask", ask)
    monkeypatch.setattr(client, "score", score)
    return seen


def run(tmp_path, *names, n=6):
    given = ["--kinds", *names, "--n", str(n), "--shared", "2", "--output", str(tmp_path), "--timeout", "0.1"]
    failed = kinds.main(given)
    return failed, json.loads((tmp_path / "kinds.json").read_text())


def test_every_kind_has_a_reference_and_a_server_of_its_own(tmp_path):
    for name, kind in kinds.KINDS.items():
        asked = kind.servers(tmp_path)
        names = [x.name for x in asked]
        assert len(set(names)) == len(names) and kinds.STOCK in names and "diffkv" in names, name
        stock = asked[names.index(kinds.STOCK)]
        assert stock.backend != "diffkv" and stock.sizes == (1, kinds.BATCH) and stock.config is None
        assert all((x.backend == "diffkv") == (x.config is not None) for x in asked)


def test_what_is_equal(servers, tmp_path):
    failed, data = run(tmp_path, "nano")
    assert failed == 0 and data["failures"] == []
    rows = {(row[1], row[2], row[3]): row[4:7] for row in data["rows"]}
    assert rows["diffkv", "batch 8, hits", "batch 8"] == ["6", "0", "0"]
    assert rows["stock", "batch 8", "batch 1"] == ["6", "0", "0"]
    assert len(servers.started) == len(servers.stopped) == 5
    assert (tmp_path / "kinds.md").read_text().startswith("| kind |")


def test_ties_are_no_failures_and_other_tokens_are(servers, tmp_path):
    servers.wrong["nano_diffkv"] = record([1, 9, 3])
    failed, data = run(tmp_path, "nano")
    assert failed == 3 and all("1 replies are not stock's: " in x and "(gap 1.00)" in x for x in data["failures"])
    servers.wrong = {"nano_stock": record([1, 2, 3], gap=0.05), "nano_diffkv": record([1, 3, 3])}
    failed, data = run(tmp_path, "nano")
    assert failed == 0
    rows = {(row[1], row[2], row[3]): row[4:7] for row in data["rows"]}
    assert rows["diffkv", "batch 8", "batch 8"] == ["5", "1", "0"]
    servers.wrong = {"nano_default_tiers": record([5])}
    assert run(tmp_path, "nano")[0] == 0  # which may lose something


def test_servers_that_fail(servers, tmp_path):
    servers.broken = {"nano_diffkv"}
    failed, data = run(tmp_path, "nano")
    assert failed == 1 and "ended with status 1" in data["failures"][0] and "nano_diffkv.log" in data["failures"][0]
    assert len(servers.started) == len(servers.stopped) == 4
    servers.broken, servers.wrong = set(), {"nano_diffkv_chunks": client.RequestError("aborted")}
    failed, data = run(tmp_path, "nano")
    assert failed == 1 and "nano, diffkv, chunks: RequestError" in data["failures"][0]
    servers.wrong = {"nano_stock": client.RequestError("aborted")}
    failed, data = run(tmp_path, "nano")
    assert failed == 2 and data["rows"] == []


def test_what_is_known_is_kept_before_servers_stop_and_these_stop_at_once(servers, tmp_path):
    together, seen = Barrier(5, timeout=20), []

    def stopping(server):
        seen.append(len(json.loads((tmp_path / "kinds.json").read_text())["rows"]))
        together.wait()

    servers.stopping = stopping
    _, data = run(tmp_path, "nano")
    assert seen == [len(data["rows"])] * 5 and seen[0] > 0


def test_an_error_in_one_kind_leaves_the_others(servers, tmp_path, monkeypatch):
    def make(folder):
        folder.mkdir(parents=True)
        raise OSError("no space left")

    monkeypatch.setitem(kinds.KINDS, "gemma3", kinds._sliding(make, "windows"))
    for _ in range(2):
        failed, data = run(tmp_path, "gemma3", "nano")
        assert failed == 1 and "gemma3, all servers: OSError('no space left')" in data["failures"][0]
        assert {row[0] for row in data["rows"]} == {"nano"}, "a model made by half is made again"


def test_numbers_that_are_none_are_failures(servers, tmp_path, monkeypatch):
    monkeypatch.setitem(kinds.KINDS, "gemma3", kinds._sliding(lambda folder: folder.mkdir(parents=True), "windows"))
    servers.moved["gemma3_diffkv"] = None
    failed, data = run(tmp_path, "gemma3", n=12)
    assert failed == 1 and data["failures"][0].startswith("gemma3, diffkv: ") and "no numbers" in data["failures"][0]
    monkeypatch.setattr(kinds, "chat_ids", lambda tokenizer, prompt: [5, 6])
    failed, data = run(tmp_path, "gemma3", n=12)
    assert failed == 1 and "ask more questions" in data["failures"][0], "nothing else would judge random weights"


def test_what_is_broken_off_stops_its_servers_and_keeps_the_kinds_before(servers, tmp_path, monkeypatch):
    """A request is under way, as it would be for minutes, until its server is stopped."""
    asked, gone, ask = Event(), Event(), identity.ask

    def hang(server, *args):
        if not server.name.startswith("compile"):
            return ask(server, *args)
        asked.set()
        assert gone.wait(20)
        raise client.RequestError("the server is gone")

    monkeypatch.setattr(identity, "ask", hang)

    class Pool(kinds.ThreadPoolExecutor):
        """Whose second kind is waited for until Ctrl-C."""

        def submit(self, call, *args):
            found = super().submit(call, *args)
            if args == ("compile",):
                found.result = interrupt
            return found

    def interrupt():
        assert asked.wait(20)
        servers.stopping = lambda server: gone.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(kinds, "ThreadPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "nano", "compile", "gptq")
    assert {row[0] for row in json.loads((tmp_path / "kinds.json").read_text())["rows"]} == {"nano"}
    assert not [x for x in servers.started if x.name.startswith("gptq")]
    assert {id(x) for x in servers.started} <= {id(x) for x in servers.stopped}


def test_random_weights_are_judged_by_log_probabilities(servers, tmp_path, monkeypatch):
    monkeypatch.setitem(kinds.KINDS, "gemma3", kinds._sliding(lambda folder: folder.mkdir(parents=True), "windows"))
    servers.wrong["gemma3_diffkv"] = record([1, 9, 3])
    servers.moved["gemma3_diffkv"] = 0.01
    failed, data = run(tmp_path, "gemma3", n=12)
    assert failed == 0
    moved = {row[1]: row[4] for row in data["rows"] if row[3] == "log-probabilities"}
    assert moved == {"stock, chunks": "mean 0.0000", "diffkv": "mean 0.0100", "diffkv, chunks": "mean 0.0000"}
    assert {x.model for x in servers.started} == {str(tmp_path / "models" / "gemma3")}
    servers.moved["gemma3_diffkv_chunks"] = 0.2
    failed, data = run(tmp_path, "gemma3", n=12)
    assert failed == 1 and "moved by 0.2000" in data["failures"][0]


def test_a_draft_model_is_not_the_model(servers, tmp_path, monkeypatch):
    kind = kinds.KINDS["eagle3"]
    assert set(kinds.KINDS) >= kinds.BESIDE_NANO
    monkeypatch.setitem(kinds.KINDS, "eagle3", kinds.replace(kind, make=lambda folder: folder.mkdir(parents=True)))
    failed, _ = run(tmp_path, "eagle3")
    assert failed == 0 and {x.model for x in servers.started} == {str(kinds.NANO)}
    (drafting,) = [x for x in servers.started if x.name == "eagle3_diffkv"]
    assert drafting.args[drafting.args.index("--speculative-draft-model-path") + 1].endswith("models/eagle3")


ADAPTED = ("stock", "diffkv", "stock_chunks", "diffkv_chunks", "default_tiers")


def adapted(ids, fields):
    """Replies of adapters differ."""
    return [1, 2, {None: 3, "a": 4, "b": 5}[fields["lora_path"]]]


def test_adapters_are_asked_side_by_side(servers, tmp_path):
    servers.replies = {f"lora_{name}": adapted for name in ADAPTED}
    failed, data = run(tmp_path, "lora")
    assert failed == 0, data["failures"]
    assert [x["lora_path"] for x in servers.fields["lora_diffkv"]] == [None, "a", "b"] * 2
    assert {x.model for x in servers.started} == {str(kinds.NANO)}
    for server in servers.started:
        at = server.args.index("--lora-paths")
        assert server.args[at + 1 : at + 3] == [f"{name}={tmp_path}/models/lora/{name}" for name in "ab"]
    assert (tmp_path / "models" / "lora" / "b" / "adapter_model.safetensors").is_file()
    servers.replies["lora_diffkv"] = lambda ids, fields: adapted(ids, {"lora_path": fields["lora_path"] and "a"})
    failed, data = run(tmp_path, "lora")
    assert failed == 3 and all("2 replies are not stock's" in x and ", b from token 2" in x for x in data["failures"])


def test_adapters_that_change_nothing_are_a_failure(servers, tmp_path):
    failed, data = run(tmp_path, "lora")
    assert failed == 1 and "lora, stock: 2 questions have the same reply" in data["failures"][0]


def test_pictures_go_before_texts(servers, tmp_path, monkeypatch):
    kind = kinds.replace(kinds.KINDS["vision"], make=lambda folder: folder.mkdir(parents=True))
    monkeypatch.setitem(kinds.KINDS, "vision", kind)
    monkeypatch.setattr(kinds.random_vision, "picture_ids", lambda folder: [8193, 8195, 8194])
    seen = set()

    def reply(ids, fields):
        seen.add((ids[:3] == [8193, 8195, 8194], "image_data" in fields))
        return [1, 2, int(sum(fields.get("image_data", "").encode()))]

    servers.replies = {f"vision_{name}": reply for name in ADAPTED}
    failed, data = run(tmp_path, "vision", n=12)
    assert failed == 0, data["failures"]
    pictures = [x.get("image_data") for x in servers.fields["vision_diffkv"]]
    assert pictures[0] is None and pictures[1] != pictures[2] and pictures == pictures[:3] * 4
    assert seen == {(False, False), (True, True)}, "of servers that are asked at once"
    starts = [start for start, _ in servers.scored["vision_diffkv"]]
    assert starts == [0, 1 + kinds.random_vision.IMAGE_TOKENS, 1 + kinds.random_vision.IMAGE_TOKENS]


def test_the_canary_s_words_are_read(servers, tmp_path):
    told = "[canary] step=5 protected_tokens={} sweep_passes={} violations={} mode=raise"
    names = [f"kv_canary_{name}" for name in ("diffkv", "diffkv_chunks", "default_tiers")]
    servers.logs = {name: told.format(900, 3, 0) for name in names}
    assert run(tmp_path, "kv_canary")[0] == 0
    assert all(("--kv-canary" in x.args) == (x.config is not None) for x in servers.started)
    for wrong, words in (
        (told.format(900, 3, 1), "1 violations"),
        (told.format(0, 3, 0), "saw 0 tokens"),
        ("", "said nothing"),
    ):
        servers.logs["kv_canary_diffkv"] = wrong
        failed, data = run(tmp_path, "kv_canary")
        assert failed == 1 and data["failures"][0].startswith("kv_canary, diffkv: ") and words in data["failures"][0]


def test_list(capsys):
    assert kinds.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in kinds.KINDS)
