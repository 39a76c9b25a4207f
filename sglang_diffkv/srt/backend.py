"""The attention backend that SGLang calls: one object for prefill and decode, over a page manager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_diffkv.attention.draft_trees import TreeLinks
from sglang_diffkv.attention.mixed import MixedWrapper
from sglang_diffkv.attention.verification import VerifyWrapper
from sglang_diffkv.attention.wrappers import DecodeWrapper, ExtendWrapper
from sglang_diffkv.config import DiffKVConfig, load_config
from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.fitted_rotation import of_rank as rotation_of_rank
from sglang_diffkv.fitted_rotation import read_rotation
from sglang_diffkv.kernels.rotate.fitted import FittedTransform
from sglang_diffkv.key_means import AUTO, of_rank, read_key_means
from sglang_diffkv.mem_pool.steps import LaunchedStep
from sglang_diffkv.noise_shaping import NoiseShaping
from sglang_diffkv.ops import Scaling
from sglang_diffkv.srt.models.scaling import scaling_of
from sglang_diffkv.srt.pool import DiffKVPool
from sglang_diffkv.srt.versions import compat
from sglang_diffkv.srt.whole_passes import WholePasses, capture


class DiffKVAttnBackend(AttentionBackend):
    """Extend and decode over compressed pages.

    The step's protocol: hooks plan it on the host; ``init_forward_metadata`` takes slots for all layers; each
    layer appends and attends; after the last layer the policy's decisions are carried out for all layers
    together. A CUDA graph holds all of a decode step but the table blocks that the host hands out.
    """

    def __init__(
        self, runner: Any, scalings: Sequence[Scaling] = (), sinks: torch.dtype | None = None, *,
        own_means: torch.Tensor | None = None, own_shaping: NoiseShaping | None = None,
    ):  # fmt: skip
        """``scalings``: of the model's layers, for which kernels are made ready; by default the usual one. ``sinks``:
        the type of their attention sinks, None if they have none. ``own_means``: [L, H, head_dim], key means of this
        rank's heads that the server found itself. ``own_shaping``: matrices that it fitted for them."""
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, DiffKVPool) or pool.manager is None:
            raise RuntimeError(
                "--attention-backend diffkv: the KV pool is not DiffKV's, so nothing would be compressed. "
                "The plugin's hooks did not take effect; see the log for 'Failed to apply hooks'."
            )
        self.token_to_kv_pool, self.req_to_token_pool = pool, runner.req_to_token_pool  # where models look for them
        self.manager = manager = pool.manager
        self.state = manager.state
        self.layers = {layer: index for index, layer in enumerate(pool.layers)}
        self.last_layer = pool.layers[-1]
        config = load_config()
        ops = manager.ops
        rotation = config.rotation if own_shaping is None else own_shaping.left_of(config.rotation)
        form: dict[str, Any] = {"rotation": rotation, "fitted": self._fitted(runner, config, own_shaping)}
        running = manager.running
        if running is not None:
            running.scaling = _one_scaling(scalings) or running.scaling
        queries = None if running is None else running.cache
        means = own_means if config.key_means == AUTO else self._key_means(runner, config, scalings, sinks)
        form["key_means"] = means
        self.decode = DecodeWrapper(ops, queries=queries, **form)
        self.extend = ExtendWrapper(ops, **form)
        self.mixed = MixedWrapper(self.extend, self.decode)
        self.verify: VerifyWrapper | None = None
        self.drafts_mask: Any = None
        self.needs_cpu_seq_lens = not manager.drafts  # SGLang need not wait for what was accepted
        if manager.drafts:
            self.verify = VerifyWrapper(ops, q_heads=manager.q_heads, longest_path=manager.longest_path, **form)
        self.new_tokens: ExtendWrapper | MixedWrapper | VerifyWrapper | None = self.extend
        """Of the pass that runs, where it is no decode step; None while SGLang captures graphs of a pass over prompts,
        which has no requests."""
        if self.state.pages.is_cuda:
            if config.gpu_ops == "triton":
                tails = compat.tree_page_size(runner.server_args) > 1
                self._make_ready(runner.dtype, config, scalings, sinks, tails=tails)
            if not compat.resolved(runner.server_args).disable_overlap_schedule:
                manager.device.stream = runner.forward_stream
        self.launched: LaunchedStep | None = None
        """The pass that runs, as the host planned it, if it is one over prompts."""
        self.whole_passes: WholePasses | None = None
        if self.state.pages.is_cuda and compat.prefill_graphs(runner.server_args) == compat.BETWEEN_LAYERS:
            self.whole_passes = WholePasses.create(manager, form, manager.geometry.max_tokens)

    def _key_means(
        self, runner: Any, config: DiffKVConfig, scalings: Sequence[Scaling], sinks: torch.dtype | None
    ) -> torch.Tensor | None:
        """Of this rank's heads, [L, H, head_dim]. Raises ConfigError and UnsupportedError."""
        if config.key_means is None:
            return None
        if any(scaling.cap for scaling in scalings):
            raise UnsupportedError(
                "diffkv: this model's layers have a logit cap, under which attention would not stay the same without "
                "the key_means. Drop them from --diffkv-config."
            )
        if sinks is not None:
            raise UnsupportedError(
                "diffkv: this model's layers have attention sinks, whose logits do not move with those of keys, so "
                "attention would not stay the same without the key_means. Drop them from --diffkv-config."
            )
        state, ranks = self.state, self.manager.ranks
        every = (state.num_layers, runner.model_config.get_total_num_kv_heads(), state.fmt.head_dim)
        return of_rank(read_key_means(config.key_means, *every), ranks.rank, ranks.size, state.num_heads)

    def _fitted(self, runner: Any, config: DiffKVConfig, own_shaping: NoiseShaping | None) -> FittedTransform:
        """What keys and values of this rank's heads are multiplied by. Raises ConfigError."""
        state, ranks, model = self.state, self.manager.ranks, runner.model_config
        if own_shaping is not None:
            group = self.manager.q_heads // state.num_heads
            return own_shaping.transform(state.dtype, state.device, config.rotation, group)
        found: dict[str, torch.Tensor] = {}
        for name, path, dim in (
            ("keys", config.key_rotation, state.fmt.head_dim),
            ("values", config.value_rotation, state.fmt.v_head_dim),
        ):
            if path is not None:
                every = (state.num_layers, model.get_total_num_kv_heads(), dim)
                read = read_rotation(f"{name.removesuffix('s')}_rotation", path, *every)
                mine = rotation_of_rank(read, ranks.rank, ranks.size, state.num_heads)
                found[name] = mine.to(state.device, state.dtype)
        return FittedTransform(**found)

    def _make_ready(
        self, dtype: torch.dtype, config: DiffKVConfig, scalings: Sequence[Scaling], sinks: torch.dtype | None, *,
        tails: bool,
    ) -> None:  # fmt: skip
        """Choose and compile the kernels, now that the model's layers are known. ``tails``: see ``warm_up``."""
        from sglang_diffkv.ops.gpu import choose_prefill
        from sglang_diffkv.ops.triton import TritonOps
        from sglang_diffkv.ops.warm_up import compile_kernels

        ops, policy = self.manager.ops, self.manager.policy
        assert isinstance(ops, TritonOps)
        choose_prefill(ops, self.state, config.prefill, scalings, sinks=sinks is not None)
        copies = config.prefix_fidelity == "exact"
        compile_kernels(
            ops, self.state, policy, dtype=dtype, scalings=scalings, rotation=self.extend.rotation, copies=copies,
            queries=self.decode.queries, sinks=sinks, key_means=self.decode.key_means, drafts=self.manager.drafts,
            trees=self.manager.longest_path > 0, tails=tails,
        )  # fmt: skip
        if self.manager.running is not None:
            self.manager.running.take_memory()

    # What SGLang's graph runner asks

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.manager.ops.prepare_graphs(max_bs)
        if self.verify is not None:
            self.verify.prepare_graphs(max_bs, self.manager.drafts)
            self.drafts_mask = compat.unread_mask(max_bs, self.manager.drafts, self.state.device)

    @property
    def verify_mask(self) -> Any:
        """Room for the mask that SGLang makes of drafts, which nothing reads here: links say what a tree is. Without it
        SGLang would make one over whole sequences in each pass."""
        return self.drafts_mask

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """A pass outside graphs."""
        self._prepare(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """What a graph cannot hold: for a replay the host's table blocks, the rest is captured."""
        if in_capture:
            self._prepare(forward_batch)
            return
        launched = self.manager.launch_step()
        if self.verify is not None and forward_batch.forward_mode.is_target_verify():
            links = self._links(forward_batch, needed=launched is not None)
            self.verify.replayed(forward_batch.batch_size, self.manager.drafts, links)

    use_captured_forward_metadata_for_breakable_cuda_graph = True
    """Tells SGLang to call the next two instead of ``init_forward_metadata``. Graphs of a pass over prompts hold what
    is between two layers' attention, whoever's tokens they are; attention runs between them, as in a pass without."""

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch: Any) -> None:
        """A capture, for so many tokens: of no request, so nothing is stored."""
        self.new_tokens = self.launched = None

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, capture_metadata: None, forward_batch: Any, *, static_forward_batch: Any = None
    ) -> None:
        """A pass over prompts, with graphs between its layers' attention, or as one graph. ``forward_batch``: without
        the tokens that fill it up to a captured size; SGLang cuts them off what layers get between graphs."""
        if self.whole_passes is not None and static_forward_batch is not None:
            counts = list(forward_batch.extend_seq_lens_cpu)
            if self.whole_passes.choose(len(static_forward_batch.input_ids), counts):
                return
        self.init_forward_metadata(forward_batch)

    def capture_whole(self, runner_backend: Any, shape_key: Any, forward: Callable[[], Any]) -> None:
        """Behind SGLang's capture of passes over prompts of one size: of whole ones. Arguments as of ``capture``."""
        if self.whole_passes is not None:
            self.new_tokens = self.whole_passes.wrapper
            out = runner_backend._outputs[shape_key]
            capture(runner_backend, shape_key, forward, self.whole_passes, out)
            self.new_tokens = None

    def filled_up(self, tokens: int) -> int | None:
        """As of ``WholePasses``."""
        return None if self.whole_passes is None else self.whole_passes.filled_up(tokens)

    def capture_commits(self, batches: Sequence[int]) -> None:
        """Graphs of what stores accepted drafts, for verifications of these sizes, whose own graphs are captured."""
        if self.verify is None or not self.state.pages.is_cuda:
            return
        pool = torch.cuda.graph_pool_handle()

        def recorder(launch: Callable[[], None]) -> Callable[[], None]:
            launch()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                launch()
            return graph.replay

        for batch in sorted(batches, reverse=True):
            self.verify.record(batch, self.manager.drafts, recorder)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """For SGLang's stream that plans passes, which is refused: links of trees would come too late."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        wrapper = self.decode if mode.is_decode() else self.new_tokens
        assert wrapper is not None, "_prepare comes first"
        wrapper.begin()

    def _prepare(self, forward_batch: Any) -> None:
        mode = forward_batch.forward_mode
        self.launched = None
        self.new_tokens = self.new_tokens or self.extend  # graphs of passes over prompts are captured by now
        if mode.is_idle():
            return
        upcoming = self.manager.counts.upcoming
        by_layer = upcoming is not None and bool(upcoming.prompts) and not upcoming.decoding
        launched = self.manager.launch_step(by_layer=by_layer)
        rows = forward_batch.req_pool_indices
        if mode.is_decode():
            self.decode.plan(rows, forward_batch.seq_lens)
            return
        if self.verify is not None and mode.is_target_verify():
            self.new_tokens = self.verify
            links = self._links(forward_batch, needed=launched is not None)
            self.verify.plan(rows, forward_batch.seq_lens, self.manager.drafts, links)
            return
        if launched is None or list(forward_batch.extend_seq_lens_cpu) != launched.new_tokens:
            raise RuntimeError("diffkv: SGLang runs a prefill that it did not schedule")
        count = len(launched.rows) - launched.decoding  # requests whose prompts run; those that decode come last
        tensors = (rows[:count], forward_batch.extend_prefix_lens[:count], forward_batch.extend_seq_lens[:count])
        shared_scores = self.manager.prompts.shared_scores
        shared_scores = {i: shared_scores[row] for i, row in enumerate(launched.rows) if row in shared_scores}
        numbers = (launched.start[:count], launched.new_tokens[:count])
        held = self.manager.rows
        self.extend.plan(
            *tensors, *numbers, prompts=launched.prompts, shared=[held.shared(row) for row in launched.rows[:count]],
            shared_scores=shared_scores, as_computed=all(map(held.as_computed, launched.rows[:count])),
        )  # fmt: skip
        if launched.decoding:
            # Copies, which lie where kernels were compiled for: at addresses that 16 divides.
            self.decode.plan(rows[count:].clone(), forward_batch.seq_lens[count:].clone())
        self.new_tokens = self.mixed if launched.decoding else self.extend
        self.launched = launched

    def _links(self, forward_batch: Any, *, needed: bool) -> TreeLinks | None:
        """Of the drafts' trees; None for chains, and where a graph is captured. ``needed``: requests have drafts."""
        drafts = forward_batch.spec_info
        if not self.manager.longest_path:
            return None
        if getattr(drafts, "retrieve_next_token", None) is None:
            if needed:
                raise RuntimeError("diffkv: SGLang verifies trees of drafts without their links")
            return None
        return TreeLinks(drafts.retrieve_next_token, drafts.retrieve_next_sibling)

    # Layers: ``torch.compile`` of a model (--enable-torch-compile) stops before each, and goes on behind it

    def _asked(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, sinks: torch.Tensor | None
    ) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, Scaling, torch.Tensor | None]:
        """What a layer asks, as ``Wrapper.run`` takes it."""
        if k is None or v is None:
            raise NotImplementedError("diffkv does not serve models that share one layer's KV with another")
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        return self.layers[layer.layer_id], q, k, v, scaling_of(layer), sinks

    def _answer(
        self, wrapper: DecodeWrapper | ExtendWrapper | MixedWrapper | VerifyWrapper, layer: Any, out: torch.Tensor
    ) -> torch.Tensor:
        """What a layer gets. Behind the last one the pass ends: a decode step's decisions are carried out; those on
        prompts follow the pass's results (``PageManager.end_pass``)."""
        if layer.layer_id == self.last_layer:
            if not isinstance(wrapper, VerifyWrapper):
                wrapper.end()
            if self.launched is not None:
                self.manager.computed(self.launched)
        return out.reshape(out.shape[0], -1)

    @torch.compiler.disable
    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> torch.Tensor:
        sinks = _sink_logits(more)
        if (wrapper := self.new_tokens) is None:
            return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        self.manager.device.reach(self.layers[layer.layer_id])
        return self._answer(wrapper, layer, wrapper.run(*self._asked(q, k, v, layer, sinks)))

    @torch.compiler.disable
    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> torch.Tensor:
        sinks = _sink_logits(more)
        return self._answer(self.decode, layer, self.decode.run(*self._asked(q, k, v, layer, sinks)))

    def support_triton(self) -> bool:
        return self.state.pages.is_cuda


def _one_scaling(scalings: Sequence[Scaling]) -> Scaling | None:
    """What all layers do to logits; None if that is not known. Raises UnsupportedError where they differ."""
    if len(set(scalings)) > 1:
        raise UnsupportedError(
            "diffkv: this policy scores running requests with one attention scale and logit cap, and the model's "
            "layers have several. Use another policy in --diffkv-config."
        )
    return scalings[0] if scalings else None


def _sink_logits(more: Mapping[str, Any]) -> torch.Tensor | None:
    """The attention sinks that a model gives its attention beside q, k and v, [Hq]. Anything else changes the
    result, and raises NotImplementedError."""
    given = sorted(name for name, value in more.items() if value is not None and value is not False)
    if given == ["sinks"]:
        sinks: torch.Tensor = more["sinks"]
        return sinks
    if given:
        raise NotImplementedError(
            f"diffkv does not compute attention with {', '.join(given)}: use another --attention-backend for this model"
        )
    return None
