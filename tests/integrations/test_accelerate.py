"""Accelerate loops with `control_for`, compared with loops of GradientControl and of Accelerate alone."""

from __future__ import annotations

import math

import pytest
import torch
from planted_overflow import (
    BAD_STEP,
    CLIP,
    CULPRIT,
    OPTIMIZERS,
    STEPS,
    Network,
    assert_same,
    batches,
    control_loop,
    each_precision,
    each_setting,
    join_process_group,
    reset_accelerate,
    use_float16,
    weights,
)
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from gradilocks import ClipByNorm, ClipByValue, DynamicScale, QuantileClip, chain
from ranks.rank_world import world

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import GradScalerKwargs, find_executable_batch_size  # noqa: E402

from gradilocks.integrations.accelerate import control_for  # noqa: E402


def new_accelerator(precision="no", accumulate=1, **settings):
    """An Accelerator that shares no state with those before."""
    reset_accelerate()
    is_float16 = precision == "fp16"
    settings |= {"mixed_precision": "no" if is_float16 else precision, "gradient_accumulation_steps": accumulate}
    accelerator = Accelerator(cpu=True, **settings)
    if is_float16:
        use_float16(accelerator)
    return accelerator


def inverse(step):
    """A schedule that shows how often it has advanced: the first rate divided by 1, 2, 3, ..."""
    return 1 / (1 + step)


class Loop:
    """The training loop of Accelerate's documentation, and what it sees after each step."""

    def __init__(self, accelerator, make, *, max_norm=None, control=True, **options):
        self.accelerator, self.max_norm = accelerator, max_norm
        network = Network()
        optimizer = make(network.parameters())
        self.model, self.optimizer, self.scheduler = accelerator.prepare(
            network, optimizer, LambdaLR(optimizer, inverse)
        )
        self.control = control_for(accelerator, self.model, self.optimizer, **options) if control else None
        self.norms, self.skipped, self.rates, self.outcomes = [], [], [], []

    def run(self, rows):
        accelerator = self.accelerator
        for batch in rows:
            with accelerator.accumulate(self.model):
                accelerator.backward(self.model(batch).mean())
                if accelerator.sync_gradients and self.max_norm is not None:
                    norm = accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)
                    self.norms.append(norm.item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if accelerator.sync_gradients:
                self.skipped.append(accelerator.optimizer_step_was_skipped)
                self.rates.append(self.optimizer.param_groups[0]["lr"])
                self.outcomes.append(self.control.outcome if self.control else None)
        return self

    @property
    def weights(self):
        return weights(self.model)


@each_setting
def test_without_a_clip_the_parameters_are_those_of_a_control_bit_for_bit(make, precision, accumulate):
    rows = batches(accumulate=accumulate)
    expected, _ = control_loop(make, rows, inverse, precision=precision, accumulate=accumulate)
    loop = Loop(new_accelerator(precision, accumulate), make).run(rows)
    assert_same(loop.weights, expected)
    assert loop.control.outcome.step == STEPS


@each_setting
def test_with_a_clip_parameters_and_norms_are_those_of_a_control(make, precision, accumulate):
    rows = batches(accumulate=accumulate)
    expected, norms = control_loop(make, rows, inverse, precision=precision, accumulate=accumulate, clip=CLIP)
    loop = Loop(new_accelerator(precision, accumulate), make, max_norm=CLIP, clip=CLIP).run(rows)
    assert_same(loop.weights, expected, tolerance=1e-6)
    del loop.norms[BAD_STEP], norms[BAD_STEP]  # NaN or Inf
    assert loop.norms == pytest.approx(norms, rel=1e-6)
    assert [outcome.clipped for outcome in loop.outcomes] == [not o.skipped and o.norm > CLIP for o in loop.outcomes]
    assert any(outcome.clipped for outcome in loop.outcomes)


@each_setting
@pytest.mark.parametrize("max_norm", [None, CLIP])
def test_finite_training_is_that_of_accelerate_alone(make, precision, accumulate, max_norm):
    rows, settings = batches(accumulate=accumulate, bad=None), (precision, accumulate)
    native = Loop(new_accelerator(*settings), make, max_norm=max_norm, control=False).run(rows)
    loop = Loop(new_accelerator(*settings), make, max_norm=max_norm, clip=max_norm).run(rows)
    assert_same(loop.weights, native.weights, tolerance=0.0 if max_norm is None else 1e-6)
    assert loop.norms == pytest.approx(native.norms, rel=1e-5)
    assert loop.rates == native.rates


@each_setting
def test_one_overflow_is_one_skip_with_the_right_flag_culprit_and_schedule(make, precision, accumulate):
    loop = Loop(new_accelerator(precision, accumulate), make).run(batches(accumulate=accumulate))
    assert loop.skipped == [step == BAD_STEP for step in range(STEPS)]
    assert [outcome.skipped for outcome in loop.outcomes] == loop.skipped
    bad = loop.outcomes[BAD_STEP]
    assert bad.culprits[0] == CULPRIT  # Later ones in backward order: `first` is upstream of it.
    first_rate = make([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]
    assert loop.rates == pytest.approx([first_rate / n for n in (2, 3, 3, 4, 5, 6)])


def test_accelerate_alone_reports_no_skip_of_a_fused_optimizer():
    """The reason for ControlledOptimizer; once this fails, Accelerate has repaired it."""
    loop = Loop(new_accelerator("fp16"), OPTIMIZERS["fused"], control=False).run(batches())
    assert not any(loop.skipped)


def test_the_schedule_does_not_read_the_skip_flag_at_every_step(monkeypatch):
    loop = Loop(new_accelerator(), OPTIMIZERS["ours"])
    kind = type(loop.optimizer)
    monkeypatch.setattr(kind, "step_was_skipped", property(lambda self: pytest.fail("the flag was read")))
    loop.accelerator.backward(loop.model(batches()[0]).mean())
    loop.optimizer.step()
    loop.scheduler.step()
    assert loop.scheduler.get_last_lr() == [0.005]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_scheduler_of_the_prepared_optimizer_waits_for_skipped_steps(when):
    """Many scripts create the scheduler from the optimizer that prepare() returned, before or after control_for()."""
    accelerator = new_accelerator()
    model, optimizer = Network(), None
    model, optimizer = accelerator.prepare(model, OPTIMIZERS["fused"](model.parameters()))
    if when == "before":
        scheduler = accelerator.prepare(LambdaLR(optimizer, inverse))
    control_for(accelerator, model, optimizer)
    if when == "after":
        scheduler = accelerator.prepare(LambdaLR(optimizer, inverse))
    rates = []
    for batch in batches():
        accelerator.backward(model(batch).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(round(0.01 / optimizer.param_groups[0]["lr"]))
    assert rates == [2, 3, 3, 4, 5, 6]


# --- checkpoints ------------------------------------------------------------------------------------------------------


@each_setting
def test_a_saved_state_resumes_bit_for_bit(make, precision, accumulate, tmp_path):
    rows, settings = batches(accumulate=accumulate), (precision, accumulate)
    options, middle = {"clip": QuantileClip(0.5, window=4)}, 4 * accumulate
    whole = Loop(new_accelerator(*settings), make, **options).run(rows)
    first = Loop(new_accelerator(*settings), make, **options).run(rows[:middle])
    first.accelerator.save_state(str(tmp_path / "state"))
    second = Loop(new_accelerator(*settings), make, **options)
    second.accelerator.load_state(str(tmp_path / "state"))
    second.run(rows[middle:])
    assert_same(second.weights, whole.weights)
    assert second.rates == whole.rates[4:]
    assert str(second.control.state_dict()) == str(whole.control.state_dict())


@each_precision
def test_states_with_and_without_a_control_are_interchangeable(precision, tmp_path):
    rows = batches(bad=None)
    whole = Loop(new_accelerator(precision), OPTIMIZERS["fused"], control=False).run(rows)
    for first_has_control in (False, True):
        folder = str(tmp_path / str(first_has_control))
        first = Loop(new_accelerator(precision), OPTIMIZERS["fused"], control=first_has_control).run(rows[:3])
        first.accelerator.save_state(folder)
        second = Loop(new_accelerator(precision), OPTIMIZERS["fused"], control=not first_has_control)
        second.accelerator.load_state(folder)
        assert_same(second.run(rows[3:]).weights, whole.weights)
        assert second.accelerator.scaler is None or second.accelerator.scaler.get_scale() == (
            65536.0 if precision == "fp16" else 1.0
        )


def test_the_step_by_which_torch_creates_optimizer_state_is_not_a_step_of_the_control(monkeypatch):
    """torch.distributed.checkpoint saves and loads FSDP2 optimizers after a step with zero gradients and rates."""
    loop = Loop(new_accelerator(), OPTIMIZERS["ours"], max_norm=CLIP, clip=CLIP)
    monkeypatch.setattr(AcceleratorState, "is_fsdp2", True)
    before = weights(loop.model)
    for param in loop.model.parameters():
        param.grad = torch.zeros_like(param)
    rate, loop.optimizer.param_groups[0]["lr"] = loop.optimizer.param_groups[0]["lr"], 0.0
    loop.optimizer.step()
    loop.optimizer.param_groups[0]["lr"] = rate
    loop.optimizer.zero_grad()
    assert loop.control.outcome is None
    assert len(loop.optimizer.state) == 6
    assert_same(weights(loop.model), before)
    assert loop.run(batches()).control.outcome.step == STEPS


# --- clips ------------------------------------------------------------------------------------------------------------


def after_backward(**options):
    loop = Loop(new_accelerator(), OPTIMIZERS["fused"], **options)
    loop.accelerator.backward(loop.model(batches()[0]).mean())
    return loop


@pytest.mark.parametrize("clip", [None, 2.0, ClipByNorm(CLIP, order=math.inf), ClipByValue(1.0)])
def test_a_clip_that_the_control_does_not_apply_is_rejected(clip):
    loop = after_backward(clip=clip)
    with pytest.raises(ValueError, match=r"clip_grad_norm_\(max_norm=0.02, norm_type=2\) needs control_for"):
        loop.accelerator.clip_grad_norm_(loop.model.parameters(), CLIP)
    with pytest.raises(ValueError, match=r"clip_grad_value_\(0.5\) needs control_for\(..., clip=ClipByValue"):
        loop.accelerator.clip_grad_value_(loop.model.parameters(), 0.5)


def test_a_clip_within_a_chain_and_a_measurement_are_accepted():
    loop = after_backward(clip=chain(ClipByNorm(CLIP), ClipByValue(10.0)))
    norm = loop.accelerator.clip_grad_norm_(loop.model.parameters(), CLIP)
    assert loop.accelerator.clip_grad_norm_(loop.model.parameters(), math.inf) == norm
    loop.accelerator.clip_grad_value_(loop.model.parameters(), 10.0)
    loop.optimizer.step()
    assert loop.control.outcome.clipped


def test_parts_of_a_model_are_rejected_and_frozen_parameters_are_not():
    loop = after_backward(clip=CLIP)
    with pytest.raises(ValueError, match="all parameters of 0 optimizers"):
        loop.accelerator.clip_grad_norm_(loop.model.head.parameters(), CLIP)
    frozen = nn.Parameter(torch.zeros(3))
    norm = loop.accelerator.clip_grad_norm_([*loop.model.parameters(), frozen], CLIP)
    assert norm == loop.control.norm()


# --- several optimizers -----------------------------------------------------------------------------------------------


def two_networks(precision, control):
    accelerator = new_accelerator(precision)
    one, two = Network(), Network()
    optimizers = OPTIMIZERS["sgd"](one.parameters()), OPTIMIZERS["fused"](two.parameters())
    one, two, *optimizers = accelerator.prepare(one, two, *optimizers)
    if control:
        control = control_for(accelerator, {"one": one, "two": two}, optimizers, clip=CLIP)
    return accelerator, (one, two), optimizers, control


@each_precision
@pytest.mark.parametrize("losses", ["one", "two"])
def test_two_optimizers_are_those_of_accelerate_alone(precision, losses):
    def train(control):
        accelerator, models, optimizers, _ = two_networks(precision, control)
        for batch in batches(bad=None):
            if losses == "one":
                accelerator.backward(sum(model(batch).mean() for model in models))
            for model, optimizer in zip(models, optimizers, strict=True):
                if losses == "two":
                    optimizer.zero_grad()
                    accelerator.backward(model(batch).mean())
                accelerator.unscale_gradients(optimizer)
                clip = accelerator.clip_grad_norm_ if control else torch.nn.utils.clip_grad_norm_
                clip(model.parameters(), CLIP)
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return [weight for model in models for weight in weights(model)]

    assert_same(train(control=True), train(control=False), tolerance=1e-6)


def test_the_scale_moves_once_for_two_optimizers_and_the_flags_are_separate():
    accelerator, (one, two), (first, second), control = two_networks("fp16", control=True)
    accelerator.backward(one(batches()[0]).mean() + two(batches()[BAD_STEP]).mean())
    first.step()
    second.step()
    assert (first.step_was_skipped, second.step_was_skipped) == (False, True)
    assert accelerator.optimizer_step_was_skipped
    assert control.outcome.culprits[0] == f"two.{CULPRIT}"
    assert accelerator.scaler.state_dict()["scale"] == 32768.0


# --- scripts in other styles ------------------------------------------------------------------------------------------


def test_a_closure_is_evaluated_by_the_control():
    accelerator = new_accelerator()
    model = Network()
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), max_iter=2))
    control_for(accelerator, model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = model(batches()[0]).mean()
        accelerator.backward(loss)
        return loss

    before = closure().item()
    optimizer.step(closure)
    assert closure().item() < before


def test_the_scale_starts_with_the_numbers_of_grad_scaler_kwargs():
    handler = GradScalerKwargs(init_scale=256.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    loop = Loop(new_accelerator("fp16", kwargs_handlers=[handler]), OPTIMIZERS["ours"])
    assert loop.control.scale == 256.0
    policy = DynamicScale(init_scale=256.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    assert repr(policy) in repr(loop.control)
    disabled = new_accelerator("fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)])
    assert "scale=None" in repr(Loop(disabled, OPTIMIZERS["ours"]).control)


def test_after_free_memory_another_model_gets_another_control():
    accelerator = new_accelerator("fp16")
    tried = []

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size):
        tried.append(batch_size)
        accelerator.free_memory()
        loop = Loop(accelerator, OPTIMIZERS["fused"], clip=CLIP)
        accelerator.backward(loop.model(batches()[0]).mean())
        if batch_size > 6:
            raise RuntimeError("CUDA out of memory.")
        loop.optimizer.zero_grad()
        return loop.run(batches())

    loop = train()
    assert len(tried) > 1
    assert_same(loop.weights, control_loop(OPTIMIZERS["fused"], batches(), inverse, precision="fp16", clip=CLIP)[0])


def test_optimizers_that_are_not_prepared_or_not_all_given_are_rejected(monkeypatch):
    accelerator = new_accelerator()
    model, other = Network(), Network()
    bare = OPTIMIZERS["fused"](model.parameters())
    with pytest.raises(ValueError, match="has not prepared this AdamW"):
        control_for(accelerator, model, bare)
    prepared = accelerator.prepare(bare)
    accelerator.prepare(OPTIMIZERS["sgd"](other.parameters()))
    with pytest.raises(ValueError, match=r"prepared 2 optimizers, control_for\(\) got 1"):
        control_for(accelerator, model, prepared)
    accelerator = new_accelerator()
    loop = Loop(accelerator, OPTIMIZERS["fused"])
    with pytest.raises(ValueError, match="already has a control"):
        control_for(accelerator, loop.model, loop.optimizer)
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(ValueError, match="DEEPSPEED scales, clips and steps in its own engine"):
        control_for(accelerator, loop.model, loop.optimizer)


# --- two processes ----------------------------------------------------------------------------------------------------


def rows_of(rank):
    """Each rank trains on half of the batches; only rank 1 has the bad one."""
    return batches(2 * STEPS, bad=2 * BAD_STEP + 1)[rank::2]


def train_on_rank(rank, folder):
    join_process_group(rank)
    settings = {"max_norm": CLIP, "clip": CLIP}
    whole = Loop(new_accelerator(), OPTIMIZERS["fused"], **settings).run(rows_of(rank))
    assert whole.accelerator.num_processes == 2
    first = Loop(new_accelerator(), OPTIMIZERS["fused"], **settings).run(rows_of(rank)[:4])
    first.accelerator.save_state(folder)
    second = Loop(new_accelerator(), OPTIMIZERS["fused"], **settings)
    second.accelerator.load_state(folder)
    assert_same(second.run(rows_of(rank)[4:]).weights, whole.weights)
    return whole.weights, whole.norms, whole.skipped, whole.rates, whole.outcomes[BAD_STEP].culprits


@pytest.mark.slow
def test_two_processes_train_like_one_with_the_gradients_of_both(tmp_path):
    ours, other = world(2).run(train_on_rank, str(tmp_path))
    assert_same(ours[0], other[0])
    pairs = [torch.cat(pair) for pair in zip(rows_of(0), rows_of(1), strict=True)]
    _, norms = control_loop(OPTIMIZERS["fused"], pairs, inverse, clip=CLIP)
    for _, norm, skipped, rates, culprits in (ours, other):
        assert norm[:BAD_STEP] == pytest.approx(norms[:BAD_STEP], rel=1e-5)
        assert skipped == [step == BAD_STEP for step in range(STEPS)]
        assert culprits[0] == CULPRIT
        # With two processes Accelerate advances a schedule twice per step.
        assert rates == pytest.approx([0.01 / n for n in (3, 5, 5, 7, 9, 11)])
