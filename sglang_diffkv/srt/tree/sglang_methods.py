"""The prefix cache with the insertion methods of the installed SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from sglang_diffkv.srt.tree.prefix_cache import DiffKVPrefixCache
from sglang_diffkv.srt.versions.compat import extend_end, filled_to, installed, prompt_len, row_of

Recorder: TypeAlias = "tuple[Callable[..., None], Callable[..., None]]"


class OwnEvents:
    """SGLang's recorder of KV events for a tree that says itself which nodes come."""

    def __init__(self, recorder: Any):
        self._recorder = recorder

    def record_store(self, node: Any, *args: Any, **kwargs: Any) -> None:
        """SGLang has inserted a node, of which the tree tells later."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorder, name)


def prefix_cache_class() -> type:
    """The prefix cache with the insertion methods of the installed SGLang."""

    class _Inserting(DiffKVPrefixCache):
        def _keep_private(self, req: Any) -> None:
            """What stock SGLang does for a running request whose last tokens are not inserted."""
            kv_slots = self.req_to_token_pool.req_to_token[row_of(req), : extend_end(req)]
            req.prefix_indices = kv_slots.to(dtype=self._empty_match_result.device_indices.dtype, copy=True)

        def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
            if self.disable:
                return
            if not chunked and self.inserts_later(lambda: self.cache_unfinished_req(req)):
                return
            stock, end = super().cache_unfinished_req, self.publishable_to(req)

            def insertion() -> None:
                with filled_to(req, end):
                    stock(req, chunked=chunked)

            if chunked or not self.publish(req, insertion, running=True) or end < extend_end(req):
                self._keep_private(req)
            if not chunked:
                self.prompt_published(req)

    class V17(_Inserting):
        def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
            stock = super().cache_finished_req

            def insertion() -> None:
                stock(req, is_insert=True, kv_len_to_handle=kv_len_to_handle)

            if not (is_insert and not self.disable and self.publish(req, insertion, running=False)):
                stock(req, is_insert=False, kv_len_to_handle=kv_len_to_handle)

        def _record_store_event(self, node: Any, *args: Any) -> None:
            """SGLang has inserted a node, of which the tree tells later."""

        def event_recorder(self) -> Recorder | None:
            if not self.enable_kv_cache_events:
                return None
            return super()._record_store_event, self._record_remove_event

    class _Recording(_Inserting):
        kv_events: Any

        def event_recorder(self) -> Recorder | None:
            recorder = self.kv_events
            if not recorder.enabled:
                return None
            self.kv_events = OwnEvents(recorder)

            def store(node: Any, medium: Any = None) -> None:
                session = None if medium else getattr(self.publishing, "session_id", None)
                recorder.record_store(node, medium, session_id=session)

            return store, recorder.record_remove

    class V21(_Recording):
        def insert_req(self, req: Any, *, up_to: int) -> None:
            stock = super().insert_req
            if not self.disable:
                self.publish(req, lambda: stock(req, up_to=up_to), running=False)

    class V23(_Recording):
        def checkpoint(self, req: Any, *, up_to: int) -> None:
            stock = super().checkpoint
            running = not req.finished()
            if self.disable or (running and up_to < prompt_len(req)):
                return
            if running and self.inserts_later(lambda: self.checkpoint(req, up_to=up_to)):
                return
            end = self.publishable_to(req) if running else up_to
            self.publish(req, lambda: stock(req, up_to=end), running=running)
            if running:
                self.prompt_published(req)

    found: type = {"V17": V17, "V21": V21, "V23": V23}[installed().tree]
    found.__name__ = DiffKVPrefixCache.__name__  # the label ``cache_type`` of SGLang's metrics
    return found
