"""A page as a person sees it: Chromium, driven by chromedriver over HTTP, at two widths, in light and dark."""

from __future__ import annotations

import base64
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
)  # fmt: skip
SIZES = ((360, 740), (1280, 800))
"""Of a telephone and of a laptop, in CSS pixels."""
CONTRAST = 4.5
"""Of text against what is behind it, at least: WCAG 2, level AA."""
SCREENSHOTS = "SCREENSHOTS"
"""A folder, for who wants to see what the browser saw."""

_SCRIPT = Path(__file__).with_name("browser_look.js")


class Browser:
    """One tab. Raises AssertionError with chromedriver's words if it refuses something."""

    def __init__(self, driver: str, profile: str):
        self._driver = driver
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        found = self._ask("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self._at = f"/{found['sessionId']}"

    def _ask(self, method: str, path: str, payload: Any = None) -> Any:
        reply = requests.request(method, f"{self._driver}/session{path}", json=payload, timeout=60)
        value = reply.json()["value"]
        assert reply.ok, f"{path}: {value}"
        return value

    def close(self) -> None:
        self._ask("DELETE", self._at)

    def devtools(self, command: str, **params: Any) -> Any:
        """A command of Chrome's own protocol."""
        return self._ask("POST", f"{self._at}/goog/cdp/execute", {"cmd": command, "params": params})

    def as_seen(self, width: int, height: int, scheme: str) -> None:
        """From now on the screen has this size, and its user prefers ``light`` or ``dark``."""
        phone = width < 600
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._at}/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """What a script in the page returns."""
        return self._ask("POST", f"{self._at}/execute/sync", {"script": script, "args": list(args)})

    def click(self, selector: str) -> None:
        """As a mouse does it: in the middle of the element, which must be visible there."""
        where = {"using": "css selector", "value": selector}
        (element,) = self._ask("POST", f"{self._at}/element", where).values()
        self._ask("POST", f"{self._at}/element/{element}/click", {})

    def complaints(self) -> list[str]:
        """What the browser logged since it was last asked: errors of scripts, of policies and of loading."""
        found = self._ask("POST", f"{self._at}/se/log", {"type": "browser"})
        return [entry["message"] for entry in found if entry["level"] in ("SEVERE", "WARNING")]

    def picture(self, path: Path) -> None:
        """All of the page, as PNG."""
        found = self.devtools("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    @property
    def text(self) -> str:
        """The words that are shown, on one line."""
        return " ".join(self.run("return document.body.innerText").split())

    def cell(self, caption: str, row: str, column: str) -> str:
        """The text of a cell, by the beginning of its table's caption and the heads of its row and column."""
        return self.run(_CELL, caption, row, column)

    def tile(self, name: str) -> str:
        """A figure in large."""
        return self.run(_TILE, name)


_CELL = """
const table = [...document.querySelectorAll('table')].find(x => x.caption.textContent.startsWith(arguments[0]));
const at = [...table.tHead.rows[0].cells].findIndex(x => x.textContent === arguments[2]);
return [...table.tBodies[0].rows].find(x => x.cells[0].textContent === arguments[1]).cells[at].textContent;
"""
_TILE = "return [...document.querySelectorAll('dt')].find(x => x.textContent === arguments[0])" + (
    ".nextElementSibling.textContent"
)


@contextmanager
def chromium(chromedriver: str) -> Iterator[Browser]:
    """A browser with a profile of its own, which is gone behind the ``with`` block."""
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen(
            [chromedriver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert driver.stdout is not None
            line = next(x for x in driver.stdout if "successfully on port" in x)
            port = int(line.rstrip(".\n").rpartition(" ")[2])
            browser = Browser(f"http://127.0.0.1:{port}", profile)
            try:
                yield browser
            finally:
                browser.close()
        finally:
            driver.terminate()
            driver.wait(20)


def problems(browser: Browser) -> list[str]:
    """Of the page as it is now: it scrolls to the side, texts overlap, are cut off or run out of their boxes, have too
    little contrast, or the browser complained. All that is folded is opened first."""
    found: list[str] = browser.run(_SCRIPT.read_text(encoding="utf-8"), CONTRAST)
    return [*found, *(f"the browser says {x}" for x in browser.complaints())]


def check_looks(browser: Browser, url: str, name: str) -> None:
    """Open a page on each screen and raise AssertionError with all that is wrong with it anywhere."""
    found = []
    for width, height in SIZES:
        for scheme in ("light", "dark"):
            browser.as_seen(width, height, scheme)
            browser.open(url)
            found += [f"{width} pixels, {scheme}: {x}" for x in problems(browser)]
            ink = browser.run("return getComputedStyle(document.body).color")
            dark = int(ink.partition("(")[2].partition(",")[0]) > 127
            if dark != (scheme == "dark"):
                found.append(f"{width} pixels: the page is {'dark' if dark else 'light'}, and {scheme} was asked for")
            if folder := os.environ.get(SCREENSHOTS):
                browser.picture(Path(folder) / f"{name}-{width}-{scheme}.png")
    assert not found, f"{name}:\n" + "\n".join(found[:20])
