"""Whether SGLang has put the hooks where they belong. It only logs if it could not."""

from __future__ import annotations

from sglang_diffkv.errors import UnsupportedError
from sglang_diffkv.srt.versions import places
from sglang_diffkv.srt.versions.selection import BACKEND

WANTED: dict[str, str] = {}
"""Target -> name of the hook, of those that were registered in this process."""


def verify_hooks() -> None:
    """Raise UnsupportedError if SGLang could not apply a hook: what is missing, where it may be, and what to do."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = {target: hook for target, hook in WANTED.items() if target not in HookRegistry._patched}
    if not missing:
        return
    gone = {hook: target for target, hook in missing.items() if not places.is_there(target)}
    said = [f"--attention-backend {BACKEND}: {places.told(gone)}"] if gone else []
    if others := sorted(target for target in missing if target not in gone.values()):
        said.append(
            f"--attention-backend {BACKEND}: SGLang could not apply the hooks on {', '.join(others)}. Its log, above, "
            'says why ("Failed to apply hooks").'
        )
    raise UnsupportedError("\n".join(said))
