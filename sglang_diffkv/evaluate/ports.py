"""TCP ports for servers that start at the same time."""

from __future__ import annotations

import random
import socket
import weakref

RANGE = range(20000, 32000)
"""Below the ports that the kernel gives to connections and to sockets bound to port 0."""


class Port:
    """A TCP port that nothing listens on, for as long as the object lives.

    A server binds its port many seconds after it was chosen, so a free port is no answer for two servers that start
    together. No two objects hold one port, in this process or another: each holds a socket in Linux's abstract
    namespace that is named after its port. Like ports, these names belong to a network namespace, and they go with
    their process.
    """

    def __init__(self) -> None:
        for number in random.Random().sample(RANGE, len(RANGE)):
            holder = _hold(number)
            if holder is not None:
                self.number = number
                weakref.finalize(self, holder.close)
                return
        raise OSError(f"no port from {RANGE.start} to {RANGE.stop - 1} is free")


def _hold(number: int) -> socket.socket | None:
    """The socket that holds a port, None if another process or object has it."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(f"\0sglang_diffkv.port.{number}")
        with socket.socket() as probe:
            probe.bind(("", number))
    except OSError:
        holder.close()
        return None
    return holder
