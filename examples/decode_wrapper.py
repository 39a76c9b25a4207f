"""Compressed attention without SGLang: a prompt, then decode steps, beside exact attention over all tokens.

python examples/decode_wrapper.py                       # on a GPU
TRITON_INTERPRET=1 python examples/decode_wrapper.py    # without one, slowly
"""

from __future__ import annotations

import os

import torch

from sglang_diffkv.attention.wrappers import DecodeWrapper, ExtendWrapper
from sglang_diffkv.layout.page_format import PageFormat, Tier
from sglang_diffkv.layout.state import PageState
from sglang_diffkv.mem_pool.table_space import TableSpace
from sglang_diffkv.ops import Scaling
from sglang_diffkv.ops.triton import TritonOps
from sglang_diffkv.policies.diffkv import DiffKVPolicyConfig

ROW, LAYERS, HEADS, Q_HEADS, DIM = 1, 1, 2, 8, 64
SCALE = DIM**-0.5


def exact(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """q [Hq, D] over key, value [n, H, D], in float32."""
    k, v = (x.float().repeat_interleave(Q_HEADS // HEADS, 1) for x in (key, value))
    prob = torch.einsum("hd,nhd->hn", q.float(), k).mul(SCALE).softmax(1)
    return torch.einsum("hn,nhd->hd", prob, v)


def main() -> None:
    torch.manual_seed(0)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    device, prompt, steps = ("cpu", 48, 6) if interpreted else ("cuda", 2000, 100)
    fmt = PageFormat(DIM, DIM, (Tier.parse("K8V4"), Tier.parse("K4V2")), page_tokens=16)
    state = PageState.create(
        fmt, num_pages=600, num_rows=4, num_layers=LAYERS, num_heads=HEADS, max_blocks=40, num_blocks=80, device=device
    )
    space, policy = TableSpace(state), DiffKVPolicyConfig(alpha_high=1.0, alpha_low=0.02, window=16).build()
    key, value, q = (torch.randn(prompt + steps, n, DIM, device=device).bfloat16() for n in (HEADS, HEADS, Q_HEADS))

    ops = TritonOps(state, policy, Q_HEADS, max_tokens=prompt + steps)
    row, scaling = torch.tensor([ROW], device=device), Scaling(SCALE)
    extend = ExtendWrapper(ops)
    space.append(ROW, prompt)
    space.flush()
    extend.plan(row, torch.zeros_like(row), torch.full_like(row, prompt), [0], [prompt])
    extend.begin()
    extend.run(0, q[:prompt], key[:prompt], value[:prompt], scaling)
    extend.end_prompt(ROW, prompt)

    decode = DecodeWrapper(ops)
    for length in range(prompt + 1, prompt + steps + 1):
        space.append(ROW, 1)
        space.flush()
        decode.plan(row, torch.full_like(row, length))
        decode.begin()
        at = slice(length - 1, length)
        out = decode.run(0, q[at], key[at], value[at], scaling)
        decode.end()
    reference = exact(q[-1], key, value)
    error = (out[0].float() - reference).norm() / reference.norm()
    high, low = state.own_tokens[ROW, 0].sum(0).tolist()
    pages = int(state.entries[ROW].sum())
    print(f"{HEADS} heads hold {high} tokens in {fmt.high.tier.name} and {low} in {fmt.low.tier.name}")
    print(f"{pages * fmt.page_bytes} bytes, {HEADS * (prompt + steps) * fmt.bf16_token_bytes} in bf16")
    print(f"relative error of the last output: {float(error):.3f}")


if __name__ == "__main__":
    main()
