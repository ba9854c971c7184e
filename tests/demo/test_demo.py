"""The demo: its three trainings, their verdicts and the page."""

from __future__ import annotations

import pytest
import torch

from gradilocks import cli, demo
from gradilocks.view import columns, findings, runfile

STEPS = {"too-small": 200, "too-large": 20, "just-right": 80}
"""Enough for the verdicts of the demo, which takes 200 steps of each."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The three runs by name."""
    folder = tmp_path_factory.mktemp("demo")
    return {t.name: runfile.read(demo.train(t, folder, steps=STEPS[t.name])) for t in demo.TRAININGS}


def only(run):
    (steps,) = columns.columns(run)
    return steps


def test_the_verdicts_are_those_of_the_three_scales(runs):
    small, large, right = (findings.verdict(run) for run in runs.values())
    assert (small.severity, large.severity, right.severity) == ("warning", "problem", "ok")
    assert "mostly zero" in small.text
    assert "20 of 20 steps (100%) skipped" in large.text
    assert right.text.startswith("Healthy:")


def test_only_the_right_scale_learns(runs):
    small, large, right = (only(run) for run in runs.values())
    assert len({run.loss[0] for run in (small, large, right)}) == 1  # The same model and the same first batch.
    assert right.loss[-10:].mean() < right.loss[0] - 1.8
    assert small.loss[-10:].mean() > small.loss[0] - 0.3
    assert large.loss[-10:].mean() == pytest.approx(large.loss[0], abs=0.2)


def test_too_large_a_scale_overflows_in_every_step_and_the_others_in_none(runs):
    small, large, right = (only(run) for run in runs.values())
    assert large.skipped.all()
    assert large.nonfinite.all()
    assert not small.skipped.any()
    assert not right.nonfinite.any()
    assert set(right.scale) == {2.0**16}


def test_a_run_without_applied_steps_has_no_clip_rate(runs):
    run = runs["too-large"]
    assert "clipped" not in columns.facts(run, columns.summarize(run, only(run)))


def test_the_command_shows_three_verdicts_and_writes_a_page_with_three_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "new"
    for _ in range(2):  # It replaces its own files.
        assert cli.main(["demo", "-o", str(folder), "--steps", "2"]) == 0
        shown = capsys.readouterr().out.splitlines()
    page = (folder / "demo.html").read_text("utf-8")
    for training in demo.TRAININGS:
        run = runfile.read(training.path(folder))
        assert len(only(run)) == 2
        assert shown[shown.index(training.label) + 1] == f"  {run.end['verdict']}"
        assert training.label in page
    assert shown[-1] == f"page: {folder / 'demo.html'}"


def test_a_training_depends_on_nothing_but_its_settings_and_leaves_torch_as_it_was(tmp_path):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        path = demo.train(demo.TRAININGS[-1], tmp_path, steps=3)
        losses.append(list(only(runfile.read(path)).loss))
    assert losses[0] == losses[1]
    assert torch.get_num_threads() == threads
    torch.set_rng_state(state)


def test_an_interrupt_leaves_a_run_file_that_says_so(monkeypatch, tmp_path):
    calls = []

    def interrupt(loss, divisor):
        calls.append(loss)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_divide_gradient", interrupt)
    training = demo.TRAININGS[-1]
    with pytest.raises(KeyboardInterrupt):
        demo.train(training, tmp_path, steps=5)
    run = runfile.read(training.path(tmp_path))
    assert (run.end["status"], len(only(run))) == ("KeyboardInterrupt", 2)


def test_the_text_is_pythons_documentation():
    codes, vocabulary = demo.load_text()
    assert codes.max() + 1 == vocabulary
    assert len(codes) > 100_000
