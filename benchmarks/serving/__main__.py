import sys

from benchmarks.serving.cli import main

if __name__ == "__main__":
    sys.exit(main())
