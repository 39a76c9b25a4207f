"""SGLang's storage backends (``HiCacheStorage``) as stores of objects: ``--hicache-storage-backend dynamic``, whose
class the user names.

Of a backend only ``set``, ``get`` and ``exists`` are called, with keys of our own. Values are tensors of bytes, or for
those that want none, as Mooncake's, addresses and sizes. Which of both it takes is tried at the start.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import shown
from sglang_diffkv.mem_pool.object_values import BLOCK_BYTES, Values

V = TypeVar("V")

NAMES = ("backend_name", "module_path", "class_name")
"""Of SGLang's extra configuration: where the class of a dynamic backend is."""

STARTING_SECONDS = 120.0
"""In which a backend has to be made and to answer: some register gigabytes of memory first."""

PROBE_BYTES = (128, BLOCK_BYTES)
"""Values of these sizes are written and read back at the start."""


class BackendValues:
    """A backend as ``Values``.

    Attributes:
        by_address: whether it takes addresses, and no tensors.
    """

    at_once, forgets = 1, False

    def __init__(self, backend: Any):
        self.backend, self.by_address = backend, False
        self._buffers, self._known = threading.local(), list[torch.Tensor]()

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> list[bool]:
        return [self._put(key, value) for key, value in zip(keys, values, strict=True)]

    def fetch(self, keys: Sequence[str], targets: Sequence[memoryview]) -> list[bool]:
        return [self._fetch(key, target) for key, target in zip(keys, targets, strict=True)]

    def has(self, keys: Sequence[str]) -> list[bool]:
        return [bool(self.backend.exists(key)) for key in keys]

    def forget(self, key: str) -> None:
        """SGLang's backends cannot."""

    def _put(self, key: str, value: memoryview) -> bool:
        tensor = torch.frombuffer(value, dtype=torch.uint8)
        if not self.by_address:
            return bool(self.backend.set(key, tensor))
        buffer = self._buffer()[: len(tensor)]
        buffer.copy_(tensor)
        return bool(self.backend.set(key, target_location=buffer.data_ptr(), target_sizes=len(buffer)))

    def _fetch(self, key: str, target: memoryview) -> bool:
        tensor = torch.frombuffer(target, dtype=torch.uint8)
        if self.by_address:
            buffer = self._buffer()[: len(tensor)].zero_()
            found = self.backend.get(key, buffer.data_ptr(), len(buffer))
            tensor.copy_(buffer)
            return bool(found)
        found = self.backend.get(key, tensor)
        if isinstance(found, torch.Tensor) and found.data_ptr() != tensor.data_ptr():
            if found.nbytes != tensor.nbytes:
                return False
            tensor.copy_(found.contiguous().view(torch.uint8).flatten())
        return found is not None and found is not False

    def _buffer(self) -> torch.Tensor:
        """[BLOCK_BYTES] of this thread, which the backend knows. It lives as long as the backend, which may have
        pinned it: else another thread's could come to lie where it was."""
        if not hasattr(self._buffers, "own"):
            buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
            self._known.append(buffer)
            if register := getattr(self.backend, "register_buffer", None):
                register(buffer)
            self._buffers.own = buffer
        return self._buffers.own


def class_of(extra: Mapping[str, Any]) -> type:
    """The class that the extra configuration names. Raises ConfigError."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    names = [extra.get(name) for name in NAMES]
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"a dynamic backend is named by {', '.join(NAMES)}: give all of them")
    backend, module, name = names
    try:
        return StorageBackendFactory._load_backend_class(module, name, backend)
    except Exception as error:
        raise ConfigError(f"the class {shown(name)} of {shown(module)} cannot be used: {error}") from None


def configuration(extra: Mapping[str, Any], *, rank: int, ranks: int) -> Any:
    """SGLang's HiCacheStorageConfig of a rank."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="diffkv", extra_config=dict(extra),
    )  # fmt: skip


def connect(extra: Mapping[str, Any], *, rank: int, ranks: int) -> BackendValues:
    """A backend of the named class, which has shown that it gives back what it was given. Raises ConfigError."""

    def make() -> BackendValues:
        values = BackendValues(class_of(extra)(configuration(extra, rank=rank, ranks=ranks), {}))
        _try(values)
        return values

    return started(f"the backend {shown(extra.get('backend_name'))}", make, STARTING_SECONDS)


def started(what: str, make: Callable[[], V], seconds: float) -> V:
    """What ``make`` gives, in a thread of its own. Raises ConfigError if it fails or takes longer."""
    made: list[V | Exception] = []

    def run() -> None:
        try:
            made.append(make())
        except Exception as error:
            made.append(error)

    thread = threading.Thread(target=run, name="diffkv-store-start", daemon=True)
    thread.start()
    thread.join(seconds)
    found = made[0] if made else ConfigError(f"it does not answer within {seconds:g} seconds")
    if isinstance(found, Exception):
        raise ConfigError(f"{what} cannot be used: {_text(found)}") from None
    return found


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else repr(error)


def _try(values: BackendValues) -> None:
    """Raise ConfigError unless the backend takes values, by address if not as tensors, and gives them back."""
    said = []
    for values.by_address in (False, True):
        try:
            return tried(values)
        except ConfigError as error:
            said.append(str(error))
        except Exception as error:
            said.append(repr(error))
    raise ConfigError(f"with tensors: {said[0]}; with addresses: {said[1]}")


def tried(values: Values) -> None:
    """Raise ConfigError unless a store gives back what it is given."""
    if not all(_given_back(values, size) for size in PROBE_BYTES):
        raise ConfigError("it does not give back what it was given")


def _given_back(values: Values, size: int) -> bool:
    keys, value, target = [f"diffkv-probe-{secrets.token_hex(16)}"], secrets.token_bytes(size), bytearray(size)
    taken = values.has(keys) == [False] and values.put(keys, [memoryview(bytearray(value))]) == [True]
    there = taken and values.has(keys) == [True] and values.fetch(keys, [memoryview(target)]) == [True]
    if there:
        values.forget(keys[0])
    return there and target == value
