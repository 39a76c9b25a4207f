"""Table blocks of rows: the launch against its reference, and what the host writes when."""

from __future__ import annotations

import pytest
import torch

from sglang_diffkv.kernels.set_blocks import reference
from sglang_diffkv.kernels.set_blocks.triton import PAIRS, prepare_set_blocks
from sglang_diffkv.mem_pool import table_space
from sglang_diffkv.mem_pool.integrity import check_integrity
from tests.kernels.triton_helpers import DEVICE, add_prompt, make_format, make_manager


@pytest.mark.parametrize("count", [1, 2, PAIRS - 1, PAIRS, PAIRS + 1, reference.FEW, reference.FEW + 1, 70])
def test_places_get_their_blocks_and_others_keep_theirs(count: int) -> None:
    got = torch.arange(70, dtype=torch.int32, device=DEVICE).view(7, 10)
    expected = got.clone()
    places = torch.randperm(70, generator=torch.Generator().manual_seed(count))[:count].tolist()
    blocks = [(1 << 20) + place for place in places]
    prepare_set_blocks(got)(places, blocks)
    reference.set_blocks(expected, places, blocks)
    assert torch.equal(got, expected) and int((got >= 1 << 20).sum()) == count


def test_blocks_that_rows_let_go_are_taken_off_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a row that takes such a block first has it at once."""
    written: list[dict[int, int]] = []
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4), pages=200, layers=2, heads=2)
    space, generator = manager.space, torch.Generator().manual_seed(1)
    write = space._write
    space._write = lambda at, blocks: (written.append(dict(zip(at, blocks, strict=True))), write(at, blocks))
    add_prompt(manager, 1, 45, generator)
    held = {block for of_tier in space.blocks[1] for block in of_tier}
    written.clear()
    manager.release(1)
    assert not written, "letting go needs no launch"
    add_prompt(manager, 2, 45, generator)
    assert set(written[0].values()) == held, "the blocks go to the next row"
    check_integrity(manager)
    manager.release(2)
    check_integrity(manager)
    assert manager.state.row_blocks[1:3].any(1).all(), "of nobody by now, and behind the rows' entries"
    assert not space.flush_allocates
    monkeypatch.setattr(table_space, "LEFT_AT_MOST", 2 * len(held) - 1)
    assert space.flush_allocates
    written.clear()
    with manager.launching():
        assert not manager.state.row_blocks.any() and len(written) == 1
    assert not space.flush_allocates
    check_integrity(manager)


def test_a_block_that_is_let_go_before_the_device_has_it_is_not_written() -> None:
    manager = make_manager(make_format("K8V4 K4V2", page_tokens=4), pages=200, layers=2, heads=2)
    space, generator = manager.space, torch.Generator().manual_seed(1)
    add_prompt(manager, 1, 45, generator)
    manager.release(1)
    kept = manager.state.row_blocks.clone()
    space.append(1, 20)
    space.release(1)
    space.flush()
    assert torch.equal(manager.state.row_blocks, kept)
    check_integrity(manager)
