"""A real server, seen as a person sees it: its pages in a browser, and its metrics in a Prometheus that watches it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from benchmarks.paths import NANO
from sglang_diffkv.evaluate import cli as evaluate
from sglang_diffkv.evaluate.server import Server
from sglang_diffkv.inspect import cli as inspect
from sglang_diffkv.inspect.serve import PageServer
from sglang_diffkv.inspect.snapshot import read
from sglang_diffkv.page import percent, size
from sglang_diffkv.srt.hooks.metrics import FAMILIES
from sglang_diffkv.srt.tree.shape import tenant_of
from tests.browser import Browser, check_looks
from tests.helpers import until
from tests.prometheus import Prometheus, prometheus
from tests.servers.prometheus_text import samples
from tests.servers.shared import START_TIMEOUT, stats_of, tokens
from tests.tools.evaluation import REFERENCE
from tests.tools.test_observability import panels

pytestmark = pytest.mark.server

POOL, TENANTS, RUNNING = 900, ("tenant-1", "<b>tenant & sons</b>"), 3
NOTHING_YET = {"sglang:num_retracted_requests_total"}
"""A counter of SGLang's that is missing until it counts."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With host memory and a disk behind a small pool. Prompts of two tenants were read; a part was evicted."""
    store = tmp_path_factory.mktemp("store")
    args = ["--max-total-tokens", str(POOL), "--enable-metrics", "--enable-hierarchical-cache", "--hicache-ratio", "20"]
    args += [
        "--schedule-conservativeness",
        "0.1",
        "--hicache-write-policy",
        "write_through",
        "--hicache-storage-backend",
        "file",
    ]
    config = {"policy": {"name": "diffkv", "window": 32}, "share_min_tokens": 32}
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store)}
    with Server(NANO, "diffkv", args, diffkv_config=config, env=env, timeout=START_TIMEOUT) as started:
        yield started
        assert "Traceback" not in started.log_text()


@pytest.fixture(scope="module")
def watching(
    server: Server, program: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A Prometheus that has seen the server without load."""
    folder = tmp_path_factory.mktemp("prometheus")
    with prometheus(program("prometheus"), folder, server.url.removeprefix("http://")) as found:
        found.until(lambda: found.query("diffkv_ratio"), "the server is scraped")
        yield found


def ask(server: Server, prompt: list[int], reply: int, tenant: str) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": reply, "ignore_eos": True}
    return server.generate({"input_ids": prompt, "sampling_params": sampling, "extra_key": tenant})


@contextmanager
def running(server: Server) -> Iterator[dict[str, Any]]:
    """Requests run, and stand still: what the server says of them is true until the block ends."""
    prompts = [tokens(60 + 40 * n, n) for n in range(RUNNING)]
    with ThreadPoolExecutor(RUNNING) as threads:
        for reply in (150, 300, 600):  # until none has ended before the pause
            asked = [threads.submit(ask, server, x, reply, TENANTS[0]) for x in prompts]
            until(lambda: all_run(server) or all(x.done() for x in asked))  # noqa: B023
            server.post("/pause_generation", {"mode": "in_place"}).raise_for_status()
            try:
                if met := all_run(server):
                    yield stats_of(server)
            finally:
                server.post("/continue_generation", {}).raise_for_status()
            for x in asked:
                x.result()
            if met:
                return
    raise AssertionError("they do not run at once")


def all_run(server: Server) -> bool:
    """Whether all requests run, with more than a window of tokens."""
    return sum(x["tokens"] > 64 for x in stats_of(server)["running"]) == RUNNING


def test_the_page_says_what_the_server_says(
    server: Server, watching: Prometheus, browser: Browser, tmp_path: Path
) -> None:
    """While requests run, over host memory, a disk and prefixes of two tenants: every figure that a person reads."""
    for n in range(10):
        ask(server, tokens(150, 100 + n), 8, TENANTS[n % 2])
    page = tmp_path / "cache.html"
    with running(server) as told:
        assert inspect.main(["--url", server.url, "--html", str(page)]) == 0
        assert stats_of(server)["running"] == told["running"], "they did not stand still"
    check_looks(browser, page.as_uri(), "inspect")
    assert browser.tile("tokens held") == f"{told['tokens']:,}" and browser.tile("running requests") == str(RUNNING)
    assert browser.tile("of bf16 bytes") == f"{told['ratio_pages']:.3f}" and browser.tile("faults") == "0"
    assert browser.tile("pages in use") == percent(told["pages_used"] / told["pages"])
    for name, share in told["share_by_tier"].items():
        assert browser.cell("Shares of the tokens", name, "share") == percent(share)
    for name, pages in told["owners"].items():
        assert browser.cell("Pages of", name, "pages") == f"{pages:,}"
        assert browser.cell("Pages of", name, "size") == size(pages * told["page_bytes"])
    assert len(told["running"]) == RUNNING and told["host_prefixes"]["host_bytes"] > 0
    for at, request in enumerate(told["running"], 1):
        for name, column in (("tokens", "tokens"), ("prefix_tokens", "of a shared prefix"), ("pages", "pages")):
            assert browser.cell("Longest first", str(at), column) == f"{request[name]:,}"
    by_head = told["by_head"]["pages"]
    for layer, heads in enumerate(by_head):
        for head, pages in enumerate(heads):
            shown = f"{pages * told['page_bytes'] / 1024:,.1f}"
            assert browser.cell("KiB of pages", str(layer), str(head)) == shown
    for tenant in told["prefix_cache"]["by_tenant"]:
        assert browser.cell("Tree by tenant", tenant["tenant"], "tokens") == f"{tenant['tokens']:,}"
    assert str(tenant_of(TENANTS[:1])) in browser.text and "tenant-1" not in browser.text
    assert browser.cell("Host prefixes", "host_bytes", "value") == size(told["host_prefixes"]["host_bytes"])


def test_a_served_page_is_refreshed_by_its_button(server: Server, browser: Browser) -> None:
    server.flush_cache()
    with PageServer(0, partial(read, server.url)) as serving:
        Thread(target=serving.serve_forever, args=(0.05,), daemon=True).start()
        check_looks(browser, serving.url, "served")
        assert browser.tile("tokens held") == "0" and "Nothing is held" in browser.text
        ask(server, tokens(150, 300), 8, TENANTS[0])
        browser.click("form button")
        held = stats_of(server)["tokens"]
        assert held > 100 and browser.tile("tokens held") == f"{held:,}" and "Nothing is held" not in browser.text
        serving.shutdown()


def test_the_report_of_an_evaluation(server: Server, browser: Browser, tmp_path: Path) -> None:
    """Its page has the numbers of its data."""
    asked = ["--url", server.url, "--task", REFERENCE, "--n", "3", "--max-new-tokens", "8", "--name", "watched"]
    assert evaluate.main([*asked, "--output", str(tmp_path)]) == 0
    check_looks(browser, (tmp_path / "report.html").as_uri(), "report")
    (result,) = json.loads((tmp_path / "results.json").read_text())["results"]
    title, score = result["suite"], result["score"]
    assert browser.cell(title, "watched", "n") == str(score["n"]) == "3"
    assert browser.cell(title, "watched", "accuracy %").startswith(f"{100 * score['mean']:.1f} ±")
    assert browser.cell(title, "watched", "ratio, pages") == f"{result['cache']['ratio_pages']:.3f}"
    assert browser.cell("Configurations: watched: diffkv: policy", "window", "value") == "32"


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ("", None),
        ("<div style='width:2000px'>wide</div>", "scrolls to the side"),
        ("<p style='color:#999'>pale</p>", "has a contrast of 2.8"),
        ("<p style='position:absolute;top:20px;left:0'>over others</p>", "overlap: "),
        ("<p style='overflow:hidden;white-space:nowrap;width:3em'>a text that is cut</p>", "is cut off: a text"),
        ("<p style='width:3em'>unbreakableunbreakable</p>", "runs out of its box: unbreakable"),
        ("<script>throw new Error('of a script')</script>", "Uncaught Error: of a script"),
        ("<style>body{background:white;color:black}</style>", "the page is light, and dark was asked for"),
    ],
)
def test_what_a_person_would_not_take_is_found(browser: Browser, tmp_path: Path, wrong: str, found: str | None) -> None:
    """Each on a page that is right without it."""
    lines = "".join(f"<p>line {n} of many</p>" for n in range(12))
    style = "<meta name='viewport' content='width=device-width'><style>:root{color-scheme:light dark}"
    style += "body{background:light-dark(white,black);color:light-dark(black,white)}</style>"
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html>{style}{lines}{wrong}")
    if found is None:
        check_looks(browser, page.as_uri(), "right")
        return
    with pytest.raises(AssertionError, match=found):
        check_looks(browser, page.as_uri(), "wrong")


@pytest.mark.parametrize("panel", panels())
def test_every_panel_shows_something(watching: Prometheus, panel: Any) -> None:
    """Of the dashboard, by the Prometheus that watched all of this: a value, or none before the first retraction."""
    title, expression = panel
    found = watching.query(expression)
    assert found or any(name in expression for name in NOTHING_YET), title


def test_prometheus_knows_the_server_and_its_rules(server: Server, watching: Prometheus) -> None:
    """What it has is what the server says; all rules can be computed, none fires, and a server that ends is missed."""

    def agree() -> bool:
        found = samples(server.get("/metrics").text)
        return all(
            sorted(value for _, value in watching.query(family.name))
            == sorted(value for _, value in found[family.name])
            for family in FAMILIES
        )

    def holding() -> bool:
        """A prompt's metrics are of a reading from before it. The last one can be of a cache that was just emptied."""
        ask(server, tokens(150, 400), 8, TENANTS[0])
        return watching.number("diffkv_tokens") > 0 and watching.number("diffkv_host_prefix_bytes") > 0

    watching.until(holding, "what is held is told of")
    watching.until(agree, "what Prometheus has is what the server exposes")
    rules = watching.rules()
    assert len(rules) > 10 and {x["health"] for x in rules.values()} == {"ok"}, rules
    assert not [name for name, x in rules.items() if x["state"] == "firing"]
    server.stop(grace=0.0)
    watching.until(lambda: watching.rules()["ServerDown"]["state"] == "pending", "it is missed")
