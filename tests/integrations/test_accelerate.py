"""Accelerate's loop under `take_control`, beside the same loop with its own scaler and clip."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import nn

from gradilocks import ClipByNorm, HeadroomScale, Outcome, Recorder, ZScoreClip, read_run
from gradilocks.optim import AdamW
from tests.integrations.task import (
    BAD,
    CULPRIT,
    OPTIMIZERS,
    STEPS,
    Network,
    batches,
    same,
    weights,
)
from tests.scripts import serving

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.utils import GradScalerKwargs  # noqa: E402

from gradilocks.integrations.accelerate import take_control  # noqa: E402
from tests.integrations.accelerate_on_cpu import forget, use_float16  # noqa: E402

PRECISIONS = ("fp32", "bf16", "fp16")
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
each_precision = pytest.mark.parametrize("precision", PRECISIONS)


def new(precision="fp32", accumulate=1, kind=Accelerator, **settings):
    """An Accelerator, which scales in float16 as it would on a GPU."""
    forget()
    made = kind(
        cpu=True,
        mixed_precision="bf16" if precision == "bf16" else "no",
        gradient_accumulation_steps=accumulate,
        **settings,
    )
    if precision == "fp16":
        use_float16(made)
    return made


def inverse(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))


def rates(make, *divisors):
    """The rates that `inverse` sets."""
    first = make([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]
    return [first * (1 / divisor) for divisor in divisors]


class Training:
    """A loop as Accelerate's documentation has it; what it saw at each step."""

    def __init__(self, accelerator, make, *, max_norm=None, schedule=None):
        self.accelerator, self.max_norm = accelerator, max_norm
        model = Network()
        optimizer = make(model.parameters())
        scheduler = None if schedule is None else schedule(optimizer)
        parts = (model, optimizer) if scheduler is None else (model, optimizer, scheduler)
        self.model, self.optimizer, *rest = accelerator.prepare(*parts)
        self.scheduler = rest[0] if rest else None
        self.rates, self.skipped, self.norms, self.losses, self.seen = [], [], [], [], []

    def run(self, batches):
        accelerator, loss_of_step = self.accelerator, 0.0
        for batch in batches:
            with accelerator.accumulate(self.model):
                loss = self.model(batch).mean()
                loss_of_step += loss.item() / accelerator.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients and self.max_norm is not None:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)
                    self.norms.append(norm.item())
                    self.seen.append([p.grad.clone() for p in self.model.parameters()])
                self.optimizer.step()
                if self.scheduler is not None:
                    self.scheduler.step()
                self.optimizer.zero_grad()
            if accelerator.sync_gradients:
                self.rates.append(self.optimizer.param_groups[0]["lr"])
                self.skipped.append(accelerator.optimizer_step_was_skipped)
                self.losses.append(loss_of_step)
                loss_of_step = 0.0
        return self

    @property
    def weights(self):
        return weights(self.model)


def bad_of(precision):
    return BAD if precision == "fp16" else None


def trained(accelerator, make, *, precision="fp32", accumulate=1, **settings):
    given = batches(accumulate=accumulate, bad=bad_of(precision))
    return Training(accelerator, make, **settings).run(given)


# --- the same numbers -----------------------------------------------------------------------------


@each_optimizer
@each_precision
@pytest.mark.parametrize("accumulate", [1, 2])
def test_without_a_clip_the_parameters_are_accelerates_own_bit_for_bit(make, precision, accumulate):
    settings = {"precision": precision, "accumulate": accumulate}
    native = trained(new(**settings), make, **settings)
    accelerator = new(**settings)
    control = take_control(accelerator)
    ours = trained(accelerator, make, **settings)
    assert same(ours.weights, native.weights)
    assert ours.losses == native.losses
    assert ours.skipped == [step == bad_of(precision) for step in range(STEPS)]
    assert accelerator.scaler.get_scale() == control.scale == (32768 if precision == "fp16" else 1)
    assert control.outcome.step == STEPS


@each_optimizer
@each_precision
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("said", ["by the call", "by take_control", "by both"])
def test_with_a_clip_the_parameters_and_norms_are_accelerates_own(
    make, precision, accumulate, said
):
    settings = {"precision": precision, "accumulate": accumulate}
    native = trained(new(**settings), make, max_norm=0.04, **settings)
    accelerator = new(**settings)
    control = take_control(accelerator, clip=None if said == "by the call" else 0.04)
    max_norm = None if said == "by take_control" else 0.04
    ours = trained(accelerator, make, max_norm=max_norm, **settings)
    torch.testing.assert_close(ours.weights, native.weights, rtol=0, atol=1e-6)
    if max_norm is not None:
        assert ours.norms == pytest.approx(native.norms, rel=1e-6)
        assert ours.norms[-1] == control.outcome.norm
    assert sum(norm > 0.04 for norm in native.norms if math.isfinite(norm)) >= 1
    free = trained(new(**settings), make, **settings)
    assert not same(free.weights, native.weights)


@each_optimizer
def test_code_that_looks_after_the_clip_sees_gradients_without_the_scale(make):
    """Accelerate's are clipped too, by a bound so high that they stay; NaN spreads there."""
    native = trained(new("fp16"), make, max_norm=1e9, precision="fp16")
    accelerator = new("fp16")
    take_control(accelerator)
    ours = trained(accelerator, make, max_norm=1e9, precision="fp16")
    for step in set(range(STEPS)) - {BAD}:
        assert same(ours.seen[step], native.seen[step])
    assert [bool(grad.isfinite().all()) for grad in ours.seen[BAD]].count(False) == 1


def test_the_norm_is_a_tensor_before_the_step_and_that_of_the_step_after_it():
    accelerator = new("fp16")
    control = take_control(accelerator)
    training = Training(accelerator, OPTIMIZERS["fused adamw"])
    accelerator.backward(training.model(batches(1, bad=None)[0]).mean())
    norm = accelerator.clip_grad_norm_(training.model.parameters(), 0.01)
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    grads = torch.cat([p.grad.flatten() for p in training.model.parameters()])
    assert norm.item() == pytest.approx(grads.double().norm().item(), rel=1e-6)
    training.optimizer.step()
    assert norm.item() == control.outcome.norm
    assert control.outcome.clipped


# --- skipped steps --------------------------------------------------------------------------------


@each_optimizer
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_schedule_stands_still_on_a_skipped_step_and_the_flags_are_right(make, accumulate):
    settings = {"precision": "fp16", "accumulate": accumulate}
    accelerator = new(**settings)
    take_control(accelerator)
    ours = trained(accelerator, make, schedule=inverse, **settings)
    assert ours.rates == rates(make, 2, 3, 3, 4, 5, 6)
    assert ours.skipped == [step == BAD for step in range(STEPS)]
    assert ours.optimizer.step_was_skipped is False


def test_accelerate_itself_takes_a_skip_of_a_fused_optimizer_for_a_step():
    """If this fails, accelerate has mended issue 4242: docs/frameworks.md tells of it."""
    native = trained(new("fp16"), OPTIMIZERS["fused adamw"], precision="fp16", schedule=inverse)
    assert not any(native.skipped)
    assert native.rates == rates(OPTIMIZERS["fused adamw"], 2, 3, 4, 5, 6, 7)


@each_optimizer
def test_neither_step_nor_schedule_reads_whether_a_step_was_skipped(make, monkeypatch):
    """On a GPU reading it waits for the device; only who asks for it is to wait."""
    accelerator = new("fp16")
    take_control(accelerator)
    training = Training(accelerator, make, schedule=inverse)
    reads = []
    skipped = Outcome.skipped
    monkeypatch.setattr(
        Outcome, "skipped", property(lambda self: reads.append(1) or skipped.fget(self))
    )
    for batch in batches():
        accelerator.backward(training.model(batch).mean())
        training.optimizer.step()
        training.scheduler.step()
        training.optimizer.zero_grad()
    assert not reads
    assert training.scheduler.get_last_lr() == rates(make, 6)
    assert not accelerator.optimizer_step_was_skipped
    assert reads


def test_a_schedule_that_goes_by_itself_is_left_alone():
    accelerator = new("fp16", step_scheduler_with_optimizer=False)
    take_control(accelerator)
    ours = trained(accelerator, OPTIMIZERS["sgd"], precision="fp16", schedule=inverse)
    assert ours.rates == rates(OPTIMIZERS["sgd"], 2, 3, 4, 5, 6, 7)


def test_a_schedule_over_accumulated_steps_is_saved_as_accelerate_saves_it():
    """Accelerate counts micro-batches in the scheduler's `_step_count`."""
    saved = []
    for takes in (False, True):
        accelerator = new(accumulate=2)
        if takes:
            take_control(accelerator)
        training = trained(accelerator, OPTIMIZERS["sgd"], accumulate=2, schedule=inverse)
        state = training.scheduler.state_dict()
        state.pop("lr_lambdas")
        saved.append(state)
    assert saved[0] == saved[1]


# --- the run file ---------------------------------------------------------------------------------


@each_optimizer
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_run_file_has_every_step_its_loss_the_skip_and_the_culprit(make, accumulate, tmp_path):
    settings = {"precision": "fp16", "accumulate": accumulate}
    accelerator = new(**settings)
    take_control(accelerator, clip=0.04, record=tmp_path / "a.jsonl", config={"seed": 3})
    ours = trained(accelerator, make, **settings)
    accelerator.end_training()
    run = read_run(tmp_path / "a.jsonl")
    assert run.end.status == "finished"
    assert run.header.config == {"seed": 3}
    assert [step.step for step in run.steps] == list(range(1, STEPS + 1))
    assert [step.loss for step in run.steps] == pytest.approx(ours.losses, rel=1e-6)
    assert [step.skipped for step in run.steps] == [step == BAD for step in range(STEPS)]
    assert [culprit.name for culprit in run.steps[BAD].culprits] == [CULPRIT]
    assert run.steps[BAD].scale == 65536
    assert run.optimizers[0].names == tuple(dict(Network().named_parameters()))


# --- checkpoints ----------------------------------------------------------------------------------


def adaptive(accelerator, **settings):
    return take_control(
        accelerator,
        scale=HeadroomScale(init_scale=2.0**14),
        clip=ZScoreClip(threshold=0.5, alpha=0.9, warmup=2),
        **settings,
    )


@each_optimizer
@pytest.mark.parametrize("at", [2, 3])
def test_a_saved_state_resumes_bit_for_bit_with_adaptive_policies(make, at, tmp_path):
    given = batches(8)
    whole = new("fp16")
    control = adaptive(whole)
    expected = Training(whole, make, schedule=inverse).run(given)
    free = Training(new("fp16"), make, schedule=inverse).run(given)
    assert not same(expected.weights, free.weights)  # Some steps were clipped.

    before = new("fp16")
    adaptive(before)
    Training(before, make, schedule=inverse).run(given[:at])
    before.save_state(str(tmp_path / "state"))
    after = new("fp16")
    resumed = adaptive(after)
    training = Training(after, make, schedule=inverse)
    after.load_state(str(tmp_path / "state"))
    training.run(given[at:])
    assert same(training.weights, expected.weights)
    assert training.rates == expected.rates[at:]
    assert resumed.state_dict() == control.state_dict()


@each_optimizer
@each_precision
def test_a_state_of_accelerates_own_goes_on_under_a_control(make, precision, tmp_path):
    """In fp32 and bf16 it has no scaler.pt, on which Accelerate itself insists once it scales."""
    given = batches(bad=None)
    before = new(precision)
    Training(before, make).run(given[:3])
    if precision == "fp16":
        before.scaler.update(1024.0)
    before.save_state(str(tmp_path / "state"))
    ended = []
    for takes in (False, True):
        after = new(precision)
        if takes:
            control = take_control(after)
        training = Training(after, make)
        after.load_state(str(tmp_path / "state"))
        ended.append(training.run(given[3:]).weights)
    assert same(*ended)
    assert control.scale == (1024 if precision == "fp16" else 1)


@pytest.mark.parametrize("name", ["sgd", "fused adamw"])
@each_precision
def test_a_state_of_ours_goes_on_without_us(name, precision, tmp_path):
    make, given = OPTIMIZERS[name], batches(bad=None)
    before = new(precision)
    take_control(before, scale="auto", clip=ZScoreClip(threshold=0.5, alpha=0.9, warmup=2))
    first = Training(before, make, schedule=inverse).run(given[:3])
    before.save_state(str(tmp_path / "state"))
    for file in (tmp_path / "state").iterdir():
        assert b"gradilocks." not in file.read_bytes(), file.name  # No class of ours.
    after = new(precision)
    training = Training(after, make, schedule=inverse)
    after.load_state(str(tmp_path / "state"))
    assert same(training.weights, first.weights)
    assert training.scheduler.get_last_lr() == first.scheduler.get_last_lr()
    training.run(given[3:])
    if precision == "fp16":
        assert after.scaler.state_dict()["_growth_tracker"] == STEPS


@each_precision
def test_a_clip_that_the_script_calls_for_is_none_of_the_saved_state(precision, tmp_path):
    given = batches(bad=bad_of(precision))
    make = OPTIMIZERS["sgd"]

    def made():
        accelerator = new(precision)
        take_control(accelerator)
        return Training(accelerator, make, max_norm=0.05)

    whole = made().run(given)
    first = made().run(given[:3])
    first.accelerator.save_state(str(tmp_path / "state"))
    second = made()
    second.accelerator.load_state(str(tmp_path / "state"))
    assert same(second.run(given[3:]).weights, whole.weights)
    first.accelerator.load_state(str(tmp_path / "state"))  # Where it has been called for already.
    assert same(first.run(given[3:]).weights, whole.weights)


@each_precision
@pytest.mark.parametrize("clip", [1e-3, None, ZScoreClip()])
def test_another_clip_is_the_users_to_choose_when_a_state_is_loaded(clip, precision, tmp_path):
    given = batches(bad=None)
    accelerator = new(precision)
    take_control(accelerator, clip=1.0)
    Training(accelerator, OPTIMIZERS["sgd"]).run(given[:3])
    accelerator.save_state(str(tmp_path / "state"))
    accelerator = new(precision)
    control = take_control(accelerator, clip=clip)
    training = Training(accelerator, OPTIMIZERS["sgd"])
    accelerator.load_state(str(tmp_path / "state"))
    training.run(given[3:])
    assert control.outcome.step == STEPS
    assert control.outcome.limit == pytest.approx(clip if clip == 1e-3 else math.inf)


def test_a_step_without_gradients_does_nothing_as_natively():
    accelerator = new()
    control = take_control(accelerator)
    training = Training(accelerator, OPTIMIZERS["sgd"])
    before = training.weights
    training.optimizer.step()
    assert same(training.weights, before)
    assert control.outcome is None


@each_precision
@pytest.mark.parametrize("clears", ["none", "zeros"])
def test_a_gan_whose_parts_are_clipped_each_is_accelerates_own(precision, clears):
    found = []
    for ours in (False, True):
        accelerator = new(precision)
        if ours:
            take_control(accelerator)
        torch.manual_seed(0)
        generator, critic = (
            nn.Linear(6, 6),
            nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)),
        )
        pair = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (generator, critic)]
        generator, critic, of_generator, of_critic = accelerator.prepare(generator, critic, *pair)
        norms = []
        for batch in batches(bad=None):
            rows, none = batch[:, :6], clears == "none"
            of_generator.zero_grad(set_to_none=none)
            accelerator.backward(critic(generator(rows)).mean())
            norms.append(accelerator.clip_grad_norm_(generator.parameters(), 0.3).item())
            of_generator.step()
            of_critic.zero_grad(set_to_none=none)
            accelerator.backward((critic(rows) - critic(generator(rows).detach())).mean())
            norms.append(accelerator.clip_grad_norm_(critic.parameters(), 0.3).item())
            of_critic.step()
        found.append((norms, [*weights(generator), *weights(critic)]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for one, other in zip(found[1][1], found[0][1], strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)


def test_states_are_named_and_found_by_accelerate(tmp_path):
    from accelerate.utils import ProjectConfiguration

    settings = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = new("fp16", project_config=settings)
    control = take_control(accelerator)
    training = Training(accelerator, OPTIMIZERS["sgd"]).run(batches()[:3])
    accelerator.save_state()
    saved = control.state_dict(), training.weights
    training.run(batches()[3:])
    accelerator.load_state()
    assert (control.state_dict(), True) == (saved[0], same(training.weights, saved[1]))


def test_a_resumed_run_goes_on_in_its_file_at_the_step_of_the_state(tmp_path):
    for resumes in (False, True):
        accelerator = new("fp16")
        recorder = Recorder(tmp_path / "a.jsonl", exists="append" if resumes else "refuse")
        take_control(accelerator, record=recorder)
        training = Training(accelerator, OPTIMIZERS["sgd"])
        if resumes:
            accelerator.load_state(str(tmp_path / "state"))
            training.run(batches()[3:])
        else:
            training.run(batches()[:3])
            accelerator.save_state(str(tmp_path / "state"))
            training.run(batches()[3:5])
        accelerator.end_training()
    run = read_run(tmp_path / "a.jsonl")
    assert [step.step for step in run.steps] == list(range(1, STEPS + 1))
    assert [step.step for step in run.superseded] == [4, 5]


def test_the_first_bad_step_is_kept_to_be_run_again(tmp_path):
    accelerator = new("fp16")
    take_control(accelerator, keep_bad_step=tmp_path / "bad.pt")
    trained(accelerator, OPTIMIZERS["sgd"], precision="fp16")
    assert (tmp_path / "bad.pt").is_file()


# --- clips ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.5, ClipByNorm(0.5), ClipByNorm(0.04, order=1.0), ZScoreClip()])
def test_another_clip_beside_that_of_take_control_is_refused(clip):
    accelerator = new()
    take_control(accelerator, clip=clip)
    with pytest.raises(ValueError, match=r"max_norm=0\.04.*beside take_control\(clip=.*left out"):
        trained(accelerator, OPTIMIZERS["sgd"], max_norm=0.04)


@pytest.mark.parametrize("clip", [None, 0.04, ZScoreClip()])
def test_a_bound_of_infinity_measures_and_clips_nothing(clip):
    free = new()
    control = take_control(free, clip=clip)
    expected = trained(free, OPTIMIZERS["sgd"])
    accelerator = new()
    control = take_control(accelerator, clip=clip)
    ours = trained(accelerator, OPTIMIZERS["sgd"], max_norm=math.inf)
    assert same(ours.weights, expected.weights)
    assert ours.norms[-1] == control.outcome.norm


@pytest.mark.parametrize("clip", [None, 0.04, ClipByNorm(0.04, order=1.0)])
def test_a_norm_of_another_order_or_of_some_parameters_is_measured_too(clip):
    accelerator = new("fp16")
    take_control(accelerator, clip=clip)
    model = Network()
    model, optimizer = accelerator.prepare(model, OPTIMIZERS["sgd"](model.parameters()))
    accelerator.backward(model(batches(bad=None)[0]).mean())
    for params in (list(model.parameters()), list(model.head.parameters())):
        for order in (1, 2, math.inf):
            norm = accelerator.clip_grad_norm_(params, math.inf, norm_type=order)
            grads = torch.cat([p.grad.flatten() for p in params])
            assert norm.item() == pytest.approx(grads.norm(order).item(), rel=1e-6)
    before = [p.grad.clone() for p in model.parameters()]
    assert same([p.grad for p in model.parameters()], before)
    optimizer.step()


def test_a_model_that_is_prepared_to_be_evaluated_changes_nothing(monkeypatch):
    accelerator = new("fp16")
    control = take_control(accelerator)
    training = Training(accelerator, OPTIMIZERS["sgd"]).run(batches()[:3])
    monkeypatch.setattr(control, "bind", lambda *args, **settings: pytest.fail("bound again"))
    accelerator.prepare(nn.Linear(2, 1))
    training.run(batches()[3:])
    expected = trained(new("fp16"), OPTIMIZERS["sgd"], precision="fp16")
    assert same(training.weights, expected.weights)


def test_a_step_without_a_call_of_clip_is_not_clipped():
    """Some loops clip only at first, or now and then."""

    def run(accelerator):
        model = Network()
        model, optimizer = accelerator.prepare(model, OPTIMIZERS["sgd"](model.parameters()))
        for number, batch in enumerate(batches(bad=None)):
            accelerator.backward(model(batch).mean())
            if number in (0, 3):
                accelerator.clip_grad_norm_(model.parameters(), 0.01 if number else 0.02)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    native, accelerator = run(new()), new()
    control = take_control(accelerator)
    torch.testing.assert_close(run(accelerator), native, rtol=0, atol=1e-7)
    assert control.outcome.limit == math.inf


@each_precision
def test_some_parameters_alone_are_clipped_as_accelerate_does(precision):
    def run(accelerator):
        model = Network()
        model, optimizer = accelerator.prepare(model, OPTIMIZERS["sgd"](model.parameters()))
        for batch in batches(bad=None):
            accelerator.backward(model(batch).mean())
            accelerator.clip_grad_norm_(model.head.parameters(), 0.001)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    native, accelerator = run(new(precision)), new(precision)
    take_control(accelerator)
    assert same(run(accelerator), native)
    accelerator = new(precision)
    take_control(accelerator, clip=0.001)
    with pytest.raises(ValueError, match="other parameters than those of the optimizers"):
        run(accelerator)


@each_precision
def test_values_are_clipped_as_accelerate_does_and_not_beside_another_clip(precision):
    def run(accelerator):
        model = Network()
        model, optimizer = accelerator.prepare(model, OPTIMIZERS["sgd"](model.parameters()))
        for batch in batches(bad=bad_of(precision)):
            accelerator.backward(model(batch).mean())
            accelerator.clip_grad_value_(model.parameters(), 0.002)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    native, accelerator = run(new(precision)), new(precision)
    take_control(accelerator)
    assert same(run(accelerator), native)
    accelerator = new(precision)
    take_control(accelerator, clip=1.0)
    with pytest.raises(ValueError, match=r"clip_grad_value_\(0\.002\) beside take_control"):
        run(accelerator)


def test_gradients_are_unscaled_once_however_often_it_is_asked_for():
    accelerator = new("fp16")
    take_control(accelerator)
    model = Network()
    model, optimizer = accelerator.prepare(model, OPTIMIZERS["sgd"](model.parameters()))
    accelerator.backward(model(batches(bad=None)[0]).mean())
    accelerator.unscale_gradients()
    seen = [p.grad.clone() for p in model.parameters()]
    accelerator.unscale_gradients(optimizer)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert all(torch.equal(p.grad, s) for p, s in zip(model.parameters(), seen, strict=True))
    assert torch.cat([grad.flatten() for grad in seen]).norm() < 1
    optimizer.step()


# --- other people's loops -------------------------------------------------------------------------


def test_model_and_optimizer_may_be_prepared_one_after_the_other():
    expected = trained(new("fp16"), OPTIMIZERS["sgd"], precision="fp16").weights
    accelerator = new("fp16")
    control = take_control(accelerator)
    model = accelerator.prepare(Network())
    optimizer = accelerator.prepare(OPTIMIZERS["sgd"](model.parameters()))
    for batch in batches():
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert same(weights(model), expected)
    assert control.outcome.step == STEPS


def gan(accelerator):
    """Two models, two optimizers and schedules, stepped in turns."""
    one, two = Network(1), Network(2)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (one, two)]
    schedules = list(map(inverse, optimizers))
    one, two, *rest = accelerator.prepare(one, two, *optimizers, *schedules)
    skipped = []
    for number, batch in enumerate(batches(bad=None)):
        for which, model in enumerate((one, two)):
            spoilt = batch.clone()
            spoilt[:, -1] = float(number == 3 and which == 1)
            accelerator.backward(model(spoilt).mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.03)
            rest[which].step()
            skipped.append(rest[which].step_was_skipped)
            rest[2 + which].step()
            rest[which].zero_grad()
    return weights(one) + weights(two), skipped, [each.get_last_lr()[0] for each in rest[2:]]


@each_precision
def test_two_optimizers_that_step_in_turns_are_judged_apart(precision, tmp_path):
    accelerator = new(precision)
    control = take_control(accelerator, clip=0.03, record=tmp_path / "gan.jsonl")
    ours, skipped, rates = gan(accelerator)
    assert skipped == [place == 7 for place in range(12)]
    assert rates == pytest.approx([0.01 / 7, 0.01 / 6])
    assert control.scale == (32768 if precision == "fp16" else 1)
    accelerator.end_training()
    run = read_run(tmp_path / "gan.jsonl")
    bad = [step for step in run.steps if step.skipped]
    assert [culprit.name for step in bad for culprit in step.culprits] == [
        "Network_2.middle.weight"
    ]
    accelerator = new(precision)
    take_control(accelerator)
    by_the_call, skipped, _ = gan(accelerator)
    assert skipped == [place == 7 for place in range(12)]
    torch.testing.assert_close(by_the_call, ours, rtol=0, atol=1e-6)


@each_precision
def test_after_free_memory_another_model_goes_on_under_the_same_scale(precision):
    accelerator = new(precision)
    control = take_control(accelerator)
    first = trained(accelerator, OPTIMIZERS["fused adamw"], precision=precision)
    accelerator.free_memory()
    second = Training(accelerator, OPTIMIZERS["fused adamw"])
    scale = control.scale
    assert scale == (32768 if precision == "fp16" else 1)
    second.run(batches(bad=None))
    assert control.outcome.step == 2 * STEPS
    assert control.scale == scale
    expected = trained(new(), OPTIMIZERS["fused adamw"]) if precision == "fp32" else None
    assert expected is None or same(second.weights, expected.weights)
    assert not same(second.weights, weights(Network()))
    assert same(first.weights, weights(first.model))


@each_precision
@pytest.mark.parametrize("adopt", [False, True])
def test_free_memory_frees_the_model_at_once(precision, adopt, tmp_path):
    accelerator = new(precision)
    control = take_control(accelerator, adopt=adopt, record=tmp_path / "run.jsonl")
    training = trained(accelerator, OPTIMIZERS["fused adamw"], precision=precision)
    gone = [weakref.ref(param) for param in training.model.parameters()]
    gone += [weakref.ref(module) for module in training.model.modules()]
    del training
    gc.collect()
    assert all(ref() is not None for ref in gone)  # The accelerator has them.
    accelerator.free_memory()
    gc.collect()
    assert all(ref() is None for ref in gone)
    assert control.optimizers == ()
    scale = control.scale
    Training(accelerator, OPTIMIZERS["fused adamw"]).run(batches(bad=None))
    assert control.scale == scale
    control.detach().close()
    run = read_run(tmp_path / "run.jsonl")
    assert len(run.optimizers) == 1
    assert [step.step for step in run.steps] == list(range(1, 2 * STEPS + 1))


def test_a_batch_that_does_not_fit_is_tried_smaller():
    """find_executable_batch_size prepares again what is prepared already."""
    from accelerate.utils import find_executable_batch_size

    accelerator = new("fp16")
    control = take_control(accelerator)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tried = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        nonlocal model, optimizer
        tried.append(batch_size)
        accelerator.free_memory()
        model, optimizer = accelerator.prepare(model, optimizer)
        optimizer.zero_grad()
        for number, batch in enumerate(batches(bad=None)):
            accelerator.backward(model(batch[: max(batch_size // 2, 1)]).mean())
            if number == 1 and batch_size == 8:
                raise RuntimeError("CUDA out of memory. Tried to allocate")
            optimizer.step()
            optimizer.zero_grad()

    train()
    assert tried == [8, 7]
    assert control.outcome.step == 1 + STEPS
    assert len(control.optimizers) == 1


def test_a_closure_is_evaluated_by_the_control():
    def run(accelerator):
        model = Network()
        model, optimizer = accelerator.prepare(
            model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        )
        for batch in batches(3, bad=None):

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = model(batch).mean()
                accelerator.backward(loss)
                return loss

            optimizer.step(closure)
        return weights(model)

    native, accelerator = run(new()), new()
    take_control(accelerator)
    assert same(run(accelerator), native)


def test_a_loop_that_calls_backward_on_the_loss_itself_is_stepped_too():
    """Some of Accelerate's own examples do; without a scale it makes no difference."""
    expected = trained(new(), OPTIMIZERS["fused adamw"]).weights
    accelerator = new()
    control = take_control(accelerator)
    model = Network()
    model, optimizer = accelerator.prepare(model, OPTIMIZERS["fused adamw"](model.parameters()))
    for batch in batches(bad=None):
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same(weights(model), expected)
    assert control.outcome.step == STEPS


def test_an_accelerator_of_ones_own_keeps_its_methods():
    class Mine(Accelerator):
        def backward(self, loss, **kwargs):
            super().backward(2 * loss, **kwargs)

    native = trained(new("fp16", kind=Mine), OPTIMIZERS["sgd"], precision="fp16")
    accelerator = new("fp16", kind=Mine)
    take_control(accelerator)
    ours = trained(accelerator, OPTIMIZERS["sgd"], precision="fp16")
    assert isinstance(accelerator, Mine)
    assert same(ours.weights, native.weights)
    assert not same(ours.weights, trained(new("fp16"), OPTIMIZERS["sgd"], precision="fp16").weights)


def test_the_scale_begins_with_the_numbers_that_accelerate_was_given():
    numbers = GradScalerKwargs(init_scale=512.0, growth_interval=2, backoff_factor=0.25)
    settings = {"kwargs_handlers": [numbers]}
    native = new("fp16", **settings)
    trained(native, OPTIMIZERS["sgd"], precision="fp16")
    accelerator = new("fp16", **settings)
    control = take_control(accelerator)
    assert control.scale == 512
    trained(accelerator, OPTIMIZERS["sgd"], precision="fp16")
    theirs = native.scaler.state_dict()
    assert {key: accelerator.scaler.state_dict()[key] for key in theirs} == theirs


def test_a_scaler_that_is_turned_off_scales_nothing():
    accelerator = new("fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)])
    control = take_control(accelerator)
    trained(accelerator, OPTIMIZERS["sgd"])
    assert control.scale == 1.0


def test_torchs_optimizers_are_adopted_if_asked_for_and_others_refused():
    plain = new("fp16")
    take_control(plain, clip=0.04)
    theirs = trained(plain, OPTIMIZERS["fused adamw"], precision="fp16", schedule=inverse)
    accelerator = new("fp16")
    take_control(accelerator, clip=0.04, adopt=True)
    ours = trained(accelerator, OPTIMIZERS["fused adamw"], precision="fp16", schedule=inverse)
    assert isinstance(ours.optimizer.optimizer, AdamW)
    assert ours.rates == theirs.rates
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=0, atol=1e-6)
    with pytest.raises(TypeError, match="got RMSprop"):
        accelerator.prepare(torch.optim.RMSprop([nn.Parameter(torch.ones(1))]))


def test_a_scale_may_be_asked_for_in_any_precision():
    accelerator = new("bf16")
    control = take_control(accelerator, scale=1024.0)
    ours = trained(accelerator, OPTIMIZERS["fused adamw"], precision="bf16")
    assert control.scale == 1024
    assert same(ours.weights, trained(new("bf16"), OPTIMIZERS["fused adamw"]).weights)


def test_uneven_last_batches_step_at_the_end_of_the_data():
    accelerator = new(accumulate=4)
    control = take_control(accelerator)
    data = torch.utils.data.DataLoader(torch.cat(batches(bad=None)), batch_size=4)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
    assert control.outcome.step == 2  # Of six batches, four and two.


# --- what is refused ------------------------------------------------------------------------------


def test_taking_control_late_twice_or_of_something_else_is_refused():
    accelerator = new()
    model = Network()
    accelerator.prepare(model, OPTIMIZERS["sgd"](model.parameters()))
    with pytest.raises(ValueError, match=r"before accelerator\.prepare.*1 optimizer"):
        take_control(accelerator)
    accelerator = new()
    take_control(accelerator)
    with pytest.raises(ValueError, match="has a control already"):
        take_control(accelerator)
    with pytest.raises(TypeError, match=r"takes an accelerate\.Accelerator, got Linear"):
        take_control(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("strategy", "named"),
    [
        ("DEEPSPEED", "DeepSpeed scales"),
        ("MEGATRON_LM", "Megatron-LM scales"),
        ("XLA", "XLA scales"),
        ("FSDP", "FSDP version 1"),
    ],
)
def test_who_steps_by_itself_is_refused_by_name(strategy, named, monkeypatch):
    accelerator = new()
    kind = DistributedType[strategy]
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: kind))
    with pytest.raises(ValueError, match=named):
        take_control(accelerator)
    assert type(accelerator) is Accelerator


# --- processes of their own -----------------------------------------------------------------------

# The server turns warnings into errors; torch's own checkpoints warn.
IGNORING = "import warnings\nwarnings.simplefilter('ignore')\n"
RANKS = """
import sys
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from gradilocks.integrations.accelerate import take_control

strategy, takes = sys.argv[1], sys.argv[2] == "ours"
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
accelerator = Accelerator(cpu=True)
if strategy == "fsdp2":  # Which Accelerate offers on GPUs only.
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
if takes:
    control = take_control(accelerator, scale=1024.0, record="run.jsonl")
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
rank = accelerator.process_index
batches = torch.randn(2, 6, 4, 6, generator=torch.Generator().manual_seed(1))[rank]
skipped, norms = [], []


def train(first, last):
    for step in range(first, last):
        loss = 5 * model(batches[step]).square().mean()
        if takes and step == 3 and rank == 1:
            loss = loss * float("inf")
        if takes or step != 3:
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            optimizer.step()
            schedule.step()
            skipped.append(accelerator.optimizer_step_was_skipped)
            optimizer.zero_grad()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().clone() for p in whole], schedule.get_last_lr()


accelerator.save_state("at the start")
accelerator.wait_for_everyone()
accelerator.load_state("at the start")
train(0, 2)
accelerator.save_state("after two")
accelerator.wait_for_everyone()
ended = train(2, 6)
if takes:
    assert skipped == [False, False, False, True, False, False], skipped
    assert control.outcome.step == 6
    saved = control.state_dict()
    accelerator.load_state("after two")
    again = train(2, 6)
    assert all(map(torch.equal, ended[0], again[0])), "not resumed bit for bit"
    assert (ended[1], saved) == (again[1], control.state_dict())
torch.save((*ended, [n for n in norms[:6] if n < 1e9]), f"{sys.argv[2]}{rank}.pt")
accelerator.end_training()
"""

FAILING = """
import sys
import torch
from accelerate import Accelerator
from gradilocks.integrations.accelerate import take_control

accelerator = Accelerator(cpu=True)
take_control(accelerator, record="run.jsonl")
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(4):
    if step == 3:
        raise RuntimeError("out of coffee")
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def server():
    with serving("accelerate", "torch.distributed.fsdp", "gradilocks.control") as server:
        yield server


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_end_with_equal_weights_as_accelerates_own_and_one_run_file(
    strategy, server, tmp_path
):
    script = tmp_path / "train.py"
    script.write_text(IGNORING + RANKS)
    for arm in ("native", "ours"):
        done = server.run(script, strategy, arm, cwd=tmp_path, ranks=2)
        assert done.returncode == 0, done.stderr
    saved = {
        file.stem: torch.load(file, weights_only=False) for file in sorted(tmp_path.glob("*.pt"))
    }
    assert sorted(saved) == ["native0", "native1", "ours0", "ours1"]
    assert same(saved["ours0"][0], saved["ours1"][0])
    torch.testing.assert_close(saved["ours0"][0], saved["native0"][0], rtol=0, atol=1e-6)
    assert saved["ours0"][1] == saved["native0"][1]
    assert saved["ours0"][2] == pytest.approx(saved["native0"][2], rel=1e-6)
    assert [file.name for file in tmp_path.glob("*.jsonl")] == ["run.jsonl"]
    run = read_run(tmp_path / "run.jsonl")
    assert [step.skipped for step in run.steps[:6]] == [False, False, False, True, False, False]
    assert run.optimizers[0].names == ("0.weight", "0.bias", "2.weight", "2.bias")


def test_an_exception_ends_the_run_file_as_an_error(server, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    done = server.run(script, cwd=tmp_path)
    assert done.returncode == 1
    run = read_run(tmp_path / "run.jsonl")
    assert (run.end.status, run.end.error) == ("error", "RuntimeError: out of coffee")
    assert len(run.steps) == 3
