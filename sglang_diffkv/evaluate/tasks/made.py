"""Questions about long texts that are made here, for any model and of any length: ``made=TOKENS`` needs no file.

They are of the kinds that RULER (Hsieh et al., 2024) and SCBench (Li et al., 2025) ask, in texts of our own. Sentences
of random words fill a prompt up to about ``TOKENS`` tokens, and what is asked for is hidden between them:

- ``single``: one sentence with a number;
- ``keys``: every fifth sentence has a number, each for another name, and one is asked for;
- ``values``: four numbers of one name, all asked for;
- ``variables``: names that get a number from each other, in three chains; all names of one chain are asked for;
- ``turns``: four questions about one text, one after the other, each behind the ones before and their right answers.

A question's score is the share of what was asked for that occurs in the reply.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_diffkv.evaluate.client import RequestError
from sglang_diffkv.evaluate.endpoint import Endpoint
from sglang_diffkv.evaluate.prompts import prompt_ids
from sglang_diffkv.evaluate.task import Metric, Outcome, Question
from sglang_diffkv.evaluate.tasks.files import TaskFileError
from sglang_diffkv.evaluate.tasks.generation import Options
from sglang_diffkv.evaluate.tasks.scores import all_found

FORMAT = 1
"""Raised where questions change."""
LEAST_TOKENS, MOST_TOKENS = 256, 1 << 21
QUESTIONS = 100
REPLY_TOKENS = 256
TURNS, VALUES, CHAIN, CHAINS, KEYS_EVERY = 4, 4, 4, 3, 5
PROBED = 64
"""Sentences by which the tokens of one are known."""


def words(text: str) -> list[str]:
    """A text's words."""
    return text.split()


WHO = words("miller baker sailor weaver clerk farmer painter mason tailor doctor pilot singer nurse guard printer cook")
DID = words("carried found sold painted counted mended hid borrowed measured washed lost drew opened weighed")
WHAT = words("lamp basket kettle ladder map bell coat barrel mirror hammer letter chair wheel cloth key drum")
WHERE = words("harbour mill market bridge chapel garden station tower orchard cellar square ferry school quarry")
WHEN = words("morning evening winter summer storm feast frost harvest fair night")
COLOURS = words("amber ivory scarlet violet silver copper olive indigo crimson teal")
CODE = "The secret number of the {} is {}."
ASKED = "What is the secret number of the {}? Reply with the number."
HEAD = "Read the text, then answer the question behind it.\n\n"
TAIL = "\n\nQuestion: {}\nAnswer:"


@dataclass(frozen=True)
class Made:
    """A text's sentences that matter, and what is asked: questions, each with what its reply is to have."""

    hidden: tuple[str, ...]
    asked: tuple[tuple[str, tuple[str, ...]], ...]


def filler(drawn: random.Random) -> str:
    """A sentence that nobody asks about."""
    who, did, what, where, when = (drawn.choice(x) for x in (WHO, DID, WHAT, WHERE, WHEN))
    return f"The {who} {did} the {drawn.choice(COLOURS)} {what} at the {where} in the {when}."


def _names(drawn: random.Random, count: int) -> list[str]:
    """Different names of two words."""
    every = [f"{colour} {what}" for colour in COLOURS for what in WHAT]
    numbered = count > len(every)
    found = drawn.sample(every, min(count, len(every)))
    return [f"{found[x % len(found)]} {x}" for x in range(count)] if numbered else found


def _numbers(drawn: random.Random, count: int) -> list[str]:
    return [str(x) for x in drawn.sample(range(100_000, 1_000_000), count)]


def _single(drawn: random.Random, sentences: int) -> Made:
    (name,), (number,) = _names(drawn, 1), _numbers(drawn, 1)
    return Made((CODE.format(name, number),), ((ASKED.format(name), (number,)),))


def _keys(drawn: random.Random, sentences: int) -> Made:
    count = max(sentences // KEYS_EVERY, 2)
    names, numbers = _names(drawn, count), _numbers(drawn, count)
    wanted = drawn.randrange(count)
    hidden = tuple(map(CODE.format, names, numbers))
    return Made(hidden, ((ASKED.format(names[wanted]), (numbers[wanted],)),))


def _values(drawn: random.Random, sentences: int) -> Made:
    (name,), numbers = _names(drawn, 1), _numbers(drawn, VALUES)
    hidden = tuple(f"One of the secret numbers of the {name} is {x}." for x in numbers)
    return Made(hidden, ((f"What are all {VALUES} secret numbers of the {name}?", tuple(numbers)),))


def _variables(drawn: random.Random, sentences: int) -> Made:
    letters = drawn.sample([f"{x}{y}" for x in "ABCDEFGHJK" for y in "LMNPQRSTUV"], CHAIN * CHAINS)
    chains = [[f"V{x}" for x in letters[at : at + CHAIN]] for at in range(0, CHAIN * CHAINS, CHAIN)]
    numbers = _numbers(drawn, CHAINS)
    hidden: list[str] = []
    for step in range(CHAIN):  # a name gets its number before another gets it from there
        hidden += [
            f"Let {chain[step]} be {number if not step else chain[step - 1]}."
            for chain, number in zip(chains, numbers, strict=True)
        ]
    question = f"Which {CHAIN} names have the number {numbers[0]}, straight or by way of other names?"
    return Made(tuple(hidden), ((question, tuple(chains[0])),))


def _turns(drawn: random.Random, sentences: int) -> Made:
    names, numbers = _names(drawn, 2 * TURNS), _numbers(drawn, 2 * TURNS)
    hidden = tuple(map(CODE.format, names, numbers))
    return Made(hidden, tuple((ASKED.format(x), (y,)) for x, y in zip(names[::2], numbers[::2], strict=True)))


KINDS = {"single": _single, "keys": _keys, "values": _values, "variables": _variables, "turns": _turns}


def text_of(made: Made, drawn: random.Random, sentences: int) -> str:
    """About so many sentences, those that matter among them in their order, spread at random."""
    lines = [filler(drawn) for _ in range(max(sentences - len(made.hidden), 0))]
    places = sorted(drawn.randint(0, len(lines)) for _ in made.hidden)
    for place, line in reversed(list(zip(places, made.hidden, strict=True))):
        lines.insert(place, line)
    return "\n".join(lines)


@dataclass(frozen=True)
class MadeTask:
    """Questions that are made for a tokenizer: ``n`` in all, of each of ``kinds`` as many."""

    tokens: int
    n: int
    seed: int
    kinds: tuple[str, ...]
    max_new_tokens: int
    metric: Metric = field(default="score", init=False)
    server_args: tuple[str, ...] = field(default=(), init=False)

    @property
    def name(self) -> str:
        return f"made/{self.tokens}"

    def fingerprint(self) -> dict[str, Any]:
        return {"made": FORMAT, "tokens": self.tokens, "seed": self.seed, "max_new_tokens": self.max_new_tokens}

    def questions(self, tokenizer: Any) -> list[Question]:
        each = max(self.n // len(self.kinds), 1)
        return [question for kind in self.kinds for question in self._of_kind(kind, each, tokenizer)]

    def _of_kind(self, kind: str, count: int, tokenizer: Any) -> list[Question]:
        found: list[Question] = []
        text = 0
        while len(found) < count:
            found += self._of_text(kind, text, tokenizer)
            text += 1
        return found[:count]

    def _of_text(self, kind: str, text: int, tokenizer: Any) -> Iterator[Question]:
        drawn = random.Random(f"{FORMAT}/{self.seed}/{kind}/{text}")
        probe = "\n".join(filler(drawn) for _ in range(PROBED))
        room = self.tokens - len(tokenizer.encode(HEAD + TAIL)) - 32
        sentences = room * PROBED // len(tokenizer.encode(probe, add_special_tokens=False))
        made = KINDS[kind](drawn, sentences)
        said = HEAD + text_of(made, drawn, sentences)
        for turn, (question, answers) in enumerate(made.asked, 1):
            said += TAIL.format(question)
            ids = tuple(prompt_ids(tokenizer, said))
            name = f"{kind}/{text}/{turn}" if len(made.asked) > 1 else f"{kind}/{text}"
            yield Question(name, kind, ids, answers, max_new_tokens=REPLY_TOKENS)
            said += f" {', '.join(answers)}"

    def ask(self, question: Question, endpoint: Endpoint) -> Outcome:
        try:
            record = endpoint.generate(question.prompt_ids, question.limit(self.max_new_tokens))
        except RequestError as error:
            return Outcome(len(question.prompt_ids), score=0.0, error=str(error))
        return Outcome.of(record, text=record.text, score=all_found(record.text, question.answers))


def load(given: str, options: Options) -> MadeTask:
    """Questions of about ``given`` tokens. ``only`` and ``exclude`` choose kinds. Raises TaskFileError."""
    if not (given.isascii() and given.isdigit() and len(given) < 9 and LEAST_TOKENS <= int(given) <= MOST_TOKENS):
        raise TaskFileError(f"made={given}: give the tokens of a prompt, {LEAST_TOKENS} to {MOST_TOKENS:,}")
    kinds = chosen(options.only, options.exclude)
    return MadeTask(int(given), options.n or QUESTIONS, options.seed, kinds, options.max_new_tokens)


def chosen(only: Sequence[str] | None, exclude: Sequence[str]) -> tuple[str, ...]:
    """Kinds by name. Raises TaskFileError if none is left."""
    found = tuple(x for x in KINDS if x in (only or KINDS) and x not in exclude)
    if not found:
        raise TaskFileError(f"made: no kind is left of {', '.join(KINDS)}")
    return found
