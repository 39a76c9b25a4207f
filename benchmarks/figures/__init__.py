"""DiffKV's quality figures for any model and task files: ``python -m benchmarks.figures --help``."""
