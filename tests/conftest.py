"""Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before Triton is imported.

Property tests run the same examples each time; ``HYPOTHESIS_PROFILE=fuzz`` (``make fuzz``) draws new and more.
"""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("repeatable", derandomize=True, print_blob=True)
settings.register_profile("fuzz", max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
