"""Inside the frameworks' wrappers an optimizer takes the decision itself, at full speed.

The truth is the bare optimizer, bit for bit, also with a clip: both divide by the same number
inside the optimizer's own pass. That this way was taken shows in what the optimizer inside has been
given and in that nobody has multiplied its gradients.
"""

from __future__ import annotations

import importlib
import math
import weakref

import accelerate
import lightning
import pytest
import torch

from gradilocks import GradientControl, GradScaler, kernels, optim
from gradilocks.step.framework_wrappers import steppers
from gradilocks.step.update import takes_decision
from tests.control.optimizer_wrappers import MAKERS, Forwards, Imitates, TrueGradients, state_of
from tests.integrations.accelerate_on_cpu import forget
from tests.integrations.framework_optimizers import (
    WRAPPERS,
    Manual,
    around_zero,
    in_a_container,
    in_accelerate,
    in_fabric,
    in_lightning,
    in_zero,
    module_called,
    no_group_is_left,
)

pytestmark = pytest.mark.filterwarnings("ignore")

FUSED = [name for name in MAKERS if name != "Adam foreach"]
FACTORS = [math.nan, 1.0, 0.5, math.inf, 2.0, 0.25]
"""What each step's gradients are multiplied by; the first step is skipped too."""


def parameters():
    return [torch.nn.Parameter(torch.tensor([1.0, -2.0])), torch.nn.Parameter(torch.tensor([0.5]))]


@pytest.fixture(autouse=True)
def _no_group():
    yield
    no_group_is_left()


SETTINGS = {
    "scaled": {},
    "clipped": {"clip": 0.1},
    "clipped, not scaled": {"scale": None, "clip": 0.1},
    "another scale": {"scale": 1000.0},
}
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
each_fused = pytest.mark.parametrize("name", FUSED)


def by_control(params, optimizer, settings):
    control = GradientControl(optimizer, **settings)
    for step, factor in enumerate(FACTORS):
        control.zero_grad()
        held = [param.detach().clone() for param in params]
        loss = sum((param * param).sum() for param in params) * (0.1 * (step + 1)) * factor
        control.backward(loss)
        skipped = control.step().skipped
        assert skipped == (not math.isfinite(factor))
        assert skipped == all(map(torch.equal, params, held))


def by_scaler(params, optimizer, settings):
    scaler = GradScaler("cpu", **settings)
    for step, factor in enumerate(FACTORS):
        for param in params:
            param.grad = None
        loss = sum((param * param).sum() for param in params) * (0.1 * (step + 1)) * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.outcome.skipped == (not math.isfinite(factor))


def trained(make, wrap, loop, settings):
    """The parameters, what the optimizer that steps remembers, and what it was given each time."""
    params = parameters()
    optimizer = wrap(make(params))
    inner = optim.unwrapped(optimizer)
    given = []
    inner.register_step_pre_hook(
        lambda each, *_: given.append(getattr(each, "found_inf", None) is not None)
    )
    loop(params, optimizer, settings)
    return [param.detach() for param in params], state_of(inner), given


def same(one, other):
    (params, state, _), (others, theirs, _) = one, other
    return all(map(torch.equal, params, others)) and all(
        torch.equal(state[place][key], theirs[place][key])
        for place in theirs
        for key in theirs[place]
    )


@pytest.fixture
def multiplied(monkeypatch):
    """Every call that multiplies gradients in place."""
    calls = []
    backend = kernels.BACKENDS["cpu"]
    real = backend.multiply_
    monkeypatch.setattr(backend, "multiply_", lambda *args: (calls.append(1), real(*args))[1])
    return calls


@each_wrapper
@each_fused
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_control_hands_the_decision_to_the_optimizer_inside(wrap, name, settings, multiplied):
    got = trained(MAKERS[name], wrap, by_control, settings)
    expected = trained(MAKERS[name], lambda inner: inner, by_control, settings)
    if around_zero(wrap) and name == "SGD momentum fused":
        # Buffers that a skipped step has not filled are made by the host, on all ranks or on none.
        assert multiplied
        for one, other in zip(got[0], expected[0], strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)
        return
    assert multiplied == []
    assert all(got[2])
    assert same(got, expected)


@each_wrapper
@each_fused
@pytest.mark.parametrize("settings", [{}, {"clip": 0.1}], ids=["scaled", "clipped"])
def test_a_scaler_hands_the_decision_to_the_optimizer_inside(wrap, name, settings):
    got = trained(MAKERS[name], wrap, by_scaler, settings)
    assert same(got, trained(MAKERS[name], lambda inner: inner, by_scaler, settings))


@each_wrapper
def test_an_optimizer_that_is_not_fused_is_stepped_the_hosts_way(wrap):
    for loop, settings in ((by_control, {"clip": 0.1}), (by_scaler, {})):
        got = trained(MAKERS["Adam foreach"], wrap, loop, settings)
        assert not any(got[2])
        assert same(got, trained(MAKERS["Adam foreach"], lambda inner: inner, loop, settings))


@each_wrapper
def test_the_one_inside_is_found(wrap):
    inner = MAKERS["AdamW fused"](parameters())
    wrapper = wrap(inner)
    found = optim.unwrapped(wrapper)
    assert type(found) is torch.optim.AdamW
    assert found is inner or around_zero(wrap)
    assert takes_decision(wrapper)
    assert steppers(wrapper) == (found,)
    assert optim.unwrapped(inner) is inner
    assert steppers(inner) is None


def test_what_nobody_knows_is_left_alone():
    inner = MAKERS["AdamW fused"](parameters())
    for wrap in (Forwards, Imitates, TrueGradients):
        wrapper = wrap(inner)
        assert optim.unwrapped(wrapper) is wrapper
        outer = in_accelerate(wrapper)  # Seen through as far as it is known.
        assert optim.unwrapped(outer) is wrapper
        assert not takes_decision(outer)


def test_gradients_of_a_wrapper_that_looks_at_them_inside_a_known_one_are_true():
    ends = []
    for scale in (65536.0, None):
        params = parameters()
        control = GradientControl(
            in_accelerate(TrueGradients(MAKERS["AdamW fused"](params))), scale=scale
        )
        for _ in range(3):
            control.zero_grad()
            control.backward(sum((param * param).sum() for param in params))
            control.step()
        ends.append([param.detach().clone() for param in params])
    assert all(map(torch.equal, *ends))


def test_float16_gradients_are_unscaled_inside():
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    control = GradientControl(in_accelerate(torch.optim.SGD([p], lr=0.5, fused=True)), scale=1024.0)
    control.backward((p.float() * 3).sum())
    assert not control.step().skipped
    assert p.tolist() == [-1.5, -1.5]


def test_a_group_that_was_loaded_unfused_is_stepped_the_hosts_way():
    params = parameters()
    zero = in_zero(MAKERS["AdamW fused"](params))
    assert takes_decision(zero)
    zero.param_groups[0]["fused"] = None  # Which it hands to the one inside at the next step.
    assert not takes_decision(zero)


def test_a_schedule_around_the_wrapper_is_looked_through():
    wrapper = in_zero(MAKERS["AdamW fused"](parameters()))
    torch.optim.lr_scheduler.StepLR(wrapper, 1)
    assert takes_decision(wrapper)


def test_a_wrapper_whose_step_was_replaced_is_not_known_any_more():
    wrapper = in_accelerate(MAKERS["AdamW fused"](parameters()))
    real = wrapper.step
    wrapper.step = lambda *args: real(*args)
    assert not takes_decision(wrapper)


def test_a_subclass_is_known_unless_it_steps_in_a_way_of_its_own():
    from accelerate.optimizer import AcceleratedOptimizer

    class Named(AcceleratedOptimizer):
        pass

    class Halves(AcceleratedOptimizer):
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad.mul_(0.5)
            return super().step(closure)

    forget()

    accelerate.Accelerator(cpu=True)
    inner = MAKERS["SGD fused"](parameters())
    assert takes_decision(Named(inner))
    assert not takes_decision(Halves(inner))
    params = parameters()
    control = GradientControl(Halves(MAKERS["SGD fused"](params)), scale=8.0)
    control.backward(sum(param.sum() for param in params))
    control.step()
    assert params[1].tolist() == [pytest.approx(0.5 - 0.1 * 0.5)]


# --- Lightning's hooks see true gradients ---------------------------------------------------------


def lightnings_norm(module=None, **settings):
    params = parameters()
    control = GradientControl(in_lightning(MAKERS["SGD fused"](params), module, **settings))
    control.backward(sum((param * param).sum() for param in params))
    norm = torch.cat([2 * param.detach() for param in params]).norm().item()
    assert control.step().norm == pytest.approx(norm)
    assert params[0].tolist() == pytest.approx([0.8, -1.6])
    return norm


def seen_in(seen, optimizer):
    grads = [param.grad for group in optimizer.param_groups for param in group["params"]]
    seen.append(torch.cat(grads).norm().item())


def test_a_hook_of_the_module_that_looks_at_gradients_sees_them_unscaled():
    seen = []

    class Looks(Manual):
        def on_before_optimizer_step(self, optimizer):
            seen_in(seen, optimizer)

    norm = lightnings_norm(Looks())
    assert seen == [pytest.approx(norm)]


def test_a_callback_that_looks_at_gradients_sees_them_unscaled():
    seen = []

    class Looks(lightning.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            seen_in(seen, optimizer)

    norm = lightnings_norm(callbacks=[Looks()])
    assert seen == [pytest.approx(norm)]


def test_automatic_optimization_with_a_clip_is_stepped_on_true_gradients():
    """Lightning clips inside its wrapper's step."""
    params = parameters()
    wrapper = in_lightning(
        MAKERS["SGD fused"](params), lightning.LightningModule(), gradient_clip_val=0.5
    )
    assert not takes_decision(wrapper)
    control = GradientControl(wrapper)
    control.backward(sum((param * param).sum() for param in params))
    control.step()
    before = torch.tensor([1.0, -2.0, 0.5])
    moved = before - torch.cat([param.detach() for param in params])
    torch.testing.assert_close(moved, 0.1 * 0.5 * (2 * before) / (2 * before).norm())


def half(part):
    """What precision="16-mixed" is on a GPU; on a CPU they take bfloat16 for it."""
    plugins = importlib.import_module(f"lightning.{part}.plugins")
    return plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


# --- a second scaler, and steps that would do nothing ---------------------------------------------


@pytest.mark.parametrize(
    "wrapper",
    [
        lambda inner: in_accelerate(inner, scaler=torch.amp.GradScaler("cpu")),
        lambda inner: in_accelerate(inner, scaler=GradScaler("cpu")),
        lambda inner: in_fabric(inner, plugins=[half("fabric")]),
        lambda inner: in_lightning(inner, plugins=[half("pytorch")]),
        lambda inner: in_fabric(in_accelerate(inner, scaler=torch.amp.GradScaler("cpu"))),
    ],
    ids=["accelerate", "accelerate with ours", "fabric", "lightning", "inside another"],
)
@pytest.mark.parametrize("name", ["AdamW fused", "Adam foreach"])
def test_a_framework_that_has_a_scaler_of_its_own_is_refused(wrapper, name):
    params = parameters()
    wrapped = wrapper(MAKERS[name](params))
    with pytest.raises(ValueError, match="steps through a scaler of its framework's"):
        GradientControl(wrapped)
    scaler = GradScaler("cpu")
    scaler.scale(sum(param.sum() for param in params)).backward()
    with pytest.raises(ValueError, match=r"gradilocks\.optim\.unwrapped"):
        scaler.step(wrapped)
    assert params[1].tolist() == [0.5]
    assert GradientControl(optim.unwrapped(wrapped)) is not None


def test_a_disabled_scaler_of_a_framework_is_no_second_one():
    ends = []
    for wrap in (lambda inner: inner, lambda inner: in_accelerate(inner, scaler=disabled())):
        params = parameters()
        by_control(params, wrap(MAKERS["AdamW fused"](params)), {})
        ends.append([param.detach() for param in params])
    assert all(map(torch.equal, *ends))


def disabled():
    return torch.amp.GradScaler("cpu", enabled=False)


def test_a_scaler_that_comes_later_is_refused_at_the_step():
    params = parameters()
    wrapped = in_accelerate(MAKERS["AdamW fused"](params))
    control = GradientControl(wrapped)
    wrapped.scaler = torch.amp.GradScaler("cpu")
    control.backward(sum(param.sum() for param in params))
    with pytest.raises(ValueError, match="second time"):
        control.step()
    with pytest.raises(ValueError, match="second time"):
        control.step(lambda: None)


def test_a_step_while_accelerate_accumulates_is_refused():
    params = parameters()
    forget()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = accelerator.prepare(MAKERS["AdamW fused"](params))
    control = GradientControl(optimizer)
    with accelerator.accumulate(model):
        control.backward(sum(param.sum() for param in params))
        assert not accelerator.sync_gradients
        with pytest.raises(ValueError, match="accumulating gradients"):
            control.step()
    with accelerator.accumulate(model):
        control.backward(sum(param.sum() for param in params))
        assert accelerator.sync_gradients
        outcome = control.step()
    assert outcome.norm == pytest.approx(2 * math.sqrt(3))


# --- frameworks that are not here -----------------------------------------------------------------


@each_fused
def test_all_optimizers_of_a_container_decide_inside(monkeypatch, name, multiplied):
    ends = []
    for wrap in (lambda pair: (in_a_container(pair, monkeypatch),), lambda pair: pair):
        params = parameters()
        optimizers = wrap([MAKERS[name]([param]) for param in params])
        control = GradientControl(*optimizers, clip=0.1)
        for step, factor in enumerate(FACTORS):
            control.zero_grad()
            loss = sum((param * param).sum() for param in params) * (0.1 * (step + 1)) * factor
            control.backward(loss)
            assert control.step().skipped == (not math.isfinite(factor))
        ends.append([param.detach() for param in params])
    assert all(map(torch.equal, *ends))
    assert multiplied == []
    pair = [MAKERS[name]([param]) for param in parameters()]
    assert optim.unwrapped(in_a_container(pair[:1], monkeypatch)) is pair[0]
    both = in_a_container(pair, monkeypatch)
    assert optim.unwrapped(both) is both


DEEPSPEED = """
class FP16_Optimizer:
    def __init__(self, init_optimizer):
        self.optimizer = init_optimizer
        self.param_groups = init_optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step()
"""


def test_an_optimizer_of_deepspeed_that_scales_by_itself_is_refused(monkeypatch):
    engine = module_called("deepspeed.runtime.fp16.fused_optimizer", DEEPSPEED, monkeypatch)
    wrapped = engine.FP16_Optimizer(MAKERS["AdamW fused"](parameters()))
    with pytest.raises(ValueError, match="scales, clips and skips inside its own step"):
        GradientControl(wrapped)


def test_wrappers_are_not_kept_alive():
    wrapper = in_accelerate(MAKERS["AdamW fused"](parameters()))
    assert takes_decision(wrapper)
    gone = weakref.ref(wrapper)
    del wrapper
    assert gone() is None
