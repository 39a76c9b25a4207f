"""What the tests' interpreter leaves out changes no result."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.paths import REPOSITORY

PROGRAM = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton.language as tl
from sglang_diffkv.kernels.compact_prompt.triton import PromptWorkspace, compact_prompts
from sglang_diffkv.ops.decisions import Decisions
from tests.kernels.triton_helpers import add_prompt, clone_state, make_format, make_manager
from tests.policies import diffkv_policy
from tests.quick_interpreter import quick

manager = make_manager(make_format("K6V3 K4V2", 96))
add_prompt(manager, 1, 40, torch.Generator().manual_seed(1), compact=False)
state = manager.state
cuts = Decisions().of_row(state, 1, 0, diffkv_policy(1.0, 0.2, window=8))
language = [(owner, name, getattr(owner, name)) for owner in (tl, tl.core) for name in ("load", "where", "reduce")]


def run():
    fresh = clone_state(state)
    compact_prompts(fresh, torch.tensor([1]), torch.tensor([40]), PromptWorkspace.create(fresh), cuts)
    return bytes_of(fresh)


def bytes_of(state):
    tensors = state.pages, state.page_table, state.entries
    return torch.cat([x.contiguous().view(torch.uint8).flatten() for x in tensors])


def as_before():
    return all(getattr(owner, name) is value for owner, name, value in language)


with quick() as names:
    quickly, once_more = run(), run()
assert names == [
    "_patch_lang", "_patch_attr", "_get_np_dtype", "broadcast_impl_value", "binary_op_type_checking_impl",
    "binary_op_sanitize_overflow_impl", "__init__", "with_element_ty", "__init__",
], names
assert as_before(), "a launch has left the language wrapped"
plain = run()
assert not torch.equal(plain, bytes_of(state)), "nothing was compacted"
assert torch.equal(plain, quickly) and torch.equal(plain, once_more)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")
def test_the_interpreter_gives_the_same_bytes():
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
