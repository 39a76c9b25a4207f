"""Calibrated thresholds of models: where they are kept, how a model finds its own, and when a server runs them.

A file of them is JSON: what ``python -m sglang_diffkv.calibrate`` and ``calibrate.layers`` write. ``lookup`` reads
``diffkv_calibration.json`` in the model's folder, then the files in ``sglang_diffkv/calibrate/calibrated``, by the
model's name. ``resolve`` is the configuration that a server runs: the user's, or the thresholds found there or in a
file that the user names. Thresholds that were published and not measured with this package are taken only on request.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from sglang_diffkv.bounds import (
    MOST_ENTRIES,
    MOST_POINTS,
    Alpha,
    ByHead,
    ByLayer,
    Count,
    Factor,
    Figure,
    Sinks,
    Switch,
    Text,
    Tokens,
    Whole,
    Window,
)
from sglang_diffkv.config import (
    CHOSEN_OR_CAREFUL,
    CONFIG_ENV,
    CONFIG_OPTION,
    DEFAULT_POLICY,
    DiffKVConfig,
    RotateName,
    TierNames,
    file_of,
    read_config,
    source_of,
    usual_rotation,
)
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import check_inside, named, read_json
from sglang_diffkv.policies.base import prunes
from sglang_diffkv.policies.duo import FOLDER
from sglang_diffkv.policies.registry import PolicyConfig
from sglang_diffkv.presets import preset_of
from sglang_diffkv.refusals import explain, mistakes

logger = logging.getLogger(__name__)

FILE_NAME = "diffkv_calibration.json"
Source = Literal["measured", "published"]
NAMES: dict[str, Source] = {"calibrated": "measured", "published": "published"}
"""Of thresholds on file, as ``"thresholds"`` asks for them."""
ASK = '--diffkv-config \'{"thresholds": "calibrated"}\''
ASK_PUBLISHED = '--diffkv-config \'{"thresholds": "published"}\''
PAGE = "docs/quality.md"
PROVENANCE = {"measured": "measured with this package", "published": "published, not measured here"}


class CalibrationError(ConfigError):
    """A calibration file is unusable; the message names it."""


MODEL_CONFIG_BYTES = 16 << 20
"""Of a model's ``config.json``, which SGLang reads whole."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelGeometry(_Strict):
    """The shape that thresholds depend on, to tell models apart that have the same name."""

    layers: Count
    query_heads: Count
    kv_heads: Count
    head_dim: Count

    @classmethod
    def of(cls, model_path: str | Path) -> ModelGeometry | None:
        """From the model's ``config.json``; None if there is none on this machine or it lacks a field."""
        path = model_file(model_path, "config.json")
        if path is None:
            return None
        try:
            return cls.of_config(read_json(path, MODEL_CONFIG_BYTES))
        except (
            KeyError,
            ValueError,
            TypeError,
            AttributeError,
            ZeroDivisionError,
        ):  # SGLang says what is wrong with it
            return None

    @classmethod
    def of_config(cls, config: dict[str, Any]) -> ModelGeometry:
        """From what a ``config.json`` says. Raises KeyError for a field that it lacks."""
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            query_heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        )


class GridPoint(_Strict):
    """One setting that was tried. Accuracies are shares, differences are to stock bf16 on the same questions.

    ``ratio_pages`` and ``ratio_tokens`` are measured bytes over bf16 bytes, with and without the pages' free
    slots; the ``long`` ones over requests of 1,000 tokens and more. ``heads``: with factors by head.
    """

    tiers: TierNames
    alpha_high: Figure | None
    alpha_low: Figure
    window: Count = 64
    rotate: Text = "none"
    sinks: Count = 0
    horizon: Count = 0
    heads: Switch = False
    n: Count
    accuracy: Figure
    accuracy_error: Figure
    difference: Figure
    difference_error: Figure
    p: Figure
    ratio_pages: Figure
    ratio_tokens: Figure
    long_ratio_pages: Figure | None = None
    long_ratio_tokens: Figure | None = None
    share_high: Figure | None = None
    share_low: Figure | None = None
    share_pruned: Figure | None = None


class Provenance(_Strict):
    """How thresholds were found. ``selection`` holds what chose the questions and how they were asked."""

    date: Text
    procedure: Text
    tolerance_points: Figure
    margin: Figure = 0.0
    task_file: Text
    task_sha256: Text
    n: Count
    selection: dict[str, Any]
    bf16_accuracy: Figure
    bf16_accuracy_error: Figure
    versions: dict[str, str | None]
    device: Text
    grid: Annotated[tuple[GridPoint, ...], Field(fail_fast=True, max_length=MOST_POINTS)]


class TextBudget(_Strict):
    """How much may be lost on a text: of the KL divergence in nats a token, or of perplexity as a share."""

    measure: Literal["kl", "perplexity"]
    limit: Figure


class TextPoint(_Strict):
    """One setting on windows of a text, against stock bf16 on the same ones.

    ``divergence`` is a lower bound of the KL divergence in nats a token. In it ``covered`` of the probability is told
    token by token. ``agreement`` is the share of positions with the same likeliest token. Changes are shares.
    """

    tiers: TierNames
    alpha_high: Figure | None
    alpha_low: Figure
    window: Count
    rotate: Text = "none"
    sinks: Count = 0
    n: Count
    divergence: Figure
    divergence_error: Figure
    agreement: Figure
    agreement_error: Figure
    covered: Figure
    perplexity_change: Figure
    perplexity_change_error: Figure
    ratio_pages: Figure
    ratio_tokens: Figure
    share_high: Figure | None = None
    share_low: Figure | None = None


class TextProvenance(_Strict):
    """How thresholds were found on a text. ``held_out`` has the chosen setting's figures on the part of the text that
    had no say in the choice; the grid's are of the other part."""

    procedure: Literal["text"] = "text"
    date: Text
    budget: TextBudget
    phase: Literal["prompt", "generation"] = "prompt"
    margin: Figure
    text_file: Text
    text_sha256: Text
    prefix_tokens: Count
    window_tokens: Count
    top_logprobs: Count
    seed: Whole
    held_out_share: Figure
    held_out: TextPoint
    versions: dict[str, str | None]
    device: Text
    grid: Annotated[tuple[TextPoint, ...], Field(fail_fast=True, max_length=MOST_POINTS)]


HeadScale = tuple[tuple[float, ...], ...]
"""[layers][KV heads], factors of both thresholds."""


def policy_fields(
    alpha_high: float | None,
    alpha_low: float,
    window: int,
    sinks: int,
    horizon: int,
    head_scale: HeadScale | None = None,
) -> dict[str, Any]:
    """DiffKV's policy as a configuration has it. A single tier, for which ``alpha_high`` is None, ignores it, but it
    must not be below ``alpha_low``."""
    high = max(DEFAULT_POLICY.alpha_high, alpha_low) if alpha_high is None else alpha_high
    more = {"window": window, "sinks": sinks, "horizon": horizon, "head_scale": head_scale}
    return {"name": "diffkv", "alpha_high": high, "alpha_low": alpha_low, **more}


BEFORE: dict[str, Any] = {"window": 64, "rotate": "none", "sinks": 0, "horizon": 0}
"""What was measured where a file's figures leave one of these out: the file is older than the field."""


def _configured(data: dict[str, Any]) -> DiffKVConfig:
    """As a configuration. Raises ConfigError."""
    try:
        return DiffKVConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("; ".join(mistakes(error, DiffKVConfig, quote=False))) from None


class CalibratedEntry(_Strict):
    """What was found for one model at one choice of tiers. A field that is left out is the server's default.

    Attributes:
        models: base names of the model's folder or Hugging Face id, compared without regard to letter case.
        source: ``measured`` with this package, as the entry's ``provenance`` says, or ``published`` elsewhere
            (``note``) and not measured here.
    """

    models: Annotated[tuple[Text, ...], Field(fail_fast=True, min_length=1, max_length=MOST_ENTRIES)]
    geometry: ModelGeometry | None = None
    tiers: TierNames
    rotate: RotateName = "none"
    source: Source
    note: Text = ""

    @model_validator(mode="before")
    @classmethod
    def _rotation(cls, given: Any) -> Any:
        """If it is left out, the server's default for these tiers."""
        if not isinstance(given, dict) or "rotate" in given:
            return given
        tiers = given.get("tiers")
        if not isinstance(tiers, list | tuple) or not all(isinstance(name, str) for name in tiers):
            return given  # its tiers are refused
        try:
            return {**given, "rotate": usual_rotation(tiers)}
        except ValueError:
            return given  # as above

    def config(self) -> DiffKVConfig:
        """The configuration that this entry is."""
        raise NotImplementedError

    @property
    def prunes(self) -> bool:
        """Whether tokens may be lost with it."""
        return prunes(self.config().build_policy(), len(self.tiers))

    def check_model(self) -> None:
        """Raise ConfigError if the model, as far as it is known, has another shape than the entry is for."""
        if self.geometry is not None:
            self.config().check_heads(self.geometry.layers, self.geometry.kv_heads)


class CalibratedThresholds(CalibratedEntry):
    """DiffKV's thresholds.

    Attributes:
        alpha_high: None with a single tier, which has nothing to choose between.
        chosen: the measured figures of these thresholds.
    """

    alpha_high: Alpha | None
    alpha_low: Alpha
    window: Window = DEFAULT_POLICY.window
    sinks: Sinks = DEFAULT_POLICY.sinks
    horizon: Tokens = DEFAULT_POLICY.horizon
    head_scale: ByLayer[ByHead[Factor]] | None = None
    chosen: GridPoint | TextPoint | None = None
    provenance: Provenance | TextProvenance | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_measured(cls, given: Any) -> Any:
        """Of a file with figures, what is left out is what was measured. This runs before ``_rotation``."""
        if not isinstance(given, dict) or not isinstance(chosen := given.get("chosen"), dict):
            return given
        return {name: chosen.get(name, value) for name, value in BEFORE.items()} | given

    @model_validator(mode="after")
    def _usable(self) -> CalibratedThresholds:
        if self.source == "measured" and (self.provenance is None or self.chosen is None):
            raise ValueError("measured thresholds need their provenance and figures")
        if (self.alpha_high is None) != (len(self.tiers) == 1):
            raise ValueError("alpha_high is given with two tiers and only then")
        self.config()
        self.check_model()
        return self

    @property
    def prunes(self) -> bool:
        return self.alpha_low > 0

    def config(self) -> DiffKVConfig:
        policy = policy_fields(self.alpha_high, self.alpha_low, self.window, self.sinks, self.horizon, self.head_scale)
        return _configured({"tiers": self.tiers, "policy": policy, "rotate": self.rotate})


class CalibratedPolicy(CalibratedEntry):
    """Another method as it is configured, with what its procedure notes of how that was found."""

    policy: Annotated[PolicyConfig, Field(discriminator="name")]
    provenance: dict[str, Any] = {}

    @model_validator(mode="after")
    def _usable(self) -> CalibratedPolicy:
        if self.source == "measured" and not self.provenance:
            raise ValueError("a measured policy needs its provenance")
        self.config()
        self.check_model()
        return self

    def config(self) -> DiffKVConfig:
        policy = self.policy.model_dump(exclude_none=True)
        return _configured({"tiers": self.tiers, "policy": policy, "rotate": self.rotate})


def _kind(entry: Any) -> str:
    has_policy = "policy" in entry if isinstance(entry, dict) else isinstance(entry, CalibratedPolicy)
    return "policy" if has_policy else "thresholds"


Entry = Annotated[
    Annotated[CalibratedThresholds, Tag("thresholds")] | Annotated[CalibratedPolicy, Tag("policy")],
    Discriminator(_kind),
]


class CalibrationFile(_Strict):
    """The content of a file."""

    format: Literal[1] = 1
    entries: Annotated[tuple[Entry, ...], Field(fail_fast=True, max_length=MOST_ENTRIES)]


def measured_policy(
    model_path: str | Path, tiers: Sequence[str], rotate: str, policy: PolicyConfig, provenance: BaseModel
) -> CalibratedPolicy:
    """An entry for a model and what a procedure found for it."""
    return CalibratedPolicy.model_validate(
        {
            "models": (model_name(model_path),),
            "geometry": ModelGeometry.of(model_path),
            "tiers": tuple(tiers),
            "rotate": rotate,
            "policy": policy,
            "source": "measured",
            "provenance": provenance.model_dump(mode="json"),
        }
    )


def read_file(path: Any) -> CalibrationFile:
    """Read a calibration file; files that it names lie in its folder. Raises CalibrationError, which quotes nothing of
    what the file has."""
    subject = f"{named(path)} is not a usable calibration file"
    try:
        return CalibrationFile.model_validate(read_json(path), context={FOLDER: Path(str(path)).parent})
    except ValidationError as error:
        raise CalibrationError(explain(error, CalibrationFile, subject, quote=False, page=PAGE)) from None
    except ConfigError as error:
        raise CalibrationError(f"{subject}: it {error}") from None


def read_own(path: Path) -> CalibrationFile:
    """The calibration file that came with a model: no link out of its folder. Raises CalibrationError."""
    try:
        check_inside(path.parent, path)
    except ConfigError as error:
        raise CalibrationError(f"{named(path)} is not a usable calibration file: it {error}") from None
    return read_file(path)


def shipped_files() -> Iterator[Any]:
    """The files that come with the package, in the order of their names."""
    folder = resources.files("sglang_diffkv") / "calibrate" / "calibrated"
    yield from sorted((x for x in folder.iterdir() if x.name.endswith(".json")), key=lambda x: x.name)


def model_name(model_path: str | Path) -> str:
    """The base name of a folder or a Hugging Face id, also for a snapshot in the Hugging Face cache."""
    parts = Path(model_path).parts
    for part in reversed(parts):
        if part.startswith("models--"):
            return part.rpartition("--")[2]
    return parts[-1] if parts else ""


def model_file(model_path: str | Path, name: str) -> Path | None:
    """A file of a model's folder, or of a Hugging Face id as far as the local cache has it. Downloads nothing."""
    if Path(model_path).is_dir():
        path = Path(model_path) / name
        return path if path.is_file() else None
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        found = try_to_load_from_cache(str(model_path), name, cache_dir=constants.HF_HUB_CACHE)
    except ValueError:
        return None
    return Path(found) if isinstance(found, str) else None


def _unreadable(model_path: str | Path) -> Path | None:
    """A calibration file in a model's folder that is no regular file, which is refused when it is read."""
    path = Path(model_path) / FILE_NAME
    return path if os.path.lexists(path) else None


def lookup(
    model_path: str | Path, tiers: Sequence[str] | None = None, source: Source = "measured"
) -> CalibratedEntry | None:
    """As ``find``, without the file."""
    found = find(model_path, tiers, source)
    return None if found is None else found[0]


def find(
    model_path: str | Path, tiers: Sequence[str] | None = None, source: Source = "measured"
) -> tuple[CalibratedEntry, Any] | None:
    """Thresholds for a model and the file that has them, or None.

    Args:
        model_path: a folder or a Hugging Face id.
        tiers: only thresholds for exactly these; None for the first choice of tiers on file, which may switch the low
            tier off.

    An entry whose geometry differs from the model's is passed over. Raises CalibrationError for an unusable file.
    """
    geometry, name = ModelGeometry.of(model_path), model_name(model_path).casefold()
    wanted = None if tiers is None else tuple(tier.upper() for tier in tiers)

    def fits(entry: CalibratedEntry) -> bool:
        return entry.source == source and _same_shape(entry, geometry) and wanted in (None, entry.tiers)

    own = model_file(model_path, FILE_NAME) or _unreadable(model_path)
    if own is not None:
        for entry in read_own(own).entries:
            if fits(entry):
                return entry, own
    for path in shipped_files():
        for entry in read_file(path).entries:
            if name in (x.casefold() for x in entry.models) and fits(entry):
                return entry, path
    return None


def _same_shape(entry: CalibratedEntry, geometry: ModelGeometry | None) -> bool:
    """As far as is known."""
    return geometry is None or entry.geometry is None or entry.geometry == geometry


def _of_file(path: str, model_path: str | Path) -> CalibratedEntry:
    """The first entry of a file that the user names which is for a model of this shape. Raises ConfigError."""
    geometry = ModelGeometry.of(model_path)
    try:
        entries = read_file(Path(path)).entries
    except CalibrationError as error:
        raise ConfigError(f"thresholds: {error}") from None
    for entry in entries:
        if _same_shape(entry, geometry):
            return entry
    raise ConfigError(f"thresholds: {named(path)} has none for a model of the shape of {model_name(model_path)}")


@dataclass(frozen=True)
class Resolution:
    """The configuration that a server runs, and where each part of it comes from.

    Attributes:
        origin: where the thresholds come from, in words.
        sources: of each field of ``config.whole()``, a policy's as ``policy.NAME``: ``default``, ``--diffkv-config``,
            ``SGLANG_DIFFKV_CONFIG``, ``diffkv_config`` (of an ``Engine``), ``preset NAME``, ``calibrated`` or
            ``published``.
        files: paths of the files that were read, by the source that they are.
        warning: what the user should know, for the log; empty if nothing.
    """

    config: DiffKVConfig
    origin: str
    sources: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    warning: str = ""

    def report(self) -> dict[str, Any]:
        """For the log, ``/server_info`` and the doctor, as JSON data."""
        about = {"thresholds": self.origin, "sources": dict(self.sources), "files": dict(self.files)}
        return {"values": self.config.whole(), **about}


def sources_of(config: DiffKVConfig, fields: Mapping[str, str]) -> dict[str, str]:
    """The source of each field of ``config.whole()``, where ``fields`` has that of top-level ones that are set. Of a
    policy that is set, fields that it leaves out are defaults."""
    found = {}
    for name, value in config.whole().items():
        source = fields.get(name, "default")
        if name != "policy":
            found[name] = source
            continue
        given = set() if config.policy is None else config.policy.model_fields_set | {"name"}
        found |= {f"policy.{x}": source if x in given else "default" for x in value}
    return found


def resolve(
    source: str | None, model_path: str | Path, given_by: str = CONFIG_OPTION
) -> tuple[DiffKVConfig, str]:  # fmt: skip
    """The configuration for a model, and where its thresholds come from, in words: as ``resolution``, which says more.
    What a server would warn of is logged."""
    found = resolution(source, model_path, given_by)
    if found.warning:
        logger.warning("%s", found.warning)
    return found.config, found.origin


def served(source: str | None, model_path: str | Path, given_by: str = CONFIG_OPTION) -> Resolution:
    """As ``resolution``, but without any configuration, given or in the environment, the model chooses unless its own
    folder has a calibration. Those that come with the package were measured on questions, and are taken on request.
    Raises ConfigError."""
    found = resolution(source, model_path, given_by)
    text = source if source is not None else os.environ.get(CONFIG_ENV)
    if (text or "").strip() or found.files.get("calibrated") not in (None, *map(str, shipped_files())):
        return found
    config = DiffKVConfig(thresholds=CHOSEN_OR_CAREFUL)
    origin = "those that the model chooses once it is loaded, since no configuration was given"
    return Resolution(config, origin, sources_of(config, {}), {}, found.warning)


def resolution(source: str | None, model_path: str | Path, given_by: str = CONFIG_OPTION) -> Resolution:
    """The configuration for a model, with the source of each part.

    Args:
        source: as for ``load_config``. Thresholds on file are looked up if it asks for them. If it sets nothing, or
            there is no configuration in the environment either, measured ones are; then those that prune are not
            taken, since pruned tokens are lost. Where it names a calibration file they are those of that file.
        model_path: a folder or a Hugging Face id; nothing is downloaded.
        given_by: what the user gave ``source`` with.

    Raises ConfigError, also if a configuration asks for thresholds on file and there are none.
    """
    text = source if source is not None else os.environ.get(CONFIG_ENV)
    given_by = given_by if source is not None else CONFIG_ENV
    config = read_config(text or "", given_by)
    given = dict.fromkeys(config.model_fields_set - {"thresholds"}, source_of(text or "", given_by))
    files = {given_by: path} if (path := file_of(text or "")) else {}

    def plain(origin: str, warning: str = "") -> Resolution:
        return Resolution(config, origin, sources_of(config, given), files, warning)

    def calibrated(entry: CalibratedEntry, path: Any) -> Resolution:
        found, kind = apply(config, entry), "calibrated" if entry.source == "measured" else "published"
        of = name if config.thresholds in ("default", *NAMES) else ", ".join(entry.models)
        origin = f"calibrated for {of}, {PROVENANCE[entry.source]} ({path})"
        sources = sources_of(found, {**given, **dict.fromkeys(CALIBRATED, kind)})
        return Resolution(found, origin, sources, {**files, kind: str(path)})

    if config.chosen_at_start:
        return plain("those that the model chooses once it is loaded")
    if name := preset_of(text or ""):
        return plain(f"those of the preset {name}")
    if config.model_fields_set and config.thresholds == "default":
        return plain("those of the configuration given")
    name = model_name(model_path)
    if config.thresholds not in ("default", *NAMES):
        return calibrated(_of_file(config.thresholds, model_path), config.thresholds)
    wanted = NAMES.get(config.thresholds, "measured")
    try:
        found = find(model_path, source=wanted)
        published = found is None and wanted == "measured" and find(model_path, source="published")
    except CalibrationError as error:
        raise ConfigError(
            f'{error}; repair it, or start with --diffkv-config \'{{"thresholds": "default"}}\''
        ) from None
    if found is not None:
        entry, path = found
        if config.thresholds == "default" and entry.prunes:
            return plain(
                f"the built-in defaults, since those calibrated for {name} prune and were not asked for",
                f"DiffKV: the thresholds calibrated for {name} ({path}) prune tokens, which costs accuracy, and are "
                f"not applied. To serve with them start with {ASK}.",
            )
        return calibrated(entry, path)
    if config.thresholds == "published":
        raise ConfigError(f'"thresholds": "published": none are on file for {name}. Leave the field out')
    if config.thresholds == "calibrated":
        if published:
            raise ConfigError(
                f'"thresholds": "calibrated": none are measured for {name}. Published ones, not measured here, are '
                f'taken with "thresholds": "published"'
            )
        raise ConfigError(
            f'"thresholds": "calibrated": none are on file for {name}. Measure them with '
            f"python -m sglang_diffkv.calibrate and put {FILE_NAME} into the model's folder, or leave the field out"
        )
    why = f"the built-in defaults, since none are calibrated for {name}"
    return plain(f"{why}; published ones, not measured here, are taken with {ASK_PUBLISHED}" if published else why)


CALIBRATED = ("tiers", "policy", "rotate")
"""What calibrated thresholds are."""


def apply(config: DiffKVConfig, entry: CalibratedEntry) -> DiffKVConfig:
    """``config`` with the tiers, the policy and the rotation of calibrated thresholds."""
    kept = config.model_dump(exclude=set(CALIBRATED))
    return _configured({**kept, **entry.config().model_dump(include=set(CALIBRATED))})
