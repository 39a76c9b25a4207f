"""The stages in which drafting servers are compared with stock."""

from __future__ import annotations

import pytest

from benchmarks.quality import drafts, identity


def test_every_stage_runs_whatever_becomes_of_the_ones_before(monkeypatch):
    asked = []

    def compare(argv):
        args = identity.parse_args(argv)
        asked.append((args.server_args, args.draft_args[1], args.draft_args[-1]))
        if len(asked) == 1:
            raise RuntimeError("the server did not start")
        return int(len(asked) == 2)

    monkeypatch.setattr(identity, "main", compare)
    assert drafts.main(["--drafts", "EAGLE3", "NGRAM", "--stages", "eager", "overlap", "--draft-model", "head"]) == 2
    often = drafts.OFTEN.split()
    eager = ["--disable-cuda-graph", "--disable-overlap-schedule", *often]
    assert asked == [(eager, "EAGLE3", "4"), (eager, "NGRAM", "1"), (often, "EAGLE3", "4"), (often, "NGRAM", "1")]


@pytest.mark.parametrize(("branches", "count"), [(1, 6), (4, 11)])
def test_drafts_are_served_as_they_are_asked_for(branches, count):
    from types import SimpleNamespace

    from sglang_diffkv.srt.startup.server_flags import refusals

    words = drafts.draft_args("STANDALONE", "model", 5, branches).split()
    given = {words[i][2:].replace("-", "_"): words[i + 1] for i in range(0, len(words), 2)}
    numbers = {name: int(x) if x.isdigit() else x for name, x in given.items()}
    assert numbers["speculative_num_draft_tokens"] == count and numbers["speculative_eagle_topk"] == branches
    assert refusals(SimpleNamespace(attention_backend="diffkv", device="cpu", **numbers)) == []
