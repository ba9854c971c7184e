"""GradScaler(record=...): the drop-in writes a run file, and trains as it does without one."""

from __future__ import annotations

import copy
import gc
import logging
import math
import pickle

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import GradientControl, GradScaler, HeadroomScale, Recorder, ZScoreClip, read_run
from gradilocks.step.outcome import Outcome, ScalerOutcome
from tests.integrations.task import CULPRIT, OPTIMIZERS, Network, batches, same, weights

INF = math.inf
WAYS = ("plain", "unscale_", "clip_grad_norm_", "clip=", "policy=", "disabled", "disabled, clip=")


def scaler_for(way, model, **record):
    settings = {"clip=": {"clip": 0.05}, "policy=": {"policy": HeadroomScale()}}
    settings |= {
        "disabled": {"enabled": False},
        "disabled, clip=": {"enabled": False, "clip": 0.05},
    }
    return GradScaler("cpu", model=model, **settings.get(way, {}), **record)


def train(way, kind, *, accumulate=1, bad=2, steps=6, losses=None, outcomes=None, **record):
    """A training loop as people write it; returns weights and scaler."""
    model = Network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = scaler_for(way, model, **record)
    micro = batches(steps, accumulate=accumulate, bad=None if "disabled" in way else bad)
    for number, batch in enumerate(micro, start=1):
        loss = model(batch).mean() / accumulate
        scaler.scale(loss).backward()
        if losses is not None:
            losses.append(loss.item())
        if number % accumulate:
            continue
        if way in ("unscale_", "clip_grad_norm_"):
            scaler.unscale_(optimizer)
        if way == "clip_grad_norm_":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        if outcomes is not None:
            outcomes.append(scaler.outcome)
        scaler.update()
        optimizer.zero_grad()
    return weights(model), scaler


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("way", WAYS)
def test_recording_changes_no_bit(way, kind, tmp_path):
    plain, scaler = train(way, kind)
    recorded, other = train(way, kind, record=tmp_path / "a.jsonl")
    assert same(plain, recorded)
    assert scaler.state_dict() == other.state_dict()
    other.recorder.close()
    assert len(read_run(tmp_path / "a.jsonl").steps) == 6


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_the_file_has_the_losses_norms_scales_the_skip_and_its_culprit(way, accumulate, tmp_path):
    losses, outcomes = [], []
    _, scaler = train(
        way,
        "sgd",
        accumulate=accumulate,
        losses=losses,
        outcomes=outcomes,
        record=tmp_path / "a.jsonl",
        config={"lr": 0.05},
    )
    scaler.recorder.close()
    run = read_run(tmp_path / "a.jsonl")
    assert run.header.config == {"lr": 0.05}
    assert run.optimizers[0].names == tuple(name for name, _ in Network().named_parameters())
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5, 6]
    sums = [sum(losses[k : k + accumulate]) for k in range(0, len(losses), accumulate)]
    assert [step.loss for step in run.steps] == pytest.approx(sums, rel=1e-6)
    for step, outcome in zip(run.steps, outcomes, strict=True):
        assert isinstance(outcome, Outcome)
        assert step.norm == (outcome.norm if math.isfinite(outcome.norm) else None)
        assert (step.skipped, step.scale) == (outcome.skipped, outcome.scale)
        assert step.limit == (outcome.limit if math.isfinite(outcome.limit) else None)
        assert tuple(each.name for each in step.culprits) == outcome.culprits
        assert outcome.tensors["norm"].item() == pytest.approx(outcome.norm, abs=0, nan_ok=True)
    skipped = [step for step in run.steps if step.skipped]
    if "disabled" in way:
        assert skipped == []
        assert {step.scale for step in run.steps} == {1.0}
    else:
        (step,) = skipped
        assert (step.step, step.reason, step.norm) == (3, "nonfinite", None)
        assert [each.name for each in step.culprits] == [CULPRIT]
        assert run.steps[3].scale < step.scale
    clips = [step.clipped for step in run.steps if not step.skipped]
    if way in ("clip_grad_norm_", "clip=", "disabled, clip="):
        assert any(clips)
        taken = [step for step in run.steps if not step.skipped]
        assert clips == [step.norm > 0.05 for step in taken]
    else:
        assert not any(clips)
    detail = run.steps[0].detail
    norm = math.sqrt(sum(each * each for each in detail.norm))
    assert norm == pytest.approx(run.steps[0].norm, rel=1e-4)
    assert all(ratio > 0 for ratio in detail.update)
    assert [step.step for step in run.steps if step.detail is not None] == [1]


@pytest.mark.parametrize("way", ["plain", "unscale_", "clip="])
def test_its_steps_are_those_of_a_control(way, tmp_path):
    _, scaler = train(way, "fused adamw", record=tmp_path / "a.jsonl")
    scaler.recorder.close()
    model = Network()
    control = GradientControl(
        OPTIMIZERS["fused adamw"](model.parameters()),
        model=model,
        clip=0.05 if way == "clip=" else None,
        record=tmp_path / "b.jsonl",
    )
    for batch in batches():
        control.backward(model(batch).mean())
        control.step()
        control.zero_grad()
    control.recorder.close()
    plain = {"time": 0.0, "memory": None, "detail": None}
    mine, theirs = (
        [step._replace(**plain) for step in read_run(tmp_path / f"{name}.jsonl").steps]
        for name in "ab"
    )
    assert mine == theirs


def test_a_plain_scaler_says_that_it_has_measured_no_norm():
    outcomes = []
    train("plain", "sgd", outcomes=outcomes)
    assert all(type(outcome) is ScalerOutcome for outcome in outcomes)
    for name in ("norm", "limit", "clipped", "tensors"):
        with pytest.raises(AttributeError, match=rf"no {name}: .*GradScaler\(record=\.\.\.\)"):
            getattr(outcomes[0], name)
        assert not hasattr(outcomes[0], name)
    measured = []
    scaler = GradScaler("cpu", clip=math.inf)
    model = Network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler.scale(model(batches()[0]).mean()).backward()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))
    scaler.step(optimizer)
    measured.append(scaler.outcome)
    assert measured[0].norm == pytest.approx(norm / 65536, rel=1e-5)
    assert (measured[0].clipped, measured[0].limit) == (False, INF)


def test_a_disabled_scaler_with_a_clip_tells_norm_limit_and_clipped_and_takes_nan():
    p = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradScaler("cpu", enabled=False, clip=1.0)
    p.grad = torch.tensor([3.0, 4.0])
    scaler.step(optimizer)
    outcome = scaler.outcome
    assert (outcome.norm, outcome.limit, outcome.clipped, outcome.skipped) == (
        5.0,
        1.0,
        True,
        False,
    )
    p.grad = torch.tensor([math.nan, 1.0])
    scaler.step(optimizer)
    assert math.isnan(scaler.outcome.norm)
    assert not scaler.outcome.skipped
    assert p.isnan().any()  # As torch has it.


def test_two_optimizers_with_losses_of_their_own_have_their_own(tmp_path):
    one, other = (nn.Parameter(torch.full((3,), 2.0)) for _ in range(2))
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in (one, other)]
    with Recorder(tmp_path / "a.jsonl") as recorder:
        scaler = GradScaler("cpu", record=recorder)
        assert scaler.recorder is recorder
        for factor in (1.0, 2.0):
            for param, optimizer in zip((one, other), optimizers, strict=True):
                loss = (param.detach() * 0 + param).sum() * factor
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    run = read_run(tmp_path / "a.jsonl")
    assert [(step.optimizer, step.step) for step in run.steps] == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert [step.loss for step in run.steps] == pytest.approx([6.0, 6.0, 11.4, 11.4])


def test_two_optimizers_on_one_loss_share_it(tmp_path):
    one, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in (one, other)]
    scaler = GradScaler("cpu", record=tmp_path / "a.jsonl")
    for _ in range(2):
        scaler.scale((one + other).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    scaler.recorder.close()
    run = read_run(tmp_path / "a.jsonl")
    assert [step.loss for step in run.steps] == pytest.approx([6.0, 6.0, 5.4, 5.4])


def test_losses_add_up_however_they_are_run_backward_and_not_those_that_were_dropped(tmp_path):
    p = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([p], lr=0.0)
    scaler = GradScaler("cpu", record=tmp_path / "a.jsonl")

    def step():
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    scaler.scale(p.sum() * 1).backward()
    step()
    first, second = scaler.scale(p.sum() * 2), scaler.scale(p.sum() * 3)
    (first + second).backward()  # Handed out together, before either has run.
    step()
    for each in scaler.scale([p.sum() * 4, p.sum() * 5]):
        each.backward()
    step()
    scaler.scale(p.sum() * math.nan).backward()  # A batch that the script leaves out.
    optimizer.zero_grad()
    scaler.scale(p.sum() * 6).backward()
    step()
    for each in scaler.scale(loss for loss in [p.sum()]):
        each.backward()
    step()
    scaler.scale(p * torch.ones(2)).backward(torch.ones(2))
    step()
    scaler.recorder.close()
    run = read_run(tmp_path / "a.jsonl")
    assert [step.loss for step in run.steps] == [1.0, 5.0, 9.0, 6.0, None, None]
    assert not any(step.loss_nonfinite for step in run.steps)


def test_a_disabled_scaler_records_the_last_evaluation_of_a_closure(tmp_path):
    p = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = torch.optim.LBFGS([p], lr=0.1, max_iter=3)
    scaler = GradScaler("cpu", enabled=False, record=tmp_path / "a.jsonl")
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum() / 2
        scaler.scale(loss).backward()
        calls.append(loss.item())
        return loss

    ends = []
    for given in ((closure,), ()):
        scaler.step(optimizer, *given, **({} if given else {"closure": closure}))
        scaler.update()
        ends.append(calls[-1])
    scaler.recorder.close()
    assert len(calls) > 2
    first, second = read_run(tmp_path / "a.jsonl").steps
    assert [first.loss, second.loss] == pytest.approx([ends[0], ends[1]])
    for step in (first, second):  # Of p itself is the gradient.
        assert step.norm == pytest.approx(math.sqrt(2 * step.loss), rel=1e-6)


def test_skips_are_logged_with_the_scale_that_follows(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="gradilocks"):
        _, scaler = train("plain", "fused adamw", record=tmp_path / "a.jsonl")
        scaler.recorder.close()
    (line,) = caplog.messages
    assert line == f"step 3 skipped: Inf in {CULPRIT}; scale 65536 → 32768"


def test_a_copy_and_a_pickled_scaler_record_nothing(tmp_path):
    _, scaler = train("plain", "sgd", record=tmp_path / "a.jsonl", steps=2, bad=None)
    for made in (copy.copy(scaler), copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert made.recorder is None
        p = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], lr=0.1)
        made.scale(p.sum()).backward()
        made.step(optimizer)
        made.update()
    scaler.recorder.close()
    assert len(read_run(tmp_path / "a.jsonl").steps) == 2


def test_a_new_optimizer_is_told_of_even_if_it_has_the_id_of_one_that_is_gone(tmp_path):
    scaler = GradScaler("cpu", record=tmp_path / "a.jsonl")
    for _ in range(3):
        p = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], lr=0.1)
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        del p, optimizer
        gc.collect()
    scaler.recorder.close()
    run = read_run(tmp_path / "a.jsonl")
    assert [(step.optimizer, step.step) for step in run.steps] == [(k, 1) for k in range(3)]


def test_a_scaler_and_its_recorder_go_when_nobody_holds_them(tmp_path):
    _, scaler = train("plain", "sgd", record=tmp_path / "a.jsonl", steps=2, bad=None)
    del scaler
    gc.collect()
    assert read_run(tmp_path / "a.jsonl").end.status == "finished"


def test_what_is_no_record_is_refused_and_an_existing_file_is_kept(tmp_path):
    with pytest.raises(TypeError, match="record must be a path"):
        GradScaler("cpu", record=3)
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(gradilocks.errors.BadRunFile, match="exists already"):
        GradScaler("cpu", record=tmp_path / "a.jsonl")
    with (
        Recorder(tmp_path / "b.jsonl") as recorder,
        pytest.raises(ValueError, match=r"Recorder\(path, config=\.\.\.\)"),
    ):
        GradScaler("cpu", record=recorder, config={"lr": 1})


def test_a_file_that_is_gone_on_in_counts_on_whatever_state_is_loaded(tmp_path):
    path = tmp_path / "a.jsonl"
    _, scaler = train("clip=", "sgd", record=path, steps=3, bad=None)
    state = scaler.state_dict()
    scaler.recorder.close()
    model = Network()
    second = scaler_for("clip=", model, record=Recorder(path, exists="append"))
    second.load_state_dict(state)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for batch in batches(2, bad=None):
        second.scale(model(batch).mean()).backward()
        second.step(optimizer)
        second.update()
        optimizer.zero_grad()
    second.recorder.close()
    run = read_run(path)
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5]
    assert run.superseded == ()


def test_learned_clips_and_rejected_steps_are_recorded(tmp_path):
    p = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    clip = gradilocks.SkipSpikes(window=2, at_least=2)
    scaler = GradScaler("cpu", clip=clip, record=tmp_path / "a.jsonl")
    for size in (1.0, 1.1, 1e4, 1.0):
        scaler.scale((p * torch.tensor([size, 0.0])).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    scaler.recorder.close()
    run = read_run(tmp_path / "a.jsonl")
    assert [step.reason for step in run.steps] == [None, None, "rejected", None]
    assert run.header.settings["clip"].startswith("SkipSpikes(")
    assert run.header.settings["scale"].startswith("GradScaler(init_scale=65536.0, growth_factor=")


def test_a_step_that_raises_is_none_and_the_next_is_recorded(tmp_path):
    p = nn.Parameter(torch.ones(2))

    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise ZeroDivisionError
            return super().step(closure)

    optimizer = Failing([p], lr=0.1)
    scaler = GradScaler("cpu", record=tmp_path / "a.jsonl")
    scaler.scale(p.sum()).backward()
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    optimizer.fails = False
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    scaler.update()
    scaler.recorder.close()
    (step,) = read_run(tmp_path / "a.jsonl").steps
    assert (step.step, step.loss) == (1, 2.0)
    assert step.norm == pytest.approx(math.sqrt(2))


def test_policies_that_learn_are_as_without_a_record(tmp_path):
    states = []
    for record in ({}, {"record": tmp_path / "a.jsonl"}):
        model = Network()
        optimizer = OPTIMIZERS["ours"](model.parameters())
        scaler = GradScaler("cpu", clip=ZScoreClip(warmup=2), **record)
        for batch in batches():
            scaler.scale(model(batch).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        states.append((weights(model), scaler.state_dict()))
    assert same(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]
