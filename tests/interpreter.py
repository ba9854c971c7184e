"""Makes Triton's interpreter, in which the CPU's tests run the kernels, several times as fast.

What it computes stays as it is: only what it works out again at every operation, though it is the
same each time, is worked out once.

- It replaces the functions of `triton.language` by its own at every launch, and once more at every
  call of a function inside a kernel. Here they are replaced at the first launch, and stay so.
- It computes every sum and product of integers a second time, to see whether it overflows, and
  throws the answer away where `debug` is off, as it is in the interpreter.
- It makes a new object for every shape, and a dictionary of all types for each look into it.

If the interpreter's inside is another one day, what cannot be found is left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any


def make_fast() -> None:
    """Takes the needless work out of the interpreter; once, whoever asks."""
    from triton.runtime import interpreter

    if getattr(interpreter, "made_fast", False):
        return
    interpreter.made_fast = True
    for improve in (_replace_once, _check_no_overflow, _look_types_up, _share_shapes):
        with contextlib.suppress(AttributeError):
            improve(interpreter)


def _replace_once(interpreter: Any) -> None:
    import triton.language as tl

    real, scope = interpreter._patch_lang, interpreter._LangPatchScope
    semantic = interpreter.interpreter_semantic
    langs = {id(tl): tl, id(tl.core): tl.core}
    replaced: set[int] = set()
    seen_globals: dict[int, Any] = {}

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        # Without the wrapper that asks for `_semantic`, which is given here.
        function = getattr(member, "__wrapped__", member)

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, interpreted)

    def patch_lang(fn: Any) -> Any:
        names = fn.__globals__
        if id(names) not in seen_globals:
            asked = {id(value) for value in names.values() if id(value) in langs}
            if not asked or asked - replaced:
                real(fn)
                replaced.update(asked)
            seen_globals[id(names)] = names
        return scope()  # Empty: nothing is put back after the launch.

    interpreter._patch_attr = patch_attr
    interpreter._patch_lang = patch_lang


def _check_no_overflow(interpreter: Any) -> None:
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _look_types_up(interpreter: Any) -> None:
    import triton.language as tl

    core, semantic = tl.core, type(interpreter.interpreter_semantic)
    np_dtype_of, computation_type = interpreter._get_np_dtype, semantic.computation_type_impl
    same_type, unwrap = core.dtype.__eq__, core._unwrap_if_constexpr
    by_name: dict[str, Any] = {}
    computed_in: dict[Any, Any] = {}
    plain = (core.tensor, int, float, bool, type(None))

    def get_np_dtype(kind: Any) -> Any:
        if isinstance(kind, core.pointer_type):
            return np_dtype_of(kind)
        kind = kind.scalar
        found = by_name.get(kind.name)
        if found is None:
            found = by_name[kind.name] = np_dtype_of(kind)
        return found

    def equal(self: Any, other: Any) -> bool:
        return self is other or same_type(self, other)

    def unwrap_if_constexpr(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    def computation_type_impl(self: Any, a: Any, a_number: bool, b: Any, *more: bool) -> Any:
        key = a.name, a_number, b.name, *more
        if key not in computed_in:
            computed_in[key] = computation_type(self, a, a_number, b, *more)
        return computed_in[key]

    interpreter._get_np_dtype = get_np_dtype
    semantic.computation_type_impl = computation_type_impl
    core.dtype.__eq__ = equal
    core._unwrap_if_constexpr = unwrap_if_constexpr


def _share_shapes(interpreter: Any) -> None:
    import triton.language as tl

    core, semantic = tl.core, type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value
    block_type, constexpr = core.block_type, core.constexpr
    with_element_ty, to_ir = block_type.with_element_ty, block_type.to_ir
    scalar = constexpr(1), core.tuple([])

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle = handle
        self.type = kind
        self.dtype = kind.scalar
        if not kind.is_block():
            self.numel, self.shape = scalar
            return
        if not hasattr(kind, "of_tensor"):
            shape = core.tuple([constexpr(size) for size in kind.shape])
            kind.of_tensor = constexpr(kind.numel), shape
        self.numel, self.shape = kind.of_tensor

    def with_elements(self: Any, kind: Any) -> Any:
        key = (kind.name, kind.address_space, kind.const) if kind.is_ptr() else kind.name
        others = self.__dict__.setdefault("with_others", {})
        if key not in others:
            others[key] = with_element_ty(self, kind)
        return others[key]

    def broadcast_value(self: Any, left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return left, right
        return broadcast(self, left, right)

    def to_itself(self: Any, builder: Any) -> Any:
        if builder is interpreter.interpreter_builder and not self.element_ty.is_ptr():
            return self  # The interpreter's types are those of the language.
        return to_ir(self, builder)

    core.tensor.__init__ = make_tensor
    block_type.with_element_ty = with_elements
    block_type.to_ir = to_itself
    semantic.broadcast_impl_value = broadcast_value
