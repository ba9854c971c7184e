"""Which tensors are measured, and what their parameters are called."""

import pytest
import torch
from torch import nn

from gradilocks.errors import SharedParameter
from gradilocks.names import Names
from gradilocks.step.table import GradientTable, every_parameter, gradients_of, lists_of


def name(param):
    return "it"


def with_gradient(*shape, value=1.0):
    p = nn.Parameter(torch.zeros(*shape))
    p.grad = torch.full_like(p, value)
    return p


class Optimizer:
    def __init__(self, *groups):
        self.param_groups = [{"params": list(group)} for group in groups]


def test_only_parameters_with_a_gradient_are_collected_in_their_order():
    p, q, r = with_gradient(2), nn.Parameter(torch.zeros(3)), with_gradient(4)
    found = gradients_of([p, q, r], name=name)
    assert [x is y for x, y in zip(found.params, (p, r), strict=True)] == [True, True]
    assert found.tensors[0] is p.grad
    assert found.layouts == ()


def test_a_parameter_listed_twice_is_collected_once():
    p = with_gradient(2)
    assert len(gradients_of([p, p], name=name).params) == 1


def test_a_sparse_gradient_is_coalesced_once_and_its_values_are_views():
    p = nn.Parameter(torch.zeros(4, 2))
    indices = torch.tensor([[1, 1, 3]])
    p.grad = torch.sparse_coo_tensor(indices, torch.ones(3, 2), (4, 2), check_invariants=False)
    found = gradients_of([p], name=name)
    assert p.grad.is_coalesced()
    assert found.tensors[0].tolist() == [[2.0, 2.0], [1.0, 1.0]]
    found.tensors[0].mul_(3.0)
    assert p.grad.to_dense()[1].tolist() == [6.0, 6.0]


def test_a_meta_gradient_is_refused_by_name():
    p = nn.Parameter(torch.zeros(2, device="meta"))
    p.grad = torch.zeros(2, device="meta")
    with pytest.raises(ValueError, match="the gradient of it is on the meta device"):
        gradients_of([p], name=name)


def test_parameters_of_several_optimizers_come_in_order():
    p, q, r = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    listed = every_parameter([Optimizer([p], [q]), Optimizer([r])])
    assert [id(x) for x in listed] == [id(p), id(q), id(r)]


def test_a_shared_parameter_is_refused_by_name():
    p = nn.Parameter(torch.zeros(1))
    with pytest.raises(SharedParameter, match="it is listed twice"):
        GradientTable().find(lists_of([Optimizer([p]), Optimizer([p])]), name=name)


def test_equal_parameters_are_not_the_same_parameter():
    p, q = with_gradient(1), with_gradient(1)
    assert len(GradientTable().find(lists_of([Optimizer([p, q])]), name=name).params) == 2


def test_names_follow_the_model_as_it_is_now():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = Names(model, [optimizer])
    assert names.of(model.parameters()) == ["weight", "bias"]
    old = model.weight
    model.weight = nn.Parameter(torch.zeros(2, 2))
    assert names(model.weight) == "weight"
    assert names(old) == "param_groups[0]['params'][0]"


def test_a_parameter_that_nobody_knows_is_described_by_its_shape():
    names = Names(None, [Optimizer([])])
    assert names(nn.Parameter(torch.zeros(3, 4))) == "a parameter of shape (3, 4)"


def test_names_of_nested_modules_are_full_paths():
    model = nn.ModuleDict({"block": nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))})
    names = Names(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    assert names(model["block"][1].bias) == "block.1.bias"
