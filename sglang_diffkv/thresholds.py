"""Which configuration a server runs: the user's, or the thresholds calibrated for its model."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from sglang_diffkv.calibration import FILE_NAME, CalibratedThresholds, CalibrationError, find, model_name
from sglang_diffkv.config import CONFIG_ENV, DiffKVConfig, read_config
from sglang_diffkv.errors import ConfigError

logger = logging.getLogger(__name__)

ASK = '--diffkv-config \'{"thresholds": "calibrated"}\''
PROVENANCE = {"measured": "measured with this package", "published": "published, not measured here"}


def resolve(source: str | None, model_path: str | Path) -> tuple[DiffKVConfig, str]:
    """The configuration for a model, and where its thresholds come from, in words.

    Args:
        source: as for ``load_config``. Calibrated thresholds are looked up if it asks for them, or if there is no
            configuration in the environment either; then those that prune are not taken, since pruned tokens are lost.
        model_path: a folder or a Hugging Face id; nothing is downloaded.

    Raises ConfigError, also if a configuration asks for calibrated thresholds and there are none.
    """
    text = source if source is not None else os.environ.get(CONFIG_ENV)
    given = bool(text and text.strip())
    config = read_config(text or "")
    if given and config.thresholds == "default":
        return config, "those of the configuration given"
    try:
        found = find(model_path)
    except CalibrationError as error:
        raise ConfigError(
            f'{error}; repair it, or start with --diffkv-config \'{{"thresholds": "default"}}\''
        ) from None
    name = model_name(model_path)
    if found is not None:
        entry, path = found
        if not given and entry.alpha_low > 0:
            logger.warning(
                "DiffKV: the thresholds calibrated for %s (%s) prune tokens (alpha_low %g), which costs accuracy, and "
                "are not applied. To serve with them start with %s.",
                name,
                path,
                entry.alpha_low,
                ASK,
            )
            return config, f"the built-in defaults, since those calibrated for {name} prune and were not asked for"
        return apply(config, entry), f"calibrated for {name}, {PROVENANCE[entry.source]} ({path})"
    if given:
        raise ConfigError(
            f'"thresholds": "calibrated": none are on file for {name}. Measure them with '
            f"python -m sglang_diffkv.calibrate and put {FILE_NAME} into the model's folder, or leave the field out"
        )
    return config, f"the built-in defaults, since none are calibrated for {name}"


def apply(config: DiffKVConfig, entry: CalibratedThresholds) -> DiffKVConfig:
    """``config`` with the tiers, the policy and the rotation of calibrated thresholds."""
    calibrated = {"tiers", "policy", "rotate"}
    kept = config.model_dump(exclude=calibrated)
    return DiffKVConfig.model_validate({**kept, **entry.config().model_dump(include=calibrated)})
