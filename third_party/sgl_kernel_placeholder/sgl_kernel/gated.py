"""What SGLang's Qwen3.5 finds under ``torch.ops.sgl_kernel`` on a CPU, in plain PyTorch: gates, norms of queries and
keys, and a projection taken apart. Importing this registers the operators."""

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """x [tokens, ...] times its gate, in place."""
    x.mul_(gate.reshape(x.shape).float().sigmoid().to(x.dtype))


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, head_dim: int) -> torch.Tensor:
    """[tokens * heads, head_dim], normalised as Gemma does: by 1 + weight."""
    x = x.reshape(-1, head_dim).float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + weight.float())


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, head_dim: int
) -> Pair:
    """Queries and keys by head, normalised."""
    return _norm(q, q_weight, eps, head_dim).to(q.dtype), _norm(k, k_weight, eps, head_dim).to(k.dtype)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same where each query head stands before its gate: queries, keys, gates."""
    q, gate = q_gate.reshape(-1, num_heads, 2 * head_dim).chunk(2, -1)
    return (*fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate.reshape(-1, head_dim).clone())


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, k_heads: int, v_heads: int, k_dim: int, v_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of [tokens, q | k | v | z] and [tokens, b | a]: q | k | v, z by head, b and a."""
    qkv, z = qkvz.split([2 * k_heads * k_dim + v_heads * v_dim, v_heads * v_dim], -1)
    b, a = ba.split(v_heads, -1)
    return qkv.clone(), z.reshape(-1, v_heads, v_dim).clone(), b.clone(), a.clone()


_NORMS = "Tensor q_weight, Tensor k_weight, float eps, int head_dim"
_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_LIBRARY.define("fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()")
_LIBRARY.define(f"fused_qk_gemma_rmsnorm_cpu(Tensor q, Tensor k, {_NORMS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, {_NORMS}, int num_heads) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor qkvz, Tensor ba, int k_heads, int v_heads, int k_dim, "
    "int v_dim) -> (Tensor, Tensor, Tensor, Tensor)"
)
for _operator in (
    fused_sigmoid_mul_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
):
    _LIBRARY.impl(_operator.__name__, _operator, "CPU")
