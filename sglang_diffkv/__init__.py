"""DiffKV: a compressed KV cache for SGLang, as a plugin (``--attention-backend diffkv``)."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

__version__ = "0.3.0"

if not (_INSIDE := Path(__file__).with_name("kernels")).is_dir():
    # In a checkout kernels/ lies beside the package; a wheel has it inside (setup.py). It has no __init__.py: there it
    # would hide Hugging Face's package of that name.
    _SPEC = ModuleSpec("sglang_diffkv.kernels", None, is_package=True)
    _SPEC.submodule_search_locations = [str(_INSIDE.parents[1] / "kernels")]
    kernels = sys.modules[_SPEC.name] = module_from_spec(_SPEC)
