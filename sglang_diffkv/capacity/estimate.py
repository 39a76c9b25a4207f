"""A plan: for each setting how many tokens fit, how many requests run, how fast, and what a trace finds again."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_diffkv.capacity.gpus import Gpu
from sglang_diffkv.capacity.held import ON_TEXT, Holding, Running, StockHolding, running, tier_shares
from sglang_diffkv.capacity.memory import GIB, Budget, capacity_of, graph_requests, plan_of
from sglang_diffkv.capacity.model import Model
from sglang_diffkv.capacity.settings import Setting
from sglang_diffkv.capacity.speed import LEAST_PARAMETERS, Speed, speed_of
from sglang_diffkv.capacity.trace import HitRates, Trace, hit_rates
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.plan import planned_request_rows


@dataclass(frozen=True)
class Load:
    """Requests of ``prompt`` + ``reply`` tokens on ``ranks`` GPUs, at most ``most`` at once (None: SGLang's rule).

    Attributes:
        high_share: of the tokens outside window and sinks, in the first tier; None for what was measured.
        host_gib: of a host tier behind the GPU's, for all ranks together.
    """

    prompt: int
    reply: int
    ranks: int = 1
    most: int | None = None
    high_share: float | None = None
    host_gib: float = 0.0


@dataclass(frozen=True)
class Row:
    """What a plan says of one setting. Bytes are those on one rank.

    Attributes:
        token_bytes: of a request at its end, pages and their free slots included, by its tokens. of_bf16: to bf16's.
        capacity: tokens of the pool in its own unit, of the high tier here: ``max_total_num_tokens``.
        tokens: that fit of requests at their ends. rows: requests that SGLang lets run. table_ends: whether no more run
            because SGLang's table of requests, by its own rule, has no more rows.
        shares: of the tokens outside window and sinks, by tier; None for SGLang's own caches.
        assumed: whether these were measured elsewhere or given. speed: None without a GPU. hits: None without a trace.
    """

    setting: Setting
    token_bytes: float
    of_bf16: float
    capacity: int
    tokens: int
    rows: int
    table_ends: bool
    running: Running
    shares: tuple[float, ...] | None
    assumed: bool
    speed: Speed | None
    hits: HitRates | None


def plan_rows(
    settings: list[Setting], model: Model, gpu: Gpu | None, budget: Budget, load: Load, trace: Trace | None
) -> list[Row]:
    """A row for each setting. Raises ConfigError for a setting that this model cannot be served with."""
    return [_row(setting, model, gpu, budget, load, trace) for setting in settings]


def holding_of(setting: Setting, model: Model, budget: Budget, load: Load) -> Holding | StockHolding:
    """What requests of a setting hold in the bytes of a rank, and how many tokens fit."""
    heads = model.ranks_heads(load.ranks)[0]
    if setting.config is None:
        size = model.layers * heads * (model.head_dim + model.v_head_dim) * setting.element
        return StockHolding(budget.cache // size, size, model.spans)
    try:
        plan = plan_of(model, setting.config, load.ranks)
        tier_shares(setting.config, load.high_share)
    except ConfigError as error:
        raise ConfigError(f"{setting.name}: {error}") from None
    return Holding(plan, capacity_of(plan, model, budget, load.most), load.high_share)


def _row(setting: Setting, model: Model, gpu: Gpu | None, budget: Budget, load: Load, trace: Trace | None) -> Row:
    holding = holding_of(setting, model, budget, load)
    length = load.prompt + load.reply
    most = min(filter(None, (load.most, budget.states.most if budget.states else None)), default=None)
    rows = planned_request_rows(most, holding.capacity, model.context) - 1
    at_once = running(holding, load.prompt, load.reply, rows)
    ended = holding.bytes_of(load.prompt, load.reply)
    stock = StockHolding(0, model.layers * model.ranks_heads(load.ranks)[0] * 2 * (model.head_dim + model.v_head_dim))
    shares, assumed = (None, False) if setting.config is None else tier_shares(setting.config, load.high_share)
    speed = None
    if gpu is not None and at_once.together and model.weights.products >= LEAST_PARAMETERS:
        speed = speed_of(model, gpu, load.ranks, setting.kind, holding, at_once.mean, load.prompt, load.reply)
    return Row(
        setting=setting,
        token_bytes=ended / length,
        of_bf16=ended / stock.bytes_of(load.prompt, load.reply),
        capacity=holding.capacity,
        tokens=int(holding.capacity * length / holding.tokens(load.prompt, load.reply)),
        rows=rows,
        table_ends=most is None and at_once.together == rows,
        running=at_once,
        shares=shares,
        assumed=assumed,
        speed=speed,
        hits=None if trace is None else _hits(holding, load, trace),
    )


def _hits(holding: Holding | StockHolding, load: Load, trace: Trace) -> HitRates:
    """Of a prefix cache that has the pool to itself, in tokens of the trace's mean prompt."""
    length = max(trace.mean_prompt, 1)
    near = holding.capacity * length / holding.tokens(length, 0)
    far = load.host_gib * GIB / (holding.bytes_of(length, 0) * load.ranks / length)
    return hit_rates(trace, near, far)


def assumptions(rows: list[Row], model: Model, gpu: Gpu | None, load: Load, trace: Trace | None) -> list[str]:
    """What the figures of a plan rest on, a sentence or two each."""
    said = []
    if any(x.assumed for x in rows):
        text = "; ".join(f"{x.setting.name} {_tiers(x)}" for x in rows if x.assumed and x.shares is not None)
        where = (
            "as given (--high-share)"
            if load.high_share is not None
            else "measured on 1,008 questions with a model of 57M parameters; on prose fewer are high "
            f"({ON_TEXT:.0%} at alpha_high 3). config.json does not tell: measure yours, and give --high-share"
        )
        said.append(f"Tokens outside window and sinks, by tier: {text}. {where[0].upper()}{where[1:]}.")
    said.append(
        "at once: requests that begin together and reach their ends, none retracted. staggered: mean of those that "
        "begin one after another while others wait. Prefixes that requests share come on top."
    )
    if ended := [x for x in rows if x.table_ends]:
        ends = ", ".join(f"at {count:,} ({_named(ended, count)})" for count in sorted({x.rows for x in ended}))
        said.append(
            f"SGLang's table of requests ends {ends}: no more run at once, though more may fit. "
            "--max-running-requests gives the table more rows."
        )
    if model.spans:
        sliding = sum(map(bool, model.spans))
        said.append(
            f"{sliding} of {model.layers} layers have a sliding window: diffkv holds their newest tokens, and "
            "stock is counted as if SGLang's pools for them fitted exactly."
        )
    if gpu is not None and model.weights.products < LEAST_PARAMETERS:
        said.append(
            "No tokens/s: a model of less than a billion parameters waits for the host, which was not measured."
        )
    elif gpu is not None:
        said.append(_speed_basis(gpu, load))
        graphs = graph_requests(gpu, load.ranks)
        if any(x.running.mean > graphs for x in rows):
            said.append(
                f"Beyond {graphs:,} requests SGLang decodes without CUDA graphs, slower than that: give the server "
                "--cuda-graph-max-bs-decode for as many as run."
            )
    if trace is not None:
        said.append(
            f"found: share of the trace's prompt tokens ({len(trace.requests):,} requests), in an ideal cache that has "
            "all of the pool and holds prompts alone. Running requests take part of it, so expect less."
        )
    if load.host_gib:
        said.append(
            "host: what a prefix cache in the host's memory would find behind the GPU's (--enable-hierarchical-cache). "
            "The doctor says whether a server would refuse it."
        )
    return said


def _speed_basis(gpu: Gpu, load: Load) -> str:
    basis = (
        "tokens/s: a step reads weights, keys and values at bandwidths that kernels and servers reached "
        "(SGLang 0.5.17, Llama-3-8B's shape)"
    )
    if not gpu.measured:
        basis += f" on H100 and H200, scaled by {gpu.name}'s bandwidth (~): nothing was measured there"
    else:
        basis += "; with prompts: each request computes its whole prompt"
    return basis + (f"; {load.ranks} ranks were not measured" if load.ranks > 2 else "") + "."


def _named(rows: list[Row], count: int) -> str:
    """Settings with so many rows in SGLang's table."""
    return ", ".join(x.setting.name for x in rows if x.rows == count)


def _tiers(row: Row) -> str:
    assert row.setting.config is not None and row.shares is not None
    return " / ".join(f"{share:.0%} {tier}" for tier, share in zip(row.setting.config.tiers, row.shares, strict=True))
