"""Between a request's end and that of the step which was launched before anyone knew, the next prompt does not wait."""

from __future__ import annotations

import pytest

from sglang_diffkv.mem_pool.integrity import check_integrity
from tests.helpers import begin_step, make_format, make_manager


@pytest.mark.parametrize("works", [False, True])
def test_counts_are_settled_when_the_last_step_s_results_are_out(monkeypatch, works):
    """Until then the bound leaves out what is not known to be free; while the device is at it nobody asks for more."""
    manager = make_manager(make_format(), layers=1)
    counts, total, asked = manager.counts, manager.geometry.num_pages, []
    take = counts.take_snapshot
    monkeypatch.setattr(manager.device, "works", lambda: works)
    begin_step(manager, [1], [40], [0])
    counts.report()
    begin_step(manager, [1], [1], [40])  # the request has ended, as will be known
    manager.release(1)
    monkeypatch.setattr(counts, "take_snapshot", lambda **more: asked.append(1) or take(**more))
    assert counts.overtakes == works
    assert (counts.free_bound() == total) == (not works) and len(asked) == (not works)
    counts.report()  # its results
    assert not counts.overtakes and counts.free_bound() == total
    check_integrity(manager)
