"""What a loop written for torch's GradScaler may count on, each fact checked on both."""

import copy
import inspect
import math
import warnings

import pytest
import torch
from torch.amp.grad_scaler import OptState

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
    """Gradients [2, 4] times the scale for a parameter [1, 2]."""
    scaler.scale(sum((p * p).sum() for p in params)).backward()


def iterate(scaler, optimizer, params, *, broken=False):
    optimizer.zero_grad()
    backward(scaler, *params)
    if broken:
        params[0].grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()


# --- the class --------------------------------------------------------------------------------


def test_it_is_a_torch_grad_scaler():
    assert isinstance(GradScaler("cpu"), torch.amp.GradScaler)
    assert issubclass(GradScaler, torch.amp.GradScaler)


def test_the_first_six_parameters_are_those_of_torch():
    theirs = list(inspect.signature(torch.amp.GradScaler).parameters.values())
    ours = list(inspect.signature(GradScaler).parameters.values())
    assert len(theirs) == 6
    for expected, got in zip(theirs, ours, strict=False):
        assert (got.name, got.default, got.kind) == (expected.name, expected.default, expected.kind)


def test_our_own_options_are_keyword_only_and_optional():
    added = list(inspect.signature(GradScaler).parameters.values())[6:]
    assert added
    for option in added:
        assert option.kind is inspect.Parameter.KEYWORD_ONLY
        assert option.default is not inspect.Parameter.empty


def test_all_six_arguments_go_by_position(scaler_class):
    scaler = scaler_class("cpu", 4.0, 3.0, 0.25, 7, True)
    assert scaler.state_dict() == {
        "scale": 4.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 0,
    }


@pytest.mark.parametrize(
    "name", [n for n, _ in inspect.getmembers(torch.amp.GradScaler, inspect.isfunction)]
)
def test_every_method_of_torch_takes_the_same_arguments(name):
    expected = inspect.signature(getattr(torch.amp.GradScaler, name)).parameters
    got = inspect.signature(getattr(GradScaler, name)).parameters
    assert list(got)[: len(expected)] == list(expected)
    for argument, parameter in expected.items():
        assert got[argument].default == parameter.default


def test_without_cuda_the_default_device_warns_at_the_callers_line_and_disables(scaler_class):
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA, so nothing is disabled")
    with pytest.warns(UserWarning, match="enabled, but CUDA is not available.  Disabling.") as got:
        scaler = scaler_class()
    assert not scaler.is_enabled()
    assert [w.filename for w in got] == [__file__]


def test_the_default_device_does_not_warn_when_disabled(scaler_class):
    assert not scaler_class(enabled=False).is_enabled()


# --- state ------------------------------------------------------------------------------------


def test_the_state_is_made_by_the_first_scale(scaler_class):
    scaler = scaler_class("cpu", init_scale=8.0)
    assert scaler._scale is None
    assert scaler._growth_tracker is None
    assert scaler.get_scale() == 8.0
    scaler.scale(torch.ones(3))
    assert (scaler._scale.dtype, scaler._scale.shape) == (torch.float32, ())
    assert (scaler._growth_tracker.dtype, scaler._growth_tracker.shape) == (torch.int32, ())
    assert scaler._scale.device == torch.device("cpu")
    assert scaler.get_scale() == 8.0


def test_an_empty_list_does_not_make_the_state(scaler_class):
    scaler = scaler_class("cpu")
    assert scaler.scale([]) == []
    assert scaler._scale is None


def test_the_state_is_updated_in_place_for_ever_after(scaler_class, param):
    scaler = scaler_class("cpu", init_scale=8.0, growth_interval=2)
    optimizer = sgd(param)
    scaler.scale(torch.ones(()))
    scale, tracker = scaler._scale, scaler._growth_tracker
    places = scale.data_ptr(), tracker.data_ptr()
    seen = set()
    for number in range(50):
        param.data.fill_(1.0)
        iterate(scaler, optimizer, [param], broken=number % 7 == 3)
        seen.add(scaler.get_scale())
    scaler.update(2.0)
    scaler.update(torch.tensor(4.0))
    scaler.load_state_dict({**scaler.state_dict(), "scale": 16.0, "_growth_tracker": 1})
    assert len(seen) > 3
    assert scaler._scale is scale
    assert scaler._growth_tracker is tracker
    assert (scale.data_ptr(), tracker.data_ptr()) == places
    assert (scale.item(), tracker.item()) == (16.0, 1)


def test_the_state_dict_has_the_five_keys_in_order(scaler_class):
    assert list(scaler_class("cpu").state_dict()) == [
        "scale",
        "growth_factor",
        "backoff_factor",
        "growth_interval",
        "_growth_tracker",
    ]


def test_the_state_dict_holds_plain_numbers(scaler_class, param):
    scaler = scaler_class("cpu", init_scale=8.0)
    iterate(scaler, sgd(param), [param])
    kinds = [type(value) for value in scaler.state_dict().values()]
    assert kinds == [float, float, float, int, int]


def test_a_state_loaded_before_the_first_scale_seeds_what_is_made_then(scaler_class, param):
    state = {
        "scale": 32.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.125,
        "growth_interval": 3,
        "_growth_tracker": 2,
    }
    scaler = scaler_class("cpu", init_scale=8.0)
    scaler.load_state_dict(state)
    assert scaler._scale is None
    assert scaler.state_dict() == state
    iterate(scaler, sgd(param), [param])
    assert scaler.get_scale() == 128.0
    assert scaler._get_growth_tracker() == 0


@pytest.mark.parametrize(
    ("saver", "loader"), [("torch", "gradilocks"), ("gradilocks", "torch"), ("gradilocks",) * 2]
)
def test_checkpoints_go_both_ways_with_no_field_at_its_default(saver, loader, param):
    first = SCALERS[saver]("cpu", 8.0, 3.0, 0.3, 11)
    for _ in range(2):
        iterate(first, sgd(param), [param])
    second = SCALERS[loader]("cpu")
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.state_dict() == {
        "scale": 8.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.3,
        "growth_interval": 11,
        "_growth_tracker": 2,
    }


def test_getters_and_setters_agree(scaler_class):
    scaler = scaler_class("cpu")
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(5)
    assert scaler.get_growth_factor() == 3.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 5


# --- scale() ----------------------------------------------------------------------------------


def test_a_tensor_is_scaled(scaler_class):
    assert scaler_class("cpu", init_scale=8.0).scale(torch.tensor([1.0, 2.0])).tolist() == [8, 16]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_or_tuple_keeps_its_type(scaler_class, kind):
    scaled = scaler_class("cpu", init_scale=8.0).scale(kind([torch.tensor(1.0), torch.tensor(2.0)]))
    assert type(scaled) is kind
    assert [t.item() for t in scaled] == [8.0, 16.0]


def test_a_subclass_of_list_keeps_its_type(scaler_class):
    class Losses(list):
        pass

    scaled = scaler_class("cpu", init_scale=8.0).scale(Losses([torch.tensor(1.0)]))
    assert type(scaled) is Losses


def test_another_iterable_comes_back_lazily(scaler_class):
    taken = []

    def losses():
        for value in (1.0, 2.0):
            taken.append(value)
            yield torch.tensor(value)

    scaler = scaler_class("cpu", init_scale=8.0)
    scaled = scaler.scale(losses())
    assert not isinstance(scaled, (list, tuple))
    assert taken == []
    assert scaler._scale is None
    assert next(scaled).item() == 8.0
    assert taken == [1.0]
    assert [t.item() for t in scaled] == [16.0]


def test_nested_outputs_keep_their_shape(scaler_class):
    scaler = scaler_class("cpu", init_scale=8.0)
    first, (second, [third]) = scaler.scale(
        [torch.tensor(1.0), (torch.tensor(2.0), [torch.tensor(3.0)])]
    )
    assert [first.item(), second.item(), third.item()] == [8.0, 16.0, 24.0]
    scaled = scaler.scale([torch.tensor(1.0), (t for t in [torch.tensor(2.0)])])
    assert type(scaled) is list
    assert [t.item() for t in scaled[1]] == [16.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_scaled_loss_keeps_torchs_dtype(dtype):
    for shape in ((), (3,)):
        loss = torch.ones(shape, dtype=dtype)
        expected = torch.amp.GradScaler("cpu", init_scale=8.0).scale(loss)
        got = GradScaler("cpu", init_scale=8.0).scale(loss)
        assert got.dtype is expected.dtype
        assert torch.equal(got, expected)


def test_scale_is_differentiable_twice(scaler_class):
    x = torch.tensor(3.0, requires_grad=True)
    scaler = scaler_class("cpu", init_scale=8.0)
    (first,) = torch.autograd.grad(scaler.scale(x**3), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert first.item() == 8.0 * 27.0
    assert second.item() == 8.0 * 18.0


# --- update() ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "new_scale",
    [
        2.0,
        torch.tensor(2.0),
        torch.tensor(2.0, dtype=torch.float64),
        torch.tensor(2),
        pytest.param(
            torch.tensor(2.0, dtype=torch.float16),
        ),
        pytest.param(
            torch.tensor(2.0, dtype=torch.bfloat16),
        ),
    ],
    ids=["float", "float32", "float64", "int64", "float16", "bfloat16"],
)
def test_a_new_scale_leaves_the_tracker_and_clears_the_optimizers(param, new_scale):
    for scaler_class in SCALERS.values():
        scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
        iterate(scaler, optimizer, [param])
        backward(scaler, param)
        param.grad[0] = math.inf
        scaler.unscale_(optimizer)
        scaler.update(new_scale)
        assert scaler.get_scale() == 2.0
        assert scaler._get_growth_tracker() == 1
        assert len(scaler._per_optimizer_states) == 0


def test_a_new_scale_tensor_is_copied(scaler_class):
    scaler = scaler_class("cpu")
    scaler.scale(torch.ones(()))
    new_scale = torch.tensor(2.0)
    scaler.update(new_scale)
    new_scale.fill_(5.0)
    assert scaler.get_scale() == 2.0


def test_a_new_scale_of_shape_one_works():
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.update(torch.tensor([2.0]))
    assert scaler.get_scale() == 2.0


def test_the_scale_grows_after_the_interval_and_backs_off_at_once(scaler_class, param):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0, growth_interval=3), sgd(param)
    history = []
    for broken in (False, False, False, False, True, False):
        param.data.fill_(1.0)
        iterate(scaler, optimizer, [param], broken=broken)
        history.append((scaler.get_scale(), scaler._get_growth_tracker()))
    assert history == [(8.0, 1), (8.0, 2), (16.0, 0), (16.0, 1), (8.0, 0), (8.0, 1)]


def test_growth_stops_at_the_largest_float32_and_the_tracker_still_resets(scaler_class, param):
    scaler = scaler_class("cpu", init_scale=2.0**127, growth_interval=2)
    optimizer = sgd(param)
    for expected in (1, 0, 1, 0):
        scaler.scale(torch.ones(()))
        param.grad = torch.zeros(2)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**127
        assert scaler._get_growth_tracker() == expected


def test_a_growth_that_would_pass_max_scale_is_not_taken(param):
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1, max_scale=20.0)
    optimizer = sgd(param)
    scales = []
    for _ in range(3):
        iterate(scaler, optimizer, [param])
        scales.append(scaler.get_scale())
    assert scales == [16.0, 16.0, 16.0]


def test_update_without_any_broken_gradient_does_not_need_every_optimizer(scaler_class, param):
    other = torch.nn.Parameter(torch.ones(1))
    scaler = scaler_class("cpu", init_scale=8.0)
    idle = sgd(other)
    iterate(scaler, sgd(param), [param])
    assert scaler._get_growth_tracker() == 1
    assert other.grad is None
    assert idle.state_dict()["state"] == {}


# --- step() and unscale_() --------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_step_returns_what_the_optimizer_returns(scaler_class, param, fused):
    scaler = scaler_class("cpu", init_scale=8.0)
    backward(scaler, param)
    assert scaler.step(sgd(param, fused=fused), lambda: 7.0) == 7.0


def test_step_returns_none_when_skipped(scaler_class, param):
    scaler = scaler_class("cpu", init_scale=8.0)
    backward(scaler, param)
    param.grad[0] = math.nan
    assert scaler.step(sgd(param), lambda: 7.0) is None
    assert param.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_skip_is_per_optimizer_and_the_scale_is_shared(scaler_class, param, fused, value):
    other = torch.nn.Parameter(torch.tensor([3.0]))
    broken, healthy = sgd(param, fused=fused), sgd(other, fused=fused)
    scaler = scaler_class("cpu", init_scale=8.0)
    backward(scaler, param, other)
    param.grad[1] = value
    scaler.step(broken)
    scaler.step(healthy)
    scaler.update()
    assert param.tolist() == [1.0, 2.0]
    assert other.tolist() == [0.0]
    assert scaler.get_scale() == 4.0
    assert scaler._get_growth_tracker() == 0


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_grad_scale_that_the_user_set_is_multiplied_in_and_consumed(
    scaler_class, param, unscale_first
):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param, fused=True)
    backward(scaler, param)
    optimizer.grad_scale = torch.tensor(2.0)
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    # Gradients [2, 4], halved by the user's scale, learning rate 0.5.
    assert param.tolist() == [0.5, 1.0]
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


def test_a_fused_step_sees_grad_scale_and_found_inf_and_they_are_gone_afterwards(
    scaler_class, param
):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param, fused=True)
    seen = []
    optimizer.register_step_pre_hook(
        lambda opt, args, kwargs: seen.append((opt.grad_scale, opt.found_inf))
    )
    backward(scaler, param)
    scaler.step(optimizer)
    (grad_scale, found_inf) = seen[0]
    assert grad_scale.item() == 8.0
    assert found_inf.item() == 0.0
    assert (found_inf.dtype, found_inf.shape) == (torch.float32, ())
    assert not hasattr(optimizer, "grad_scale")
    scaler.update()
    backward(scaler, param)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert seen[1][0] is None


class TakesScaler(torch.optim.SGD):
    """An optimizer of the older contract, as apex's and Transformer Engine's."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, grad_scaler=None):
        self.got = grad_scaler
        grad_scaler.unscale_(self)
        found = grad_scaler._found_inf_per_device(self).values()
        if not sum(flag.item() for flag in found):
            super().step()
        return "stepped"


def test_an_optimizer_that_asks_for_the_scaler_gets_it_with_a_warning(scaler_class, param):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), TakesScaler([param], lr=0.5)
    backward(scaler, param)
    with pytest.warns(
        FutureWarning,
        match="^GradScaler is going to stop passing itself as a keyword argument to the passed",
    ) as got:
        assert scaler.step(optimizer) == "stepped"
    assert [w.filename for w in got] == [__file__]
    assert optimizer.got is scaler
    assert param.tolist() == [0.0, 0.0]
    assert not hasattr(optimizer, "grad_scale")
    with pytest.raises(RuntimeError, match=r"^step\(\) has already been called"):
        scaler.step(optimizer)
    scaler.update()
    assert scaler._get_growth_tracker() == 1


@pytest.mark.parametrize(
    "given",
    [
        {},
        pytest.param(
            {"grad_scaler": None},
        ),
    ],
    ids=["", "by the caller too"],
)
def test_the_scaler_that_is_handed_over_wins_over_the_callers(param, given):
    for scaler_class in SCALERS.values():
        param.grad = None
        scaler, optimizer = scaler_class("cpu", init_scale=8.0), TakesScaler([param], lr=0.5)
        backward(scaler, param)
        with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
            scaler.step(optimizer, **given)
        assert optimizer.got is scaler


def test_the_reciprocal_is_that_of_float64(scaler_class):
    scale = 3.0000002384185791015625  # A float32 whose float32 and float64 reciprocals differ.
    param = torch.nn.Parameter(torch.ones(1))
    scaler = scaler_class("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    param.grad = torch.ones(1)
    scaler.unscale_(sgd(param))
    assert param.grad.item() == torch.tensor(1.0 / scale, dtype=torch.float32).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_unscaled_gradients_are_torchs_bit_for_bit(dtype):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3)).to(dtype)
    grads = {}
    for name, scaler_class in SCALERS.items():
        param = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
        scaler = scaler_class("cpu", init_scale=3.0)
        scaler.scale(torch.ones(()))
        param.grad = values.clone()
        scaler.unscale_(sgd(param))
        grads[name] = param.grad
    assert grads["gradilocks"].dtype is dtype
    assert torch.equal(grads["gradilocks"], grads["torch"])


@pytest.mark.parametrize(
    "layout", ["transposed", "every other", "channels last", "0-d", "expanded once", "empty"]
)
def test_gradients_of_any_layout_are_unscaled_in_place(scaler_class, layout):
    base = torch.arange(1.0, 121.0)
    grad = {
        "transposed": base.clone().view(12, 10).t(),
        "every other": base.clone()[::2],
        "channels last": base.clone().view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "0-d": base[4].clone(),
        "expanded once": base.clone().view(120, 1).expand(120, 1),
        "empty": torch.zeros(0, 3),
    }[layout]
    param = torch.nn.Parameter(torch.zeros_like(grad))
    scaler = scaler_class("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    expected, strides = grad.clone() / 8.0, grad.stride()
    param.grad = grad
    scaler.unscale_(sgd(param))
    assert param.grad is grad
    assert grad.stride() == strides
    assert torch.equal(grad, expected)


def test_large_gradients_that_are_part_of_a_graph_are_unscaled(scaler_class):
    param = torch.nn.Parameter(torch.ones(300_000))
    scaler = scaler_class("cpu", init_scale=8.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of the cycle that this makes.
        scaler.scale((param**3).sum()).backward(create_graph=True)
    assert param.grad.requires_grad
    scaler.unscale_(sgd(param))
    assert torch.equal(param.grad, torch.full((300_000,), 3.0))
    param.grad = None


def sparse(indices, values):
    return torch.sparse_coo_tensor(torch.tensor(indices), values, (4,), check_invariants=True)


def test_fp16_sparse_gradients_are_coalesced_before_the_check(scaler_class):
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    optimizer = sgd(param)
    scaler = scaler_class("cpu")
    scaler.scale(torch.ones(()))
    values = torch.tensor([60_000.0, 60_000.0], dtype=torch.float16)
    param.grad = sparse([[1, 1]], values)
    assert not param.grad.is_coalesced()
    (flag,) = scaler._check_inf_per_device(optimizer).values()
    assert flag.item() == 1.0  # Each value is finite; their sum is not.
    param.grad = sparse([[1, 2]], values)
    (flag,) = scaler._check_inf_per_device(optimizer).values()
    assert flag.item() == 0.0


def test_sparse_gradients_are_unscaled(scaler_class):
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


def test_a_broken_sparse_gradient_is_skipped(scaler_class):
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
    scaler = scaler_class("cpu", init_scale=8.0)
    scaler.scale((embedding(torch.tensor([1, 3])) * math.inf).sum()).backward()
    before = embedding.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(embedding.weight, before)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_shard_that_is_all_empty_still_has_an_entry(scaler_class, fused):
    param = torch.nn.Parameter(torch.zeros(0))
    optimizer = sgd(param, fused=fused)
    scaler = scaler_class("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.zeros(0)
    scaler.step(optimizer)
    flags = scaler._found_inf_per_device(optimizer)
    assert {device: flag.item() for device, flag in flags.items()} == {torch.device("cpu"): 0.0}
    scaler.update()
    assert scaler._get_growth_tracker() == 1


def test_gradients_of_several_dtypes_in_one_optimizer_work(scaler_class):
    params = [
        torch.nn.Parameter(torch.ones(2, dtype=dtype))
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ]
    scaler = scaler_class("cpu", init_scale=8.0)
    scaler.scale(sum((p * p).sum().double() for p in params)).backward()
    scaler.unscale_(sgd(*params))
    assert [p.grad.tolist() for p in params] == [[2.0, 2.0]] * 3


def test_accumulated_gradients_are_unscaled_once(scaler_class, param):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
    for _ in range(3):
        backward(scaler, param)
    scaler.step(optimizer)
    assert param.tolist() == [1.0 - 3.0, 2.0 - 6.0]


# --- disabled ---------------------------------------------------------------------------------


def test_a_disabled_scaler_lets_everything_pass(scaler_class, param):
    scaler, optimizer = scaler_class("cpu", enabled=False), sgd(param)
    loss = (param * param).sum()
    losses = [loss]
    assert scaler.scale(loss) is loss
    assert scaler.scale(losses) is losses
    assert scaler.scale("anything") == "anything"
    loss.backward()
    assert scaler.unscale_(optimizer) is None
    assert scaler.unscale_(optimizer) is None
    assert scaler.step(optimizer, closure=lambda: 3.0) == 3.0
    assert param.tolist() == [0.0, 0.0]
    param.grad[0] = math.nan
    scaler.step(optimizer)
    assert math.isnan(param[0].item())
    scaler.update()
    scaler.update(3.0)
    assert scaler.get_scale() == 1.0
    assert scaler._get_growth_tracker() == 0
    assert scaler.state_dict() == {}
    assert not scaler.is_enabled()


# --- the private surface that other packages reach for ----------------------------------------


def test_the_stage_of_each_optimizer_can_be_read(scaler_class, param):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
    assert scaler._per_optimizer_states[id(optimizer)] == {
        "stage": OptState.READY,
        "found_inf_per_device": {},
    }
    backward(scaler, param)
    scaler.unscale_(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
    scaler.step(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED
    scaler.update()
    assert len(scaler._per_optimizer_states) == 0


@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_the_flag_of_each_device_can_be_read(scaler_class, param, value):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
    backward(scaler, param)
    param.grad[0] = value
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    (flag,) = found.values()
    assert list(found) == [torch.device("cpu")]
    assert flag.dtype is torch.float32
    assert flag.item() == float(not math.isfinite(value))


def test_a_flag_that_somebody_else_raised_skips_the_step(scaler_class, param):
    # Megatron-like code reduces the flags over its ranks between unscale_ and step.
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
    backward(scaler, param)
    scaler.unscale_(optimizer)
    for flag in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        flag.fill_(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [1.0, 2.0]
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("value", [1.0, math.inf])
def test_the_inf_check_reads_and_does_not_write(scaler_class, param, value):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
    backward(scaler, param)
    param.grad[0] = value
    (flag,) = scaler._check_inf_per_device(optimizer).values()
    assert flag.item() == float(not math.isfinite(value))
    assert param.grad.tolist() == [value, 32.0]
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


@pytest.mark.parametrize("after", ["unscale_", "step"])
@pytest.mark.parametrize(
    "name",
    [
        "torch",
        pytest.param(
            "gradilocks",
        ),
    ],
)
def test_the_inf_check_can_be_made_at_any_time(param, name, after):
    scaler, optimizer = SCALERS[name]("cpu", init_scale=8.0), sgd(param)
    backward(scaler, param)
    getattr(scaler, after)(optimizer)
    param.grad[0] = math.inf
    (flag,) = scaler._check_inf_per_device(optimizer).values()
    assert flag.item() == 1.0
    assert param.grad.tolist() == [math.inf, 4.0]


def test_gradients_can_be_unscaled_by_hand(scaler_class, param):
    scaler, optimizer = scaler_class("cpu", init_scale=8.0), sgd(param)
    backward(scaler, param)
    flags = scaler._unscale_grads_(optimizer, torch.tensor(0.5), torch.tensor(0.0), False)
    assert {device.type: flag.item() for device, flag in flags.items()} == {"cpu": 0.0}
    assert param.grad.tolist() == [8.0, 16.0]
    param.grad[0] = math.nan
    other = torch.nn.Parameter(torch.ones(1))
    other.grad = torch.tensor([math.inf])
    flags = scaler._unscale_grads_(sgd(other), torch.tensor(0.5), torch.tensor(0.0), False)
    assert flags[torch.device("cpu")].item() == 1.0


def test_fp16_gradients_are_unscaled_for_whoever_allows_it(scaler_class):
    # Trainers of pure fp16 models wrap _unscale_grads_ so that the last argument is always True.
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler, optimizer = scaler_class("cpu", init_scale=1024.0), sgd(param)
    original = scaler._unscale_grads_

    def allowing_fp16(optimizer, inv_scale, found_inf, allow_fp16):
        return original(optimizer, inv_scale, found_inf, True)

    scaler._unscale_grads_ = allowing_fp16
    backward(scaler, param)
    scaler.unscale_(optimizer)
    assert param.grad.tolist() == [2.0, 2.0]
    scaler.step(optimizer)
    assert param.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("place", ["object", "subclass", "class"])
@pytest.mark.parametrize("fused", [False, True])
def test_whoever_replaces_how_gradients_are_looked_at_is_asked(
    scaler_class, param, monkeypatch, place, fused
):
    asked = []
    original = scaler_class._unscale_grads_

    def says_that_they_overflow(self, optimizer, inv_scale, found_inf, allow_fp16):
        asked.append(float(inv_scale))
        flags = original(self, optimizer, inv_scale, found_inf, allow_fp16)
        return {device: torch.ones_like(flag) for device, flag in flags.items()}

    kind = scaler_class
    if place == "subclass":
        kind = type("Own", (kind,), {"_unscale_grads_": says_that_they_overflow})
    elif place == "class":
        monkeypatch.setattr(kind, "_unscale_grads_", says_that_they_overflow)
    scaler, optimizer = kind("cpu", init_scale=8.0), sgd(param, fused=fused)
    if place == "object":
        scaler._unscale_grads_ = says_that_they_overflow.__get__(scaler)
    backward(scaler, param)
    scaler.step(optimizer)
    assert asked == [1.0 if fused else 0.125]
    assert param.tolist() == [1.0, 2.0]
    scaler.update()
    assert scaler.get_scale() == 4.0
    backward(scaler, param)
    scaler.unscale_(optimizer)
    assert asked[1:] == [0.25]


@pytest.mark.parametrize("broken", [False, True])
def test_an_optimizer_that_writes_to_the_flag_it_is_given_moves_no_scale(
    scaler_class, param, broken
):
    class Writes(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self):
            given = self.grad_scale, self.found_inf
            seen.append(given[1].item())
            self.found_inf.fill_(1.0 - given[1].item())

    seen = []
    scaler = scaler_class("cpu", init_scale=8.0, growth_interval=1)
    iterate(scaler, Writes([param], lr=0.5), [param], broken=broken)
    assert seen == [float(broken)]
    assert scaler.get_scale() == (4.0 if broken else 16.0)


def test_the_scale_can_be_had_without_waiting(scaler_class):
    scaler = scaler_class("cpu", init_scale=8.0)
    assert scaler._get_scale_async() is None
    scaler.scale(torch.ones(()))
    assert scaler._get_scale_async() is scaler._scale
    assert scaler._check_scale_growth_tracker("step") == (scaler._scale, scaler._growth_tracker)
    assert scaler._enabled is True


def test_torchs_fused_optimizers_say_that_they_take_the_scale(param):
    for name in ("Adam", "AdamW", "SGD", "Adagrad"):
        optimizer = getattr(torch.optim, name)([param], lr=0.1, fused=True)
        assert optimizer._step_supports_amp_scaling is True


# --- what ours adds: the outcome --------------------------------------------------------------


def test_there_is_no_outcome_before_the_first_step():
    assert GradScaler("cpu").outcome is None


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale_first", [False, True])
def test_the_outcome_of_a_healthy_step_names_nobody(param, fused, unscale_first):
    scaler, optimizer = GradScaler("cpu", init_scale=8.0), sgd(param, fused=fused)
    backward(scaler, param)
    if unscale_first:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update(2.0)
    assert not scaler.outcome.skipped
    assert scaler.outcome.scale == 8.0
    assert scaler.outcome.culprits == ()
    assert scaler.outcome.describe() == "finite gradients"


@pytest.mark.parametrize("fused", [False, True])
def test_the_outcome_names_the_culprits(fused):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0, model=model)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    model[0].bias.grad[1] = math.nan
    model[1].weight.grad[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    outcome = scaler.outcome
    assert outcome.skipped
    assert outcome.culprits == ("1.weight", "0.bias")  # In backward order.
    assert outcome.counts["0.bias"] == (1, 0)
    assert outcome.counts["1.weight"] == (0, 1)
    assert outcome.scale == 8.0
    assert outcome.describe() == "Inf in 1.weight, NaN in 0.bias"


def test_an_outcome_with_nothing_but_bad_gradients_names_none_of_them():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0, model=model)
    scaler.scale(model(torch.ones(1, 2)).sum() * math.nan).backward()
    scaler.step(optimizer)
    assert scaler.outcome.describe() == (
        "NaN or Inf in all 4 gradients, so they do not tell where it began"
    )


def test_the_outcome_is_that_of_the_latest_step(param):
    other = torch.nn.Parameter(torch.tensor([3.0]))
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, param, other)
    param.grad[0] = math.nan
    first, second = sgd(param), sgd(other)
    scaler.step(first)
    assert scaler.outcome.skipped
    scaler.step(second)
    assert not scaler.outcome.skipped


def test_a_copy_keeps_the_bounds_of_the_scale(param):
    scaler = GradScaler("cpu", init_scale=8.0, min_scale=4.0, max_scale=16.0)
    scaler = copy.deepcopy(scaler)
    scaler.scale(torch.ones(()))
    scaler.update(100.0)
    assert scaler.get_scale() == 16.0
    scaler.update(1.0)
    assert scaler.get_scale() == 4.0
