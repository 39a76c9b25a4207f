"""Requests that keep all tokens in the high tier or have a window of their own: what they may ask for, and their place
in the prefix cache."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_diffkv.config import load_config
from sglang_diffkv.errors import ConfigError
from sglang_diffkv.layout.page_format import Tier
from sglang_diffkv.policies.budget import Budget
from sglang_diffkv.policies.uniform import UniformPolicy
from sglang_diffkv.srt.hooks.request_fields import add_request_to_queue
from sglang_diffkv.srt.scheduling import admission
from sglang_diffkv.srt.scheduling.fidelity import Fidelity, fields_of, lossless_obstacle
from sglang_diffkv.srt.tree.private_space import HighSpace, PrivateSpace, WindowSpace
from sglang_diffkv.srt.tree.retracted import Retracted
from sglang_diffkv.srt.versions import compat
from tests.policies import diffkv_policy, snapkv_policy, zipage_policy
from tests.tree.stand_in import Fields, Match
from tests.tree.test_retracted import readmit, retract, run
from tests.tree.tree_world import World

HIGH = HighSpace(None)


def asked(params: Any = None, *, prompt: int = 10, **more: Any) -> Any:
    """A request as it comes."""
    found = Fields(
        sampling_params=SimpleNamespace(custom_params=params, max_new_tokens=20, ignore_eos=True),
        origin_input_ids=[1] * prompt, output_ids=[], extra_key=None, to_finish=None, errors=[], **more,
    )  # fmt: skip
    found.set_finish_with_abort, found.finished = found.errors.append, lambda: False
    return found


def tier(name: str) -> dict[str, Any]:
    return {"diffkv": {"tier": name}}


def window(tokens: Any) -> dict[str, Any]:
    return {"diffkv": {"window": tokens}}


@pytest.mark.parametrize("params", [None, {}, [1], "diffkv", {"token_ids": [1]}, {"diffkv": {}}, tier("default")])
def test_what_asks_for_nothing(params: Any) -> None:
    assert fields_of(params).tier == "default"


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"difkv": {}}, r'unknown field "difkv" in custom_params; did you mean diffkv\?'),
        ({"DiffKV": {}}, "did you mean diffkv"),
        ({"diffkv": {"teir": "high"}}, 'unknown field "teir"; did you mean tier'),
        ({"diffkv": {"windwo": 3}}, 'unknown field "windwo"; did you mean window'),
        (window(0), "window is 0: allowed is a whole number from 1 to 4,096"),
        (window(10**30), "window is .*: allowed is a whole number from 1 to 4,096"),
        (window("64"), 'window is "64": allowed is a whole number'),
        (window(True), "window is true: allowed is a whole number"),
        (window(64.0), "window is 64.0: allowed is a whole number"),
        (tier("hihg"), 'tier is "hihg": allowed is .* did you mean "high"'),
        (tier("High"), 'did you mean "high"'),
        ({"diffkv": {"tier": 1}}, "tier is 1: allowed is"),
        ({"diffkv": {"tier": ["high"]}}, "tier is a list of 1"),
        ({"diffkv": None}, "the whole is null: allowed is an object"),
        ({"diffkv": "high"}, 'the whole is "high": allowed is an object'),
        ({"diffkv": {"a": 1, "b": "x" * 10_000, "tier\n": 2}}, "3 mistakes"),
        ({"diffkv": {f"field {x}": x for x in range(9999)}}, "mistakes"),
    ],
)
def test_a_misspelt_field_is_an_error_of_one_line(params: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        fields_of(params)
    assert "\n" not in str(found.value) and len(str(found.value)) < 1200
    assert "docs/operate.md#" in str(found.value)


@pytest.mark.parametrize("names", [("tier",), ("window",), ("tier", "window")])
def test_fields_outside_ours_are_an_error_where_nobody_else_reads_them(names: tuple[str, ...]) -> None:
    """A logit processor may have parameters of these names, so that its requests are let alone."""
    params = {"thinking_budget": 3, **dict.fromkeys(names, "high")}
    world = World(400, exact=False, high_rows=True)
    problem = world.requests.fidelity.take(asked(params))
    inside = ", ".join(f'"{name}": ...' for name in names)
    assert f'{names[0]} is outside "diffkv": write "custom_params": {{"diffkv": {{{inside}}}}}' in problem
    assert "\n" not in problem and world.requests.fidelity.report()["refused"] == 1
    for own in (asked(params, custom_logit_processor="a processor"), asked({**params, "diffkv": {}})):
        assert world.requests.fidelity.take(own) == "" and not compat.keeps_high(own)


def test_other_names_of_a_client_are_its_own() -> None:
    """The parameters of a logit processor, however many."""
    fields_of({"diff": 1, "kv": 2, "diffusion": 3, "reply_ids": [1], "x" * 100: 1, 7: 2, "__req__": object()})


@pytest.mark.parametrize(
    ("text", "obstacle"),
    [
        ('{"tiers": ["BF16", "K4V2"]}', ""),
        ("lossless", ""),
        ("balanced", "the highest tier of this server is K8V4, which rounds"),
        ('{"tiers": ["BF16", "K4V2"], "rotate": "keys"}', "without rotate"),
        ('{"tiers": ["BF16", "K4V2"], "key_means": "means.safetensors"}', "without key_means"),
        ('{"tiers": ["BF16", "K4V2"], "value_rotation": "r.pt"}', "without value_rotation"),
        ('{"tiers": ["BF16", "K4V2"], "noise_shaping": "auto"}', "without noise_shaping"),
    ],
)
def test_what_lossless_asks_of_a_server(text: str, obstacle: str) -> None:
    found = lossless_obstacle(load_config(text))
    assert (obstacle in found) if obstacle else not found


def fidelity_of(world: World, **config: Any) -> Fidelity:
    world.requests.fidelity = Fidelity(world.requests.ledger, load_config(json.dumps(config)))
    return world.requests.fidelity


@pytest.mark.parametrize(
    ("config", "given", "prompt", "said"),
    [
        ({"high_requests": 0}, {}, 10, 'takes no such requests ("high_requests": 0)'),
        ({"high_requests": 0.1}, {}, 41, "the prompt has 41 tokens: such requests may take 40 of this server's 400"),
        ({}, {"policy": zipage_policy(60, 80, window=8)}, 10, "holds every request to a budget"),
        ({"prefix_fidelity": "exact"}, {"attention_spans": (9,)}, 10, "layers with a sliding window"),
    ],
)
def test_what_a_server_refuses(config: dict[str, Any], given: dict[str, Any], prompt: int, said: str) -> None:
    exact = config.get("prefix_fidelity") == "exact"
    world = World(400, exact=exact, high_rows=config.get("high_requests", 1.0) > 0, **given)
    fidelity, req = fidelity_of(world, **config), asked(tier("high"), prompt=prompt)
    problem = fidelity.take(req)
    assert said in problem and "\n" not in problem and problem.startswith('DiffKV: custom_params.diffkv.tier is "high"')
    assert fidelity.report()["refused"] == 1 and not compat.keeps_high(req)
    assert fidelity.take(asked(prompt=prompt)) == ""


@pytest.mark.parametrize(
    ("given", "params", "said"),
    [
        ({"most_window": 0}, window(9), 'this server has 8 for all requests ("request_window": 0): drop the field'),
        ({"most_window": 40}, window(41), "this server gives a request 40 at most: ask for fewer, or start the server"),
        ({"policy": diffkv_policy(1.0, 0.0, 8, generated_every=3)}, window(2), "this server needs 3 at least"),
        ({"policy": snapkv_policy(Budget(20), window=8), "tiers": (Tier(8, 4),)}, window(9), "has one window for all"),
        ({}, {"diffkv": {"tier": "high", "window": 9}}, 'tier is "high", which keeps all tokens: drop one of the two'),
    ],
)
def test_windows_that_a_server_refuses(given: dict[str, Any], params: Any, said: str) -> None:
    world = World(400, exact=False, high_rows=True, **{"most_window": 40, **given})
    problem = world.requests.fidelity.take(req := asked(params))
    assert said in problem and "\n" not in problem and problem.startswith("DiffKV: custom_params.diffkv.window is ")
    assert world.requests.fidelity.report()["refused"] == 1 and compat.own_window(req) is None


def test_windows_that_make_no_difference() -> None:
    """The usual one, and any where no token moves: these share prefixes with others."""
    for given in ({}, {"policy": UniformPolicy(), "tiers": (Tier(8, 4),)}):
        world = World(400, exact=False, most_window=40, **given)
        req = asked(window(8 if not given else 30))
        assert world.requests.fidelity.take(req) == "" and compat.own_window(req) is None
    larger, smaller = asked(window(30)), asked(window(3))
    world = World(400, exact=False, most_window=40)
    for req in (larger, smaller):
        assert world.requests.fidelity.take(req) == ""
    assert (compat.own_window(larger), compat.own_window(smaller)) == (30, 3)
    assert compat.grows_whole(larger) and not compat.grows_whole(smaller)


@pytest.mark.parametrize("exact", [False, True], ids=["compressed", "exact"])
def test_prefixes_of_different_windows_stay_apart(exact: bool) -> None:
    """A prompt is found up to the window with which it was compressed, by requests of this window."""
    world = World(1200, exact=exact, most_window=40, share_min=8)
    ids, spaces = world.tokens(60), {8: None, 20: WindowSpace(None, 20), 3: WindowSpace(None, 3)}
    reqs = {tokens: world.prompt([*ids, tokens], extra_key=space) for tokens, space in spaces.items()}
    assert world.requests.fidelity.counts() == {"default": 1, "high": 0, "window": 2}
    for tokens, req in reqs.items():
        row, held = req.kv.req_pool_idx, world.manager.state.own_tokens
        assert world.manager.rows.length(row) == 61
        if exact:
            assert held[row, 0, 0].tolist() == [tokens, 61 - tokens], "a copy of the whole prompt"
        else:
            assert world.manager.rows.frozen(row) == 61 - tokens
    for tokens, space in spaces.items():
        match = Match(world.tree, array("q", [*ids, tokens, 9]), extra_key=space)
        assert len(match) == (61 if exact else 61 - tokens), "of nobody else's"
        match.unlock(world.tree)
    other = Match(world.tree, array("q", [*ids, 9]), extra_key=WindowSpace("tenant", 20))
    assert len(other) == 0
    other.unlock(world.tree)
    for req in reqs.values():
        world.leave(req)
    world.listener.check()
    assert world.requests.fidelity.counts() == {"default": 0, "high": 0, "window": 0}


def test_a_retracted_request_keeps_its_window() -> None:
    world = World(300, exact=False, host_pages=200, most_window=40)
    req = world.prompt(world.tokens(60), extra_key=WindowSpace(None, 20))
    retract(world, req)
    assert len(world.manager.windows) == 0
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert readmit(world, req) == 60
    run(world, req)
    assert world.manager.windows.window_of(req.kv.req_pool_idx) == 20
    world.leave(req)
    world.listener.check()


def test_where_nothing_is_compressed_all_requests_are_alike() -> None:
    """They share prefixes, and are in no namespace."""
    world = World(400, policy=snapkv_policy(Budget(20), window=8), tiers=(Tier(8, 4),), high_rows=True, exact=False)
    req = asked(tier("high"))
    assert world.requests.fidelity.take(req) == "" and compat.keeps_high(req), "the method prunes"
    world = World(400, policy=UniformPolicy(), tiers=(Tier(8, 4),), high_rows=True, exact=False)
    req = asked(tier("high"))
    assert world.requests.fidelity.take(req) == "" and not compat.keeps_high(req)


def test_a_request_is_looked_at_when_it_is_queued_first() -> None:
    world = World(400, exact=False, high_rows=True, most_window=40)
    scheduler, queue = SimpleNamespace(token_to_kv_pool_allocator=world.allocator), []

    def original(self: Any, req: Any, is_retracted: bool = False) -> None:
        queue.append(req)

    high, plain, wrong = asked(tier("high")), asked(), asked({"diffkv": {"windwo": 3}})
    high.extra_key = "tenant"
    narrow = asked(window(5))
    narrow.extra_key = "tenant"
    for req in (high, plain, wrong, high, narrow, narrow):
        add_request_to_queue(original, scheduler, req)
    assert queue == [high, plain, wrong, high, narrow, narrow]
    assert narrow.extra_key == WindowSpace("tenant", 5) and not narrow.errors
    assert high.extra_key == HighSpace("tenant"), "and not within itself"
    assert plain.extra_key is None and wrong.extra_key is None
    assert len(wrong.errors) == 1 and not high.errors and not plain.errors
    dead = asked(tier("hihg"))
    dead.to_finish = "too long"
    add_request_to_queue(original, scheduler, dead)
    assert not dead.errors, "SGLang has said what is wrong with it"
    add_request_to_queue(original, SimpleNamespace(token_to_kv_pool_allocator=None), other := asked(tier("hihg")))
    assert not other.errors, "another backend's request"


@pytest.mark.parametrize(("ids", "wrong"), [([0, 7], None), ([3, 8, 9], 8), ([7, -1], -1)])
def test_a_token_that_the_model_has_not_ends_its_request(ids: list[int], wrong: int | None) -> None:
    world = World(400, exact=False)
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=world.allocator)

    def errors(**more: Any) -> list[str]:
        req = asked(**{"vocab_size": 8, "multimodal_inputs": None, "input_embeds": None, "lora_id": None, **more})
        req.origin_input_ids = array("q", ids)
        add_request_to_queue(lambda *_: None, scheduler, req)
        return req.errors

    expected = f"input_ids has {wrong}, which is no token of this model: its tokens are 0 to 7"
    assert errors() == [expected] * (wrong is not None)
    assert not errors(multimodal_inputs=object()), "numbers of SGLang's own stand for images"
    assert errors(lora_id="an adapter") == errors() and not errors(input_embeds=[[0.0]])


@pytest.mark.parametrize("more", [{}, {"lora_id": "an adapter"}, {"input_embeds": []}])
def test_a_prompt_without_tokens_ends_its_request(more: dict[str, Any]) -> None:
    """SGLang refuses an empty prompt that comes alone, and lets one in among others of a batch through."""
    world = World(400, exact=False)
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=world.allocator)
    req = asked(**{"vocab_size": 8, "multimodal_inputs": None, "input_embeds": None, "lora_id": None, **more})
    req.origin_input_ids = array("q")
    add_request_to_queue(lambda *_: None, scheduler, req)
    assert req.errors == ["the prompt is empty: it needs one token at least"]


LOGPROBS = {"return_logprob": True, "logprob_start_len": 3, "vocab_size": 8, "multimodal_inputs": None}


@pytest.mark.parametrize(
    ("most", "start", "top", "of", "said"),
    [
        (20, 3, 8, [0, 7], ""), (None, -1, 0, None, ""), (20, 3, None, [], ""),
        (np.int64(20), 3, np.int32(8), [np.int64(7)], ""),
        (4.0, 3, 0, None, "max_new_tokens is no whole number"),
        (20, -2, 0, None, "logprob_start_len is -2"), (20, 3, -1, None, "top_logprobs_num is -1"),
        (20, 3, [3], None, "top_logprobs_num is a whole number"),
        (20, 3, 0, [[1, 2]], "top_logprobs_num is a whole number, and token_ids_logprob a list of them"),
        (20, 3, 0, [-1], "token_ids_logprob has what is no token"),
        (object(), 3, 0, None, "max_new_tokens is no whole number"),
        (20, 3, 9, None, "top_logprobs_num is 9: this model has 8 tokens"),
        (20, 3, 0, [8], "token_ids_logprob has what is no token"),
    ],
)  # fmt: skip
def test_numbers_that_nothing_else_looks_at(most: Any, start: int, top: Any, of: Any, said: str) -> None:
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=World(400, exact=False).allocator)
    logprob = SimpleNamespace(top_logprobs_num=top, token_ids_logprob=of)
    req = asked(**{**LOGPROBS, "logprob_start_len": start}, input_embeds=None, logprob=logprob)
    req.sampling_params.max_new_tokens = most
    add_request_to_queue(lambda *_: None, scheduler, req)
    assert len(req.errors) == bool(said) and all(x.startswith(said) for x in req.errors)
    assert not said or req.sampling_params.max_new_tokens == 1, "SGLang computes it nevertheless"


def test_embeddings_that_are_none_end_their_request_alone() -> None:
    """SGLang passes on whatever a client names so. It meets it where it prepares the batch, with others in it."""
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=World(400, exact=False).allocator)
    common = {"vocab_size": 8, "multimodal_inputs": None, "input_embeds": None, "lora_id": None}
    wrong = asked(positional_embed_overrides=object(), **common)
    right = asked(positional_embed_overrides=SimpleNamespace(positions=[1]), **common)
    for req in (wrong, right):
        add_request_to_queue(lambda *_: None, scheduler, req)
    assert len(wrong.errors) == 1 and wrong.positional_embed_overrides is None
    assert not right.errors and right.positional_embed_overrides is not None


def test_no_client_can_name_the_namespace() -> None:
    assert HighSpace("a") == HighSpace("a") != HighSpace("b") and hash(HighSpace("a")) == hash(HighSpace("a"))
    assert HighSpace("a") not in (repr(HighSpace("a")), "a", None, PrivateSpace())
    assert isinstance(HIGH, PrivateSpace), "so that no KV event tells of it"
    narrow = WindowSpace("a", 5)
    assert narrow == WindowSpace("a", 5) and hash(narrow) == hash(WindowSpace("a", 5))
    assert narrow not in (WindowSpace("b", 5), WindowSpace("a", 6), HighSpace("a"), repr(narrow), "a", None)
    assert isinstance(narrow, PrivateSpace)


@pytest.mark.parametrize("exact", [False, True], ids=["compressed", "exact"])
def test_prefixes_of_different_fidelity_stay_apart(exact: bool) -> None:
    """Also those of tenants. A listener to KV events hears of public ones only."""
    world = World(900, exact=exact, high_rows=True, alpha_high=1e9)
    ids = world.tokens(60)
    plain = world.prompt([*ids, 1])
    high = world.prompt([*ids, 2], extra_key=HIGH)
    assert high.prefix_len == 61 and world.manager.rows.length(high.kv.req_pool_idx) == 61
    row = high.kv.req_pool_idx
    counts = {"default": 1, "high": 1, "window": 0}
    assert row in world.manager.high and world.requests.fidelity.counts() == counts
    for _ in range(20):
        world.decode(high)
        world.check()
    assert not world.manager.state.own_tokens[row, :, :, 1:].any()
    world.leave(high)
    world.leave(plain)
    held = [world.low_tokens(x) for x in world.segments()]
    found = {name: Match(world.tree, array("q", [*ids, 2, 5, 5, 5]), extra_key=name) for name in (None, HIGH)}
    assert len(found[HIGH]) == 63, "the prompt and its reply"
    assert len(found[None]) == 60
    other = Match(world.tree, array("q", [*ids, 9]), extra_key=HighSpace("tenant"))
    assert len(other) == 0
    for match in (*found.values(), other):
        match.unlock(world.tree)
    assert exact or sum(held) > 0, "the default request's prompt is compressed"
    again = world.prompt([*ids, 3], extra_key=HIGH)
    assert not world.manager.state.own_tokens[again.kv.req_pool_idx, :, :, 1:].any()
    world.leave(again)
    world.listener.check()
    assert world.requests.fidelity.counts() == {"default": 0, "high": 0, "window": 0}


@pytest.mark.parametrize("exact", [False, True], ids=["compressed", "exact"])
def test_a_retracted_request_keeps_its_setting(exact: bool) -> None:
    """It comes back from the host as it was, into its own namespace."""
    world = World(300, exact=exact, host_pages=200, high_rows=True, alpha_high=1e9)
    req = world.prompt(world.tokens(60), extra_key=HIGH)
    for _ in range(9):
        world.decode(req)
    retract(world, req)
    assert isinstance(world.requests.retracted, Retracted) and len(world.manager.high) == 0
    world.tree.make_pages(world.manager.geometry.num_pages, partly=True)
    assert readmit(world, req) == 69
    run(world, req)
    row = req.kv.req_pool_idx
    assert row in world.manager.high and world.manager.rows.length(row) == 70
    for _ in range(9):
        world.decode(req)
    assert not world.manager.state.own_tokens[row, :, :, 1:].any()
    assert sum(map(world.low_tokens, world.segments())) == 0
    world.leave(req)
    world.listener.check()


def test_a_row_that_never_ran_is_free_again() -> None:
    """Its batch could not be prepared."""
    world = World(300, exact=False, high_rows=True)
    req = world.start(world.tokens(30), extra_key=HIGH)
    row = req.kv.req_pool_idx
    assert row in world.manager.high
    world.requests.leave(req, row, counted=False)
    assert row not in world.manager.high
    world.check()


def test_such_requests_wait_for_their_share_of_the_pool() -> None:
    """All but the first, and nobody else with them."""
    world = World(400, exact=False, high_rows=True)
    fidelity = fidelity_of(world, high_requests=0.25)
    first, second, plain = (asked(tier("high"), prompt=60), asked(tier("high"), prompt=60), asked(prompt=300))
    for req in (first, second, plain):
        assert fidelity.take(req) == ""
    assert not fidelity.waits(first, [plain], 1.0), "there is no other"
    assert fidelity.waits(second, [first], 1.0), "two of 60 + 20 are more than 100"
    assert not fidelity.waits(plain, [first], 1.0)
    small = asked(tier("high"), prompt=10)
    fidelity.take(small)
    assert fidelity.waits(small, [first, plain], 0.5), "both ignore their end"
    for req in (first, small):
        req.sampling_params.ignore_eos = False
    assert not fidelity.waits(small, [first, plain], 0.5), "60 + 10 and 10 + 10"
    assert fidelity.waits(small, [first, plain, small], 1.0)
    first.finished = lambda: True
    assert not fidelity.waits(second, [first], 1.0)


def test_who_waits_for_its_share_does_not_keep_others_waiting() -> None:
    """SGLang looks at the next request."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    world = World(400, exact=False, high_rows=True)
    fidelity = fidelity_of(world, high_requests=0.25)
    first, second = asked(tier("high"), prompt=60), asked(tier("high"), prompt=60)
    fidelity.take(first), fidelity.take(second)
    adder = SimpleNamespace(
        token_to_kv_pool_allocator=world.allocator, tree_cache=world.tree, can_run_list=[], new_token_ratio=1.0,
        running_batch=SimpleNamespace(reqs=[first]),
    )  # fmt: skip
    assert admission.add_one_req(lambda *args: pytest.fail("it was admitted"), adder, second) == AddReqResult.CONTINUE


def test_what_they_are_expected_to_take() -> None:
    """A generated token of theirs takes a high-tier one, whatever those of others do."""
    world = World(900, exact=False, high_rows=True)
    ledger, rule = world.requests.ledger, world.requests.admission_rule
    ledger._estimate, ledger._estimated_at = 0.5, (world.manager.counts.tick, world.manager.counts.counted_step)
    high, plain = asked(), asked()
    high.diffkv_keeps_high = high.diffkv_grows_whole = True
    for req in (high, plain):
        req.kv = SimpleNamespace(req_pool_idx=None)
        req.req_pool_idx, req.prefix_indices, req.prefix_len = None, [], 0
    assert rule.taken_by(high, 100, None) == 100 and rule.taken_by(plain, 100, None) == 50
    growth, fits = rule.check(high, 10, [], 1.0)
    assert fits and growth(10, 100) == 100
    assert rule.check(plain, 10, [], 1.0)[0](10, 100) == 50
    admission_of = lambda req: world.requests._may_compact(req, [], 10, [])  # noqa: E731
    assert admission_of(plain) and not admission_of(high)
