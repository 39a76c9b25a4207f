"""``python -m sglang_diffkv.inspect`` against a stand-in for the server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import requests

from sglang_diffkv.access import Access
from sglang_diffkv.inspect import cli, figure
from sglang_diffkv.inspect.page import render
from sglang_diffkv.inspect.serve import PageServer
from sglang_diffkv.inspect.snapshot import FORM, InspectError, Snapshot, fetch, read
from tests.tools.fake_server import FakeServer
from tests.tools.test_page import ATTACK, check_page

BY_HEAD = {
    "pages": [[4, 2], [8, 0], [1, 1]],
    "high": [[60, 30], [100, 0], [10, 20]],
    "low": [[40, 60], [0, 50], [90, 80]],
    "tokens": 100,
}
STATS: dict[str, Any] = {
    "ratio_pages": 0.4321,
    "ratio_tokens": 0.3456,
    "share_high": 0.366,
    "share_low": 0.533,
    "share_pruned": 0.1,
    "tokens": 100,
    "pages": 64,
    "pages_used": 16,
    "page_bytes": 3584,
    "by_head": BY_HEAD,
}


def test_values_by_head():
    snapshot = Snapshot.model_validate(STATS)
    assert snapshot.values("bytes").tolist() == [[14, 7], [28, 0], [3.5, 3.5]]
    assert snapshot.values("high").tolist() == [[60, 30], [100, 0], [10, 20]]
    assert snapshot.values("pruned").tolist() == [[0, 10], [0, 50], [0, 0]]
    whole = sum(snapshot.values(name) for name in ("high", "low", "pruned"))
    assert np.allclose(whole, 100)


def test_what_has_left_a_window_is_not_pruned(capsys):
    heads = {**BY_HEAD, "sliding_layers": [1]}
    stats = {**STATS, "share_pruned": 0.017, "share_out_of_window": 0.083, "by_head": heads}
    snapshot = Snapshot.model_validate(stats)
    assert snapshot.values("pruned").tolist() == [[0, 10], [0, 0], [0, 0]]
    assert snapshot.values("out-of-window").tolist() == [[0, 0], [0, 50], [0, 0]]
    with FakeServer(stats=stats) as fake:
        assert cli.main(["--url", fake.url, "--what", "out-of-window"]) == 0
    out = capsys.readouterr().out
    assert "out of window" in out and "8.3%" in out
    assert "out of window" not in terminal_of(STATS, capsys)


def terminal_of(stats, capsys):
    with FakeServer(stats=stats) as fake:
        assert cli.main(["--url", fake.url]) == 0
    return capsys.readouterr().out


def test_a_single_tier_has_no_low_one():
    heads = {name: values for name, values in BY_HEAD.items() if name != "low"}
    snapshot = Snapshot.model_validate({**STATS, "by_head": heads})
    assert snapshot.values("low").tolist() == [[0, 0], [0, 0], [0, 0]]
    assert snapshot.values("pruned").tolist() == [[40, 70], [0, 100], [90, 80]]


def test_an_idle_cache_has_no_shares():
    empty = {"pages": [[0]], "high": [[0]], "low": [[0]], "tokens": 0}
    snapshot = Snapshot.model_validate({**STATS, "by_head": empty})
    assert snapshot.values("pruned").tolist() == [[0]]


def test_terminal_shows_shares_occupancy_and_every_head(capsys):
    with FakeServer(stats=STATS) as fake:
        assert cli.main(["--url", fake.url + "/"]) == 0
    out = capsys.readouterr().out
    assert "25.0%, 16 of 64, 0.1 of 0.2 MiB" in out
    assert "100 live tokens; 0.432 of their bf16 bytes, 0.346 without" in out
    assert "53.3%" in out and "KiB of pages by layer and KV head" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["0", "14.0", "7.0"] in lines and ["1", "28.0", "0.0"] in lines and ["2", "3.5", "3.5"] in lines


def test_of_several_ranks_the_scope_is_named(tmp_path, capsys):
    with FakeServer(stats={**STATS, "ranks": 4}) as fake:
        assert cli.main(["--url", fake.url, "--png", str(tmp_path / "cache.png")]) == 0
    assert "the first of 4 ranks" in " ".join(capsys.readouterr().out.split())
    assert Snapshot.model_validate(STATS).scope == ""


def test_png(tmp_path, capsys):
    path = tmp_path / "cache.png"
    with FakeServer(stats=STATS) as fake:
        assert cli.main(["--url", fake.url, "--what", "low", "--png", str(path)]) == 0
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 200 and pixels.shape[1] > 200
    assert "% of tokens in the low tier" in capsys.readouterr().out


def test_png_shows_the_quantity(tmp_path):
    snapshot = Snapshot.model_validate(STATS)
    images = []
    for name in ("high", "bytes"):
        figure.draw(snapshot, name, tmp_path / "map.png")
        images.append(matplotlib.image.imread(tmp_path / "map.png"))
    assert images[0].shape == images[1].shape
    assert not np.array_equal(images[0], images[1])


def test_a_server_without_diffkv_is_named(capsys):
    with FakeServer(share=None) as fake:
        assert cli.main(["--url", fake.url]) == 1
    message = capsys.readouterr().err
    assert "does not run diffkv (its attention backend is torch_native)" in message


def test_a_server_without_figures_by_head_shows_the_rest(capsys):
    with FakeServer(stats={**STATS, "by_head": None}) as fake:
        assert cli.main(["--url", fake.url]) == 1
    out, err = capsys.readouterr()
    assert "16 of 64" in out and "reports no figures by head" in err


def test_unreachable_servers_and_other_forms_are_errors():
    with pytest.raises(InspectError, match=r"no SGLang server answers at http://127.0.0.1:9: connection refused$"):
        fetch("http://127.0.0.1:9")
    ragged = {**BY_HEAD, "low": [[1, 2], [3], [4, 5]]}
    for by_head in (ragged, {**BY_HEAD, "high": [[1, 2]]}, {"tokens": 1}):
        with FakeServer(stats={**STATS, "by_head": by_head}) as fake, pytest.raises(InspectError, match="another form"):
            fetch(fake.url)


def page_of(**changes: Any) -> Any:
    """The outline of the page of a server that reports ``STATS`` with other values."""
    with FakeServer(stats={**STATS, **changes}) as fake:
        return check_page(render(read(fake.url)))


FULL: dict[str, Any] = {
    "owners": {"private": 9, "shared": 4, "cached": 3, "free": 48},
    "requests": 3,
    "faults": 2,
    "running": [{"tokens": 70, "prefix_tokens": 20, "pages": 9, "ratio_pages": 0.5, "ratio_tokens": 0.4}],
    "prefix_cache": {
        "pages": 7,
        "by_depth": [{"from": 256, "nodes": 3, "tokens": 4321}],
        "by_tenant": [{"tenant": None, "nodes": 1, "tokens": 5, "pages": 1}],
    },
    "retracted": {"host_bytes": 3 << 20, "host_bytes_most": 1 << 30, "waiting": 1},
    "memory": {"held": {"pages": 5 << 20}, "share_outside": 0.021},
    "a_tier_to_come": {"used_bytes": 7 << 20, "queue": [{"state": "waits"}]},
}


def test_the_page_shows_all_that_the_server_tells():
    found = page_of(**FULL)
    text = found.text
    assert "100 by running requests" in text and "25.0%" in text and "0.432" in text
    assert "3.0 MiB of 1.0 GiB, for retracted requests" in text and "2 requests that found no page" in text
    assert "The 1 longest of 3" in text and "70 20 9 31.5 KiB 0.500 0.400" in text
    assert "256 3 4,321" in text and "not set 1 5 1" in text
    assert "A tier to come" in text and "used_bytes 7.0 MiB" in text and "waits" in text
    assert "Memory: held name value pages 5.0 MiB" in text
    assert "cached 3 10.5 KiB 4.7%" in text


def test_a_page_of_many_layers_and_heads():
    shape = (80, 8)
    heads = {name: np.full(shape, n).tolist() for name, n in (("pages", 4000), ("high", 10**6), ("low", 10**6))}
    found = page_of(by_head={**heads, "tokens": 3 * 10**6})
    assert len([x for x in found.named("td") if (x.get("class") or "").startswith("l")]) == 4 * 80 * 8 - 80 * 8 + 80 * 8
    assert "MiB of pages by layer and KV head; 13.7 to 13.7" in found.text
    wide = {name: np.ones((128, 80), int).tolist() for name in ("pages", "high")}
    found = page_of(by_head={**wide, "tokens": 1})
    assert "all heads" in found.text and len(found.named("td")) < 1000, "more cells than a page bears"


def test_a_page_of_a_server_that_holds_nothing_and_compresses_nothing():
    empty = {"pages": [[0, 0]], "high": [[0, 0]], "tokens": 0}
    zero = dict.fromkeys(("ratio_pages", "ratio_tokens", "share_high", "share_low", "share_pruned"), 0.0)
    found = page_of(**zero, by_head=empty, tokens=0, pages=0, pages_used=0, share_by_tier={"BF16": 0.0}, running=[])
    assert "Nothing is held" in found.text and "BF16 0.0%" in found.text and "low tier" not in found.text
    assert "does not tell pages by owner" in found.text and "Longest first" in found.text
    older = page_of(by_head=None)
    assert "no figures by head" in older.text and "does not tell running requests" in older.text


def test_nothing_of_a_server_is_taken_for_html():
    hostile = {ATTACK: ATTACK, "by": {ATTACK: [{ATTACK: ATTACK}]}}
    changes = {ATTACK: hostile, "prefix_cache": {"by_tenant": [{"tenant": ATTACK}]}, "running": [{"tokens": ATTACK}]}
    found = page_of(**changes, owners={ATTACK: 1}, share_by_tier={ATTACK: 1.0})
    assert found.text.count("<script>alert(1)") > 5


def test_figures_of_another_form_are_refused():
    for changes in ({"ratio_pages": float("nan")}, {"by_head": {**BY_HEAD, "sliding_layers": [3]}}, {"tokens": "x"}):
        with FakeServer(stats={**STATS, **changes}) as fake, pytest.raises(InspectError, match="another form"):
            read(fake.url)


def test_json_is_all_and_html_a_file(tmp_path, capsys):
    page, data = tmp_path / "cache.html", tmp_path / "cache.json"
    with FakeServer(stats={**STATS, **FULL}) as fake:
        assert cli.main(["--url", fake.url, "--html", str(page), "--json", str(data)]) == 0
        told = capsys.readouterr().out
        assert told.count("written to") == 2 and "KiB of pages" in told
        assert cli.main(["--url", fake.url, "--json", "-"]) == 0
    written, printed = json.loads(data.read_text()), json.loads(capsys.readouterr().out)
    assert {**written, "at": 0} == {**printed, "at": 0} and written["form"] == FORM
    assert written["diffkv"]["a_tier_to_come"] == FULL["a_tier_to_come"]
    assert written["server"]["model_path"] == "fake" and written["server"]["version"] == "0"
    check_page(page.read_text(encoding="utf-8"))


def test_a_server_s_own_keys_are_not_in_what_it_tells(monkeypatch):
    with FakeServer(stats=STATS) as fake:
        info = fake.info()
        monkeypatch.setattr(fake, "info", lambda: {**info, "api_key": "s3cret", "launch_command": "--api-key s3cret"})
        report = read(fake.url)
    assert "s3cret" not in json.dumps(report.as_json()) + render(report)


@contextmanager
def served(fake: FakeServer) -> Iterator[str]:
    with PageServer(0, partial(read, fake.url)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.url
        server.shutdown()


def test_a_served_page_is_read_anew_at_each_visit():
    with FakeServer(stats=STATS) as fake, served(fake) as url:
        first = requests.get(url, timeout=10)
        found = check_page(first.text)
        assert found.named("form") == [{"method": "get"}] and found.named("button")
        assert "0.432" in found.text and first.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert first.headers["Cache-Control"] == "no-store"
        fake.stats = {**STATS, "ratio_pages": 0.123}
        assert "0.123" in check_page(requests.get(url, timeout=10).text).text
        assert requests.get(f"{url}json", timeout=10).json()["diffkv"]["ratio_pages"] == 0.123
        assert requests.head(url, timeout=10).text == ""
        assert requests.get(f"{url}other", timeout=10).status_code == 404
        fake.share = None
        gone = requests.get(url, timeout=10)
        assert gone.status_code == 502 and "does not run diffkv" in check_page(gone.text).text
        assert "does not run diffkv" in requests.get(f"{url}json", timeout=10).json()["error"]


def test_a_page_is_served_to_this_machine_alone():
    with FakeServer(stats=STATS) as fake, served(fake) as url:
        port = int(url.rstrip("/").rpartition(":")[2])
        for name in ("elsewhere.example", f"elsewhere.example:{port}", "127.0.0.1.example"):
            reply = requests.get(url, headers={"Host": name}, timeout=10)
            assert reply.status_code == 421 and "0.432" not in reply.text, "a name that is not this machine's"
        with pytest.raises(OSError):
            PageServer(port, partial(read, fake.url))
        with socket.socket() as other:
            other.settimeout(2)
            assert other.connect_ex(("127.0.0.2", port)) != 0, "no other address of it listens"


def test_what_cannot_be_served_is_said_at_once(capsys):
    with FakeServer(share=None) as fake:
        assert cli.main(["--url", fake.url, "--serve", "0"]) == 1
        assert "does not run diffkv" in capsys.readouterr().err
        for more in (["--html", "x.html"], ["--json", "-"]):
            with pytest.raises(SystemExit):
                cli.main(["--url", fake.url, "--serve", "0", *more])
        with pytest.raises(SystemExit):
            cli.main(["--url", fake.url, "--serve", "65536"])
    with FakeServer(stats=STATS) as fake, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["--url", fake.url, "--serve", str(port)]) == 1
        assert f"--serve {port}: Address already in use; name another port" in capsys.readouterr().err


def test_a_key_is_shown_to_the_server(monkeypatch, capsys):
    with FakeServer(stats=STATS, keys=lambda path: "s3cret") as fake:
        assert cli.main(["--url", fake.url]) == 1
        assert "wants a key for /server_info" in capsys.readouterr().err
        monkeypatch.setenv("SGLANG_API_KEY", "s3cret")
        assert cli.main(["--url", fake.url]) == 0
        assert read(fake.url, access=Access("s3cret")).snapshot.tokens == 100
    assert "s3cret" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a log\n", "it does not begin as an object does"), (b"", "is no whole file"), (None, "cannot be read: No such")],
)
def test_a_file_that_is_no_segment_is_named(tmp_path, capsys, content, message):
    path = tmp_path / "server.log"
    if content is not None:
        path.write_bytes(content)
    assert cli.main([str(path)]) == 1
    assert message in (told := capsys.readouterr().err) and f'"{path}"' in told
