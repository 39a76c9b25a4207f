"""What the host knows of the rows that requests have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class RequestRow:
    """A request's row.

    Attributes:
        length: tokens of its sequence that are stored or pruned. shared: of these, the first that segments hold for it.
        unverified: tokens that it takes beside them at most, of verifications whose results the host has yet to see.
        frozen: of these, the first that lie in pages which it may not write any more, where it was frozen.
        in_prompt: its prompt may still be compacted. as_computed: every token is there in all heads, since nothing
            was compacted. hollow: none of its tokens is stored.
    """

    length: int = 0
    unverified: int = 0
    shared: int = 0
    frozen: int | None = None
    in_prompt: bool = False
    as_computed: bool = False
    hollow: bool = False

    @property
    def closed(self) -> int:
        """Of its tokens, the first that lie in pages which it may not write any more."""
        return max(self.shared, self.frozen or 0)


class RequestRows:
    """The rows that hold something, in the order in which they began to; their numbers are SGLang's."""

    def __init__(self) -> None:
        self._rows: dict[int, RequestRow] = {}
        self._looked_at = 0  # tokens that the verification adds at most whose results are being looked at

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._rows))

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, row: int) -> RequestRow:
        """What is known of a row that holds something."""
        return self._rows[row]

    def length(self, row: int) -> int:
        """Tokens of a row; 0 for one that holds nothing."""
        return self._rows[row].length if row in self._rows else 0

    def shared(self, row: int) -> int:
        """Tokens that segments hold for a row."""
        return self._rows[row].shared if row in self._rows else 0

    def closed(self, row: int) -> int:
        """Tokens of a row in pages that it may not write any more."""
        return self._rows[row].closed if row in self._rows else 0

    def frozen(self, row: int) -> int | None:
        """Where a row was frozen last; None if it was not."""
        return self._rows[row].frozen if row in self._rows else None

    def in_prompt(self, row: int) -> bool:
        """Whether a row's prompt may still be compacted."""
        return row in self._rows and self._rows[row].in_prompt

    def as_computed(self, row: int) -> bool:
        """Whether all heads of a row hold all of its tokens, whatever the policy drops."""
        return row not in self._rows or self._rows[row].as_computed

    def lengths(self) -> dict[int, int]:
        """Tokens of each row."""
        return {row: known.length for row, known in self._rows.items()}

    def grow(self, row: int, count: int, *, in_prompt: bool) -> None:
        """``count`` tokens more; ``in_prompt`` if they are a prompt's."""
        known = self._rows.setdefault(row, RequestRow(as_computed=in_prompt))
        known.length += count
        known.in_prompt = known.in_prompt or in_prompt

    def most(self, row: int) -> int:
        """Tokens that the device has of a row at most."""
        return self._rows[row].length + self._rows[row].unverified if row in self._rows else 0

    def verify(self, row: int, drafts: int) -> None:
        """The planned pass adds those of ``drafts`` tokens that it accepts."""
        self._rows[row].unverified += drafts

    @contextmanager
    def looking_at(self, drafts: int) -> Iterator[None]:
        """Inside, SGLang looks at the results of a verification that adds up to ``drafts`` tokens to each of its rows;
        0 for those of another pass."""
        self._looked_at = drafts
        try:
            yield
        finally:
            self._looked_at = 0

    def up_to_date(self, row: int) -> bool:
        """Whether the device has no more of the row than the host knows by the results that it has seen or is looking
        at. A verification that is planned already may add tokens."""
        return row not in self._rows or self._rows[row].unverified == self._looked_at

    def accepted(self, row: int, length: int, drafts: int = 0) -> None:
        """The row has ``length`` tokens, and the result of a verification of ``drafts`` is known."""
        known = self._rows[row]
        known.length = length
        known.unverified = max(known.unverified - drafts, 0)

    def attach(self, row: int, end: int, *, as_computed: bool = False) -> None:
        """A row that holds shared pages only, now up to position ``end``; its prompt begins behind them."""
        self._rows[row] = RequestRow(length=end, shared=end, in_prompt=True, as_computed=as_computed)

    def restore(self, row: int, length: int, frozen: int | None, shared: int = 0) -> None:
        """A row past its prompt, which another server has computed: all its pages are its own alone, but those of its
        first ``shared`` tokens, which segments hold."""
        self._rows[row] = RequestRow(length=length, frozen=frozen, shared=shared)

    def restore_nothing(self, row: int, length: int) -> None:
        """A row past its prompt, of which nothing is stored."""
        self._rows[row] = RequestRow(length=length, hollow=True)

    def hollow(self, row: int) -> bool:
        """Whether a row that counts tokens has none of its prompt's."""
        return row in self._rows and self._rows[row].hollow

    def share(self, row: int, end: int) -> None:
        """Segments hold the row's first ``end`` tokens."""
        self._rows[row].shared = end

    def freeze(self, row: int, tail: int = 0) -> None:
        """All but the row's last ``tail`` tokens lie in pages that it may not write any more."""
        self._rows[row].frozen = self._rows[row].length - tail

    def unseal(self, row: int) -> None:
        """The row's tokens are in pages of its own, which it may write."""
        self._rows[row].frozen = None

    def compacted(self, row: int) -> None:
        """The row's prompt so far is compacted."""
        self._rows[row].as_computed = False

    def end_prompt(self, row: int) -> None:
        """The row's prompt is compacted, or is to stay as it is."""
        self._rows[row].in_prompt = self._rows[row].as_computed = False

    def drop(self, row: int) -> None:
        """The row holds nothing any more."""
        self._rows.pop(row, None)

    def digest(self) -> list[tuple[int, int, int, int | None]]:
        """All that ranks have to agree on."""
        return [(row, x.length, x.shared, x.frozen) for row, x in self._rows.items()]
