"""What `gradilocks.report` offers to other rooms: every name, once, and loaded on first use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import gradilocks.report


def test_the_names_are_sorted_as_everywhere_and_have_a_home() -> None:
    names = list(gradilocks.report.__all__)
    assert names == sorted(set(names), key=lambda name: (not name.isupper(), name))
    assert sorted(names) == sorted(n for each in gradilocks.report._HOME.values() for n in each)


@pytest.mark.parametrize("name", gradilocks.report.__all__)
def test_a_name_is_what_it_says_and_not_a_file_of_that_name(name: str) -> None:
    for path in Path(gradilocks.report.__file__).parent.glob("[a-z]*.py"):
        __import__(f"gradilocks.report.{path.stem}")
    assert not isinstance(getattr(gradilocks.report, name), ModuleType)


def test_a_name_that_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = gradilocks.report.no_such_name


def test_formatting_a_number_does_not_wait_for_pages_and_nothing_waits_for_torch() -> None:
    script = (
        "import sys; from gradilocks.report import number; assert number(1.5) == '1.5';"
        "assert not {'torch', 'jinja2', 'plotly', 'gradilocks.report.page'} & set(sys.modules);"
        "import gradilocks.report as door; [getattr(door, name) for name in door.__all__];"
        "assert not {'torch', 'jinja2', 'plotly'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
