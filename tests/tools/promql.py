"""Reads PromQL, as far as dashboards and alert rules of servers use it: which metrics an expression names, and whether
ranges stand where functions want them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

OVER_RANGES = {"rate", "irate", "increase", "delta", "deriv", "changes", "resets", "avg_over_time", "sum_over_time"}
OVER_RANGES |= {"min_over_time", "max_over_time", "count_over_time", "last_over_time"}
OF_VECTORS = {"abs", "ceil", "floor", "sort", "absent", "clamp_min", "clamp_max", "histogram_quantile", "label_replace"}
OF_NUMBERS = {"vector", "time"}
AGGREGATIONS = {"sum", "avg", "min", "max", "count", "topk", "bottomk", "quantile"}
OPERATORS = [{"or"}, {"and", "unless"}, {"==", "!=", "<=", "<", ">=", ">"}, {"+", "-"}, {"*", "/", "%"}, {"^"}]
"""By precedence, those that bind least first."""
TOKEN = re.compile(
    r"""\s*(?:(?P<duration>(?:\d+(?:ms|[smhdwy]))+|\$__(?:rate_)?interval)\b|(?P<number>\d+(?:\.\d+)?)|"""
    r"""(?P<name>[a-zA-Z_:][\w:]*)|(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|"""
    r"""(?P<sign>=~|!~|==|!=|<=|>=|[-+*/%^<>=(){}\[\],:@]))"""
)
NUMBER, VECTOR, RANGE, STRING = "number", "vector", "range", "string"


class PromQLError(ValueError):
    """The expression is none; the message says what is wrong."""


@dataclass
class Expression:
    """What an expression names: ``selectors`` are metrics with their matchers (label, operator, value), and
    ``labels`` are those by which it groups and matches."""

    text: str
    selectors: list[tuple[str, list[tuple[str, str, str]]]] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._tokens = list(_tokens(self.text))
        kind = self._binary(0)
        if self._tokens:
            raise PromQLError(f"{self._tokens[0][1]!r} is left over")
        if kind not in (NUMBER, VECTOR):
            raise PromQLError(f"the whole is a {kind}")

    @property
    def metrics(self) -> set[str]:
        return {name for name, _ in self.selectors}

    def _next(self, *wanted: str) -> str:
        if not self._tokens or (wanted and self._tokens[0][1] not in wanted):
            found = self._tokens[0][1] if self._tokens else "the end"
            raise PromQLError(f"{found!r} where one of {wanted} belongs")
        return self._tokens.pop(0)[1]

    def _is(self, *texts: str) -> bool:
        return bool(self._tokens) and self._tokens[0][1] in texts

    def _kind(self) -> str:
        return self._tokens[0][0] if self._tokens else "end"

    def _binary(self, level: int) -> str:
        if level == len(OPERATORS):
            return self._unary()
        kind = self._binary(level + 1)
        while self._is(*OPERATORS[level]):
            operator = self._next()
            if self._is("bool"):
                self._next()
            if self._is("on", "ignoring"):
                self._next()
                self._labels()
                if self._is("group_left", "group_right"):
                    self._next()
                    self._labels(optional=True)
            other = self._binary(level + 1)
            if {kind, other} - {NUMBER, VECTOR}:
                raise PromQLError(f"{operator} of a {kind} and a {other}")
            if operator in ("and", "or", "unless") and NUMBER in (kind, other):
                raise PromQLError(f"{operator} of a number")
            kind = VECTOR if VECTOR in (kind, other) else NUMBER
        return kind

    def _unary(self) -> str:
        while self._is("-", "+"):
            self._next()
        return self._changed(self._primary())

    def _changed(self, kind: str) -> str:
        """With a range and an offset behind it."""
        if self._is("["):
            self._next()
            self._duration()
            if self._is(":"):
                self._next()
                if not self._is("]"):
                    self._duration()
            self._next("]")
            if kind != VECTOR:
                raise PromQLError(f"a range of a {kind}")
            kind = RANGE
        if self._is("offset"):
            self._next()
            self._duration()
        return kind

    def _duration(self) -> None:
        if self._kind() != "duration":
            raise PromQLError("a range without a duration")
        self._next()

    def _primary(self) -> str:
        if self._kind() in (NUMBER, STRING):
            kind = self._kind()
            self._next()
            return kind
        if self._is("("):
            self._next()
            kind = self._binary(0)
            self._next(")")
            return kind
        if self._kind() != "name":
            raise PromQLError(f"{self._next()!r} begins nothing")
        name = self._next()
        if name in AGGREGATIONS:
            return self._aggregation(name)
        if self._is("("):
            return self._call(name)
        self.selectors.append((name, self._matchers()))
        return VECTOR

    def _aggregation(self, name: str) -> str:
        self._by()
        kinds = self._arguments()
        self._by()
        if kinds[-1:] != [VECTOR] or len(kinds) != 1 + (name in ("topk", "bottomk", "quantile")):
            raise PromQLError(f"{name} of {kinds}")
        return VECTOR

    def _by(self) -> None:
        if self._is("by", "without"):
            self._next()
            self._labels()

    def _call(self, name: str) -> str:
        kinds = self._arguments()
        if name in OVER_RANGES:
            wanted = [RANGE]
        elif name in OF_NUMBERS:
            return VECTOR if name == "vector" else NUMBER
        elif name in OF_VECTORS:
            wanted = [VECTOR]
        else:
            raise PromQLError(f"{name} is no function that is known here")
        if [kind for kind in kinds if kind in (VECTOR, RANGE)] != wanted:
            raise PromQLError(f"{name} of {kinds}")
        return VECTOR

    def _arguments(self) -> list[str]:
        self._next("(")
        kinds: list[str] = []
        while not self._is(")"):
            kinds.append(self._binary(0))
            if not self._is(")"):
                self._next(",")
        self._next(")")
        return kinds

    def _labels(self, optional: bool = False) -> None:
        if optional and not self._is("("):
            return
        self._next("(")
        while not self._is(")"):
            if self._kind() != "name":
                raise PromQLError("a label that is no name")
            self.labels.add(self._next())
            if not self._is(")"):
                self._next(",")
        self._next(")")

    def _matchers(self) -> list[tuple[str, str, str]]:
        found: list[tuple[str, str, str]] = []
        if self._is("{"):
            self._next()
            while not self._is("}"):
                label, operator = self._next(), self._next("=", "!=", "=~", "!~")
                if self._kind() != STRING:
                    raise PromQLError(f"{label} is compared with no string")
                value = self._next()[1:-1]
                if operator in ("=~", "!~"):
                    re.compile(re.sub(r"\$\w+", "x", value))
                found.append((label, operator, value))
                if not self._is("}"):
                    self._next(",")
            self._next("}")
        return found


def _tokens(text: str) -> list[tuple[str, str]]:
    found, at = [], 0
    text = text.rstrip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise PromQLError(f"{text[at : at + 20]!r} is no word of PromQL")
        assert match.lastgroup is not None
        found.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return found
