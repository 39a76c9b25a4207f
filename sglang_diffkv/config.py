"""The user's configuration: one pydantic model, given as ``--diffkv-config`` or ``SGLANG_DIFFKV_CONFIG``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from sglang_diffkv.bounds import (
    MOST_WINDOW,
    Fraction,
    HostGib,
    MostKeepSeconds,
    PageTokens,
    PathName,
    RequestWindow,
    SomeTokens,
)
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import MOST_BYTES, named, parse_json, read_text
from sglang_diffkv.kernels.rotate.reference import Rotation
from sglang_diffkv.layout.page_format import MOST_TIERS, PageFormat, Tier, position_bytes_for
from sglang_diffkv.policies.base import KeyNorm, Policy
from sglang_diffkv.policies.diffkv import DiffKVPolicyConfig
from sglang_diffkv.policies.options import Strict
from sglang_diffkv.policies.registry import PolicyConfig
from sglang_diffkv.policies.uniform import UniformPolicyConfig
from sglang_diffkv.presets import PRESETS, looks_like_a_name, preset_of
from sglang_diffkv.refusals import PAGE, did_you_mean, explain

RotateName = Literal["none", "keys", "values", "both"]
"""What is rotated before it is stored."""
ROTATIONS: tuple[RotateName, ...] = get_args(RotateName)

ROTATED_KEY_BITS = 4
"""Of tiers that are rotated unless told otherwise; 8 bits lose nothing that it would save."""

CHOSEN = "auto"
"""Thresholds that are chosen once the model is loaded, and the preset of that name."""
CHOSEN_OR_CAREFUL = "auto_or_careful"
"""The same where the model can choose, else the preset ``careful``: of a server that is given no configuration."""

CONFIG_OPTION = "--diffkv-config"
CONFIG_ENV = "SGLANG_DIFFKV_CONFIG"

CHECK_ENV = "SGLANG_DIFFKV_CHECK_INTEGRITY"
"""Set to k, a server checks ring, tables, counts and tree after every k-th step (slow; for tests and bug reports)."""

CACHE_ENV = "SGLANG_DIFFKV_CACHE_DIR"
"""Names the folder where a server keeps what it has measured of models."""

UNTRIED_ENV = "SGLANG_DIFFKV_UNTRIED"
"""If it is set, what was not seen to be right on a GPU is not refused there."""


DEFAULT_POLICY = DiffKVPolicyConfig()
"""What a server runs that is told nothing: the one source of these defaults, from which searches begin too."""


def usual_rotation(tiers: Sequence[str]) -> RotateName:
    """What a server rotates with these tiers unless told otherwise. Raises ValueError for a name that is no tier."""
    parsed = [Tier.parse(name) for name in tiers]
    few = any(tier.k_bits <= ROTATED_KEY_BITS for tier in parsed)
    return "both" if few and not any(tier.is_raw for tier in parsed) else "none"


TierNames = Annotated[
    tuple[Annotated[str, Field(strict=True)], ...],
    Field(
        fail_fast=True,
        min_length=1,
        max_length=MOST_TIERS,
        description="high tier first: BF16, or K<bits>V<bits> with 1 to 8 bits",
    ),
]
"""High tier first."""


class DiffKVConfig(Strict):
    """Everything a user can set.

    Attributes:
        tiers: high tier first, for example ``["K8V4", "K4V2"]``, ``["K8V4"]`` or ``["BF16"]``; up to four.
        policy: ``{"name": "diffkv", ...}`` or another method of ``policies/registry.py``; by default DiffKV with two
            tiers, uniform with one. The others keep what they keep at one tier. More than two tiers need DiffKV with
            its thresholds ``alpha_between``.
        page_tokens: high-tier tokens of a page.
        prefix_fidelity: what the prefix cache holds of a prompt. ``compressed``: the one form that all share.
            ``exact``: all of it in the high tier, of which a running request takes a compressed copy of its own.
        high_requests: the share of the pool that requests which keep all their tokens in the high tier may take
            together. 0: they are refused. Requests ask for that by ``custom_params``, see ``docs/operate.md``.
        request_window: the largest window that a request may ask for itself, by ``custom_params``. 0: none may.
        keep_seconds: the longest time for which a request may ask, by ``custom_params``, that what it leaves in the
            prefix cache be evicted last. 0: none may.
        gpu_ops: what a GPU server runs on: ``triton``, or ``reference`` for the plain PyTorch oracle, which needs
            --disable-cuda-graph and --disable-overlap-schedule. A CPU server always runs on the reference.
        prefill: what computes the attention of new tokens on a GPU: ``fa3`` (FlashAttention-3), ``flashinfer``,
            ``triton`` or ``auto``. ``auto`` takes the first of them that can serve the model. FlashAttention-3 needs a
            Hopper GPU, bfloat16, heads of 64 or 128, and no logit cap. FlashInfer needs one scale and logit cap in all
            layers. ``fa3_fp8``: FlashAttention-3, which attends in 8 bits (e4m3) in passes of long prompts, as stock
            SGLang does whose cache is in FP8. They end sooner, and lose what that loses.
        decode: what computes the attention of decode steps on a GPU: ``cuda``, the kernel in CUDA C++ for Hopper GPUs,
            ``triton``, or ``auto``. ``auto`` takes ``cuda`` where the GPU, the model's heads and the tiers allow it.
        rotate: ``keys`` multiplies queries and keys by one Hadamard matrix before keys are stored, ``values`` values,
            and what attention gives once more; ``both`` does both. Attention stays the same, and what has outliers
            loses less at few bits; it costs a small launch a layer and pass for keys, and one more for values. By
            default ``both`` where a tier has keys of 4 bits or fewer and none is raw, else ``none``.
        key_means: a vector for each layer and KV head that is taken off every key before it is stored. Attention stays
            the same, and keys lose less at few bits. ``auto``: the server measures them with its own model when it
            starts, and keeps them for later starts. Else the path of a file of
            ``python -m sglang_diffkv.calibrate.means``.
        key_rotation, value_rotation: the path of a file of rotations that were fitted to the model, which take the
            place of the Hadamard matrix for keys, or values (``sglang_diffkv/fitted_rotation.py``).
        noise_shaping: ``auto``: the server fits matrices to its model when it starts, and keeps them for later starts.
            Keys and values are multiplied by them before all else, and queries and what attention gives by what undoes
            it. Attention stays the same, and the error of codes lies where it counts less. It costs a small product a
            layer and pass for each of the four.
        share_min_tokens: a running request's prompt joins the prefix cache at once if it has at least this many tokens
            of its own. It joins up to its window where so many are left before that. The rest, or a shorter prompt,
            joins when the request ends.
        host_gib: host memory of each rank, in GiB, for what retracted requests hold, so that they go on later instead
            of being computed again. The default is a quarter of the KV pool's bytes, at least 256 MiB and at most 4
            GiB. 0: none.
        thresholds: ``calibrated`` takes tiers, policy and rotation from the calibration file of the model. The path of
            a calibration file (``.json``) takes them from that one. ``published`` takes those that were published for
            the model and not measured with this package. ``auto`` lets the model choose among a few once it is loaded,
            and key means too (``ladder.py``). ``auto_or_careful`` does the same where the model can choose, and else
            takes the preset ``careful``. ``default`` takes those given here. A server that is given an empty
            configuration looks for calibrated ones. One that is given none looks in the model's folder, and else takes
            ``auto_or_careful``. It is carried out when a server starts and is not part of the resolved configuration.
    """

    tiers: TierNames = ("K8V4", "K4V2")
    policy: Annotated[PolicyConfig, Field(discriminator="name")] | None = None
    page_tokens: PageTokens = 32
    prefix_fidelity: Literal["compressed", "exact"] = "compressed"
    rotate: RotateName = Field(default_factory=lambda given: usual_rotation(given.get("tiers", ())))
    key_means: PathName | None = None
    key_rotation: PathName | None = None
    value_rotation: PathName | None = None
    noise_shaping: Literal["auto"] | None = None
    share_min_tokens: SomeTokens = 128
    host_gib: HostGib | None = None
    high_requests: Fraction = 1.0
    request_window: RequestWindow = MOST_WINDOW
    keep_seconds: MostKeepSeconds = 0
    gpu_ops: Literal["triton", "reference"] = "triton"
    prefill: Literal["auto", "fa3", "fa3_fp8", "flashinfer", "triton"] = "auto"
    decode: Literal["auto", "cuda", "triton"] = "auto"
    thresholds: PathName = Field(default="default", exclude=True)

    @field_validator("tiers")
    @classmethod
    def _possible(cls, tiers: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(Tier.parse(name).name for name in tiers)

    @field_validator("thresholds")
    @classmethod
    def _source(cls, thresholds: str) -> str:
        known = (CHOSEN, CHOSEN_OR_CAREFUL, "calibrated", "published", "default")
        if thresholds not in known and not thresholds.endswith(".json"):
            allowed = ", ".join(f'"{name}"' for name in known)
            raise ValueError(
                f"thresholds is {named(thresholds)}: allowed is {allowed} or the path of a calibration file, which "
                "ends in .json"
            )
        return thresholds

    @model_validator(mode="after")
    def _consistent(self) -> DiffKVConfig:
        PageFormat(128, 128, self.parsed_tiers, self.page_tokens)
        if self.policy is not None or len(self.tiers) > 1:
            policy, count = self.policy or DEFAULT_POLICY, len(self.tiers)
            if count > policy.most_tiers:
                kept = ("one tier", "two tiers", "three tiers")[policy.most_tiers - 1]
                fewer = ", ".join(f'"{tier}"' for tier in self.tiers[: policy.most_tiers])
                raise ValueError(
                    f"policy {policy.name} keeps tokens at {kept}, and tiers has {count}: set fewer, for example "
                    f'"tiers": [{fewer}]'
                )
            policy.check_tiers(count)
        alone, exact = len(self.tiers) == 1, self.prefix_fidelity == "exact"
        if getattr(self.policy, "turn_window", None) is not None and (alone or exact):
            why = "one tier" if alone else 'exact prefixes ("prefix_fidelity")'
            raise ValueError(f"policy.turn_window does nothing with {why}: drop one of them")
        if self.thresholds != "default" and (given := self.model_fields_set & {"tiers", "policy", "rotate"}):
            listed = " and ".join(sorted(given))
            raise ValueError(f'"thresholds": {named(self.thresholds)} brings tiers, policy and rotate; drop {listed}')
        brought = {"key_means", "key_rotation", "value_rotation", "noise_shaping"} & self.model_fields_set
        if self.chosen_at_start and brought:
            raise ValueError(
                f'"thresholds": "{self.thresholds}" decides on them too; drop {" and ".join(sorted(brought))}'
            )
        if all(tier.is_raw for tier in self.parsed_tiers):
            if self.rotate != "none":
                raise ValueError(
                    f'rotate "{self.rotate}" serves quantised tiers, and BF16 is none: drop rotate, or list other tiers'
                )
            for name in ("key_rotation", "value_rotation", "key_means", "noise_shaping"):
                if getattr(self, name) is not None:
                    serve = "serve" if name == "key_means" else "serves"
                    raise ValueError(
                        f"{name} {serve} quantised tiers, and BF16 is none: drop {name}, or list other tiers"
                    )
        self._check_keys()
        return self

    def _check_keys(self) -> None:
        """Raise ValueError for a change of keys that the method does not bear, or that another one makes."""
        for name in ("key_rotation", "value_rotation"):
            if self.noise_shaping is not None and getattr(self, name) is not None:
                raise ValueError(f"noise_shaping and {name} both fit matrices to the model: drop one of them")
        policy, method = self.build_policy(), self.policy and self.policy.name
        for name, change in (("key_means", "change"), ("noise_shaping", "changes")):
            if getattr(self, name) is None:
                continue
            if policy.running is not None:
                raise ValueError(f"policy {method} compares keys with each other: drop {name}")
            if isinstance(policy.score_source, KeyNorm):
                raise ValueError(
                    f"policy {method} scores tokens by the norms of their keys, which {name} {change}: drop {name}"
                )

    @property
    def chosen_at_start(self) -> bool:
        """Whether tiers, policy, rotation and key means are chosen once the model is loaded."""
        return self.thresholds in (CHOSEN, CHOSEN_OR_CAREFUL)

    @property
    def chosen_or_refused(self) -> bool:
        """Whether a server is refused if its model cannot choose."""
        return self.thresholds == CHOSEN

    def as_text(self) -> str:
        """JSON that ``read_config`` reads, for the processes of a server."""
        if not self.chosen_at_start:
            return self.model_dump_json(exclude_none=True)
        others = self.model_dump(mode="json", exclude_none=True, exclude={"tiers", "policy", "rotate"})
        return json.dumps({"thresholds": self.thresholds, **others})

    @property
    def parsed_tiers(self) -> tuple[Tier, ...]:
        return tuple(Tier.parse(name) for name in self.tiers)

    @property
    def lossless(self) -> bool:
        """True if tokens are stored as the model wrote them and none is dropped."""
        return self.parsed_tiers[0].is_raw and not self.build_policy().compresses

    @property
    def rotation(self) -> Rotation:
        """What the Hadamard matrix rotates: not what fitted rotations do."""
        named = Rotation.named(self.rotate)
        return Rotation(named.keys and self.key_rotation is None, named.values and self.value_rotation is None)

    @property
    def turned(self) -> tuple[bool, bool]:
        """Whether keys, and values, are rotated, by whatever matrix."""
        named = Rotation.named(self.rotate)
        return named.keys or self.key_rotation is not None, named.values or self.value_rotation is not None

    @property
    def method(self) -> PolicyConfig:
        """``policy``, or what a server runs without one."""
        if self.policy is not None:
            return self.policy
        return DEFAULT_POLICY if len(self.tiers) > 1 else UniformPolicyConfig()

    def build_policy(self) -> Policy:
        return self.method.build()

    def whole(self) -> dict[str, Any]:
        """Every field with what a server runs, as JSON data: the default policy is written out."""
        if self.chosen_at_start:
            return {**json.loads(self.as_text()), "policy": {"name": self.thresholds}}
        return {**self.model_dump(mode="json"), "policy": self.method.whole()}

    def check_heads(self, layers: int, kv_heads: int) -> None:
        """Raise ConfigError if the method is not set for a model of this shape, all ranks' heads together."""
        if self.policy is not None and (problem := self.policy.obstacle(layers, kv_heads)):
            raise ConfigError(problem)

    def page_format(self, head_dim: int, v_head_dim: int, max_tokens: int) -> PageFormat:
        """The page format for a model's head sizes and sequences of up to ``max_tokens``: with scores that the policy
        reads and no others. Raises ConfigError for sizes that are not supported."""
        scored = self.build_policy().scored_tiers(len(self.tiers))
        sizes = (self.page_tokens, scored, position_bytes_for(max_tokens))
        try:
            return PageFormat(head_dim, v_head_dim, self.parsed_tiers, *sizes, turned=self.turned)
        except ValueError as error:
            raise ConfigError(f"diffkv cannot serve this model: {error}") from None


def load_config(source: str | None = None, given_by: str = CONFIG_OPTION) -> DiffKVConfig:
    """Read a configuration from a preset's name, inline JSON or a file's path; by default from the environment.
    ``given_by``: what the user gave it with, for messages.

    Raises ConfigError with one line a problem, each naming the field, and for calibrated thresholds, which only
    ``thresholds.resolve`` finds.
    """
    config = read_config(source, given_by)
    if config.chosen_at_start:
        raise ConfigError(
            f'"{config.thresholds}" is chosen by a server once its model is loaded; name another configuration'
        )
    if config.thresholds != "default":
        raise ConfigError(f'"thresholds": "{config.thresholds}" is looked up for a model; write out tiers and policy')
    return config


def file_of(text: str) -> str:
    """The path that a configuration is, empty if it is inline JSON, a preset's name or none."""
    return "" if not text.strip() or text.lstrip()[0] in "{[" or preset_of(text) else text


def source_of(text: str, given_by: str) -> str:
    """Where the fields of a configuration come from, for reports: its preset, or what the user gave it with."""
    return f"preset {name}" if (name := preset_of(text)) else given_by


def read_config(source: str | None = None, given_by: str = CONFIG_OPTION) -> DiffKVConfig:
    """As ``load_config``, but the configuration may ask for calibrated thresholds."""
    text = source if source is not None else os.environ.get(CONFIG_ENV)
    if not text or not text.strip():
        return DiffKVConfig()
    if name := preset_of(text):
        return DiffKVConfig.model_validate(PRESETS[name])
    if not file_of(text):
        subject = f"{given_by} (inline JSON)"
        try:
            if len(text) > MOST_BYTES:
                raise ConfigError(f"has {len(text):,} characters; at most {MOST_BYTES:,} are read")
            return validated(parse_json(text), subject)
        except ConfigError as error:
            raise _about(error, subject) from None
    if looks_like_a_name(text) and not os.path.lexists(text):
        what = given_by if given_by.endswith(named(text)) else f"{given_by}: {named(text)}"
        near = did_you_mean(text.strip(), [*PRESETS], as_text=True) or "."
        raise ConfigError(f"{what} is no preset ({', '.join(PRESETS)}), JSON or file{near} See {PAGE}")
    subject = f"{given_by} ({named(text)})"
    try:
        return validated(parse_json(read_text(text)), subject)
    except ConfigError as error:
        raise _about(error, subject) from None


def validated(data: Any, subject: str) -> DiffKVConfig:
    """The configuration that ``data`` is. Raises ConfigError; ``subject`` says where it comes from."""
    try:
        return DiffKVConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, DiffKVConfig, subject)) from None


def _about(error: ConfigError, subject: str) -> ConfigError:
    text = str(error)
    return error if text.startswith(subject) else ConfigError(f"{subject} {text} (see {PAGE})")
