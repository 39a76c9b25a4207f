"""Which rung of the ladder is taken, and what ``auto`` is wherever a configuration is given."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.paths import NANO
from sglang_diffkv import ladder
from sglang_diffkv.attention.emulated import AS_COMPUTED, Fp8, RoundedAgain, Stored
from sglang_diffkv.calibrate import emulated
from sglang_diffkv.calibrate.emulated import taken
from sglang_diffkv.calibration import resolution
from sglang_diffkv.capacity.settings import settings_of
from sglang_diffkv.config import CONFIG_ENV, DiffKVConfig, load_config, read_config
from sglang_diffkv.errors import ConfigError, UnsupportedError
from sglang_diffkv.evaluate.configuration import parse_configuration
from sglang_diffkv.ladder import (
    BY_LAYER,
    MOST_RAISED,
    RUNGS,
    Choice,
    Loss,
    Raised,
    climb,
    coarse,
    groups_of,
    mixed_rungs,
    name_of,
    raise_layers,
    rungs,
    scored_positions,
)
from sglang_diffkv.layout.page_format import Tier
from sglang_diffkv.layout.ranks import Ranks
from sglang_diffkv.srt.startup import launch, own_choice

FP8 = Loss(0.002, 0.005)
LESS, MORE = Loss(0.001, 0.0044), Loss(0.001, 0.0046)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_ENV, "")
    monkeypatch.setenv(launch.ORIGINS_ENV, "")
    monkeypatch.setattr(launch, "_launched", None)


@pytest.mark.parametrize("first", range(len(RUNGS)))
def test_the_first_rung_that_loses_no_more_than_fp8_is_taken(first: int) -> None:
    names, asked = list(RUNGS), []

    def judge(name: str) -> Loss:
        asked.append(name)
        return LESS if names.index(name) >= first else MORE

    choice = climb(names, FP8, judge)
    assert choice.rung == names[first] and list(choice.judged) == asked
    assert len(asked) <= (3 if len(RUNGS[names[first]]["tiers"]) == 2 else 5)
    assert names[first] in asked or names[first] == ladder.NOTHING_LOST, "what is taken was judged"


def test_a_single_tier_that_fails_hides_no_pair_with_fewer_bytes() -> None:
    choice = climb(list(RUNGS), FP8, lambda name: LESS if name in {"K8V6 and K6V4", "K8V8"} else MORE)
    assert choice.rung == "K8V6 and K6V4" and "K8V5" not in choice.judged
    assert climb(list(RUNGS), FP8, lambda name: LESS if name == "K8V8" else MORE).rung == "K8V8"


def test_what_is_taken_was_judged_whatever_holds() -> None:
    """Also where losses do not fall from rung to rung: no rung with fewer bytes was seen to hold."""
    names = list(RUNGS)
    for held in product((False, True), repeat=len(names) - 1):
        losses = {name: LESS if holds else MORE for name, holds in zip(names, held)}
        choice = climb(names, FP8, losses.__getitem__)
        assert choice.rung == ladder.NOTHING_LOST or choice.judged[choice.rung] == LESS
        assert LESS not in (losses[x] for x in choice.judged if names.index(x) < names.index(choice.rung))
        kept = climb(names, FP8, choice.judged.__getitem__)
        assert kept == choice and list(kept.judged) == list(choice.judged), "and follows from what was judged"


def test_prompts_and_replies_are_to_lose_no_more() -> None:
    assert LESS.within(FP8) and not Loss(0.0019, 0.0).within(FP8) and not MORE.within(FP8)
    assert not Loss(float("nan"), 0.0).within(FP8)
    assert not Loss(0.001, 0.003, reply_error=0.0006).within(FP8), "which may be chance"
    assert Loss(0.001, 0.003, reply_error=0.0004).within(FP8)


def test_the_log_says_by_how_much_a_smaller_rung_may_lose_more() -> None:
    """Its loss alone may be less than what is allowed."""
    names, close = list(RUNGS), Loss(0.0012, 0.003, 0.00025, 0.0001)
    said = own_choice._because(climb(names, FP8, lambda name: LESS if names.index(name) > 2 else close))
    assert "0.9 of that is allowed, less 3 standard errors (±)" in said
    assert f"{names[2]}, with fewer bytes, would lose 1.2 ± 0.25 and 3 ± 0.1" in said
    assert said.startswith("it loses 1 and 4.4 millinats a token in prompts and in replies, FP8 2 and 5; ")
    said = own_choice._because(climb(names, FP8, lambda name: MORE))
    assert said.startswith("it loses nothing, FP8 2 and 5 millinats a token in prompts and in replies; ")


def test_a_loss_of_divergences() -> None:
    fp8 = torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0], dtype=torch.float64)
    found = Loss.of(fp8, fp8, 2)
    assert (found.prompt, found.reply, found.prompt_error) == (1.5, 16 / 3, pytest.approx(0.05)), "a tenth of its own"
    found = Loss.of(ladder.SHARE * fp8 + torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0]), fp8, 2)
    assert (found.prompt, found.reply) == (pytest.approx(2.35), pytest.approx(5.8))
    assert (found.prompt_error, found.reply_error) == (pytest.approx(1.0), pytest.approx(0.0)), "from what is allowed"
    assert not Loss.of(fp8 * float("inf"), fp8, 2).within(Loss(9.0, 9.0))
    rounding = torch.tensor([1.0, 1.5, 8.0, 9.0, 9.0], dtype=torch.float64)
    found = Loss.of(fp8, fp8 + 1, 2, rounding)
    assert (found.prompt, found.reply) == (0.25, 0.0), "less what rounding alone makes, and no less than nothing"
    broken = torch.full((5,), float("inf"), dtype=torch.float64)
    lost = Loss.of(broken, broken, 2, broken)
    assert lost == Loss(*[float("inf")] * 4), "logits that are not finite lose all"
    assert not lost.within(lost) and not lost.within(Loss(*[float("inf")] * 2)), "also where FP8 does"


def test_rungs_take_ever_more_bytes_and_the_last_loses_nothing() -> None:
    found = list(rungs(DiffKVConfig()).values())

    def size(config: DiffKVConfig) -> tuple[int, int]:
        sizes = [Tier.parse(x).token_bytes(128, 128) for x in config.tiers]
        return sizes[-1], sizes[0]

    assert all(size(x) <= size(y) for x, y in pairwise(found)) and found[-1].lossless
    assert not any(x.build_policy().prunes for x in found)


def test_fields_beside_auto_are_of_every_rung() -> None:
    given = read_config('{"thresholds": "auto", "page_tokens": 16, "host_gib": 0}')
    assert all(x.page_tokens == 16 and x.host_gib == 0 for x in rungs(given).values())
    assert read_config(given.as_text()) == given, "what travels to the scheduler"
    for field in ("tiers", "policy", "rotate", "key_means"):
        value = {"tiers": '["K8V8"]', "policy": '{"name": "diffkv"}'}.get(field, '"keys"')
        with pytest.raises(ConfigError, match=f"drop {field}"):
            read_config(f'{{"thresholds": "auto", "{field}": {value}}}')


def test_the_positions_that_are_compared() -> None:
    for tokens in (ladder.LEAST_TOKENS, 1500, ladder.TOKENS):
        prompt, reply = scored_positions(tokens)
        cached, end = ladder.parts_of(tokens)
        assert cached <= prompt[0] and prompt[-1] == end - 1 and end <= reply[0] and reply[-1] == tokens - 1
        assert 100 < len(prompt) <= ladder.SCORED and 100 < len(reply) <= ladder.SCORED
        assert all(x < y for x, y in pairwise([*prompt, *reply]))


def test_texts_are_apart() -> None:
    first, second = (set(ladder.text_of(x).splitlines()) - {""} for x in ("reading.txt", ladder.JUDGING))
    assert len(second) > 30 and not first & second


def test_tools_that_serve_nothing_say_that_it_is_a_server_s_choice() -> None:
    with pytest.raises(ConfigError, match="chosen by a server once its model is loaded"):
        load_config("auto")
    with pytest.raises(ConfigError, match="chosen once a model is loaded"):
        settings_of(["auto"], NANO / "config.json")
    assert parse_configuration("auto").diffkv == read_config("auto")
    assert resolution("auto", NANO).origin == "those that the model chooses once it is loaded"


def test_a_launch_hands_it_on_and_a_choice_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DiffKVConfig] = []
    monkeypatch.setattr(launch, "_check", lambda args, *configs: seen.extend(configs))
    monkeypatch.setattr(own_choice, "obstacle", lambda view: "")
    monkeypatch.setattr(own_choice.compat, "resolved", lambda args: args)
    given = '{"thresholds": "auto", "page_tokens": 16}'
    launch.configure(SimpleNamespace(model_path=str(NANO)), given)
    every = [*rungs(read_config(given)).values(), *mixed_rungs(read_config(given))]
    assert seen == every, "all of them are checked before weights load"
    assert read_config() == read_config(given) and read_config().chosen_at_start
    with pytest.raises(ConfigError):
        load_config()
    launch.take_choice(own_choice.Taken(seen[1], "chosen for the model: why", "auto"))
    assert load_config() == seen[1] and os.environ[CONFIG_ENV] == seen[1].as_text()
    report = launch.configuration_report()
    assert report["thresholds"] == "chosen for the model: why" and report["sources"]["tiers"] == "auto"
    assert report["values"] == seen[1].whole()
    assert (report["sources"]["page_tokens"], report["sources"]["prefill"]) == ("--diffkv-config", "default")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"load_format": "dummy"}, "random weights"),
        ({"skip_tokenizer_init": True}, "no tokenizer"),
        ({"enable_lora": True}, "with LoRA"),
        ({"moe_a2a_backend": "deepep"}, "--moe-a2a-backend"),
        ({"chunked_prefill_size": 512}, "--chunked-prefill-size does not allow"),
        ({"context_length": 1000}, "--context-length does not allow"),
    ],
)
def test_a_model_that_could_not_choose_is_refused_before_it_loads(
    args: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {
        "load_format": "auto", "skip_tokenizer_init": False, "chunked_prefill_size": 8192, "context_length": None,
    }  # fmt: skip
    monkeypatch.setattr(own_choice.compat, "resolved", lambda args: args)
    assert own_choice.candidates(SimpleNamespace(**usual), read_config("auto"))
    with pytest.raises(UnsupportedError, match=f"--diffkv-config auto: .*{why}.* Name another preset"):
        own_choice.candidates(SimpleNamespace(**{**usual, **args}), read_config("auto"))
    assert own_choice.candidates(SimpleNamespace(**{**usual, **args}), DiffKVConfig()) == [DiffKVConfig()]


USUAL = {
    "load_format": "auto", "skip_tokenizer_init": False, "chunked_prefill_size": 8192, "context_length": None,
    "model_path": str(NANO),
}  # fmt: skip


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> list[DiffKVConfig]:
    """What a launch checks, which is not refused."""
    seen: list[DiffKVConfig] = []
    monkeypatch.setattr(launch, "_check", lambda args, *configs: seen.extend(configs))
    monkeypatch.setattr(own_choice.compat, "resolved", lambda args: args)
    return seen


def test_a_launch_that_is_told_nothing_has_the_model_choose(unchecked: list[DiffKVConfig]) -> None:
    launch.configure(SimpleNamespace(**USUAL))
    assert read_config().chosen_at_start and not read_config().chosen_or_refused
    every = [*rungs(DiffKVConfig()).values(), *mixed_rungs(DiffKVConfig()), load_config("careful")]
    assert unchecked == every, "whatever it will run"
    assert "no configuration was given" in launch.configuration_report()["thresholds"]
    launch.configure(SimpleNamespace(**USUAL), "{}")
    assert load_config() == DiffKVConfig(), "which is told as before"


def test_what_lies_beside_a_model_is_taken_before_it_chooses(unchecked: list[DiffKVConfig], tmp_path: Path) -> None:
    from tests.tools.test_calibration_resolve import MEASURED, model

    launch.configure(SimpleNamespace(**{**USUAL, "model_path": str(model(tmp_path / "mine", MEASURED))}))
    assert load_config().whole()["policy"]["alpha_high"] == 2.5
    shipped = {**USUAL, "model_path": "someone/small"}
    launch.configure(SimpleNamespace(**shipped), "{}")
    assert load_config().whole()["policy"]["window"] == 256 and launch.configuration_report()["files"]
    launch.configure(SimpleNamespace(**shipped))
    assert read_config().chosen_at_start, "what comes with the package was measured on questions"


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"skip_tokenizer_init": True}, "no tokenizer"),
        ({"enable_lora": True}, "with LoRA"),
        ({"chunked_prefill_size": 512}, "--chunked-prefill-size does not allow"),
        ({"disaggregation_mode": "decode"}, "with --disaggregation-mode two servers have to run the same"),
    ],
)
def test_a_model_that_could_not_choose_unasked_gets_what_loses_less_than_fp8(
    args: dict[str, Any], why: str, unchecked: list[DiffKVConfig]
) -> None:
    launch.configure(SimpleNamespace(**{**USUAL, **args}))
    report, careful = launch.configuration_report(), load_config("careful")
    assert load_config() == careful and unchecked == [careful]
    assert why in report["thresholds"] and "balanced takes fewer bytes" in report["thresholds"]
    assert report["sources"]["tiers"] == report["sources"]["rotate"] == "preset careful"
    given = read_config('{"thresholds": "auto_or_careful", "page_tokens": 16}')
    taken = own_choice.instead(SimpleNamespace(**{**USUAL, **args}), given)
    assert taken is not None and taken.config == load_config('{"tiers": ["K8V5"], "rotate": "both", "page_tokens": 16}')


def test_random_weights_have_nothing_to_lose(unchecked: list[DiffKVConfig]) -> None:
    launch.configure(SimpleNamespace(**{**USUAL, "load_format": "dummy"}))
    assert load_config() == DiffKVConfig() and unchecked == [DiffKVConfig()]
    assert "random weights" in launch.configuration_report()["thresholds"]


def test_what_the_model_s_files_say_comes_before_it_loads(
    unchecked: list[DiffKVConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[DiffKVConfig] = []
    monkeypatch.setattr(launch.preflight, "cannot_read", lambda args: "it has states")
    monkeypatch.setattr(launch.preflight, "ask", lambda args, *configs: asked.extend(configs))
    launch.ask_before_loading(SimpleNamespace(**USUAL), lambda: None)
    assert load_config() == load_config("careful") and asked == [load_config()]
    assert "it has states" in launch.configuration_report()["thresholds"]
    launch.withdraw()
    assert not os.environ[CONFIG_ENV], "the next engine of this process is told nothing either"
    launch.configure(SimpleNamespace(**USUAL), "auto")
    with pytest.raises(UnsupportedError, match="--diffkv-config auto: it has states"):
        launch.ask_before_loading(SimpleNamespace(**USUAL), lambda: None)


@pytest.mark.parametrize("error", [own_choice.CannotChooseError("it has sinks"), RuntimeError("of a kernel")])
def test_a_loaded_model_that_cannot_choose(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def chosen(*_: Any) -> None:
        raise error

    ranks = SimpleNamespace(alone=True)
    monkeypatch.setattr(own_choice, "_chosen", chosen)
    monkeypatch.setattr(own_choice.compat, "tensor_parallel_ranks", lambda: ranks)
    taken = own_choice.choose(None, DiffKVConfig(thresholds="auto_or_careful"))
    assert taken.config == load_config("careful") and own_choice.report()["chosen"] == "careful"
    assert ("it has sinks" if isinstance(error, own_choice.CannotChooseError) else "RuntimeError") in caplog.text
    with pytest.raises((UnsupportedError, RuntimeError)):
        own_choice.choose(None, read_config("auto"))
    ranks.alone = False
    if not isinstance(error, own_choice.CannotChooseError):
        with pytest.raises(UnsupportedError, match="Add --diffkv-config careful"):  # another may be in the pass still
            own_choice.choose(None, DiffKVConfig(thresholds="auto_or_careful"))


LOWER, UPPER = BY_LAYER[0]


def chosen(needed: set[int], layers: int = 12, groups: int = 12, rung: str = UPPER) -> tuple[Choice, list[Raised]]:
    """By a model that bears the lower rung once layers ``needed`` are raised, and what was asked. What a layer loses
    alone falls with its number, but for those that are needed."""
    names, asked = list(RUNGS), []

    def alone(group: Raised) -> Loss:
        return Loss(0.02, 0.05) if needed & set(group) else Loss(0.001 / (1 + group[0]), 0.0)

    def judge(raised: Raised) -> Loss:
        asked.append(raised)
        return LESS if needed <= set(raised) else MORE

    choice = climb(names, FP8, lambda name: LESS if names.index(name) >= names.index(rung) else MORE)
    return raise_layers(choice, groups_of(layers, groups), alone, judge), asked


@pytest.mark.parametrize("needed", [{2}, {2, 6, 8}, {0, 11}, set(range(9))])
def test_the_fewest_layers_that_hold_fp8_s_loss_are_raised(needed: set[int]) -> None:
    choice, asked = chosen(needed)
    assert choice.rung == UPPER and choice.raised == tuple(sorted(needed))
    assert choice.raised in asked and len(asked) <= 4, "what is taken was judged"
    assert choice.loss == LESS and chosen(needed)[0] == choice
    config = choice.config(DiffKVConfig(page_tokens=16, thresholds="auto"))
    lower, upper = (rungs(DiffKVConfig())[name] for name in (LOWER, UPPER))
    assert config.tiers == (lower.tiers[0], upper.tiers[1], lower.tiers[1]) and config.page_tokens == 16
    used = [config.build_policy().prompt.used_tiers(3, layer) for layer in range(12)]
    assert used == [(0, 1) if layer in needed else (0, 2) for layer in range(12)]
    config.check_heads(12, 2)
    assert config.build_policy().scored_tiers(3) == lower.build_policy().scored_tiers(2) == 1, "no byte more a token"


def test_groups_of_layers_are_raised_together() -> None:
    choice, _ = chosen({2, 7}, groups=6)
    assert choice.raised == (2, 3, 6, 7)
    assert groups_of(30, 6) == [tuple(range(x, x + 5)) for x in range(0, 30, 5)]
    assert groups_of(7, 6) == [(0, 1), (2, 3), (4, 5), (6,)] and groups_of(3, 6) == [(0,), (1,), (2,)]


@pytest.mark.parametrize(
    ("needed", "rung"), [(set(range(10)), UPPER), *(({2}, rung) for rung in RUNGS if rung not in (LOWER, UPPER))]
)
def test_the_plain_rung_is_taken(needed: set[int], rung: str) -> None:
    """Where nearly all layers would be raised, and where no pair of rungs is for that."""
    choice, asked = chosen(needed, rung=rung)
    assert choice.rung == choice.name == rung and choice.raised is None
    assert choice.config(DiffKVConfig()) == rungs(DiffKVConfig())[rung]
    assert bool(asked) == (rung == UPPER) and all(len(x) <= MOST_RAISED * 12 for x in asked)


@pytest.mark.parametrize("groups", [12, 6])
def test_layers_that_make_most_of_the_loss_are_raised_in_any_case(groups: int) -> None:
    """Also where the lower rung holds; unless it is then judged to lose more, which is chance."""
    for needed, expected in (
        ({8}, {8}),
        ({2, 9}, {2, 9}),
        (set(range(12)), {0, 1, 2, 3}),
        (set(), {0, 1, 2, 3} if groups == 12 else {0, 2}),
    ):
        choice, asked = chosen(needed, groups=groups, rung=LOWER)
        size = 12 // groups
        raised = {x for layer in expected for x in range(layer - layer % size, layer - layer % size + size)}
        if needed == set(range(12)):
            assert choice == chosen(needed, groups=groups, rung=LOWER)[0] and choice.raised is None
            assert choice.rung == LOWER and len(asked) == 1
            continue
        assert choice.rung == UPPER and set(choice.raised or ()) == raised and asked == [choice.raised]
        assert choice.loss == LESS and choice.name == name_of(UPPER, choice.raised)
    assert chosen(set(), layers=2, groups=6, rung=LOWER)[0].rung == LOWER, "one of two is more than a third"
    assert chosen({2}, layers=3, groups=6, rung=LOWER)[0].raised == (2,)


def test_pairs_of_rungs_whose_layers_may_differ() -> None:
    names = list(RUNGS)
    for lower, upper in BY_LAYER:
        assert names.index(upper) == names.index(lower) + 1
        low, high = (rungs(DiffKVConfig())[name] for name in (lower, upper))
        assert low.tiers[0] == high.tiers[0] and low.policy == high.policy
        assert Tier.parse(coarse(DiffKVConfig(), upper).tiers[1]).k_bits < Tier.parse(low.tiers[1]).k_bits
    assert [x.tiers for x in mixed_rungs(DiffKVConfig())] == [("K8V6", "K6V4", "K5V4")]
    assert name_of(UPPER, (2, 6)) == "K8V6 and K5V4, but K6V4 in layers 2, 6"


def test_ranks_take_the_layers_of_the_first() -> None:
    class Two:
        """The other rank's numbers are zeros."""

        def largest(self, mine: Any) -> Any:
            return mine.clip(0)

    choice, _ = chosen({2, 8})
    index, raised = own_choice.agreed_choice(Two(), choice, 12)  # type: ignore[arg-type]
    assert (list(RUNGS)[index - 1], raised) == (UPPER, (2, 8))
    assert own_choice.agreed_choice(Two(), None, 12) == (0, None)  # type: ignore[arg-type]
    plain, _ = chosen({2}, rung="K8V5")
    assert own_choice.agreed_choice(Two(), plain, 12) == (1 + list(RUNGS).index("K8V5"), None)  # type: ignore[arg-type]


def test_a_loaded_model_judges_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer adds what its bits lose, of which two layers lose most: passes are asked for what that needs."""
    layers, lost, seen = [10 + 2 * layer for layer in range(12)], {3: 9.5, 7: 3.9}, []

    def logits(runner: Any, ids: Any, given: Any, positions: Any, stored: Stored) -> Any:
        assert list(given) == layers and positions[-1] == len(ids) - 1
        seen.append(stored)
        return stored

    def divergence(reference: Stored, stored: Stored) -> torch.Tensor:
        assert reference is AS_COMPUTED
        total = 40.0 + (50.0 if isinstance(stored, Fp8) else 0.0)
        for layer in range(12):
            tiers = stored.in_layer(layer).tiers
            if not tiers[-1].is_raw and not isinstance(stored, Fp8):
                total += lost.get(layer, 0.3) * 4.0 ** (5 - tiers[-1].k_bits) * 3
        return torch.full((512,), total * 1e-3, dtype=torch.float64)

    for name, value in {
        "logits": logits, "divergence": divergence, "_means": lambda *x: None,
        "attention_layers": lambda model: [SimpleNamespace(layer_id=x) for x in layers],
    }.items():  # fmt: skip
        monkeypatch.setattr(own_choice, name, value)
    texts = own_choice.Texts([1], list(range(1024)))
    for device, raised, groups in (("cuda", (3, 7), 12), ("cpu", (2, 3, 6, 7), 6)):
        seen.clear()
        runner = SimpleNamespace(model=None, device=device)
        choice = own_choice._judged(runner, Ranks(), DiffKVConfig(thresholds="auto"), texts)
        assert (choice.rung, choice.raised) == (UPPER, raised)
        assert choice.rounding == Loss(0.04, 0.04) and choice.fp8 == Loss(*[pytest.approx(0.05)] * 2)
        alone = [stored.only for stored in seen if stored.only is not None]
        assert [sorted(x) for x in alone] == [list(x) for x in groups_of(12, groups)]
        assert sum(isinstance(stored, RoundedAgain) for stored in seen) == 1
        assert len(seen) <= 3 + 3 + groups + 4, "as computed, FP8, rounded again, rungs, groups, and sets of groups"


def test_the_tool_says_what_a_server_would_take() -> None:
    """With layers told apart on the passages that it was given, and what was tried among its figures."""
    judge: Any = SimpleNamespace(means=None, shaping=None, layers=12, model=SimpleNamespace(device="cpu"))

    def of_all(ways: Any) -> Any:
        (stored,) = ways.values()
        worst = 5.0 + sum(
            (4.0 if layer == 3 else 0.1) for layer in range(12) if stored.in_layer(layer).tiers[-1].k_bits < 6
        )
        return {name: [passage(worst)] * 2 for name in ways}

    def passage(loss: float) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((8,), loss), torch.full((9,), loss)

    names = list(RUNGS)
    found = {name: [passage(7.1 if names.index(name) < names.index(UPPER) else 5.5)] * 2 for name in names}
    known = {"fp8_e4m3": [passage(7.0)] * 2, "rounded again": [passage(5.0)] * 2}
    every, choice = taken({**known, **found}, judge, of_all)
    assert choice.rung == UPPER and choice.raised == (2, 3)
    assert choice.name in every and list(every)[:10] == [*known, *names] and not any("alone" in x for x in every)


@pytest.mark.parametrize("layers", [5, 7])
def test_the_tool_refuses_thresholds_of_another_model(
    layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emulated, "READ", 64)
    text = tmp_path / "text.txt"
    text.write_text(ladder.text_of(ladder.JUDGING), encoding="utf-8")
    between = [20.0] + [0.0] * (layers - 1)
    policy = {"name": "diffkv", "alpha_high": 20.0, "alpha_between": [between]}
    config = json.dumps({"tiers": ["K8V6", "K6V4", "K5V4"], "policy": policy})
    args = ["--model", str(NANO), "--text", str(text), "--n", "1", "--config", "safe", "--config", f"mine={config}"]
    assert emulated.main(args) == 1
    found = capsys.readouterr()
    assert f"mine: policy.alpha_between is of {layers} layers, the model has 6" in found.err and not found.out
    assert "passage" not in found.err, "nothing is judged before"


def test_the_tool_judges_shaped_noise_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Matrices are of the dtype that the model computes in; without its rounding the losses are of codes alone."""
    monkeypatch.setattr(emulated, "READ", 512)
    text, output = tmp_path / "text.txt", tmp_path / "losses.json"
    text.write_text(ladder.text_of(ladder.JUDGING), encoding="utf-8")
    args = ["--model", str(NANO), "--text", str(text), "--n", "1", "--float32"]
    args += ["--window-tokens", str(ladder.LEAST_TOKENS)]
    shaping = ', "noise_shaping": "auto"'
    for name, bits, more in (("plain", 4, ""), ("shaped", 4, shaping), ("fine", 8, shaping)):
        args += ["--config", f'{name}={{"tiers": ["K{bits}V8"], "rotate": "both"{more}}}']
    assert emulated.main([*args, "--output", str(output)]) == 0
    ((rounding,),) = [json.loads(output.read_text())["rounded again"]]
    plain, shaped, fine = (json.loads(output.read_text())[x][0] for x in ("plain", "shaped", "fine"))
    for part in range(2):
        assert rounding[part] < 0.1 * fine[part] < 0.1 * shaped[part] and 0 < shaped[part] < 2 * plain[part]
    assert "shaped" in capsys.readouterr().out


NO_LOSSES = (float("nan"), "nan", float("inf"), "inf", -1e-9, -1, 1e300, 10**400, None, "")
"""That no start writes."""


def test_a_kept_choice_of_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "choice.json"
    for needed in ({2, 6}, set(range(12))):
        choice, _ = chosen(needed)
        file.write_text(json.dumps(own_choice.plain(choice)), encoding="utf-8")
        assert own_choice.kept(file, 12) == own_choice.kept(file) == choice
        assert own_choice.kept(file, 13) is None and "not the model's" in caplog.text
    choice = replace(chosen({2, 6})[0], rounding=Loss(0.0003, 0.0004))
    kept = own_choice.plain(choice)
    file.write_text(json.dumps(kept), encoding="utf-8")
    assert own_choice.kept(file, 12) == choice
    assert own_choice._reported(choice)["rounding"] == {"prompt": 0.3, "reply": 0.4}
    assert "0.3 and 0.4, which any change loses" in own_choice._because(choice)
    for damaged in ([1.0], {}, [[], 0, 0, 0]):
        file.write_text(json.dumps({**kept, "rounding": damaged}), encoding="utf-8")
        assert own_choice.kept(file, 12) is None
    found = kept["by_layer"]
    for damaged in (
        {**found, "raised": [2]}, {**found, "raised": None}, {**found, "alone": found["alone"][:-1]}, [],
        {**found, "judged": []}, {**found, "alone": [["x", []]]}, {"raised": [2, 6]},
    ):  # fmt: skip
        caplog.clear()
        file.write_text(json.dumps({**kept, "by_layer": damaged}), encoding="utf-8")
        assert own_choice.kept(file, 12) is None and "is made again" in caplog.text
    assert "its layers are those that lose most" in own_choice._because(choice)
    assert "in any case" in own_choice._because(chosen({2}, rung=LOWER)[0])
    assert "K3V2 in layer 2 alone" in own_choice._reported(choice)


@pytest.mark.parametrize("layers", [12, None])
def test_a_kept_choice_with_damaged_layers(
    layers: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is made again, and ends no start: other ranks wait for what the first one has."""
    file, kept = tmp_path / "choice.json", own_choice.plain(chosen({2, 6})[0])
    found, alone, tried = kept["by_layer"], kept["by_layer"]["alone"], kept["by_layer"]["judged"]
    for damaged in (
        {**found, "alone": [*alone, [[], [0.1, 0.1]]]}, {**found, "alone": [[[], [0, 0]]]},
        {**found, "judged": [*tried, [[], [0, 0]]]}, {**found, "alone": [*alone, alone[0]]},
        {**found, "alone": [[[0, *group], loss] for group, loss in alone]}, {**found, "judged": [*tried, tried[-1]]},
        {**found, "alone": [[[-1], alone[0][1]], *alone[1:]]}, {**found, "alone": [[[1e300], alone[0][1]]]},
        *({**found, "alone": [[[0], [bad, 0.0]], *alone[1:]]} for bad in NO_LOSSES),
        *({**found, "judged": [[raised, [*loss[:3], bad]] for raised, loss in tried]} for bad in NO_LOSSES),
    ):  # fmt: skip
        caplog.clear()
        file.write_text(json.dumps({**kept, "by_layer": damaged}), encoding="utf-8")
        assert own_choice.kept(file, layers) is None and "is made again" in caplog.text


def test_a_kept_choice_follows_from_its_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names, file = list(RUNGS), tmp_path / "choice.json"
    choice = climb(names, FP8, lambda name: LESS if name in names[2:] else MORE)
    kept = own_choice.plain(choice)

    def read(data: Any) -> Choice | None:
        file.write_text(json.dumps(data), encoding="utf-8")
        return own_choice.kept(file)

    assert own_choice.kept(file) is None and read(kept) == choice
    for damaged in (
        {**kept, "rung": names[0]}, {**kept, "fp8": [1, 1]}, {**kept, "judged": {}}, {**kept, "fp8": "no"}, [], {},
        *({**kept, "judged": {name: [bad, *loss[1:]] for name, loss in kept["judged"].items()}} for bad in NO_LOSSES),
        *({**kept, "fp8": [*kept["fp8"][:3], bad]} for bad in NO_LOSSES),
    ):  # fmt: skip
        caplog.clear()
        assert read(damaged) is None and "is made again" in caplog.text
