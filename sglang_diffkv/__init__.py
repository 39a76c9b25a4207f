"""DiffKV: a compressed KV cache for SGLang, as a plugin (``--attention-backend diffkv``)."""

import sys
from pathlib import Path
from types import ModuleType

__version__ = "0.2.0"

if not (_INSIDE := Path(__file__).with_name("kernels")).is_dir():
    # In a checkout kernels/ lies beside the package; a wheel has it inside (setup.py). It has no __init__.py: there it
    # would hide Hugging Face's package of that name.
    kernels = sys.modules["sglang_diffkv.kernels"] = ModuleType("sglang_diffkv.kernels")
    kernels.__path__ = [str(_INSIDE.parents[1] / "kernels")]
