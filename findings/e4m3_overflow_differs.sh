#!/usr/bin/env bash
# What is too large for FP8 (e4m3fn) becomes 448 in one library and NaN in another.
#
# Seen 2026-11-29 with torch 2.13.0 on a CPU and ml_dtypes 0.6.0. On an H200 torch 2.11.0 made NaN of infinity too.
#
# Expected: one rule for one type. Its format has no infinity, so a cast either saturates or gives NaN for what is too
#   large, wherever it runs. And one library has one rule for its types of 8 bits.
# Happens: on a CPU `x.to(torch.float8_e4m3fn)` gives 448 for 465, for 10,000 and for infinity. ml_dtypes, whose types
#   JAX and NumPy use, gives NaN. What is too large for them torch makes NaN in float8_e4m3fnuz, and infinity in float8_e5m2.
# Why it matters: FP8 KV caches are stored without scales by default, and some models have keys beyond 448. A test on a
#   CPU then finds a small loss, where a GPU stores NaN, which attention spreads over the whole row. A cache that one
#   library wrote and another checks differs there too. Clamp to 448 before the cast: then all agree.
#
# Exit status 0: as described. 1: it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip --disable-pip-version-check --quiet install torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0
cat > "$folder/check.py" <<'PYTHON'
import sys

import ml_dtypes
import numpy as np
import torch

keys = np.array([448, 463, 465, 1e4, np.inf], np.float32)


def by_torch(dtype):
    return torch.from_numpy(keys).to(dtype).float().numpy()


with np.errstate(all="ignore"):
    by_ml_dtypes = keys.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    clamped = np.minimum(keys, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
found = {
    "torch, e4m3fn": by_torch(torch.float8_e4m3fn),
    "torch, e4m3fnuz": by_torch(torch.float8_e4m3fnuz),
    "torch, e5m2, of 10^6": torch.tensor([1e6]).to(torch.float8_e5m2).float().numpy(),
    "ml_dtypes, e4m3fn": by_ml_dtypes,
    "ml_dtypes, clamped first": clamped,
}
print("from", keys.tolist())
for name, numbers in found.items():
    print(name, numbers.tolist())
saturates = (found["torch, e4m3fn"] == 448).all()
others = np.isnan(by_ml_dtypes[2:]).all() and np.isnan(found["torch, e4m3fnuz"][1:]).all()
agree = (clamped == found["torch, e4m3fn"]).all() and np.isinf(found["torch, e5m2, of 10^6"]).all()
sys.exit(0 if saturates and others and agree else 1)
PYTHON
"$folder/venv/bin/python" "$folder/check.py"
