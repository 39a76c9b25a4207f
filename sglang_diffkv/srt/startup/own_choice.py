"""A configuration that a server chooses for its model (``--diffkv-config auto``): the first rung of ``ladder.py`` that
loses no more than an FP8 cache would, in next-token distributions of a text that comes with the package.

It is chosen once the weights are loaded and before anything is sized: pools, kernels and graphs then are those of the
configuration that was chosen, as if the user had named it. The model reads the text a few times; nothing is stored
(``attention/emulated.py``). A file keeps the choice for later starts. All ranks take that of the first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_diffkv.attention.emulated import AS_COMPUTED, Fp8, Stored, divergence, stored_of
from sglang_diffkv.config import CACHE_ENV, CHOSEN, DiffKVConfig
from sglang_diffkv.errors import ConfigError, UnsupportedError
from sglang_diffkv.files import named, private_folder, read_json, write_privately
from sglang_diffkv.key_means import KeySums, impossible
from sglang_diffkv.ladder import (
    FORMAT,
    JUDGING,
    LEAST_TOKENS,
    RUNGS,
    TOKENS,
    Choice,
    Loss,
    climb,
    rungs,
    scored_positions,
    text_of,
)
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.mem_pool.segment_object import canonical
from sglang_diffkv.srt.models.scaling import attention_layers, sinks_of
from sglang_diffkv.srt.startup import own_means
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
INSTEAD = "Name another preset instead (docs/choose.md)"

_report: dict[str, Any] = {}
"""Of the server of this process."""


def report() -> dict[str, Any]:
    """Of the last start, for ``/server_info``; empty if it was not asked to choose."""
    return dict(_report)


def candidates(server_args: Any, given: DiffKVConfig) -> list[DiffKVConfig]:
    """The configurations that a server may run. Raises UnsupportedError where it is to choose and could not."""
    if not given.chosen_at_start:
        return [given]
    if why := obstacle(compat.resolved(server_args)):
        raise UnsupportedError(f"--diffkv-config {CHOSEN}: {why}. {INSTEAD}")
    return list(rungs(given).values())


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


def choose(runner: Any, given: DiffKVConfig) -> tuple[DiffKVConfig, str]:
    """What SGLang's model runner is to serve with, and why. Its weights are loaded, and it has no pools yet. All ranks
    have to call it. Raises UnsupportedError where the model cannot choose.

    Args:
        given: the user's configuration, which asks for a choice.
    """
    global _report
    ranks = compat.tensor_parallel_ranks()
    texts = _texts(runner, ranks)
    file, why = _file(runner, ranks, given, texts) if ranks.rank == 0 else (None, "another rank keeps it")
    before = None if file is None else kept(file)
    names = list(RUNGS)
    index = int(ranks.largest(np.array([0 if before is None else 1 + names.index(before.rung)]))[0])
    seconds = None
    if index:
        rung, choice, how = names[index - 1], before, f"kept in {named(file)}" if file else "of the first rank"
    else:
        began = time.perf_counter()
        choice = _judged(runner, ranks, given, texts)
        rung, seconds = choice.rung, round(time.perf_counter() - began, 2)
        if file is not None:
            why = write_privately(file, lambda path: path.write_text(json.dumps(plain(choice)), encoding="utf-8"))
        how = f"measured in {seconds:.1f} s, " + (f"kept in {named(file)}" if file and not why else f"not kept: {why}")
    said = f"{rung} ({_because(choice)}; {how})"
    facts = {} if choice is None else {"millinats": _reported(choice)}
    _report = {"chosen": rung, "how": said, "tokens": len(texts.judged), "file": None if why else str(file), **facts}
    _report |= {} if seconds is None else {"seconds": seconds}
    logger.info("DiffKV: %s takes %s", CHOSEN, said)
    return rungs(given)[rung], f"chosen for the model: {said}"


def _texts(runner: Any, ranks: Ranks) -> Texts:
    """What the model reads. Raises UnsupportedError where it cannot."""
    view, model = compat.resolved(runner.server_args), runner.model_config
    why, means = own_means.text_ids(view, model)
    judged: list[int] = []
    if not why:
        why, judged = own_means.text_ids(view, model, text_of(JUDGING), TOKENS, LEAST_TOKENS)
    if not why and sinks_of(runner.model) is not None:
        why = "layers have attention sinks, with which no text is read at the start"
    if ranks.largest(np.array([bool(why)], dtype=np.int64))[0]:
        raise UnsupportedError(f"--diffkv-config {CHOSEN}: {why or 'another rank cannot read a text'}. {INSTEAD}")
    ranks.require_equal("the tokens of the texts that are read", [len(means), *means, *judged])
    return Texts(means, judged)


def _judged(runner: Any, ranks: Ranks, given: DiffKVConfig, texts: Texts) -> Choice:
    """Have the model judge rungs until one loses no more than FP8 does."""
    layers = sorted({layer.layer_id for layer in attention_layers(runner.model)})
    prompt, reply = scored_positions(len(texts.judged))
    configs = rungs(given)
    try:
        means = _means(runner, ranks, texts.means)
        asked = (texts.judged, layers, [*prompt, *reply])
        reference = logits(runner, *asked, AS_COMPUTED)

        def lost(stored: Stored) -> torch.Tensor:
            return divergence(reference, logits(runner, *asked, stored))

        fp8 = lost(Fp8())

        def loss(found: torch.Tensor) -> Loss:
            return agreed(ranks, Loss.of(found, fp8, len(prompt)))

        return climb(list(configs), loss(fp8), lambda name: loss(lost(stored_of(configs[name], means))))
    except torch.OutOfMemoryError:
        if not ranks.alone:  # the others are in the pass, and wait for this one
            raise
        raise UnsupportedError(
            f"--diffkv-config {CHOSEN}: the device has too little memory left beside the weights to read a text. "
            f"{INSTEAD}"
        ) from None


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
    taken = choice.judged.get(choice.rung)
    lost = "it loses nothing" if taken is None else "it loses {prompt:g} and {reply:g}".format(**taken.report())
    passed = [
        f"{name} would lose {loss.report()['prompt']:g} and {loss.report()['reply']:g}"
        for name, loss in choice.judged.items()
        if name != choice.rung
    ]
    limit = f"millinats a token in prompts and in replies, FP8 {fp8['prompt']:g} and {fp8['reply']:g}"
    return "; ".join([f"{lost} {limit}", *passed])


def _reported(choice: Choice) -> dict[str, Any]:
    return {"fp8_e4m3": choice.fp8.report(), **{name: loss.report() for name, loss in choice.judged.items()}}


def _file(runner: Any, ranks: Ranks, given: DiffKVConfig, texts: Texts) -> tuple[Path | None, str]:
    """The file of a choice, and why there is none."""
    why, model = known_digest(runner.server_args, runner.model_config)
    if model is None:
        return None, why
    try:
        folder = private_folder(own_means.cache_folder())
    except (ConfigError, RuntimeError) as error:  # or no home
        return None, f"the folder for it (set {CACHE_ENV}) cannot be used: {error}"
    ladder = {name: config.whole() for name, config in rungs(given).items()}
    about = [FORMAT, model, str(runner.dtype), str(runner.device), ranks.size, texts.means, texts.judged, ladder]
    return folder / f"choice-{hashlib.blake2b(canonical(about), digest_size=16).hexdigest()}.json", ""


def plain(choice: Choice) -> dict[str, Any]:
    """As JSON data; ``kept`` reads it."""
    judged = {name: astuple(x) for name, x in choice.judged.items()}
    return {"rung": choice.rung, "fp8": astuple(choice.fp8), "judged": judged}


def kept(file: Path) -> Choice | None:
    """What an earlier start chose; None if none did, or the file is damaged or does not follow from its own numbers."""
    if not file.exists():
        return None
    try:
        found = read_json(file, MOST_BYTES)
        judged = {str(name): Loss(*map(float, x)) for name, x in found["judged"].items()}
        choice = climb(list(RUNGS), Loss(*map(float, found["fp8"])), judged.__getitem__)
        if choice.rung != found["rung"]:
            raise ValueError("it names another rung than its numbers do")
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
        logger.warning("DiffKV: the choice in %s is made again: %s", named(file), error)
        return None
    return choice
