"""``python -m sglang_diffkv.inspect`` against a stand-in for the server."""

from __future__ import annotations

from typing import Any

import matplotlib.image
import numpy as np
import pytest

from sglang_diffkv.inspect import cli, figure
from sglang_diffkv.inspect.snapshot import InspectError, Snapshot, fetch
from tests.tools.fake_server import FakeServer

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
    with pytest.raises(InspectError, match="no SGLang server answers"):
        fetch("http://127.0.0.1:9")
    ragged = {**BY_HEAD, "low": [[1, 2], [3], [4, 5]]}
    for by_head in (ragged, {**BY_HEAD, "high": [[1, 2]]}, {"tokens": 1}):
        with FakeServer(stats={**STATS, "by_head": by_head}) as fake, pytest.raises(InspectError, match="another form"):
            fetch(fake.url)
