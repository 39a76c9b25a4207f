"""Every hook has its place in the installed SGLang, and what has moved is named with its new place."""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.releases import CLASSES, RELEASES, TARGETS
from sglang_diffkv.srt.hooks import applied, registration, table
from sglang_diffkv.srt.startup import launch
from sglang_diffkv.srt.versions import compat, places
from sglang_diffkv.srt.versions.places import sglang_class

GONE = {
    "free_row": "sglang.srt.mem_cache.pool.req_to_token.ReqToTokenPool.free",
    "add_one_req": "sglang.srt.managers.prefill_adder.PrefillAdder.add_one_req",
    "release_req": "sglang.srt.managers.batch.release_req",
    "log_stats": "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.tell_stats",
    "nothing": "sglang.srt.managers.scheduler.Scheduler.no_such_thing_anywhere",
}
"""Hooks of a release in which things have other places and names than here."""


def target_of(name: str) -> str:
    return compat.installed().target(name)[0]


@pytest.mark.parametrize("target", sorted(table.HOOKS))
def test_a_hook_takes_what_its_target_is_given(target: str) -> None:
    """All that must be given, and nothing that is not there, by its names; what comes first has a name of ours."""
    owner, _, name = target.rpartition(".")
    found = inspect.getattr_static(pkgutil.resolve_name(owner), name)
    function: Any = inspect.unwrap(found.__func__ if isinstance(found, classmethod | staticmethod) else found)
    given = list(inspect.signature(function).parameters.values())
    _, *parameters = inspect.signature(table.HOOKS[target]).parameters.values()
    rest = {x.kind for x in parameters} & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    taken = [x.name for x in parameters if x.kind not in rest]
    assert taken[1:] == [x.name for x in given[1 : len(taken)]]
    assert rest or all(x.default is not x.empty for x in given[len(taken) :]), "it is not given on"


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's registry has applied all hooks but those of ``GONE``."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setattr(applied, "WANTED", {"sglang.srt.utils.common.support_triton": "support_triton"})
    monkeypatch.setattr(HookRegistry, "_patched", {"sglang.srt.utils.common.support_triton"})
    applied.verify_hooks()
    for name, target in GONE.items():
        applied.WANTED[target] = name


@pytest.mark.usefixtures("moved")
def test_what_has_moved_is_named_with_its_new_place() -> None:
    with pytest.raises(UnsupportedError) as found:
        applied.verify_hooks()
    first, *lines = str(found.value).splitlines()
    assert f"SGLang {compat.sglang_version()}" in first and "Install one that it was tested with: 0.5.17, " in first
    assert "its row of sglang_diffkv/releases.py" in lines.pop()
    said = dict(zip(sorted(GONE), lines, strict=True))
    for name in ("free_row", "add_one_req", "release_req"):
        assert said[name] == f"- {name}: no {GONE[name]}; perhaps {target_of(name)}"
    assert said["log_stats"].endswith("perhaps sglang.srt.observability.metrics_collector.SchedulerMetricsCollector")
    assert said["nothing"].endswith("perhaps sglang.srt.managers.scheduler.Scheduler")
    assert places.places("sglang.srt.a.NoSuchClass.no_such_thing_anywhere") == []


@pytest.mark.usefixtures("moved")
def test_a_launch_ends_with_that_before_it_loads_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("something was asked before the hooks were")

    monkeypatch.setattr(launch, "configure_unless_done", never)
    args = SimpleNamespace(attention_backend="diffkv", model_path="none")
    with pytest.raises(UnsupportedError, match=r"no sglang\.srt\.managers\.batch\.release_req; perhaps"):
        table.check_server_args(lambda self: None, args)
    monkeypatch.setattr(launch, "_left_there", lambda: SimpleNamespace(command=True))
    with pytest.raises(SystemExit, match=r"sglang_diffkv: --attention-backend diffkv: SGLang \S+ has moved"):
        table.check_server_args(lambda self: None, args)
    args.attention_backend = "triton"
    table.check_server_args(lambda self: None, args)


def test_a_hook_that_fails_in_its_place_is_another_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("free_row")
    monkeypatch.setattr(applied, "WANTED", {target: "free_row"})
    monkeypatch.setattr("sglang.srt.plugins.hook_registry.HookRegistry._patched", set())
    with pytest.raises(UnsupportedError, match=r"could not apply the hooks on \S+ReqToTokenPool\.free\. Its log"):
        applied.verify_hooks()


def test_classes_that_are_about_to_move_come_from_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name: sglang_class(name).__name__ for name in CLASSES} == {name: name for name in CLASSES}
    row = replace(RELEASES["0.5.23"], classes={"KVCache": "sglang.srt.mem_cache.pool.base.KVCache"})
    monkeypatch.setattr(places, "installed", lambda: row)
    with pytest.raises(UnsupportedError, match=r"no sglang\.srt\.mem_cache\.pool\.base\.KVCache; perhaps \S+KVCache"):
        sglang_class("KVCache")
    assert sglang_class("HybridReqToTokenPool").__name__ == "HybridReqToTokenPool"


def _fail_to_import() -> None:
    raise ImportError("no such name")


def test_an_import_that_fails_says_where_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin is registered all the same, and refuses its backend with that."""
    try:
        from sglang.srt.mem_cache.radix_cache import ReqToTokenPool  # type: ignore[attr-defined]  # noqa: F401
    except ImportError as error:
        said = places.told_of_import(error)
    assert f"perhaps {target_of('free_row').removesuffix('.free')}\n" in said
    try:
        import sglang.srt.mem_cache.radix_tree.RadixCache  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        assert "no sglang.srt.mem_cache.radix_tree" in places.told_of_import(error)
    assert places.told_of_import(ImportError("no module of another", name="numpy")) == "no module of another"
    refused: list[Any] = []
    monkeypatch.setattr(registration, "require_tested_version", lambda: (_ for _ in ()).throw(ImportError("x")))
    monkeypatch.setattr(registration, "_refuse", lambda *given: refused.append(given[-1]))
    registration.register()
    assert isinstance(refused[0], UnsupportedError)


def test_targets_are_named_after_their_hooks() -> None:
    assert {hook.__name__ for hook in table.HOOKS.values()} <= TARGETS.keys()
