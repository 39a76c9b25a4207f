#!/usr/bin/env bash
# Triton's interpreter stores about one in forty numbers as half of what they are when it casts to FP8 (e4m3).
#
# Seen 2026-11-28 with triton 3.7.1 and torch 2.13.0, on a CPU (TRITON_INTERPRET=1). Known at triton-lang/triton#9808.
#
# Expected: `x.to(tl.float8e4nv)` gives the e4m3 number nearest to x, as torch's `x.to(torch.float8_e4m3fn)` does. The
#   error is half a step at most, 1/16 of a normal number.
# Happens: where rounding up overflows the mantissa and the exponent is odd, the carry is lost: 1.97 becomes 1.0, 7.8
#   becomes 4.0. Of normally distributed numbers 2 to 3% become half of what they are; the others are right, so the mean
#   error of all rises by half only. Numbers below 2**-6, which e4m3 holds as subnormals, come out too small.
# Why it matters: kernels of FP8 KV caches are tested in the interpreter where there is no GPU. There a right kernel
#   fails against a reference, or a tolerance that lets it pass hides real faults. And a loss of quality that was
#   measured that way is not a GPU's. Cast with torch outside of the kernel, or compare with what the interpreter gives.
#
# Exit status 0: as described. 1: it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet install torch==2.13.0 numpy==2.4.6 triton==3.7.1
cat > "$folder/check.py" <<'PYTHON'
import sys

import torch
import triton
import triton.language as tl

COUNT = 4096


@triton.jit
def cast_kernel(source, target, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(target + at, tl.load(source + at).to(tl.float8e4nv))


def cast(numbers):
    stored = torch.zeros(COUNT, dtype=torch.float8_e4m3fn)
    cast_kernel[(1,)](numbers, stored, COUNT)
    return stored.float()


normal = torch.randn(COUNT, generator=torch.Generator().manual_seed(0))
known = torch.zeros(COUNT)
known[:3] = torch.tensor([1.97, 7.8, 3.9])
interpreted, nearest = cast(normal), normal.to(torch.float8_e4m3fn).float()
large = normal.abs() >= 2**-6
halved = (large & (interpreted.abs() <= 0.6 * nearest.abs())).float().mean().item()
small = normal * 2**-8
lost = 1 - (cast(small).abs().sum() / small.abs().sum()).item()
kept = 1 - (small.to(torch.float8_e4m3fn).float().abs().sum() / small.abs().sum()).item()
print(f"torch {torch.__version__}, triton {triton.__version__}")
print("1.97, 7.8, 3.9 become", cast(known)[:3].tolist())
print(f"normal numbers: {halved:.1%} are halved; small ones lose {lost:.1%} of their size, {kept:.1%} by torch")
as_described = cast(known)[:3].tolist() == [1.0, 4.0, 4.0] and 0.02 < halved < 0.05 and lost > kept + 0.05
sys.exit(0 if as_described else 1)
PYTHON
TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/check.py"
