"""In place of the commands of a part: writes files, says something, and ends as it is told.

python -m tests.tools.reproduced STATUS TEXT FILE... [OPTION...]
"""

from __future__ import annotations

import sys
from itertools import takewhile
from pathlib import Path


def main(status: str, text: str, *given: str) -> int:
    for name in takewhile(lambda x: not x.startswith("--"), given):
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"## {text}\n\n| a |\n| --- |\n| {len(path.parent.name)} |\n", encoding="utf-8")
    print(f"| {text} |")
    print(f"said {text}", file=sys.stderr)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
