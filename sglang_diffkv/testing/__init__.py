"""Helpers for tests, benchmarks and examples: a server as a context manager, a client and the task files."""
