#!/usr/bin/env bash
# SGLang's file store of its hierarchical cache reads one FP8 format's bytes as the other's, without an error.
#
# Seen 2026-11-28 with SGLang 0.5.23 and torch 2.13.0, on a CPU.
#
# Expected: two servers of one model share a folder (--hicache-storage-backend file). One has --kv-cache-dtype fp8_e4m3,
#   the other fp8_e5m2. A page that the first has stored is a miss for the second.
# Happens: a file's name has the model, rank and number of ranks, but no dtype, and the file has no header. Both formats
#   take one byte, so the length fits too. The second server gets the first one's bytes as its own numbers: `exists` is
#   True, `get` succeeds, and 1.5, 0.25 and 8 come back as 1, 0.03125 and 32. The same holds for bfloat16 and float16.
# Why it matters: keys and values are wrong, and nothing tells. Whoever changes a cache's dtype must change the folder,
#   and whoever keeps KV pages in such stores must put the format into the key, or into a header that is checked.
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
  annotated-types==0.8.0
cat > "$folder/check.py" <<'PYTHON'
import logging
import sys
import warnings

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

common = dict(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False)
common |= dict(enable_storage_metrics=False, is_page_first_layout=False, model_name="model")


def server(folder):
    return HiCacheFile(HiCacheStorageConfig(**common), folder)


found = {}
for stored, read in ((torch.float8_e4m3fn, torch.float8_e5m2), (torch.bfloat16, torch.float16)):
    folder = f"{sys.argv[1]}/{stored}".replace("torch.", "")
    page = torch.tensor([1.5, -2.0, 0.25, 8.0]).to(stored)
    assert server(folder).set("page", page)
    other = server(folder)
    there = other.exists("page")
    got = other.get("page", torch.zeros(4, dtype=read))
    found[stored] = there, None if got is None else got.float().tolist()
    print(f"{stored} {page.float().tolist()} read as {read}: exists {there}, get {found[stored][1]}")

as_described = all(there and got is not None and got != [1.5, -2.0, 0.25, 8.0] for there, got in found.values())
print("as described" if as_described else "changed")
sys.exit(not as_described)
PYTHON
SGLANG_USE_CPU_ENGINE=1 "$folder/venv/bin/python" "$folder/check.py" "$folder/store"
