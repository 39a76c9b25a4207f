"""A text in two parts: one on which a setting is chosen, and one that no choice has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_diffkv.evaluate.endpoint import Endpoint
from sglang_diffkv.evaluate.runner import Suite
from sglang_diffkv.evaluate.task import Metric, Outcome, Question
from sglang_diffkv.evaluate.tasks.files import TaskFileError
from sglang_diffkv.evaluate.tasks.forced import ForcedTask
from sglang_diffkv.evaluate.tasks.wikitext import PerplexityTask

CHOOSING, HELD_OUT = "choosing", "held-out"


@dataclass(frozen=True)
class Part:
    """The windows of a text that lie within one of its parts; the last ``share`` of the text is held out."""

    whole: PerplexityTask | ForcedTask
    part: str
    share: float
    n: int
    metric: Metric = field(default="perplexity", init=False)

    @property
    def server_args(self) -> tuple[str, ...]:
        return self.whole.server_args

    @property
    def name(self) -> str:
        return f"{self.whole.name}/{self.part}"

    def fingerprint(self) -> dict[str, Any]:
        return {**self.whole.fingerprint(), "part": self.part, "held_out": self.share}

    def questions(self, tokenizer: Any) -> list[Question]:
        """A fixed random sample of the part's windows. No token is in a window of both parts. Raises TaskFileError."""
        every = self.whole.questions(tokenizer)
        size = max(len(question.prompt_ids) + len(question.reply_ids) for question in every)
        end = max(int(question.id) for question in every) + size
        cut = round(end * (1 - self.share))

        def inside(question: Question) -> bool:
            return int(question.id) >= cut if self.part == HELD_OUT else int(question.id) + size <= cut

        found = [question for question in every if inside(question)][: self.n]
        if len(found) < 2:
            raise TaskFileError(
                f"{self.whole.path.name}: {len(found)} windows of {size} tokens in the part for {self.part}, where an "
                "error takes two: give a longer text or a smaller --prefix-tokens"
            )
        return found

    def ask(self, question: Question, endpoint: Endpoint) -> Outcome:
        return self.whole.ask(question, endpoint)


def parts(whole: PerplexityTask | ForcedTask, share: float, n: int, tokenizer: Any) -> Sequence[Suite]:
    """The part for choosing and the one held out, ``n`` windows of each or as many as there are."""
    return [Suite.of(Part(whole, name, share, n), tokenizer) for name in (CHOOSING, HELD_OUT)]
