"""SGLang's router before DiffKV servers: it sends a prompt to the server that has its beginning in the prefix cache.

It needs ``pip install sglang-router``. Start servers, then name them::

    python -m sglang.launch_server --model-path examples/models/nano --attention-backend diffkv --enable-cache-report
    python examples/router.py --workers http://127.0.0.1:30000

The router runs until both turns of a chat are answered. ``python -m sglang_router.launch_router`` keeps one running.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from openai_client import chat

START_SECONDS = 60


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def router(workers: Sequence[str]) -> Iterator[str]:
    """A router before servers, by its URL; it ends with the block. Raises RuntimeError if it does not start."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", *workers]
    command += ["--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "warn"]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(f"{url}/v1/models"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the router did not start: {' '.join(command)}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", default=["http://127.0.0.1:30000"], metavar="URL")
    args = parser.parse_args(argv)
    with router(args.workers) as url:
        for number, turn in enumerate(chat(url), 1):
            print(f"turn {number}: {turn.prompt_tokens} prompt tokens, {turn.cached_tokens} of them cached")
            print(turn.text.strip())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
