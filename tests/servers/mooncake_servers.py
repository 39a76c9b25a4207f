"""Servers over Mooncake's store: ``python -m tests.servers.mooncake_servers``, in a network of its own.

Mooncake's processes listen on all interfaces, at ports of their own choice, so nothing but the loopback may be there.
"""

from __future__ import annotations

import contextlib
import fcntl
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import requests

from sglang_diffkv.evaluate import client
from sglang_diffkv.evaluate.server import Server
from tests.servers.identity import check_tokens
from tests.servers.preloaded import Preloaded
from tests.servers.shared import tokens
from tests.servers.test_server_disk_tier import report, start, written
from tests.servers.test_server_host_tier import NEW_TOKENS, ask, crowd_out

MASTER, METRICS = "127.0.0.1:50051", 9003
EXTRA = {
    "master_server_address": MASTER, "protocol": "tcp", "global_segment_size": 0, "local_hostname": "127.0.0.1",
    "prefetch_threshold": 32, "prefetch_timeout_base": 3.0,
}  # fmt: skip
SERVICE = f"""
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
failed = store.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 16 << 20, "tcp", "", "{MASTER}")
print("failed" if failed else "ready", flush=True)
for line in sys.stdin:
    sought, *keys = line.split()
    found = {{key: store.get(key) for key in keys if bytes.fromhex(sought) in store.get(key)}}
    print(*(store.upsert(key, value[:-1] + bytes([value[-1] ^ 1])) for key, value in found.items()), flush=True)
"""
"""A process whose memory the store has. For a line with bytes and keys it changes the values that have these bytes."""
SIFFLAGS, UP = 0x8914, 0x1

PROMPTS = [tokens(150, seed) for seed in range(200, 204)]


def switch_loopback_on() -> None:
    """Of a new network, in which no other interface is."""
    assert [name for _, name in socket.if_nameindex()] == ["lo"], "this is not a new network"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_:
        fcntl.ioctl(any_, SIFFLAGS, struct.pack("16sh14x", b"lo", UP))


@contextlib.contextmanager
def running(command: list[str], **files: int) -> Iterator[subprocess.Popen[str]]:
    """A process, for as long as the block lasts. ``files``: as of ``Popen``; where none is named it says nothing."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **files}
    with subprocess.Popen(command, text=True, bufsize=1, **quiet) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def connected(port: int) -> None:
    """Wait until somebody listens there."""
    end = time.monotonic() + 30
    while socket.socket().connect_ex(("127.0.0.1", port)):
        assert time.monotonic() < end, "no master"
        time.sleep(0.05)


def said(service: subprocess.Popen[str], line: str = "") -> str:
    """The next line of the process, after one to it."""
    assert service.stdin is not None and service.stdout is not None
    service.stdin.write(line)
    return service.stdout.readline().strip()


def damage(service: subprocess.Popen[str], prompt: list[int]) -> None:
    """The object of a prompt has another last byte from now on."""
    keys = requests.get(f"http://127.0.0.1:{METRICS}/get_all_keys", timeout=10).text.split()
    blocks = [key for key in keys if key.endswith("block-0")]
    assert said(service, " ".join([np.array(prompt[:20], "<i4").tobytes().hex(), *blocks]) + "\n") == "0"


def hits(server: Server, prompts: list[list[int]], computed: list[Any], when: str) -> int:
    """Prompts that a server finds in the store; AssertionError for other replies than those that were computed."""
    found = [ask(server, prompt) for prompt in prompts]
    check_tokens([reply for reply, _ in found], computed, when)
    return sum(where.get("storage", 0) >= 140 for _, where in found)


def main() -> None:
    switch_loopback_on()
    preloaded = Preloaded()
    Server.popen, Server.grace = preloaded.popen, 0.0
    master = [sys.argv[1], f"-rpc_address={MASTER.partition(':')[0]}", "-metrics_host=127.0.0.1"]
    with contextlib.ExitStack() as stack, running(master) as process, ThreadPoolExecutor(2) as threads:
        connected(int(MASTER.rpartition(":")[2]))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        service = stack.enter_context(running([sys.executable, "-c", SERVICE], **pipes))
        assert said(service) == "ready"
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def another(_: int) -> Server:
            server = start(folder, "mooncake", EXTRA, "timeout")
            stack.callback(server.stop, 0.0)
            return server

        first, second = threads.map(another, range(2))
        computed = client.run(first.url, PROMPTS, NEW_TOKENS, top_logprobs=2)
        crowd_out(first)
        written(first, len(PROMPTS))
        assert hits(second, PROMPTS[:2], computed[:2], "from another server") == 2
        first.stop(0.0)
        damage(service, PROMPTS[1])
        third = another(0)
        assert hits(third, PROMPTS, computed, "after a restart") == 3, report(third)
        assert report(third)["refused_checksum"] == 1, report(third)
        assert report(third)["errors"] == report(second)["errors"] == 0

        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert hits(second, PROMPTS[2:3], computed[2:3], "of a store that hangs") == 0
        assert time.monotonic() - began < 20 and report(second)["late"] >= 1, report(second)
        process.send_signal(signal.SIGCONT)
        service.kill()
        assert hits(second, PROMPTS[3:], computed[3:], "of a store that has lost all") == 0
        assert second.alive() and third.alive()
    preloaded.stop()
    print("served")


if __name__ == "__main__":
    main()
