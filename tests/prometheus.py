"""Debian's Prometheus, watching a server as ``examples/observability`` has it, but every second and without Docker."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import requests
import yaml

from benchmarks.paths import REPOSITORY
from sglang_diffkv.evaluate.ports import Port

WATCHED = REPOSITORY / "examples" / "observability"
VARIABLES = {"$model": ".*", "$instance": ".*", "$__rate_interval": "30s"}
"""Of the dashboard, with all servers chosen; Grafana fills them in."""
TEXT = "text/plain;version=0.0.4"


class Prometheus:
    """Its HTTP interface."""

    def __init__(self, url: str):
        self.url = url

    def _ask(self, path: str, **params: str) -> Any:
        reply = requests.get(f"{self.url}/api/v1/{path}", params=params, timeout=20).json()
        assert reply["status"] == "success", f"{path} {params}: {reply}"
        return reply["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The labels and values of an expression now; of the dashboard's, with all servers chosen."""
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        return [(x["metric"], float(x["value"][1])) for x in self._ask("query", query=expression)["result"]]

    def number(self, expression: str) -> float:
        """The value of an expression that has one."""
        ((_, value),) = self.query(expression)
        return value

    def rules(self) -> dict[str, dict[str, Any]]:
        """All alert rules by name: ``health`` is ``ok`` if one can be computed, ``state`` whether it fires."""
        return {rule["name"]: rule for group in self._ask("rules")["groups"] for rule in group["rules"]}

    def until(self, true: Callable[[], object], what: str) -> None:
        """Wait for what the next scrapes bring."""
        end = time.monotonic() + 30
        while not true():
            assert time.monotonic() < end, f"not within 30 s: {what}"
            time.sleep(0.2)


@contextmanager
def prometheus(program: str, folder: Path, target: str) -> Iterator[Prometheus]:
    """Prometheus with the configuration and rules of the example, watching ``target`` (host:port)."""
    config: dict[str, Any] = yaml.safe_load((WATCHED / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(WATCHED / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    port = Port()
    at = f"127.0.0.1:{port.number}"
    command = [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with ExitStack() as stack:
        if not _chooses_protocols(program):
            assert job.pop("scrape_protocols") == ["PrometheusText0.0.4"]
            target = stack.enter_context(_as_text(target))
        job["static_configs"] = [{"targets": [target]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        log = stack.enter_context((folder / "log").open("wb"))
        process = subprocess.Popen([*command, f"--web.listen-address={at}"], stdout=log, stderr=log)
        stack.callback(process.wait, 20)
        stack.callback(process.terminate)
        found = Prometheus(f"http://{at}")
        found.until(lambda: _ready(found.url), "Prometheus is ready")
        yield found


def _chooses_protocols(program: str) -> bool:
    """Whether it knows ``scrape_protocols``: since 2.49."""
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    version = (told.stdout + told.stderr).partition("version ")[2].split(".")
    return (int(version[0]), int(version[1])) >= (2, 49)


@contextmanager
def _as_text(target: str) -> Iterator[str]:
    """An older Prometheus's way to what ``scrape_protocols`` asks for: the address of a proxy that does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                reply = requests.get(f"http://{target}{self.path}", headers={"Accept": TEXT}, timeout=20)
            except requests.ConnectionError:
                self.send_error(502)
                return
            self.send_response(reply.status_code)
            self.send_header("Content-Type", reply.headers["Content-Type"])
            self.send_header("Content-Length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def _ready(url: str) -> bool:
    try:
        return requests.get(f"{url}/-/ready", timeout=5).ok
    except requests.ConnectionError:
        return False
