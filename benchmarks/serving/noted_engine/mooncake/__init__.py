"""Stands before the installed Mooncake on a server's path, for ``benchmarks.serving.two_servers``."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
