"""What a request asks of its own cache: ``custom_params.diffkv``, which SGLang hands through from all its interfaces.

A request whose ``tier`` is ``high`` keeps all its tokens in the server's highest tier. ``lossless`` is the same where
that tier stores what the model computed, and an error elsewhere. Such requests find cached prompts of one another only
(``tree/private_space.py``), so none reads what was compressed for others. They take more room, so a server may bound
the share of its pool that they have together.

A request may have a ``window`` of its own. It finds cached prompts of requests with the same one only: what the tree
has of a prompt ends where its window began.

And it may ask to ``keep`` what it leaves in the prefix cache, for so many seconds (``tree/kept_prefixes.py``).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from sglang_diffkv.bounds import KeepSeconds, Window
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import shown
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.policies.options import Strict
from sglang_diffkv.refusals import explain
from sglang_diffkv.srt.versions import compat

FIELD = "diffkv"
PLACE = f"custom_params.{FIELD}"
PAGE = "docs/operate.md#a-tier-or-a-window-for-a-request"
NEAR, MOST_LETTERS, MOST_NAMES = 0.82, 16, 64
"""How alike a name of ``custom_params`` is that means ours; names that are longer, or come later, are not looked at."""


class RequestFields(Strict):
    """What a request may set.

    Attributes:
        tier: ``default``: as the server's policy has it. ``high``: all tokens stay in the server's highest tier.
            ``lossless``: the same, if that tier stores what the model computed.
        window: newest tokens that stay in the highest tier in any case; None: as many as the server's policy says.
        keep: seconds for which what it leaves in the prefix cache is evicted last.
    """

    tier: Literal["default", "high", "lossless"] = Field(default="default", description="where its tokens stay")
    window: Window | None = Field(default=None, description="newest tokens that stay in the highest tier")
    keep: KeepSeconds | None = Field(default=None, description="seconds for which its prefix is evicted last")


def fields_of(params: Any, *, ours_alone: bool = False) -> RequestFields:
    """What the ``custom_params`` of a request say.

    Args:
        ours_alone: no logit processor reads them, so that our fields beside ``diffkv`` and not in it are an error.

    Raises ConfigError, with one line.
    """
    if not isinstance(params, dict):
        return RequestFields()
    if FIELD not in params:
        for name in list(params)[:MOST_NAMES]:
            if isinstance(name, str) and len(name) <= MOST_LETTERS and _is_near(name.lower()):
                raise ConfigError(f"unknown field {shown(name)} in custom_params; did you mean {FIELD}? (see {PAGE})")
        if ours_alone and (outside := [name for name in RequestFields.model_fields if name in params]):
            raise ConfigError(f'custom_params.{outside[0]} is outside "{FIELD}": write {_inside(outside)} (see {PAGE})')
        return RequestFields()
    try:
        return RequestFields.model_validate(params[FIELD])
    except ValidationError as error:
        raise ConfigError(" ".join(explain(error, RequestFields, PLACE, page=PAGE).split())) from None


def _inside(names: list[str]) -> str:
    fields = ", ".join(f'"{name}": ...' for name in names)
    return f'"custom_params": {{"{FIELD}": {{{fields}}}}}'


def _is_near(name: str) -> bool:
    return bool(difflib.get_close_matches(name, [FIELD], cutoff=NEAR))


def lossless_obstacle(config: DiffKVConfig) -> str:
    """Why no request of a server can be lossless, and what to do; empty if it can."""
    high = config.tiers[0]
    if not config.parsed_tiers[0].is_raw:
        return (
            f"the highest tier of this server is {high}, which rounds: ask for {_tier('high')}, or start the server "
            f'with "tiers": ["BF16", "{high}"]'
        )
    named = ("key_means", "key_rotation", "value_rotation", "noise_shaping")
    changes = ["rotate"] * (config.rotate != "none") + [name for name in named if getattr(config, name)]
    if changes:
        return (
            f"this server changes keys or values before it stores them: ask for {_tier('high')}, or start the server "
            f"without {' and '.join(changes)}"
        )
    return ""


def _tier(name: str) -> str:
    return f'{{"tier": "{name}"}}'


class Fidelity:
    """The requests that keep all their tokens in the high tier, or have a window of their own.

    Args:
        config: the server's; None for one that allows all.

    Attributes:
        share: of the pool, what the former may take together. refused: requests that asked for what there is not.
    """

    def __init__(self, ledger: PageLedger, config: DiffKVConfig | None = None):
        config = config or DiffKVConfig()
        self.ledger, self.manager = ledger, ledger.manager
        self.share, self.refused, self._method = config.high_requests, 0, config.method.name
        self._lossless_obstacle = lossless_obstacle(config)
        self._exact, self._keeps = config.prefix_fidelity == "exact", config.keep_seconds

    @property
    def most_tokens(self) -> int:
        """High-tier tokens that such requests may take together."""
        return int(self.share * self.ledger.capacity)

    def take(self, req: Any) -> str:
        """Look at a request that has come, once. What is wrong with what it asks for, on one line; empty if nothing
        is."""
        req.diffkv_keeps_high = req.diffkv_grows_whole = False
        req.diffkv_window, req.diffkv_keep = None, 0
        if getattr(req, "to_finish", None) is not None:
            return ""  # SGLang has refused it
        try:
            processor = getattr(req, "custom_logit_processor", None)
            asked = fields_of(req.sampling_params.custom_params, ours_alone=processor is None)
            if asked.tier != "default":
                self._check(asked.tier, len(req.origin_input_ids))
            if asked.window is not None:
                self._check_window(asked.tier, asked.window)
            if asked.keep is not None:
                self._check_keep(asked.keep)
        except ConfigError as error:
            self.refused += 1
            return f"DiffKV: {error}"
        req.diffkv_keep = asked.keep or 0
        # Where the policy moves no token all requests are such ones, and share prefixes.
        req.diffkv_keeps_high = req.diffkv_grows_whole = asked.tier != "default" and self.manager.high.allowed
        windows, usual = self.manager.windows, self.manager.policy.window
        if asked.window not in (None, usual) and windows.allowed:
            windows.expect(asked.window)
            req.diffkv_window, req.diffkv_grows_whole = asked.window, asked.window > usual
        return ""

    def _check(self, tier: str, length: int) -> None:
        """Raise ConfigError if a request with a prompt of ``length`` tokens cannot have the tier."""
        asked = f"{PLACE}.tier is {shown(tier)}, and "
        if tier == "lossless" and self._lossless_obstacle:
            raise ConfigError(asked + self._lossless_obstacle)
        if not self.manager.policy.compresses:
            return
        if self.manager.running is not None:
            raise ConfigError(
                f"{asked}the method of this server holds every request to a budget: drop the field, or start the "
                "server with another method"
            )
        if self._exact and self.manager.state.slides:
            raise ConfigError(
                f'{asked}this server copies prompts of layers with a sliding window ("prefix_fidelity": "exact"): drop '
                'the field, or start the server with "prefix_fidelity": "compressed"'
            )
        if not self.share:
            raise ConfigError(f'{asked}this server takes no such requests ("high_requests": 0): drop the field')
        if length > self.most_tokens:
            raise ConfigError(
                f"{asked}the prompt has {length:,} tokens: such requests may take {self.most_tokens:,} of this "
                f"server's {self.ledger.capacity:,}. Drop the field, or start the server with more high_requests"
            )

    def _check_window(self, tier: str, window: int) -> None:
        """Raise ConfigError if a request of this tier cannot have this window. Where no token moves, any is kept."""
        windows, policy, asked = self.manager.windows, self.manager.policy, f"{PLACE}.window is {window:,}, and "
        if tier != "default":
            raise ConfigError(f"{asked}tier is {shown(tier)}, which keeps all tokens: drop one of the two")
        if not policy.compresses or window == policy.window:
            return
        if policy.least_window is None:
            raise ConfigError(
                f"{asked}the method of this server, {self._method}, has one window for all requests: drop the field, "
                'or start the server with "diffkv" or "leankv"'
            )
        if not windows.most:
            raise ConfigError(
                f'{asked}this server has {policy.window:,} for all requests ("request_window": 0): drop the field'
            )
        if window < windows.least:
            raise ConfigError(
                f"{asked}scores are sampled, so that this server needs {windows.least:,} at least (observe_every, "
                "generated_every): ask for more"
            )
        if window > windows.most:
            raise ConfigError(
                f"{asked}this server gives a request {windows.most:,} at most: ask for fewer, or start the server with "
                "a larger request_window"
            )

    def _check_keep(self, seconds: int) -> None:
        """Raise ConfigError if a request cannot keep what it leaves for so long."""
        asked = f"{PLACE}.keep is {seconds:,}, and "
        if not self._keeps:
            raise ConfigError(
                f'{asked}this server keeps nothing for requests ("keep_seconds": 0): drop the field, or start the '
                "server with more keep_seconds"
            )
        if seconds > self._keeps:
            raise ConfigError(
                f"{asked}this server keeps prefixes for {self._keeps:,} seconds at most: ask for fewer, or start the "
                "server with more keep_seconds"
            )

    def waits(self, req: Any, running: Sequence[Any], ratio: float) -> bool:
        """Whether a request has to wait since those that keep all take their share of the pool. The first one always
        may run.

        Args:
            running: requests that run or are admitted. ratio: of the tokens that they may still generate, those that
                SGLang expects.
        """
        if self.share >= 1 or not compat.keeps_high(req):
            return False
        others = [x for x in running if compat.keeps_high(x) and not x.finished()]
        taken = sum(compat.tokens_of(x) + compat.reply_expected(x, ratio) for x in [*others, req])
        return bool(others) and taken > self.most_tokens

    def counts(self) -> dict[str, int]:
        """Requests that hold a row, by fidelity."""
        high, window = len(self.manager.high), len(self.manager.windows)
        return {"default": max(len(self.manager.rows) - high - window, 0), "high": high, "window": window}

    def report(self) -> dict[str, Any]:
        """For ``/server_info``."""
        bounds = {"high_requests": self.share, "request_window": self.manager.windows.most}
        return {"running": self.counts(), "refused": self.refused, **bounds}
