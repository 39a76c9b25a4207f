"""SGLang's hash of tokens, which KV events name blocks by, is built at the start and not within a request."""

from __future__ import annotations

import pytest

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.srt.startup import wiring
from sglang_diffkv.srt.tree import kv_events
from tests.tree.tree_world import World


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(kv_events.time, "sleep", found.append)
    return found


def test_what_another_server_took_away_is_built_again(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    outcomes = [RuntimeError("the lock is gone"), RuntimeError("once more"), "a hash"]

    def hashed(tokens: object) -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(kv_events, "get_hash_str", hashed)
    kv_events.build_hash()
    assert not outcomes and pauses == [kv_events.HASH_PAUSE] * 2


def test_what_cannot_be_built_is_said_with_its_cause(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    def hashed(tokens: object) -> str:
        raise RuntimeError("Failed to load") from OSError("no compiler")

    monkeypatch.setattr(kv_events, "get_hash_str", hashed)
    with pytest.raises(UnsupportedError, match=r"--kv-events-config: .*no compiler.*Install"):
        kv_events.build_hash()
    assert len(pauses) == kv_events.HASH_TRIES - 1


def test_the_installed_one_is_built() -> None:
    kv_events.build_hash()


def test_a_tree_that_tells_events_builds_it_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[bool] = []
    monkeypatch.setattr(wiring, "build_hash", lambda: built.append(True))
    World(400, exact=False)
    assert built == [True]
