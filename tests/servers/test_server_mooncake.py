"""Servers find each other's prefixes, and their own after a restart, in Mooncake's store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.server

FOLDER = Path(sys.prefix) / "mooncake"
"""Where ``make programs`` puts Mooncake's package."""
NEW_NETWORK = ["unshare", "--net", *(["--map-root-user"] if os.getuid() else [])]


@pytest.fixture
def mooncake(missing: Callable[[str], None]) -> tuple[Path, dict[str, str]]:
    """Where the package is, and an environment in which it can be imported. A network of its own can be had."""
    paths = os.pathsep.join([str(FOLDER), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = {**os.environ, "PYTHONPATH": paths}
    asked = "import mooncake.store, mooncake; print(mooncake.__path__[0])"
    found = subprocess.run([sys.executable, "-c", asked], env=env, capture_output=True, text=True, timeout=60)
    if found.returncode:
        missing(f"Mooncake's package is not installed (make programs): {found.stderr.splitlines()[-1]}")
    refused = subprocess.run([*NEW_NETWORK, "true"], capture_output=True, text=True)
    if refused.returncode:
        pytest.skip(f"this machine gives no network of its own: {refused.stderr.strip()}")
    return Path(found.stdout.strip()), env


def test_servers_find_each_other_s_prefixes(mooncake: tuple[Path, dict[str, str]]) -> None:
    """Also after a restart; one that is damaged is computed, and so are all while the store hangs or is gone."""
    package, env = mooncake
    command = [sys.executable, "-m", "tests.servers.mooncake_servers", str(package / "mooncake_master")]
    served = subprocess.run([*NEW_NETWORK, *command], env=env, capture_output=True, text=True, timeout=500)
    assert served.stdout.splitlines()[-1:] == ["served"], served.stdout + served.stderr
