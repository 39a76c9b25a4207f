"""TLS before a server that speaks plain HTTP, as a gateway puts it there."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def tls_proxy(port: int, certificate: tuple[Path, Path]) -> Iterator[str]:
    """The ``https`` address that leads to ``port`` of this machine, for the time of the ``with`` block."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, context, port), daemon=True).start()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, context: ssl.SSLContext, port: int) -> None:
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(client, context, port), daemon=True).start()


def _serve(client: socket.socket, context: ssl.SSLContext, port: int) -> None:
    """One request: clients here close their connections."""
    with (
        suppress(OSError),
        context.wrap_socket(client, server_side=True) as secure,
        socket.create_connection(("127.0.0.1", port)) as server,
    ):
        threading.Thread(target=_pump, args=(secure, server), daemon=True).start()
        _pump(server, secure)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
