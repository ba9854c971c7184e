"""Makes Triton's interpreter, in which the CPU's tests run the kernels, about twice as fast.

At every call of a function inside a kernel it replaces the functions of `triton.language` by its
own once more, though they are replaced as long as the kernel runs: half of its time. Here what is
replaced already is left alone. If the interpreter's inside is another one day, nothing is changed.
"""

from __future__ import annotations

import inspect
from typing import Any


def replace_once_a_launch() -> None:
    """Lets the interpreter replace the functions of `triton.language` once a launch."""
    import triton.language as tl
    from triton.runtime import interpreter

    real: Any = getattr(interpreter, "_patch_lang", None)
    if real is None or getattr(real, "once_a_launch", False):
        return
    replaced: set[int] = set()

    def patch_lang(fn: Any) -> Any:
        every = fn.__globals__.values()
        modules = {id(value) for value in every if inspect.ismodule(value)} & {id(tl), id(tl.core)}
        if modules and modules <= replaced:
            return None  # Asked from inside a kernel, by who does not look at what is returned.
        launched = not replaced
        replaced.update(modules)
        scope = real(fn)
        if launched and hasattr(scope, "restore"):
            put_back = scope.restore

            def restore() -> None:
                replaced.clear()
                put_back()

            scope.restore = restore
        elif launched:
            replaced.clear()
        return scope

    patch_lang.once_a_launch = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_lang
