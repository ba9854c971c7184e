"""Files that are no run files, or no longer: one line each that says what came and what to do."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradilocks
from gradilocks.errors import BadRunFile
from gradilocks.runfile import step_line
from gradilocks.runfile.reader import LONGEST_HEADER
from tests.runfile.run_files import END, STEP, TRACE, lines_of, plain_step, training, write_run

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty: the run that was to fill it got no further"),
        (PNG, "it begins with binary data (89 50 4e 47 0d 0a 1a 0a)"),
        (b"\0" * 5000, "it begins with binary data (00 00"),
        (b"step,loss\n1,2\n", "it begins with 'step,loss\\n1,2'"),
        (b"[1, 2]\n", "it begins with '[1, 2]'"),
        (b'{"loss": 1}\n', "its first line is '{\"loss\": 1}', not a header"),
        (b'{"kind": "step"}\n', "not a header"),
        (b"{" * 100_000, "not a header"),
        (b"\n\n", "is empty"),
        (b'{"kind":"header"}\n', "not a header"),
        (b'{"kind":"header","gradilocks":1}\n', "line 1: a header that is not as a run file has"),
        (b'{"kind":"header","gradilocks":2}\n', "is a run file of version 2; this gradilocks"),
        (b'{"kind":"header","gradilocks":"1"}\n', "is a run file of version '1'"),
        (b'{"kind":"header","gradilocks":[]}\n', "is a run file of version []"),
        ("{\n".encode("utf-16"), "begins with a byte order mark (UTF-16)"),
        (gzip.compress(b"{}", mtime=0), "is compressed with gzip. Unpack it first: gunzip -k"),
    ],
)
def test_a_file_that_is_no_run_file_is_one_clear_line(tmp_path, content, said):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadRunFile) as caught:
        gradilocks.read_run(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_first_line_without_an_end_is_not_read_whole(tmp_path):
    path = tmp_path / "run.jsonl"
    with path.open("wb") as file:
        file.write(b'{"kind":"header","gradilocks":1,"settings":"')
        file.truncate(2**34)  # 16 GiB of zeros that take no room on disk
    with pytest.raises(BadRunFile, match=f"longer than {LONGEST_HEADER >> 20} MiB"):
        gradilocks.read_run(path)


def test_a_folder_a_missing_file_and_an_impossible_path_are_named(tmp_path):
    with pytest.raises(BadRunFile, match="is a folder; expected a run file"):
        gradilocks.read_run(tmp_path)
    with pytest.raises(BadRunFile, match=r"absent\.jsonl does not exist"):
        gradilocks.read_run(tmp_path / "absent.jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(BadRunFile, match="cannot be read: Not a directory"):
        gradilocks.read_run(tmp_path / "file" / "run.jsonl")
    with pytest.raises(BadRunFile, match="cannot be read: File name too long"):
        gradilocks.read_run(tmp_path / ("x" * 300))
    with pytest.raises(BadRunFile, match="is no path"):
        gradilocks.read_run("run\0.jsonl")


def test_a_file_that_may_not_be_read_is_named(tmp_path):
    path = write_run(tmp_path / "run.jsonl", [])
    path.chmod(0)
    tmp_path.chmod(0o755)
    script = (
        "import os, sys, gradilocks\n"
        "read_run = gradilocks.read_run\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: read_run(sys.argv[1])\n"
        "except gradilocks.errors.BadRunFile as error: print(error)\n"
    )
    # Its parents belong to root alone, so the file is reached through an open folder.
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import os; os.fchdir({folder})\n{script}", "run.jsonl"],
            pass_fds=[folder],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            timeout=60,
        )
    finally:
        os.close(folder)
    assert done.stdout == "run.jsonl cannot be read: Permission denied.\n", done.stderr


def damaged(kind: str, **changes: object) -> str:
    """A file of every kind of line, with fields of the first of one kind changed; ... removes."""
    text = lines_of([STEP, *training(300)], traces=[TRACE], end=END)
    lines = [json.loads(line) for line in text.splitlines()]
    first = next(fields for fields in lines if fields["kind"] == kind)
    for name, value in changes.items():
        first[name] = value
        if value is ...:
            del first[name]
    return "".join(json.dumps(fields) + "\n" for fields in lines)


@pytest.mark.parametrize(
    ("kind", "changes", "line", "said"),
    [
        ("step", {"norm": "high"}, 4, "'norm' must be a number or null, got \"high\""),
        ("step", {"norm": ...}, 4, "without 'norm'"),
        ("step", {"step": 1.5}, 4, "'step' must be a whole number, got 1.5"),
        ("step", {"time": None}, 4, "'time' must be a number, got null"),
        ("step", {"skipped": 1}, 4, "'skipped' must be true or false, got 1"),
        ("step", {"loss": 10**400}, 4, "'loss' must be a number that fits a float64"),
        ("step", {"optimizer": 2}, 4, "optimizer 2, which no line before it describes"),
        ("step", {"culprits": ["a"]}, 4, "an entry of 'culprits' must be an object, got \"a\""),
        ("step", {"culprits": [{}]}, 4, "'name' of a culprit must be text, got null"),
        ("step", {"detail": 5}, 4, "'detail' must be an object, got 5"),
        ("step", {"detail": {}}, 4, "'norm' of 'detail' must be a list, got null"),
        ("step", {"optimizer": 0}, 4, "'detail' has 1 entries, and its optimizer 2 parameters"),
        ("optimizer", {"names": ["a"]}, 2, "1 names, 2 sizes and 2 dtypes"),
        ("optimizer", {"names": [1, 2]}, 2, "an entry of 'names' must be text, got 1"),
        ("optimizer", {"class": None}, 2, "'class' must be text, got null"),
        ("trace", {"inputs": [3]}, 305, "an entry of 'inputs' must be an object, got 3"),
        ("trace", {"text": ["x" * 99]}, 305, "'text' must be text, got [\"xxxx"),
        ("trace", {"where": None}, 305, "'where' must be text, got null"),
        ("end", {"exit": "no"}, 306, "'exit' must be a whole number, got \"no\""),
        ("end", {"time": 10**400}, 306, "'time' must be a number that fits a float64"),
    ],
)
def test_a_line_with_a_wrong_field_is_left_out_and_named_with_its_number(
    tmp_path, kind, changes, line, said
):
    path = tmp_path / "run.jsonl"
    path.write_text(damaged(kind, **changes))
    with pytest.warns(RuntimeWarning, match=f"line {line} is damaged and was left out"):
        run = gradilocks.read_run(path)
    assert list(run.damaged) == [line]
    assert said in run.damaged[line]
    assert len(run.steps) == 301 - (kind == "step")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"started": 10**400}, "'started' must be a number that fits a float64"),
        ({"command": "train.py"}, "'command' must be a list, got \"train.py\""),
    ],
)
def test_a_header_with_a_wrong_field_is_no_run_file(tmp_path, changes, said):
    path = tmp_path / "run.jsonl"
    path.write_text(damaged("header", **changes))
    with pytest.raises(BadRunFile) as caught:
        gradilocks.read_run(path)
    assert str(caught.value).startswith(f"{path}, line 1: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("wreck", ['{"kind":"st', "12", "\0\0\0", "null", "{}}", "é" * 50])
def test_a_damaged_line_in_the_middle_costs_that_line_and_is_named(tmp_path, wreck):
    path = tmp_path / "run.jsonl"
    lines = lines_of([plain_step(n) for n in range(1, 2000)]).splitlines()
    lines[1203] = wreck
    path.write_text("\n".join(lines) + "\n")
    said = re.escape(f"{path}: line 1,204 is damaged and was left out (not JSON)")
    with pytest.warns(RuntimeWarning, match=said):
        run = gradilocks.read_run(path)
    assert run.damaged == {1204: "not JSON"}
    assert (run.torn, len(run.steps)) == (0, 1998)
    assert run.steps[1200].step == 1202  # Lines 1 to 3 are the header and two optimizers.


def test_two_lines_broken_in_matching_ways_are_not_taken_for_whole(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = lines_of([plain_step(n) for n in range(1, 10)]).splitlines()
    lines[5], lines[6] = '{"kind":"step","a":[{}', "{}]}"
    path.write_text("\n".join(lines) + "\n")
    with pytest.warns(RuntimeWarning, match="2 lines are damaged and were left out: 6 and 7"):
        run = gradilocks.read_run(path)
    assert [step.step for step in run.steps] == [1, 2, 5, 6, 7, 8, 9]


def test_steps_stay_when_the_line_that_describes_their_optimizer_is_damaged(tmp_path):
    path = tmp_path / "run.jsonl"
    lines = lines_of(training(20)).splitlines()
    lines[1] = lines[1][:40]
    path.write_text("\n".join(lines) + "\n")
    with pytest.warns(RuntimeWarning, match="line 2 is damaged"):
        run = gradilocks.read_run(path)
    assert len(run.steps) == 20
    assert run.optimizers[run.steps[0].optimizer].kind == "unknown"
    assert all(step.detail is None for step in run.steps)  # Of whom, nobody knows.


def test_a_torn_line_before_a_header_and_one_at_the_end_are_no_damage(tmp_path):
    path = tmp_path / "run.jsonl"
    text = lines_of([plain_step(1)])
    path.write_text(text + '{"kind":"st\n' + text + '{"kind":"st')
    run = gradilocks.read_run(path)
    assert (run.torn, run.damaged, len(run.steps)) == (2, {}, 2)


def test_a_damaged_header_of_a_later_session_is_left_out(tmp_path):
    path = tmp_path / "run.jsonl"
    text = lines_of([plain_step(1)])
    path.write_text(text + text.replace('"started":', '"began":'))
    with pytest.warns(RuntimeWarning, match="without 'started'"):
        run = gradilocks.read_run(path)
    assert (len(run.resumed), len(run.steps)) == (0, 2)


def test_many_damaged_lines_are_counted_and_the_first_are_named(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(lines_of([plain_step(1)]) + "wreck\n" * 30 + step_line(plain_step(2)))
    with pytest.warns(RuntimeWarning, match="30 lines .* 5, 6, 7, 8, 9, 10, 11, 12 and 22 more"):
        assert len(gradilocks.read_run(path).steps) == 2


def test_every_shipped_file_of_this_project_is_refused_without_a_traceback():
    root = Path(__file__).parent.parent.parent
    for path in (root / "pyproject.toml", root / "README.md", root / "tests" / "conftest.py"):
        with pytest.raises(BadRunFile):
            gradilocks.read_run(path)


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff"])
def test_a_byte_order_mark_is_named(tmp_path, mark):
    path = tmp_path / "run.jsonl"
    path.write_bytes(mark + lines_of().encode())
    with pytest.raises(BadRunFile, match="begins with a byte order mark"):
        gradilocks.read_run(path)
