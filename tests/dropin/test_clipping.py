"""The clip functions: numbers worked out by hand, torch's contract, torch's faults."""

import inspect
import math
import re

import pytest
import torch

import gradilocks
from gradilocks import GradScaler

THEIRS = torch.nn.utils
OURS = gradilocks
NAMES = ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"]


@pytest.fixture(params=["torch", "gradilocks"])
def clip(request):
    """Each test states a fact of torch's functions, and that ours keep it."""
    return {"torch": THEIRS, "gradilocks": OURS}[request.param]


def holding(*grads):
    """A parameter for each gradient, which it holds as it is."""
    params = []
    for grad in grads:
        param = torch.nn.Parameter(torch.zeros_like(grad))
        param.grad = grad
        params.append(param)
    return params


def known():
    """g1 = [3, 4], g2 = [0, 0, 12]."""
    return holding(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0, 12.0]))


def values(params):
    return [x for p in params for x in p.grad.flatten().tolist()]


# --- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "norm", "clipped"),
    [
        (1.0, 19.0, [3 / 19, 4 / 19, 0, 0, 12 / 19]),
        (2.0, 13.0, [0.23076922, 0.30769229, 0, 0, 0.92307687]),
        (3.0, 1819 ** (1 / 3), [3 / 12.207056, 4 / 12.207056, 0, 0, 12 / 12.207056]),
        (math.inf, 12.0, [0.24999999, 0.33333331, 0, 0, 1.0]),
    ],
)
def test_the_norm_and_the_clipped_gradients_are_what_they_are_by_hand(clip, p, norm, clipped):
    params = known()
    assert clip.clip_grad_norm_(params, 1.0, p).item() == pytest.approx(norm, rel=2e-7)
    assert values(params) == pytest.approx(clipped, rel=1e-6)


def test_a_norm_that_just_meets_the_bound_shrinks_by_the_epsilon(clip):
    params = known()
    assert clip.clip_grad_norm_(params, 13.0).item() == 13.0
    assert values(params)[:2] == pytest.approx([2.99999976, 3.99999976], abs=2e-8)


def test_a_norm_below_the_bound_leaves_every_bit(clip):
    params = known()
    assert clip.clip_grad_norm_(params, 13.5).item() == 13.0
    assert values(params) == [3.0, 4.0, 0.0, 0.0, 12.0]


def test_an_infinite_bound_only_measures(clip):
    params = known()
    assert clip.clip_grad_norm_(params, math.inf).item() == 13.0
    assert values(params) == [3.0, 4.0, 0.0, 0.0, 12.0]


def test_a_bound_of_zero_zeroes(clip):
    params = known()
    assert clip.clip_grad_norm_(params, 0.0).item() == 13.0
    assert values(params) == [0.0] * 5


def test_elements_are_bounded_one_by_one(clip):
    params = holding(torch.tensor([-3.0, 0.25, 4.0]), torch.tensor(7.0))
    assert clip.clip_grad_value_(params, 1.0) is None
    assert values(params) == [-1.0, 0.25, 1.0, 1.0]


def test_a_norm_from_elsewhere_is_clipped_with(clip):
    params = known()
    norm = clip.get_total_norm([p.grad for p in params])
    assert clip.clip_grads_with_norm_(params, 1.0, norm) is None
    assert values(params) == pytest.approx([3 / 13, 4 / 13, 0, 0, 12 / 13], rel=1e-6)
    before = values(params)
    clip.clip_grads_with_norm_(params, 5.0, torch.tensor(2.0))
    assert values(params) == before


def test_measuring_and_clipping_apart_is_clipping(clip):
    together, apart = known(), known()
    clip.clip_grad_norm_(together, 1.0, 3.0)
    clip.clip_grads_with_norm_(apart, 1.0, clip.get_total_norm([p.grad for p in apart], 3.0))
    assert values(apart) == pytest.approx(values(together), rel=1e-7)


# --- the contract -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_signature_is_torchs(name):
    theirs = inspect.signature(getattr(THEIRS, name)).parameters.values()
    ours = inspect.signature(getattr(OURS, name)).parameters.values()
    assert [(p.name, p.default, p.kind) for p in ours] == [
        (p.name, p.default, p.kind) for p in theirs
    ]


def test_everything_goes_by_keyword(clip):
    params = known()
    norm = clip.clip_grad_norm_(
        parameters=params, max_norm=1.0, norm_type=2.0, error_if_nonfinite=True, foreach=None
    )
    assert norm.item() == 13.0
    clip.clip_grad_value_(parameters=params, clip_value=0.5, foreach=None)
    assert max(values(params)) == 0.5
    norm = clip.get_total_norm(
        tensors=[torch.tensor([3.0, 4.0])], norm_type=2.0, error_if_nonfinite=False, foreach=None
    )
    clip.clip_grads_with_norm_(parameters=params, max_norm=0.0, total_norm=norm, foreach=None)
    assert values(params) == [0.0] * 5


def test_a_single_tensor_is_taken(clip):
    (param,) = holding(torch.tensor([3.0, 4.0]))
    assert clip.clip_grad_norm_(param, 1.0).item() == 5.0
    assert param.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-6)
    clip.clip_grad_value_(param, 0.7)
    assert param.grad.tolist() == pytest.approx([0.6, 0.7], rel=1e-6)
    clip.clip_grads_with_norm_(param, 1.0, torch.tensor(2.0))
    assert param.grad.tolist() == pytest.approx([0.3, 0.35], rel=1e-6)
    assert clip.get_total_norm(torch.tensor([3.0, 4.0])).item() == 5.0


def test_a_generator_is_taken(clip):
    params = known()
    assert clip.clip_grad_norm_((p for p in params), 1.0).item() == 13.0
    assert values(params) == pytest.approx([3 / 13, 4 / 13, 0, 0, 12 / 13], rel=1e-6)
    clip.clip_grad_value_((p for p in params), 0.25)
    assert max(values(params)) == 0.25
    norm = clip.get_total_norm(p.grad for p in params)
    clip.clip_grads_with_norm_((p for p in params), 0.0, norm)
    assert values(params) == [0.0] * 5


def test_an_empty_generator_warns_at_the_callers_line(clip):
    text = "`parameters` is an empty generator, no gradient clipping will occur."
    with pytest.warns(UserWarning, match="^" + re.escape(text) + "$") as got:
        norm = clip.clip_grad_norm_((p for p in []), 1.0)
    assert norm.item() == 0.0
    assert [w.filename for w in got] == [__file__]


def test_an_empty_list_is_silent(clip):
    norm = clip.clip_grad_norm_([], 1.0)
    assert (norm.item(), norm.dtype, norm.shape) == (0.0, torch.float32, ())
    assert clip.get_total_norm([]).item() == 0.0


def test_parameters_without_gradients_are_left_out(clip):
    params = [*known(), torch.nn.Parameter(torch.ones(3))]
    assert clip.clip_grad_norm_(params, 1.0).item() == 13.0
    clip.clip_grad_value_(params, 0.25)
    assert params[2].grad is None
    assert clip.clip_grad_norm_([params[2]], 1.0).item() == 0.0


def test_ours_bounds_nothing_where_torch_fails_on_nothing():
    with pytest.raises(RuntimeError):
        THEIRS.clip_grad_value_([], 1.0)
    assert OURS.clip_grad_value_([], 1.0) is None
    assert OURS.clip_grad_value_([torch.nn.Parameter(torch.ones(1))], 1.0) is None


@pytest.mark.parametrize("foreach", [None, False, True])
def test_foreach_does_not_change_the_result(clip, foreach):
    params = known()
    assert clip.clip_grad_norm_(params, 1.0, foreach=foreach).item() == 13.0
    assert values(params) == pytest.approx([3 / 13, 4 / 13, 0, 0, 12 / 13], rel=1e-6)
    clip.clip_grad_value_(params, 0.25, foreach=foreach)
    assert max(values(params)) == 0.25
    norm = clip.get_total_norm([p.grad for p in params], foreach=foreach)
    clip.clip_grads_with_norm_(params, 0.0, norm, foreach=foreach)
    assert values(params) == [0.0] * 5


@pytest.mark.parametrize("value", ["1.0", torch.tensor(1.0), 1, True], ids=repr)
def test_what_float_understands_is_a_bound(clip, value):
    params = known()
    clip.clip_grad_norm_(params, value)
    assert values(params) == pytest.approx([3 / 13, 4 / 13, 0, 0, 12 / 13], rel=1e-6)
    params = known()
    clip.clip_grad_value_(params, value)
    assert max(values(params)) == 1.0


def test_the_order_may_be_a_string(clip):
    assert clip.clip_grad_norm_(known(), 1.0, norm_type="inf").item() == 12.0


@pytest.mark.parametrize("given", [None, "big", []], ids=repr)
def test_what_float_does_not_understand_is_refused(clip, given):
    params = known()
    with pytest.raises((TypeError, ValueError)):
        clip.clip_grad_norm_(params, given)
    with pytest.raises((TypeError, ValueError)):
        clip.clip_grad_value_(params, given)
    assert values(params) == [3.0, 4.0, 0.0, 0.0, 12.0]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_a_nonfinite_norm_is_an_error_for_whoever_asks(clip, value, p):
    params = known()
    params[1].grad[0] = value
    text = (
        f"The total norm of order {p} for gradients from `parameters` is non-finite, so it cannot "
        "be clipped. To disable this error and scale the gradients by the non-finite norm anyway, "
        "set `error_if_nonfinite=False`"
    )
    with pytest.raises(RuntimeError, match="^" + re.escape(text)):
        clip.clip_grad_norm_(params, 1.0, p, error_if_nonfinite=True)
    assert values(params)[:2] == [3.0, 4.0]
    with pytest.raises(RuntimeError, match="^" + re.escape(text)):
        clip.get_total_norm([p.grad for p in params], p, error_if_nonfinite=True)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_nonfinite_norm_is_returned_otherwise(clip, value):
    params = known()
    params[1].grad[0] = value
    norm = clip.clip_grad_norm_(params, 1.0).item()
    assert math.isnan(norm) if math.isnan(value) else norm == math.inf


def test_the_norm_needs_no_grad(clip):
    (param,) = holding(torch.tensor([3.0, 4.0], requires_grad=True))
    norm = clip.clip_grad_norm_(param, 1.0)
    assert not norm.requires_grad
    assert not clip.get_total_norm(torch.tensor([3.0, 4.0], requires_grad=True)).requires_grad


def test_scaled_gradients_are_clipped_with_a_scaled_bound(clip):
    param = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale((param * param).sum() / 2.0).backward()
    norm = clip.clip_grad_norm_([param], 1.0 * scaler.get_scale())
    assert norm.item() == 5.0 * 1024.0
    scaler.step(optimizer)
    assert param.tolist() == pytest.approx([3.0 - 0.6, 4.0 - 0.8], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_has_the_gradients_dtype(clip, dtype):
    assert clip.clip_grad_norm_(holding(torch.ones(3, dtype=dtype)), 1.0).dtype is dtype


def test_the_norm_of_mixed_gradients_is_float64(clip):
    params = holding(torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64))
    norm = clip.clip_grad_norm_(params, 1.0)
    assert (norm.dtype, norm.item()) == (torch.float64, 5.0)
    assert [p.grad.dtype for p in params] == [torch.float32, torch.float64]


@pytest.mark.parametrize("bound", [0.1, 1e300])
def test_the_bound_of_float64_elements_is_not_rounded(clip, bound):
    params = holding(torch.tensor([1e305, -1e305], dtype=torch.float64))
    clip.clip_grad_value_(params, bound)
    assert values(params) == [bound, -bound]


def test_complex_gradients_are_clipped(clip):
    params = holding(torch.tensor([3.0 + 4.0j, 12.0j]))
    norm = clip.clip_grad_norm_(params, 1.0)
    assert (norm.dtype, norm.item()) == (torch.float32, 13.0)
    got = params[0].grad.tolist()
    assert got[0] == pytest.approx((3.0 + 4.0j) / 13, rel=1e-6)
    assert got[1] == pytest.approx(12.0j / 13, rel=1e-6)


def test_complex_elements_have_no_bound(clip):
    params = holding(torch.tensor([3.0 + 4.0j]))
    with pytest.raises((NotImplementedError, TypeError, ValueError), match="complex"):
        clip.clip_grad_value_(params, 1.0)
    assert params[0].grad.tolist() == [3.0 + 4.0j]


def test_foreach_where_there_is_none_is_refused(clip):
    params = holding(torch.zeros(2, device="meta"))
    with pytest.raises((RuntimeError, ValueError)):
        clip.clip_grad_norm_(params, 1.0, foreach=True)


# --- B11: torch's faults ----------------------------------------------------------------------


def test_large_finite_gradients_are_not_zeroed():
    theirs, ours = holding(torch.full((4,), 1e20)), holding(torch.full((4,), 1e20))
    assert THEIRS.clip_grad_norm_(theirs, 1.0).item() == math.inf
    assert values(theirs) == [0.0] * 4
    assert OURS.clip_grad_norm_(ours, 1.0).item() == pytest.approx(2e20, rel=1e-6)
    assert values(ours) == pytest.approx([0.5] * 4, rel=1e-6)


def test_many_fp16_gradients_are_not_zeroed():
    theirs = holding(torch.full((70_000,), 300.0, dtype=torch.float16))
    assert THEIRS.clip_grad_norm_(theirs, 1.0).item() == math.inf
    assert theirs[0].grad.count_nonzero() == 0
    ours = holding(torch.full((70_000,), 300.0, dtype=torch.float16))
    norm = OURS.clip_grad_norm_(ours, 1.0)
    assert norm.item() == pytest.approx(300.0 * math.sqrt(70_000), rel=1e-6)
    assert norm.dtype is torch.float32
    expected = torch.tensor(1.0 / math.sqrt(70_000)).half().item()
    assert set(values(ours)) == {expected}


def test_the_norm_of_bf16_gradients_is_not_rounded():
    ones = torch.ones(5_120, dtype=torch.bfloat16)
    assert THEIRS.get_total_norm([ones]).item() == 71.5
    assert OURS.get_total_norm([ones]).item() == pytest.approx(71.554175, rel=1e-7)
    assert OURS.clip_grad_norm_(holding(ones.clone()), math.inf).item() == pytest.approx(
        71.554175, rel=1e-7
    )


def test_the_norm_of_many_float32_gradients_is_exact():
    large = torch.ones(20_000_000)
    assert OURS.get_total_norm([large]).item() == pytest.approx(math.sqrt(2e7), rel=1e-7)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e25, 1e38])
@pytest.mark.parametrize("p", [2.0, 3.0, 1.0, math.inf])
def test_neither_tiny_nor_huge_gradients_lose_their_norm(scale, p):
    grad = torch.tensor([3.0, 4.0, 0.0]) / 8.0 * scale
    expected = torch.linalg.vector_norm(grad.double() / scale, p).item() * scale
    assert OURS.get_total_norm([grad], p).item() == pytest.approx(expected, rel=1e-6)
    assert OURS.get_total_norm([grad, grad.clone()], p).item() < math.inf


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_one_nonfinite_element_leaves_every_gradient_as_it_is(where, value, p):
    theirs, ours = known(), known()
    for params in (theirs, ours):
        params[where].grad[0] = value
    before = values(ours)
    THEIRS.clip_grad_norm_(theirs, 1.0, p)
    assert not any(math.isfinite(x) and x for x in values(theirs))  # All gone: 0 or NaN.
    OURS.clip_grad_norm_(ours, 1.0, p)
    assert values(ours) == pytest.approx(before, nan_ok=True, rel=0)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_nonfinite_norm_from_elsewhere_leaves_every_gradient_as_it_is(norm):
    params = known()
    OURS.clip_grads_with_norm_(params, 1.0, torch.tensor(norm))
    assert values(params) == [3.0, 4.0, 0.0, 0.0, 12.0]


@pytest.mark.parametrize("bound", [-1.0, math.nan])
def test_a_negative_bound_is_an_error(bound):
    theirs = known()
    THEIRS.clip_grad_norm_(theirs, -1.0)
    assert values(theirs)[0] < 0.0  # torch turns the gradient around.
    params = known()
    with pytest.raises(ValueError, match=rf"max_norm must not be negative or NaN, got {bound}"):
        OURS.clip_grad_norm_(params, bound)
    with pytest.raises(ValueError, match="max_norm must not be negative"):
        OURS.clip_grads_with_norm_(params, bound, torch.tensor(13.0))
    with pytest.raises(ValueError, match="clip_value must not be negative"):
        OURS.clip_grad_value_(params, bound)
    assert values(params) == [3.0, 4.0, 0.0, 0.0, 12.0]


def test_an_order_of_nan_does_not_reach_the_gradients():
    params = known()
    with pytest.raises(ValueError, match="norm_type"):
        OURS.clip_grad_norm_(params, 1.0, math.nan)
    assert values(params) == [3.0, 4.0, 0.0, 0.0, 12.0]


def test_a_parameter_listed_twice_counts_once():
    theirs, ours = holding(torch.tensor([3.0, 4.0])), holding(torch.tensor([3.0, 4.0]))
    THEIRS.clip_grad_norm_(theirs * 2, 1.0)
    assert math.hypot(*values(theirs)) == pytest.approx(0.1, rel=1e-5)  # Clipped twice.
    assert OURS.clip_grad_norm_(ours * 2, 1.0).item() == 5.0
    assert math.hypot(*values(ours)) == pytest.approx(1.0, rel=1e-5)
    OURS.clip_grads_with_norm_(ours * 2, 0.5, torch.tensor(1.0))
    assert math.hypot(*values(ours)) == pytest.approx(0.5, rel=1e-5)


def sparse(indices, values, size=6):
    return torch.sparse_coo_tensor([indices], values, (size,), check_invariants=True)


def test_sparse_gradients_are_clipped():
    with pytest.raises((RuntimeError, NotImplementedError)):
        THEIRS.clip_grad_norm_(holding(sparse([1, 1], [3.0, 4.0])), 1.0)
    params = holding(sparse([1, 4, 1], [1.0, 4.0, 2.0]), torch.tensor([12.0]))
    assert OURS.clip_grad_norm_(params, 1.0).item() == 13.0  # The two ones at index 1 are one.
    assert params[0].grad.is_sparse
    assert params[0].grad.to_dense().tolist() == pytest.approx(
        [0, 3 / 13, 0, 0, 4 / 13, 0], rel=1e-6
    )
    OURS.clip_grad_value_(params, 0.25)
    assert params[0].grad.to_dense().tolist() == pytest.approx([0, 3 / 13, 0, 0, 0.25, 0], rel=1e-6)
    assert OURS.get_total_norm([sparse([1, 1], [1.0, 2.0]), torch.tensor([4.0])]).item() == 5.0


def test_an_empty_gradient_has_no_largest_element_and_no_error():
    params = holding(torch.zeros(0), torch.tensor([3.0, -4.0]))
    with pytest.raises(RuntimeError, match="empty tensor"):
        THEIRS.clip_grad_norm_(params, 1.0, math.inf)
    assert OURS.clip_grad_norm_(params, 1.0, math.inf).item() == 4.0
    assert values(params) == pytest.approx([0.75, -1.0], rel=1e-6)


def test_gradients_on_the_meta_device_are_refused_by_place():
    params = [*known(), *holding(torch.zeros(2, device="meta"))]
    with pytest.raises(ValueError, match=r"parameters\[2\] is on the meta device"):
        OURS.clip_grad_norm_(params, 1.0)
    assert values(params[:2]) == [3.0, 4.0, 0.0, 0.0, 12.0]


@pytest.mark.parametrize(
    "name",
    [
        "torch",
        pytest.param("gradilocks"),
    ],
)
def test_a_tensor_listed_twice_in_a_norm_is_two_vectors(name):
    # Parameters have one gradient each, however often they are listed; a list of tensors is a list.
    clip, tensor = {"torch": THEIRS, "gradilocks": OURS}[name], torch.tensor([3.0, 4.0])
    assert clip.get_total_norm([tensor, tensor]).item() == pytest.approx(math.sqrt(50.0))


# --- between unscale_ and the clip ------------------------------------------------------------

LARGE, SMALL = 70_000, 100


def unscaled(scaler_class, *sizes):
    """Parameters whose gradients have just been unscaled, and their scaler and optimizer."""
    generator = torch.Generator().manual_seed(5)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in sizes]
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = scaler_class("cpu", init_scale=1024.0)
    scaler.scale(sum((p * p).sum() for p in params)).backward()
    scaler.unscale_(optimizer)
    return params, scaler, optimizer


def test_a_clip_that_does_nothing_does_not_write():
    params, _, _ = unscaled(GradScaler, LARGE, SMALL)
    versions = [p.grad._version for p in params]
    OURS.clip_grad_norm_(params, 1e9)
    assert [p.grad._version for p in params] == versions


def test_a_second_clip_sees_the_first():
    params, _, _ = unscaled(GradScaler, LARGE, SMALL)
    OURS.clip_grad_norm_(params, 1.0)
    assert OURS.clip_grad_norm_(params, 0.5).item() == pytest.approx(1.0, rel=1e-5)
    assert OURS.clip_grad_norm_(params, 0.5).item() == pytest.approx(0.5, rel=1e-5)


def _in_place(param):
    param.grad.mul_(0.5)


def _replaced(param):
    param.grad = param.grad * 0.5


def _through_data(param):
    param.grad.data.mul_(0.5)


def _through_numpy(param):
    param.grad.numpy()[:] *= 0.5


def _through_detach(param):
    param.grad.detach().mul_(0.5)


def _through_a_view(param):
    param.grad[: param.numel() // 2].zero_()


def _foreach(param):
    torch._foreach_mul_([param.grad], 0.5)


def _one_element_in_place(param):
    param.grad[1] = 1000.0


def _storage_swapped(param):
    param.grad.data = param.grad.data * 0.5


def _by_value(param):
    OURS.clip_grad_value_([param], 0.5)


def _accumulated(param):
    (param * 3.0).sum().backward()


def _one_element_through_data(param):
    param.grad.data[1] = 1000.0


def _one_element_through_numpy(param):
    param.grad.numpy()[1] = 1000.0


def _outliers_bounded_through_data(param):
    param.grad.data.clamp_(-7.0, 7.0)


WRITES = {
    "in place": _in_place,
    "replaced": _replaced,
    "through .data": _through_data,
    "through NumPy": _through_numpy,
    "through detach()": _through_detach,
    "through a view": _through_a_view,
    "foreach": _foreach,
    "one element in place": _one_element_in_place,
    "storage swapped": _storage_swapped,
    "by value": _by_value,
    "accumulated": _accumulated,
}
HIDDEN = {
    "one element through .data": _one_element_through_data,
    "one element through NumPy": _one_element_through_numpy,
    "outliers bounded through .data": _outliers_bounded_through_data,
}


def clipped_after(write, size):
    """Clips on both sides after the same write; torch's norm is taken in float64, ours as it is."""
    results = []
    for scaler_class in (torch.amp.GradScaler, GradScaler):
        params, _, _ = unscaled(scaler_class, size, SMALL)
        write(params[0])
        if scaler_class is GradScaler:
            norm = OURS.clip_grad_norm_(params, 1.0)
        else:
            norm = THEIRS.get_total_norm([p.grad.double() for p in params]).float()
            THEIRS.clip_grads_with_norm_(params, 1.0, norm)
        results.append((norm, [p.grad for p in params]))
    return results


@pytest.mark.parametrize("size", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_after_unscale_is_seen(write, size):
    expected, got = clipped_after(write, size)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("write", HIDDEN.values(), ids=HIDDEN)
def test_a_hidden_write_to_a_few_elements_of_a_small_gradient_is_seen(write):
    expected, got = clipped_after(write, SMALL)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("write", HIDDEN.values(), ids=HIDDEN)
def test_a_hidden_write_to_a_few_elements_of_a_large_gradient_is_seen(write):
    results = []
    for scaler_class in (torch.amp.GradScaler, GradScaler):
        param = torch.nn.Parameter(torch.ones(LARGE))
        optimizer = torch.optim.SGD([param], lr=0.1)
        scaler = scaler_class("cpu", init_scale=1.0)
        scaler.scale(param.sum()).backward()
        param.grad[1] = 500.0
        scaler.unscale_(optimizer)
        write(param)
        norm = THEIRS.get_total_norm([param.grad.double()]).float()
        if scaler_class is GradScaler:
            norm = OURS.clip_grad_norm_([param], 1.0)
        else:
            THEIRS.clip_grads_with_norm_([param], 1.0, norm)
        results.append((norm, param.grad))
    expected, got = results
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("make", ["channels last", "transposed", "every other"])
def test_large_gradients_of_any_layout_are_clipped_after_unscale(make):
    results = []
    for clip, scaler_class in ((THEIRS, torch.amp.GradScaler), (OURS, GradScaler)):
        base = torch.randn(2 * LARGE, generator=torch.Generator().manual_seed(1))
        grad = {
            "channels last": base.view(2, 7, 100, 100).to(memory_format=torch.channels_last),
            "transposed": base.view(700, 200).t(),
            "every other": base[::2],
        }[make]
        (param,) = holding(grad)
        scaler = scaler_class("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(torch.optim.SGD([param], lr=0.1))
        norm = clip.clip_grad_norm_([param], 1.0)
        results.append((norm, param.grad))
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("order", [-1.0, -2.0, -11.0, -math.inf])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_finite_gradients_have_a_finite_norm_of_a_negative_order(order, size):
    params = holding(torch.tensor([size, 2 * size]), torch.tensor([4 * size]))
    exact = [1.0, 2.0, 4.0]
    if order == -math.inf:
        expected = size
    else:
        expected = size * sum(value**order for value in exact) ** (1.0 / order)
    norm = OURS.get_total_norm([param.grad for param in params], order, error_if_nonfinite=True)
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    OURS.clip_grad_norm_(params, size / 8, order)
    if size > 1.0:
        found = [value / size for value in values(params)]
        factor = size / 8 / expected
        assert found == pytest.approx([factor * value for value in exact], rel=1e-5)


def test_an_error_for_nonfinite_gradients_is_none_for_finite_ones_whose_norm_torch_cannot_hold():
    """A difference from torch, documented in docs/numerics.md."""
    with pytest.raises(RuntimeError, match="non-finite"):
        THEIRS.clip_grad_norm_(holding(torch.full((4,), 1e20)), 1.0, error_if_nonfinite=True)
    for size in (1e20, 3e38):
        params = holding(torch.full((4,), size))
        norm = OURS.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
        assert norm.item() == pytest.approx(2 * size if size < 1e38 else math.inf)
        assert values(params) == pytest.approx([0.5] * 4)
