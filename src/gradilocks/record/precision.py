"""A loss enters; the formats in which it was computed leave, for the run file.

Autograd's graph behind a loss knows the format of everything on the way to it, whoever chose it:
`torch.autocast`, a model in half precision, a cast by hand, `gradilocks.emulate`. What was compiled
is one node of it and shows what it returned; a checkpoint with re-entry shows nothing of its
inside.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor, dtype

from gradilocks._torch import output_dtypes

__all__ = ["formats_behind"]

# A model of 100 layers has some thousand nodes, 2 µs each. Half precision shows in the first ones.
_MOST_NODES = 20_000


def formats_behind(loss: Any) -> tuple[str, ...]:
    """The floating-point formats behind a loss, sorted, as in ('bfloat16', 'float32').

    Empty if nothing is known of them.
    """
    root = loss.grad_fn if isinstance(loss, Tensor) else None
    waiting, seen = deque([root] if root is not None else []), {root}
    found = {loss.dtype} if waiting else set()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.popleft()
        found.update(output_dtypes(node))
        for rounding in getattr(node, "roundings", ()):  # Of `gradilocks.emulate`.
            found.update(each for each in getattr(rounding, "args", ()) if isinstance(each, dtype))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    floating = (each for each in found if each.is_floating_point)
    return tuple(sorted(str(each).removeprefix("torch.") for each in floating))
