"""A stand-in for SGLang's request, and what SGLang of the installed version does with one and its prefix cache."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_diffkv.srt.versions.compat import installed

V17, V23 = installed().row_on_request, installed().request_extents


END = 9
"""A token behind which no reply goes on."""


class Fields(SimpleNamespace):
    """Some fields of a request. As SGLang's it is equal to itself alone."""

    __eq__, __hash__ = object.__eq__, object.__hash__


class Match:
    """The longest prefix of a prompt that the tree has, its last token left out, locked.

    Attributes:
        node: where it ends.
        kv_slots: [length] int32, of its tokens.
        diffkv_branch: where its prompt branches off from others, as the tree says of a request.
    """

    diffkv_branch = 0

    def __init__(self, tree: Any, prompt: array, *, new_tokens: int = 250, extra_key: str | None = None) -> None:
        self.sampling_params, self.extra_key = SimpleNamespace(max_new_tokens=new_tokens), extra_key
        found = tree.match_prefix(MatchPrefixParams(key=RadixKey(prompt[:-1], extra_key), req=self))
        self.node = found.last_device_node
        indices = tree.path_device_indices(self.node) if V23 else found.device_indices
        self.kv_slots: torch.Tensor = indices.int()
        self.lock = tree.lock(self.node) if V23 else tree.inc_lock_ref(self.node)

    def __len__(self) -> int:
        return len(self.kv_slots)

    def unlock(self, tree: Any) -> None:
        """Give it up."""
        if V23:
            tree.unlock(self.lock)
        else:
            tree.dec_lock_ref(self.node)


class StandIn:
    """A request of one row whose prompt and reply so far are ``tokens``; ``end`` is where its next pass ends."""

    def __init__(self, prompt: array, row: int | None, match: Match, end: int, *, rid: str, priority: int = 0) -> None:
        self.rid, self.priority, self.extra_key, self.cache_salt = rid, priority, match.extra_key, None
        self.tokens, self.origin_input_ids, self.output_ids = prompt, prompt[:], array("q")
        self.sampling_params = SimpleNamespace(max_new_tokens=250, ignore_eos=False)
        self.extend_range = SimpleNamespace(end=end)
        self.prefix_len = len(match)
        self.prefilling, self.ended, self.is_retracted = True, False, False
        self.diffkv_branch = match.diffkv_branch
        self.last_node, self.lock, self.prefix_indices = match.node, match.lock, match.kv_slots.long()
        self.kv: Any = self if V17 else SimpleNamespace(cache_inserted_len=0, swa_evict_floor=0)
        self.kv.req_pool_idx, self.kv.cache_protected_len = row, len(match)

    @property
    def extend_end(self) -> int:
        return self.extend_range.end

    @property
    def full_untruncated_fill_ids(self) -> array:
        return self.tokens

    def get_fill_ids(self) -> array:
        return self.tokens[: self.extend_range.end]

    def update_finish_state(self, new_tokens: int) -> None:
        self.ended = self.output_ids[-1] == END

    def finished(self) -> bool:
        return self.ended


def take_row(pool: ReqToTokenPool) -> int:
    """A row of SGLang's table of requests."""
    return pool.free_slots.pop(0) if V17 else pool.alloc_rows(1)[0]


def give_row(pool: ReqToTokenPool, row: int) -> None:
    """The row back."""
    if V17:
        pool.free_slots.append(row)
    else:
        pool.free_rows([row])


def offer(tree: Any, req: Any, *, chunked: bool = False) -> None:
    """What SGLang does when the prompt, or with ``chunked`` a chunk that does not end it, has run."""
    if V23:
        tree.checkpoint(req, up_to=req.extend_end)
    else:
        tree.cache_unfinished_req(req, chunked=chunked)
    req.prefix_len = req.extend_end


def leave(tree: Any, req: Any, end: int, *, insert: bool) -> None:
    """What SGLang does when a request of ``end`` tokens ends: offer them to the tree or not, and free its KV slots."""
    req.ended = True
    if V17:
        tree.cache_finished_req(req, is_insert=insert, kv_len_to_handle=end)
        return
    if insert and V23:
        tree.checkpoint(req, up_to=end)
    elif insert:
        tree.insert_req(req, up_to=end)
    kv_slots = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx, req.kv.cache_protected_len : end]
    tree.token_to_kv_pool_allocator.free(kv_slots.long())
    if V23:
        tree.unlock(req.lock)
    else:
        tree.dec_lock_ref(req.last_node)
