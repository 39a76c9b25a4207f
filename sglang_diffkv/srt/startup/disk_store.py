"""A store behind host memory: SGLang's options of ``--hicache-storage-backend``, as the plugin takes them. ``file`` is
a folder (``ObjectFolder``), ``mooncake`` Mooncake's store (``mooncake_store.py``), ``dynamic`` a class of SGLang's
storage backends (``storage_backend.py``)."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import ConfigError, UnsupportedError
from sglang_diffkv.files import named, parse_json, read_text, shown
from sglang_diffkv.mem_pool.host_pages import GIB
from sglang_diffkv.mem_pool.object_folder import ObjectFolder, prepare
from sglang_diffkv.mem_pool.object_values import ObjectValues
from sglang_diffkv.srt.models.speculation import NGRAM, drafts_by_model
from sglang_diffkv.srt.startup import host_options, mooncake_store, own_means, own_shaping, storage_backend
from sglang_diffkv.srt.startup.model_identity import configuration_digest, model_digest
from sglang_diffkv.srt.startup.storage_backend import NAMES
from sglang_diffkv.srt.tree.disk_tier import Prefetch
from sglang_diffkv.srt.versions import compat

logger = logging.getLogger(__name__)

OPTION, EXTRA = "--hicache-storage-backend", "--hicache-storage-backend-extra-config"
FOLDER_ENV = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
SIZE_ENV = "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE"
OTHERS = {name: f"SGLANG_HICACHE_FILE_BACKEND_{name}" for name in ("MIN_FREE_SPACE", "EVICTION_RATIO")}
SECONDS = ("prefetch_timeout_base", "prefetch_timeout_per_ki_token")
WAITS = ("prefetch_threshold", *SECONDS)
FILE, DYNAMIC, MOONCAKE = STORES = ("file", "dynamic", "mooncake")
KNOWN = {FILE: ("file_storage_path", "max_size", *WAITS), MOONCAKE: (*mooncake_store.KNOWN, *WAITS)}
"""Of SGLang's extra configuration, what is served with a store. A class of the user's takes what it knows."""


@dataclass(frozen=True)
class Store:
    """A store of prefixes, the digests of what this server writes there, and how requests wait for it."""

    objects: ObjectFolder | ObjectValues
    model: str
    configuration: str
    prefetch: Prefetch


@dataclass(frozen=True)
class Asked:
    """What a user's options say. ``path``: of a folder; empty for another store. ``most``: its bytes; None if they say
    nothing. extra: SGLang's extra configuration."""

    path: str
    most: int | None
    prefetch: Prefetch
    extra: Mapping[str, Any]


def problems_alone(args: Any) -> list[str]:
    """What does not work without a host tier."""
    if host_options.store_asked_for(args) is None:
        return []
    return [f"{OPTION} without --enable-hierarchical-cache: add it, or drop {OPTION}", *_with_page_size(args)]


def problems(args: Any) -> list[str]:
    """What does not work of the store that the user's arguments ask for, each with what to do."""
    store = host_options.store_asked_for(args)
    if store is None:
        return []
    view, found = compat.resolved(args), _with_page_size(args)
    if store not in STORES:
        return found  # the table of options refuses it
    if getattr(view, "enable_lora", False) or getattr(view, "lora_paths", None):
        found.append(f"{OPTION} with LoRA, whose adapters have no lasting name: drop {OPTION}, or --enable-lora")
    if drafts_by_model(view):
        found.append(
            f"{OPTION} with a draft model, of whose cache host memory alone has copies: drop {OPTION}, or use "
            f"--speculative-algorithm {NGRAM}"
        )
    try:
        asked = asked_for(view, store)
        if store == FILE:
            prepare(asked.path)
        elif store == MOONCAKE:
            mooncake_store.check(asked.extra)
        else:
            storage_backend.class_of(asked.extra)
    except ConfigError as error:
        found.append(f"{OPTION} {store}: {error}")
    return found


def _with_page_size(args: Any) -> list[str]:
    size = compat.tree_page_size(args)
    if size == 1 or getattr(compat.resolved(args), "disable_radix_cache", False):
        return []
    return [f"--page-size {size} with {OPTION}, whose files servers of other sizes would read: drop one of them"]


def check_model(args: Any, configurator: Any) -> None:
    """Raise UnsupportedError for a model whose prompts have no lasting name, or whose states are not written."""
    if host_options.store_asked_for(args) is not None and getattr(configurator, "mambaish_config", None) is not None:
        raise UnsupportedError(
            f"--attention-backend diffkv does not work with {OPTION} for a model with states, of which host memory "
            f"alone has copies: drop {OPTION}"
        )
    if host_options.store_asked_for(args) is not None and getattr(configurator.model_config, "is_multimodal", False):
        raise UnsupportedError(
            f"--attention-backend diffkv does not work with {OPTION} for a model that takes images, which SGLang names "
            f"by 30 bits in a prompt: drop {OPTION}"
        )


def asked_for(view: Any, store: str = FILE) -> Asked:
    """What resolved arguments and the environment say of a ``store``. Raises ConfigError for what SGLang would misread
    or is not served."""
    extra = _extra(getattr(view, "hicache_storage_backend_extra_config", None), KNOWN.get(store))
    if store != FILE:
        return Asked("", None, _prefetch(view, extra), extra)
    for name, variable in OTHERS.items():
        if os.environ.get(variable):
            raise ConfigError(f"{variable} is not served: unset it, and set max_size in {EXTRA} ({name.lower()})")
    path = os.environ.get(FOLDER_ENV) or extra.get("file_storage_path")
    if not isinstance(path, str) or not path.strip():
        raise ConfigError(f"no folder is named: set {FOLDER_ENV}, or file_storage_path in {EXTRA}")
    size = extra.get("max_size", os.environ.get(SIZE_ENV) or None)
    return Asked(path, None if size is None else _size(size), _prefetch(view, extra), extra)


def _prefetch(view: Any, extra: Mapping[str, Any]) -> Prefetch:
    """How requests wait for a store."""
    seconds = {name: _number(extra, name) for name in SECONDS if name in extra}
    usual, threshold = Prefetch(), extra.get("prefetch_threshold", Prefetch().threshold)
    if type(threshold) is not int or threshold < 1:
        raise ConfigError(f"prefetch_threshold in {EXTRA} is {shown(threshold)}: give a whole number of tokens above 0")
    return Prefetch(
        str(view.hicache_storage_prefetch_policy),
        threshold,
        seconds.get(SECONDS[0], usual.base),
        seconds.get(SECONDS[1], usual.per_ki_token),
    )


def _extra(text: str | None, served: Collection[str] | None) -> Mapping[str, Any]:
    """SGLang's extra configuration, inline or in the file after an ``@``, of the ``served`` fields; None: of any."""
    if not text or not text.strip():
        return {}
    try:
        found = parse_json(read_text(text[1:]) if text.startswith("@") else text)
    except ConfigError as error:
        raise ConfigError(f"{EXTRA} {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{EXTRA} is {shown(found)}: give an object of JSON")
    if served is not None and (unknown := sorted(set(found) - set(served))):
        raise ConfigError(
            f"{EXTRA} has {', '.join(map(shown, unknown))}, and {', '.join(served)} are served: "
            "correct it or leave it out"
        )
    return found


def _number(extra: Mapping[str, Any], name: str) -> float:
    value = extra[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ConfigError(f"{name} in {EXTRA} is {shown(value)}: give seconds, 0 or more")
    return float(value)


def _size(value: Any) -> int:
    """Bytes, by SGLang's units. It takes others, as "1GB", for no bound at all."""
    from sglang.srt.utils.common import human_readable_int

    try:
        found = human_readable_int(value) if isinstance(value, str) else value
    except (argparse.ArgumentTypeError, ValueError):
        found = None
    if type(found) is not int or found <= 0:
        raise ConfigError(f"max_size is {shown(value)}: give bytes above 0, for example 200G or 200Gi")
    return found


def describe(args: Any) -> str | None:
    """For the doctor: the store that the user's arguments ask for; None if they ask for none."""
    if host_options.store_asked_for(args) is None or not host_options.asks_for_host_tier(args):
        return None
    store = str(host_options.store_asked_for(args))
    asked = asked_for(compat.resolved(args), store)
    if store == MOONCAKE:
        found, policy = mooncake_store.settings(asked.extra), asked.prefetch.policy
        where = f"Mooncake's store at {found.master_server_address}"
        lent = f"which has {found.global_segment_size / GIB:.2f} GiB of this host's memory"
        return f"written to {where}, {lent}, and found there ({policy})"
    if store != FILE:
        return f"written to the store {shown(asked.extra.get(NAMES[0]))}, and found there ({asked.prefetch.policy})"
    most = "half of what is free there" if asked.most is None else f"{asked.most / GIB:.2f} GiB"
    return f"written to {named(asked.path)}, in at most {most}, and found there ({asked.prefetch.policy})"


def bytes_lent(args: Any) -> int:
    """Host memory that a server gives to a store, all of its ranks together."""
    if host_options.store_asked_for(args) != MOONCAKE:
        return 0
    try:
        return mooncake_store.segment_bytes(asked_for(compat.resolved(args), MOONCAKE).extra)
    except ConfigError as error:
        raise UnsupportedError(f"diffkv: {OPTION} {MOONCAKE}: {error}") from None


def _connected(asked: Asked, store: str) -> ObjectValues:
    ranks = compat.tensor_parallel_ranks()
    connect = mooncake_store.connect if store == MOONCAKE else storage_backend.connect
    return ObjectValues(connect(asked.extra, rank=ranks.rank, ranks=ranks.size))


def opened(args: Any, model: Any, config: DiffKVConfig) -> Store | None:
    """The store that the user's arguments ask for; None if they ask for none. ``model``: SGLang's ModelConfig."""
    if host_options.store_asked_for(args) is None or not host_options.asks_for_host_tier(args):
        return None
    store = str(host_options.store_asked_for(args))
    try:
        asked = asked_for(compat.resolved(args), store)
        objects = ObjectFolder(asked.path, asked.most) if store == FILE else _connected(asked, store)
    except ConfigError as error:
        raise UnsupportedError(f"diffkv: {OPTION} {store}: {error}") from None
    if isinstance(objects, ObjectFolder):
        logger.info(
            "DiffKV: prefixes in host memory are written to %s, in at most %.2f GiB, and found there (%s).",
            objects.path, objects.most / GIB, asked.prefetch.policy,
        )  # fmt: skip
    else:
        logger.info("DiffKV: prefixes in host memory are %s.", describe(args))
    if store == MOONCAKE:
        logger.warning(
            "DiffKV: Mooncake's client listens on all interfaces of this host. Who reaches it may change replies: keep "
            "it behind a firewall."
        )
    own = configuration_digest(config, own_means.digest(), own_shaping.digest())
    return Store(objects, model_digest(args, model), own, asked.prefetch)
