"""What an optional part declares to a server, in files of its own.

``optional_parts.py`` lists them. What a part does while requests run is a ``RequestListener`` or ``PrefixSource``
(``tree/parts.py``), which ``source`` makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.findings import Findings
from sglang_diffkv.plan import HostRoom
from sglang_diffkv.srt.startup.option_kinds import Refused
from sglang_diffkv.srt.tree.parts import PrefixSource
from sglang_diffkv.srt.tree.prefix_cache import DiffKVPrefixCache

Value: TypeAlias = "float | Mapping[str, float]"


@dataclass(frozen=True)
class Family:
    """A metric's name, text and own label; ``total``: a counter."""

    name: str
    text: str
    label: str | None = None
    total: bool = False


class ServerPart:
    """A part that the user's arguments switch on; here one that declares nothing. ``args`` are SGLang's ``ServerArgs``
    as the user gave them.

    Attributes:
        refused: options of SGLang, by field of ``ServerArgs``, that do not work. works: test -> fields that work.
        families: metrics, which every server has, with the part or without it.
    """

    refused: Mapping[str, Refused] = {}
    works: Mapping[str, str] = {}
    families: Sequence[Family] = ()

    def values_of(self, reports: Mapping[str, Mapping[str, float]]) -> Mapping[str, Value]:
        """The value of each of ``families``, or its values by label. ``reports``: of ``/server_info``, by name."""
        return {}

    # At the start, in this order

    def problems(self, args: Any, config: DiffKVConfig) -> list[str]:
        """What does not work with what the user asks for, each with what to do."""
        return []

    def decline(self, args: Any) -> None:
        """Keep off what SGLang would do itself for the same options."""

    def host_room(self, configurator: Any) -> HostRoom | None:
        """The host memory that the part needs; None for none. ``configurator``: SGLang's KVCacheConfigurator, or what
        is known of it before weights are loaded. Raises UnsupportedError for a model or a machine that is refused."""
        return None

    def opened(self, args: Any, model: Any, config: DiffKVConfig) -> Any:
        """What ``source`` needs that is opened once; None for nothing. ``model``: SGLang's ModelConfig. Raises
        UnsupportedError."""
        return None

    def source(self, tree: DiffKVPrefixCache, share_min_tokens: int, opened: Any) -> PrefixSource | None:
        """The part around a tree; None where the server is without it. ``opened``: as above."""
        return None

    # For the doctor

    def add_findings(self, findings: Findings, args: Any, room: HostRoom | None, pool: int, host: int) -> None:
        """What the part would do. ``room``: what ``host_room`` gave. ``pool``, ``host``: bytes of the pool's pages, and
        of all host memory."""
