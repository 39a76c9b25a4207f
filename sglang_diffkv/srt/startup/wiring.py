"""Who knows whom among what a scheduler of SGLang has: the ledger, the life of requests, the prefix cache and the
optional parts.

The parts stand on one another in this order, and each refers to those before it only:

1. ``PageLedger``, over the page manager;
2. the tree: its nodes' pages and locks are counted in the ledger;
3. the optional parts, over the tree. The tree and the life of requests know them by ``tree/parts.py`` alone. Those of
   ``optional_parts.py`` make themselves;
4. ``RequestLifecycle``: scheduling's decisions, over all of them. SGLang's hooks call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.mem_pool.ledger import PageLedger
from sglang_diffkv.mem_pool.usage import UsageMeter
from sglang_diffkv.ops.decisions import compacts, tail_tokens
from sglang_diffkv.srt.models.hybrids import has_states
from sglang_diffkv.srt.scheduling.fidelity import Fidelity
from sglang_diffkv.srt.scheduling.joint_admission import AdmissionRule, JointAdmission
from sglang_diffkv.srt.scheduling.lifecycle import RequestLifecycle
from sglang_diffkv.srt.scheduling.running_compression import CompressionScheduler
from sglang_diffkv.srt.startup.optional_parts import PARTS
from sglang_diffkv.srt.tree.events import RequestListener
from sglang_diffkv.srt.tree.exact_prompts import ExactPrompts
from sglang_diffkv.srt.tree.interface import NoTree, PrefixTree
from sglang_diffkv.srt.tree.kept_prefixes import KeptPrefixes
from sglang_diffkv.srt.tree.kept_states import FreedStates, KeptStates
from sglang_diffkv.srt.tree.kv_events import ToldNodes, build_hash
from sglang_diffkv.srt.tree.parts import ExactRule, KeepRule, NodeStates, Parts, Restoring, SessionRule
from sglang_diffkv.srt.tree.path_joining import PathJoiner
from sglang_diffkv.srt.tree.prefix_cache import DiffKVPrefixCache
from sglang_diffkv.srt.tree.retracted import Retracted
from sglang_diffkv.srt.tree.session_refs import SessionRefs
from sglang_diffkv.srt.tree.sglang_methods import prefix_cache_class


def build_lifecycle(
    ledger: PageLedger, usage: UsageMeter | None = None, config: DiffKVConfig | None = None
) -> RequestLifecycle:
    """The life of requests before SGLang has made its prefix cache, or without one. ``config``: the server's."""
    requests, tree = RequestLifecycle(ledger, usage, Fidelity(ledger, config)), NoTree(ledger)
    requests.connect(tree, Parts(compression=_compression(ledger, tree, ExactRule())), _admission(ledger, tree))
    return requests


def build_prefix_cache(
    params: Any, share_min_tokens: int, *, exact: bool, opened: Sequence[Any] = (), keeps: bool = False
) -> Any:
    """The prefix cache for SGLang's ``params``, with all parts around it, connected with the life of requests.

    Args:
        share_min_tokens: see ``DiffKVConfig``. exact: whether its ``prefix_fidelity`` is ``exact``. opened:
            what each of ``PARTS`` has opened, if anything was. keeps: whether requests may ask to keep prefixes.
    """
    requests: RequestLifecycle = params.token_to_kv_pool_allocator.requests
    ledger = requests.ledger
    tree = prefix_cache_class()(params, ledger, share_min_tokens)
    ledger.manager.counts.tell_counted(tree.count)
    recorder = tree.event_recorder()
    parts = _without_prefixes(tree) if tree.disable else _around(tree, share_min_tokens, exact, opened, keeps)
    if recorder is not None:
        build_hash()
        tree.tell_of_nodes(ToldNodes(tree, *recorder))
        for source in parts.sources:
            source.tell_events(*recorder)
    tree.connect(parts)
    requests.connect(tree, parts, _admission(ledger, tree))
    return tree


def _without_prefixes(tree: DiffKVPrefixCache) -> Parts:
    """The parts around a tree that is off: it keeps nothing."""
    states = FreedStates(tree.req_to_token_pool) if has_states(tree.req_to_token_pool) else NodeStates()
    return Parts(compression=_compression(tree.ledger, tree, ExactRule()), states=states)


def _around(tree: DiffKVPrefixCache, share_min_tokens: int, exact: bool, opened: Sequence[Any], keeps: bool) -> Parts:
    """The parts around a tree. What the page manager freezes for it is decided here, too."""
    ledger, manager = tree.ledger, tree.manager
    states = KeptStates(tree, share_min_tokens) if has_states(tree.req_to_token_pool) else None
    if manager.running is not None:
        manager.running.share_prefixes(exact=exact)
    keeps_prompts, rule = exact and compacts(manager.state, manager.policy), ExactRule()
    if keeps_prompts:
        rule = ExactPrompts(tree, min(share_min_tokens, manager.fmt.high.tokens))
    else:  # a state stands for all of a prompt, so the tree takes that or nothing
        tail = tail_tokens(manager.state, manager.policy) if states is None else 0
        manager.prompts.freeze_from(share_min_tokens, tail, tree.page_size)
    retracted = Restoring()
    if manager.saved is not None and manager.keeps_retracted and manager.transfer is None:
        slots = None if manager.saved_slots is None else manager.saved_slots.guest()
        retracted = Retracted(tree, manager.saved, alone=keeps_prompts, slots=slots, by_token=manager.slots_by_token)
    given = zip(PARTS, opened or [None] * len(PARTS), strict=True)
    sources = [part.source(tree, share_min_tokens, found) for part, found in given]
    refs = SessionRefs(tree) if tree.enable_session_radix_cache or keeps else None
    return Parts(
        compression=_compression(ledger, tree, rule),
        states=states or NodeStates(),
        sessions=refs or SessionRule(),
        kept=KeptPrefixes(refs) if refs is not None and keeps else KeepRule(),
        exact=rule,
        joiner=PathJoiner(tree),
        retracted=retracted,
        kept_elsewhere=tuple(source for source in sources if source is not None),
    )


def _compression(ledger: PageLedger, tree: PrefixTree, exact: ExactRule) -> RequestListener:
    running = ledger.manager.running
    return RequestListener() if running is None else CompressionScheduler(ledger, tree, exact, running)


def _admission(ledger: PageLedger, tree: PrefixTree) -> AdmissionRule:
    running = ledger.manager.running
    return AdmissionRule(ledger) if running is None else JointAdmission(ledger, tree, running)
