"""The one command for figures and tables: what it lists, makes, leaves out, skips and goes on with."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.paths import DATA as SPLITS
from benchmarks.paths import NANO, REPOSITORY
from benchmarks.reproduce import cli, served
from benchmarks.reproduce.given import CONFIGS, DEFAULT, XKV, Need
from benchmarks.reproduce.parts import PARTS, Part
from benchmarks.reproduce.run import Maker, Record, settings
from sglang_diffkv.evaluate.server import CPU_ENV, OFFLINE_ENV
from tests.servers.shared import completed
from tests.tools.evaluation import DATA, REFERENCE

DEV = f"reference={SPLITS / 'dev.jsonl.xz'}"
NEVER = Need("the moon", lambda given: "needs the moon")


def part(name: str, status: int = 0, *needs: Need, markdown: bool = False, files: tuple[str, ...] = ()) -> Part:
    """One that a stand-in makes, with two commands."""
    wanted = files or (f"{name}/{name}.md", f"{name}/{name}.png")

    def commands(given):
        written = [str(given.output / x) for x in (wanted[1:] if markdown else wanted)]
        return [
            ["tests.tools.reproduced", "0", "first", *given.asking],
            ["tests.tools.reproduced", str(status), name, *written],
        ]

    return Part(name, "Paper", f"what {name} shows", needs, commands, wanted, markdown)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The command with some parts; its exit status."""
    monkeypatch.setattr(cli, "refusals", lambda model, args, configs: dict.fromkeys(configs, ""))

    def main(parts, *args):
        monkeypatch.setattr(cli, "PARTS", tuple(parts))
        monkeypatch.setattr(cli, "BY_NAME", {x.name: x for x in parts})
        return cli.main(["--model", str(NANO), "--output", str(tmp_path), *args])

    return main


def finished(folder: Path, name: str) -> str:
    return Record.model_validate_json((folder / "parts" / f"{name}.json").read_text()).finished


def test_parts_are_made_skipped_and_made_again(run, tmp_path, capsys):
    parts = [part("one"), part("two", 0, NEVER), part("three", markdown=True)]
    assert run(parts) == 0
    said = capsys.readouterr().out
    assert "2 of 3, two: left out: needs the moon" in said and "2 parts are there" in said
    made = {name: finished(tmp_path, name) for name in ("one", "three")}
    time.sleep(1.1)
    assert run(parts) == 0
    said = capsys.readouterr().out
    assert "1 of 3, one: is there" in said and "3 of 3, three: is there" in said
    assert {name: finished(tmp_path, name) for name in made} == made
    assert run(parts, "--parts", "one", "--again") == 0
    assert finished(tmp_path, "one") > made["one"] and finished(tmp_path, "three") == made["three"]
    (tmp_path / "three" / "three.png").unlink()
    assert run(parts) == 0 and "3 of 3, three: made" in capsys.readouterr().out, "a file was gone"
    table = (tmp_path / "three" / "three.md").read_text()
    assert table.startswith("```\npython -m tests.tools.reproduced 0 three three.png\n```\n\n| three |")
    page = (tmp_path / "README.md").read_text()
    assert page.index("## Paper, one") < page.index("## Paper, three") and "![what one shows](one/one.png)" in page
    assert "- two: needs the moon" in page and "All of no task file. Last run" in page
    assert str(tmp_path) not in page and str(REPOSITORY) not in page


def test_what_was_broken_off_or_changed_is_made(run, tmp_path, monkeypatch, capsys):
    parts = [part("one"), part("two")]
    making = Maker.make

    def broken(self, part):
        if part.name == "two":
            raise KeyboardInterrupt
        return making(self, part)

    with monkeypatch.context() as off:
        off.setattr(Maker, "make", broken)
        assert run(parts) == cli.BROKEN_OFF
    assert "goes on from here" in capsys.readouterr().err
    assert "not made yet" in (tmp_path / "README.md").read_text()
    assert run(parts) == 0
    said = capsys.readouterr().out
    assert "1 of 2, one: is there" in said and "2 of 2, two: made" in said
    assert run(parts, "--jobs", "2") == 0 and "one: is there" in capsys.readouterr().out, "as many servers as you like"
    assert run(parts, "--n", "3") == 0 and "one: made" in capsys.readouterr().out
    assert run(parts, "--n", "3", "--task", REFERENCE) == 0 and "one: made" in capsys.readouterr().out


def test_a_part_that_fails_is_reported_and_the_others_go_on(run, tmp_path, capsys):
    missing = replace(part("missing"), files=("missing/other.md",))
    assert run([part("bad", 3), missing, part("good")]) == 1
    said = capsys.readouterr().out
    assert "bad: FAILED: tests.tools.reproduced ended with status 3: said bad" in said
    assert "missing: FAILED: missing/other.md was not written" in said and "good: made" in said
    assert "1 parts are there, of 3 asked for 2 failed" in said
    page = (tmp_path / "README.md").read_text()
    assert "**Failed**: tests.tools.reproduced ended with status 3: said bad ([log](parts/bad.log))" in page
    log = (tmp_path / "parts" / "bad.log").read_text()
    assert log.startswith("$ python -m tests.tools.reproduced 0 first\n") and "| bad |\nsaid bad" in log
    assert run([part("bad"), part("good")]) == 0, "the reason is gone"
    assert "**Failed**" not in (tmp_path / "README.md").read_text()


def test_a_chart_that_is_not_drawn_loses_no_numbers(run, tmp_path, capsys):
    """Nor does one of other numbers stand for it, or a table of an earlier run for one that was not written."""
    assert run([part("one")]) == 0 and (tmp_path / "one" / "one.png").exists()
    drawing = part("one")

    def commands(given):
        return [["tests.tools.reproduced", "0", "again", str(given.output / "one" / "one.md")]]

    bare = replace(drawing, commands=commands)
    assert run([bare]) == 0 and "one: made without one.png" in capsys.readouterr().out
    assert not (tmp_path / "one" / "one.png").exists()
    page = (tmp_path / "README.md").read_text()
    assert "No chart could be drawn of it ([log](parts/one.log))." in page and "one.png" not in page
    assert "#### again" in page, "its table is shown instead"
    assert run([bare]) == 0 and "one: is there" in capsys.readouterr().out
    empty = replace(drawing, commands=lambda given: [["tests.tools.reproduced", "0", "never"]])
    assert run([empty]) == 1 and "one/one.md was not written" in capsys.readouterr().out


def test_what_was_named_and_cannot_be_made_fails(run):
    parts = [part("one"), part("two", 0, NEVER)]
    assert run(parts, "--parts", "two") == 1
    assert run(parts, "--parts", "one") == 0
    assert run([part("two", 0, NEVER)]) == 1, "nothing was made"


def test_a_terminated_command_ends_its_part(tmp_path):
    """Like the servers of a part: the command that runs is told, and the part is not there."""
    slow = (
        "import sys, time; from benchmarks.reproduce import cli, parts; from benchmarks.reproduce.parts import Part\n"
    )
    slow += "cli.refusals = lambda *x: {}\n"
    slow += "cli.PARTS = (Part('slow', 'p', 's', (), lambda given: [['http.server', '0']], ('a.md',)),)\n"
    slow += f"sys.exit(cli.main(['--model', {str(NANO)!r}, '--output', {str(tmp_path)!r}]))"
    process = subprocess.Popen([sys.executable, "-c", slow], cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    log = tmp_path / "parts" / "slow.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and len(children(process.pid)) == 1):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    (child,) = children(process.pid)
    while "http.server" not in Path(f"/proc/{child}/cmdline").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.5)  # the command has a handle of its child only once that has begun
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == cli.BROKEN_OFF
    assert not Path(f"/proc/{child}").exists() and not (tmp_path / "parts" / "slow.json").exists()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_every_part_is_listed_with_its_needs(capsys):
    assert cli.main(["--list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + len(PARTS) and rows[2].startswith("| figure2 | DiffKV |")
    assert "a CUDA GPU, --kv-gib" in next(x for x in rows if x.startswith("| figure14 |"))
    assert cli.main(["--list", "--parts", "fig4", "leankv-table1"]) == 0
    assert [x.split()[1] for x in capsys.readouterr().out.splitlines()[2:]] == ["figure4", "leankv-table1"]


def test_the_list_says_what_can_be_made(tmp_path, monkeypatch, capsys):
    refused = {**dict.fromkeys(CONFIGS, ""), XKV: "no xkv here"}
    monkeypatch.setattr(cli, "refusals", lambda model, args, configs: refused)
    monkeypatch.setattr(cli, "has_gpu", lambda: False)
    args = ["--model", str(NANO), "--output", str(tmp_path), "--task", DEV]
    assert cli.main(["--list", *args]) == 0
    states = {x.split()[1]: x.split("|")[-2].strip() for x in capsys.readouterr().out.splitlines()[2:]}
    assert [states[x] for x in ("figure3", "figure9", "figure12", "other-tasks")] == ["can be made"] * 4
    assert states["figure13"] == "needs a CUDA GPU" and "--task longbench=PATH" in states["table2"]
    assert states["xkv-tables"] == "no xkv here" and "needs --kv-gib N" in states["figure17"]
    assert "not for reporting" in states["figure10"] and "not for reporting" in states["leankv-table1"]
    assert "--text FILE" in states["text"] and not list(tmp_path.iterdir())
    more = ["--task", f"longbench={DATA / 'longbench'}", "--task", f"gsm8k={DATA / 'gsm8k.jsonl'}"]
    assert cli.main(["--list", *args, *more, "--text", str(DATA / "prose.txt"), "--kv-gib", "1"]) == 0
    states = {x.split()[1]: x.split("|")[-2].strip() for x in capsys.readouterr().out.splitlines()[2:]}
    left = {name for name, state in states.items() if state != "can be made"}
    assert left == {"table3", "figure13", "figure14", "figure15a", "xkv-tables"}


def test_commands_are_those_of_the_repository(tmp_path):
    """Every part's command lines are taken by the commands that they are for."""
    tasks = [DEV, f"longbench={DATA / 'longbench'}", f"gsm8k={DATA / 'gsm8k.jsonl'}", f"gpqa={DATA / 'math.jsonl'}"]
    named = [x for task in tasks for x in ("--task", task)]
    asked = ["--n", "3", "--max-prompt-tokens", "100", "--server-args", "--mem-fraction-static 0.5", "--jobs", "2"]
    more = ["--calibration-task", f"reference={SPLITS / 'calib.jsonl.xz'}", "--text", str(DATA / "prose.txt")]
    for quick in ([], ["--quick"]):
        line = ["--model", str(NANO), "--output", str(tmp_path), "--kv-gib", "0.5", *named, *asked, *more, *quick]
        given = cli.given_of(cli.parse_args(line), {})
        for one in PARTS:
            for module, *argv in one.commands(given):
                (output,) = (Path(x) for x in argv if str(tmp_path) in x)
                assert shlex.join(argv).count(str(tmp_path)) == 1, "everything goes to the folder"
                output.parent.mkdir(parents=True, exist_ok=True)  # as the run does
                parsers()[module](argv)
                assert settings([[module, *argv]], "a") != settings([[module, *argv]], "b")
    assert len(parsers()) == len({module for one in PARTS for module, *_ in one.commands(given)})


def parsers():
    """Each module's reading of its command line."""
    from benchmarks.figures import cli as figures
    from benchmarks.kernels import cli as kernels
    from benchmarks.quality import leankv, tables, xkv
    from benchmarks.serving import cli as serving
    from benchmarks.serving import latency, step_profile
    from sglang_diffkv.calibrate.arguments import parse_args as calibrate
    from sglang_diffkv.calibrate.layers import cli as layers
    from sglang_diffkv.evaluate import cli as evaluate

    def lean(argv):
        args, rest = leankv.parse_args(argv)
        calibrate(
            ["--procedure", "leankv", "--model", "m", "--task", args.task[0], "--work", "w", "--output", "o", *rest], ""
        )

    return {
        "benchmarks.figures": figures.parse_args,
        "benchmarks.kernels": kernels.parse_args,
        "benchmarks.quality.leankv": lean,
        "benchmarks.quality.tables": tables.parse_args,
        "benchmarks.quality.xkv": xkv.parse_args,
        "benchmarks.serving": serving.parse_args,
        "benchmarks.serving.latency": latency.parse_args,
        "benchmarks.serving.step_profile": step_profile.parse_args,
        "sglang_diffkv.calibrate.layers": layers.parse_args,
        "sglang_diffkv.evaluate": evaluate.parse_args,
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--task", "gsm8k=none.jsonl"], "gsm8k: there is no file none.jsonl"),
        (["--task", f"wikitext={DATA / 'prose.txt'}"], "give a text by --text FILE"),
        (["--task", f"humaneval_plus={DATA / 'humaneval_plus.jsonl'}"], "--run-generated-code"),
        (["--text", "none.txt"], "there is no file none.txt"),
        (["--parts", "figure99"], "there is no part 'figure99'"),
        (["--model", str(DATA)], "it has no config.json"),
    ],
)
def test_bad_command_lines_are_refused(args, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["--model", str(NANO), "--output", str(tmp_path), *args])
    assert message in capsys.readouterr().err


def test_a_figure_is_made_for_real(run, tmp_path):
    real = next(x for x in PARTS if x.name == "figure3")
    assert run([real], "--n", "1", "--task", REFERENCE) == 0
    assert json.loads((tmp_path / "figures" / "fig3.json").read_text())["model"] == "nano"
    page = (tmp_path / "README.md").read_text()
    assert "![attention scores of the tokens of one sequence](figures/fig3.png)" in page
    assert "python -m benchmarks.figures fig3 --model nano --task reference=reference.jsonl --n 1" in page


def test_the_doctor_is_asked_about_every_method(monkeypatch):
    env = {**{k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}, **CPU_ENV, **OFFLINE_ENV}
    forked = SimpleNamespace(run=lambda command, cwd, **options: completed(command, env, cwd))
    monkeypatch.setattr(served, "subprocess", forked)
    found = served.refusals(str(NANO), ["--enable-lmcache"], [DEFAULT])
    assert "lmcache" in found[DEFAULT]
    with pytest.raises(RuntimeError, match="could not be looked at"):
        served.refusals(str(NANO), [], [])
