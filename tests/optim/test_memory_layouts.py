"""However parameters and gradients lie in memory, each element gets its own gradient."""

from __future__ import annotations

import pytest
import torch

from tests.optim.twins import both_kinds, close, ours, parameters, torchs, values

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

STEPS = 2


def dense(values):
    return values.clone(memory_format=torch.contiguous_format)


def transposed(values):
    return dense(values.transpose(0, 1)).transpose(0, 1)


def channels_last(values):
    return values.contiguous(memory_format=torch.channels_last)


def every_second(values):
    """A strided view, of memory that is not its own in between."""
    room = torch.full((*values.shape[:-1], 2 * values.shape[-1]), 7.0, device=values.device)
    room[..., ::2] = values
    return room[..., ::2]


def padded(values):
    """Rows with a gap after each."""
    room = torch.full((*values.shape[:-1], values.shape[-1] + 3), 7.0, device=values.device)
    room[..., :-3] = values
    return room[..., :-3]


def at_an_odd_address(values):
    room = torch.empty(values.numel() + 1, dtype=values.dtype, device=values.device)
    room[1:] = values.flatten()
    return room[1:].view(values.shape)


def with_a_loose_stride(values):
    """The stride of a dimension of one, which says nothing, differs."""
    pairs = zip(values.shape, values.stride(), strict=True)
    strides = [1 if size == 1 else stride for size, stride in pairs]
    return torch.empty_strided(values.shape, strides, device=values.device).copy_(values)


LAYOUTS = [dense, transposed, channels_last, every_second, padded, at_an_odd_address]
SHAPES = [(5, 3, 4, 6), (1, 7, 1, 1), (3, 2, 1, 5)]


def step_both(kind, device, of_param, of_grad, *, shapes=SHAPES, dtype=torch.float32, **settings):
    """Ours on tensors laid out so, torch's on dense ones."""
    mine = [torch.nn.Parameter(of_param(v)) for v in values(shapes, dtype=dtype, device=device)]
    theirs = parameters(shapes, dtype=dtype, device=device)
    optimizer = ours(kind, mine, **settings)
    other = torchs(kind, theirs, fused=False, foreach=False)
    for step in range(STEPS):
        grads = values(shapes, seed=50 + step, dtype=dtype, device=device)
        before = []
        for param, one, grad in zip(mine, theirs, grads, strict=True):
            param.grad, one.grad = of_grad(grad), grad
            before.append(param.grad.clone())
        optimizer.step()
        other.step()
        assert all(torch.equal(p.grad, b) for p, b in zip(mine, before, strict=True))
    return mine, theirs


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("of_grad", LAYOUTS)
@pytest.mark.parametrize("of_param", LAYOUTS)
def test_any_two_layouts_go_together(kind, of_param, of_grad, device):
    close(*step_both(kind, device, of_param, of_grad))


@both_kinds
def test_the_gaps_in_a_strided_parameter_stay_as_they_are(kind, device):
    room = torch.full((4, 10), 7.0, device=device)
    param = torch.nn.Parameter(room[:, ::2])
    assert param.data_ptr() == room.data_ptr()
    optimizer = ours(kind, [param])
    for _ in range(STEPS):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert room[:, 1::2].eq(7.0).all()
    assert room[:, ::2].ne(7.0).all()


@both_kinds
def test_strides_of_dimensions_of_one_do_not_matter(kind, device):
    close(*step_both(kind, device, dense, with_a_loose_stride))
    close(*step_both(kind, device, with_a_loose_stride, channels_last))


@both_kinds
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_views_into_a_flat_buffer_are_stepped_in_place(kind, dtype, device):
    shapes = [(3,), (65,), (5, 7), (1,), (130,)]
    total = sum(torch.Size(shape).numel() for shape in shapes)
    flat, flat_grad = (torch.zeros(total + 1, dtype=dtype, device=device) for _ in range(2))
    mine, place = [], 1
    for value in values(shapes, dtype=dtype, device=device):
        end = place + value.numel()
        mine.append(torch.nn.Parameter(flat[place:end].view(value.shape)))
        mine[-1].grad = flat_grad[place:end].view(value.shape)
        with torch.no_grad():
            mine[-1].copy_(value)
        place = end
    theirs = parameters(shapes, dtype=dtype, device=device)
    optimizer, other = ours(kind, mine), torchs(kind, theirs, fused=False)
    for step in range(STEPS):
        for param, one, grad in zip(
            mine, theirs, values(shapes, seed=step, dtype=dtype), strict=True
        ):
            param.grad.copy_(grad)
            one.grad = grad.to(device)
        optimizer.step()
        other.step()
    close(mine, theirs, tolerance=1e-2 if dtype is torch.float16 else 1e-5)
    assert flat[0] == 0.0
    assert torch.equal(flat[1:], torch.cat([param.detach().flatten() for param in mine]))


@both_kinds
def test_the_layout_of_gradients_may_change_from_step_to_step(kind, device):
    shapes = SHAPES[:2]
    mine = [torch.nn.Parameter(channels_last(value)) for value in values(shapes, device=device)]
    theirs = parameters(shapes, device=device)
    optimizer, other = ours(kind, mine), torchs(kind, theirs, fused=False)
    for step, layout in enumerate([channels_last, dense, channels_last, padded, at_an_odd_address]):
        for param, one, grad in zip(
            mine, theirs, values(shapes, seed=step, device=device), strict=True
        ):
            param.grad, one.grad = layout(grad), grad
        optimizer.step()
        other.step()
        close(mine, theirs)


@both_kinds
def test_an_expanded_gradient_is_read_as_what_it_shows(kind, device):
    param, one = parameters([(6, 20)], device=device)[0], parameters([(6, 20)], device=device)[0]
    optimizer, other = ours(kind, [param]), torchs(kind, [one], fused=False)
    for _ in range(STEPS):
        param.grad = torch.full((), 0.5, device=device).expand(6, 20)
        one.grad = torch.full((6, 20), 0.5, device=device)
        optimizer.step()
        other.step()
    close([param], [one])


@both_kinds
def test_state_at_an_odd_address_is_read_as_it_lies(kind, device):
    """Beside a parameter that goes through aligned copies, too."""
    for layout in (dense, padded):
        mine, theirs = step_both(kind, device, layout, dense, shapes=[(4, 33)])
        optimizer, other = ours(kind, mine), torchs(kind, theirs, fused=False)
        for step in range(STEPS):
            for param, one, grad in zip(
                mine, theirs, values([(4, 33)], seed=step, device=device), strict=True
            ):
                param.grad, one.grad = grad, grad
            optimizer.step()
            other.step()
            for param in mine:
                for name, value in list(optimizer.state[param].items()):
                    if name != "step":
                        optimizer.state[param][name] = at_an_odd_address(value)
        close(mine, theirs)


def test_more_tensors_than_a_program_has_lanes_are_all_stepped(device):
    shapes = [(k % 7,) for k in range(300)]
    mine, theirs = (parameters(shapes, device=device) for _ in range(2))
    optimizer, other = ours("AdamW", mine), torchs("AdamW", theirs)
    for param, one, grad in zip(mine, theirs, values(shapes, seed=9, device=device), strict=True):
        param.grad, one.grad = grad, grad.clone()
    optimizer.step()
    other.step()
    close(mine, theirs)


def test_a_parameter_that_wraps_other_tensors_is_left_to_torch(device):
    """It has no address of its own, for a kernel to write to."""
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    halves = [torch.full((5,), value, device=device) for value in (1.0, 2.0)]
    theirs = [torch.nn.Parameter(half.clone()) for half in halves]
    param = torch.nn.Parameter(two(*halves))
    optimizer, other = ours("AdamW", [param]), torchs("AdamW", theirs)
    for _ in range(STEPS):
        for each in (param, *theirs):
            each.grad = torch.ones(5, device=device)
        optimizer.step()
        other.step()
    close([param.a, param.b], theirs)


@both_kinds
def test_a_gradient_of_another_dtype_is_widened(kind, device):
    param, one = (parameters([(70,)], device=device)[0] for _ in range(2))
    if not hasattr(param, "grad_dtype"):
        pytest.skip("this version of torch has no gradients of another dtype than the parameter's")
    param.grad_dtype = torch.float16
    optimizer, other = ours(kind, [param]), torchs(kind, [one], fused=False)
    for step in range(STEPS):
        (grad,) = values([(70,)], seed=step, dtype=torch.float16, device=device)
        param.grad, one.grad = grad, grad.float()
        optimizer.step()
        other.step()
    close([param], [one])


@pytest.mark.gpu
@both_kinds
def test_parameters_on_two_devices_are_stepped_together(kind, cuda):
    mine, theirs = (
        [*parameters([(70,)], device=cuda), *parameters([(5,)], seed=1)] for _ in range(2)
    )
    optimizer, other = ours(kind, mine), torchs(kind, theirs, fused=False, foreach=False)
    for step in range(STEPS):
        for params, stepper in ((mine, optimizer), (theirs, other)):
            for param, grad in zip(params, values([(70,), (5,)], seed=step), strict=True):
                param.grad = grad.to(param.device)
            stepper.step()
    close(mine, theirs)
