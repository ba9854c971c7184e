"""Every example runs as a reader would run it, and stays short enough to be read."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)


def test_there_are_at_least_three_examples():
    assert len(EXAMPLES) >= 3


def test_every_example_is_numbered_and_no_number_is_used_twice():
    assert sorted(FOLDER.glob("*.py")) == EXAMPLES
    numbers = [path.name[:2] for path in EXAMPLES]
    assert len(numbers) == len(set(numbers))


@each_example
def test_an_example_runs_alone_without_a_warning_and_says_something(
    example, tmp_path, script_server
):
    done = script_server.run(example, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@each_example
def test_an_example_is_at_most_sixty_lines_long(example):
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 60
