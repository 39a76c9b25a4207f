"""Curves of all heads over all sequences, and the factors that follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from sglang_diffkv.calibrate.heads.allocate import allocate
from sglang_diffkv.calibrate.heads.capture import LayerPass, run
from sglang_diffkv.calibrate.heads.curves import Rule, counted, measure
from sglang_diffkv.calibrate.heads.result import Change, Predicted
from sglang_diffkv.calibration import HeadScale
from sglang_diffkv.evaluate.task import Task
from sglang_diffkv.evaluate.tasks import TaskFileError
from sglang_diffkv.evaluate.tasks.generation import GenerationTask

FACTORS = (1 / 64, 1 / 32, 1 / 16, *(2 ** (step / 2) for step in range(-6, 7)), 16.0, 32.0, 64.0)
"""2^-6 to 2^6: half octaves around 1, which is among them, and octaves beyond 2^-3 and 2^3."""


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt and its reply."""

    ids: tuple[int, ...]
    prompt: int

    def fits(self, window: int, longest: int) -> bool:
        """Whether some query that counts has a token outside the window, and the pass is not too long."""
        return len(self.ids) <= longest and len(counted(len(self.ids), self.prompt, window)) > 0


def read(task: Task, tokenizer: Any) -> Iterator[Text]:
    """Prompts with the replies that the file has, in the order of asking; of a perplexity's windows what is in the
    cache is the prompt."""
    replies = {x.id: x.reply for x in task.examples} if isinstance(task, GenerationTask) else {}
    for question in task.questions(tokenizer):
        reply = replies.get(question.id, "")
        more = tokenizer.encode(reply, add_special_tokens=False) if reply else ()
        yield Text((*question.prompt_ids, *more), question.cached_tokens or len(question.prompt_ids))


def choose(found: Iterator[Text], n: int, window: int, longest: int) -> tuple[list[Text], int]:
    """The first ``n`` that something can be measured on, and how many were passed over. Raises TaskFileError."""
    chosen: list[Text] = []
    skipped = 0
    for text in found:
        if len(chosen) == n:
            break
        if text.fits(window, longest):
            chosen.append(text)
        else:
            skipped += 1
    if not chosen:
        raise TaskFileError(f"no sequence is longer than the window of {window} tokens and within {longest}")
    return chosen, skipped


@dataclass(frozen=True)
class Curves:
    """``error`` and ``size``: [sequences, layers, heads, factors] float64; ``bf16``: [sequences], bytes."""

    error: torch.Tensor
    size: torch.Tensor
    bf16: torch.Tensor
    factors: tuple[float, ...] = FACTORS

    @property
    def _base(self) -> int:
        return self.factors.index(1.0)

    def fit(self) -> torch.Tensor:
        """Number of the factor of each head, [layers, heads], at the bytes of factor 1."""
        error, size = (x.mean(0).flatten(0, 1) for x in (self.error, self.size))
        return allocate(error, size, self._base).view(self.error.shape[1:3])

    def scale(self, taken: torch.Tensor) -> HeadScale:
        """Factors [layers][heads]."""
        return tuple(tuple(self.factors[number] for number in layer) for layer in taken.tolist())

    def change(self, taken: torch.Tensor) -> Change:
        """What ``taken`` [layers, heads] does on these sequences."""
        return Change(before=self._at(torch.full_like(taken, self._base)), after=self._at(taken))

    def _at(self, taken: torch.Tensor) -> Predicted:
        at = taken.expand(len(self.error), -1, -1).unsqueeze(3)
        error, size = (float(x.gather(3, at).sum((1, 2, 3)).mean()) for x in (self.error, self.size))
        return Predicted(error=error, bytes=size, ratio=size / float(self.bf16.mean()))

    def held_out(self) -> Change | None:
        """The change on each half of the sequences with factors fitted to the other half; None for one sequence."""
        if len(self.error) < 2:
            return None
        halves = [
            Curves(self.error[half::2], self.size[half::2], self.bf16[half::2], self.factors) for half in range(2)
        ]
        seen = [half.change(other.fit()) for half, other in zip(halves, reversed(halves))]
        weight = [len(half.error) / len(self.error) for half in halves]

        def mean(side: str) -> Predicted:
            parts = [getattr(x, side).model_dump() for x in seen]
            joined = {name: sum(w * x[name] for w, x in zip(weight, parts)) for name in ("error", "bytes")}
            return Predicted(**joined, ratio=joined["bytes"] / float(self.bf16.mean()))

        return Change(before=mean("before"), after=mean("after"))

    def error_by_head(self) -> HeadScale:
        """[layers][heads], at factor 1."""
        return tuple(map(tuple, self.error[..., self._base].mean(0).tolist()))


def collect(model: Any, texts: Sequence[Text], rule: Rule) -> Curves:
    """A forward pass over each text."""
    found = [_curves(model, text, rule) for text in tqdm(texts, desc="heads", unit="sequence")]
    errors, sizes, plain = zip(*found)
    return Curves(torch.stack(errors), torch.stack(sizes), torch.tensor(plain, dtype=torch.float64))


def _curves(model: Any, text: Text, rule: Rule) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Errors and bytes [layers, heads, factors] of one text, and its bytes in bf16."""
    layers: list[tuple[torch.Tensor, torch.Tensor, float]] = []

    def visit(seen: LayerPass) -> None:
        layers.append((*measure(seen, text.prompt, rule, FACTORS), 2.0 * (seen.k.numel() + seen.v.numel())))

    run(model, text.ids, visit)
    errors, sizes, plain = zip(*layers)
    return torch.stack(errors), torch.stack(sizes), sum(plain)
