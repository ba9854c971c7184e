"""Reading: every record comes back as it was, and half a line costs that line and nothing else."""

from __future__ import annotations

import json
import math
import os
import threading
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradilocks
from gradilocks.errors import BadRunFile
from gradilocks.runfile import Culprit, OptimizerInfo, header_line, step_line
from gradilocks.runfile.reader import BATCH_BYTES
from tests.runfile.run_files import (
    END,
    FIRST,
    HEADER,
    LATER,
    NAMES,
    SECOND,
    STEP,
    TRACE,
    lines_of,
    plain_step,
    skipped_step,
    training,
    write_run,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def test_every_record_comes_back_with_every_field_as_it_was(path):
    audit = {"kind": "audit", "formats": ["fp8"]}
    note = {"kind": "weather", "sunny": True}
    path.write_text(
        lines_of([STEP], traces=[TRACE])
        + f"{json.dumps(audit)}\n{json.dumps(note)}\n"
        + lines_of(header=LATER, optimizers=(), end=END)
    )
    run = gradilocks.read_run(str(path))
    assert run.path == path
    assert run.header == HEADER
    assert run.optimizers == (FIRST, SECOND)
    assert run.steps == [STEP]
    assert run.traces == (TRACE,)
    assert run.end == END
    assert run.audit == audit
    assert run.notes == (note,)
    assert run.resumed == (LATER,)
    assert run.torn == 0


def test_time_and_memory_come_back_and_a_file_without_them_is_read(path):
    told = plain_step(1, waited=0.0, memory=2**40, gpu_memory=0)
    older = plain_step(2)
    assert not {"waited", "memory", "gpu_memory"} & json.loads(step_line(older)).keys()
    write_run(path, [told, older, plain_step(3, waited=0.1234567)])
    first, second, third = gradilocks.read_run(path).steps
    assert (first.waited, first.memory, first.gpu_memory) == (0.0, 2**40, 0)
    assert (second.waited, second.memory, second.gpu_memory) == (None, None, None)
    assert third.waited == 0.123457  # To the microsecond, as times are.


def test_a_file_of_many_batches_is_read_whole_and_in_order(path):
    steps = training(3000)
    write_run(path, steps, traces=[TRACE], end=END)
    assert path.stat().st_size > 4 * BATCH_BYTES
    run = gradilocks.read_run(path)
    assert run.steps == steps
    assert (run.traces, run.end) == ((TRACE,), END)


def test_progress_reaches_the_size_of_the_file(path):
    write_run(path, training(1000))
    heard = []
    gradilocks.read_run(path, progress=lambda done, size: heard.append((done, size)))
    size = path.stat().st_size
    assert len(heard) > 2
    assert heard == sorted(heard)
    assert heard[-1] == (size, size)


def test_numbers_that_are_not_finite_are_written_as_null_and_read_as_none(path):
    worst = plain_step(1, loss=math.nan, norm=math.inf, scale=-math.inf, lr=math.nan)
    write_run(path, [worst])
    assert "NaN" not in path.read_text()
    assert "Infinity" not in path.read_text()
    (read,) = gradilocks.read_run(path).steps
    assert (read.loss, read.norm, read.scale, read.lr) == (None, None, None, None)


def test_python_words_for_what_json_lacks_are_none_too(path):
    path.write_text(lines_of([plain_step(1)]).replace('"loss":4.0', '"loss":NaN'))
    assert gradilocks.read_run(path).steps[0].loss is None


def test_a_whole_number_where_a_number_belongs_is_a_float(path):
    path.write_text(lines_of([plain_step(1)]).replace('"loss":4.0', '"loss":4'))
    assert type(gradilocks.read_run(path).steps[0].loss) is float


@pytest.mark.parametrize("last", [STEP, plain_step(3), skipped_step(3, 'odd"\u2028}', "ü")])
def test_a_file_cut_at_any_byte_of_its_last_line_loses_that_line_alone(path, last):
    before = lines_of([plain_step(1), plain_step(2)]).encode()
    line = step_line(last).encode()
    for kept in range(len(line)):
        path.write_bytes(before + line[:kept])
        run = gradilocks.read_run(path)
        assert len(run.steps) == 2, line[:kept]
        assert run.torn == (kept > 0)
    path.write_bytes(before + line)
    assert gradilocks.read_run(path).steps[-1] == last


def test_a_file_cut_at_any_byte_of_its_header_says_so(path):
    line = header_line(HEADER).encode()
    for kept in range(len(line)):
        path.write_bytes(line[:kept])
        with pytest.raises(BadRunFile, match="half a header" if kept else "is empty"):
            gradilocks.read_run(path)


@pytest.mark.parametrize("torn", [1, 15, 40, 200, -2])
def test_a_line_torn_before_another_sessions_header_is_counted(path, torn):
    half = step_line(STEP)[:torn]
    path.write_text(
        lines_of([plain_step(1)]) + half + "\n" + lines_of([plain_step(2)], header=LATER)
    )
    run = gradilocks.read_run(path)
    assert [step.step for step in run.steps] == [1, 2]
    assert (run.torn, run.resumed) == (1, (LATER,))


def test_a_session_after_half_a_header_counts_from_its_own(path):
    path.write_text(header_line(HEADER)[:30] + "\n" + lines_of([plain_step(1)], header=LATER))
    run = gradilocks.read_run(path)
    assert (run.header, run.torn, len(run.steps)) == (LATER, 1, 1)


def test_a_session_that_goes_on_has_not_ended(path):
    path.write_text(lines_of(end=END) + lines_of([plain_step(1)], header=LATER))
    assert gradilocks.read_run(path).end is None


def test_an_optimizer_described_again_is_the_same_and_with_other_parameters_another(path):
    other = OptimizerInfo(0, "AdamW", ("new",), (1,), ("float32",))
    detailed = plain_step(3, detail=STEP.detail)
    path.write_text(
        lines_of([plain_step(1)], optimizers=[FIRST])
        + lines_of([plain_step(2)], header=LATER, optimizers=[FIRST])
        + lines_of([detailed], header=LATER, optimizers=[other])
    )
    run = gradilocks.read_run(path)
    assert run.optimizers == (FIRST, replace(other, index=1))
    assert [step.optimizer for step in run.steps] == [0, 0, 1]


def test_empty_lines_between_lines_are_nothing(path):
    path.write_text("\n" + lines_of([plain_step(1), plain_step(2)]).replace("\n", "\n\n"))
    run = gradilocks.read_run(path)
    assert (len(run.steps), run.torn) == (2, 0)


def test_fields_and_kinds_that_nobody_knows_are_accepted(path):
    text = lines_of([STEP, plain_step(8)], traces=[TRACE], end=END)
    known = [json.loads(line) for line in text.splitlines()]
    for fields in known:
        fields["colour"] = "red"
    known[3]["detail"]["median"] = [1.0]
    known[3]["culprits"][0]["zeros"] = 5
    known.insert(3, {"kind": "moon", "phase": 1})
    known.insert(5, {"kindless": True})
    path.write_text("".join(json.dumps(fields) + "\n" for fields in known))
    run = gradilocks.read_run(path)
    assert run.steps == [STEP, plain_step(8)]
    assert (run.header, run.traces, run.end) == (HEADER, (TRACE,), END)
    assert [note.get("kind") for note in run.notes] == ["moon", None]


@given(st.lists(st.text(max_size=12), min_size=1, max_size=4, unique=True))
def test_names_of_any_characters_come_back(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("names") / "run.jsonl"
    info = OptimizerInfo(0, "</script>", tuple(names), (1,) * len(names), ("f",) * len(names))
    step = skipped_step(1, *names)
    write_run(path, [step], optimizers=[info])
    run = gradilocks.read_run(path)
    assert run.optimizers == (info,)
    assert run.steps[0].culprits == tuple(Culprit(name, 0, 2) for name in names)


def test_half_a_character_in_a_name_is_replaced_and_a_whole_one_kept(path):
    info = OptimizerInfo(0, "AdamW", ("a\ud800b", "\U0001f600"), (1, 1), ("f", "f"))
    write_run(path, [skipped_step(1, "a\ud800b")], optimizers=[info])
    run = gradilocks.read_run(path)
    assert run.optimizers[0].names == ("a?b", "\U0001f600")
    assert run.steps[0].culprits[0].name == "a?b"


def test_pandas_reads_the_file(path):
    write_run(path, training(50), end=END)
    frame = pandas.read_json(path, lines=True, precise_float=True)
    steps = frame[frame.kind == "step"]
    assert len(steps) == 50
    assert steps.loss.iloc[-1] == gradilocks.read_run(path).steps[-1].loss
    assert steps.detail.dropna().iloc[0]["largest"] == [0.25, 3.0]


def test_a_pipe_can_be_read(path, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    text = lines_of(training(500))
    writer = threading.Thread(target=fifo.write_text, args=(text,))
    writer.start()
    try:
        assert len(gradilocks.read_run(fifo).steps) == 500
    finally:
        writer.join()


def test_names_are_in_the_order_of_the_optimizer(path):
    write_run(path, [])
    assert gradilocks.read_run(path).optimizers[0].names == NAMES


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("NaN in the input data: input (float32 1x3, 1 NaN) came into the model (Net)", "input"),
        ("NaN first in backward, in the loss or what else follows the model (Net)", "after"),
        ("Inf first in the output of h.1.gelu (GELU)", "module"),
    ],
)
def test_a_trace_of_an_older_file_says_in_its_sentence_whether_its_module_is_the_origin(
    text, where, tmp_path
):
    write_run(tmp_path / "a.jsonl", [STEP], traces=[replace(TRACE, text=text)])
    (trace,) = gradilocks.read_run(tmp_path / "a.jsonl").traces
    assert trace.where == where
    write_run(tmp_path / "b.jsonl", [STEP], traces=[replace(TRACE, where="before")])
    (trace,) = gradilocks.read_run(tmp_path / "b.jsonl").traces
    assert trace.where == "before"
