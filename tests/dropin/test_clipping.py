"""The clip functions: numbers worked out by hand, torch's contract, torch's defects."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch

import gradilocks
from gradilocks import GradScaler

pytestmark = pytest.mark.usefixtures("cpu_backend")

THEIRS, OURS = torch.nn.utils, gradilocks
UNCHANGED = [3.0, 4.0, 0.0, 0.0, 12.0]
CLIPPED = [3 / 13, 4 / 13, 0.0, 0.0, 12 / 13]


@pytest.fixture(params=["torch", "gradilocks"])
def clip(request):
    """A test with this fixture states a fact of torch's functions."""
    return {"torch": THEIRS, "gradilocks": OURS}[request.param]


def with_grads(*grads):
    """A parameter for each gradient."""
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def example():
    return with_grads(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0, 12.0]))


def values(params):
    return [x for p in params for x in p.grad.flatten().tolist()]


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "norm", "clipped"),
    [
        (1.0, 19.0, [3 / 19, 4 / 19, 0, 0, 12 / 19]),
        (2.0, 13.0, [0.23076922, 0.30769229, 0, 0, 0.92307687]),
        (3.0, 12.207057, [3 / 12.207056, 4 / 12.207056, 0, 0, 12 / 12.207056]),
        (math.inf, 12.0, [0.24999999, 0.33333331, 0, 0, 1.0]),
    ],
)
def test_norm_and_clipped_gradients_have_the_values_worked_out_by_hand(clip, p, norm, clipped):
    params = example()
    assert clip.clip_grad_norm_(params, 1.0, p).item() == pytest.approx(norm, rel=2e-7)
    assert values(params) == pytest.approx(clipped, rel=1e-6)


@pytest.mark.parametrize(
    ("max_norm", "expected"),
    [
        (13.0, [2.99999976, 3.99999976, 0.0, 0.0, 11.99999905]),
        (13.5, UNCHANGED),
        (math.inf, UNCHANGED),
        (0.0, [0.0] * 5),
    ],
)
def test_a_norm_at_the_bound_shrinks_by_the_epsilon_and_one_below_it_stays(clip, max_norm, expected):
    params = example()
    assert clip.clip_grad_norm_(params, max_norm).item() == 13.0
    assert values(params) == pytest.approx(expected, rel=2e-8)


def test_elements_are_clamped(clip):
    params = with_grads(torch.tensor([-3.0, 0.25, 4.0, math.nan]), torch.tensor(7.0))
    assert clip.clip_grad_value_(params, 1.0) is None
    assert values(params) == pytest.approx([-1.0, 0.25, 1.0, math.nan, 1.0], nan_ok=True)


# --- torch's contract -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"])
def test_the_signature_is_torchs(name):
    theirs, ours = (inspect.signature(getattr(module, name)).parameters.values() for module in (THEIRS, OURS))
    assert [(p.name, p.default, p.kind) for p in ours] == [(p.name, p.default, p.kind) for p in theirs]


@pytest.mark.parametrize("given_as", [list, lambda tensors: (t for t in tensors)], ids=["list", "generator"])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_everything_can_be_passed_by_keyword_and_by_generator(clip, given_as, foreach):
    params = example()
    norm = clip.clip_grad_norm_(
        parameters=given_as(params), max_norm=1.0, norm_type=2.0, error_if_nonfinite=True, foreach=foreach
    )
    assert norm.item() == 13.0
    assert values(params) == pytest.approx(CLIPPED, rel=1e-6)
    clip.clip_grad_value_(parameters=given_as(params), clip_value=0.5, foreach=foreach)
    assert max(values(params)) == 0.5
    norm = clip.get_total_norm(
        tensors=given_as([params[0].grad]), norm_type=2.0, error_if_nonfinite=False, foreach=foreach
    )
    clip.clip_grads_with_norm_(parameters=given_as(params), max_norm=0.0, total_norm=norm, foreach=foreach)
    assert values(params) == [0.0] * 5


def test_a_single_tensor_is_accepted(clip):
    (param,) = with_grads(torch.tensor([3.0, 4.0]))
    assert clip.clip_grad_norm_(param, 1.0).item() == 5.0
    clip.clip_grad_value_(param, 0.7)
    assert param.grad.tolist() == pytest.approx([0.6, 0.7], rel=1e-6)
    clip.clip_grads_with_norm_(param, 1.0, torch.tensor(2.0))
    assert param.grad.tolist() == pytest.approx([0.3, 0.35], rel=1e-6)
    assert clip.get_total_norm(torch.tensor([3.0, 4.0])).item() == 5.0


def test_an_empty_generator_warns_at_the_callers_line_and_an_empty_list_does_not(clip):
    text = "`parameters` is an empty generator, no gradient clipping will occur."
    with pytest.warns(UserWarning, match="^" + re.escape(text) + "$") as caught:
        clip.clip_grad_norm_((p for p in []), 1.0)
    assert [w.filename for w in caught] == [__file__]
    for norm in (clip.clip_grad_norm_([], 1.0), clip.get_total_norm([])):
        assert (norm.item(), norm.dtype, norm.shape) == (0.0, torch.float32, ())


def test_parameters_without_gradients_are_left_out(clip):
    params = [*example(), torch.nn.Parameter(torch.ones(3))]
    assert clip.clip_grad_norm_(params, 1.0).item() == 13.0
    clip.clip_grad_value_(params, 0.25)
    assert params[2].grad is None
    assert clip.clip_grad_norm_([params[2]], 1.0).item() == 0.0


@pytest.mark.parametrize("value", ["1.0", torch.tensor(1.0), 1, True], ids=repr)
def test_a_bound_is_anything_that_float_accepts(clip, value):
    params = example()
    clip.clip_grad_norm_(params, value, norm_type="2")
    assert values(params) == pytest.approx(CLIPPED, rel=1e-6)
    clip.clip_grad_value_(params, value)


@pytest.mark.parametrize("value", [None, "big", []], ids=repr)
def test_other_bounds_are_rejected(clip, value):
    params = example()
    for function in (clip.clip_grad_norm_, clip.clip_grad_value_):
        with pytest.raises((TypeError, ValueError)):
            function(params, value)
    assert values(params) == UNCHANGED


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_a_nonfinite_norm_is_an_error_on_request_and_returned_otherwise(clip, value, p):
    params = example()
    params[1].grad[0] = value
    text = f"The total norm of order {p} for gradients from `parameters` is non-finite, so it cannot be clipped. "
    with pytest.raises(RuntimeError, match="^" + re.escape(text)):
        clip.clip_grad_norm_(params, 1.0, p, error_if_nonfinite=True)
    assert values(params)[:2] == [3.0, 4.0]
    with pytest.raises(RuntimeError, match="^" + re.escape(text)):
        clip.get_total_norm([p.grad for p in params], p, error_if_nonfinite=True)
    norm = clip.clip_grad_norm_(params, 1.0, p).item()
    assert math.isnan(norm) if math.isnan(value) else norm == math.inf


def test_the_norm_does_not_require_grad(clip):
    (param,) = with_grads(torch.tensor([3.0, 4.0], requires_grad=True))
    assert not clip.clip_grad_norm_(param, 1.0).requires_grad
    assert not clip.get_total_norm(torch.tensor([3.0, 4.0], requires_grad=True)).requires_grad


def test_scaled_gradients_can_be_clipped_with_a_scaled_bound(clip):
    param = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    scaler, optimizer = GradScaler("cpu", init_scale=1024.0), torch.optim.SGD([param], lr=1.0)
    scaler.scale((param * param).sum() / 2.0).backward()
    assert clip.clip_grad_norm_([param], 1.0 * scaler.get_scale()).item() == 5.0 * 1024.0
    scaler.step(optimizer)
    assert param.tolist() == pytest.approx([3.0 - 0.6, 4.0 - 0.8], rel=1e-6)


@pytest.mark.parametrize("bound", [0.1, 1e300])
def test_the_bound_of_float64_elements_is_not_rounded(clip, bound):
    params = with_grads(torch.tensor([1e305, -1e305], dtype=torch.float64))
    clip.clip_grad_value_(params, bound)
    assert values(params) == [bound, -bound]


def test_complex_gradients_are_clipped_by_norm_and_not_by_value(clip):
    params = with_grads(torch.tensor([3.0 + 4.0j, 12.0j]))
    with pytest.raises((NotImplementedError, RuntimeError), match="complex"):
        clip.clip_grad_value_(params, 1.0)
    without_gradient = torch.zeros(2, dtype=torch.complex64, requires_grad=True)
    clip.clip_grad_value_([without_gradient, *with_grads(torch.ones(1))], 1.0)
    norm = clip.clip_grad_norm_(params, 1.0)
    assert (norm.dtype, norm.item()) == (torch.float32, 13.0)
    assert params[0].grad.tolist() == pytest.approx([(3.0 + 4.0j) / 13, 12.0j / 13], rel=1e-6)


def test_a_tensor_listed_twice_in_a_norm_is_two_vectors(clip):
    tensor = torch.tensor([3.0, 4.0])
    assert clip.get_total_norm([tensor, tensor]).item() == pytest.approx(math.sqrt(50.0))


# --- B11: torch's defects ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "dtype", "value"), [(4, torch.float32, 1e20), (70_000, torch.float16, 300.0)])
def test_large_finite_gradients_are_not_zeroed(size, dtype, value):
    theirs, ours = (with_grads(torch.full((size,), value, dtype=dtype)) for _ in range(2))
    assert THEIRS.clip_grad_norm_(theirs, 1.0).item() == math.inf
    assert theirs[0].grad.count_nonzero() == 0
    norm = OURS.clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(value * math.sqrt(size), rel=1e-6)
    torch.testing.assert_close(ours[0].grad.float(), torch.full((size,), 1.0 / math.sqrt(size)), rtol=1e-3, atol=0.0)


def test_a_norm_that_only_float64_can_hold_still_clips():
    params = with_grads(torch.full((4,), 3e38))
    assert OURS.clip_grad_norm_(params, 1.0, error_if_nonfinite=True).item() == math.inf  # 6e38 in float32.
    assert values(params) == pytest.approx([0.5] * 4)


def test_the_norm_of_bf16_gradients_is_not_rounded():
    ones = torch.ones(5_120, dtype=torch.bfloat16)
    assert THEIRS.get_total_norm([ones]).item() == 71.5
    assert OURS.get_total_norm([ones]).item() == pytest.approx(71.554175, rel=1e-7)


def test_the_norm_of_many_float32_gradients_is_exact():
    assert OURS.get_total_norm([torch.ones(5_000_000)]).item() == pytest.approx(math.sqrt(5e6), rel=1e-7)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e25, 1e37])
@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, 30.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_and_huge_gradients_keep_their_norm(scale, p, dtype):
    scale = scale**7 if dtype is torch.float64 else scale  # Up to 1e259, whose square overflows.
    grad = (torch.tensor([3.0, 4.0, 0.0], dtype=torch.float64) / 8.0 * scale).to(dtype)
    expected = torch.linalg.vector_norm(grad.double() / scale, p).item() * scale
    assert OURS.get_total_norm([grad], p).item() == pytest.approx(expected, rel=1e-6)
    assert OURS.get_total_norm([grad, grad.clone()], p).item() == pytest.approx(expected * 2 ** (1 / p), rel=1e-6)


@pytest.mark.parametrize("norm", [math.inf, math.nan, torch.tensor(math.nan), torch.tensor(math.inf)])
@pytest.mark.parametrize("bound", [0.0, 1.0, 1.7])  # 1 / 1.7 * 1.7 is not 1 in float32.
def test_a_given_nonfinite_norm_leaves_every_gradient_unchanged(norm, bound):
    params = example()
    OURS.clip_grads_with_norm_(params, bound, norm)
    assert values(params) == UNCHANGED


@pytest.mark.parametrize("bound", [-1.0, math.nan])
def test_a_negative_bound_and_an_order_that_is_not_positive_are_errors(bound):
    theirs, params = example(), example()
    THEIRS.clip_grad_norm_(theirs, -1.0)
    assert values(theirs)[0] < 0.0  # torch reverses the gradient.
    with pytest.raises(ValueError, match=rf"max_norm must not be negative or NaN, got {bound}"):
        OURS.clip_grad_norm_(params, bound)
    with pytest.raises(ValueError, match="max_norm must not be negative"):
        OURS.clip_grads_with_norm_(params, bound, torch.tensor(13.0))
    with pytest.raises(ValueError, match="clip_value must not be negative"):
        OURS.clip_grad_value_(params, bound)
    with pytest.raises(ValueError, match=rf"norm_type must be above 0, got {bound}"):
        OURS.clip_grad_norm_(params, 1.0, bound)
    assert values(params) == UNCHANGED


def test_a_parameter_listed_twice_counts_once():
    theirs, ours = with_grads(torch.tensor([3.0, 4.0])), with_grads(torch.tensor([3.0, 4.0]))
    THEIRS.clip_grad_norm_(theirs * 2, 1.0)
    assert math.hypot(*values(theirs)) == pytest.approx(0.1, rel=1e-5)
    assert OURS.clip_grad_norm_(ours * 2, 1.0).item() == 5.0
    assert math.hypot(*values(ours)) == pytest.approx(1.0, rel=1e-5)
    OURS.clip_grads_with_norm_(ours * 2, 0.5, torch.tensor(1.0))
    assert math.hypot(*values(ours)) == pytest.approx(0.5, rel=1e-5)


def sparse(indices, values):
    return torch.sparse_coo_tensor([indices], values, (6,), check_invariants=True)


def test_sparse_gradients_are_clipped():
    with pytest.raises((RuntimeError, NotImplementedError)):
        THEIRS.clip_grad_norm_(with_grads(sparse([1, 1], [3.0, 4.0])), 1.0)
    params = with_grads(sparse([1, 4, 1], [1.0, 4.0, 2.0]), torch.tensor([12.0]))
    assert OURS.clip_grad_norm_(params, 1.0).item() == 13.0
    assert params[0].grad.is_sparse
    assert params[0].grad.to_dense().tolist() == pytest.approx([0, 3 / 13, 0, 0, 4 / 13, 0], rel=1e-6)
    OURS.clip_grad_value_(params, 0.25)
    assert params[0].grad.to_dense().tolist() == pytest.approx([0, 3 / 13, 0, 0, 0.25, 0], rel=1e-6)
    assert OURS.get_total_norm([sparse([1, 1], [1.0, 2.0]), torch.tensor([4.0])]).item() == 5.0


def test_empty_gradients_and_empty_lists_raise_nothing():
    params = with_grads(torch.zeros(0), torch.tensor([3.0, -4.0]))
    with pytest.raises(RuntimeError, match="empty tensor"):
        THEIRS.clip_grad_norm_(params, 1.0, math.inf)
    assert OURS.clip_grad_norm_(params, 1.0, math.inf).item() == 4.0
    assert values(params) == pytest.approx([0.75, -1.0], rel=1e-6)
    with pytest.raises(RuntimeError):
        THEIRS.clip_grad_value_([], 1.0)
    OURS.clip_grad_value_([], 1.0)
    OURS.clip_grad_value_([torch.nn.Parameter(torch.ones(1))], 1.0)


def test_a_clip_that_changes_nothing_writes_nothing():
    params = example()
    versions = [p.grad._version for p in params]
    OURS.clip_grad_norm_(params, 1e9)
    assert [p.grad._version for p in params] == versions
    OURS.clip_grad_norm_(params, 1.0)
    assert all(p.grad._version > version for p, version in zip(params, versions, strict=True))


def test_compiled_code_can_clip():
    compiled = torch.compile(lambda params: OURS.clip_grad_norm_(params, 1.0) * 2.0, backend="eager")
    params = example()
    assert compiled(params).item() == 26.0
    assert values(params) == pytest.approx(CLIPPED, rel=1e-6)
