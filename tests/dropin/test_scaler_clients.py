"""What other people's code does with a scaler: schedulers, averaging, wrappers, subclasses, copies, checkpoints."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
import weakref

import pytest
import torch
from torch.amp.grad_scaler import OptState
from torch.optim.lr_scheduler import OneCycleLR, StepLR

import gradilocks
from control.given_gradients import batches, loss_of, small_model
from dropin.loops import backward, iterate, sgd, two_weights
from gradilocks import GradScaler

# --- schedulers and averaging -----------------------------------------------------------------------------------------


def train(scaler_class, make_scheduler, *, fused, overflow_at, **settings):
    """Trains with a scheduler: its learning rates, the weights and the warnings."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused, **settings)
    scheduler, scaler, rates = make_scheduler(optimizer), scaler_class("cpu", init_scale=1024.0), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, batch in enumerate(batches(6)):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, *batch)).backward()
            if number in overflow_at:
                model[0].weight.grad[0, 0] = math.inf
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return rates, weights, [str(w.message) for w in caught]


@pytest.mark.parametrize(
    "make", [lambda o: StepLR(o, 2), lambda o: OneCycleLR(o, max_lr=0.2, total_steps=10, cycle_momentum=False)]
)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflow_at", [(), (0,), (2, 3)], ids=str)
def test_a_run_with_a_scheduler_is_torchs_bit_for_bit(make, fused, overflow_at):
    expected = train(torch.amp.GradScaler, make, fused=fused, overflow_at=overflow_at)
    rates, weights, warned = train(GradScaler, make, fused=fused, overflow_at=overflow_at)
    if fused:  # Ours discards the momentum of a skipped first step, and schedulers do not notice.
        assert train(GradScaler, make, fused=True, overflow_at=overflow_at, momentum=0.9)[2] == []
    assert rates == expected[0]
    assert torch.equal(weights, expected[1])
    assert warned == expected[2]
    assert len(warned) == (not fused and overflow_at == (0,))


# --- wrappers and optimizers of other packages ------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_the_optimizers_step_is_looked_up_when_it_is_called(scaler_class, param, fused):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param, fused=fused)
    original, calls = optimizer.step, []

    def patched(*args, **kwargs):  # accelerate replaces `step` for one call and passes a positional None.
        calls.append(args)
        return original(*args, **kwargs)

    backward(scaler, param)
    optimizer.step = patched
    assert scaler.step(optimizer, None) is None
    optimizer.step = original
    scaler.update()
    assert calls == [(None,)]
    assert param.tolist() == [0.0, 0.0]


class Foreign:
    """As in fastai: not a torch optimizer, but with `param_groups` and `step`."""

    def __init__(self, params):
        self.params = list(params)

    @property
    def param_groups(self):
        return [{"params": self.params, "lr": 0.5}]

    def step(self, *args):
        for param in self.params:
            param.data.sub_(param.grad * 0.5)
        return "stepped"


@pytest.mark.usefixtures("unscaled_by")
def test_any_object_with_param_groups_and_step_is_an_optimizer(scaler_class, param):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), Foreign([param])
    backward(scaler, param)
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer) == "stepped"
    scaler.update()
    assert param.tolist() == [0.0, 0.0]
    param.grad = torch.tensor([1.0, math.nan])
    assert scaler.step(optimizer) is None
    scaler.update()
    assert scaler.get_scale() == 4.0


class OwnKernel(torch.optim.SGD):
    """Unscales and skips by itself."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._step_supports_amp_scaling = True

    def step(self, closure=None):
        if not self.found_inf.item():
            scale = 1.0 if self.grad_scale is None else self.grad_scale
            for param in self.param_groups[0]["params"]:
                param.data.sub_(param.grad / scale, alpha=self.param_groups[0]["lr"])
        self.found_inf.fill_(1.0)  # Must not reach the scaler.


@pytest.mark.parametrize("unscale_first", [False, True])
def test_an_optimizer_with_a_kernel_of_its_own_gets_the_scale_and_the_flag(scaler_class, param, unscale_first):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), OwnKernel([param], lr=0.5)
    for value, expected in ((math.inf, [1.0, 2.0]), (None, [0.0, 0.0])):
        optimizer.zero_grad()
        backward(scaler, param)
        if value is not None:
            param.grad[0] = value
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert param.tolist() == expected
        assert scaler.get_scale() == 4.0


def test_a_scaler_does_not_keep_a_model_alive(scaler_class):
    scaler = scaler_class("cpu", init_scale=8.0)

    def trained():
        param = two_weights()
        iterate(scaler, sgd(param), param)
        return weakref.ref(param)

    reference = trained()
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("fused", [False, True])
def test_code_may_unscale_by_itself_and_set_stage_and_flag(scaler_class, param, fused):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param, fused=fused)
    for flag, expected in ((1.0, [1.0, 2.0]), (0.0, [0.0, 0.0])):
        optimizer.zero_grad()
        backward(scaler, param)
        param.grad.div_(scaler.get_scale())
        state = scaler._per_optimizer_states[id(optimizer)]
        state["stage"], state["found_inf_per_device"] = OptState.UNSCALED, {torch.device("cpu"): torch.tensor(flag)}
        scaler.step(optimizer)
        scaler.update()
        assert param.tolist() == expected
    assert scaler.get_scale() == 4.0


# --- surroundings -----------------------------------------------------------------------------------------------------


def scaled_clipped_and_stepped(dtype, fused):
    param = torch.nn.Parameter(torch.ones(3, dtype=dtype, device="cpu"))
    optimizer, scaler = sgd(param, momentum=0.9, fused=fused), GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for number in range(3):
        optimizer.zero_grad()
        backward(scaler, param)
        scaler.unscale_(optimizer)
        gradilocks.clip_grad_norm_([param], 0.5)
        gradilocks.clip_grad_norm_([param], 10.0, 3.0)
        gradilocks.clip_grad_value_([param], 0.25)
        gradilocks.clip_grads_with_norm_([param], 10.0, gradilocks.get_total_norm([param.grad]))
        if number == 1:
            param.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
    return param.detach(), scaler.state_dict(), scaler.outcome.culprits


@pytest.mark.usefixtures("_kernels_on_cpu", "cpu_backend")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_defaults_of_the_process_do_not_matter(dtype, fused):
    expected, *rest = scaled_clipped_and_stepped(torch.float32, fused)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), torch.inference_mode(False), torch.enable_grad():
            got, *others = scaled_clipped_and_stepped(torch.float32, fused)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(got, expected)
    assert others == rest


# --- subclasses -------------------------------------------------------------------------------------------------------


def test_a_subclass_may_count_skips(scaler_class, param):
    class Counting(scaler_class):
        skips = 0

        def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
            self.skips += any(flag.item() for flag in optimizer_state["found_inf_per_device"].values())
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    scaler, optimizer = Counting("cpu", init_scale=8.0), sgd(param)
    for value in (1.0, math.inf, math.nan):
        iterate(scaler, optimizer, param, value=value)
    assert scaler.skips == 2


# --- copies and checkpoints -------------------------------------------------------------------------------------------

COPIES = {"pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)), "deepcopy": copy.deepcopy, "copy": copy.copy}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_copy_continues_where_the_scaler_was(scaler_class, param, make, steps):
    scaler, optimizer = scaler_class("cpu", 8.0, 4.0, 0.25, 3), sgd(param, lr=0.01)
    for _ in range(steps):
        iterate(scaler, optimizer, param)
    copied = make(scaler)
    assert type(copied) is scaler_class
    assert copied.state_dict() == scaler.state_dict()
    for _ in range(3 - steps):
        iterate(copied, optimizer, param)
    assert copied.get_scale() == 32.0
    assert scaler.get_scale() == 8.0
    assert not make(scaler_class("cpu", enabled=False)).is_enabled()


def test_a_pickled_scaler_keeps_its_bounds_and_drops_model_and_outcome(param):
    scaler = GradScaler("cpu", init_scale=8.0, min_scale=4.0, max_scale=16.0, model=small_model())
    iterate(scaler, sgd(param), param)
    copied = pickle.loads(pickle.dumps(scaler))
    assert copied.outcome is None
    copied.scale(torch.ones(()))
    for new_scale, expected in ((100.0, 16.0), (1.0, 4.0)):
        copied.update(new_scale)
        assert copied.get_scale() == expected
    optimizer = sgd(param)
    iterate(copied, optimizer, param, value=math.inf)
    assert copied.outcome.culprits == ("param_groups[0]['params'][0]",)
