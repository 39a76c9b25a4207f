"""The figures as a page, as Prometheus reads them, and as lines for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from sglang_diffkv.page import BAR, Part, bar, document, flow, html, number, percent, table, tag, tiles
from sglang_diffkv.shadow.exchange import REASONS

PREFIX = "diffkv_shadow_"
UNKNOWN = "not known yet"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.2f}%"


def _nats(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.5f}"


def _error(found: Mapping[str, Any], factor: float, unit: str, digits: int) -> str:
    error = found["error"]
    return "" if error is None else f"± {factor * error:.{digits}f}{unit}, standard error over requests"


def _ranges(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """``0 to 255``, and ``65,536 and more`` for the last one."""
    ends = [group["from"] - 1 for group in groups[1:]]
    found = [
        number(group["from"]) + (f" to {number(end)}" if end > group["from"] else "")
        for group, end in zip(groups, ends)
    ]
    return [*found, f"{number(groups[-1]['from'])} and more"]


def render(told: Mapping[str, Any], about: Mapping[str, Any], *, refresh: bool = False) -> str:
    """The page. ``about``: ``url``, ``reference``, ``share`` (None for a file) and ``problem``."""
    asked, parted = told["requests"], told["parted"]
    lead: list[Any] = [f"{about['url']}, judged by {about['reference']}. {_now()}."]
    if about["share"] is not None:
        lead.append(f"{100 * about['share']:g}% of its requests are sampled; no prompt is stored.")
    if about["problem"]:
        lead.append(tag("span", f"Nothing is judged: {about['problem']}", class_="wrong"))
    figures = [
        ("same likeliest token", _share(told["agreement"]["mean"]), _error(told["agreement"], 100, " points", 2)),
        ("divergence, nats", _nats(told["divergence"]["mean"]), _error(told["divergence"], 1, "", 5)),
        ("requests judged", number(asked["judged"]), f"of {number(asked['sampled'])} sampled"),
        ("replies that part", _share(parted["share"]), _first_part(parted)),
        ("prompt tokens cached", _share(told["share_cached"]), f"of {number(told['prompt_tokens'])}, when asked again"),
    ]
    prompts, positions = told["by_prompt"], told["by_position"]
    header = ("tokens", "same likeliest", BAR, "divergence, nats")
    by_prompt = table(
        "By tokens of the prompt",
        ("prompt", "requests", *header),
        [
            (name, number(x["requests"]), *_cells(x))
            for name, x in zip(_ranges(prompts), prompts, strict=True)
            if x["tokens"]
        ],
    )
    by_position = table(
        "By place in the reply",
        ("token", *header),
        [(name, *_cells(x)) for name, x in zip(_ranges(positions), positions, strict=True) if x["tokens"]],
    )
    left_out = table(
        "Sampled, and not judged",
        ("why", "requests"),
        [(REASONS[name], number(count)) for name, count in asked["left_out"].items()],
    )
    covered = UNKNOWN if told["covered"] is None else percent(told["covered"])
    explained = (
        "Divergence: Kullback-Leibler, of the server's next token from the reference's, at least. "
        f"The likeliest tokens that both tell have {covered} of the probability. "
        "A reply parts where no likeliest token is the same."
    )
    parts = [
        Part("overview", "Overview", html([tiles(figures), tag("p", explained, class_="soft")])),
        Part("prompts", "Prompts", flow(by_prompt)),
        Part("positions", "Replies", flow(html([by_position, _parting(parted)]))),
        Part("left-out", "Left out", flow(left_out)),
    ]
    return document("Shadow of a server", lead, parts, refresh=refresh, end="docs/quality.md says how it is measured.")


def _now() -> str:
    return f"Read at {datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _cells(x: Mapping[str, Any]) -> tuple[Any, ...]:
    return number(x["tokens"]), _share(x["share_agreeing"]), bar(x["share_agreeing"]), _nats(x["divergence"])


def _first_part(parted: Mapping[str, Any]) -> str:
    return "" if parted["mean_token"] is None else f"behind {parted['mean_token']:,.1f} tokens on average"


def _parting(parted: Mapping[str, Any]) -> Any:
    lows = [0, *(bound + 1 for bound in parted["up_to"][:-1])]
    names = _ranges([{"from": low} for low in lows])
    lines = [(name, number(count)) for name, count in zip(names, parted["counts"], strict=True) if count]
    return table("First token on which they part", ("token", "replies"), lines)


FAMILIES: tuple[tuple[str, str, str], ...] = (
    ("requests_total", "counter", "Requests that went through the proxy."),
    ("sampled_requests_total", "counter", "Of these, those that were to be judged."),
    ("judged_requests_total", "counter", "Of these, those that were."),
    ("left_out_requests_total", "counter", "Those that were not, by why."),
    ("waiting_requests", "gauge", "Those that wait to be judged."),
    ("tokens_total", "counter", "Tokens of judged replies."),
    ("agreeing_tokens_total", "counter", "Of these, those where both servers have the same likeliest token."),
    ("divergence_nats_total", "counter", "Sum over these tokens of the divergence from the reference, at least."),
    ("parted_token", "histogram", "First token of a judged reply on which the servers part."),
    ("reference_unfit", "gauge", "1 if the reference compresses, or serves another model."),
)


def metrics(told: Mapping[str, Any], problem: str) -> str:
    """The text form of Prometheus."""
    asked, tokens, parted = told["requests"], told["tokens"], told["parted"]
    values: dict[str, list[tuple[str, float]]] = {
        "requests_total": [("", asked["forwarded"])],
        "sampled_requests_total": [("", asked["sampled"])],
        "judged_requests_total": [("", asked["judged"])],
        "left_out_requests_total": [(f'{{reason="{x}"}}', asked["left_out"].get(x, 0)) for x in REASONS],
        "waiting_requests": [("", asked["waiting"])],
        "tokens_total": [("", tokens["tokens"])],
        "agreeing_tokens_total": [("", tokens["agreeing"])],
        "divergence_nats_total": [("", (tokens["divergence"] or 0.0) * tokens["tokens"])],
        "reference_unfit": [("", float(bool(problem)))],
    }
    lines = []
    for name, kind, about in FAMILIES:
        lines += [f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {kind}"]
        lines += [f"{PREFIX}{name}{labels} {value:.12g}" for labels, value in values.get(name, ())]
        if kind == "histogram":
            lines += _histogram(f"{PREFIX}{name}", parted)
    return "\n".join(lines) + "\n"


def _histogram(name: str, parted: Mapping[str, Any]) -> list[str]:
    found, below = [], 0
    for bound, count in zip(parted["up_to"], parted["counts"], strict=True):
        below += count
        found.append(f'{name}_bucket{{le="{"+Inf" if bound is None else bound}"}} {below}')
    total = (parted["mean_token"] or 0.0) * parted["requests"]
    return [*found, f"{name}_sum {total:.12g}", f"{name}_count {parted['requests']}"]


def lines(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values, for a terminal."""
    asked, parted = told["requests"], told["parted"]
    left_out = [(f"left out: {REASONS[name]}", number(count)) for name, count in asked["left_out"].items()]
    agreement, divergence = told["agreement"], told["divergence"]
    return [
        ("requests judged", f"{number(asked['judged'])} of {number(asked['sampled'])}"),
        ("tokens of their replies", number(told["tokens"]["tokens"])),
        ("same likeliest token", f"{_share(agreement['mean'])} {_error(agreement, 100, ' points', 2)}".strip()),
        ("divergence, nats", f"{_nats(divergence['mean'])} {_error(divergence, 1, '', 5)}".strip()),
        ("replies that part", f"{_share(parted['share'])} {_first_part(parted)}".strip()),
        ("prompt tokens cached", _share(told["share_cached"])),
        *left_out,
    ]
