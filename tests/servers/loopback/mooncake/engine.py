"""A stand-in for Mooncake's transfer engine, as far as SGLang calls it: bytes of one process's registered memory go to
another's over TCP on the loopback. Mooncake's own listens on all interfaces, and needs a library of InfiniBand.

As with the real one, memory that is not registered is neither read nor written, and writes have arrived when the call
returns. ``SECONDS_ENV`` lets each write take so long, in the middle of its bytes. Where the file of ``DAMAGE_ENV`` is,
the next write of pages, of one process, has a wrong byte; then the file is gone.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import time

SECONDS_ENV = "LOOPBACK_ENGINE_SECONDS"
DAMAGE_ENV = "LOOPBACK_ENGINE_DAMAGE"
PAGES = 4096
"""Bytes from which a write is one of pages."""
HEAD = struct.Struct("<QQ")
PIECE = 1 << 20


def _damaged(length: int) -> bool:
    """Whether this write is to be wrong: of all processes one takes the file away."""
    path = os.environ.get(DAMAGE_ENV, "")
    if not path or length < PAGES:
        return False
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), PIECE))
        if not piece:
            raise ConnectionError("the peer has gone")
        data += piece
    return bytes(data)


class TransferEngine:
    """See the module."""

    def __init__(self) -> None:
        self._regions: dict[int, int] = {}
        self._listener: socket.socket | None = None

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    def register_memory(self, address: int, length: int) -> int:
        self._regions[address] = length
        return 0

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        self._regions.update(zip(addresses, lengths, strict=True))
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0 if self._regions.pop(address, None) is not None else -1

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        return min([self.unregister_memory(address) for address in addresses], default=0)

    def transfer_sync_write(self, session: str, source: int, target: int, length: int) -> int:
        return self.batch_transfer_sync_write(session, [source], [target], [length])

    def batch_transfer_sync_write(
        self, session: str, sources: list[int], targets: list[int], lengths: list[int]
    ) -> int:
        host, _, port = session.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                for source, target, length in zip(sources, targets, lengths, strict=True):
                    if not self._registered(source, length):
                        return -1
                    connection.sendall(HEAD.pack(target, length))
                    half = length // 2
                    connection.sendall(ctypes.string_at(source, half))
                    time.sleep(float(os.environ.get(SECONDS_ENV, "0")))
                    second = bytearray(ctypes.string_at(source + half, length - half))
                    second[0] ^= _damaged(length)
                    connection.sendall(second)
                    if _exactly(connection, 1) != b"\1":
                        return -1
        except OSError:
            return -1
        return 0

    def _registered(self, address: int, length: int) -> bool:
        return any(start <= address and address + length <= start + size for start, size in self._regions.items())

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while True:
                    target, length = HEAD.unpack(_exactly(connection, HEAD.size))
                    allowed, at = self._registered(target, length), 0
                    while at < length:
                        piece = _exactly(connection, min(PIECE, length - at))
                        if allowed:
                            ctypes.memmove(target + at, piece, len(piece))
                        at += len(piece)
                    connection.sendall(b"\1" if allowed else b"\0")
            except OSError:
                return
