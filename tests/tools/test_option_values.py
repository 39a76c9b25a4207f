"""Numbers and paths on the command lines of the tools: what cannot be is refused at once, with what can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_diffkv import doctor
from sglang_diffkv.calibrate import arguments, means, retrieval, tiers
from sglang_diffkv.calibrate.heads import cli as heads_cli
from sglang_diffkv.calibrate.layers import cli as layers_cli
from sglang_diffkv.calibrate.text import cli as text_cli
from sglang_diffkv.evaluate import cli as evaluate_cli
from sglang_diffkv.evaluate import replies
from sglang_diffkv.inspect import cli as inspect_cli

TASK = ("--model", "m", "--task", "gsm8k=f")
READ = ("--model", "m", "--text", "f")
PARSERS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "doctor": (doctor.parse_args, ()),
    "inspect": (inspect_cli.parse_args, ("--url", "http://localhost")),
    "evaluate": (evaluate_cli.parse_args, (*TASK, "--output", "{folder}")),
    "replies": (replies.parse_args, (*TASK, "--output", "{folder}/x")),
    "calibrate": (
        lambda argv: arguments.parse_args(argv, None),
        (*TASK, "--work", "{folder}", "--output", "{folder}/x"),
    ),
    "text": (text_cli.parse_args, (*READ, "--max-kl", "1", "--work", "{folder}", "--output", "{folder}/x")),
    "heads": (heads_cli.parse_args, (*TASK, "--output", "{folder}/x")),
    "layers": (layers_cli.parse_args, (*TASK, "--keep", "0.5", "--output", "{folder}/x")),
    "means": (means.parse_args, (*READ, "--output", "{folder}/x")),
    "retrieval": (retrieval.parse_args, (*READ, "--output", "{folder}/x")),
    "tiers": (tiers.parse_args, (*READ, "--output", "{folder}/x")),
}


@pytest.mark.parametrize(
    ("tool", "option", "values", "allowed"),
    [
        ("doctor", "--kv-gib", ("nan", "-5", ".0001", "inf", "many"), "a number from 0.001 to 1e+06"),
        ("evaluate", "--n", ("0", "-1", "1.5", "nan", "9" * 5000), "a whole number from 1"),
        ("evaluate", "--concurrency", ("0", "-1"), "a whole number from 1"),
        ("evaluate", "--max-new-tokens", ("0",), "a whole number from 1"),
        ("evaluate", "--top-logprobs", ("-1",), "a whole number from 0"),
        ("replies", "--n", ("0",), "a whole number from 1"),
        ("text", "--max-kl", ("-1", "nan", "inf"), "a number from 0 to"),
        ("text", "--max-perplexity", ("-1", "nan"), "a number from 0 to"),
        ("text", "--margin", ("nan",), "a number from 0 to"),
        ("text", "--held-out", ("0", "2", "nan"), "a number above 0"),
        ("text", "--alpha-high", ("-1", "1e13", "nan"), "a number from 0 to 1e+12"),
        ("text", "--window", ("0", "5000"), "a whole number from 1 to 4,096"),
        ("calibrate", "--tolerance", ("-1", "nan"), "a number from 0 to"),
        ("calibrate", "--margin", ("-1",), "a number from 0 to"),
        ("calibrate", "--alpha-low", ("-1",), "a number from 0 to"),
        ("calibrate", "--sinks", ("-1", "5000"), "a whole number from 0 to 4,096"),
        ("calibrate", "--fit-heads", ("-1",), "a whole number from 0"),
        ("heads", "--n", ("0",), "a whole number from 1"),
        ("heads", "--window", ("0",), "a whole number from 1 to 4,096"),
        ("layers", "--sample", ("0", "1.5"), "a number above 0"),
        ("layers", "--keep", ("0", "nan"), "a number above 0"),
        ("layers", "--pool", ("0",), "a whole number from 1 to 63"),
        ("retrieval", "--sinks", ("-1",), "a whole number from 0"),
        ("means", "--tokens", ("0",), "a whole number from 1"),
        ("tiers", "--fp8-share", ("0", "1.5", "nan"), "a number above 0"),
        ("tiers", "--held-out", ("0",), "a whole number from 1"),
    ],
)
def test_numbers(
    tool: str, option: str, values: tuple[str, ...], allowed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parse, given = PARSERS[tool]
    usual = [x.format(folder=tmp_path) for x in given if not (option == "--max-perplexity" and x in ("--max-kl", "1"))]
    if option != "--max-perplexity":
        parse(usual)
    for value in values:
        with pytest.raises(SystemExit):
            parse([*usual, f"{option}={value}"])
        last = capsys.readouterr().err.splitlines()[-1]
        assert option in last and allowed in last and value[:20] in last and len(last) < 300, last


@pytest.mark.parametrize("tool", sorted(set(PARSERS) - {"doctor", "evaluate"}))
def test_files_to_write_have_a_folder(tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parse, given = PARSERS[tool]
    option = "--png" if tool == "inspect" else "--output"
    usual = [x.format(folder=tmp_path) for x in given]
    (tmp_path / "folder").mkdir()
    for path, why in ((tmp_path / "none" / "x", "there is no folder"), (tmp_path / "folder", "is a folder")):
        with pytest.raises(SystemExit):
            parse([*usual, f"{option}={path}"])
        assert why in capsys.readouterr().err.splitlines()[-1]
