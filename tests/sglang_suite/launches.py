"""Pytest plugin for SGLang's own test files, unchanged: the servers that they launch get another backend and model.

``SUITE_MODEL``: folder served in place of the model that a test names. ``SUITE_ARGS``: JSON list of arguments that come
last on each server's command line. ``SUITE_ENV``: JSON object of its environment. SGLang's tests import
``popen_launch_server`` by name, so it is replaced before they are.
"""

from __future__ import annotations

import json
import os
from typing import Any

from sglang.test import test_utils

MODEL = os.environ["SUITE_MODEL"]
ARGS: list[str] = json.loads(os.environ.get("SUITE_ARGS", "[]"))
ENV: dict[str, str] = json.loads(os.environ.get("SUITE_ENV", "{}"))

_launch = test_utils.popen_launch_server


def popen_launch_server(model: str, base_url: str, timeout: float, *args: Any, **more: Any) -> Any:
    """SGLang's function of this name, with the suite's model and arguments."""
    more["other_args"] = [*(more.get("other_args") or ()), *ARGS]
    more["env"] = {**(more.get("env") or {}), **ENV}
    return _launch(MODEL, base_url, max(timeout, 600), *args, **more)


test_utils.popen_launch_server = popen_launch_server
for _name in [x for x in vars(test_utils) if x.startswith("DEFAULT_") and "MODEL_NAME_FOR_TEST" in x]:
    setattr(test_utils, _name, MODEL)
