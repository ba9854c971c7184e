"""What cannot be stepped is refused by name, with the way out, and leaves everything as it was."""

from __future__ import annotations

import copy

import pytest
import torch

import gradilocks
from gradilocks import GradientControl
from gradilocks.errors import SharedParameter
from tests.optim.twins import SETTINGS, both_kinds, copies, give, ours, parameters, run, same

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def raises(kind, optimizer, error, *words):
    """Steps, and checks the message and that nothing has changed; steps again after a repair."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before, state = copies(params), copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(error) as caught:
        optimizer.step()
    for word in words:
        assert word in str(caught.value)
    assert str(caught.value).endswith(".")
    assert same(copies(params), before)
    assert same(optimizer.state_dict()["state"], state)


@both_kinds
@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_a_dtype_without_a_kernel_is_refused_by_name(kind, dtype, device):
    good = torch.nn.Parameter(torch.zeros(3, device=device))
    bad = torch.nn.Parameter(torch.zeros(3, device=device).to(dtype))
    with pytest.raises(TypeError, match=r"param_groups\[0\]\['params'\]\[1\] is torch") as caught:
        ours(kind, [good, bad])
    assert str(dtype) in str(caught.value)
    assert "torch.optim" in str(caught.value)
    with pytest.raises(TypeError, match="head is torch"):
        ours(kind, [("body", good), ("head", bad)])
    optimizer = ours(kind, [good])
    with pytest.raises(TypeError, match=r"param_groups\[1\]\['params'\]\[0\] is torch"):
        optimizer.add_param_group({"params": bad})
    assert len(optimizer.param_groups) == 1
    run(optimizer, 1)


@both_kinds
def test_a_parameter_that_becomes_complex_is_refused(kind, device):
    params = parameters([(4,), (3,)], device=device)
    optimizer = ours(kind, params)
    run(optimizer, 1)
    params[1].grad = None
    params[1].data = params[1].data.to(torch.complex64)
    params[1].grad = torch.ones_like(params[1])
    raises(kind, optimizer, TypeError, "param_groups[0]['params'][1]", "complex64", "float32")


@both_kinds
@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_an_integer_tensor_is_refused(kind, key, device):
    if key == "weight_decay" and kind != "SGD":
        pytest.skip("torch takes a weight_decay as a tensor for SGD only")
    params = [("stem", parameters([(4,)], device=device)[0])]
    with pytest.raises(TypeError, match=rf"{key} of stem is a tensor of torch.int64") as caught:
        ours(kind, params, **{key: torch.tensor(1)})
    assert f"torch.tensor({key}, dtype=torch.float32)" in str(caught.value)
    optimizer = ours(kind, params)
    for taken in range(2):  # Before the first step, and after it.
        before = optimizer.param_groups[0][key]
        optimizer.param_groups[0][key] = torch.tensor(1, device=device)
        give([params[0][1]], 0)
        raises(kind, optimizer, TypeError, f"{key} of stem", "int64")
        optimizer.param_groups[0][key] = before
        run(optimizer, 1, first=taken)


@both_kinds
def test_a_learning_rate_on_another_device_is_refused(kind, device):
    params = parameters([(4,)], device=device)
    optimizer = ours(kind, params)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    give(params, 0)
    raises(kind, optimizer, ValueError, "lr of param_groups[0]['params'][0]", "meta", "on the CPU")


class Elsewhere(torch.Tensor):
    """Says that it is on another device, where there is none to be on."""

    device = torch.device("meta")


@both_kinds
def test_a_learning_rate_of_several_numbers_is_refused_by_name(kind, device):
    params = parameters([(4,), (3,)], device=device)
    optimizer = ours(kind, [("a", params[0]), ("b", params[1])])
    optimizer.param_groups[0]["lr"] = torch.tensor([0.1, 0.2])
    give(params, 0)
    raises(kind, optimizer, ValueError, "lr of a", "shape (2,)", "one number", "group of their own")
    optimizer.param_groups[0]["lr"] = torch.tensor([0.1])
    optimizer.step()


@both_kinds
def test_a_gradient_on_another_device_is_refused_by_name(kind, device):
    here, there = parameters([(4,), (3,)], device=device)
    if device == "cpu":
        there = torch.nn.Parameter(there.detach().as_subclass(Elsewhere))
    optimizer = ours(kind, [("a", here), ("b", there)])
    here.grad, there.grad = torch.ones(4, device=device), torch.ones(3, device=device)
    if device == "cuda":
        there.data = there.data.cpu()
    raises(kind, optimizer, ValueError, "gradient of b is on", "the parameter on", "clear the")
    there.grad = None
    optimizer.step()


@both_kinds
def test_a_sparse_gradient_is_refused_by_name(kind, device):
    table = torch.nn.Embedding(10, 3, sparse=True, device=device)
    optimizer = ours(kind, table.named_parameters())
    table(torch.tensor([1, 2], device=device)).sum().backward()
    raises(kind, optimizer, ValueError, "weight", "torch.sparse_coo", "SparseAdam")


@both_kinds
def test_state_of_another_shape_is_refused(kind, device):
    """As when an embedding is resized and its moments are forgotten."""
    param = parameters([(10, 4)], device=device)[0]
    optimizer = ours(kind, [("table", param)])
    run(optimizer, 1)
    param.data = torch.zeros(5, 4, device=device)
    give([param], 1)
    raises(kind, optimizer, ValueError, "table has shape (5, 4)", "(10, 4)", "optimizer.state")
    del optimizer.state[param]
    optimizer.step()


@both_kinds
def test_differentiable_is_refused(kind, device):
    params = parameters([(4,)], device=device)
    with pytest.raises(ValueError, match=r"differentiable=True was given.*fused=False"):
        ours(kind, params, differentiable=True)
    optimizer = ours(kind, params)
    with pytest.raises(ValueError, match="differentiable"):
        optimizer.add_param_group(
            {"params": parameters([(2,)], device=device), "differentiable": True}
        )
    assert len(optimizer.param_groups) == 1


@both_kinds
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_listed_twice_is_refused_by_name(kind, device):
    params = parameters([(4,), (3,)], device=device)
    with pytest.raises(SharedParameter, match=r"\['params'\]\[2\] is listed twice"):
        ours(kind, [params[0], params[1], params[0]])


@both_kinds
def test_what_torch_refuses_is_refused_as_by_torch(kind, device):
    params = parameters([(4,)], device=device)
    with pytest.raises(ValueError, match="empty parameter list"):
        ours(kind, [])
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ours(kind, params, lr=-1.0)
    with pytest.raises(ValueError, match="non-leaf"):
        ours(kind, [params[0] * 2])
    with pytest.raises(TypeError):
        ours(kind, [1.0])
    with pytest.raises(ValueError, match="more than one parameter group"):
        ours(kind, [{"params": params}, {"params": params}])


@both_kinds
def test_flags_of_speed_are_taken_and_change_nothing(kind, device):
    params = parameters([(70,)], device=device)
    for flags in ({"foreach": True}, {"fused": False}, {"fused": True}, {"foreach": False}):
        optimizer = ours(kind, params, **flags)
        optimizer.add_param_group({"params": parameters([(2,)], device=device), "fused": False})
        assert all(group["fused"] for group in optimizer.param_groups)
        run(optimizer, 1)
    assert SETTINGS[kind]


@both_kinds
def test_a_step_without_gradients_does_nothing(kind, device):
    params = parameters([(4,)], device=device)
    optimizer = ours(kind, params)
    before = copies(params)
    optimizer.step()
    assert same(copies(params), before)
    assert optimizer.state_dict()["state"] == {}


def test_a_control_names_the_parameter_that_the_optimizer_refuses(device):
    model = torch.nn.Linear(4, 2).to(device)
    optimizer = gradilocks.optim.AdamW(model.named_parameters())
    control = GradientControl(optimizer, model=model, scale=None)
    control.backward(model(torch.ones(1, 4, device=device)).sum())
    control.step()
    optimizer.state[model.weight]["exp_avg"] = torch.zeros(3, device=device)
    control.zero_grad()
    control.backward(model(torch.ones(1, 4, device=device)).sum())
    with pytest.raises(ValueError, match=r"weight has shape \(2, 4\)"):
        control.step()
    del optimizer.state[model.weight]
    assert not control.step().skipped
