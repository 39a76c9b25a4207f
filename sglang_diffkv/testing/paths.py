"""Where a checkout keeps what tests, benchmarks and examples share."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
NANO = REPOSITORY / "examples" / "models" / "nano"
DATA = REPOSITORY / "benchmarks" / "data"
