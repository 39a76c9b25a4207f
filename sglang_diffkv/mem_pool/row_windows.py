"""Rows of requests that have a window of their own, larger or smaller than the server's policy has."""

from __future__ import annotations

from sglang_diffkv.layout.page_format import EMPTY
from sglang_diffkv.mem_pool.device import PageDevice
from sglang_diffkv.policies.base import Policy


class RowWindows:
    """Which rows have which window.

    Args:
        most: the largest that a row may have; 0: all have the policy's.

    Attributes:
        least: the smallest that a row may have. allowed: whether any may have one of its own. ragged: whether a
            prompt's tail may begin a page of its own since some window is no whole number of pages.
    """

    def __init__(self, device: PageDevice, policy: Policy, most: int):
        self.device, self.policy, self.most = device, policy, most
        self.least = policy.least_window or 0
        self.allowed = most > 0 and policy.least_window is not None and policy.compresses
        self.ragged = False
        self._windows: dict[int, int] = {}
        if self.allowed:
            device.ops.decisions.allow_windows()

    def __contains__(self, row: int) -> bool:
        return row in self._windows

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def known(self) -> range:
        """Windows that a row may have of its own."""
        return range(self.least, self.most + 1) if self.allowed else range(0)

    def window_of(self, row: int) -> int:
        """Newest tokens of a row's request that always stay in the high tier."""
        return self._windows.get(row, self.policy.window)

    def policy_of(self, row: int) -> Policy:
        """By which a row's tokens are compacted."""
        return self.policy.with_window(self._windows[row]) if row in self._windows else self.policy

    def expect(self, window: int) -> None:
        """A request with such a window has come, and waits for its row."""
        assert window in self.known, f"no row may have a window of {window}"
        self.ragged = self.ragged or window % self.device.fmt.high.tokens > 0

    def keep(self, row: int, window: int) -> None:
        """The row's request has such a window, until the row is released. Behind all that is launched."""
        if self._windows.get(row) != window:
            self.expect(window)
            self._windows[row] = window
            self._mark(row, window)

    def forget(self, row: int) -> None:
        """The row is released, or its request does not run."""
        if row in self._windows:
            del self._windows[row]
            self._mark(row, EMPTY)

    def forget_all(self) -> None:
        """All rows have the policy's window, and no request waits for another."""
        for row in sorted(self._windows):
            self.forget(row)
        self.ragged = False

    def _mark(self, row: int, window: int) -> None:
        with self.device.launching():
            self.device.state.row_window[row] = window

    def digest(self) -> list[tuple[int, int]]:
        """What ranks have to agree on."""
        return sorted(self._windows.items())

    def check_integrity(self) -> None:
        """Raise AssertionError unless the device knows the same rows, with the same windows, none out of bounds."""
        found = self.device.state.row_window
        rows = (found != EMPTY).nonzero().flatten()
        marked = list(zip(rows.tolist(), found[rows].tolist(), strict=True))
        assert marked == self.digest(), f"rows have the windows {marked} on the device, {self.digest()} on the host"
        assert all(self.least <= window <= self.most for window in self._windows.values()), "a window is out of bounds"
