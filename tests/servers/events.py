"""A listener to the KV events of a server, as a router is."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import zmq

from sglang_diffkv.evaluate.ports import Port

FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""Of events as SGLang 0.5.17 sends them: lists without names."""


def _named(event: list[Any]) -> dict[str, Any]:
    return {"type": event[0], **dict(zip(FIELDS[event[0]], event[1:], strict=True))}


class Events:
    """What a listener to the KV events believes to be cached."""

    def __init__(self) -> None:
        self.ports = Port(), Port()
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.connect(f"tcp://127.0.0.1:{self.ports[1].number}")
        self.next = 0
        self.blocks: dict[tuple[int | None, int], int] = {}  # (hash before, token) -> hash
        self.on_host: dict[tuple[int | None, int], int] = {}  # the same of host memory
        self.removed = 0

    def option(self) -> str:
        endpoint, replay = (f"tcp://*:{port.number}" for port in self.ports)
        return json.dumps({"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay})

    def read(self) -> None:
        """Ask for all that was published since the last time; a server without work has published all."""
        time.sleep(1)
        self.socket.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert self.socket.poll(20_000), "the server sends no events"
            *_, number, payload = self.socket.recv_multipart()  # SGLang 0.5.23 adds a topic
            if not payload:
                return
            self.next = int.from_bytes(number, "big") + 1
            for event in msgspec.msgpack.decode(payload)[1]:
                self._take(event if isinstance(event, dict) else _named(event))

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
            self.on_host.clear()
            return
        blocks = self.on_host if event["medium"] == "CPU_PINNED" else self.blocks
        if event["type"] == "BlockStored":
            before = event.get("parent_block_hash")
            for name, token in zip(event["block_hashes"], event["token_ids"], strict=True):
                blocks[before, token] = before = name
        else:
            gone = set(event["block_hashes"])
            assert gone <= set(blocks.values()), "a block was removed that was never stored"
            self.removed += len(gone)
            for key in [key for key, name in blocks.items() if name in gone]:
                del blocks[key]

    def cached(self, ids: list[int], *, on_host: bool = False) -> int:
        """Tokens of a prompt that a request would find; it computes at least the last. ``on_host``: with what would
        come back from host memory."""
        blocks, before = {**self.blocks, **(self.on_host if on_host else {})}, None
        for at, token in enumerate(ids[:-1]):
            if (before, token) not in blocks:
                return at
            before = blocks[before, token]
        return len(ids) - 1
