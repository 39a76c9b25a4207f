"""Mooncake's store as a store of objects: ``--hicache-storage-backend mooncake``.

SGLang's own class (``MooncakeStore``) reads the settings and connects, so options, variables and the file of settings
mean what they mean there. Objects go past it to Mooncake's client, in batches of keys of our own. The values pass
through memory that the client knows: 8 MiB for each thread that reads or writes.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import parse_json, read_text, shown
from sglang_diffkv.mem_pool.object_values import BLOCK_BYTES
from sglang_diffkv.srt.startup.storage_backend import STARTING_SECONDS, configuration, started, tried

MASTER, SIZE, TAG = "master_server_address", "global_segment_size", "extra_backend_tag"
TYPES: Mapping[str, type] = {
    MASTER: str, "local_hostname": str, "metadata_server": str, SIZE: int, "protocol": str, "device_name": str,
    "master_metrics_port": int, "check_server": bool, "tenant_id": str, TAG: str,
}  # fmt: skip
"""Of SGLang's extra configuration, what is served with Mooncake's store. A size may be text too."""
KNOWN = tuple(TYPES)
GIVE = {str: "text", int: "a whole number", bool: "true or false"}
SIZE_TEXT = re.compile(r"\s*[0-9]+\s*(gb)?\s*", re.ASCII | re.IGNORECASE)

FILE_ENV, MASTER_ENV = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER"
VARIABLES = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME", "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    SIZE: "MOONCAKE_GLOBAL_SEGMENT_SIZE", "protocol": "MOONCAKE_PROTOCOL", "device_name": "MOONCAKE_DEVICE",
    "master_metrics_port": "MOONCAKE_MASTER_METRICS_PORT", "check_server": "MOONCAKE_CHECK_SERVER",
    "tenant_id": "MOONCAKE_TENANT_ID",
}  # fmt: skip
"""SGLang's, of the fields that it reads of the environment where that names the master."""

REACHED_BY = ("protocol", "device_name", "metadata_server", "local_hostname")
"""Settings, one of which is wrong where a client cannot be set up though the master answers."""

SERVER_STARTS = 620.0
"""Seconds in which it has to be ready where ``check_server`` asks SGLang to wait for it: SGLang waits for 600."""
PROBE_SECONDS = 5.0
"""In which a master has to accept a connection. Mooncake's client would hold up the process for 90."""

STORED, FULL = 0, -200
THERE, ABSENT, MISSING, UNFINISHED, SHORT = 1, 0, -704, -703, -600
"""Answers of Mooncake's client. UNFINISHED: somebody is writing it just now. SHORT: the value has more bytes than there
is room for."""


class MooncakeValues:
    """Mooncake's client as ``Values``.

    Args:
        backend: SGLang's MooncakeStore.
    """

    at_once, forgets = 8, True

    def __init__(self, backend: Any):
        self.backend, self.client = backend, backend.store
        self._buffers, self._known = threading.local(), list[torch.Tensor]()

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> list[bool]:
        """False: there is no room. Raises OSError for any other failure."""
        places = self._places(list(map(len, values)))
        for place, value in zip(places, values, strict=True):
            place.copy_(torch.frombuffer(value, dtype=torch.uint8))
        answers = self.client.batch_put_from(self._names(keys), *_addresses(places))
        return [_known(answer, yes=(STORED,), no=(FULL,)) for answer in answers]

    def fetch(self, keys: Sequence[str], targets: Sequence[memoryview]) -> list[bool]:
        """False: it is not there yet, or has another size. Raises OSError for any other failure."""
        places = self._places(list(map(len, targets)))
        answers = self.client.batch_get_into(self._names(keys), *_addresses(places))
        for place, target, answer in zip(places, targets, answers, strict=True):
            if answer == len(target):
                torch.frombuffer(target, dtype=torch.uint8).copy_(place)
        sizes = zip(targets, answers, strict=True)
        return [answer == len(target) or _known(answer, no=(MISSING, UNFINISHED, SHORT)) for target, answer in sizes]

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Raises OSError if the store cannot say."""
        answers = self.client.batch_is_exist(self._names(keys))
        return [_known(answer, yes=(THERE,), no=(ABSENT, MISSING)) for answer in answers]

    def forget(self, key: str) -> None:
        """At once, whoever has read it just now."""
        (name,) = self._names([key])
        try:
            self.client.remove(name, True)
        except TypeError:  # an older client, which waits until the lease of who has read it ends
            self.client.remove(name)

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [str(key) for key in self.backend._tag_keys(list(keys))]

    def _places(self, sizes: list[int]) -> Sequence[torch.Tensor]:
        """Memory of this thread for so many values of these sizes, which the client knows. It lives as long as the
        client does."""
        if not hasattr(self._buffers, "own"):
            buffer = torch.empty(self.at_once * BLOCK_BYTES, dtype=torch.uint8)
            self.backend.register_buffer(buffer)
            self._known.append(buffer)
            self._buffers.own = buffer
        own: torch.Tensor = self._buffers.own
        return own[: sum(sizes)].split(sizes)


def _addresses(places: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    return [place.data_ptr() for place in places], [len(place) for place in places]


def _known(answer: int, *, yes: Sequence[int] = (), no: Sequence[int] = ()) -> bool:
    """Raises OSError for an answer that is none of both. A size is no."""
    if answer in yes:
        return True
    if answer in no or answer > 0:
        return False
    raise OSError(5, f"Mooncake's client answers {answer}")


def settings(extra: Mapping[str, Any]) -> Any:
    """SGLang's MooncakeStoreConfig: of the extra configuration if it names a master, else of a file, else of the
    environment. Raises ConfigError, also for what is not served or would not be read."""
    from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeBaseStore

    for name, value in {**_read(extra), **extra}.items():
        if name in TYPES:
            _check_field(name, value)
    try:
        found = MooncakeBaseStore()._load_config(SimpleNamespace(extra_config=dict(extra)))
    except Exception as error:
        raise ConfigError(f"its settings cannot be read: {error}") from None
    if not found.master_server_address:
        raise ConfigError(f"no master is named: set {MASTER_ENV}, or {MASTER} in the extra configuration")
    for name in ("standalone_storage", "enable_ssd_offload"):
        if getattr(found, name):
            raise ConfigError(f"{name} is not served: leave it out, and give it to a store service of Mooncake's")
    return found


def _read(extra: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields that SGLang reads, of one place alone. Raises ConfigError if the extra configuration has fields that
    it would not read, or nothing names a master."""
    if extra.get(MASTER) is not None:
        return extra
    lost = [name for name in VARIABLES if name in extra]
    if lost and FILE_ENV in os.environ:
        raise ConfigError(f"{_unread(lost)}, or write it to the file that {FILE_ENV} names")
    if lost:
        raise ConfigError(f"{_unread(lost)}, or set {', '.join(VARIABLES[name] for name in lost)} in the environment")
    if FILE_ENV in os.environ:
        return _file(os.environ[FILE_ENV])
    if not os.environ.get(MASTER_ENV, "").strip():
        raise ConfigError(f"no master is named: set {MASTER_ENV}, or {MASTER} in the extra configuration")
    variables = {MASTER: MASTER_ENV, SIZE: VARIABLES[SIZE]}
    return {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ}


def _unread(lost: Sequence[str]) -> str:
    return f"SGLang reads {', '.join(lost)} of the extra configuration only beside {MASTER}: add {MASTER} too"


def _file(path: str) -> Mapping[str, Any]:
    """Of a file of settings."""
    try:
        found = parse_json(read_text(path))
    except ConfigError as error:
        raise ConfigError(f"the file of {FILE_ENV} {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"the file of {FILE_ENV} has {shown(found)}: give an object of JSON")
    return found


def _check_field(name: str, value: Any) -> None:
    """Raise ConfigError for a value of another type than the field's, which SGLang would misread."""
    if name == SIZE:
        text = isinstance(value, str)
        taken = SIZE_TEXT.fullmatch(value) is not None if text else type(value) is int and value >= 0
        give = 'bytes, 0 or more, or GiB as "4gb"'
    elif name == MASTER:
        taken = isinstance(value, str) and ("://" in value or _host_and_port(value) is not None)
        give = "HOST:PORT"
    else:
        taken, give = type(value) is TYPES[name], GIVE[TYPES[name]]
    if not taken:
        raise ConfigError(f"{name} is {shown(value)}: give {give}")


def _host_and_port(address: str) -> tuple[str, int] | None:
    """None if it is none."""
    host, _, port = address.rpartition(":")
    if not host or any(map(str.isspace, address)) or not (port.isascii() and port.isdecimal()):
        return None
    return (host.strip("[]"), int(port)) if len(port) <= 5 and 0 < int(port) < 1 << 16 else None


def check(extra: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the package can be imported, the settings can be read, and the master accepts
    connections."""
    found = settings(extra)
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Mooncake's package cannot be imported ({error}): pip install mooncake-transfer-engine; without a GPU: "
            "mooncake-transfer-engine-non-cuda; if a library is missing, install it (Debian: libibverbs1)"
        ) from None
    if not found.check_server:
        _probe(str(found.master_server_address))


def _probe(master: str) -> None:
    address = None if "://" in master else _host_and_port(master)
    if address is None:
        return  # several masters behind another service
    try:
        socket.create_connection(address, PROBE_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"its master at {shown(master)} does not answer ({error}): start it first") from None


def segment_bytes(extra: Mapping[str, Any]) -> int:
    """Host memory that a server gives to the store, all of its ranks together. Raises ConfigError."""
    return int(settings(extra).global_segment_size)


def connect(extra: Mapping[str, Any], *, rank: int, ranks: int) -> MooncakeValues:
    """A client, which has shown that the store gives back what it was given. Raises ConfigError."""
    check(extra)
    seconds = SERVER_STARTS if settings(extra).check_server else STARTING_SECONDS

    def make() -> MooncakeValues:
        from sglang.srt.mem_cache.storage.mooncake_store.mooncake_store import MooncakeStore

        try:
            store = MooncakeStore(configuration(extra, rank=rank, ranks=ranks))
        except ValueError:  # the server that ``check_server`` waits for
            raise
        except Exception as error:
            raise ConfigError(f"{error!r}: check {', '.join(REACHED_BY)}") from None
        values = MooncakeValues(store)
        tried(values)
        return values

    return started("Mooncake's store", make, seconds)
