"""For a server with the placeholder of ``sgl_kernel``: names of CPU operators that SGLang 0.5.21 looks up when it
imports its processor of Qwen's vision models, for other models. They compute nothing."""

import torch

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    if not hasattr(torch.ops.sgl_kernel, _name):
        _library.define(f"{_name}(Tensor x) -> Tensor")
