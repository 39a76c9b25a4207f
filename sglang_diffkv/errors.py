"""What is raised for a configuration or a combination that cannot be served; the message says what to do."""

from __future__ import annotations


class ConfigError(ValueError):
    """The configuration is unusable; the message names the field."""


class UnsupportedError(RuntimeError):
    """A combination that DiffKV refuses at start."""
