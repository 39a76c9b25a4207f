"""Capacity before there is a server: ``python -m sglang_diffkv.capacity --help``."""

from sglang_diffkv.extra import INSTALL_ALL, SERVED, require

require(*SERVED, "triton", install=INSTALL_ALL)
