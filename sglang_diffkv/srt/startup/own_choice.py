"""A configuration that a server chooses for its model (``--diffkv-config auto``): the first rung of ``ladder.py`` that
loses no more than an FP8 cache would, in next-token distributions of a text that comes with the package.

It is chosen once the weights are loaded and before anything is sized: pools, kernels and graphs then are those of the
configuration that was chosen, as if the user had named it. The model reads the text a few times; nothing is stored
(``attention/emulated.py``). A file keeps the choice for later starts. All ranks take that of the first.

A server that is given no configuration has its model choose too. Where the model cannot, that server runs the preset
``careful``, and the log says why. A server that was told ``auto`` is refused instead.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_diffkv.attention.emulated import AS_COMPUTED, Fp8, RoundedAgain, Stored, divergence, stored_of
from sglang_diffkv.calibration import Resolution, sources_of
from sglang_diffkv.config import CACHE_ENV, CHOSEN, DiffKVConfig
from sglang_diffkv.errors import ConfigError, UnsupportedError
from sglang_diffkv.files import named, private_folder, read_json, write_privately
from sglang_diffkv.key_means import KeySums, impossible
from sglang_diffkv.ladder import (
    COARSE,
    DECIDED,
    ERRORS,
    FORMAT,
    JUDGING,
    LEAST_TOKENS,
    RUNGS,
    SHARE,
    TOKENS,
    Choice,
    Loss,
    Raised,
    before,
    beside,
    climb,
    coarse,
    config_of,
    groups_of,
    mixed_rungs,
    most_groups,
    name_of,
    raise_layers,
    rungs,
    scored_positions,
    text_of,
    upper_of,
)
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.mem_pool.segment_object import canonical
from sglang_diffkv.presets import CAREFUL, PRESETS
from sglang_diffkv.srt.models.scaling import attention_layers, sinks_of
from sglang_diffkv.srt.startup import disaggregation, own_means
from sglang_diffkv.srt.startup.model_identity import known_digest
from sglang_diffkv.srt.startup.reading_pass import logits, read
from sglang_diffkv.srt.versions import compat

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 16
"""Of a file that keeps a choice."""
STEPS = 1e12
"""In which ranks compare losses, to a nat."""
MOST_LOSS = 1e6
"""Nats that ranks tell each other of, at most."""
ROUNDING = "rounding"
"""Among losses in ``/server_info``: what was taken off all others."""
INSTEAD = "Name another preset instead (docs/choose.md)"
MORE = "--diffkv-config balanced takes fewer bytes and may lose more (docs/choose.md)"

_report: dict[str, Any] = {}
"""Of the server of this process."""


def report() -> dict[str, Any]:
    """Of the last start, for ``/server_info``; empty if it was not asked to choose."""
    return dict(_report)


class CannotChooseError(Exception):
    """Why the model cannot choose, in words."""


@dataclass(frozen=True)
class Taken:
    """What a server runs that was to choose.

    Attributes:
        origin: why, in words. source: where the fields come from that a choice decides, for reports.
    """

    config: DiffKVConfig
    origin: str
    source: str

    def resolution(self, before: Resolution) -> Resolution:
        """As what a launch finds, in place of what it found ``before``."""
        sources = {**before.sources, **dict.fromkeys([*DECIDED, "thresholds"], self.source)}
        return replace(before, config=self.config, origin=self.origin, sources=sources_of(self.config, sources))


def candidates(server_args: Any, given: DiffKVConfig) -> list[DiffKVConfig]:
    """The configurations that a server may run. Raises UnsupportedError where it has to choose and could not."""
    if not given.chosen_at_start:
        return [given]
    if given.chosen_or_refused and (why := obstacle(compat.resolved(server_args))):
        raise refusal(why)
    every = [*rungs(given).values(), *mixed_rungs(given)]
    return every if given.chosen_or_refused else [*every, careful(given, "").config]


def instead(server_args: Any, given: DiffKVConfig, why: str = "") -> Taken | None:
    """What a server runs that was not told what, if it is known before its weights load that its model cannot choose.
    None if the model may, or if the user decided.

    Args:
        why: what is known to be in the way beside the server's arguments, in words.
    """
    if not given.chosen_at_start or given.chosen_or_refused:
        return None
    view = compat.resolved(server_args)
    if own_means.random_weights(view):
        return Taken(beside(given, {}), "the built-in defaults, since random weights have nothing to lose", "default")
    if disaggregation.mode_of(view) != disaggregation.OFF:
        why = f"with {disaggregation.OPTION} two servers have to run the same"
    why = obstacle(view) or why
    return careful(given, why) if why else None


def careful(given: DiffKVConfig, why: str) -> Taken:
    """What a server runs that was not told what, and whose model cannot choose. ``why``: in words."""
    origin = f"those of the preset {CAREFUL}, since the model cannot choose: {why}. {MORE}"
    return Taken(beside(given, PRESETS[CAREFUL]), origin, f"preset {CAREFUL}")


def refusal(why: str) -> UnsupportedError:
    """Of a server that was told to choose, and whose model cannot."""
    return UnsupportedError(f"--diffkv-config {CHOSEN}: {why}. {INSTEAD}")


def obstacle(view: Any) -> str:
    """Why a server with these resolved arguments cannot have its model read a text; empty if it can."""
    if why := own_means.unreadable(view):
        return why
    if view.skip_tokenizer_init:
        return "with --skip-tokenizer-init there is no tokenizer to read a text with"
    chunk, context = view.chunked_prefill_size or 0, view.context_length or TOKENS
    if 0 < chunk < LEAST_TOKENS or context < LEAST_TOKENS:
        option = "--chunked-prefill-size" if 0 < chunk < LEAST_TOKENS else "--context-length"
        return f"a text of {LEAST_TOKENS} tokens is read in one pass, which {option} does not allow"
    return ""


@dataclass(frozen=True)
class Texts:
    """Tokens of the text that key means are of, and of the one on which rungs are judged."""

    means: list[int]
    judged: list[int]


def choose(runner: Any, given: DiffKVConfig) -> Taken:
    """What SGLang's model runner is to serve with, and why. Its weights are loaded, and it has no pools yet. All ranks
    have to call it. Raises UnsupportedError where the model has to choose and cannot.

    Args:
        given: the user's configuration, which asks for a choice; or that of a user who gave none.
    """
    global _report
    ranks = compat.tensor_parallel_ranks()
    try:
        return _chosen(runner, ranks, given)
    except CannotChooseError as error:
        why = str(error)
        if given.chosen_or_refused:
            raise refusal(why) from None
    except Exception as error:
        if given.chosen_or_refused:
            raise
        why = f"judging settings ended with {type(error).__name__}"
        if not ranks.alone:  # the others may be in the pass still, and would wait for this one
            raise UnsupportedError(f"choosing a setting: {why}. Add --diffkv-config {CAREFUL}") from error
        logger.warning("DiffKV: the model was to choose a setting, which ended with an error", exc_info=True)
    found = careful(given, why)
    tell(found)
    logger.warning("DiffKV: thresholds are %s", found.origin)
    return found


def tell(taken: Taken) -> None:
    """``report`` says what was taken without a choice."""
    global _report
    _report = {"chosen": taken.source.removeprefix("preset "), "how": taken.origin}


def _chosen(runner: Any, ranks: Ranks, given: DiffKVConfig) -> Taken:
    """Raises CannotChooseError."""
    global _report
    texts = _texts(runner, ranks)
    file, why = None, ""
    if ranks.rank == 0:
        server = (runner.server_args, runner.model_config, runner.dtype, runner.device)
        try:
            file, why = _file(*server, ranks.size, given, texts)
        except Exception as error:  # the other ranks go on
            why = f"its name was not found: {type(error).__name__}: {error}"
    layers = layer_ids(runner)
    before = None if file is None else kept(file, len(layers))
    index, raised = agreed_choice(ranks, before, len(layers))
    seconds = None
    if index:
        rung, choice, how = list(RUNGS)[index - 1], before, f"kept in {named(file)}" if file else "of the first rank"
    else:
        began = time.perf_counter()
        choice = _judged(runner, ranks, given, texts)
        rung, raised, seconds = choice.rung, choice.raised, round(time.perf_counter() - began, 2)
        if file is not None:
            why = write_privately(file, lambda path: path.write_text(json.dumps(plain(choice)), encoding="utf-8"))
        if ranks.rank:
            how = "kept by the first rank, if by any"
        else:
            how = f"kept in {named(file)}" if file and not why else f"not kept: {why}"
        how = f"measured in {seconds:.1f} s, {how}"
    chosen = name_of(rung, raised)
    said = f"{chosen} ({_because(choice)}; {how})"
    facts: dict[str, Any] = {} if choice is None else {"millinats": _reported(choice)}
    kept_in = None if why or file is None else str(file)
    facts |= {} if raised is None else {"layers": list(raised)}
    _report = {"chosen": chosen, "how": said, "tokens": len(texts.judged), "file": kept_in, **facts}
    _report |= {} if seconds is None else {"seconds": seconds}
    logger.info("DiffKV: the model chose %s", said)
    config = config_of(given, rung, raised, len(layers))
    return Taken(config, f"chosen for the model: {said}", CHOSEN)


def layer_ids(runner: Any) -> list[int]:
    """Of the layers that have pages, in order."""
    return sorted({layer.layer_id for layer in attention_layers(runner.model)})


def agreed_choice(ranks: Ranks, before: Choice | None, layers: int) -> tuple[int, Raised | None]:
    """What the first rank has of an earlier start: its rung's place from 1 on, 0 for none, and the layers raised."""
    mine = np.zeros(2 + layers, dtype=np.int64)
    if before is not None:
        mine[0] = 1 + list(RUNGS).index(before.rung)
        mine[1] = before.raised is not None
        mine[[2 + layer for layer in before.raised or ()]] = 1
    found = ranks.largest(mine)
    return int(found[0]), tuple(np.flatnonzero(found[2:]).tolist()) if found[1] else None


def _tokens(view: Any, model: Any) -> tuple[str, Texts]:
    """Why there is nothing to read, empty if there is; and what there is. ``view``: resolved arguments. ``model``:
    SGLang's ModelConfig."""
    why, means = own_means.text_ids(view, model)
    judged: list[int] = []
    if not why:
        most = LEAST_TOKENS if str(view.device) == "cpu" else TOKENS
        why, judged = own_means.text_ids(view, model, text_of(JUDGING), most, LEAST_TOKENS)
    return why, Texts(means, judged)


def _texts(runner: Any, ranks: Ranks) -> Texts:
    """What the model reads. Raises CannotChooseError."""
    why, texts = _tokens(compat.resolved(runner.server_args), runner.model_config)
    if not why and sinks_of(runner.model) is not None:
        why = "layers have attention sinks, with which no text is read at the start"
    if ranks.largest(np.array([bool(why)], dtype=np.int64))[0]:
        raise CannotChooseError(why or "another rank cannot read a text")
    ranks.require_equal("the tokens of the texts that are read", [len(texts.means), *texts.means, *texts.judged])
    return texts


def _judged(runner: Any, ranks: Ranks, given: DiffKVConfig, texts: Texts) -> Choice:
    """Have the model judge rungs, to find the first that loses no more than FP8 does, and layers where that helps.
    Raises CannotChooseError."""
    layers = layer_ids(runner)
    prompt, reply = scored_positions(len(texts.judged))
    configs = rungs(given)
    try:
        means = _means(runner, ranks, texts.means)
        asked = (texts.judged, layers, [*prompt, *reply])
        reference = logits(runner, *asked, AS_COMPUTED)

        def lost(stored: Stored) -> torch.Tensor:
            return divergence(reference, logits(runner, *asked, stored))

        fp8, rounding = lost(Fp8()), lost(RoundedAgain())

        def loss(found: torch.Tensor) -> Loss:
            return agreed(ranks, Loss.of(found, fp8, len(prompt), rounding))

        def judge(config: DiffKVConfig) -> Loss:
            return loss(lost(stored_of(config, means)))

        choice = climb(list(configs), loss(fp8), lambda name: judge(configs[name]))
        choice = replace(choice, rounding=agreed(ranks, Loss.of(rounding, rounding, len(prompt))))

        def alone(group: Raised) -> Loss:
            stored = stored_of(coarse(given, choice.rung), means)
            return loss(lost(replace(stored, only=frozenset(group))))

        groups = groups_of(len(layers), most_groups(runner.device))
        upper = upper_of(choice.rung)
        return raise_layers(choice, groups, alone, lambda raised: judge(config_of(given, upper, raised, len(layers))))
    except torch.OutOfMemoryError:
        if not ranks.alone:  # the others are in the pass, and wait for this one
            raise
        raise CannotChooseError("the device has too little memory left beside the weights to read a text") from None


def agreed(ranks: Ranks, loss: Loss) -> Loss:
    """The largest of all ranks', so that all decide alike."""
    bounded = [min(x, MOST_LOSS) for x in astuple(loss)]
    found = ranks.largest(np.array([round(x * STEPS) for x in bounded], dtype=np.int64))
    return Loss(*(float(x) / STEPS for x in found))


def _means(runner: Any, ranks: Ranks, ids: list[int]) -> torch.Tensor | None:
    """Of the keys of this rank's heads, as the server would take them off; None where it would take none,
    on any rank."""
    if any(layer.logit_cap for layer in attention_layers(runner.model)):
        return None
    sums = KeySums()
    read(runner, ids, sums.add)
    means = sums.means()
    bad = ranks.largest(np.array([bool(impossible(means))], dtype=np.int64))[0]
    return None if bad else means


def _because(choice: Choice | None) -> str:
    if choice is None:
        return "all ranks take the first one's"
    fp8 = choice.fp8.report()
    taken, names = choice.loss, list(RUNGS)
    where, of_fp8 = "millinats a token in prompts and in replies", f"FP8 {fp8['prompt']:g} and {fp8['reply']:g}"
    lost = f"it loses nothing, {of_fp8} {where}"
    if taken is not None:
        lost = "it loses {prompt:g} and {reply:g}".format(**taken.report()) + f" {where}, {of_fp8}"
    smaller = [
        f"{name}, with fewer bytes, would lose {_with_errors(loss)}"
        for name, loss in choice.judged.items()
        if names.index(name) < names.index(choice.rung)
    ]
    said = [lost, f"{SHARE:g} of that is allowed, less {ERRORS:g} standard errors (±)", *smaller]
    if choice.rounding is not None:
        off = "{prompt:g} and {reply:g}".format(**choice.rounding.report())
        said.append(f"{off}, which any change loses by the model's own rounding, were taken off")
    if choice.raised is not None:
        said.append(f"its layers are those that lose most with {COARSE} alone")
        if (lower := choice.judged.get(before(choice.rung))) is not None and lower.within(choice.fp8):
            said.append("those that make most of that take better codes in any case, since other texts lose more there")
    return "; ".join(said)


def _with_errors(loss: Loss) -> str:
    """In prompts and in replies, without which nobody could tell why it is too much."""
    errors = replace(loss, prompt=loss.prompt_error, reply=loss.reply_error).report()
    return " and ".join(f"{lost:g} ± {errors[part]:g}" for part, lost in loss.report().items())


def _reported(choice: Choice) -> dict[str, Any]:
    found = {"fp8_e4m3": choice.fp8, **choice.judged}
    found |= {} if choice.rounding is None else {ROUNDING: choice.rounding}
    if (layers := choice.by_layer) is not None:
        found |= {name_of(choice.rung, raised): loss for raised, loss in layers.judged.items()}
        found |= {f"{COARSE} in {_listed(group)} alone": loss for group, loss in layers.alone.items()}
    return {name: loss.report() for name, loss in found.items()}


def _listed(layers: Raised) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"


def _file(
    server_args: Any, model: Any, dtype: Any, device: Any, ranks: int, given: DiffKVConfig, texts: Texts
) -> tuple[Path | None, str]:
    """The file of a choice, and why there is none."""
    why, name = known_digest(server_args, model)
    if name is None:
        return None, why
    try:
        folder = private_folder(own_means.cache_folder())
    except (ConfigError, RuntimeError) as error:  # or no home
        return None, f"the folder for it (set {CACHE_ENV}) cannot be used: {error}"
    ladder = {name: config.whole() for name, config in rungs(given).items()}
    ladder |= {f"{config.tiers}": config.whole() for config in mixed_rungs(given)}
    about = [FORMAT, name, str(dtype), str(device), ranks, texts.means, texts.judged, ladder]
    return folder / f"choice-{hashlib.blake2b(canonical(about), digest_size=16).hexdigest()}.json", ""


def earlier(configurator: Any, given: DiffKVConfig) -> Choice | None:
    """What an earlier start of such a server chose, as far as it is kept; None if it is not, or if there is nothing to
    read. ``configurator``: what of SGLang's KVCacheConfigurator is known before weights are loaded."""
    view, model = configurator.server_args, configurator.model_config
    why, texts = _tokens(view, model)
    if why:
        return None
    file, _ = _file(configurator.arguments, model, model.dtype, view.device, view.tp_size, given, texts)
    return None if file is None else kept(file)


def plain(choice: Choice) -> dict[str, Any]:
    """As JSON data; ``kept`` reads it."""
    judged = {name: astuple(x) for name, x in choice.judged.items()}
    found: dict[str, Any] = {"rung": choice.rung, "fp8": astuple(choice.fp8), "judged": judged}
    if choice.rounding is not None:
        found["rounding"] = astuple(choice.rounding)
    if (layers := choice.by_layer) is not None:
        found["by_layer"] = {
            "raised": layers.raised,
            "alone": [[group, astuple(x)] for group, x in layers.alone.items()],
            "judged": [[raised, astuple(x)] for raised, x in layers.judged.items()],
        }
    return found


def _loss_of(numbers: Any) -> Loss:
    """As ``plain`` has it. Raises ValueError for numbers that no start writes."""
    found = Loss(*map(float, numbers))
    if not all(0 <= x <= MOST_LOSS for x in astuple(found)):
        raise ValueError(f"it has losses that are not from 0 to {MOST_LOSS:g} nats")
    return found


def _losses_of_layers(pairs: Any) -> dict[Raised, Loss]:
    """As ``plain`` has them. Raises ValueError where no layers are named, or the same ones twice."""
    found = [(tuple(map(int, layers)), _loss_of(numbers)) for layers, numbers in pairs]
    losses = dict(found)
    if () in losses or len(losses) < len(found):
        raise ValueError("it has a loss of no layers, or two of the same ones")
    return losses


def kept(file: Path, layers: int | None = None) -> Choice | None:
    """What an earlier start chose; None if none did, or the file is damaged or does not follow from its own numbers.

    Args:
        layers: that the model has; None if that is not known yet.
    """
    if not file.exists():
        return None
    try:
        found = read_json(file, MOST_BYTES)
        judged = {str(name): _loss_of(x) for name, x in found["judged"].items()}
        choice = climb(list(RUNGS), _loss_of(found["fp8"]), judged.__getitem__)
        choice = replace(choice, rounding=_loss_of(found["rounding"]) if "rounding" in found else None)
        if (by_layer := found.get("by_layer")) is not None:
            alone, tried = (_losses_of_layers(by_layer[x]) for x in ("alone", "judged"))
            if [x for group in alone for x in group] != list(range(sum(map(len, alone)) if layers is None else layers)):
                raise ValueError("its layers are not the model's")
            choice = raise_layers(choice, list(alone), alone.__getitem__, tried.__getitem__)
        raised = None if by_layer is None or by_layer["raised"] is None else tuple(by_layer["raised"])
        if choice.rung != found["rung"] or choice.raised != raised:
            raise ValueError("it names another choice than its numbers do")
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        # No other rank is told of an error here: they wait for what this one has.
        logger.warning("DiffKV: the choice in %s is made again: %s", named(file), error)
        return None
    return choice
