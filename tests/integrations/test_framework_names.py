"""Every private name of a framework that is relied on is still there, or a test says which is not.

A name like `package.module.Class().attribute` is one of an object: it is set in the constructor, so
the constructor's code must name it.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

from gradilocks.integrations.framework_names import FRAMEWORK_NAMES

ELSEWHERE = {"fastai"}
"""Frameworks that `make test` does not have; tests/frameworks looks at them."""


def names_of(frameworks):
    return [(each, name) for each in sorted(frameworks) for name in FRAMEWORK_NAMES[each]]


NAMES = names_of(FRAMEWORK_NAMES.keys() - ELSEWHERE)


def found(path):
    """What the dotted path leads to: the longest part that can be imported, then attributes."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            thing = inspect.getattr_static(thing, part)
        return thing
    raise ModuleNotFoundError(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("framework", "name"), NAMES, ids=[name for _, name in NAMES])
def test_the_framework_still_has_the_name(framework, name):
    check(framework, name)


def check(framework, name):
    """Fails if the framework that is installed has lost a name."""
    purpose = FRAMEWORK_NAMES[framework][name]
    gone = f"{framework} has no {name} any more, which was needed for: {purpose}"
    of_object, _, attribute = name.partition("().")
    try:
        thing = found(of_object)
    except (AttributeError, ModuleNotFoundError):
        pytest.fail(gone)
    if attribute:
        sources = [inspect.getsource(kind) for kind in thing.__mro__ if kind is not object]
        assert any(f"self.{attribute}" in source for source in sources), gone


def test_a_name_that_is_gone_is_noticed():
    with pytest.raises(AttributeError):
        found("pytest.approximately")
    with pytest.raises(ModuleNotFoundError):
        found("no_such_framework.module.Class")
