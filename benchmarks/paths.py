"""Where a checkout keeps what tests and benchmarks share."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
NANO = REPOSITORY / "examples" / "models" / "nano"
DATA = REPOSITORY / "benchmarks" / "data"
