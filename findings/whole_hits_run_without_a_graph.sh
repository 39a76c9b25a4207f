#!/usr/bin/env bash
# SGLang answers a prompt that is cached whole later than one that has a few new tokens: it has no CUDA graph for it.
#
# Seen 2026-11-30 with SGLang 0.5.23 and torch 2.13.0, on a CPU; 0.5.17 and 0.5.21 have the same numbers.
#
# Expected: of two prompts that share 8,000 cached tokens, the one that is cached whole has its first token first. Its
#   pass computes one token, the least there is.
# Happens: graphs of passes over prompts begin at 4 tokens, and a pass is filled up to twice its tokens at most. So one
#   token is the only number for which none is replayed, and each layer is launched by the host. On an H200 a server of
#   0.5.17 with FP8 took 24.8 ms to the first token of 8,000 tokens, all of them cached, and 16.7 ms with 16 new ones
#   behind them (Llama-3-8B's shape, medians of 5; `benchmarks.serving.restored`, which a CPU cannot repeat).
# Why it matters: a repeated prompt is what a prefix cache is best at: answers drawn again, several samples of a prompt,
#   prefixes that come back from host memory. These wait half as long again as a longer prompt. With a graph of two
#   tokens among the sizes (--cuda-graph-bs-prefill) it is replayed.
#
# Exit status 0: as described. 1: it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip="$folder/venv/bin/python -m pip --disable-pip-version-check --quiet install"
$pip torch==2.13.0 numpy==2.4.6
$pip --no-deps sglang==0.5.23 \
  ipython==9.18.1 pillow==13.0.0 cffi==2.1.1 soundfile==0.13.1 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 \
  aiosignal==1.4.0 anyio==4.16.0 attrs==26.1.0 certifi==2026.10.18 charset-normalizer==3.5.2 \
  click==8.5.1 dill==0.4.1 filelock==4.2.11 frozenlist==1.8.0 h11==0.16.0 httpcore==1.0.9 \
  httpx==0.28.1 huggingface-hub==1.33.0 idna==3.20 msgspec==0.22.0 multidict==7.2.1 orjson==3.13.0 \
  packaging==26.3 propcache==0.5.4 psutil==7.2.2 pybase64==1.5.1 pydantic==2.14.3 \
  pydantic-core==2.50.4 pygments==2.21.0 python-multipart==0.0.34 regex==2026.11.15 requests==2.34.2 \
  rich==15.0.0 safetensors==0.8.0 sniffio==1.3.1 starlette==1.10.0 tokenizers==0.22.2 \
  torchvision==0.16.2 tqdm==4.70.1 traitlets==5.16.1 transformers==5.12.1 triton==3.7.1 \
  typing-inspection==0.4.5 urllib3==2.8.0 pyyaml==6.0.3 yarl==1.25.1 pyzmq==27.3.0 \
  annotated-types==0.8.0 apache-tvm-ffi==0.1.11 sentencepiece==0.2.1 compressed-tensors==0.18.0 \
  loguru==0.7.3 gguf==0.19.0 einops==0.8.2 openai==2.6.1 distro==1.9.0 partial-json-parser==0.2.1.1.post7
cat > "$folder/check.py" <<'PYTHON'
import logging
import sys
import warnings
from unittest.mock import MagicMock

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
sys.modules["sgl_kernel"] = MagicMock()  # kernels for GPUs, none of which is called here

from sglang.srt.arg_groups.cuda_graph_hook import generate_prefill_cuda_graph_batch_sizes
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

sizes = generate_prefill_cuda_graph_batch_sizes(8192)  # the default, for chunks of 8,192 tokens


class Runner(PrefillCudaGraphRunner):
    """What a runner with graphs of these sizes answers, without a GPU to capture them on."""

    def __init__(self, captured):
        self.capture_num_tokens, self.max_num_tokens = captured, max(captured)
        self.prefill_backend_name = "breakable"
        self._is_full_backend = self.has_mha_companion_layers = self._fa4_prefill = False
        self._captured_attn_metadata_max_bs = self.max_context_size = self.max_seq_len = None

    def _has_uncapturable_chunked_prefix(self, prefix_lens):
        return False


def replays(new_tokens, captured):
    return Runner(captured).can_replay_locally(
        batch_size=1, num_tokens=new_tokens, input_embeds=None, replace_embeds=None, prefix_lens=[8000],
        is_target_verify=False, capture_hidden_mode=None, return_logprob=False,
    )


without = [n for n in range(1, 1025) if not replays(n, sizes)]
print("smallest graph:", min(sizes), "tokens; new tokens that are launched layer by layer:", without)
print("with a graph of 2 tokens:", replays(1, [2, *sizes]))
as_described = without == [1] and replays(1, [2, *sizes])
print("as described" if as_described else "changed")
sys.exit(not as_described)
PYTHON
SGLANG_USE_CPU_ENGINE=1 "$folder/venv/bin/python" "$folder/check.py"
