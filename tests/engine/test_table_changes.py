"""Whatever changes between two steps, the next one is stepped alike whoever decides."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from gradilocks import GradientControl
from tests.control.gradient_scripts import assert_same, contents
from tests.engine.backends import (
    INF,
    facts,
    gradient_for,
    loss_giving,
    parameter,
)

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Run:
    """A control over two groups, that takes step after step on given gradients."""

    def __init__(self, device, fused):
        self.device = device
        first = [parameter(4, 4, device=device), parameter(1, device=device)]
        second = [parameter(6, device=device)]
        groups = [{"params": first}, {"params": second, "lr": 0.5}]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, fused=fused)
        self.control = GradientControl(self.optimizer, scale=16.0, clip=3.0)
        self.told = []
        self.kept = []

    @property
    def groups(self):
        return [group["params"] for group in self.optimizer.param_groups]

    def params(self):
        return [param for group in self.groups for param in group]

    def step(self, change=None, bad=None):
        number = len(self.told)
        pairs = [
            (param, gradient_for(param, 10 * number + place, bad if place == 0 else None))
            for place, param in enumerate(self.params())
            if param.requires_grad
        ]
        self.control.backward(loss_giving(*pairs))
        if change is not None:
            change(self)
        self.told.append(facts(self.control.step()))
        self.control.zero_grad()


def freeze(run):
    run.groups[0][0].grad = None


def put_in_another(run):
    old = run.groups[0][0]
    new = nn.Parameter(old.detach().clone())
    new.grad = old.grad.clone()
    run.groups[0][0] = new


def put_in_another_of_one_element(run):
    old = run.groups[0][1]
    new = nn.Parameter(old.detach().clone())
    new.grad = old.grad * 3.0
    run.groups[0][1] = new


def swap_data(run):
    param = run.groups[0][0]
    run.kept.append(param.data)
    param.data = param.data.clone() + 1.0


def transpose_data_in_its_place(run):
    param = run.groups[0][0]
    param.data = param.data.t()


def shrink_data_in_its_place(run):
    param = run.groups[1][0]
    param.data, param.grad = param.data[:2], None
    param.grad = torch.full_like(param, 40.0)


def widen_data(run):
    param = run.groups[1][0]
    param.data, param.grad = param.data.double(), None
    param.grad = torch.full_like(param, 40.0)


def replace_gradient(run):
    param = run.groups[1][0]
    run.kept.append(param.grad)
    param.grad = param.grad * 2.0


def transpose_gradient(run):
    param = run.groups[0][0]
    param.grad = param.grad.clone().t()


def set_gradient_to_other_storage(run):
    grad = run.groups[1][0].grad
    grad.set_(torch.full_like(grad, 30.0))


def misalign_gradient(run):
    param = run.groups[1][0]
    room = torch.empty(7, device=param.device)
    room[1:] = param.grad
    param.grad = room[1:]


def stride_gradient(run):
    param = run.groups[1][0]
    param.grad = torch.arange(12.0, device=param.device)[::2]


def add_group(run):
    new = parameter(3, device=run.device)
    run.optimizer.add_param_group({"params": [new]})
    new.grad = torch.full_like(new, 40.0)


def remove_group(run):
    run.kept.append(run.optimizer.param_groups.pop())


def add_complex_group(run):
    new = nn.Parameter(torch.ones(3, dtype=torch.complex64, device=run.device))
    run.optimizer.add_param_group({"params": [new]})
    new.grad = torch.full_like(new, 8.0 + 8.0j)
    new.requires_grad_(False)  # The script gives it no further gradient.


# torch's fused SGD on the CPU takes a gradient for contiguous whatever its strides, so whatever
# changes those is tried on an optimizer that is not fused.
LAYOUTS = [transpose_data_in_its_place, transpose_gradient, misalign_gradient, stride_gradient]
CHANGES = [
    freeze,
    put_in_another,
    put_in_another_of_one_element,
    swap_data,
    shrink_data_in_its_place,
    widen_data,
    replace_gradient,
    set_gradient_to_other_storage,
    add_group,
    remove_group,
]


def run_with(device, settling, change, *, fused, on_device):
    settling.allowed = on_device
    run = Run(device, fused)
    run.step()
    run.step(change)
    run.step(bad=INF)
    settling.allowed = True
    return run.told, contents(run.optimizer), run.control.state_dict()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_steps_is_noticed(device, settling, change):
    settled = run_with(device, settling, change, fused=True, on_device=True)
    assert settling.count == 3
    assert_same(settled, run_with(device, settling, change, fused=True, on_device=False))


@pytest.mark.parametrize("change", LAYOUTS, ids=lambda change: change.__name__)
def test_another_layout_is_noticed(device, settling, change):
    settled = run_with(device, settling, change, fused=False, on_device=True)
    assert settling.count == (2 if change is stride_gradient else 3)
    assert_same(settled, run_with(device, settling, change, fused=False, on_device=False))


def test_complex_gradients_are_left_to_the_policies(device, settling):
    settled = run_with(device, settling, add_complex_group, fused=False, on_device=True)
    assert settling.count == 2
    assert_same(
        settled, run_with(device, settling, add_complex_group, fused=False, on_device=False)
    )


def test_sparse_gradients_are_left_to_the_policies(device, settling):
    def run(on_device):
        settling.allowed = on_device
        torch.manual_seed(1)
        table = nn.Embedding(5, 3, sparse=True, device=device)
        weight = parameter(3, device=device)
        optimizer = torch.optim.SGD([*table.parameters(), weight], lr=0.1)
        control = GradientControl(optimizer, clip=1.0)
        for words in ([1, 1, 4], [0], [2, 3, 2]):
            control.zero_grad()
            control.backward((table(torch.tensor(words, device=device)) * weight).sum())
            control.step()
        settling.allowed = True
        return contents(optimizer), control.state_dict()

    assert_same(run(True), run(False))
    assert settling.count == 0


def test_a_group_that_moves_to_another_optimizer_is_unscaled_by_it(device, settling):
    def run(on_device):
        settling.allowed = on_device
        params = [parameter(size, device=device) for size in (3, 4, 5)]
        one = torch.optim.SGD([{"params": [p]} for p in params[:2]], lr=0.1, fused=True)
        two = torch.optim.SGD([{"params": params[2:], "fused": False}], lr=0.1)
        control = GradientControl(one, two, scale=1024.0)
        for number in range(3):
            control.zero_grad()
            pairs = [(p, gradient_for(p, 10 * number + k)) for k, p in enumerate(params)]
            control.backward(loss_giving(*pairs))
            control.step()
            if number == 0:
                two.param_groups.insert(0, one.param_groups.pop())
                two.param_groups[0]["fused"] = False
        settling.allowed = True
        return [p.detach() for p in params]

    settled = run(True)
    assert settling.count == 3
    assert_same(settled, run(False))


def test_the_gradients_are_not_kept_alive_after_the_step(device, settling):
    run = Run(device, fused=True)
    for _ in range(2):
        params = run.params()
        run.control.backward(loss_giving(*((p, 1.0) for p in params)))
        gradients = [weakref.ref(p.grad) for p in params]
        run.control.step()
        assert all(gradient() is not None for gradient in gradients)
        run.control.zero_grad(set_to_none=True)
        gc.collect()
        assert [gradient() for gradient in gradients] == [None] * len(params)
    assert settling.count == 2


def test_a_parameter_that_was_taken_out_is_not_kept_alive(device, settling):
    run = Run(device, fused=True)
    run.step()
    gone = weakref.ref(run.groups[1][0])
    run.groups[1][0] = nn.Parameter(torch.zeros(6, device=device))
    run.step()
    gc.collect()
    assert gone() is None


def test_a_copy_of_a_control_goes_its_own_way(device, settling):
    run = Run(device, fused=False)  # A copy of torch's fused ones forgets that it takes decisions.
    run.step()
    twin = copy.deepcopy(run)
    before = contents(run.optimizer)
    twin.step(bad=INF)
    twin.step()
    assert_same(contents(run.optimizer), before)
    assert (run.control.state_dict()["gradilocks"]["steps"], twin.told[-1]["step"]) == (1, 3)
    run.step(bad=INF)
    run.step()
    assert_same(contents(run.optimizer), contents(twin.optimizer))
    assert settling.count == 5


def test_parameters_without_elements_are_stepped(device, settling):
    empty, full = nn.Parameter(torch.empty(0, 3, device=device)), parameter(2, device=device)
    control = GradientControl(torch.optim.AdamW([empty, full], fused=True))
    for last in (full, empty):
        control.zero_grad()
        control.backward(loss_giving((empty, 1.0), (full, 1.0)))
        if last is empty:
            full.grad = None
        outcome = control.step()
        assert not outcome.skipped
        assert outcome.norm == pytest.approx(0.0 if last is empty else 2.0**0.5)
    assert settling.count == 2


def test_gradients_added_up_in_place_keep_their_tables(device, settling):
    run = Run(device, fused=True)
    found = []
    for number in range(3):
        run.control.zero_grad(set_to_none=False)
        for k in range(2):
            pairs = [(p, gradient_for(p, 10 * number + k)) for p in run.params()]
            run.control.backward(loss_giving(*pairs))
        run.control.step()
        found.append(run.control._engine.table._found)
    assert settling.count == 3
    assert found[1] is found[2]
