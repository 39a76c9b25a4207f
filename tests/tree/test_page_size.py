"""``--page-size``: the prefix cache finds, stores and evicts multiples of so many tokens; other trees are as before."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_diffkv.layout.page_format import Tier
from sglang_diffkv.policies.uniform import UniformPolicy
from sglang_diffkv.srt.tree.host_tier import WRITE_BACK
from tests.tree.stand_in import Match
from tests.tree.test_host_tier import admitted, evict_all, served
from tests.tree.tree_world import World

LOSSLESS: dict[str, Any] = {"policy": UniformPolicy(), "tiers": (Tier(8, 4),)}
FORMS: dict[str, dict[str, Any]] = {"two tiers": {}, "one tier": LOSSLESS}


def world(page_size: int, form: str, **more: Any) -> World:
    return World(400, exact=False, page_size=page_size, keeps_retracted=False, **FORMS[form], **more)


def found(world: World, tokens: list[int]) -> int:
    """Tokens that a request finds."""
    match = Match(world.tree, array("q", tokens))
    match.unlock(world.tree)
    return len(match)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page_size", [3, 16, 64])
def test_running_and_ended_requests_share_multiples(page_size: int, form: str) -> None:
    """A prompt's end that is over a multiple stays the request's own, and joins with the reply as far as that fills
    pages."""
    here = world(page_size, form)
    prompt = here.tokens(101)
    req = here.prompt(list(prompt))
    here.check()
    window = 0 if form == "one tier" else 8
    running = (101 - window) // page_size * page_size
    assert found(here, prompt) == found(here, [*prompt, 1]) == running == req.kv.cache_protected_len
    for _ in range(40):
        here.decode(req)
        here.check()
    here.leave(req)
    here.check()
    assert found(here, [*req.tokens, 1]) == 141 // page_size * page_size
    assert found(here, [*prompt[:50], 1, *prompt[51:]]) == 50 // page_size * page_size, "a page that differs counts"
    here.tree.reset()
    here.allocator.clear()


def test_a_promise_covers_the_page_that_a_tail_begins() -> None:
    """Of 35 tokens 25 may stay high, 1 go down and 9 be the tail, in 4, 1 and 2 pages. A window of whole pages is in no
    page more."""
    pages = [world(page_size, "two tiers").requests.ledger.prompt_pages(35) for page_size in (13, 1)]
    assert pages == [4 + 1 + 2, 5 + 1]
    assert world(13, "one tier").requests.ledger.prompt_pages(35) == 4 + 2


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_shorter_than_a_page_is_not_stored(form: str) -> None:
    here = world(64, form)
    short = here.tokens(60)
    here.leave(here.prompt(list(short)))
    here.check()
    assert found(here, [*short, 1]) == 0 and not here.manager.segments.cached


@pytest.mark.parametrize("form", FORMS)
def test_a_leaf_is_cut_at_a_multiple(form: str) -> None:
    here = world(16, form)
    prompt = here.tokens(200)
    here.leave(here.prompt(list(prompt)))
    here.manager.counts.settle()
    before = found(here, [*prompt, 1])
    here.tree.evict(EvictParams(num_tokens=20))
    here.check()
    left = found(here, [*prompt, 1])
    assert 0 < left < before == 192 and left % 16 == 0


@pytest.mark.parametrize("form", FORMS)
def test_the_host_brings_back_multiples(form: str) -> None:
    """Of prompts that part within a page, too."""
    here = world(16, form, host_pages=200, write_policy=WRITE_BACK)
    stem = here.tokens(70)
    others = [[*stem, *here.tokens(60)] for _ in range(2)]
    for prompt in others:
        served(here, prompt)
    evict_all(here)
    for prompt in others:
        assert admitted(here, [*prompt, 1]) == 128
    evict_all(here)
    assert admitted(here, [*stem, *here.tokens(60)]) == 64


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_too_short_to_share_gets_no_tail(form: str) -> None:
    """It joins with its reply."""
    here = world(5, form)
    req = here.prompt(list(here.tokens(23)))
    here.check()
    assert not here.manager.segments.cached
    for _ in range(10):
        here.decode(req)
    here.leave(req)
    assert found(here, [*req.tokens, 1]) == 30
