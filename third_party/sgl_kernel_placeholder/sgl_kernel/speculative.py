"""What SGLang calls of ``sgl_kernel`` when it verifies drafts on a CPU, in plain PyTorch. Results go to the arguments
that the names say, as in the compiled build."""

import ctypes

import torch


def _spans(start: torch.Tensor, end: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(start.tolist(), end.tolist()))


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write a batch's new slots, request after request, to [start, end) of each request's line."""
    taken = 0
    for row, (start, end) in zip(req_pool_indices.tolist(), _spans(start_offset, end_offset)):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read the slots in [start, end) of each request's line, request after request."""
    read = 0
    for row, (start, end) in zip(req_pool_indices.tolist(), _spans(start_offset, end_offset)):
        out_cache_loc[read : read + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        read += end - start


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Slots of the accepted tokens, one after the other; ``accept_index`` has -1 where there is none."""
    index = accept_index.flatten()
    found = out_cache_loc[index[index >= 0].long()]
    accept_out_cache_loc[: len(found)] = found.to(accept_out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the slots of the ``topk * num_steps`` tokens behind each request's, request after request."""
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_steps, out_cache_loc, pool_len
    )


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy slots ``src_loc`` to ``tgt_loc`` in each of the buffers at ``data_ptrs``, whose slots are ``strides`` bytes."""
    for start, size in zip(data_ptrs.tolist(), strides.tolist()):
        lines = [ctypes.string_at(start + slot * size, size) for slot in src_loc.tolist()]
        for slot, line in zip(tgt_loc.tolist(), lines):
            ctypes.memmove(start + slot * size, line, size)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Each request's last accepted token; ``accept_tokens`` has ``accept_stride`` places a request."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Mask, positions and links of trees of drafts: of the tokens that the steps proposed, ``topk`` and then ``topk`` of
    each of ``topk``, those that ``selected_index`` [batch, draft_token_num - 1] names, in order. ``parent_list`` names
    the proposals that the later steps went on from. Raises NotImplementedError for a mask that has the tokens before
    the drafts (SGLang's ``TreeMaskMode`` other than QLEN_ONLY)."""
    if int(tree_mask_mode) != 1:
        raise NotImplementedError("the placeholder sgl_kernel has masks of drafts alone")
    count, batch = draft_token_num, len(verified_seq_len)
    mask = torch.eye(count, dtype=torch.bool).repeat(batch, 1, 1)
    mask[:, :, 0] = True
    lines = zip(selected_index.tolist(), parent_list.tolist())
    for request, (selected, parents) in enumerate(lines):
        places = {proposal: place + 1 for place, proposal in enumerate(selected)}
        for proposal, place in places.items():
            parent = places.get(parents[proposal // topk]) if proposal >= topk else 0
            if parent is not None:
                mask[request, place] |= mask[request, parent]
    tree_mask.copy_(mask.flatten())
    links = (positions, retrive_index, retrive_next_token, retrive_next_sibling)
    reconstruct_indices_from_tree_mask(tree_mask, verified_seq_len, *links, batch, count)


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    bs: int,
    draft_token_num: int,
) -> None:
    """Positions and links of trees of drafts: ``tree_mask`` [bs, n, n], flat, is true at [i, j] where j is i or one of its
    ancestors."""
    count = draft_token_num
    above = torch.tril(tree_mask.view(bs, count, count), -1)
    depth = above.sum(2)
    positions.copy_((verified_seq_len.view(-1, 1) + depth).flatten())
    node = torch.arange(count)
    retrive_index.copy_(torch.arange(bs * count).view(bs, count))
    parent = torch.where(above, node, -1).amax(2)  # [bs, n]
    child = (parent.unsqueeze(1) == node.view(1, -1, 1)) & (node > node.view(-1, 1))  # [bs, parent, child]
    sibling = (parent.unsqueeze(1) == parent.unsqueeze(2)) & (parent.unsqueeze(2) >= 0) & (node > node.view(-1, 1))
    for links, target in ((child, retrive_next_token), (sibling, retrive_next_sibling)):
        first = torch.where(links, node, count).amin(2)
        target.copy_(torch.where(first < count, first, -1))


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree from its root to the child that the target predicts, as far as there is one."""
    target = target_predict.flatten().tolist()
    lines = zip(
        candidates.tolist(), retrive_index.tolist(), retrive_next_token.tolist(), retrive_next_sibling.tolist()
    )
    for request, (tokens, index, next_token, sibling) in enumerate(lines):
        node, found = 0, 0
        accept_index[request, 0] = index[0]
        while True:
            wanted, child = target[index[node]], next_token[node]
            predicts[index[node]] = wanted
            while child >= 0 and tokens[child] != wanted:
                child = sibling[child]
            if child < 0 or found + 1 >= accept_index.shape[1]:
                break
            node, found = child, found + 1
            accept_index[request, found] = index[node]
        accept_token_num[request] = found
