"""The reference questions: splits, grading, selection and prompts; figures of tables."""

import math

import pytest

from benchmarks import splits
from benchmarks.paths import NANO
from sglang_diffkv.evaluate import report
from sglang_diffkv.evaluate.prompts import chat_ids, load_tokenizer
from sglang_diffkv.evaluate.tasks import reference
from sglang_diffkv.evaluate.tasks.generation import Example


@pytest.fixture(scope="module")
def calib() -> list[Example]:
    return splits.load("calib")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(NANO)


def test_splits_are_complete_and_disjoint(calib):
    dev = splits.load("dev")
    assert (len(calib), len(dev)) == (1008, 2016)
    assert not {item.id for item in calib} & {item.id for item in dev}
    assert {item.level for item in calib} == set(reference.LEVELS)


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="unknown split 'train'"):
        splits.load("train")


def test_every_reference_is_graded_right(calib):
    assert all(reference.grade(item.reply, item.answers) for item in calib)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Answer: 72", True),
        ("24*3:\n=72 shifted 72\nAnswer: 72\n", True),
        ("Answer: 71\nAnswer: 72", True),
        ("Answer: 72\nAnswer: 71", False),
        ("72", False),
        ("Answer: 72 apples", False),
        ("Answer: 7", False),
        ("", False),
    ],
)
def test_judge_reads_the_last_answer(text, right):
    assert reference.grade(text, ("72",)) is right


def test_selection_is_fixed_and_filtered(calib):
    chosen = reference.select(calib, levels=["easy", "medium"], exclude=["chain", "vars"], n=250, seed=3)
    assert len(chosen) == len({item.id for item in chosen}) == 250
    assert {item.level for item in chosen} == {"easy", "medium"}
    assert not {item.task for item in chosen} & {"chain", "vars"}
    again = reference.select(calib, levels=["easy", "medium"], exclude=["chain", "vars"], n=20, seed=3)
    assert again == chosen[:20]
    other = reference.select(calib, levels=["easy", "medium"], exclude=["chain", "vars"], n=20, seed=4)
    assert other != again


def test_selection_without_n_takes_all(calib):
    assert len(reference.select(calib, tasks=["mul"])) == 48


@pytest.mark.parametrize("kwargs", [{"tasks": ["nope"]}, {"exclude": ["nope"]}, {"levels": ["nope"]}])
def test_selection_refuses_unknown_names(calib, kwargs):
    with pytest.raises(ValueError, match="nope"):
        reference.select(calib, **kwargs)


def test_groups_share_a_long_prefix(calib):
    for members in reference.groups(calib).values():
        assert len(members) == 16
        prompts = [item.prompt for item in members]
        common = next(i for i, letters in enumerate(zip(*prompts)) if len(set(letters)) > 1)
        assert common > 0.9 * min(map(len, prompts))


def test_chat_ids_follow_the_template(tokenizer):
    ids = chat_ids(tokenizer, "Multiply 24 by 3.")
    assert tokenizer.decode(ids) == "<|bos|><|user|>Multiply 24 by 3.<|assistant|>"
    assert ids.count(tokenizer.bos_token_id) == 1


def test_mcnemar_is_the_exact_binomial_test():
    first = [True] * 8 + [False] * 2 + [True] * 10
    second = [False] * 8 + [True] * 2 + [True] * 10
    lost, won, p = report.mcnemar(first, second)
    assert (lost, won) == (8, 2)
    assert p == pytest.approx(2 * (1 + 10 + 45) / 2**10)
    assert report.mcnemar(first, first) == (0, 0, 1.0)
    with pytest.raises(ValueError, match="not pairs"):
        report.mcnemar(first, second[1:])


def test_standard_errors():
    share, error = report.proportion([True] * 3 + [False])
    assert (share, error) == (0.75, pytest.approx(math.sqrt(0.75 * 0.25 / 4)))
    assert math.isnan(report.proportion([])[0])
    first, second = [True, True, False, False], [True, False, True, True]
    differences = [-1, 1, 1, 0]
    mean = sum(differences) / 4
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences)) / 4
    assert report.paired_error(first, second) == pytest.approx(spread)


def test_ratios_come_from_what_was_added():
    names = report.TOTALS
    before = {"finished": dict.fromkeys(names, 10)}
    after = {"finished": dict(zip(names, (12, 110, 50, 40, 110, 71, 49, 10, 10)))}
    added = report.since(report.totals(after), report.totals(before))
    figures = report.ratios(added)
    assert added is not None and figures is not None
    assert (added["requests"], added["tokens"]) == (2, 100)
    assert (figures["ratio_pages"], figures["ratio_tokens"]) == (0.4, 0.3)
    assert report.shares_text(figures) == "high 61%, low 39%, pruned 0%"


def test_what_windows_let_go_is_not_pruned():
    """Sliding layers drop it whatever the policy. A server without such layers, or an older one, tells of none."""
    figures = report.ratios(
        report.totals({"finished": {"bf16_bytes": 1, "high": 30, "low": 20, "pruned": 10, "out_of_window": 40}})
    )
    assert figures is not None and (figures["share_pruned"], figures["share_out_of_window"]) == (0.1, 0.4)
    assert report.shares_cell(figures) == "high 30 / low 20 / pruned 10 / out of window 40"
    older = report.ratios(report.totals({"finished": {"bf16_bytes": 1, "high": 30, "low": 60, "pruned": 10}}))
    assert older is not None and report.shares_text(older) == "high 30%, low 60%, pruned 10%"


def test_more_than_two_tiers_are_named():
    def read(pruned: int, **held: int) -> dict[str, float] | None:
        first, *lower = held.values()
        counts = {"bf16_bytes": 7 * pruned, "high": first, "low": sum(lower), "pruned": pruned}
        return report.totals({"finished": {**counts, "by_tier": held}})

    added = report.since(read(20, BF16=15, K8V4=45, K4V2=48), read(10, BF16=5, K8V4=6, K4V2=7))
    figures = report.ratios(added)
    assert figures is not None
    assert figures["share_by_tier"] == {"BF16": 0.1, "K8V4": 0.39, "K4V2": 0.41} and figures["share_low"] == 0.8
    assert report.shares_cell(figures) == "BF16 10 / K8V4 39 / K4V2 41 / pruned 10"
    assert report.shares_text(figures) == "BF16 10%, K8V4 39%, K4V2 41%, pruned 10%"
    two = report.ratios(report.since(read(20, K8V4=70, K4V2=110), read(10, K8V4=10, K4V2=83)))
    assert two is not None and two["share_by_tier"] == {"K8V4": 60 / 97, "K4V2": 27 / 97}
    assert report.shares_cell(two) == "62 / 28 / 10" and report.shares_cell(two, digits=1) == "61.9 / 27.8 / 10.3"


def test_ratios_are_absent_without_statistics():
    assert report.totals(None) is report.totals({}) is None
    assert report.since(None, None) is None
    assert report.ratios(None) is report.ratios(dict.fromkeys(report.TOTALS, 0.0)) is None


def test_small_shares_keep_a_decimal():
    figures = {"share_high": 0.61, "share_low": 0.377, "share_pruned": 0.013}
    assert report.shares_text(figures) == "high 61%, low 38%, pruned 1.3%"
