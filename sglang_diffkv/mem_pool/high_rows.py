"""Rows of requests whose tokens all stay in the high tier, whatever the server's policy makes of others."""

from __future__ import annotations

import torch

from sglang_diffkv.mem_pool.device import PageDevice
from sglang_diffkv.policies.uniform import UniformPolicy

KEEPS_ALL = UniformPolicy()
"""By which their prompts are compacted: only what leaves a sliding layer's window goes."""


class HighRows:
    """Which rows keep all.

    Attributes:
        allowed: whether any may.
    """

    def __init__(self, device: PageDevice, *, allowed: bool):
        self.device, self.allowed = device, allowed
        self._rows: set[int] = set()
        if allowed:
            device.ops.decisions.spare_rows(device.state)

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def keep(self, row: int) -> None:
        """The row's request keeps all, until the row is released. Behind all that is launched."""
        assert self.allowed, "this server compresses every request"
        if row not in self._rows:
            self._rows.add(row)
            self._mark(row, -1)

    def forget(self, row: int) -> None:
        """The row is released, or its request does not run."""
        if row in self._rows:
            self._rows.remove(row)
            self._mark(row, 1)

    def forget_all(self) -> None:
        """No row keeps all."""
        for row in sorted(self._rows):
            self.forget(row)

    def _mark(self, row: int, sign: int) -> None:
        with self.device.launching():
            self.device.state.row_sign[row] = sign

    def digest(self) -> list[int]:
        """What ranks have to agree on."""
        return sorted(self._rows)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the device knows the same rows, and these have no token in a lower tier."""
        state = self.device.state
        marked = (state.row_sign < 0).nonzero().flatten().tolist()
        assert marked == self.digest(), f"rows {marked} keep all on the device, {self.digest()} on the host"
        assert bool(torch.all(state.row_sign.abs() == 1)), "a row's sign is none"
        if marked:
            assert not state.own_tokens[marked][..., 1:].any(), "a token of a row that keeps all went down"
