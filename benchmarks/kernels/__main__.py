import sys

from benchmarks.kernels.cli import main

if __name__ == "__main__":
    sys.exit(main())
