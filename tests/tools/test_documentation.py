"""The page of methods has every method, its options and configurations that are taken; a release names one version."""

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


def _sections() -> dict[str, str]:
    """Of docs/methods.md: the text of each method's section, by the name that a configuration gives it."""
    page = (REPOSITORY / "docs" / "methods.md").read_text(encoding="utf-8")
    parts = [part.partition("\n") for part in page.split("\n## ")[1:]]
    return {title.lower().removesuffix("llm").removesuffix("attention"): text for title, _, text in parts}


@pytest.mark.parametrize("policy", get_args(PolicyConfig), ids=lambda x: x.model_fields["name"].default)
def test_a_method_has_a_section_with_its_options(policy: type) -> None:
    fields = dict(policy.model_fields)
    text = _sections()[fields.pop("name").default]
    assert [name for name in fields if f"`{name}`" not in text.partition("Options:")[2]] == []


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
