"""The page of methods has every method and configurations that are taken; a release names one version.
Pages are short, and so are their sentences."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.paths import REPOSITORY
from sglang_diffkv import __version__
from sglang_diffkv.config import DiffKVConfig
from sglang_diffkv.policies.registry import PolicyConfig
from tests.tools.plain import blocks_of_code, blocks_of_page, long_sentences, sentences

WORDS = {
    "README.md": 700,
    "CONTRIBUTING.md": 400,
    "docs/index.md": 120,
    "docs/install.md": 320,
    "docs/first-server.md": 200,
    "docs/capacity.md": 300,
    "docs/choose.md": 860,
    "docs/configuration.md": 2480,
    "docs/operate.md": 2785,
    "docs/flags.md": 1500,
    "docs/methods.md": 1720,
    "docs/limits.md": 1185,
    "docs/results.md": 2830,
    "docs/quality.md": 1535,
    "docs/kernels.md": 1130,
    "docs/architecture.md": 2920,
    "benchmarks/README.md": 980,
    "docs/designs.md": 435,
}
"""Of each page at most, as ``wc -w`` counts."""
WORDS_IN_ALL = 20_000
"""Of README.md and the pages in docs."""


def _sections() -> dict[str, str]:
    """Of docs/methods.md: the text of each method's section, by the name that a configuration gives it."""
    page = (REPOSITORY / "docs" / "methods.md").read_text(encoding="utf-8")
    parts = [part.partition("\n") for part in page.split("\n## ")[1:]]
    return {title.lower().removesuffix("llm").removesuffix("attention"): text for title, _, text in parts}


@pytest.mark.parametrize("policy", get_args(PolicyConfig), ids=lambda x: x.model_fields["name"].default)
def test_a_method_has_a_section(policy: type) -> None:
    """``docs/configuration.md`` has its options (``tests/servers/test_refusals.py``)."""
    assert policy.model_fields["name"].default in _sections()


def test_the_configurations_of_the_page_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And choose the method under whose name they stand. One of them names a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full_attention_heads.tsv").write_text("0.5\t1\n", encoding="utf-8")
    shown = {name: re.findall(r"`(\{.*?\})`", text) for name, text in _sections().items()}
    assert len(shown) == len(get_args(PolicyConfig)) and all(shown.values())
    for name, configurations in shown.items():
        for configuration in configurations:
            policy = DiffKVConfig.model_validate(json.loads(configuration)).build_policy()
            assert type(policy).__name__.lower() == f"{name}policy", configuration


def test_what_is_released_names_one_version() -> None:
    def found(path: str, pattern: str) -> list[str]:
        return re.findall(pattern, (REPOSITORY / path).read_text(encoding="utf-8"), re.MULTILINE)

    assert found("pyproject.toml", r'^version = "(.*)"$') == [__version__]
    assert found("CITATION.cff", r"^version: (.*)$") == [__version__]
    (date,) = found("CITATION.cff", r'^date-released: "(.*)"$')
    assert found("CHANGELOG.md", r"^## \[(\d.*)$")[0] == f"{__version__}] - {date}"


def test_an_option_in_an_option_follows_an_equals_sign() -> None:
    """``--server-args "--one"`` is refused: argparse takes a value that begins so, without a space, for an option."""
    kinds = ("*.md", "benchmarks/**/*.md", "docs/**/*.md", "benchmarks/**/*.py", "sglang_diffkv/**/*.py")
    pages = [page for kind in kinds for page in REPOSITORY.glob(kind)]
    shown = [(x.name, *re.findall(r"-args (['\"]--[\w-]+['\"])", x.read_text(encoding="utf-8"))) for x in pages]
    assert pages and [x for x in shown if len(x) > 1] == []


def _pages() -> list[str]:
    found = [page.relative_to(REPOSITORY).as_posix() for page in (REPOSITORY / "docs").glob("*.md")]
    return ["README.md", "CONTRIBUTING.md", *sorted(found), "benchmarks/README.md"]


def _page(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", _pages())
def test_sentences_of_a_page_are_short(name: str) -> None:
    assert long_sentences(blocks_of_page(_page(name))) == []


@pytest.mark.parametrize("name", _pages())
def test_a_page_keeps_to_its_number_of_words(name: str) -> None:
    assert len(_page(name).split()) <= WORDS[name]


def test_all_pages_together_keep_to_their_number_of_words() -> None:
    assert sum(len(_page(name).split()) for name in _pages() if name.startswith(("README", "docs/"))) <= WORDS_IN_ALL


def test_each_page_has_its_number_of_words() -> None:
    """And none that is gone has one."""
    assert set(_pages()) == set(WORDS)


LONG = " ".join(["word"] * 36)
"""One word more than a sentence may have."""


@pytest.mark.parametrize(
    ("page", "long"),
    [
        (f"{LONG}.", 1),
        (f"- One.\n- {LONG}.", 1),
        (f"| a | b |\n|---|---|\n| {LONG} | c |", 1),
        (f"Wrapped {LONG[:100]}\n{LONG[100:]}.", 1),
        (f"A [{LONG}](there.md).", 1),
        (f"# {LONG}", 0),
        (f"```\n{LONG}\n```", 0),
        (f"A `{LONG}` and [a link](there.md '{LONG}').", 0),
        (f"{LONG[:80]}. {LONG[80:].strip().capitalize()}.", 0),
        (f"| {LONG[:80]} | {LONG[80:]} |", 0),
        (f"{LONG[:80]}\n\n{LONG[80:]}", 0),
        (f"- {LONG[:80]}\n- {LONG[80:]}", 0),
    ],
)
def test_what_counts_as_a_sentence_of_a_page(page: str, long: int) -> None:
    assert len(long_sentences(blocks_of_page(page))) == long


def test_a_sentence_ends_where_the_next_one_begins() -> None:
    assert sentences("One (a. b). `Two` has 0.5. 3 is next! *Four*? \"Five.\" Zhang et al. say so.") == [
        "One (a. b)", "`code` has 0.5", "3 is next", "*Four*", '"Five', "Zhang et al. say so.",
    ]  # fmt: skip


def _sources() -> list[Path]:
    return sorted(page for part in ("sglang_diffkv", "kernels") for page in (REPOSITORY / part).rglob("*.py"))


def test_sentences_of_docstrings_and_help_are_short() -> None:
    """Of the package and of the kernels."""
    sources = [x for x in _sources() if REPOSITORY / "sglang_diffkv" / "kernels" not in x.parents]
    found = {str(x.relative_to(REPOSITORY)): long_sentences(blocks_of_code(x)) for x in sources}
    assert len(found) > 100
    assert {path: long for path, long in found.items() if long} == {}


@pytest.mark.parametrize(
    ("source", "long"),
    [
        (f'"""{LONG}."""', 1),
        (f'def f():\n    """One.\n\n    Args:\n        a: {LONG[:80]}.\n        b: {LONG[80:]}.\n    """', 0),
        (f'def f():\n    """One.\n\n    Args:\n        a: {LONG[:80]}\n            {LONG[80:]}.\n    """', 1),
        (f'class A:\n    b = 1\n    """{LONG}."""', 1),
        (f'p.add_argument("--a", help="{LONG[:80]} " f"{{b}} {LONG[80:]}")', 1),
        (f'a = Field(description="{LONG[:80]}" + "{LONG[80:]}")', 1),
        (f'a = "{LONG}"', 0),
        (f'"""One:\n\n| a | b |\n|---|---|\n| {LONG[:80]} | {LONG[80:]} |\n"""', 0),
        (f'"""{LONG[:80]}\n\n- {LONG[80:]}"""', 0),
    ],
)
def test_what_counts_as_a_sentence_of_code(tmp_path: Path, source: str, long: int) -> None:
    path = tmp_path / "code.py"
    path.write_text(source, encoding="utf-8")
    assert len(long_sentences(blocks_of_code(path))) == long
