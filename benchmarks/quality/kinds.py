"""Token identity of many kinds of models and options beside stock: each kind's servers at once, asked at once.

A kind is a model with the servers that run it: stock's, DiffKV's with the lossless tier, in chunks, with drafts, under
the default tiers. Replies are compared with stock's of the same batch and of batch 1, as ``identity.py`` does. Random
weights choose among tokens whose logits are a rounding apart, so of those the log-probabilities of prompt tokens are
compared, beside what stock's own chunks, and on a GPU another of stock's attention backends, do to them
(``rounding.py``). Servers compile kernels at their start, those of a GPU for a minute or two: the first of DiffKV's
begins alone, and the others find its kernels.

    python -m benchmarks.quality.kinds --list
    python -m benchmarks.quality.kinds --kinds nano gptq gemma3 --output DIR
    SGLANG_DIFFKV_UNTRIED=1 python -m benchmarks.quality.kinds --kinds ngram standalone qwen3_next
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock
from typing import Any

import torch

from benchmarks import splits
from benchmarks.paths import NANO
from benchmarks.quality import (
    identity,
    make_checkpoints,
    random_adapters,
    random_drafts,
    random_hybrids,
    random_vision,
    random_windows,
)
from benchmarks.quality.drafts import OFTEN, STAGES, draft_args
from sglang_diffkv.config import CHECK_ENV
from sglang_diffkv.evaluate import client, report
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.server import Server, ServerError, has_gpu, stock_backend, stop_servers_on_sigterm
from sglang_diffkv.ops.flash import FlashPrefill

_BY_TRITON = {"prefill": "triton"} if has_gpu() else {}
LOSSLESS = json.dumps({"tiers": ["BF16"], **_BY_TRITON})
"""On a GPU without FlashInfer's kernels for new tokens, which some head sizes have to compile first."""
BY_FLASHINFER = '{"tiers": ["BF16"], "prefill": "flashinfer"}'
"""With them, which also attend to stored tokens that are read back."""
BY_FLASH = '{"tiers": ["BF16"], "prefill": "fa3"}'
"""By FlashAttention-3, which Hopper GPUs take unasked."""
DEFAULT = json.dumps(_BY_TRITON)
CHECKED = {CHECK_ENV: "8"}
CHUNKS = ("--chunked-prefill-size", "64")
MIXED = "--enable-mixed-chunk"
GRAPHS = ("--cuda-graph-backend-prefill", "breakable")
STATES = ("--disable-radix-cache", "--max-mamba-cache-size", "64")
INTERPRETED = {"TRITON_INTERPRET": "1"}
"""On a CPU SGLang's kernels for states run so."""
CANARY = ("--kv-canary", "raise", "--kv-canary-sweep-interval", "5")
CANARY_ENV = {"SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT": "1", "SGLANG_KV_CANARY_STATS_PRINT_EVERY_N_STEPS": "5"}
BATCH = 8
GPU_ARGS = (
    "--max-total-tokens", "60000", "--max-running-requests", "16", "--mem-fraction-static", "0.9",
    "--mm-feature-transport", "cpu", "--disable-prefill-cuda-graph", "--cuda-graph-bs-decode", "1", "2", "4", "8", "16",
)  # fmt: skip
CPU_ARGS = ("--max-total-tokens", "20000")
STOCK = "stock"
MOST_STATUS = 100
"""Of 256 failures the exit status would be 0."""


@dataclass(frozen=True)
class Asked:
    """A server and the batch sizes in which it is asked. ``askings``: of a prompt, behind which it has prefix hits.
    ``misses``: what its log lacks or should not have, in words."""

    name: str
    backend: str
    args: tuple[str, ...] = ()
    config: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    sizes: tuple[int, ...] = (BATCH,)
    askings: int = 1
    misses: Callable[[str], str] = lambda log: ""


@dataclass(frozen=True)
class Request:
    """The prompt of question ``number``, and more ``fields`` of ``/generate``, which ``label`` names. Of a text
    log-probabilities are those behind token ``start``."""

    number: int
    ids: list[int]
    label: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    start: int = 0


def _plain(folder: Path, prompts: Sequence[list[int]]) -> list[Request]:
    return [Request(number, ids) for number, ids in enumerate(prompts)]


@dataclass(frozen=True)
class Kind:
    """``make`` writes the model into a folder; None for nano. ``random``: its weights are. ``requests``: made of
    prompts, and of texts whose log-probabilities are asked for."""

    about: str
    servers: Callable[[Path], list[Asked]]
    make: Callable[[Path], object] | None = None
    random: bool = False
    gpu: bool = False
    requests: Callable[[Path, Sequence[list[int]]], list[Request]] = _plain


def _stock(name: str = STOCK, *args: str, sizes: tuple[int, ...] = (BATCH,), backend: str = "") -> Asked:
    return Asked(name, backend or stock_backend(), args, sizes=sizes)


def _ours(name: str, *args: str, config: str = LOSSLESS, env: dict[str, str] | None = None) -> Asked:
    return Asked(name, "diffkv", args, config, env or {}, (1, BATCH) if name == "diffkv" else (BATCH,))


def _pair(*args: str, backend: str = "") -> list[Asked]:
    return [_stock(STOCK, *args, sizes=(1, BATCH), backend=backend), _ours("diffkv", *args)]


def _compiled() -> list[Asked]:
    """Both with torch.compile, which by itself would time many variants of each kernel."""
    pair = _pair("--enable-torch-compile", "--cuda-graph-bs-decode", "1", str(BATCH))
    return [replace(x, env={"SGLANG_TORCH_COMPILE_MODE": "default"}) for x in pair]


def _chunked(*args: str, backend: str = "") -> list[Asked]:
    """The pair and both in chunks."""
    chunks = (*args, *CHUNKS)
    return [
        *_pair(*args, backend=backend),
        _stock("stock, chunks", *chunks, backend=backend),
        _ours("diffkv, chunks", *chunks),
    ]


def _libraries(*args: str) -> list[Asked]:
    """Servers in chunks where there is a GPU: a library attends to new tokens and to stored ones before them."""
    if not has_gpu():
        return []
    found = [_ours("FlashInfer, chunks", *args, *CHUNKS, config=BY_FLASHINFER)]
    if not FlashPrefill.obstacle(64, 64, torch.bfloat16, torch.device("meta"), ()):
        found.append(_ours("FlashAttention-3, chunks", *args, *CHUNKS, config=BY_FLASH))
        found.append(_ours("FlashAttention-3", *args, config=BY_FLASH))
    return found


def _control(backend: str, *args: str) -> list[Asked]:
    """Stock once more, on another of its attention backends: what a rounding of attention does to random weights."""
    return [_stock(f"stock, {backend}", *args, backend=backend)] if has_gpu() else []


def _drafted(algorithm: str, model: Path = NANO, *, branches: int = 1) -> list[Asked]:
    """Stock without drafts and, on a GPU, with them; the ways in which drafting servers of DiffKV's run. ``branches``:
    of trees."""
    drafts = tuple(shlex.split(f"{draft_args(algorithm, str(model), 3, branches)} {OFTEN}"))
    found = [_stock(sizes=(1, BATCH)), _ours("diffkv", *drafts)]
    # Stock cannot verify on a CPU, which has neither graphs nor overlap scheduling under drafts.
    stages = {stage: args for stage, args in STAGES.items() if args and has_gpu()}
    if algorithm == "STANDALONE":
        stages.pop("graphs", None)  # which ends stock's servers too
    if has_gpu():
        found.append(_stock("stock, drafts", *drafts))
    if "graphs" in stages:
        found.append(_stock("stock, graphs", *drafts, *stages["graphs"].split()))
    found += [_ours(stage, *drafts, *args.split()) for stage, args in stages.items()]
    return [*found, _ours("default tiers", *drafts, config=DEFAULT, env=CHECKED)]


def _checkpoint(kind: str) -> Callable[[Path], object]:
    return lambda folder: make_checkpoints.main([str(folder), "--kind", kind])


def _make_eagle(folder: Path) -> None:
    """Fitted to questions kept for that."""
    tokenizer = load_tokenizer(str(NANO))
    items = splits.load("calib")[:40]
    random_drafts.make_eagle(folder, [chat_ids(tokenizer, x.prompt) for x in items])


def _with_states(kind: str, about: str, *, gpu: bool = False, backend: str = "", control: str = "fa3") -> Kind:
    def servers(folder: Path) -> list[Asked]:
        found = [*_chunked(*STATES, backend=backend), *_control(control, *STATES)]
        # States are kept at the ends of what was computed: a prompt is found once it was asked in another's company.
        found.append(replace(_ours("prefix cache", *STATES[1:]), askings=3))
        found.append(_ours("default tiers", *STATES, config=DEFAULT, env=CHECKED))
        return [replace(x, env={**x.env, **({} if has_gpu() else INTERPRETED)}) for x in found]

    def make(folder: Path) -> None:
        random_hybrids.KINDS[kind](folder, large=has_gpu())

    return Kind(about, servers, make, random=True, gpu=gpu)


def _states_and_drafts(folder: Path) -> list[Asked]:
    """Servers with drafts of the model's own layer, and by n-grams, that go on from kept states."""
    own = tuple(shlex.split(f"{draft_args('NEXTN', str(folder), 3)} {OFTEN}"))
    by_ngrams, cached = shlex.split(draft_args("NGRAM", "", 4)), STATES[1:]
    found = [_stock(STOCK, *STATES, sizes=(1, BATCH)), _ours("diffkv", *STATES, *own)]
    if has_gpu():  # on a CPU stock does not draft
        eager = STAGES["eager"].split()
        found += [_stock("stock, drafts", *STATES, *own), replace(_ours("eager", *cached, *own, *eager), askings=3)]
    found.append(replace(_ours("prefix cache", *cached, *own), askings=3))
    found.append(replace(_ours("n-grams, prefix cache", *cached, *by_ngrams), askings=3))
    found.append(replace(_ours("default tiers", *cached, *own, config=DEFAULT, env=CHECKED), askings=3))
    return [replace(x, env={**x.env, **({} if has_gpu() else INTERPRETED)}) for x in found]


def _sliding(make: Callable[[Path], None], about: str, *, gpu: bool = False) -> Kind:
    return Kind(about, lambda folder: [*_chunked(), *_control("fa3")], make, random=True, gpu=gpu)


def _with_adapters(folder: Path) -> list[Asked]:
    args = (*random_adapters.adapter_args(folder), *(() if has_gpu() else ("--lora-backend", "torch_native")))
    return [*_chunked(*args), _ours("default tiers", *args, config=DEFAULT, env=CHECKED)]


def _under_adapters(folder: Path, prompts: Sequence[list[int]]) -> list[Request]:
    """Every third prompt under none and under each adapter, side by side."""
    names = (None, *random_adapters.NAMES)
    some = list(enumerate(prompts))[:: len(names)]
    return [Request(number, ids, name or "none", {"lora_path": name}) for number, ids in some for name in names]


def _with_pictures(folder: Path) -> list[Asked]:
    """The pictures' own attention by a kernel that every machine has."""
    args = ("--mm-attention-backend", "triton_attn" if has_gpu() else "sdpa")
    return [*_chunked(*args), *_control("fa3", *args), _ours("default tiers", *args, config=DEFAULT, env=CHECKED)]


def _behind_pictures(folder: Path, prompts: Sequence[list[int]]) -> list[Request]:
    """Every third prompt alone and behind each of two pictures, side by side."""
    before, found = random_vision.picture_ids(folder), []
    for number, ids in list(enumerate(prompts))[::3]:
        found.append(Request(number, ids, "no picture"))
        for seed in (1, 2):
            fields = {"image_data": random_vision.picture(seed)}
            behind = 1 + random_vision.IMAGE_TOKENS  # a picture's tokens have no log-probabilities
            found.append(Request(number, [*before, *ids], f"picture {seed}", fields, behind))
    return found


def _with_canary() -> list[Asked]:
    env = {**CANARY_ENV, **({} if has_gpu() else INTERPRETED)}
    ours = [_ours("diffkv"), _ours("diffkv, chunks", *CHUNKS), _ours("default tiers", config=DEFAULT, env=CHECKED)]
    watched = [replace(x, args=(*x.args, *CANARY), env={**x.env, **env}, misses=_canary_misses) for x in ours]
    return [_stock(sizes=(1, BATCH)), *watched]


def _canary_misses(log: str) -> str:
    told = re.findall(r"protected_tokens=(\d+) sweep_passes=(\d+) violations=(\d+)", log)
    if not told:
        return "the canary said nothing"
    tokens, sweeps, violations = map(int, told[-1])
    right = tokens and sweeps and not violations
    return "" if right else f"the canary saw {tokens} tokens in passes, {sweeps} sweeps and {violations} violations"


KINDS = {
    "nano": Kind(
        "the trained model of the repository",
        lambda folder: [*_chunked(), *_libraries(), _ours("default tiers", config=DEFAULT, env=CHECKED)],
    ),
    "mixed": Kind(
        "requests that decode in passes over others' prompts",
        lambda folder: [
            *_chunked(MIXED),
            *_libraries(MIXED),
            _ours("default tiers", MIXED, config=DEFAULT, env=CHECKED),
        ],
    ),
    "graphs": Kind(
        "CUDA graphs of passes over prompts",
        lambda folder: [
            *_chunked(*GRAPHS),
            *_libraries(*GRAPHS),
            replace(_ours("mixed", *GRAPHS, MIXED, *CHUNKS, config=BY_FLASHINFER), sizes=(1, BATCH)),
            _ours("default tiers", *GRAPHS, config=DEFAULT, env=CHECKED),
        ],
        gpu=True,
    ),
    "compile": Kind("torch.compile", lambda folder: _compiled(), gpu=True),
    "gptq": Kind("GPTQ weights", lambda folder: _pair("--quantization", "gptq"), _checkpoint("gptq"), gpu=True),
    "awq": Kind("AWQ weights", lambda folder: _pair("--quantization", "awq"), _checkpoint("awq"), gpu=True),
    "fp8": Kind("weights quantised to FP8 at load", lambda folder: _chunked("--quantization", "fp8"), gpu=True),
    "experts": Kind("Qwen3-MoE", lambda folder: _chunked(), _checkpoint("qwen3-moe"), gpu=True),
    "gemma3": _sliding(random_windows.make_gemma3, "Gemma-3: sliding windows"),
    "gpt_oss": _sliding(random_windows.make_gpt_oss, "gpt-oss: sliding windows, sinks, experts", gpu=True),
    "lora": Kind(
        "adapters and none in a batch",
        _with_adapters,
        random_adapters.make_adapters,
        gpu=True,  # SGLang pins memory for adapters
        requests=_under_adapters,
    ),
    "vision": Kind(
        "Qwen2.5-VL: pictures",
        _with_pictures,
        lambda folder: random_vision.make_qwen2_5_vl(folder, large=has_gpu()),
        random=True,
        requests=_behind_pictures,
    ),
    "kv_canary": Kind("SGLang's KV canary", lambda folder: _with_canary(), gpu=True),
    "ngram": Kind("drafts by n-grams", lambda folder: _drafted("NGRAM")),
    "standalone": Kind("drafts by the model itself", lambda folder: _drafted("STANDALONE")),
    "eagle": Kind("an EAGLE head by a linear map", lambda folder: _drafted("EAGLE", folder), _make_eagle),
    "eagle_trees": Kind(
        "trees of drafts by an EAGLE head", lambda folder: _drafted("EAGLE", folder, branches=2), _make_eagle
    ),
    "standalone_trees": Kind("trees of drafts by the model itself", lambda folder: _drafted("STANDALONE", branches=2)),
    "eagle3": Kind("a random EAGLE-3 head", lambda folder: _drafted("EAGLE3", folder), random_drafts.make_eagle3),
    "mimo": Kind(
        "MiMo's prediction layer",
        lambda folder: [*_drafted("NEXTN", folder), *_control("fa3")],
        random_drafts.make_mimo,
        random=True,
    ),
    "qwen3_next": _with_states("qwen3_next", "Qwen3-Next: linear attention, experts", control="flashinfer"),
    "qwen3_next_drafts": Kind(
        "Qwen3-Next with drafts of its own layer, and by n-grams",
        _states_and_drafts,
        lambda folder: random_hybrids.make_qwen3_next(folder, large=has_gpu(), foreseen=True),
        random=True,
    ),
    "qwen3_5": _with_states("qwen3_5", "Qwen3.5's language part", gpu=True, control="flashinfer"),
    "falcon_h1": _with_states("falcon_h1", "Falcon-H1: a state space", gpu=True),
    "lfm2": _with_states("lfm2", "LFM2: short convolutions", gpu=True, backend="flashinfer" if has_gpu() else ""),
}
BESIDE_NANO = {"eagle", "eagle_trees", "eagle3", "lora"}
"""Kinds whose checkpoint is a draft model, or adapters."""


class Run:
    """Asks kinds. ``rows`` has a line of the table for each variant, ``failures`` what was wrong, in words."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.items = identity.choose(args)
        tokenizer = load_tokenizer(str(NANO))
        self.prompts = [chat_ids(tokenizer, item.prompt) for item in self.items]
        joined = [[x for ids in self.prompts[i : i + 4] for x in ids] for i in range(0, len(self.prompts), 4)]
        self.texts = [ids[:600] for ids in joined if len(ids) >= 200]
        self.rows: list[list[str]] = []
        self.failures: list[str] = []
        self._compiled, self._broken_off, self._writing = Event(), Event(), Lock()
        self._begun: list[Server] = []

    def kind(self, name: str) -> None:
        """Start, ask and compare the servers of one kind; an error is one of its failures, and other kinds go on."""
        try:
            self._kind(name)
        except Exception as error:
            self._fail(name, "all servers", repr(error)[:300])
            self.write()

    def _kind(self, name: str) -> None:
        kind, folder = KINDS[name], self.args.output / "models" / name
        if kind.make is not None and not folder.exists():
            made = folder.with_name(f"{name}.part")
            shutil.rmtree(made, ignore_errors=True)
            kind.make(made)
            made.rename(folder)
        if kind.random and not self.texts:
            raise ValueError("no texts for log-probabilities: ask more questions (--n)")
        model = folder if kind.make is not None and name not in BESIDE_NANO else NANO
        requests, texts = kind.requests(folder, self.prompts), kind.requests(folder, self.texts)
        servers: dict[str, Server] = {}

        def start(asked: Asked, log: Path) -> None:
            if asked.backend == "diffkv" and asked.name != "diffkv":
                self._compiled.wait(self.args.timeout / 2)
            server = Server(
                model, asked.backend, [*(GPU_ARGS if has_gpu() else CPU_ARGS), *asked.args],
                diffkv_config=asked.config, env=asked.env, timeout=self.args.timeout, log_path=log,
            )  # fmt: skip
            self._begun.append(server)
            if self._broken_off.is_set():
                return
            try:
                server.start()
            except ServerError as error:
                self._fail(name, asked.name, str(error).splitlines()[0] + f"; its log: {log}")
            else:
                servers[asked.name] = server
            finally:
                if asked.backend == "diffkv":
                    self._compiled.set()

        asked_of = [x for x in kind.servers(folder) if not self.args.servers or x.name in self.args.servers]
        logs = [self.args.output / f"{name}_{x.name.replace(', ', '_').replace(' ', '_')}.log" for x in asked_of]
        try:
            with ThreadPoolExecutor(len(asked_of)) as pool:
                list(pool.map(start, asked_of, logs))
                ready = [x for x in asked_of if x.name in servers]
                found = pool.map(lambda x: self._ask(servers[x.name], x, requests), ready)
                replies = dict(zip([x.name for x in ready], found))
                told = {}
                if kind.random:
                    told = dict(zip(servers, pool.map(lambda x: self._tell(x, texts), servers.values())))
            if not self._broken_off.is_set():
                for asked in ready:
                    if wrong := asked.misses(servers[asked.name].log_text()):
                        self._fail(name, asked.name, wrong)
                self._compare(name, replies, told, requests, random=kind.random)
                self.write()
        finally:
            _stop(servers.values())

    def break_off(self, kinds: Sequence[Future[None]]) -> None:
        """Stop all servers, until the ``kinds`` that have begun are at their end; no other begins."""
        self._broken_off.set()
        self._compiled.set()
        for kind in kinds:
            kind.cancel()
        while not all(kind.done() for kind in kinds):
            _stop(list(self._begun))
            time.sleep(0.1)

    def write(self) -> None:
        """What is known so far, into the output folder."""
        with self._writing:
            rows = sorted(self.rows, key=lambda row: list(KINDS).index(row[0]))
            data = {"environment": report.environment(), "rows": rows, "failures": self.failures}
            (self.args.output / "kinds.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
            (self.args.output / "kinds.md").write_text(report.markdown(HEADER, rows) + "\n", encoding="utf-8")

    def _ask(
        self, server: Server, asked: Asked, requests: Sequence[Request]
    ) -> dict[tuple[int, bool], list[client.Record]] | str:
        """Replies by batch size and whether the prefix cache had the prompts; what went wrong instead."""
        prompts, fields, found = [x.ids for x in requests], [x.fields for x in requests], {}
        try:
            for size in asked.sizes:
                server.flush_cache()
                found[size, False] = identity.ask(server, self.args, prompts, size, fields)
            for _ in range(asked.askings - 1):
                identity.ask(server, self.args, prompts, asked.sizes[-1], fields)
            found[asked.sizes[-1], True] = identity.ask(server, self.args, prompts, asked.sizes[-1], fields)
        except Exception as error:
            return repr(error)[:300]
        return found

    def _tell(self, server: Server, texts: Sequence[Request]) -> list[float] | str:
        """Log-probabilities of the texts' tokens; what went wrong instead."""
        try:
            server.flush_cache()
            told = [client.score(server.url, x.ids, x.start, fields=x.fields).input_logprobs for x in texts]
        except Exception as error:
            return repr(error)[:300]
        found = [x for text in told for x in text]
        if wrong := sum(x is None for x in found):  # as JSON has what is no number
            return f"{wrong} of {len(found)} log-probabilities are no numbers"
        return found

    def _fail(self, kind: str, server: str, what: str) -> None:
        self.failures.append(f"{kind}, {server}: {what}")
        print(f"[{time.strftime('%H:%M:%S')}] {self.failures[-1]}", flush=True)

    def _compare(
        self, kind: str, replies: dict[str, Any], told: dict[str, Any], requests: Sequence[Request], *, random: bool
    ) -> None:
        for server, found in (*replies.items(), *told.items()):
            if isinstance(found, str):
                self._fail(kind, server, found)
        replies = {server: found for server, found in replies.items() if not isinstance(found, str)}
        told = {server: found for server, found in told.items() if not isinstance(found, str)}
        reference = replies.get(STOCK)
        if reference is None:
            self._fail(kind, STOCK, "no reference")
            return
        items = [self.items[x.number] for x in requests]
        items = [replace(x, id=f"{x.id}, {y.label}" if y.label else x.id) for x, y in zip(items, requests, strict=True)]
        alike = _alike(requests, next(iter(reference.values())))
        if 2 * len(alike) > len({x.number for x in requests}):
            self._fail(kind, STOCK, f"{len(alike)} questions have the same reply whatever is asked beside them")
        for server, found in replies.items():
            for (size, hits), got in found.items():
                beside = (size, hits) if server != STOCK and (size, hits) in reference else (1, False)
                if (server, size, hits) == (STOCK, 1, False) or beside not in reference:
                    continue
                differ = identity.compare(server, "", items, reference[beside], got, self.args.tie)
                variant = f"batch {size}" + (", hits" if hits else "")
                cells = identity.cells(differ, reference[beside], got)
                self.rows.append([kind, server, variant, f"batch {beside[0]}", *cells])
                lossless = server != "default tiers" and not server.startswith(STOCK)
                if lossless and not random and (others := [x for x in differ if not x.tie]):
                    where = ", ".join(f"{x.id} from token {x.position} (gap {x.reference_gap:.2f})" for x in others)
                    self._fail(kind, server, f"{variant}: {len(others)} replies are not stock's: {where}")
        for server, mine in told.items():
            if server == STOCK or STOCK not in told:
                continue
            moved = [abs(a - b) for a, b in zip(told[STOCK], mine, strict=True)]
            mean = sum(moved) / len(moved)
            numbers = [f"mean {mean:.4f}", f"largest {max(moved):.3f}"]
            self.rows.append([kind, server, f"{len(moved)} prompt tokens", "log-probabilities", *numbers, "", "", ""])
            if server != "default tiers" and not mean <= self.args.moved:
                self._fail(kind, server, f"log-probabilities of prompt tokens moved by {mean:.4f} on average")


def _alike(requests: Sequence[Request], replies: Sequence[client.Record]) -> set[int]:
    """Questions of which two requests have the same reply: one's cache in the other's place would not be seen."""
    seen, found = set(), set()
    for request, reply in zip(requests, replies, strict=True):
        key = (request.number, tuple(reply.output_ids))
        if key in seen:
            found.add(request.number)
        seen.add(key)
    return found


def _stop(servers: Iterable[Server]) -> None:
    """All at once: each takes seconds."""
    if held := list(servers):
        with ThreadPoolExecutor(len(held)) as pool:
            list(pool.map(lambda server: server.stop(), held))


HEADER = ["kind", "server", "variant", "beside stock's", *identity.CELLS]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = [name for name, kind in KINDS.items() if has_gpu() or not kind.gpu]
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=here, help="default: all that this machine can run"
    )
    parser.add_argument("--servers", nargs="+", metavar="NAME", help="of a kind (default: all)")
    parser.add_argument("--list", action="store_true", help="say which there are, and stop")
    parser.add_argument("--together", type=int, default=1, help="kinds at a time (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for a server's start")
    parser.add_argument("--n", type=int, default=24, help="number of questions (default: %(default)s)")
    parser.add_argument("--shared", type=int, default=6, help="of them over one shared prefix")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="default: %(default)s")
    parser.add_argument("--levels", nargs="+", default=["easy", "medium"])
    parser.add_argument("--split", default="dev")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tie", type=float, default=0.125, help="largest gap of a rounding tie (default: %(default)s)")
    parser.add_argument(
        "--moved", type=float, default=0.05, help="largest mean change of log-probabilities under random weights"
    )
    parser.add_argument("--output", type=Path, default=Path("kinds"), help="folder (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and what was wrong; the number of failures, as far as an exit status holds it."""
    args = parse_args(argv)
    if args.list:
        for name, kind in KINDS.items():
            print(f"{name:18} {kind.about}{' (on a GPU)' if kind.gpu else ''}")
        return 0
    args.output.mkdir(parents=True, exist_ok=True)
    stop_servers_on_sigterm()
    run = Run(args)
    with ThreadPoolExecutor(args.together) as pool:
        kinds = [pool.submit(run.kind, name) for name in args.kinds]
        try:
            for begun in kinds:
                begun.result()
        except BaseException:
            run.break_off(kinds)
            raise
    table = report.markdown(HEADER, run.rows)
    print(f"{len(run.items)} questions, at most {args.max_new_tokens} new tokens each\n\n{table}\n", flush=True)
    print("\n".join(run.failures) or "nothing is wrong")
    run.write()
    return min(len(run.failures), MOST_STATUS)


if __name__ == "__main__":
    raise SystemExit(main())
