"""Who imports whom, for what import-linter does not say: circles of modules, and the size of ``srt``.

Every import counts, also those inside functions and those for type checkers alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[2]
PACKAGE = "sglang_diffkv"
SRT = f"{PACKAGE}.srt."
MOST_ENTRIES, MOST_LEVELS = 12, 7

Graph = dict[str, set[str]]


def files() -> Iterator[tuple[str, Path]]:
    """Modules of the package with their files. ``kernels/`` lies beside it in a checkout."""
    for folder, package in ((ROOT / PACKAGE, PACKAGE), (ROOT / "kernels", f"{PACKAGE}.kernels")):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join((package, *(parts[:-1] if path.name == "__init__.py" else parts))), path


def imported(tree: ast.AST) -> Iterator[str]:
    """All that a module imports: of ``from a import b`` both ``a`` and ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


@cache
def graph() -> Graph:
    """Modules, and which others each imports. ``from a import b`` means the module ``a.b`` where there is one."""
    modules = dict(files())
    found: Graph = {}
    for name, path in modules.items():
        names = {x for x in imported(ast.parse(path.read_text())) if x in modules}
        packages = {x.rpartition(".")[0] for x in names}
        found[name] = {x for x in names if x != name and not (x in packages and modules[x].name == "__init__.py")}
    return found


def circle(edges: Graph) -> list[str]:
    """The nodes of a circle, the first one repeated; empty if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def entries() -> Graph:
    """The files and folders of ``srt``, and which of the others each imports."""
    found: Graph = {}
    for name, others in graph().items():
        if name.startswith(SRT):
            entry = name.removeprefix(SRT).partition(".")[0]
            targets = {x.removeprefix(SRT).partition(".")[0] for x in others if x.startswith(SRT)}
            found.setdefault(entry, set()).update(targets - {entry})
    return found


def levels() -> list[set[str]]:
    """The levels of ``srt``, from the top, as import-linter is told."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (x["layers"] for x in settings["contracts"] if x["name"] == "Layers of srt")
    return [{name.strip() for name in layer.split("|")} for layer in layers]


def test_all_modules_are_seen() -> None:
    assert {"sglang_diffkv.srt.plugin", "sglang_diffkv.kernels.append.triton"} <= graph().keys()
    assert any(x.startswith(f"{PACKAGE}.kernels.") for x in graph()[f"{PACKAGE}.ops.reference"])


def test_no_module_is_in_a_circle() -> None:
    assert circle(graph()) == []


def test_a_circle_is_found() -> None:
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}


def test_srt_has_few_entries() -> None:
    assert len(entries()) <= MOST_ENTRIES, sorted(entries())


def test_no_import_in_srt_goes_up() -> None:
    level_of = {name: index for index, level in enumerate(levels()) for name in level}
    assert len(levels()) <= MOST_LEVELS
    up = [
        f"{name} imports {other}"
        for name, others in entries().items()
        for other in others
        if level_of.get(name, -1) >= level_of.get(other, MOST_LEVELS)
    ]
    assert not up


def test_scheduling_knows_the_tree_by_its_interface() -> None:
    interface = {f"{SRT}tree.{name}" for name in ("interface", "events", "parts")}
    known = {x for name, others in graph().items() if name.startswith(f"{SRT}scheduling.") for x in others}
    assert {x for x in known if x.startswith(f"{SRT}tree.")} <= interface
    assert not any(x.startswith(f"{SRT}scheduling.") for name in interface for x in graph()[name])
