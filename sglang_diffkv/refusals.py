"""What is wrong with fields of a configuration or a calibration, in words: the field, what was given, what is allowed,
the nearest name that there is, and the page that has more."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError
from pydantic.fields import FieldInfo

from sglang_diffkv.errors import ConfigError
from sglang_diffkv.files import quoted, shown

MOST_LINES, MOST_JUDGED = 5, 100
PAGE = "docs/configuration.md"
METHODS = f"{PAGE}#methods"
NOT_MISTAKES = ("default_factory_not_called",)
"""What pydantic adds for fields whose default depends on one with a mistake."""


@dataclass(frozen=True)
class Kind:
    """A field's type without its wrappers: what can stand there, and the limits that go with it."""

    choices: tuple[Any, ...]
    limits: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, Kind] = field(default_factory=dict)
    """Of a union whose members are told apart by a tag."""
    nothing: bool = False
    """Whether null can stand there too."""

    @classmethod
    def of(cls, annotation: Any, metadata: Sequence[Any] = ()) -> Kind:
        limits = _limits(metadata)
        if get_origin(annotation) is Annotated:
            inner, *more = get_args(annotation)
            return cls.of(inner, [*more, *metadata])
        if get_origin(annotation) not in (Union, UnionType):
            return cls((annotation,), limits)
        choices: list[Any] = []
        tags: dict[str, Kind] = {}
        nothing = False
        for member in get_args(annotation):
            if member is type(None):
                nothing = True
                continue
            tag = next((x.tag for x in get_args(member)[1:] if isinstance(x, Tag)), None)
            inner = cls.of(member, [x for x in metadata if not isinstance(x, Tag)])
            choices += inner.choices
            limits |= inner.limits
            tags |= inner.tags
            nothing |= inner.nothing
            for choice in inner.choices:
                if tag is None and isinstance(choice, type) and issubclass(choice, BaseModel):
                    tag = choice.model_fields["name"].default if "name" in choice.model_fields else None
                if tag is not None:
                    tags[str(tag)] = cls((choice,), inner.limits)
                    tag = None
        return cls(tuple(choices), limits, tags, nothing)

    @property
    def model(self) -> type[BaseModel] | None:
        """If it is an object with fields."""
        only = self.choices[0] if len(self.choices) == 1 else None
        return only if isinstance(only, type) and issubclass(only, BaseModel) else None

    @property
    def item(self) -> Kind | None:
        """Of a list."""
        only = self.choices[0] if len(self.choices) == 1 else None
        return Kind.of(get_args(only)[0]) if get_origin(only) in (tuple, list) and get_args(only) else None

    def describe(self) -> str:
        """What is allowed."""
        return self._plain() + ", or null" * self.nothing

    def _plain(self) -> str:
        if self.tags and not any(x.model for x in self.tags.values()):
            return " or ".join(x.describe() for x in self.tags.values())
        if self.tags:
            names = ", ".join(shown(x) for x in self.tags)
            return f"an object with the field name, one of {names}" if "diffkv" in self.tags else "an object"
        first = self.choices[0]
        if get_origin(first) is Literal:
            return _one_of([shown(x) for x in get_args(first)])
        if first is bool:
            return "true or false"
        if first in (int, float):
            return ("a whole number" if first is int else "a number") + self._range(first)
        if first is str:
            return "a text" + self._size("character")
        if (item := self.item) is not None:
            return f"a list{self._size('element')}, each {item.describe()}"
        return "an object" if self.model is not None or get_origin(first) is dict else "a value of another type"

    def _range(self, kind: type) -> str:
        low, high = self.limits.get("ge", self.limits.get("gt")), self.limits.get("le")
        if low is None or high is None:
            return ""
        least, most = (f"{x:,}" if kind is int else f"{x:g}" for x in (low, high))
        return f" above {least} and at most {most}" if "gt" in self.limits else f" from {least} to {most}"

    def _size(self, unit: str) -> str:
        low, high = self.limits.get("min_length"), self.limits.get("max_length")
        if high is None:
            return ""
        return f" of {low or 0} to {high:,} {unit}s"


def _limits(metadata: Sequence[Any]) -> dict[str, Any]:
    """Bounds among what stands beside a type."""
    found: dict[str, Any] = {}
    for x in metadata:
        if isinstance(x, FieldInfo):
            found |= _limits(x.metadata)
        for name in ("ge", "gt", "le", "min_length", "max_length"):
            if isinstance(value := getattr(x, name, None), (int, float)):
                found[name] = value
    return found


@cache
def kind_of(model: type[BaseModel], name: str) -> Kind:
    """Of a field."""
    info = model.model_fields[name]
    return Kind.of(info.annotation, info.metadata)


def _one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


@dataclass(frozen=True)
class Place:
    """Where a mistake is: its path for people, what may stand there, and the object that it is a field of."""

    path: str
    kind: Kind | None
    owner: type[BaseModel] | None
    name: str = ""

    @classmethod
    def of(cls, model: type[BaseModel], loc: Sequence[str | int], *, quote: bool) -> Place:
        path, kind, owner, name = "", Kind((model,)), None, ""
        found: Kind | None = kind
        for part in loc:
            if isinstance(part, int):
                path += f"[{part}]"
                found, owner = found.item if found else None, None
            elif found is not None and part in found.tags:
                found = found.tags[part]
            else:
                owner, name = (found.model if found else None), part
                known = owner is not None and name in owner.model_fields
                path += ("." if path else "") + (name if known else quoted(name) if quote else "*")
                found = kind_of(owner, name) if owner is not None and known else None
        return cls(path, found, owner, name)

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def allowed(self) -> str:
        """And what the field is."""
        known = self.owner is not None and self.name in self.owner.model_fields
        described = self.owner.model_fields[self.name].description if self.owner and known else None
        what = self.kind.describe() if self.kind else "a value"
        return what + (f" ({described})" if described else "")


def explain(
    error: ValidationError, model: type[BaseModel], subject: str, *, quote: bool = True, page: str = PAGE
) -> str:
    """What is wrong with a ``model``, of which ``subject`` names the source: a line for each mistake, one line if there
    is one. Without ``quote`` nothing that was given is repeated."""
    lines = mistakes(error, model, quote=quote)
    if page == PAGE and all(x["loc"][:1] == ("policy",) for x in _problems(error)):
        page = METHODS
    if len(lines) == 1:
        return f"{subject}: {lines[0]} (see {page})"
    more = len(lines) - MOST_LINES
    rest = [f"and {more:,} more"] if more > 0 else []
    return "\n  ".join([f"{subject}: {len(lines):,} mistakes (see {page}):", *lines[:MOST_LINES], *rest])


def _problems(error: ValidationError) -> list[Any]:
    """What is wrong, without what only follows from it: a list ends at its first mistake, and is too short then."""
    found = [x for x in error.errors(include_url=False) if x["type"] not in NOT_MISTAKES]
    within = {x["loc"][:depth] for x in found for depth in range(len(x["loc"]))}
    return [x for x in found if x["type"] != "too_short" or x["loc"] not in within]


def mistakes(error: ValidationError, model: type[BaseModel], *, quote: bool = True) -> list[str]:
    """A line for each."""
    found = _problems(error)
    return list(dict.fromkeys(_line(x, model, quote=quote) for x in found[:MOST_JUDGED]))


def _line(problem: Any, model: type[BaseModel], *, quote: bool) -> str:
    place, kind, given = Place.of(model, problem["loc"], quote=quote), problem["type"], problem["input"]
    if kind == "extra_forbidden":
        return _unknown(place, model, quote=quote)
    if kind == "missing":
        return f"{place.path} is missing: {place.allowed}"
    if kind.startswith("union_tag"):
        inner = f"{place.path}.name" if place.path else "name"
        tags = list(place.kind.tags) if place.kind else []
        if kind == "union_tag_not_found":
            return f"{inner} is missing: {_one_of([shown(x) for x in tags])}"
        name = problem["ctx"]["tag"]
        return f"{inner} is {shown(name) if quote else 'unknown'}: {allowed_names(tags, name)}"
    if kind == "value_error":
        raised = problem["ctx"]["error"]
        if quote or isinstance(raised, ConfigError) or not isinstance(given, (str, list, tuple)):
            text = str(raised)
            return text if not place.path or text.startswith(place.path) else f"{place.path}: {text}"
    what = place.path or "the whole"
    was = f"{what} is {shown(given)}" if quote else f"{what} has a value that it cannot have"
    if place.kind is None:
        return was
    if get_origin(place.kind.choices[0]) is Literal and isinstance(given, str):
        return f"{was}: {allowed_names(get_args(place.kind.choices[0]), given)}"
    return f"{was}: allowed is {place.allowed}"


def allowed_names(names: Sequence[str], given: str) -> str:
    """Which names are allowed, and the nearest one to what was given."""
    return f"allowed is {_one_of([shown(x) for x in names])}" + did_you_mean(
        given, [str(x) for x in names], as_text=True
    )


def did_you_mean(given: str, names: Sequence[str], *, as_text: bool = False) -> str:
    """``did you mean``, if a name is near."""
    near = difflib.get_close_matches(given.lower()[:100], list(names), n=1, cutoff=0.6)
    return f"; did you mean {quoted(near[0]) if as_text else near[0]}?" if near else ""


def _unknown(place: Place, model: type[BaseModel], *, quote: bool) -> str:
    own = [] if place.owner is None else list(place.owner.model_fields)
    elsewhere = "" if place.name in own else _elsewhere(place, model)
    what = f"unknown field {shown(place.name)}" if quote else "unknown field"
    where = f" in {place.parent}" if place.parent else ""
    meant = elsewhere or did_you_mean(place.name, own)
    return f"{what}{where}{meant}{'' if meant else ':'} allowed are {', '.join(own)}"


def _elsewhere(place: Place, model: type[BaseModel]) -> str:
    """A field of this name beside the object or in one of its own."""
    for path, name in _fields(model):
        if name == place.name and path != place.parent:
            return f"; did you mean {f'{path}.{name}' if path else f'{name} beside {place.parent}'}?"
    return ""


def _fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, str]]:
    for name in model.model_fields:
        yield path, name
        for choice in kind_of(model, name).choices:
            if isinstance(choice, type) and issubclass(choice, BaseModel):
                yield from _fields(choice, f"{path}.{name}" if path else name)
