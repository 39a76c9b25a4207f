"""The part of ``python -m sglang_diffkv.doctor`` that asks SGLang: hooks, options, the model's configuration."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from sglang_diffkv.calibration import Resolution, served, sources_of
from sglang_diffkv.config import CONFIG_ENV, CONFIG_OPTION, DiffKVConfig, read_config, source_of
from sglang_diffkv.errors import ConfigError, UnsupportedError
from sglang_diffkv.files import missing_model
from sglang_diffkv.findings import Findings
from sglang_diffkv.ladder import NOTHING_LOST, RUNGS, rungs
from sglang_diffkv.layout.page_format import PageFormat
from sglang_diffkv.layout.spans import SLACK, kept_in_layers
from sglang_diffkv.plan import CONTEXT_SLACK, STATES_TO_CACHE, planned_request_rows, state_room
from sglang_diffkv.srt.models import kv_scales
from sglang_diffkv.srt.models.hybrids import describe_layers, paged_layers
from sglang_diffkv.srt.models.scaling import configured_spans
from sglang_diffkv.srt.models.speculation import draft_room, drafts_of
from sglang_diffkv.srt.startup import own_choice
from sglang_diffkv.srt.startup.draft_model import bytes_of_slot
from sglang_diffkv.srt.startup.optional_parts import PARTS
from sglang_diffkv.srt.startup.preflight import configurator_of, model_reads_window, planned, reading_obstacle
from sglang_diffkv.srt.startup.preflight import kernels as _kernels
from sglang_diffkv.srt.tree.retracted import why_recomputed
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.versions import states as compat_states

GIB = 1 << 30
BACKEND_OPTION = "--attention-backend"
DEFAULTS = '{"thresholds": "default"}'


def check(
    findings: Findings,
    model: str | None,
    config: str | None,
    gib: float,
    options: Sequence[str],
    *,
    gpu: bool,
    found: bool,
) -> None:
    """Add what SGLang and the plugin say to ``findings``.

    Args:
        model: its folder, None to check the installation alone. config: as for ``--diffkv-config``.
        gib: of a device, for the cache. options: of the server. gpu: whether there is one.
        found: whether SGLang finds the plugin.
    """
    if not gpu:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    findings.note("configuration", None)
    if not _hooks_fit(findings, gpu, found):
        return
    findings.section = "Server"
    if model is None:
        _configuration_alone(findings, config, gpu)
        return
    if missing := missing_model(model):
        findings.refuse("model", f"--model-path {missing}")
        _refuse_bad(findings, config)
        return
    given = [] if config is None else ["--diffkv-config", config]
    chosen = any(x.partition("=")[0] == BACKEND_OPTION for x in options)
    device = [] if gpu or any(x.partition("=")[0] == "--device" for x in options) else ["--device", "cpu"]
    backend = [] if chosen else [BACKEND_OPTION, "diffkv"]
    least = ["--model-path", model, *device, *(x for x in options if x == "--trust-remote-code")]
    args = _arguments(findings, ["--model-path", model, *device, *backend, *options, *given])
    if args is None:  # the model is checked nevertheless, so that all is told at once
        args = _arguments(findings, [*least, BACKEND_OPTION, "diffkv", "--diffkv-config", DEFAULTS], again=True)
        if args is not None:
            _model(findings, args)
        return
    _server(findings, args)
    configurator = _model(findings, args)
    if configurator is not None:
        _memory(findings, configurator, config, gib)


def _hooks_fit(findings: Findings, gpu: bool, found: bool) -> bool:
    """Load SGLang's plugins as a server does, or this one where SGLang does not find it."""
    try:
        compat.require_tested_version()
    except UnsupportedError as error:
        findings.refuse("SGLang", str(error))
        return False
    where = "a GPU and on a CPU" if compat.sglang_version() in compat.GPU_VERSIONS else "a CPU only"
    findings.add("SGLang", f"{compat.sglang_version()} is a version that the plugin was tested with, on {where}")
    for problem in compat.untested_on_a_gpu("cuda" if gpu else "cpu"):
        findings.refuse("SGLang", problem)
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_diffkv.srt.hooks.applied import verify_hooks
    from sglang_diffkv.srt.hooks.registration import register

    load_plugins()
    if not found:
        register()
        HookRegistry.apply_hooks()
    try:
        verify_hooks()
    except UnsupportedError as error:
        findings.refuse("hooks", str(error))
        return False
    from sglang_diffkv.srt.hooks.table import HOOKS

    findings.add("hooks", f"all {len(HOOKS)} fit this SGLang")
    return True


def _configuration_alone(findings: Findings, given: str | None, gpu: bool) -> None:
    try:
        config = read_config(given)
        source = source_of(given or os.environ.get(CONFIG_ENV, ""), CONFIG_OPTION if given else CONFIG_ENV)
        sources = sources_of(config, dict.fromkeys(config.model_fields_set, source))
        if config.thresholds == "default":  # else they are looked up for a model
            findings.note("configuration", Resolution(config, "no model was given", sources).report())
        if not config.chosen_at_start:
            findings.add("kernels", _kernels(config, on_gpu=gpu))
    except (ConfigError, UnsupportedError) as error:
        findings.refuse("configuration", str(error))
        return
    findings.add("model", "none given: add --model-path DIR to have one checked")


def _refuse_bad(findings: Findings, given: str | None) -> None:
    try:
        read_config(given)
    except ConfigError as error:
        findings.refuse("configuration", str(error))


def _arguments(findings: Findings, argv: Sequence[str], *, again: bool = False) -> Any:
    """SGLang's resolved arguments, by the way that a server takes; None if it would end there. What is found ``again``
    is not new."""
    from sglang.srt.server_args import prepare_server_args

    from sglang_diffkv.srt.startup import launch
    from sglang_diffkv.srt.versions.selection import is_selected

    level = [] if any(x.startswith("--log-level") for x in argv) else ["--log-level", "error"]
    said = io.StringIO()
    problem = ""
    try:
        with contextlib.redirect_stderr(said):
            args = prepare_server_args([*argv, *level])
        if not is_selected(args):
            findings.refuse("options", f"{BACKEND_OPTION} {args.attention_backend} is not this plugin's: use diffkv")
            return None
        if hasattr(args, "resolve_once"):
            args.resolve_once()
        launch.configure_unless_done(args)
        return args
    except SystemExit as end:
        last = said.getvalue().strip().splitlines()[-1:]
        problem = end.code if isinstance(end.code, str) else " ".join(last) or "SGLang does not take these options"
    except (ConfigError, UnsupportedError) as error:
        problem = str(error)
    except Exception as error:
        problem = _of_sglang(error)
    if not again:
        for reason in re.split(rf"\n(?={BACKEND_OPTION} )", problem.removeprefix("sglang_diffkv: ")):
            findings.refuse("options", reason)
    return None


def _of_sglang(error: Exception) -> str:
    return f"SGLang: {type(error).__name__}: {error}"


def _server(findings: Findings, args: Any) -> None:
    view = compat.resolved(args)
    findings.add("device", view.device, view.device, key="server.device")
    graphs = view.device == "cuda" and not view.disable_cuda_graph
    prompts = (
        "runs eagerly"
        if compat.prefill_graphs(view) == "disabled"
        else "in pieces between layers' attention, memory allowing"
    )
    findings.add("CUDA graphs", f"decode steps; prefill {prompts}" if graphs else "none")
    findings.add("overlap", "no" if view.disable_overlap_schedule else "yes: a step is scheduled while one runs")
    findings.note("server.cuda_graphs", graphs)
    findings.note("server.overlap", not view.disable_overlap_schedule)
    findings.note("server.ranks", view.tp_size)


def _model(findings: Findings, args: Any) -> Any:
    """What of SGLang's KVCacheConfigurator is known before weights are loaded; None if the model is refused."""
    from sglang_diffkv.srt.startup.validation import check_model

    findings.section = "Model"
    try:
        configurator = configurator_of(args)
        check_model(configurator)
    except UnsupportedError as error:
        findings.refuse("model", str(error))
        return None
    except Exception as error:
        findings.refuse("model", _of_sglang(error))
        return None
    model = configurator.model_config
    about = {
        "layers": model.num_hidden_layers,
        "query_heads": model.num_attention_heads,
        "kv_heads": model.get_total_num_kv_heads(),
        "head_dim": model.head_dim,
        "dtype": str(model.dtype).removeprefix("torch."),
        "context": model.context_len,
    }
    findings.note("model", about)
    shape = f"{model.num_hidden_layers} layers, {model.num_attention_heads} query and {model.get_total_num_kv_heads()} "
    shape += f"KV heads of {model.head_dim}, {str(model.dtype).removeprefix('torch.')}"
    findings.add("model", f"can be served, as far as its config.json says: {shape}")
    configurator.attention_spans = _window(findings, model)
    if configurator.mambaish_config is not None:
        configurator.states = _states(findings, configurator)
    return configurator


def _states(findings: Findings, configurator: Any) -> Any:
    """What is compressed of a model with states, and what is not; ``planned_states``, None where only a server
    knows."""
    try:
        states = compat_states.planned_states(configurator.mambaish_config, configurator.server_args.tp_size)
    except Exception as error:
        findings.add(
            "states", f"SGLang says what they take in a server only ({error}): the figures here leave them out"
        )
        return None
    findings.add("layers", describe_layers(configurator, states), list(paged_layers(configurator)))
    return states


def _window(findings: Findings, model: Any) -> tuple[int, ...]:
    """What the server's layers will see, as ``layer_spans`` says once they are loaded; empty if that is all, or not
    known."""
    stated = configured_spans(model.hf_text_config)
    if not any(stated):
        return ()
    found = [x for x in stated if x]
    where = f"{max(found)} tokens in {len(found)} of {len(stated)} layers"
    reads = model_reads_window(model)
    if reads:
        findings.add("sliding window", f"of {where}, which hold {SLACK - 1} tokens more", max(found))
        return stated
    text = "SGLang does not read it for this model, whose layers see and hold all"
    if reads is None:
        text = (
            "whether SGLang's layers have it shows once they are loaded; the figures here are of layers that hold all"
        )
    findings.add("sliding window", f"config.json has one of {where}; {text}")
    return ()


def _rung(findings: Findings, configurator: Any, given: DiffKVConfig) -> DiffKVConfig:
    """The configuration that memory is told of where the model chooses: what an earlier start chose, if one is kept."""
    before = own_choice.earlier(configurator, given)
    name, said = (NOTHING_LOST, "one is chosen") if before is None else (before.name, f"{before.name} was chosen")
    hint = "" if before is not None else ". Start a server once, or name a preset, before you size by them"
    findings.add("rungs", f"{', '.join(RUNGS)}: {said} at the start; figures here are of {name}{hint}")
    return rungs(given)[name] if before is None else before.config(given)


def _memory(findings: Findings, configurator: Any, given: str | None, gib: float) -> None:
    """Thresholds, tiers and what fits into so many GiB of each device."""
    from sglang_diffkv.srt.startup.launch import users_configuration

    model, view = configurator.model_config, configurator.server_args
    context = model.context_len
    try:
        text, given_by = (users_configuration(), CONFIG_ENV) if given is None else (given, CONFIG_OPTION)
        resolved = served(text, view.model_path, given_by)
        obstacle = reading_obstacle(configurator)
        if (taken := own_choice.instead(configurator.arguments, resolved.config, obstacle)) is not None:
            resolved = taken.resolution(resolved)
        config = resolved.config
        findings.note("configuration", resolved.report())
        method = "" if config.chosen_at_start else f": {json.dumps(config.method.whole())}"
        findings.add("thresholds", f"{resolved.origin}{method}")
        if resolved.warning:
            findings.warn("thresholds", resolved.warning.removeprefix("DiffKV: "))
        every = own_choice.candidates(configurator.arguments, config)
        if config.chosen_at_start:
            if obstacle:
                raise own_choice.refusal(obstacle)
            config = _rung(findings, configurator, config)
        findings.add("prefix cache", "off" if view.disable_radix_cache else f"{config.prefix_fidelity} prompts")
        if scales := kv_scales.told(model, config.tiers):
            findings.add("KV scales", scales)
        draft_bytes = _draft_model(findings, configurator.arguments)
        plan = [planned(configurator, x, draft_bytes) for x in [*every, config]][-1]
        obstacle = why_recomputed(configurator, config)
        findings.add("kernels", _kernels(config, plan, on_gpu=plan.gpu, dtype=configurator.model_config.dtype))
        budget, slots = _without_states(findings, configurator, int(gib * GIB))
        most = min(filter(None, (view.max_running_requests, slots)), default=None)
        tokens = plan.capacity_in(
            budget,
            lambda capacity: planned_request_rows(most, capacity, context),
            context + CONTEXT_SLACK + draft_room(view),
        )
    except (ConfigError, UnsupportedError) as error:
        findings.refuse("configuration", str(error))
        return
    fmt, stock = plan.fmt, plan.fmt.bf16_token_bytes * plan.heads
    each = " on each rank" if view.tp_size > 1 else ""
    findings.add("bytes a token", f"bf16 {stock:,}{each}", stock, key="memory.bf16_token_bytes")
    for layout in fmt.layouts:
        name, size = layout.tier.name, layout.token_bytes * plan.heads
        key = f"memory.tier_token_bytes.{name}"
        findings.add(f"  {name}", f"{size:,}, {size / stock:.3f} of bf16", size, key=key)
    findings.note("memory.bytes", int(gib * GIB))
    where = f"{gib:g} GiB" + (" of each GPU" if view.tp_size > 1 else "")
    if budget <= 0:
        text = "none: states take all of it. Give fewer requests states (--max-mamba-cache-size), or more memory"
        findings.add(f"tokens in {where}", f"{text} (here --kv-gib)", 0, key="memory.tokens")
        return
    if not tokens:
        findings.refuse(f"tokens in {where}", f"--kv-gib {gib:g} has no room for one token of this model: give more")
        return
    text = _tokens_that_fit(tokens, fmt, plan.attention_spans, context)
    beside = " and the draft model's cache; bf16 with that cache alone" if draft_bytes else "; bf16 without either"
    text += f", with tables and scratch{beside}: {budget // (stock + draft_bytes):,}"
    findings.add(f"tokens in {where}", text, tokens, key="memory.tokens")
    findings.note("memory.bf16_tokens", budget // (stock + draft_bytes))
    geometry = plan.geometry(tokens, 2, context)
    pool, host = (pages * plan.fmt.page_bytes for pages in (geometry.num_pages, plan.host_pages(geometry)))
    text = f"computed again: {obstacle}" if obstacle else f"kept in up to {host / GIB:.2f} GiB of the host's memory"
    findings.add("retracted requests", text, host, key="memory.retracted_host_bytes")
    for part in PARTS:
        part.add_findings(findings, configurator.arguments, plan.host_room, pool, host)


def _tokens_that_fit(tokens: int, fmt: PageFormat, attention_spans: Sequence[int], context: int) -> str:
    """``tokens`` of the high tier in all layers, and those of the lowest tier in the same pages. In layers with a
    sliding window a sequence of ``context`` tokens holds its newest ones only, in the high tier whatever the policy."""
    high, low, several = fmt.high, fmt.low, len(fmt.layouts) > 1
    text = f"{tokens:,} if all are {high.tier.name}"
    if not any(attention_spans):
        return text + (f", up to {tokens * low.tokens // high.tokens:,} if all are {low.tier.name}" if several else "")
    sliding = [x for x in attention_spans if x]
    windows = kept_in_layers(sliding, context) * len(sliding) / len(attention_spans)
    full = 1 - len(sliding) / len(attention_spans)
    text += f"; of sequences of {context:,}, whose windows stay in {high.tier.name}, {tokens / (full + windows):,.0f}"
    if several:
        lowest = full * high.tokens / low.tokens + windows
        text += f", up to {tokens / lowest:,.0f} if all else is {low.tier.name}"
    return text


def _draft_model(findings: Findings, args: Any) -> int:
    """The bytes that each KV slot takes in a draft model's cache. Raises UnsupportedError where there is no such
    model."""
    try:
        size = bytes_of_slot(args)
    except Exception as error:
        raise UnsupportedError(f"the draft model (--speculative-draft-model-path): {_of_sglang(error)}") from None
    if size:
        findings.add(
            "draft model", f"{size:,} bytes for each KV slot, not compressed", size, key="memory.draft_token_bytes"
        )
    return size


def _without_states(findings: Findings, configurator: Any, budget: int) -> tuple[int, int | None]:
    """The bytes that SGLang leaves for keys and values, and how many requests run at most for want of states; None if
    the model has none."""
    if configurator.states is None:
        return budget, None
    view, size = configurator.server_args, configurator.states.mamba_cache_per_req
    ratio, alone = view.mamba_full_memory_ratio, view.disable_radix_cache
    ratio = STATES_TO_CACHE if ratio is None else ratio  # as SGLang 0.5.21 and later once it is asked for
    asked = view.max_mamba_cache_size or (view.max_running_requests if alone else None)
    drafts, running = drafts_of(view), view.max_running_requests
    slots, taken, most = state_room(budget, size, ratio, asked, shared=not alone, drafts=drafts, running=running)
    owners = f"{slots:,} requests" if alone else f"{slots:,}, of {most:,} requests and of the prefix cache"
    behind = " with those behind drafts" if drafts else ""
    text = f"{owners}, {taken / GIB:.2f} GiB of {budget / GIB:g}{behind}: not compressed"
    findings.add("states", text, taken, key="memory.states_bytes")
    return budget - taken, most
