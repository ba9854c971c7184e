"""The TensorBoard sink: what it writes is read back with TensorBoard's own reader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import gradilocks
from gradilocks.errors import MissingPackage
from gradilocks.integrations.tensorboard import TensorBoardSink
from gradilocks.record import Sink
from tests import PATIENCE
from tests.runfile.run_files import (
    DETAIL,
    END,
    FIRST,
    HEADER,
    SECOND,
    STEP,
    plain_step,
    skipped_step,
)


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    return events.Reload()


def written(folder: Path, **options: bool) -> EventAccumulator:
    sink = TensorBoardSink(folder, **options)
    sink.open(HEADER)
    sink.optimizer(FIRST)
    sink.optimizer(SECOND)
    sink.step(plain_step(1, loss=2.5))
    sink.step(skipped_step(2, "embed.weight", "head.bias"))
    sink.step(plain_step(4, detail=DETAIL))
    sink.step(STEP)
    sink.close(END)
    return read(folder)


def test_a_sink_is_one() -> None:
    assert isinstance(TensorBoardSink("unused"), Sink)


def test_every_number_of_a_step_is_a_scalar_at_its_step_and_time(tmp_path):
    events = written(tmp_path / "new" / "tb")
    loss = events.Scalars("loss")
    assert [(point.step, point.value) for point in loss] == [(1, 2.5), (2, 2.0), (4, 1.0)]
    assert loss[0].wall_time == HEADER.started + 0.5
    assert [point.value for point in events.Scalars("skipped")] == [0.0, 1.0, 0.0]
    assert [point.step for point in events.Scalars("norm")] == [1, 4]  # not finite at the second


def test_a_second_optimizer_has_names_of_its_own(tmp_path):
    events = written(tmp_path)
    assert [point.value for point in events.Scalars("optimizer1/loss")] == [STEP.loss]
    assert events.Scalars("optimizer1/detail/weight/scale")[0].value == 1.25


def test_detail_is_written_by_parameter_and_can_be_left_out(tmp_path):
    events = written(tmp_path / "a")
    assert events.Scalars("detail/largest/head.bias")[0].value == 3.0
    assert "detail/norm/head.bias" not in events.Tags()["scalars"]  # it was not finite
    bare = written(tmp_path / "b", detail=False)
    assert not [tag for tag in bare.Tags()["scalars"] if "detail" in tag]


def test_skips_and_the_header_are_texts(tmp_path):
    events = written(tmp_path)
    skips = events.Tensors("skips")
    assert [skip.step for skip in skips] == [2, STEP.step]
    text = skips[0].tensor_proto.string_val[0].decode()
    assert text == "step 2: Inf in 2 gradients; scale 2^10"
    assert "train.py --lr 3e-4" in events.Tensors("run")[0].tensor_proto.string_val[0].decode()


def test_without_the_package_the_error_says_what_to_install(tmp_path):
    (tmp_path / "tensorboard.py").write_text("raise ImportError('not here')")
    script = "from gradilocks.integrations.tensorboard import TensorBoardSink as S; S('x')"
    source = str(Path(gradilocks.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), source])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stderr.splitlines()[-1] == (
        f"{MissingPackage.__module__}.MissingPackage: TensorBoard is not installed: "
        "pip install 'gradilocks[tensorboard]'"
    )
