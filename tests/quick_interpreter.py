"""Triton's interpreter without work that it repeats: the same results in a fraction of the time.

Triton 3.7.1 wraps all functions of its language again at each call of a device function, though the launch has wrapped
them. It makes a type, a shape and a table of dtypes anew in each operation, and finds the dtype of its result again.
It does integer operations twice, for assertions of its debug mode. Here such things are done once, or not at all.

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
    replace(interpreter, "_patch_attr", lambda before: _called_at_once(before, interpreter))
    replace(interpreter, "_get_np_dtype", lambda before: _numpy_dtype(before, tl))
    replace(TritonSemantic, "broadcast_impl_value", lambda before: _broadcast(before, core))
    replace(TritonSemantic, "binary_op_type_checking_impl", lambda before: _same_dtype(before, core))
    replace(TritonSemantic, "binary_op_sanitize_overflow_impl", _asserted)
    replace(core.block_type, "__init__", lambda before: _block_type(before, core))
    replace(core.block_type, "with_element_ty", _with_element_type)
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
    found: dict[tuple[int, int], set[int]] = {}

    def wrap(fn: Any) -> Any:
        scope = fn.__globals__
        if (seen := found.get((id(scope), len(scope)))) is None:
            seen = {id(x) for x in scope.values() if x is tl or x is tl.core}
            found[id(scope), len(scope)] = seen
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


def _called_at_once(before: Any, interpreter: Any) -> Any:
    """A function of the language is called without its wrapper, which asks whether it is in a kernel."""

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", None), interpreter.interpreter_semantic
        if function is None:
            return before(obj, name, member, builder, scope)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*args, **named)

        scope.set_attr(obj, name, call)

    return patch


def _numpy_dtype(before: Any, tl: Any) -> Any:
    """The dtype of a type, by the name of its elements'."""
    known: dict[str, Any] = {}

    def get(of: Any) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = before(of)
        return known[name]

    return get


def _asserted(before: Any) -> Any:
    """An integer operation is done again in 64 bits, for an assertion that only the debug mode reads."""

    def sanitize(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            before(self, lhs, rhs, binary_op)

    return sanitize


def _same_dtype(before: Any, core: Any) -> Any:
    """To which dtypes the two sides are cast depends on theirs, and for a number on its value. Errors are not kept."""
    known: dict[Any, tuple[Any, Any]] = {}

    def side(of: Any) -> Any:
        return of.dtype.name if isinstance(of, core.tensor) else (type(of), of)

    def check(self: Any, lhs: Any, rhs: Any, *rules: bool, **named: bool) -> Any:
        key = side(lhs), side(rhs), rules, *named.items()
        if (dtypes := known.get(key)) is None:
            lhs, rhs = before(self, lhs, rhs, *rules, **named)
            known[key] = lhs.dtype, rhs.dtype
            return lhs, rhs
        return self.broadcast_impl_value(*(cast(self, *x) for x in zip((lhs, rhs), dtypes, strict=True)))

    def cast(self: Any, of: Any, dtype: Any) -> Any:
        if not isinstance(of, core.tensor):
            return self.scalar_constant(of, dtype=dtype)
        return of if of.dtype.name == dtype.name else self.cast(of, dtype)

    return check


def _broadcast(before: Any, core: Any) -> Any:
    """Blocks of one shape, and two scalars, are broadcast already. The common shape of two others is found once.
    Equal shapes are one object (``_block_type``)."""
    shapes: dict[tuple[int, int], Any] = {}

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() != right.is_block():
            return (lhs, splat(self, rhs, left)) if left.is_block() else (splat(self, lhs, right), rhs)
        if not left.is_block() or left.shape is right.shape:
            return lhs, rhs
        key = id(left.shape), id(right.shape)
        if (shape := shapes.get(key)) is not None:
            return expand(self, lhs, shape), expand(self, rhs, shape)
        lhs, rhs = before(self, lhs, rhs)
        if len(left.shape) == len(right.shape):
            shapes[key] = lhs.type.shape
        return lhs, rhs

    def splat(self: Any, of: Any, like: Any) -> Any:
        block = like.with_element_ty(of.dtype)
        return self.tensor(self.builder.create_splat(block, of.handle), block)

    def expand(self: Any, of: Any, shape: Any) -> Any:
        if of.type.shape is shape:
            return of
        return self.tensor(self.builder.create_broadcast(of.handle, shape), core.block_type(of.dtype, shape))

    return broadcast


def _with_element_type(before: Any) -> Any:
    """A block of the same shape: types are never changed, so one serves for all."""
    known: dict[Any, Any] = {}

    def get(self: Any, element: Any) -> Any:
        key = element.name, id(self.shape)
        if (block := known.get(key)) is None:
            block = known[key] = before(self, element)
        return block

    return get


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
