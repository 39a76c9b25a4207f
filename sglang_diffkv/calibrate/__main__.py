import sys

from sglang_diffkv.calibrate import cli
from sglang_diffkv.calibrate.text import cli as text

if __name__ == "__main__":
    raise SystemExit(text.main() if text.wanted(sys.argv[1:]) else cli.main())
