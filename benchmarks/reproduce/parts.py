"""The parts: a figure or a table each, in the papers' order, with what it needs and the commands that make it.

Each command is one of the repository's own, which can be called alone just as well.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.quality.tables import CONFIGS, LONGBENCH, TABLE_1, TABLE_3
from benchmarks.reproduce import given as needs
from benchmarks.reproduce.given import Given, Need, kind_of, served

Command = list[str]
"""A module and its arguments."""
DIFFKV, LEANKV, XKV, NONE = "DiffKV", "LeanKV", "XKV", "beyond the papers"
ANY_POLICY = served(needs.DEFAULT, "DiffKV's defaults")
QUICK_PRUNING = ["--prune-alpha", "0.1"]
QUICK_THRESHOLDS = ["--alpha-high", "0", "1", "3", "--alpha-low", "0", "0.05"]
QUICK_TIERS = ["--tiers", "K8V4", "K4V8", "K4V2", "K2V4"]
QUICK_MASSES = ["--mass-high", "0.01", "0.1", "--mass-low", "0", "--runs", "2", "--tiers", "K8V4,K4V2"]
RATIOS, QUICK_RATIOS = ["0.064", "0.032", "0.016", "0.012"], ["0.1"]
RETENTION = "0.9"
"""R at which sizes by layer are shown (XKV's figure 4)."""


@dataclass(frozen=True)
class Part:
    """A figure or table.

    Attributes:
        name: as --parts takes it. shows: in a line.
        commands: those that make it.
        files: what they write, below the output folder: a Markdown table first, then JSON and images.
        markdown: whether what the last command prints is that table.
    """

    name: str
    paper: str
    shows: str
    needs: tuple[Need, ...]
    commands: Callable[[Given], list[Command]]
    files: tuple[str, ...]
    markdown: bool = False

    def written(self, given: Given) -> list[Path]:
        """Its files, below the output folder."""
        return [Path(x.format(model=given.model.name)) for x in self.files]

    def lacking(self, given: Given) -> list[str]:
        """Why it cannot be made from what is given."""
        return [why for need in self.needs if (why := need.lacking(given))]


def _tasks(specs: Iterable[str]) -> Command:
    return [x for spec in specs for x in ("--task", spec)]


def _figure(number: int, shows: str, *more: Need, quick: Command | None = None, fitted: bool = False) -> Part:
    """A figure of ``benchmarks.figures`` that asks servers."""
    name = f"fig{number}"

    def commands(given: Given) -> list[Command]:
        tasks = _tasks(given.fitted if fitted else given.graded)
        out = ["--output", str(given.output / "figures")]
        extra = (quick or []) if given.quick else []
        return [["benchmarks.figures", name, "--model", str(given.model), *tasks, *given.asking, *extra, *out]]

    need = needs.FITTED if fitted else needs.GRADED
    files = tuple(f"figures/{name}.{x}" for x in ("md", "json", "png"))
    return Part(f"figure{number}", DIFFKV, shows, (need, ANY_POLICY, *more), commands, files)


def _read_figure(number: int, shows: str) -> Part:
    """A figure of ``benchmarks.figures`` from a forward pass."""
    name = f"fig{number}"

    def commands(given: Given) -> list[Command]:
        out = ["--output", str(given.output / "figures")]
        return [["benchmarks.figures", name, "--model", str(given.model), *_tasks(given.read), *given.asking, *out]]

    files = tuple(f"figures/{name}.{x}" for x in ("md", "json", "png"))
    return Part(f"figure{number}", DIFFKV, shows, (needs.PROMPTS,), commands, files)


def _table(
    name: str, number: str, shows: str, need: Need, of: Callable[[Given], list[str]], paper: str = DIFFKV
) -> Part:
    """A table of ``benchmarks.quality.tables``."""

    def commands(given: Given) -> list[Command]:
        out = ["--tables", number, "--name", name, "--output", str(given.output / "tables")]
        return [["benchmarks.quality.tables", "--model", str(given.model), *_tasks(of(given)), *given.asking, *out]]

    snapkv = served(needs.SNAPKV, "SnapKV")
    files = tuple(f"tables/{name}.{x}" for x in ("md", "json"))
    return Part(name, paper, shows, (need, ANY_POLICY, snapkv), commands, files)


def _others(given: Given) -> list[str]:
    return [x for x in given.answered if kind_of(x) not in (*TABLE_1, LONGBENCH, "gpqa", "aime")]


def _kernels(*parts: str) -> Callable[[Given], list[Command]]:
    def commands(given: Given) -> list[Command]:
        quick = ["--quick"] if given.quick else []
        return [["benchmarks.kernels", "--parts", *parts, *quick, "--out", str(given.output / "_".join(parts))]]

    return commands


def _serving(given: Given, folder: str) -> Command:
    extra = [f"--extra-server-args={shlex.join(given.server_args)}"] if given.server_args else []
    model = ["--model", str(given.model), "--kv-gib", f"{given.kv_gib:g}", *extra]
    return [*model, "--diffkv", "default={}", "--output", str(given.output / folder)]


def _step_profile(given: Given) -> list[Command]:
    profile = ["benchmarks.serving.step_profile", *_serving(given, "profile")]
    length = str(min(1024, given.context // 4))
    batch = ["--batch", "8" if given.quick else "128", "--length", length]
    return [[*profile, *batch], [*profile, "--prompts", "--length", length]]


def _latency(given: Given) -> list[Command]:
    lengths = [min(x, given.context // 4) for x in ((256,) if given.quick else (1024, 2048, 4096))]
    decode = [f"8x{x}" for x in dict.fromkeys(lengths)]
    more = [
        "--prompt",
        str(lengths[-1]),
        "--decode",
        *decode,
        *(["--tokens", "8", "--repeat", "2"] if given.quick else []),
    ]
    return [["benchmarks.serving.latency", *_serving(given, "latency"), *more]]


def _loads(name: str, load: str, usual: dict[str, object], quick: dict[str, object]) -> Part:
    """A figure of ``benchmarks.serving``."""
    shows = {"arrivals": "latency over the rate of arrivals", "batch": "throughput and how many requests run"}[load]

    def commands(given: Given) -> list[Command]:
        size = min(1024, given.context // 4)
        fields = {**(quick if given.quick else usual), "input": min(64, size) if given.quick else size}
        asked = ["--load", f"{load}={json.dumps(fields)}", "--name", name]
        return [["benchmarks.serving", *_serving(given, "serving"), *asked]]

    files = (f"serving/{name}.md", f"serving/{name}.json", f"serving/{name}_{load}.png")
    return Part(name, DIFFKV, f"{shows}, against stock SGLang", (needs.KV_GIB, ANY_POLICY), commands, files)


def _leankv(given: Given) -> list[Command]:
    quick = QUICK_MASSES if given.quick else []
    out = ["--output", str(given.output / "leankv")]
    return [
        ["benchmarks.quality.leankv", "--model", str(given.model), *_tasks(given.fitted), *given.asking, *quick, *out]
    ]


def _layers(given: Given) -> list[Command]:
    long = [x for x in given.sampled if kind_of(x) == LONGBENCH]
    spec = [*long, *given.sampled, *(f"wikitext={x}" for x in [given.text] if x)][0]
    out = ["--output", str(given.output / "xkv" / "layers.json")]
    more = [*given.selection, "--min-retention", RETENTION]
    return [["sglang_diffkv.calibrate.layers", "--model", str(given.model), "--task", spec, *more, *out]]


def _xkv(given: Given) -> list[Command]:
    tasks = given.of((LONGBENCH,)) or given.answered
    ratios = ["--ratios", *(QUICK_RATIOS if given.quick else RATIOS)]
    out = [*ratios, "--output", str(given.output / "xkv")]
    return [["benchmarks.quality.xkv", "--model", str(given.model), *_tasks(tasks), *given.asking, *out]]


def _closeness(given: Given) -> list[Command]:
    tasks = _tasks([f"wikitext={given.text}", f"continuation={given.text}"])
    configs = [x for config in CONFIGS if "snapkv" not in config for x in ("--config", config)]
    out = ["--output", str(given.output / "text")]
    return [["sglang_diffkv.evaluate", "--model", str(given.model), *configs, *tasks, *given.asking, *out]]


_PRUNING = (served(needs.SNAPKV, "SnapKV"), served(needs.HEAVY, "H2O"))
PARTS = (
    _read_figure(2, "how widely attention scores are spread, and value norms"),
    _read_figure(3, "attention scores of the tokens of one sequence"),
    _read_figure(4, "critical tokens by layer"),
    _read_figure(5, "critical tokens by KV head"),
    _figure(8, "one precision for every token, and its mirror image", quick=QUICK_TIERS),
    _figure(9, "pruning by head against equal budgets", *_PRUNING, quick=QUICK_PRUNING),
    _figure(10, "accuracy and bytes over the thresholds", quick=QUICK_THRESHOLDS, fitted=True),
    _figure(
        11, "accuracy against memory", *_PRUNING, quick=[*QUICK_TIERS, *QUICK_THRESHOLDS, *QUICK_PRUNING]
    ),
    _figure(12, "tokens by tier and task"),
    _table("table1", "1", "benchmarks", needs.BENCHMARKS, lambda given: given.of(TABLE_1)),
    _table("table2", "2", "LongBench", needs.LONG, lambda given: given.of((LONGBENCH,))),
    _table("table3", "3", "thinking models", needs.THINKING, lambda given: given.of(TABLE_3)),
    Part(
        "figure13", DIFFKV, "page management on GPU and CPU, decode steps and prompts", (needs.GPU,),
        _kernels("management", "prompts"),
        tuple(f"management_prompts/kernels{x}" for x in (".md", ".json", "_management.png")),
    ),
    Part(
        "figure14", DIFFKV, "where the time of a decode step and of a prompt goes",
        (needs.GPU, needs.KV_GIB, ANY_POLICY), _step_profile,
        tuple(f"profile/{kind}_{{model}}{x}" for kind in ("step", "prompt") for x in (".md", ".json", ".png")),
    ),
    Part(
        "figure15a", DIFFKV, "decode attention against other kernels", (needs.GPU,), _kernels("attention"),
        ("attention/kernels.md", "attention/kernels.json", "attention/kernels.png"),
    ),
    Part(
        "figure15b", DIFFKV, "latency of a few requests, against stock SGLang", (needs.KV_GIB, ANY_POLICY), _latency,
        ("latency/latency_{model}.md", "latency/latency_{model}.json"),
    ),
    _loads(
        "figure16", "arrivals", {"output": 256}, {"rates": [1, 2], "seconds": 5, "output": 16}
    ),
    _loads("figure17", "batch", {}, {"requests": 4, "output": 32, "concurrency": 4}),
    Part(
        "leankv-table1", LEANKV, "fewest bytes that lose nothing, and that lose 5% (and its figure 9)",
        (needs.FITTED, ANY_POLICY, served(needs.LEANKV, "LeanKV")), _leankv,
        tuple(f"leankv/table1.{x}" for x in ("md", "json", "png")),
    ),
    Part(
        "xkv-layers", XKV, f"retention R by layer, and sizes by layer at R = {RETENTION} (figures 3 and 4)",
        (needs.SAMPLE,), _layers, tuple(f"xkv/layers.{x}" for x in ("md", "json", "png")), markdown=True,
    ),
    Part(
        "xkv-tables", XKV, "tables II and III: methods that keep few tokens (and figure 12)",
        (needs.ANSWERED, ANY_POLICY, *_PRUNING, served(needs.XKV, "XKV")), _xkv,
        tuple(f"xkv/xkv.{x}" for x in ("md", "json", "png")),
    ),
    _table("other-tasks", "others", "task files that the papers do not have", needs.OTHERS, _others, NONE),
    Part(
        "text", NONE, "perplexity and distributions against bf16's, prompts and generation", (needs.TEXT, ANY_POLICY),
        _closeness, ("text/results.md", "text/results.json"),
    ),
)  # fmt: skip
