"""A hook on requests that come: what they ask of their own cache."""

from __future__ import annotations

from typing import Any

from sglang_diffkv.srt.scheduling.allocator import requests_of
from sglang_diffkv.srt.tree.private_space import HighSpace, WindowSpace
from sglang_diffkv.srt.versions import compat


def add_request_to_queue(original: Any, self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """A request is queued, for the first time or again. One that asks for what there is not, or has what cannot be
    computed, ends with an error, as SGLang ends those with impossible parameters. One that keeps all its tokens, or
    has a window of its own, finds prompts of its like only."""
    requests = requests_of(self)
    if requests is not None and not hasattr(req, "diffkv_keeps_high"):
        if problem := compat.prompt_problem(req) or compat.number_problem(req) or requests.fidelity.take(req):
            compat.end_with_error(req, problem)
        elif compat.keeps_high(req):
            req.extra_key = HighSpace(req.extra_key)
        elif window := compat.own_window(req):
            req.extra_key = WindowSpace(req.extra_key, window)
    return original(self, req, *args, **kwargs)


HOOKS = (add_request_to_queue,)
