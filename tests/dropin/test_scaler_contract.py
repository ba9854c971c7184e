"""What a loop written for torch's GradScaler relies on. Tests with `scaler_class` state a fact of torch's class."""

from __future__ import annotations

import inspect
import math
import warnings

import pytest
import torch
from torch.amp.grad_scaler import OptState

from dropin.loops import SCALERS, backward, iterate, sgd
from gradilocks import GradScaler

CPU = torch.device("cpu")


# --- class and state --------------------------------------------------------------------------------------------------


def test_torchs_parameters_come_first_and_ours_are_optional_keywords():
    assert issubclass(GradScaler, torch.amp.GradScaler)
    theirs = list(inspect.signature(torch.amp.GradScaler).parameters.values())
    ours = list(inspect.signature(GradScaler).parameters.values())
    for expected, got in zip(theirs, ours, strict=False):
        assert (got.name, got.default, got.kind) == (expected.name, expected.default, expected.kind)
    assert [option.name for option in ours[len(theirs) :]] == ["model", "min_scale", "max_scale"]
    for option in ours[len(theirs) :]:
        assert option.kind is inspect.Parameter.KEYWORD_ONLY
        assert option.default is not inspect.Parameter.empty


@pytest.mark.parametrize("name", [n for n, _ in inspect.getmembers(torch.amp.GradScaler, inspect.isfunction)])
def test_every_method_takes_torchs_arguments(name):
    expected = inspect.signature(getattr(torch.amp.GradScaler, name)).parameters
    got = inspect.signature(getattr(GradScaler, name)).parameters
    assert list(got)[: len(expected)] == list(expected)
    assert [got[key].default for key in expected] == [parameter.default for parameter in expected.values()]


@pytest.mark.parametrize("fused", [False, True])
def test_the_state_is_updated_in_place(scaler_class, param, fused):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0, growth_interval=2), sgd(param, fused=fused)
    scaler.scale(torch.ones(()))
    scale, tracker = scaler._scale, scaler._growth_tracker
    addresses = scale.data_ptr(), tracker.data_ptr()
    scales = set()
    for number in range(20):
        param.data.fill_(1.0)
        iterate(scaler, optimizer, param, value=math.inf if number % 7 == 3 else None)
        scales.add(scaler.get_scale())
    scaler.update(2.0)
    scaler.update(torch.tensor(4.0))
    scaler.load_state_dict({**scaler.state_dict(), "scale": 16.0, "_growth_tracker": 1})
    assert len(scales) > 3
    assert scaler._scale is scale
    assert scaler._growth_tracker is tracker
    assert (scale.data_ptr(), tracker.data_ptr()) == addresses
    assert (scale.item(), tracker.item()) == (16.0, 1)


# --- scale() ----------------------------------------------------------------------------------------------------------


def test_lists_tuples_and_nested_outputs_keep_their_types(scaler_class):
    class Losses(list):
        pass

    scaler, one = scaler_class("cpu", init_scale=8.0), torch.tensor(1.0)
    assert scaler.scale(torch.tensor([1.0, 2.0])).tolist() == [8.0, 16.0]
    for kind in (list, tuple, Losses):
        scaled = scaler.scale(kind([one, one]))
        assert type(scaled) is kind
        assert [t.item() for t in scaled] == [8.0, 8.0]
    first, (second, [third]) = scaler.scale([one, (2 * one, [3 * one])])
    assert [first.item(), second.item(), third.item()] == [8.0, 16.0, 24.0]


def test_other_iterables_are_scaled_lazily(scaler_class):
    produced = []

    def losses():
        for value in (1.0, 2.0):
            produced.append(value)
            yield torch.tensor(value)

    scaler = scaler_class("cpu", init_scale=8.0)
    scaled = scaler.scale(losses())
    assert produced == []
    assert scaler._scale is None
    assert next(scaled).item() == 8.0
    assert produced == [1.0]
    assert [t.item() for t in scaled] == [16.0]


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_scaled_loss_has_torchs_dtype_and_value(dtype, shape):
    loss = torch.full(shape, 1.5, dtype=dtype)
    expected, got = (scaler("cpu", init_scale=8.0).scale(loss) for scaler in SCALERS.values())
    assert got.dtype is expected.dtype
    assert torch.equal(got, expected)


# --- step() and unscale_() --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_grad_scale_of_the_user_is_multiplied_in_and_consumed(scaler_class, param, unscale_first):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param, fused=True)
    backward(scaler, param)
    optimizer.grad_scale = torch.tensor(2.0)
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert param.tolist() == [0.5, 1.0]
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_a_fused_step_sees_grad_scale_and_found_inf(scaler_class, param):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param, fused=True)
    seen = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: seen.append((opt.grad_scale, opt.found_inf)))
    backward(scaler, param)
    scaler.step(optimizer)
    assert [number.item() for number in seen[0]] == [8.0, 0.0]
    assert (seen[0][1].dtype, seen[0][1].shape) == (torch.float32, ())
    scaler.update()
    backward(scaler, param)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert seen[1][0] is None


class TakesScaler(torch.optim.SGD):
    """The older contract of apex and Transformer Engine."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, grad_scaler=None):
        self.scaler = grad_scaler
        grad_scaler.unscale_(self)
        if not sum(flag.item() for flag in grad_scaler._found_inf_per_device(self).values()):
            super().step()
        return "stepped"


def test_an_optimizer_that_takes_the_scaler_gets_it_with_a_warning(scaler_class, param):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), TakesScaler([param], lr=0.5)
    backward(scaler, param)
    with pytest.warns(FutureWarning, match="^GradScaler is going to stop passing itself"):
        assert scaler.step(optimizer) == "stepped"
    assert optimizer.scaler is scaler
    assert param.tolist() == [0.0, 0.0]
    with pytest.raises(RuntimeError, match=r"^step\(\) has already been called"):
        scaler.step(optimizer)
    scaler.update()
    assert scaler._get_growth_tracker() == 1


@pytest.mark.usefixtures("_kernels_on_cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "scale", [3.0, 3.0000002384185791015625]
)  # The latter's reciprocals in float32, float64 differ.
def test_gradients_unscaled_by_our_kernels_are_torchs_bit_for_bit(dtype, scale):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3)).to(dtype)
    grads = []
    for scaler_class in SCALERS.values():
        param = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
        scaler = scaler_class("cpu", init_scale=scale)
        scaler.scale(torch.ones(()))
        param.grad = values.clone()
        scaler.unscale_(sgd(param))
        grads.append(param.grad)
    assert grads[1].dtype is dtype
    assert torch.equal(*grads)


@pytest.mark.usefixtures("_kernels_on_cpu")
@pytest.mark.parametrize("layout", ["transposed", "every other", "channels last", "0-d", "empty"])
def test_gradients_of_any_layout_are_unscaled_in_place(scaler_class, layout):
    base = torch.arange(1.0, 121.0)
    grad = {
        "transposed": base.clone().view(12, 10).t(),
        "every other": base.clone()[::2],
        "channels last": base.clone().view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "0-d": base[4].clone(),
        "empty": torch.zeros(0, 3),
    }[layout]
    param = torch.nn.Parameter(torch.zeros_like(grad))
    scaler = scaler_class("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    expected, strides, param.grad = grad.clone() / 8.0, grad.stride(), grad
    scaler.unscale_(sgd(param))
    assert param.grad is grad
    assert grad.stride() == strides
    assert torch.equal(grad, expected)


@pytest.mark.usefixtures("_kernels_on_cpu")
def test_gradients_that_are_part_of_a_graph_are_unscaled(scaler_class):
    param = torch.nn.Parameter(torch.ones(300))
    scaler = scaler_class("cpu", init_scale=8.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns about the reference cycle.
        scaler.scale((param**3).sum()).backward(create_graph=True)
    scaler.unscale_(sgd(param))
    assert param.grad.requires_grad
    assert torch.equal(param.grad, torch.full((300,), 3.0))
    param.grad = None


def test_complex_gradients_are_unscaled():
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.tensor([8.0 + 16.0j, -4.0j])
    scaler.unscale_(sgd(param))
    assert param.grad.tolist() == [1.0 + 2.0j, -0.5j]


def sparse(indices, values):
    return torch.sparse_coo_tensor(torch.tensor(indices), values, (4,), check_invariants=True)


@pytest.mark.usefixtures("unscaled_by")
def test_fp16_sparse_gradients_are_coalesced_before_the_check(scaler_class):
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    optimizer, scaler = sgd(param), scaler_class("cpu")
    scaler.scale(torch.ones(()))
    values = torch.tensor([60_000.0, 60_000.0], dtype=torch.float16)
    for indices, expected in (([[1, 1]], 1.0), ([[1, 2]], 0.0)):  # Both values are finite, their sum is not.
        param.grad = sparse(indices, values)
        (flag,) = scaler._check_inf_per_device(optimizer).values()
        assert flag.item() == expected


@pytest.mark.usefixtures("unscaled_by")
def test_sparse_gradients_are_unscaled_or_skipped(scaler_class):
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.5)
    scaler = scaler_class("cpu", init_scale=8.0)
    scaler.scale((embedding(torch.tensor([1, 3, 1])) * 3.0).sum()).backward()
    scaler.unscale_(optimizer)
    assert embedding.weight.grad.is_sparse
    assert embedding.weight.grad.to_dense()[:, 0].tolist() == [0.0, 6.0, 0.0, 3.0, 0.0]
    before = embedding.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert (embedding.weight != before).any(dim=1).tolist() == [False, True, False, True, False]
    embedding.weight.grad = None
    before = embedding.weight.detach().clone()
    scaler.scale((embedding(torch.tensor([1, 3])) * math.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(embedding.weight, before)
    assert scaler.get_scale() == 4.0


@pytest.mark.usefixtures("unscaled_by")
@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_whose_shards_are_empty_still_has_a_flag(scaler_class, fused):
    param = torch.nn.Parameter(torch.zeros(0))
    optimizer, scaler = sgd(param, fused=fused), scaler_class("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.zeros(0)
    scaler.step(optimizer)
    assert {device: flag.item() for device, flag in scaler._found_inf_per_device(optimizer).items()} == {CPU: 0.0}
    scaler.update()
    assert scaler._get_growth_tracker() == 1


def test_a_disabled_scaler_passes_everything_through(scaler_class, param):
    scaler, optimizer = scaler_class("cpu", enabled=False), sgd(param)
    loss = (param * param).sum()
    assert scaler
    assert scaler.scale(loss) is loss
    assert scaler.scale("anything") == "anything"
    loss.backward()
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, closure=lambda: 3.0) == 3.0
    assert param.tolist() == [0.0, 0.0]
    param.grad[0] = math.nan
    scaler.step(optimizer)
    assert math.isnan(param[0].item())
    scaler.update(3.0)
    scaler.set_growth_interval(5)
    scaler.load_state_dict({"scale": 0.0})
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.state_dict()) == (1.0, 0, {})


# --- private names that other packages use ----------------------------------------------------------------------------


@pytest.mark.usefixtures("unscaled_by")
@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_the_flag_is_one_float32_per_device(scaler_class, param, value):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
    backward(scaler, param)
    param.grad[0] = value
    (flag,) = scaler._check_inf_per_device(optimizer).values()
    assert flag.item() == float(not math.isfinite(value))
    assert torch.equal(param.grad, torch.tensor([value, 32.0])) or math.isnan(value)  # Read only.
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    assert {device: (flag.dtype, flag.item()) for device, flag in found.items()} == {
        CPU: (torch.float32, float(not math.isfinite(value)))
    }


@pytest.mark.usefixtures("unscaled_by")
def test_fp16_gradients_are_unscaled_for_code_that_allows_it(scaler_class):
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler, optimizer = scaler_class("cpu", init_scale=1024.0), sgd(param)
    original = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda optimizer, inv, found, allow: original(optimizer, inv, found, True)
    backward(scaler, param)
    scaler.unscale_(optimizer)
    assert param.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("where", ["object", "subclass", "class"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_replaced_unscale_grads_is_called(scaler_class, param, monkeypatch, where, fused):
    factors = []
    original = scaler_class._unscale_grads_

    def raise_all_flags(self, optimizer, inv_scale, found_inf, allow_fp16):
        factors.append(float(inv_scale))
        flags = original(self, optimizer, inv_scale, found_inf, allow_fp16)
        return {device: torch.ones_like(flag) for device, flag in flags.items()}

    cls = scaler_class
    if where == "subclass":
        cls = type("Own", (cls,), {"_unscale_grads_": raise_all_flags})
    elif where == "class":
        monkeypatch.setattr(cls, "_unscale_grads_", raise_all_flags)
    scaler, optimizer = cls("cpu", init_scale=8.0), sgd(param, fused=fused)
    if where == "object":
        scaler._unscale_grads_ = raise_all_flags.__get__(scaler)
    backward(scaler, param)
    scaler.step(optimizer)
    scaler.update()
    assert factors == [1.0 if fused else 0.125]
    assert param.tolist() == [1.0, 2.0]
    assert scaler.get_scale() == 4.0


# --- the outcome ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_the_outcome_of_a_finite_step_has_no_culprits(param, fused, unscale_first):
    scaler, optimizer = GradScaler("cpu", init_scale=8.0), sgd(param, fused=fused)
    assert scaler.outcome is None
    backward(scaler, param)
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update(2.0)
    assert (scaler.outcome.skipped, scaler.outcome.scale, scaler.outcome.culprits) == (False, 8.0, ())
    assert repr(scaler.outcome) == "ScalerOutcome(skipped=False, scale=8, culprits=())"


@pytest.mark.parametrize("fused", [False, True])
def test_the_outcome_names_the_culprits_in_backward_order(fused):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0, model=model)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    model[0].bias.grad[1] = math.nan
    model[1].weight.grad[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.outcome.skipped, scaler.outcome.scale) == (True, 8.0)
    assert scaler.outcome.culprits == ("1.weight", "0.bias")
    optimizer.zero_grad()
    assert scaler.outcome.culprits == ("1.weight", "0.bias")  # They were read before.


def test_culprits_are_never_those_of_a_later_backward_pass(param):
    scaler, optimizer = GradScaler("cpu", init_scale=8.0), sgd(param)
    iterate(scaler, optimizer, param, value=math.inf)
    outcome = scaler.outcome
    backward(scaler, param)
    assert outcome.skipped
    assert outcome.culprits == ()


def test_the_outcome_is_that_of_the_latest_step_also_after_update(param):
    other = torch.nn.Parameter(torch.tensor([3.0]))
    scaler, first, second = GradScaler("cpu", init_scale=8.0), sgd(param), sgd(other)
    backward(scaler, param, other)
    param.grad[0] = math.nan
    scaler.unscale_(second)
    scaler.step(first)
    assert scaler.outcome.skipped
    scaler.step(second)
    scaler.update()  # torch adds the flags of all optimizers in place.
    assert not scaler.outcome.skipped
