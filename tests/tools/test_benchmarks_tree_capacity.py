"""The tree capacity benchmark on servers that are only played: least recently used prompts are forgotten."""

import threading
from collections import OrderedDict
from itertools import islice

import pytest

from benchmarks.serving import tree_capacity
from benchmarks.serving.client import BenchmarkError
from benchmarks.serving.memory import KVShape
from benchmarks.serving.session import Setup

SHAPE = KVShape(layers=1, kv_heads=1, head_dim=64, context=4096, vocab=1000, q_heads=1)


class LruServer:
    """Keeps ``room`` tokens of whole sequences; ``ratio`` makes it a DiffKV server."""

    def __init__(self, room, ratio=None, short=False):
        self.room, self.ratio, self.short = room, ratio, short
        self.kept = OrderedDict()
        self.lock = threading.Lock()

    def generate(self, payload):
        with self.lock:
            return self._generate(payload)

    def _generate(self, payload):
        ids, new = payload["input_ids"], payload["sampling_params"]["max_new_tokens"]
        hits = [x for x in self.kept if list(x) == ids[: len(x)]]
        for x in hits:
            self.kept.move_to_end(x)
        output = [7] * (new - self.short if new else 0)
        if not hits:
            self.kept[(*ids, *output[:-1])] = None
        while sum(map(len, self.kept)) > self.room:
            self.kept.popitem(last=False)
        return {"output_ids": output, "meta_info": {"cached_tokens": max(map(len, hits), default=0)}}

    def stats(self):
        if self.ratio is None:
            return None
        rest = {"faults": 0, "ratio_pages": 0.5, "share_high": 1.0, "share_low": 0.0, "share_pruned": 0.0}
        rest |= {"segments": 1, "owners": {}, "pages": 1}
        return {"tokens": sum(map(len, self.kept)), "ratio_tokens": self.ratio, **rest}


def setup(kv_tokens):
    return Setup("model", SHAPE, kv_tokens * SHAPE.token_bytes("bf16"), 4, (), None)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_what_a_tree_holds_is_found_again(concurrency):
    args = tree_capacity.parse_args(["--input", "20", "--reply", "5", "--concurrency", str(concurrency)])
    stock = tree_capacity.measure(LruServer(500), setup(500), args)
    exact = tree_capacity.measure(LruServer(1100, 0.4), setup(500), args)
    assert stock["whole"] == 500 // 24 and stock["cached_tokens"] == 480
    assert exact["held_tokens"] == exact["cached_tokens"] == 1080
    assert exact["bound_tokens"] == 1250
    records = [{"backend": name, "status": "ok", **x} for name, x in (("stock", stock), ("exact", exact))]
    lines = tree_capacity.table([*records, {"backend": "x", "status": "failed", "error": "no room"}]).splitlines()
    assert "| 1,080 | 1,080 | 2.25 | 2.16 | 86.4% |" in lines[3] and "no room" in lines[4]


def test_short_replies_are_refused():
    args = tree_capacity.parse_args(["--input", "20"])
    with pytest.raises(BenchmarkError, match="31 tokens, 32 were asked for"):
        tree_capacity.measure(LruServer(500, short=True), setup(500), args)


def test_prompts_share_nothing():
    prompts = list(islice(tree_capacity.distinct_prompts(8, 100, 0), 40))
    assert len({x[0] for x in prompts}) == 40 and {len(x) for x in prompts} == {8}
    assert all(50 <= token < 100 for x in prompts for token in x)
