"""What real code does with a scaler: schedulers, averaging, wrappers, checkpoints, copies.

Each habit is named after where it is met. The drop-in has to bear all of them.
"""

import copy
import gc
import inspect
import io
import math
import pickle
import warnings
import weakref

import pytest
import torch
from torch.amp.grad_scaler import OptState
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import gradilocks
from gradilocks import GradScaler

SCALERS = {"torch": torch.amp.GradScaler, "gradilocks": GradScaler}


@pytest.fixture(params=sorted(SCALERS))
def scaler_class(request):
    """Each test states a fact of torch's scaler, and that ours keeps it."""
    return SCALERS[request.param]


@pytest.fixture
def param():
    return torch.nn.Parameter(torch.tensor([1.0, 2.0]))


def sgd(*params, **settings):
    return torch.optim.SGD(list(params), lr=0.5, **settings)


def backward(scaler, *params):
    scaler.scale(sum((p * p).sum() for p in params)).backward()


def small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    )


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        inputs = torch.randn(16, 4, generator=generator)
        yield inputs, inputs.sum(dim=1, keepdim=True)


# --- learning-rate schedulers -----------------------------------------------------------------


def train(scaler_class, make_scheduler, *, fused=False, overflow_at=(), steps=6, **settings):
    """Trains with a scheduler; its learning rates, the weights, and the warnings on the way."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused, **settings)
    scheduler = make_scheduler(optimizer)
    scaler = scaler_class("cpu", init_scale=1024.0)
    rates = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, (inputs, targets) in enumerate(batches(steps)):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            scaler.scale(loss).backward()
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
    "make",
    [
        lambda opt: StepLR(opt, 2),
        lambda opt: CosineAnnealingLR(opt, 10),
        lambda opt: LambdaLR(opt, lambda epoch: 0.9**epoch),
        lambda opt: OneCycleLR(opt, max_lr=0.2, total_steps=10),
    ],
    ids=["StepLR", "CosineAnnealingLR", "LambdaLR", "OneCycleLR"],
)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflow_at", [(), (2,), (2, 3)], ids=["calm", "one skip", "two skips"])
def test_a_scheduler_sees_the_same_run(make, fused, overflow_at):
    expected = train(torch.amp.GradScaler, make, fused=fused, overflow_at=overflow_at)
    rates, weights, warned = train(GradScaler, make, fused=fused, overflow_at=overflow_at)
    assert rates == expected[0]
    assert torch.equal(weights, expected[1])
    assert warned == expected[2] == []


@pytest.mark.parametrize("fused", [False, True])
def test_a_scheduler_warns_after_a_skipped_first_step_only_where_torchs_does(fused):
    def make(optimizer):
        return StepLR(optimizer, 2)

    expected = train(torch.amp.GradScaler, make, fused=fused, overflow_at=(0,))
    rates, weights, warned = train(GradScaler, make, fused=fused, overflow_at=(0,))
    assert rates == expected[0]
    assert torch.equal(weights, expected[1])
    assert warned == expected[2]
    assert len(warned) == (0 if fused else 1)


def test_a_scheduler_does_not_warn_after_the_skipped_first_step_of_a_fused_sgd_with_momentum():
    *_, expected = train(
        torch.amp.GradScaler,
        lambda opt: StepLR(opt, 2),
        fused=True,
        overflow_at=(0,),
        steps=1,
        momentum=0.9,
    )
    *_, warned = train(
        GradScaler, lambda opt: StepLR(opt, 2), fused=True, overflow_at=(0,), momentum=0.9
    )
    assert expected == []
    assert warned == []


def test_the_scale_that_fell_tells_a_careful_loop_not_to_move_the_schedule(scaler_class, param):
    optimizer = sgd(param)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    scaler = scaler_class("cpu", init_scale=8.0)
    rates = []
    for number in range(4):
        param.data.fill_(1.0)
        optimizer.zero_grad()
        backward(scaler, param)
        if number == 1:
            param.grad[0] = math.inf
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.25, 0.25, 0.125, 0.0625]


# --- averaging --------------------------------------------------------------------------------


@pytest.mark.parametrize("ema", [False, True], ids=["SWA", "EMA"])
def test_weight_averaging_sees_the_same_run(ema):
    results = []
    for scaler_class in SCALERS.values():
        model = small_model()
        averaged = (
            AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            if ema
            else AveragedModel(model)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        scheduler = SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
        scaler = scaler_class("cpu", init_scale=1024.0, growth_interval=3)
        for number, (inputs, targets) in enumerate(batches(10)):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            scaler.scale(loss).backward()
            if number in (0, 4):
                model[3].bias.grad.fill_(math.nan)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            averaged.update_parameters(model)
        update_bn([inputs for inputs, _ in batches(3)], averaged)
        results.append((averaged.state_dict(), scaler.state_dict()))
    (their_weights, their_scaler), (our_weights, our_scaler) = results
    assert our_scaler == their_scaler
    assert our_weights.keys() == their_weights.keys()
    for name, tensor in their_weights.items():
        assert torch.equal(our_weights[name], tensor), name


# --- wrappers and foreign optimizers ----------------------------------------------------------


def test_a_positional_none_is_handed_on_as_accelerate_does(scaler_class, param):
    scaler = scaler_class("cpu", init_scale=8.0)
    backward(scaler, param)
    assert scaler.step(sgd(param), None) is None
    assert param.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("fused", [False, True])
def test_the_optimizers_step_is_looked_up_when_it_is_called(scaler_class, param, fused):
    # accelerate replaces `step` for one call, to learn whether it was skipped.
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param, fused=fused)
    original, called = optimizer.step, []

    def patched(*args, **kwargs):
        called.append(args)
        return original(*args, **kwargs)

    backward(scaler, param)
    optimizer.step = patched
    scaler.step(optimizer, None)
    optimizer.step = original
    scaler.update()
    assert called == [(None,)]
    assert param.tolist() == [0.0, 0.0]
    optimizer.zero_grad()
    backward(scaler, param)
    param.grad[0] = math.inf
    optimizer.step = patched
    scaler.step(optimizer, None)
    # Ours does not call what it does not know on a skipped step, so accelerate learns of the skip.
    assert len(called) == (2 if fused and scaler_class is torch.amp.GradScaler else 1)


@pytest.mark.parametrize(
    "name",
    [
        "torch",
        pytest.param(
            "gradilocks",
        ),
    ],
)
def test_an_optimizer_whose_step_was_replaced_is_not_kept_alive(name):
    def stepped():
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = sgd(param, fused=True)
        replace_step(optimizer)
        scaler = SCALERS[name]("cpu", init_scale=8.0)
        backward(scaler, param)
        scaler.step(optimizer)
        scaler.update()
        return weakref.ref(param)

    kept = stepped()
    gc.collect()
    assert kept() is None


def replace_step(optimizer):
    original = optimizer.step
    optimizer.step = lambda *args, **kwargs: original(*args, **kwargs)


class Foreign:
    """As fastai's: no torch optimizer, but it has `param_groups` and `step`."""

    def __init__(self, params):
        self.params = list(params)

    @property
    def param_groups(self):
        return [{"params": self.params, "lr": 0.5}]

    def step(self, *args):
        for param in self.params:
            param.data.sub_(param.grad * 0.5)
        return "stepped"


def test_any_object_with_param_groups_and_step_is_an_optimizer(scaler_class, param):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), Foreign([param])
    backward(scaler, param)
    scaler.unscale_(optimizer)
    assert param.grad.tolist() == [2.0, 4.0]
    assert scaler.step(optimizer) == "stepped"
    scaler.update()
    assert param.tolist() == [0.0, 0.0]
    param.grad = None
    scaler.scale(param.sum()).backward()
    param.grad[1] = math.nan
    assert scaler.step(optimizer) is None
    scaler.update()
    assert scaler.get_scale() == 4.0


class OwnKernel(torch.optim.SGD):
    """An optimizer that unscales and skips by itself, built on one of torch's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._step_supports_amp_scaling = True

    def step(self, closure=None):
        if self.found_inf.item():
            return
        scale = 1.0 if self.grad_scale is None else self.grad_scale
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad / scale, alpha=group["lr"])


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "torch",
        pytest.param(
            "gradilocks",
        ),
    ],
)
def test_an_optimizer_with_a_kernel_of_its_own_gets_the_scale_and_the_flag(
    param, name, unscale_first
):
    scaler, optimizer = SCALERS[name]("cpu", init_scale=8.0), OwnKernel([param], lr=0.5)
    for value in (math.inf, None):
        optimizer.zero_grad()
        backward(scaler, param)
        if value is not None:
            param.grad[0] = value
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert param.tolist() == ([0.0, 0.0] if value is None else [1.0, 2.0])


@pytest.mark.parametrize(
    "name",
    [
        "torch",
        pytest.param(
            "gradilocks",
        ),
    ],
)
def test_a_scaler_does_not_keep_a_model_alive(name):
    scaler = SCALERS[name]("cpu", init_scale=8.0)

    def trained():
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = sgd(param)
        backward(scaler, param)
        scaler.step(optimizer)
        scaler.update()
        return weakref.ref(param)

    kept = trained()
    gc.collect()
    assert kept() is None
    assert scaler._get_growth_tracker() == 1


@pytest.mark.parametrize(
    "name",
    [
        "torch",
        pytest.param(
            "gradilocks",
        ),
    ],
)
def test_a_client_may_unscale_by_itself_and_say_so(param, name):
    scaler, optimizer = SCALERS[name]("cpu", init_scale=8.0), sgd(param)
    backward(scaler, param)
    param.grad.div_(scaler.get_scale())
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"] = OptState.UNSCALED
    state["found_inf_per_device"] = {torch.device("cpu"): torch.zeros(())}
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [0.0, 0.0]


def test_the_scaler_is_truthy_as_ignite_and_torchtnt_ask(scaler_class):
    assert bool(scaler_class("cpu"))
    assert bool(scaler_class("cpu", enabled=False))


def test_the_constructors_signature_is_readable_by_name_as_fastai_reads_it():
    names = inspect.signature(GradScaler).parameters
    wanted = ["init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"]
    assert [name for name in names if name in wanted] == wanted
    assert set(wanted) <= set(inspect.signature(GradScaler.__init__).parameters)


def test_calls_go_by_keyword(scaler_class, param):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
    scaler.scale(outputs=(param * param).sum()).backward()
    scaler.unscale_(optimizer=optimizer)
    gradilocks.clip_grad_norm_(parameters=[param], max_norm=100.0)
    gradilocks.clip_grad_value_(parameters=[param], clip_value=100.0)
    scaler.step(optimizer=optimizer)
    scaler.update(new_scale=2.0)
    scaler.load_state_dict(state_dict=scaler.state_dict())
    scaler.set_growth_interval(new_interval=3)
    assert param.tolist() == [0.0, 0.0]
    assert scaler.get_scale() == 2.0


def test_a_nan_written_after_unscale_is_stepped(scaler_class, param):
    # torch's own tests demand it: after unscale_ the scaler does not look again.
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
    backward(scaler, param)
    scaler.unscale_(optimizer)
    param.grad[0] = math.nan
    scaler.step(optimizer)
    scaler.update()
    assert math.isnan(param[0].item())
    assert param[1].item() == 0.0
    assert scaler.get_scale() == 8.0


def test_a_gradient_penalty_goes_through_the_scale(scaler_class, param):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
    loss = (param**3).sum()
    (scaled,) = torch.autograd.grad(scaler.scale(loss), param, create_graph=True)
    penalty = (scaled / scaler.get_scale()).pow(2).sum().sqrt()
    scaler.scale(loss + penalty).backward()
    scaler.unscale_(optimizer)
    reference = param.detach().clone().requires_grad_()
    loss = (reference**3).sum()
    (grad,) = torch.autograd.grad(loss, reference, create_graph=True)
    (loss + grad.pow(2).sum().sqrt()).backward()
    torch.testing.assert_close(param.grad, reference.grad)


def test_the_skip_can_be_read_from_the_flags_as_lightning_and_others_do(scaler_class, param):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
    backward(scaler, param)
    param.grad[0] = math.inf
    scaler.step(optimizer)
    found = scaler._found_inf_per_device(optimizer).values()
    assert sum(flag.item() for flag in found) == 1.0


# --- surroundings -----------------------------------------------------------------------------


def scaled_clipped_and_stepped(scaler_class, clip, *, size, dtype, fused):
    param = torch.nn.Parameter(torch.ones(size, dtype=dtype, device="cpu"))
    optimizer = sgd(param, momentum=0.9, fused=fused)
    scaler = scaler_class("cpu", init_scale=8.0, growth_interval=2)
    for number in range(3):
        optimizer.zero_grad()
        backward(scaler, param)
        if number == 1:
            param.grad[0] = math.inf
        else:
            scaler.unscale_(optimizer)
            clip.clip_grad_norm_([param], 0.5)
            clip.clip_grad_value_([param], 0.25)
            norm = clip.get_total_norm([param.grad])
            clip.clip_grads_with_norm_([param], 10.0, norm)
        scaler.step(optimizer)
        scaler.update()
    scaler.update(torch.tensor(4.0, dtype=torch.float32, device="cpu"))
    return param.detach(), scaler.state_dict()


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float16], ids=str)
def another_default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(3),
        70_000,
    ],
)
@pytest.mark.usefixtures("another_default_dtype")
def test_the_default_dtype_of_the_process_does_not_matter(size, fused):
    settings = {"size": size, "dtype": torch.float32, "fused": fused}
    got, state = scaled_clipped_and_stepped(GradScaler, gradilocks, **settings)
    torch.set_default_dtype(torch.float32)
    expected, reference = scaled_clipped_and_stepped(GradScaler, gradilocks, **settings)
    assert torch.equal(got, expected)
    assert state == reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [3, 70_000])
def test_the_default_device_of_the_process_does_not_matter(size, dtype):
    # As under torch.set_default_device("cuda"), but on any machine.
    settings = {"size": size, "dtype": dtype, "fused": False}
    with torch.device("meta"):
        got, state = scaled_clipped_and_stepped(GradScaler, gradilocks, **settings)
    expected, reference = scaled_clipped_and_stepped(GradScaler, gradilocks, **settings)
    assert torch.equal(got, expected)
    assert state == reference


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_the_grad_mode_of_the_caller_does_not_matter(scaler_class, param, mode):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
    backward(scaler, param)
    with mode():
        scaler.unscale_(optimizer)
        gradilocks.clip_grad_norm_([param], 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert param.requires_grad
    assert param.tolist() == pytest.approx([1 - 0.5 / 5**0.5, 2 - 1 / 5**0.5], rel=1e-5)


# --- subclasses -------------------------------------------------------------------------------


def test_a_subclass_may_count_skips(param):
    class Counting(GradScaler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.skipped = 0

        def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
            flags = optimizer_state["found_inf_per_device"].values()
            self.skipped += int(any(flag.item() for flag in flags))
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)

    scaler, optimizer = Counting("cpu", init_scale=8.0), sgd(param)
    for value in (1.0, math.inf, math.nan):
        param.grad = None
        backward(scaler, param)
        param.grad[0] = value
        scaler.step(optimizer)
        scaler.update()
    assert scaler.skipped == 2


@pytest.mark.parametrize("fused", [False, True])
def test_a_subclass_may_reduce_the_flags_of_its_ranks(param, fused):
    class Reducing(GradScaler):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            flags = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
            for flag in flags.values():
                flag.fill_(1.0)  # Another rank found something.
            return flags

    scaler, optimizer = Reducing("cpu", init_scale=8.0), sgd(param, fused=fused)
    backward(scaler, param)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [1.0, 2.0]
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("torch", False),
        ("torch", True),
        ("gradilocks", False),
        pytest.param(
            "gradilocks",
            True,
        ),
    ],
)
def test_a_subclass_that_overrides_the_unscaling_is_asked_by_step_too(param, name, fused):
    calls = []

    class Watching(SCALERS[name]):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            calls.append((inv_scale.item(), allow_fp16))
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    scaler, optimizer = Watching("cpu", init_scale=8.0), sgd(param, fused=fused)
    backward(scaler, param)
    scaler.step(optimizer)
    assert calls == [(1.0, True) if fused else (0.125, False)]


@pytest.mark.parametrize(
    "name",
    [
        "torch",
        pytest.param(
            "gradilocks",
        ),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_a_subclass_may_unscale_all_by_itself(param, name, fused):
    class Own(SCALERS[name]):
        def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
            for group in optimizer.param_groups:
                for each in group["params"]:
                    each.grad.mul_(inv_scale)
            return {torch.device("cpu"): found_inf}

    scaler, optimizer = Own("cpu", init_scale=8.0), sgd(param, fused=fused)
    backward(scaler, param)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [0.0, 0.0]


def test_a_subclass_may_override_unscale(scaler_class, param):
    calls = []

    class Own(scaler_class):
        def unscale_(self, optimizer):
            calls.append("unscale_")
            super().unscale_(optimizer)

    scaler = Own("cpu", init_scale=8.0)
    backward(scaler, param)
    scaler.step(sgd(param))
    scaler.update()
    assert calls == ["unscale_"]
    assert param.tolist() == [0.0, 0.0]


# --- copies and checkpoints -------------------------------------------------------------------


def used(scaler_class, param):
    """A scaler after two iterations; nothing at its default."""
    scaler = scaler_class("cpu", 8.0, 4.0, 0.25, 3)
    optimizer = torch.optim.SGD([param], lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        backward(scaler, param)
        scaler.step(optimizer)
        scaler.update()
    return scaler, optimizer


COPIES = {
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_copy_before_the_first_scale_is_a_scaler_like_it(scaler_class, param, make):
    copied = make(scaler_class("cpu", 8.0, 4.0, 0.25, 3))
    assert type(copied) is scaler_class
    assert copied.state_dict() == scaler_class("cpu", 8.0, 4.0, 0.25, 3).state_dict()
    backward(copied, param)
    copied.step(sgd(param))
    copied.update()
    assert param.tolist() == [0.0, 0.0]
    assert copied._get_growth_tracker() == 1


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_used_scaler_goes_on_where_it_was(scaler_class, param, make):
    scaler, optimizer = used(scaler_class, param)
    copied = make(scaler)
    assert copied.state_dict() == scaler.state_dict()
    assert copied._get_growth_tracker() == 2
    optimizer.zero_grad()
    backward(copied, param)
    copied.step(optimizer)
    copied.update()
    assert copied.get_scale() == 32.0
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_disabled_scaler_can_be_copied(scaler_class, make):
    copied = make(scaler_class("cpu", enabled=False))
    assert not copied.is_enabled()
    assert copied.get_scale() == 1.0


def test_a_scaler_with_an_outcome_and_a_model_can_be_pickled(param):
    model = torch.nn.Linear(2, 1)
    scaler = GradScaler("cpu", init_scale=8.0, model=model)
    scaler.scale(model(torch.ones(2)).sum()).backward()
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler.update()
    assert scaler.outcome is not None
    copied = pickle.loads(pickle.dumps(scaler))
    assert copied.outcome is None
    assert copied.state_dict() == scaler.state_dict()


def test_a_copy_in_memory_still_names_the_culprits():
    model = torch.nn.Linear(2, 1)
    scaler = copy.copy(GradScaler("cpu", init_scale=8.0, model=model))
    scaler.scale(model(torch.ones(2)).sum()).backward()
    model.bias.grad.fill_(math.nan)
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert scaler.outcome.culprits == ("bias",)


def test_a_whole_trainer_can_be_copied(scaler_class):
    class Trainer:
        def __init__(self):
            self.model = torch.nn.Linear(2, 1)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
            self.scaler = scaler_class("cpu", init_scale=8.0)

        def step(self):
            self.optimizer.zero_grad()
            self.scaler.scale(self.model(torch.ones(2)).sum()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    trainer = Trainer()
    trainer.step()
    twin = copy.deepcopy(trainer)
    for _ in range(3):
        trainer.step()
        twin.step()
    assert torch.equal(twin.model.weight, trainer.model.weight)
    assert twin.scaler.state_dict() == trainer.scaler.state_dict()


@pytest.mark.parametrize("loader", sorted(SCALERS))
@pytest.mark.parametrize("saver", sorted(SCALERS))
def test_the_state_survives_torch_save_with_weights_only(saver, loader, param):
    scaler, _ = used(SCALERS[saver], param)
    file = io.BytesIO()
    torch.save({"scaler": scaler.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)["scaler"]
    assert state == {
        "scale": 8.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 3,
        "_growth_tracker": 2,
    }
    fresh = SCALERS[loader]("cpu")
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state


def test_a_run_resumed_from_a_checkpoint_is_bit_identical():
    def run(*, resume_at):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
        scaler = GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
        for number, (inputs, targets) in enumerate(batches(12)):
            if number == resume_at:
                file = io.BytesIO()
                parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
                torch.save({name: part.state_dict() for name, part in parts.items()}, file)
                file.seek(0)
                model = small_model()
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
                scaler = GradScaler("cpu")
                parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
                for name, state in torch.load(file, weights_only=True).items():
                    parts[name].load_state_dict(state)
            optimizer.zero_grad()
            scaler.scale(torch.nn.functional.mse_loss(model(inputs), targets)).backward()
            if number in (1, 7):
                model[3].bias.grad.fill_(math.inf)
            scaler.unscale_(optimizer)
            gradilocks.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        return model.state_dict(), scaler.state_dict()

    (weights, state), (resumed_weights, resumed_state) = run(resume_at=None), run(resume_at=5)
    assert resumed_state == state
    for name, tensor in weights.items():
        assert torch.equal(resumed_weights[name], tensor), name


def test_a_module_in_place_of_the_device_is_refused():
    with pytest.raises(TypeError, match=r"got a module. Write GradScaler\('cuda', model=model\)"):
        GradScaler(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["init_scale", "min_scale"])
def test_a_scale_that_is_no_number_is_refused(name):
    with pytest.raises(TypeError, match=f"{name} must be a number, got str"):
        GradScaler("cpu", **{name: "x"})
