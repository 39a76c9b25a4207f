"""The installed Mooncake's engine, which notes each write, and when SGLang has the results of each pass.

``TWO_SERVERS_NOTES`` names a folder. A line of a write has its bytes and times, one of a pass its requests and when
their results were there.
"""

import json
import os
import sys
import threading
import time
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_HERE = Path(__file__).parent
_OTHERS = [path for path in sys.modules["mooncake"].__path__ if Path(path) != _HERE]
_SPEC = PathFinder.find_spec("mooncake.engine", _OTHERS)
if _SPEC is None or _SPEC.loader is None:
    raise ImportError("Mooncake's engine is not installed: pip install mooncake-transfer-engine")
_THIS = sys.modules[__name__]
_ENGINE = module_from_spec(_SPEC)
_SPEC.loader.exec_module(_ENGINE)
sys.modules[__name__] = _THIS  # a library of C++ puts itself there
globals().update({name: x for name, x in vars(_ENGINE).items() if not name.startswith("__")})

_LOCK = threading.Lock()
_NOTES = Path(os.environ["TWO_SERVERS_NOTES"]) / f"{os.getpid()}.jsonl"


def _note(**what: object) -> None:
    with _LOCK, _NOTES.open("a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


def _note_passes() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    original = Scheduler.process_batch_result

    def process_batch_result(self, batch, result, *args, **kwargs):
        if (done := getattr(result, "copy_done", None)) is not None:
            done.synchronize()
        _note(what="pass", at=time.time(), requests=[str(req.rid) for req in batch.reqs])
        return original(self, batch, result, *args, **kwargs)

    Scheduler.process_batch_result = process_batch_result


class TransferEngine(_ENGINE.TransferEngine):  # type: ignore[name-defined]
    """Notes writes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        _note_passes()

    def _noted(self, call, lengths, *args):
        begin = time.time()
        code = call(*args)
        _note(what="write", begin=begin, end=time.time(), bytes=int(sum(lengths)), code=int(code))
        return code

    def batch_transfer_sync_write(self, session, sources, targets, lengths):
        call = super().batch_transfer_sync_write
        return self._noted(call, lengths, session, sources, targets, lengths)

    def transfer_sync_write(self, session, source, target, length):
        return self._noted(super().transfer_sync_write, [length], session, source, target, length)
