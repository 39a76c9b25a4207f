"""Hosts of SGLang's own server tests: the mixins of ``sglang.test.kits``, unchanged, against a server that runs.

``python -m tests.sglang_suite`` starts the servers and runs this file with pytest for each; the environment says which
server and which tests:

- ``SUITE_URL``, ``SUITE_PID``, ``SUITE_MODEL``: the server's address, its main process and its model's folder.
- ``SUITE_GROUP``: a group of ``KITS``.

A kit that the installed SGLang lacks has no host. What is set for a mixin are sizes that suit a small model on a CPU.
"""

from __future__ import annotations

import importlib
import os
import random
import unittest
from typing import Any

import openai
import requests

from sglang_diffkv.evaluate.server import flush_cache

URL, MODEL, GROUP = (os.environ.get(name, "") for name in ("SUITE_URL", "SUITE_MODEL", "SUITE_GROUP"))

PROMPTS = [[random.Random(seed).randrange(1, 30000) for _ in range(600)] for seed in range(12)]
"""Token ids in place of the data set that the kits would download."""

KL = {"kl_threshold": 0.003, "max_new_tokens": 48, "input_ids": PROMPTS}
KITS: dict[str, dict[tuple[str, str], dict[str, Any]]] = {
    "api": {
        ("basic_api_contract_kit", "BasicAPIContractMixin"): {},
        ("basic_decode_correctness_kit", "BasicDecodeCorrectnessMixin"): {},
        ("basic_scheduler_stress_kit", "BasicSchedulerStressMixin"): {},
        ("abort_timeout_kit", "AbortAllMixin"): {"abort_all_max_new_tokens": 4000},
        ("pause_generation_kit", "PauseResumeInPlaceMixin"): {
            "pause_num_requests": 12,
            "pause_max_new_tokens": 200,
            "pause_duration": 2,
            "pause_ignore_eos": True,
        },
        ("ebnf_constrained_kit", "EBNFConstrainedMixin"): {},
        ("json_constrained_kit", "JSONConstrainedMixin"): {},
        ("json_mode_kit", "JSONModeMixin"): {},
        ("regex_constrained_kit", "RegexConstrainedMixin"): {},
        ("matched_stop_kit", "MatchedStopMixin"): {},
    },
    "cache": {
        ("unified_radix_cache_kit", "UnifiedRadixTreeTestMixin"): {**KL, "test_gsm8k": None, "prefix_len": 300},
        ("kl_divergence_kit", "KLDivergenceMixin"): {
            "kl_div_thres": 0.003,
            "kl_div_max_samples": 8,
            "kl_div_prefill_max_new_tokens": 48,
            "kl_div_decode_max_new_tokens": 48,
        },
    },
    "waiting": {("abort_timeout_kit", "WaitingTimeoutMixin"): {}},
    "running": {("abort_timeout_kit", "RunningTimeoutTwoWaveMixin"): {}},
}
"""Group -> (module of ``sglang.test.kits``, mixin) -> attributes of its host, None for a test that needs a data set."""


class ServerProcess:
    """What the mixins ask of the process that they would have started."""

    pid = int(os.environ.get("SUITE_PID", "0"))

    def poll(self) -> int | None:
        """None while the process runs."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return 1
        return None


class Host(unittest.TestCase):
    """The attributes that mixins expect."""

    base_url, model, process = URL, MODEL, ServerProcess()

    @classmethod
    def setUpClass(cls) -> None:
        cls.client = openai.Client(api_key="none", base_url=URL + "/v1")
        cls.flush_cache()

    @classmethod
    def flush_cache(cls) -> None:
        flush_cache(URL)

    def tearDown(self) -> None:
        self.assertIsNone(self.process.poll(), "the server ended")


def _mixin(module: str, name: str) -> type | None:
    try:
        return getattr(importlib.import_module(f"sglang.test.kits.{module}"), name, None)
    except ModuleNotFoundError:
        return None


def _make(group: str) -> dict[str, type]:
    hosts = {}
    for (module, name), settings in KITS.get(group, {}).items():
        mixin = _mixin(module, name)
        if mixin is None:
            continue
        settings = dict(settings)
        if name == "UnifiedRadixTreeTestMixin":
            from sglang.test.kl_multiturn_utils import default_prefill_cache_assert

            settings["prefill_cache_assert"] = staticmethod(default_prefill_cache_assert)
        hosts[f"Test{name.removesuffix('Mixin')}"] = type(f"Test{name}", (mixin, Host), settings)
    return hosts


globals().update(_make(GROUP))

if GROUP == "cache":
    from sglang.test import kl_test_utils

    kl_test_utils.get_input_ids = lambda *args, **kwargs: PROMPTS


class TestRadixTree(Host):
    """A tree of 60 prompts, most of which share prefixes, in one batched request."""

    @unittest.skipUnless(GROUP == "cache", "of the group cache")
    def test_radix_attention(self) -> None:
        from sglang.test.kits import radix_cache_server_kit as kit

        nodes = [x for x in kit.gen_radix_tree(num_nodes=60, chunk_len=64) if len(x["input_ids"]) < 4000]
        sampling = [{"max_new_tokens": x["decode_len"] % 32, "temperature": 0} for x in nodes]
        data = {"input_ids": [x["input_ids"] for x in nodes], "sampling_params": sampling}
        self.assertEqual(requests.post(URL + "/generate", json=data, timeout=600).status_code, 200)
