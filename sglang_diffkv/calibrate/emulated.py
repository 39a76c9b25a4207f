"""Compare configurations on a model without a server: what would each cost in next-token distributions?

The Hugging Face model reads passages of a text. Keys and values are rounded where a policy would have put their tokens
into a tier (see ``sglang_diffkv/attention/emulated.py``), and the distributions are compared with the model's own. A
server that is started with ``--diffkv-config auto`` does the same with a text of its own. Without ``--config`` its
ladder is judged. Example:

    python -m sglang_diffkv.calibrate.emulated --model MODEL --text prose.txt --n 12
    python -m sglang_diffkv.calibrate.emulated --model MODEL --text prose.txt --config safe --config 'mine={}'
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sglang_diffkv.arguments import output_file
from sglang_diffkv.attention.emulated import AS_COMPUTED, Fp8, RoundedAgain, Span, Stored, attend, divergence, stored_of
from sglang_diffkv.attention.whole import Sight, causal, error_weights
from sglang_diffkv.calibrate.reading import add_arguments, load, windows
from sglang_diffkv.config import DiffKVConfig, load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.evaluate.cli import positive
from sglang_diffkv.evaluate.endpoint import EvaluationError
from sglang_diffkv.evaluate.prompts import load_tokenizer
from sglang_diffkv.evaluate.report import markdown
from sglang_diffkv.evaluate.tasks.files import TaskFileError
from sglang_diffkv.files import quoted
from sglang_diffkv.key_means import KeySums
from sglang_diffkv.ladder import (
    LEAST_TOKENS,
    RUNGS,
    Choice,
    Loss,
    Raised,
    climb,
    coarse,
    config_of,
    groups_of,
    most_groups,
    name_of,
    parts_of,
    raise_layers,
    rungs,
    scored_positions,
    text_of,
    upper_of,
)
from sglang_diffkv.noise_shaping import Moments, NoiseShaping, output_products

READING, READ = "reading.txt", 4096
"""The text of the key means, and tokens of it that are read at most: as a server does."""
FP8, FP8_FLASH = "fp8_e4m3", "fp8_e4m3 by FlashAttention-3"
ROUNDING = "rounded again"
KEPT_BYTES = 1 << 30
"""Of passages' distributions as computed, which are kept from one try of configurations to the next."""
IN_8_BITS = "fa3_fp8"
"""``prefill`` of configurations whose prompts attend in 8 bits. They are judged so however short a prompt is."""


class Reading:
    """What transformers calls to attend: as computed, or as ``stored`` of ``span`` would be."""

    def __init__(self) -> None:
        self.stored: Stored | None = None
        self.sums: KeySums | None = None
        self.moments: Moments | None = None
        self.outputs: dict[int, torch.Tensor] = {}
        self.span = Span(0, 0)

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Attention of one sequence in transformers' shapes [1, heads, N, dim]."""
        sight = Sight.of(kwargs)
        if self.sums is not None and self.moments is not None:
            queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
            self.sums.add(module.layer_idx, keys)
            weights = error_weights(query[0], key[0], scaling, sight)
            self.moments.add(module.layer_idx, queries, keys, values, weights)
            if isinstance(projection := getattr(module, "o_proj", None), torch.nn.Linear):
                products = output_products(projection.weight, key.shape[1], value.shape[3])
                self.outputs[module.layer_idx] = products
        if self.stored is None:
            return causal(query, key, value, scaling, sight), None
        if sight.sinks is not None:
            raise EvaluationError("layers with attention sinks are not emulated")
        out = attend(query[0], key[0], value[0], scaling, module.layer_idx, self.stored, self.span, sight)
        return out.unsqueeze(0), None


def new_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """A parser that asks for a model and passages of a text."""
    parser = argparse.ArgumentParser(
        prog=f"python -m sglang_diffkv.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, 1 << 20, "of a passage: a cached prompt, a new one and a reply", 2048)
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Of a ``new_parser``. Passages are long enough to be judged on."""
    args = parser.parse_args(argv)
    if args.window_tokens < LEAST_TOKENS:
        parser.error(f"--window-tokens must be at least {LEAST_TOKENS}")
    return args


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser("calibrate.emulated", __doc__)
    parser.add_argument("--n", type=positive, default=12, help="passages (default: %(default)s)")
    parser.add_argument(
        "--config", action="append", metavar="NAME=JSON", help="a preset, or a name and a configuration; may repeat"
    )
    parser.add_argument(
        "--float32", action="store_true", help="compute in float32: what bfloat16 loses by itself is left out"
    )
    parser.add_argument("--output", type=output_file, help="also write the numbers to this file, .json")
    return parsed(parser, argv)


def configurations(given: Sequence[str] | None) -> dict[str, DiffKVConfig]:
    """By name; the ladder if none is given. Raises ConfigError."""
    if not given:
        return rungs(DiffKVConfig())
    found: dict[str, DiffKVConfig] = {}
    for name, equals, source in (x.partition("=") for x in given):
        if not name or name in found:
            raise ConfigError(f"--config {quoted(name)}: each needs a name of its own, as in --config 'mine={{}}'")
        found[name] = load_config(source if equals else name, f"--config {quoted(name)}")
    return found


Losses = Mapping[str, Sequence[tuple[torch.Tensor, torch.Tensor]]]
"""Of each configuration, passage by passage: of the new prompt's positions, and of the reply's."""


class Judge:
    """Judges configurations on a model. Raises EvaluationError."""

    def __init__(self, path: str, tokenizer: str | None, *, float32: bool = False):
        self.reading = Reading()
        self._as_computed: dict[tuple[int, ...], torch.Tensor] = {}
        self.model = load(path, self.reading.attend)
        if float32:
            self.model.float()
        ids = load_tokenizer(tokenizer or path)(text_of(READING))["input_ids"][:READ]
        self.means, self.shaping = self._measured(list(ids))

    @property
    def layers(self) -> int:
        """That have pages."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def kv_heads(self) -> int:
        """Of each layer."""
        config = self.model.config.get_text_config()
        return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)

    def check(self, configs: Mapping[str, DiffKVConfig]) -> None:
        """Raise ConfigError for one, by name, that is set for a model of another shape."""
        for name, config in configs.items():
            try:
                config.check_heads(self.layers, self.kv_heads)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None

    @torch.inference_mode()
    def _measured(self, ids: list[int]) -> tuple[torch.Tensor | None, NoiseShaping | None]:
        """Key means and noise shaping, as a server has them."""
        reading = self.reading
        reading.stored, reading.sums, reading.moments = None, KeySums(), Moments()
        self.model.model(torch.tensor([ids], device=self.model.device), use_cache=False)
        sums, moments = reading.sums, reading.moments
        reading.sums = reading.moments = None
        try:
            return sums.means(), moments.fit(reading.outputs)
        except ValueError:
            return None, None

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], stored: Stored) -> torch.Tensor:
        """[M, vocabulary] at the scored positions of one passage."""
        self.reading.stored, self.reading.span = stored, Span(*parts_of(len(ids)))
        positions = torch.tensor([x for part in scored_positions(len(ids)) for x in part], device=self.model.device)
        given = torch.tensor([list(ids)], device=self.model.device)
        return self.model(given, use_cache=False, logits_to_keep=positions).logits[0].float()

    def as_computed(self, ids: Sequence[int]) -> torch.Tensor:
        """``logits`` with nothing rounded. They are read once, while ``KEPT_BYTES`` have room for them."""
        found = self._as_computed.get(tuple(ids))
        if found is None:
            found = self.logits(ids, AS_COMPUTED)
            if sum(x.nbytes for x in (found, *self._as_computed.values())) <= KEPT_BYTES:
                self._as_computed[tuple(ids)] = found.cpu()
        return found.to(self.model.device)

    def losses(self, ids: Sequence[int], ways: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
        """KL in nats of each way to store a passage, at the scored positions [M]."""
        reference = self.as_computed(ids)
        return {name: divergence(reference, self.logits(ids, stored)).cpu() for name, stored in ways.items()}

    def on(self, passages: Sequence[Sequence[int]], ways: Mapping[str, Stored], what: str = "") -> Losses:
        """What each way to store loses on passages. ``what``: said of them while they are read."""
        found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in ways}
        for number, passage in enumerate(passages, 1):
            print(f"{what}passage {number} of {len(passages)}", file=sys.stderr)
            count = len(scored_positions(len(passage))[0])
            for name, lost in self.losses(passage, ways).items():
                found[name].append((lost[:count], lost[count:]))
        return found


Judged = Callable[[Mapping[str, Stored]], Losses]
"""Judges some ways to store on all passages."""


def judge(args: argparse.Namespace) -> tuple[Losses, Choice | None]:
    """What configurations lose; and, without any, what a server would take if this were its text. Raises ConfigError,
    EvaluationError and TaskFileError."""
    configs = configurations(args.config)
    passages = windows(args, LEAST_TOKENS)[: args.n]
    judge = Judge(args.model, args.tokenizer, float32=args.float32)
    judge.check(configs)

    ways: dict[str, Stored] = {FP8: Fp8(), ROUNDING: RoundedAgain()}
    if any(config.prefill == IN_8_BITS for config in configs.values()):
        ways[FP8_FLASH] = Fp8(prompts_in_8_bits=True)
    for name, config in configs.items():
        stored = stored_of(config, judge.means, judge.shaping, judge.model.dtype)
        ways[name] = replace(stored, prompts_in_8_bits=config.prefill == IN_8_BITS)
    found = judge.on(passages, ways)
    return (found, None) if args.config else taken(found, judge, partial(judge.on, passages))


def taken(found: Losses, judge: Judge, of_all: Judged) -> tuple[Losses, Choice]:
    """Losses with those of layers that were tried, and what a server would take."""
    every = dict(found)

    def joined(name: str) -> list[torch.Tensor]:
        return [torch.cat(x) for x in zip(*every[name], strict=True)]

    def loss(name: str) -> Loss:
        lost = joined(name)
        return Loss.of(torch.cat(lost), torch.cat(joined(FP8)), len(lost[0]), torch.cat(joined(ROUNDING)))

    def of(name: str, stored: Stored) -> Loss:
        every.update(of_all({name: stored}))
        return loss(name)

    choice, given = climb(list(RUNGS), loss(FP8), loss), DiffKVConfig()

    def alone(group: Raised) -> Loss:
        stored = stored_of(coarse(given, choice.rung), judge.means, judge.shaping)
        lost = of(f"layers {group} alone", replace(stored, only=frozenset(group)))
        every.pop(f"layers {group} alone")
        return lost

    def mixed(raised: Raised) -> Loss:
        upper = upper_of(choice.rung)
        config = config_of(given, upper, raised, judge.layers)
        return of(name_of(upper, raised), stored_of(config, judge.means, judge.shaping))

    groups = groups_of(judge.layers, most_groups(judge.model.device))
    return every, raise_layers(choice, groups, alone, mixed)


def table(found: Losses) -> str:
    """A Markdown table, in millinats a token, with standard errors; and how many passages lose more than FP8's."""
    rows = []
    for name, losses in found.items():
        cells = [name]
        for part in range(2):
            mine, fp8 = (1e3 * torch.stack([x[part].mean() for x in y]) for y in (losses, found[FP8]))
            worse = int((mine > fp8).sum())
            error = f" ± {float(mine.std()) / len(mine) ** 0.5:.2f}" if len(mine) > 1 else ""
            cells += [f"{float(mine.mean()):.2f}{error}", f"{worse} of {len(mine)}"]
        rows.append(cells)
    return markdown(["cache", "new prompt, 0.001 nats", "above FP8", "reply, 0.001 nats", "above FP8"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Judge and print; 1 with the reason if that is not possible."""
    args = parse_args(argv)
    try:
        found, choice = judge(args)
        if args.output is not None:
            numbers = {name: [[float(x.mean()) for x in y] for y in losses] for name, losses in found.items()}
            Path(args.output).write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    except (ConfigError, TaskFileError, EvaluationError, OSError, ValueError) as error:
        print(f"sglang_diffkv.calibrate.emulated: {error}", file=sys.stderr)
        return 1
    print(table(found))
    if choice is not None:
        print(f"auto would take {choice.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
