"""The serving benchmark's records as Markdown tables, with ratios to the bf16 and fp8 servers of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.provenance import headline
from benchmarks.serving.session import OK, Record
from sglang_diffkv.evaluate.report import markdown, shares_cell

HEADER = (
    "backend",
    "output tok/s",
    "to bf16",
    "to fp8",
    "TTFT p50 / p99 ms",
    "ITL p50 / p99 ms",
    "running mean / max",
    "while others wait",
    "of the bound %",
    "retracted",
    "cached tokens",
    "KV B/token",
    "of bf16",
    "high / low / pruned %",
    "cache GiB",
    "start s",
)


def reference(records: Sequence[Record], record: Record, dtypes: Sequence[str]) -> Record | None:
    """The run's first successful stock record of one of these dtypes at the same point."""
    for other in records:
        same = all(other.get(key) == record.get(key) for key in ("load", "label", "run"))
        if same and other["status"] == OK and other["dtype"] in dtypes:
            return other
    return None


def ratio(records: Sequence[Record], record: Record, dtypes: Sequence[str]) -> float | None:
    """Output throughput over that of the reference."""
    other = reference(records, record, dtypes)
    if record["status"] != OK or other is None:
        return None
    return record["output_throughput"] / other["output_throughput"]


BF16 = ("bf16",)
FP8 = ("fp8_e4m3", "fp8_e5m2")


def with_ratios(records: Sequence[Record]) -> list[Record]:
    """The records, each with its throughput ratios."""
    return [{**x, "to_bf16": ratio(records, x, BF16), "to_fp8": ratio(records, x, FP8)} for x in records]


def of_bound(records: Sequence[Record], record: Record) -> float | None:
    """Requests running while others wait, over how many a token's bytes allow, judged by bf16's server."""
    other = reference(records, record, BF16)
    if other is None or record["status"] != OK or None in (record["running_saturated"], other["running_saturated"]):
        return None
    return record["running_saturated"] * record["ratio_pages"] / other["running_saturated"]


def number(value: Any, form: str = ".0f") -> str:
    """A formatted number, or nothing."""
    return "" if value is None else format(value, form)


def pair(record: Record, first: str, second: str, form: str) -> str:
    """Two figures with a slash between them."""
    return f"{number(record[first], form)} / {number(record[second], form)}"


def shares(record: Record) -> str:
    """The tiers' shares in percent, of a DiffKV record."""
    if "share_high" not in record:
        return ""
    return shares_cell(record, digits=1)


def spread(record: Record) -> str:
    """The least and the most throughput of several runs."""
    return f" ({record['least']:,.0f} to {record['most']:,.0f}, n {record['runs']})" if "runs" in record else ""


def row(record: Record, records: Sequence[Record]) -> list[str]:
    """A record's cells. A run that failed or was skipped has its reason in place of the figures."""
    if record["status"] != OK:
        known = [number(record.get("cache_gib"), ".3f"), number(record.get("start_s"))]
        error = record["error"].replace("|", "\\|").replace("\n", " ")
        blank = [""] * (len(HEADER) - 4)
        return [record["backend"], f"{record['status']}: {error}", *blank, *known]
    bound = of_bound(records, record)
    return [
        record["backend"],
        number(record["output_throughput"], ",.0f" if record["output_throughput"] >= 100 else ".1f") + spread(record),
        number(record["to_bf16"], ".2f"),
        number(record["to_fp8"], ".2f"),
        pair(record, "median_ttft_ms", "p99_ttft_ms", ",.0f"),
        pair(record, "median_itl_ms", "p99_itl_ms", ".1f"),
        pair(record, "running_mean", "running_max", ".0f"),
        number(record["running_saturated"], ".1f"),
        number(None if bound is None else 100 * bound),
        number(record["retracted"]),
        number(record["cached_tokens"], ",d"),
        number(record["kv_bytes_per_token"], ",.0f"),
        number(record["ratio_pages"], ".3f"),
        shares(record),
        number(record["cache_gib"], ".3f"),
        number(record["start_s"]),
    ]


def medians(records: Sequence[Record]) -> list[Record]:
    """One record for each backend, load and point: the medians of its runs, with the least and the most throughput; the
    first run that is not ok where none is. Ratios are those of the medians."""
    runs: dict[tuple[str, str, str], list[Record]] = {}
    for x in records:
        runs.setdefault((x["backend"], x["load"], x["label"]), []).append(x)
    joined = []
    for each in runs.values():
        fine = [x for x in each if x["status"] == OK]
        if len(each) == 1 or not fine:
            joined.append(each[0])
            continue
        middle = {key: _median([x.get(key) for x in fine]) for key in fine[0]}
        throughputs = [x["output_throughput"] for x in fine]
        joined.append({**middle, "run": 0, "runs": len(fine), "least": min(throughputs), "most": max(throughputs)})
    return with_ratios(joined) if len(joined) < len(records) else joined


def _median(values: Sequence[Any]) -> Any:
    """Of numbers; of anything else, or where one is missing, the first."""
    if all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in values):
        middle = statistics.median(values)
        return round(middle) if all(isinstance(x, int) for x in values) else middle
    return values[0]


def tables(data: dict[str, Any]) -> str:
    """One table for each load, with a column for the point where a load has several."""
    parts = []
    for name, load in data["loads"].items():
        records = medians([x for x in data["records"] if x["load"] == name])
        labels = list(dict.fromkeys(x["label"] for x in records))
        header, rows = list(HEADER), [row(x, records) for x in records]
        if labels != [""]:
            header = [load["x_label"], *header]
            order = sorted(range(len(records)), key=lambda i: labels.index(records[i]["label"]))
            rows = [[f"{records[i]['x']:g}", *rows[i]] for i in order]
        parts.append(f"## {name}: {load['title']}\n\n{markdown(header, rows)}\n")
    return "\n".join(parts)


def _shared(ranks: int) -> str:
    return "" if ranks == 1 else f", shared by {ranks} GPUs, of one of which the tables' bytes are"


def document(data: dict[str, Any]) -> str:
    """The whole report."""
    setup = data["setup"]
    weights = "dummy weights" if setup["dummy"] else "its own weights"
    intro = (
        f"# Serving {setup['model']}\n\n{headline(data['provenance'])}\n\n"
        f"`{data['provenance']['command']}`\n\n"
        f"Every server has {setup['kv_gib']:g} GiB of KV cache{_shared(setup.get('tp_size', 1))} ({weights}, at most "
        f"{setup['max_running']} running requests) and the arguments `{' '.join(setup['server_args'])}`. "
        "Requests and retractions are from the servers' logs; DiffKV's bytes a token (its pages') and shares are over "
        "the finished requests. Of the bound: requests running while others wait, over bf16's divided by the ratio of "
        "the bytes a token.\n"
    )
    notes = "".join(f"\n{note}\n" for note in data.get("notes", ()))
    return f"{intro}{notes}\n{tables(data)}"
