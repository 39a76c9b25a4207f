"""The papers' figures and tables for any model from one command: ``python -m benchmarks.reproduce --help``."""
