"""Making parts one after the other, each by commands in processes of their own, and remembering what was made."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from benchmarks.paths import REPOSITORY
from benchmarks.provenance import command as shown
from benchmarks.provenance import headline, without_paths
from benchmarks.reproduce.given import Given
from benchmarks.reproduce.parts import Command, Part
from sglang_diffkv.evaluate.tasks.files import sha256

FOLDER = "parts"
"""Of the output folder, with a record and a log of each part."""
NO_MATTER = ("--jobs",)
"""Arguments, with a value each, that change no result."""
IMAGE = ".png"
PATIENCE = 60.0
"""Seconds that a command has to stop its servers."""


class Record(BaseModel):
    """How a part was made, or how it failed.

    Attributes:
        settings: a hash of commands, model, task files and text; a result of others is made again.
        no_chart: names of images that could not be drawn of its numbers.
        commands: as a user would type them. about: hardware, versions and commit. reason: why it failed.
    """

    model_config = ConfigDict(frozen=True)

    part: str
    status: Literal["done", "failed"]
    settings: str
    commands: list[str]
    about: str
    finished: str
    seconds: float
    reason: str = ""
    no_chart: tuple[str, ...] = ()


def typed(asked: Command) -> str:
    """A command as a user would type it in the repository."""
    package, _, module = asked[0].partition(".")
    return shown(module, asked[1:], package)


def fingerprint(given: Given) -> str:
    """A hash of the model's configuration, task files and text."""
    digest = hashlib.sha256()
    paths = [given.model / "config.json", *(Path(x.partition("=")[2]) for x in (*given.tasks, *given.calibration))]
    for path in [*paths, *([given.text] if given.text else [])]:
        digest.update(f"{path.name} {sha256(path)}\n".encode())
    return digest.hexdigest()


def settings(commands: Sequence[Command], inputs: str) -> str:
    """A hash of all that a part's result depends on, but for the machine and the code."""
    kept = []
    for asked in commands:
        values = {i + 1 for i, x in enumerate(asked) if x in NO_MATTER}
        kept.append([x for i, x in enumerate(asked) if x not in NO_MATTER and i not in values])
    return hashlib.sha256(json.dumps([kept, inputs]).encode()).hexdigest()


class Maker:
    """The parts of one output folder.

    Args:
        about: as ``provenance`` gives it, kept with what is made.
    """

    def __init__(self, given: Given, about: dict[str, Any]):
        self.given, self.about = given, headline(about)
        self.folder = given.output / FOLDER
        self._inputs = fingerprint(given)

    def record(self, part: Part) -> Record | None:
        """How the part was made last; None if it never was, or in another form."""
        try:
            return Record.model_validate_json((self.folder / f"{part.name}.json").read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            return None

    def there(self, part: Part) -> bool:
        """Whether the part's files are there, by the record made from what is given now."""
        record = self.record(part)
        if record is None or record.status != "done":
            return False
        files = all((self.given.output / x).exists() for x in part.written(self.given) if x.name not in record.no_chart)
        return files and record.settings == settings(part.commands(self.given), self._inputs)

    def make(self, part: Part) -> Record:
        """Run the part's commands, until one fails, and note how they ended."""
        for folder in {self.folder, *((self.given.output / x).parent for x in part.written(self.given))}:
            folder.mkdir(parents=True, exist_ok=True)
        commands, begin = part.commands(self.given), time.monotonic()
        written = {x: self.given.output / x for x in part.written(self.given)}
        before = {x: _changed(path) for x, path in written.items()}
        reason, log = "", self.folder / f"{part.name}.log"
        with log.open("w", encoding="utf-8") as file:
            for number, asked in enumerate(commands, 1):
                table = self.given.output / part.files[0] if part.markdown and number == len(commands) else None
                file.write(f"$ {typed(asked)}\n")
                file.flush()
                if status := self._run(asked, file, table):
                    reason = f"{asked[0]} ended with status {status}"
                    break
        lost = [x for x, path in written.items() if _changed(path) in (None, before[x])]
        images = [x for x in lost if x.suffix == IMAGE]
        if not reason and len(lost) > len(images):
            reason = f"{', '.join(str(x) for x in lost if x not in images)} was not written"
        if not reason:
            for image in images:
                written[image].unlink(missing_ok=True)  # of other numbers
        if reason and (said := last_words(log)):
            reason += f": {said}"
        record = Record(
            part=part.name,
            status="failed" if reason else "done",
            settings=settings(commands, self._inputs),
            commands=[typed(x) for x in commands],
            about=self.about,
            finished=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - begin, 1),
            reason=reason,
            no_chart=() if reason else tuple(x.name for x in images),
        )
        (self.folder / f"{part.name}.json").write_text(record.model_dump_json(indent=1) + "\n", encoding="utf-8")
        return record

    def _run(self, asked: Command, log: IO[str], table: Path | None) -> int:
        """The command's exit status; what it prints goes to the log, or to ``table`` once it ended well.

        In a session of its own: a command that Ctrl-C and then SIGTERM end would be interrupted as it stops servers.
        """
        argv = [sys.executable, "-m", *asked]
        pipe = subprocess.PIPE if table else log
        process = subprocess.Popen(
            argv, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=pipe, stderr=log if table else subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate()
        except BaseException:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
        if table and process.returncode == 0:
            table.write_text(f"```\n{typed(asked)}\n```\n\n{without_paths(said)}", encoding="utf-8")
        elif table:
            log.write(said)
        return process.returncode


def _changed(path: Path) -> int | None:
    """When a file was written last; None if it is not there."""
    return path.stat().st_mtime_ns if path.exists() else None


def last_words(log: Path, most: int = 400) -> str:
    """The end of a log's last line that says something."""
    lines = [x.split("\r")[-1].strip() for x in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    said = [x for x in lines if x and not x.startswith("$ ")]
    return without_paths(said[-1])[-most:] if said else ""
