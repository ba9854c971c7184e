"""Examples for a law that many policies keep, drawn once for all of them."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import strategies as st

Law = Callable[..., None]


def each_of(count: int, **strategies: st.SearchStrategy[Any]) -> Callable[[Law], Law]:
    """As hypothesis' `given`, with `count` examples that are the same for every policy.

    To draw them takes longer than to try a policy on them, and since the seed is the law's they
    would come out the same for each. A failure shows the example as drawn, in the arguments of the
    law; it is small, and not made smaller.
    """

    def decorate(law: Law) -> Law:
        @functools.cache
        def drawn() -> list[dict[str, Any]]:
            examples: list[dict[str, Any]] = []

            @hypothesis.settings(max_examples=count)
            @hypothesis.seed(zlib.crc32(law.__name__.encode()))
            @hypothesis.given(st.fixed_dictionaries(strategies))
            def draw(example: dict[str, Any]) -> None:
                examples.append(example)

            draw()
            return examples

        @functools.wraps(law)
        def keeps_the_law(**given: Any) -> None:
            for example in drawn():
                law(**given, **example)

        signature = inspect.signature(law)
        asked = [it for name, it in signature.parameters.items() if name not in strategies]
        keeps_the_law.__signature__ = signature.replace(parameters=asked)  # type: ignore[attr-defined]
        return keeps_the_law

    return decorate
