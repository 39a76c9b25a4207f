"""SGLang's queues of prompts that are computed on one server and go on on another, as far as they differ or are named
by release. Only releases whose row says so have them with diffkv (``Release.disaggregation``)."""

from __future__ import annotations

import json
from typing import Any

from sglang_diffkv.srt.versions.compat import kv_of


def is_own_request(req: Any) -> bool:
    """Whether SGLang made the request itself, to warm a server up: it meets no other server."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, _is_fake_transfer

    return req.bootstrap_host == FAKE_BOOTSTRAP_HOST or bool(_is_fake_transfer(req))


def transfer_states() -> Any:
    """SGLang's states of a sender or a receiver, by name."""
    from sglang.srt.disaggregation.base import KVPoll

    return KVPoll


def prepare_abort(req: Any, message: str) -> None:
    """End a request that does not run yet with an error that its client sees."""
    from http import HTTPStatus

    from sglang.srt.disaggregation import utils

    utils.prepare_abort(req, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)


def expected_tokens(req: Any) -> int:
    """Tokens of a prompt that another server computes. After a pause for new weights these are generated ones too."""
    again = getattr(req, "pd_rebootstrap_in_progress", False)
    return len(req.origin_input_ids) + (len(req.output_ids) if again else 0)


def was_kept(req: Any) -> bool:
    """Whether something was left with a retracted request."""
    return kv_of(req).retraction_backup is not None


def kept_of(req: Any) -> Any:
    """What ``keep_for`` left with a retracted request; None if there is nothing."""
    backup = kv_of(req).retraction_backup
    return None if backup is None else backup.cpu_tensors


def keep_for(req: Any, kept: Any) -> None:
    """Leave with a retracted request what it will be made of again; SGLang drops it if the request ends."""
    from sglang.srt.managers.schedule_batch import RetractionBackup

    kv_of(req).retraction_backup = RetractionBackup(cpu_tensors=kept, mamba_cpu=None)


def has_come_back(req: Any) -> None:
    """The retracted request runs again."""
    kv_of(req).retraction_backup = None


def bootstrap_address(req: Any) -> str:
    """Where the request's prefill server tells of itself."""
    from sglang.srt.disaggregation.decode import _bootstrap_addr

    return str(_bootstrap_addr(req))


# The handshake: SGLang compares a text of both servers, its name of the dtype of the KV cache

MARK = "diffkv"
MOST_TOLD = 64 << 10
"""Characters of such a text, at most: it comes from whoever answers."""


def told_of_rows(facts: dict[str, Any]) -> str:
    """The text of a server whose rows these are the facts of."""
    return json.dumps({MARK: facts}, sort_keys=True, separators=(",", ":"))


def speaks_of_rows(text: str) -> bool:
    """Whether a text is one of those."""
    return _facts(text) is not None


def tells_nothing(manager: Any, address: str) -> bool:
    """Whether the prefill server at an address told no such text, by which SGLang compares nothing. ``manager``:
    SGLang's, which has met it."""
    return getattr(manager.prefill_info_table[address], "kv_cache_dtype", None) is None


def forget_server(manager: Any, address: str) -> None:
    """SGLang's ``manager`` has not met the prefill server at an address."""
    manager.prefill_info_table.pop(address, None)


def _facts(text: Any) -> dict[str, Any] | None:
    if not isinstance(text, str) or len(text) > MOST_TOLD:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found[MARK] if isinstance(found, dict) and isinstance(found.get(MARK), dict) else None


def how_servers_differ(error: str, ours: str) -> str:
    """What SGLang's error, which has both servers' texts, is about, in words: by name, with both values. ``ours``: this
    server's text."""
    theirs = error.partition("kv_cache_dtype=")[2].partition(", but decode server has")[0]
    if not theirs:
        return error[:MOST_SHOWN]
    there, here = _facts(theirs), _facts(ours)
    if there is None or here is None:
        return f"it stores its KV cache otherwise ({theirs[:80]}): start it with --attention-backend diffkv"
    names = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
    differ = "; ".join(
        f"{_short(name)} is {_short(there.get(name))} there and {_short(here.get(name))} here" for name in names
    )
    return f"{differ[:MOST_SHOWN]}. Start both servers alike"


MOST_SHOWN = 4096
"""Characters of what another server told, in an error."""


def _short(value: Any) -> str:
    try:
        return str(value)[:200]
    except RecursionError:
        return "nested too deep"
