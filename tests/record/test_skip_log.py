"""Skips are told in full at first, then now and then, and none is forgotten."""

from __future__ import annotations

import logging

import pytest

from gradilocks import Recorder
from gradilocks.record.skip_log import SkipLog
from gradilocks.runfile import Culprit, Step, Trace
from tests.record.recorded import INF, recorded


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def step(number, *, skipped=True, scale=65536.0, culprits=None, optimizer=0, **fields):
    if culprits is None:
        culprits = (Culprit("w", 0, 1),) if skipped else ()
    return Step(
        step=number, time=0.0, optimizer=optimizer, loss=fields.get("loss", 2.5), scale=scale,
        norm=fields.get("norm"), limit=fields.get("limit"), clipped=False, skipped=skipped,
        reason=fields.get("reason", "nonfinite" if skipped else None), culprits=culprits, lr=None,
        nan=fields.get("nan", 0), inf=fields.get("inf", 0), detail=None,
        loss_nonfinite=fields.get("loss_nonfinite", False),
        finite_gradients=fields.get("finite_gradients"), finite_after=fields.get("finite_after"),
    )  # fmt: skip


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


def test_a_skip_is_one_line_and_names_nobody_if_the_loss_was_bad(tmp_path, caplog):
    recorded(Recorder(tmp_path / "a", flush_every=1), steps=3, bad={2: INF})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "gradilocks"
    assert record.getMessage() == (
        "step 2 skipped: the loss itself was NaN or Inf (forward or loss, module unknown); "
        "scale 65536 → 32768"
    )


def test_log_false_says_nothing(tmp_path, caplog):
    recorded(Recorder(tmp_path / "a", log=False), steps=3, bad={2: INF})
    assert not caplog.records


@pytest.mark.parametrize(
    ("made", "next_scale", "line"),
    [
        (
            step(1832, culprits=tuple(Culprit(n, 0, 1) for n in ("blocks.11.attn", "b", "c")),
                 finite_gradients=7, finite_after="head"),
            32768.0,
            "step 1832 skipped: Inf in blocks.11.attn (+2 more); scale 65536 → 32768",
        ),
        (step(3, culprits=(Culprit("w", 2, 1),)), 65536.0,
         "step 3 skipped: NaN and Inf in w; scale 65536"),
        (step(3, scale=1.0, culprits=(Culprit("w", 2, 0),)), 1.0, "step 3 skipped: NaN in w"),
        (step(3, scale=2.0**25), 2.0**24, "step 3 skipped: Inf in w; scale 33554432 → 16777216"),
        (
            step(9, reason="rejected", culprits=(), norm=83.25, limit=4.5),
            65536.0,
            "step 9 skipped: finite gradients, rejected by the clip policy: norm 83.25 over 4.5; "
            "scale 65536",
        ),
        (step(4, optimizer=1), 65536.0, "step 4 of optimizer 1 skipped: Inf in w; scale 65536"),
        (
            step(3, culprits=(Culprit("b", 0, 1), Culprit("a", 1, 0)), nan=1, inf=1,
                 finite_gradients=0),
            65536.0,
            "step 3 skipped: NaN and Inf in all 2 gradients; scale 65536",
        ),
        (
            step(3, culprits=(Culprit("b", 0, 1), Culprit("a", 1, 0)), inf=2, finite_gradients=3),
            65536.0,
            "step 3 skipped: Inf in 2 gradients; scale 65536",
        ),
        (
            step(3, culprits=(Culprit("b", 0, 1), Culprit("a", 1, 0)), inf=2, finite_gradients=3,
                 finite_after="c", loss=None),
            65536.0,
            "step 3 skipped: Inf in 2 gradients; scale 65536",
        ),
    ],
)  # fmt: skip
def test_the_line_says_what_happened(caplog, made, next_scale, line):
    SkipLog().take(made, next_scale=next_scale, more=False)
    assert lines(caplog) == [line]


def test_a_skip_without_a_culprit_says_where_to_look(caplog):
    SkipLog().take(step(4, culprits=()), next_scale=2.0, more=False)
    assert "no NaN or Inf in a gradient that is here" in caplog.text


def test_after_five_lines_there_is_one_a_minute_that_counts_the_others(caplog):
    clock = Clock()
    log = SkipLog(clock=clock)
    for number in range(1, 18):
        log.take(step(number), next_scale=65536.0, more=False)
    assert [line.split()[1] for line in lines(caplog)] == ["1", "2", "3", "4", "5"]
    clock.now += 61.0
    log.take(step(18), next_scale=65536.0, more=False)
    assert lines(caplog)[-1].endswith("scale 65536 (and 12 more since step 5)")
    log.take(step(19), next_scale=65536.0, more=False)
    clock.now += 59.0
    log.take(step(20), next_scale=65536.0, more=False)
    assert len(lines(caplog)) == 6
    log.close()
    assert lines(caplog)[-1] == "2 more steps were skipped since step 18"


def test_a_next_scale_that_nobody_told_is_taken_from_the_next_step(caplog):
    log = SkipLog()
    log.take(step(1), next_scale=None, more=False)
    log.take(step(1, optimizer=1, skipped=False), next_scale=None, more=False)
    assert lines(caplog) == []
    log.take(step(2, scale=32768.0), next_scale=None, more=False)
    assert lines(caplog) == ["step 1 skipped: Inf in w; scale 65536 → 32768"]
    log.settle()
    assert lines(caplog)[1:] == ["step 2 skipped: Inf in w; scale 32768"]


def test_optimizers_that_share_a_decision_share_a_line(caplog):
    log = SkipLog()
    log.take(step(1, culprits=()), next_scale=1.0, more=True)
    log.take(step(1, optimizer=1, culprits=(Culprit("v", 1, 0),)), next_scale=1.0, more=False)
    assert lines(caplog) == ["step 1 skipped: NaN in v; scale 65536 → 1"]


def test_the_first_step_taken_with_nan_is_told_once_and_what_follows_names_nobody(caplog):
    log = SkipLog()
    bad = (Culprit("w", 1, 0), Culprit("v", 1, 0))
    for number in range(7, 11):
        taken = step(number, skipped=False, scale=1.0, culprits=bad, nan=2, finite_gradients=1,
                     finite_after="x")  # fmt: skip
        log.take(taken, next_scale=1.0, more=False)
    log.take(step(11, scale=1.0, culprits=bad, nan=2), next_scale=1.0, more=False)
    assert lines(caplog) == [
        "step 7 taken though not finite: NaN in w (+1 more); the weights are spoilt from here on",
        "step 11 skipped: NaN or Inf, and the weights are spoilt since step 7 already",
    ]


def test_weights_are_not_called_spoilt_any_more_once_a_step_was_well(caplog):
    log = SkipLog()
    fields = {"culprits": (Culprit("w", 1, 0),), "nan": 1, "scale": 1.0}
    log.take(step(5, skipped=False, **fields), next_scale=1.0, more=False)
    log.take(step(6, skipped=False, scale=1.0, norm=0.5), next_scale=1.0, more=False)
    log.take(step(60, **fields), next_scale=1.0, more=False)
    log.take(step(61, skipped=False, **fields, loss=None), next_scale=1.0, more=False)
    log.take(step(9, optimizer=1, **fields), next_scale=1.0, more=False)
    assert lines(caplog) == [
        "step 5 taken though not finite: NaN in w; the weights are spoilt from here on",
        "step 60 skipped: NaN in w",
        "step 61 taken though not finite: NaN in w; the weights are spoilt from here on, at the "
        "latest",
        "step 9 of optimizer 1 skipped: NaN or Inf, and the weights of optimizer 0 are spoilt "
        "since step 61 at the latest already",
    ]


def test_optimizers_that_are_all_bad_together_name_nobody(caplog):
    log = SkipLog()
    bad = {"culprits": (Culprit("w", 1, 0),), "nan": 1, "scale": 1.0, "finite_gradients": 0}
    log.take(step(1, **bad), next_scale=1.0, more=True)
    log.take(step(1, optimizer=1, **bad), next_scale=1.0, more=False)
    assert lines(caplog) == ["step 1 skipped: NaN in all 2 gradients"]


def test_lines_come_in_the_order_of_the_steps_whoever_waits_for_a_scale(caplog):
    log = SkipLog()
    first = step(5, scale=1024.0)
    second = step(5, optimizer=1, skipped=False, scale=1024.0, nan=2)
    third = step(6, optimizer=1, scale=1024.0)
    for each in (first, second, third):
        log.take(each, next_scale=None, more=False)
    assert caplog.messages == []  # The first waits for the scale that its optimizer goes on with.
    log.take(step(6, skipped=False, scale=512.0), next_scale=None, more=False)
    assert [message.split(":")[0] for message in caplog.messages] == [
        "step 5 skipped",
        "step 5 of optimizer 1 taken though not finite",
    ]
    assert caplog.messages[0].endswith("scale 1024 → 512")
    log.close()
    assert caplog.messages[2].startswith("step 6 of optimizer 1 skipped")


def test_an_optimizer_that_steps_no_more_keeps_no_line_back_for_long(caplog):
    log = SkipLog()
    log.take(step(1, scale=1024.0), next_scale=None, more=False)
    for number in range(1, 40):
        log.take(step(number, optimizer=1, skipped=False), next_scale=None, more=False)
    assert [message.split(":")[0] for message in caplog.messages] == ["step 1 skipped"]


def test_what_a_trace_found_follows_its_step_and_is_said_once(caplog):
    log = SkipLog()
    log.trace(Trace(2, 0.0, "forward", "1", "Hot", "Inf", (), "Inf first in 1"))
    log.trace(Trace(3, 0.0, "forward", "1", "Hot", "Inf", (), "Inf first in 1"))
    for number in (1, 2, 3):
        log.take(step(number, scale=1024.0 / number), next_scale=512.0 / number, more=False)
    log.close()
    assert [message.split(":")[0] for message in caplog.messages] == [
        "step 1 skipped",
        "step 2 skipped",
        "step 2 traced",
        "step 3 skipped",
    ]


def test_a_trace_of_a_step_that_never_came_is_told_at_the_end(caplog):
    log = SkipLog()
    log.trace(Trace(2, 0.0, "forward", "1", "Hot", "Inf", (), "Inf first in 1"))
    assert caplog.messages == []
    log.close()
    assert caplog.messages == ["step 2 traced: Inf first in 1"]
