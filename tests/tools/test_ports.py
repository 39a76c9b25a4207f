"""Ports of servers that start at the same time."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_diffkv.evaluate import ports
from sglang_diffkv.evaluate import server as server_module
from sglang_diffkv.evaluate.ports import Port
from sglang_diffkv.evaluate.server import Server


@pytest.fixture
def few(monkeypatch):
    """Four ports to choose from, all free."""
    first = Port()
    start = next(x for x in range(first.number + 1, 60000, 4) if all(map(_free, range(x, x + 4))))
    monkeypatch.setattr(ports, "RANGE", range(start, start + 4))
    return ports.RANGE


def _free(number: int) -> bool:
    holder = ports._hold(number)
    if holder is not None:
        holder.close()
    return holder is not None


def test_no_port_is_held_twice(few):
    with ThreadPoolExecutor(4) as pool:
        held = list(pool.map(lambda _: Port(), range(4)))
    assert {port.number for port in held} == set(few)
    with pytest.raises(OSError, match="is free"):
        Port()
    number = held.pop().number
    assert Port().number == number, "a port is given back with its object"


def test_another_process_gets_another_port(few):
    held = [Port() for _ in range(3)]
    code = f"from sglang_diffkv.evaluate import ports; ports.RANGE = {few!r}; print(ports.Port().number)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(output) == (set(few) - {port.number for port in held}).pop()


def test_a_port_in_use_is_passed_over(few):
    with socket.socket() as other:
        other.bind(("127.0.0.1", few[0]))
        other.listen()
        assert {Port().number for _ in range(8)} <= set(few[1:])


def test_servers_have_ports_of_their_own(monkeypatch):
    monkeypatch.setattr(server_module, "has_gpu", lambda: False)
    servers = [Server("m") for _ in range(3)]
    numbers = [int(x.command[x.command.index(name) + 1]) for x in servers for name in ("--port", "--nccl-port")]
    assert len(set(numbers)) == 6
    assert [x.port for x in servers] == numbers[::2]
    assert "--nccl-port" not in Server("m", args=["--dp-size=2"]).command, "SGLang chooses one for each replica"
