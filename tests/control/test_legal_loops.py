"""Training loops as people write them run without an error and give the gradients that they should."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from control.given_gradients import MAKERS, assert_same, batches, contents, loss_of, small_model
from gradilocks import DynamicScale, GradientControl

SCALE = DynamicScale(init_scale=2.0**10, growth_interval=2)


@pytest.fixture(params=MAKERS)
def make(request):
    """A constructor of an optimizer, from parameters."""
    return MAKERS[request.param]


def step_and_clear(*steppers):
    """Steps a control or an optimizer, then clears its gradients."""
    for each in steppers:
        each.step()
        each.zero_grad()


def compare(mine, theirs):
    """Powers of two scale exactly, so a scaled run without overflow is the unscaled run bit for bit."""
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)


class Gan:
    """Two networks that train against each other."""

    def __init__(self, make):
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.g, self.d = make(self.generator.parameters()), make(self.critic.parameters())

    def parameters(self):
        return [*self.generator.parameters(), *self.critic.parameters()]

    def critic_loss(self, noise, *, detach=True):
        fake = self.generator(noise)
        return (self.critic(fake.detach() if detach else fake) - self.critic(torch.ones(2, 4))).mean()

    def generator_loss(self, noise):
        return -self.critic(self.generator(noise)).mean()


def noises(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 3, generator=generator) for _ in range(count)]


def plain_gan(gan, *, detach=True, set_to_none=True, critic_steps=1):
    for noise in noises(6):
        for _ in range(critic_steps):
            gan.d.zero_grad(set_to_none=set_to_none)
            gan.critic_loss(noise, detach=detach).backward()
            gan.d.step()
        gan.g.zero_grad(set_to_none=set_to_none)
        gan.generator_loss(noise).backward()
        gan.g.step()


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("update", ["once", "each"])
@pytest.mark.parametrize("critic_steps", [1, 3])
def test_a_gan_loop_with_only_and_update(make, detach, set_to_none, update, critic_steps):
    mine, theirs = Gan(make), Gan(make)
    plain_gan(theirs, detach=detach, set_to_none=set_to_none, critic_steps=critic_steps)
    control = GradientControl(mine.g, mine.d, scale=SCALE, model={"g": mine.generator, "d": mine.critic})
    for noise in noises(6):
        for k in range(critic_steps):
            mine.d.zero_grad(set_to_none=set_to_none)
            control.backward(mine.critic_loss(noise, detach=detach))
            control.step(only=mine.d)
            if update == "each" or k < critic_steps - 1:
                control.update()
        mine.g.zero_grad(set_to_none=set_to_none)
        control.backward(mine.generator_loss(noise))
        control.step(only=mine.g)
        control.update()
    compare(mine, theirs)
    assert control.scale > 2.0**10


def test_actor_and_critic_unscaled_before_the_loss_of_the_other(make):
    """As in reinforcement learning: each network is clipped by hand right after its own loss."""
    mine, theirs = Gan(make), Gan(make)
    for gan, control in ((theirs, None), (mine, GradientControl(mine.g, mine.d, scale=SCALE))):
        for noise in noises(6):
            gan.g.zero_grad()
            gan.d.zero_grad()
            for optimizer, loss_function, frozen in (
                (gan.d, gan.critic_loss, gan.generator),
                (gan.g, gan.generator_loss, gan.critic),
            ):
                for param in frozen.parameters():
                    param.requires_grad_(False)
                loss = loss_function(noise)
                loss.backward() if control is None else control.backward(loss)
                if control is not None:
                    control.unscale_(only=optimizer)
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
                for param in frozen.parameters():
                    param.requires_grad_(True)
            for optimizer in (gan.d, gan.g):
                optimizer.step() if control is None else control.step(only=optimizer)
            if control is not None:
                control.update()
    compare(mine, theirs)


@pytest.fixture
def twins(make):
    """A control over a model and its optimizer, and an equal model with its optimizer alone."""
    model = small_model()
    other = copy.deepcopy(model)
    control = GradientControl(make(model.parameters()), model=model, scale=SCALE)
    return control, model, other, make(other.parameters())


def test_accumulation_with_several_losses_and_a_retained_graph(twins):
    control, model, other, plain = twins
    for k, (x, y, _) in enumerate(batches(8)):
        for net, backward in ((model, control.backward), (other, torch.Tensor.backward)):
            output = net(x)
            backward(output.square().mean() / 4, retain_graph=True)
            backward((output - y).abs().mean() / 4)
        if k % 2:
            step_and_clear(control, plain)
    compare(model, other)


def test_layers_that_are_frozen_and_unfrozen(twins):
    control, model, other, plain = twins
    optimizer = control.optimizers[0]
    control = GradientControl(optimizer, scale=SCALE, clip=1e6)
    for k, batch in enumerate(batches(9)):
        for net in (model, other):
            net[0].requires_grad_(k % 3 != 1)
        control.backward(loss_of(model, *batch))
        loss_of(other, *batch).backward()
        step_and_clear(control, plain)
    compare(model, other)
    assert_same(optimizer.state_dict()["state"], plain.state_dict()["state"])


def test_gradients_changed_by_hand_between_backward_and_step(twins):
    control, model, other, plain = twins
    for k, batch in enumerate(batches(6)):
        control.backward(loss_of(model, *batch))
        loss_of(other, *batch).backward()
        control.unscale_()
        for net in (model, other):
            net[0].weight.grad[0] = 0.0
            net[3].bias.grad = torch.full_like(net[3].bias, 0.25 * k)
        assert control.norm() > 0
        step_and_clear(control, plain)
    compare(model, other)


def test_a_gradient_penalty_through_a_graph_of_gradients(twins):
    control, model, other, plain = twins
    for x, y, _ in batches(4):
        for net, backward in ((model, control.backward), (other, torch.Tensor.backward)):
            given = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(loss_of(net, given, y), given, create_graph=True)
            backward(loss_of(net, x, y) + grad.square().sum())
        step_and_clear(control, plain)
    compare(model, other)


def test_a_batch_that_is_abandoned_after_its_norm_was_looked_at(twins):
    control, model, other, plain = twins
    for k, batch in enumerate(batches(8)):
        control.zero_grad()
        plain.zero_grad()
        control.backward(loss_of(model, *batch))
        loss_of(other, *batch).backward()
        norm = nn.utils.get_total_norm([p.grad for p in other.parameters()])
        assert control.norm().item() == pytest.approx(norm.item(), rel=1e-5)
        control.unscale_()
        assert control.norm().item() == pytest.approx(norm.item(), rel=1e-5)
        if k % 3:
            assert control.step().norm == pytest.approx(norm.item(), rel=1e-5)
            plain.step()
    compare(model, other)


def test_a_backward_that_fails_and_is_tried_again(twins):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("out of memory")

    control, model, other, plain = twins
    for k, batch in enumerate(batches(4)):
        if k == 2:
            with pytest.raises(RuntimeError, match="out of memory"):
                control.backward(Fails.apply(loss_of(model, *batch)))
            control.optimizers[0].zero_grad()
        control.backward(loss_of(model, *batch))
        loss_of(other, *batch).backward()
        step_and_clear(control, plain)
    compare(model, other)


def test_averaged_weights_and_swapped_parameters(twins):
    control, model, other, plain = twins
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for k, batch in enumerate(batches(6)):
        control.backward(loss_of(model, *batch))
        step_and_clear(control)
        averaged.update_parameters(model)
        if k == 3:  # Evaluate with the averaged weights, then restore.
            backup = copy.deepcopy(model.state_dict())
            model.load_state_dict(averaged.module.state_dict())
            model.load_state_dict(backup)
        loss_of(other, *batch).backward()
        step_and_clear(plain)
    compare(model, other)


def test_a_deep_copy_of_model_and_optimizer_is_independent_of_the_control(twins):
    control, model, *_ = twins
    optimizer = control.optimizers[0]
    stream = list(batches(4))
    control.backward(loss_of(model, *stream[0]))
    control.step()
    control.zero_grad()
    model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
    before = contents(optimizer)
    loss_of(model_copy, *stream[1]).backward()
    optimizer_copy.step()
    assert_same(contents(optimizer), before)
    control.backward(loss_of(model, *stream[1]))
    assert not control.step().skipped


def test_data_parallel_and_a_loss_per_replica(twins):
    control, model, other, plain = twins
    parallel = nn.DataParallel(model)
    control = GradientControl(*control.optimizers, model=parallel, scale=SCALE)
    for x, y, _ in batches(3):
        control.backward((parallel(x) - y).square().mean())
        (other(x) - y).square().mean().backward()
        step_and_clear(control, plain)
    compare(model, other)
    assert not control.outcome.skipped


def test_losses_of_every_kind(twins):
    control, model, other, plain = twins
    for k, (x, y, _) in enumerate(batches(3)):
        for net, backward in ((model, control.backward), (other, torch.Tensor.backward)):
            if k == 0:
                backward((net(x) - y).square().mean().half().float().reshape(1))
            elif k == 1:
                backward((net(x) - y).square(), gradient=torch.full((12, 3), 0.125))
            else:
                backward(net(x).sum().double())
        step_and_clear(control, plain)
    compare(model, other)


def test_a_half_precision_loss_is_scaled_in_float32():
    p = nn.Parameter(torch.ones(2))
    control = GradientControl(torch.optim.SGD([p], lr=0.5))
    for dtype in (torch.float16, torch.bfloat16):
        scaled = control.scale_loss((p.sum() * 4.0).to(dtype))
        assert scaled.item() == 8.0 * 65536.0
        control.zero_grad()
