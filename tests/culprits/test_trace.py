"""`trace` examines a block of code; a replay examines kept calls and changes nothing."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from gradilocks.run.replay import MAX_CALLS, CallLog, find_culprit, module_names
from gradilocks.trace import trace


@pytest.fixture
def log():
    log = CallLog()
    log.install()
    yield log
    log.remove()


def bad_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.grad is not None and not param.grad.isfinite().all()]


def culprit_of(log: CallLog, model: nn.Module, *, loss_value: str = "NaN"):
    bad = bad_parameters(model)
    assert bad
    return find_culprit(log, bad, module_names(bad), loss_value=loss_value)


class Divide(nn.Module):
    def forward(self, x):
        return x / (x - x)


class LengthBetweenLayers(nn.Module):
    """An operation of its own between two children; the gradient of sqrt(0) is Inf."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(1, 1)

    def forward(self, x):
        return self.second(self.first(x).square().sum(-1, keepdim=True).sqrt())


def test_an_operation_between_two_children_belongs_to_their_parent():
    model = nn.ModuleDict({"net": LengthBetweenLayers()})
    with trace(model) as found:
        model["net"](torch.zeros(2, 4)).sum().backward()
    assert found.culprit.operation == "div (SqrtBackward0)"
    assert found.culprit.module == "net"


class Quiet(nn.Module):
    """Everything that a replay must put back."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.linear = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)
        self.history, self.calls = [], 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.history.append(x.shape)
        self.seen += 1
        self.latest = x
        x = self.drop(self.norm(x)) * (1 + random.random())
        return self.linear(x + torch.rand_like(x)) / 0


def test_an_operation_of_the_script_is_named():
    model = nn.Linear(3, 3)
    with trace(model) as found:
        model(torch.randn(2, 3)).sub(1e9).exp().log().sum().backward()
    assert (found.culprit.operation, found.culprit.value, found.culprit.phase) == ("log", "Inf", "forward")
    assert "the script's own code" in found.culprit.text


def test_a_module_and_its_backward_are_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 3)))
    model[1][1].register_full_backward_hook(lambda module, grads, _: tuple(grad / (grad - grad) for grad in grads))
    with trace(model) as found:
        model(torch.randn(2, 3)).sum().backward()
    assert found.culprit.phase == "backward"
    assert "div" in found.culprit.operation


def test_finite_code_has_no_culprit():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    with trace(model) as found:
        model(torch.randn(2, 3)).sum().backward()
    assert found.culprit is None


def test_an_inf_that_a_softmax_absorbs_is_no_culprit():
    model = nn.Linear(3, 3)
    mask = torch.tensor([0.0, 0.0, -math.inf])
    with trace(model) as found:
        probabilities = (model(torch.randn(2, 3)) + mask).softmax(-1)
        (probabilities * 0).log().sum().backward()
    assert found.culprit.operation == "log"


def test_trace_works_with_gradients_of_gradients():
    model = nn.Linear(3, 1)
    x = torch.randn(2, 3, requires_grad=True)
    with trace(model) as found:
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (slope * 0).square().sum().sqrt().backward()
    assert found.culprit.operation == "div (SqrtBackward0)"


def test_a_corrupt_parameter_is_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    nn.init.constant_(model[1].bias, math.nan)
    with trace(model) as found:
        model(torch.ones(2, 3)).sum().backward()
    assert (found.culprit.source, found.culprit.module) == ("parameter", "1.bias")


def test_trace_restores_torch():
    before = nn.Module.__call__, torch.autograd.backward, torch.autograd.grad
    with pytest.raises(KeyError), trace(nn.Linear(2, 2)):
        raise KeyError
    assert (nn.Module.__call__, torch.autograd.backward, torch.autograd.grad) == before


def test_inputs_are_described():
    model = nn.Linear(3, 3)
    with trace(model) as found:
        torch.log(model(torch.zeros(2, 3)) * torch.tensor([0.0, 1.0, 1.0])).sum().backward()
    (described,) = found.culprit.inputs
    assert (described["dtype"], described["shape"]) == ("float32", [2, 3])
    assert (described["zeros"], described["nan"], described["inf"]) == (2, 0, 0)


def test_a_replay_puts_everything_back(log):
    torch.manual_seed(0)
    model = Quiet()
    model(torch.randn(8, 4)).sum().backward()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    buffers, latest = dict(model.named_buffers()), model.latest
    grads = [param.grad.clone() for param in model.parameters()]
    generators = torch.get_rng_state(), random.getstate()
    culprit = culprit_of(log, model)
    assert (culprit.operation, culprit.module) == ("div", "Quiet")
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(buffers[name] is value for name, value in model.named_buffers())
    assert (model.calls, len(model.history), model.latest is latest) == (1, 1, True)
    for old, param in zip(grads, model.parameters(), strict=True):
        assert torch.equal(old.nan_to_num(), param.grad.nan_to_num())
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()


def test_parameter_hooks_do_not_run_in_a_replay(log):
    model, seen = nn.Sequential(nn.Linear(3, 3), Divide()), []
    model[0].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param))
    model(torch.randn(2, 3)).sum().backward()
    assert culprit_of(log, model).module == "1"
    assert len(seen) == 1


def test_a_forward_that_depends_on_something_else_is_unknown(log):
    class Switch(nn.Module):
        def forward(self, x):
            return x / (x - x) if is_bad else x

    is_bad = True
    model = nn.Sequential(nn.Linear(3, 3), Switch())
    model(torch.randn(2, 3)).sum().backward()
    is_bad = False
    culprit = culprit_of(log, model)
    assert not culprit.known
    assert "an output of Sequential is NaN or Inf" in culprit.text


def test_an_output_of_large_finite_numbers_is_finite(log):
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.fill_(1e25)
    loss = model(torch.ones(2, 3)).square().mean()
    loss.backward()
    assert loss.isinf()
    assert not bad_parameters(model)
    culprit = find_culprit(log, [], module_names(list(model.parameters())), loss_value="Inf")
    assert culprit.text.startswith("first Inf: in the script's own code after Linear (forward)")


def test_an_input_that_was_overwritten_is_unknown(log):
    model, x = nn.Sequential(nn.Linear(3, 3), Divide()), torch.randn(2, 3)
    model(x).sum().backward()
    x.zero_()
    culprit = culprit_of(log, model)
    assert not culprit.known
    assert "changed in place" in culprit.text


def test_a_forward_that_raises_in_the_replay_is_unknown(log):
    class Once(nn.Module):
        def forward(self, x):
            queue.pop()
            return x / (x - x)

    queue = [1]
    model = nn.Sequential(nn.Linear(3, 3), Once())
    model(torch.randn(2, 3)).sum().backward()
    culprit = culprit_of(log, model)
    assert not culprit.known
    assert "raised IndexError" in culprit.text


def test_calls_are_forgotten_after_the_step_that_used_them(log):
    model = nn.Linear(3, 3)
    model(torch.randn(2, 3)).sum().backward()
    kept = model(torch.randn(2, 3))
    log.note_step(is_finite=True)
    model(torch.randn(2, 3))
    assert len(log.calls) == 2, "one call waits for its backward, one is new"
    del kept


def test_calls_without_gradients_do_not_pile_up(log):
    model = nn.Linear(3, 3)
    loss = model(torch.randn(2, 3)).sum()
    with torch.no_grad():
        for _ in range(MAX_CALLS + 20):
            model(torch.randn(2, 3))
    assert len(log.calls) == MAX_CALLS
    assert log.calls[0].has_grad
    assert not log.is_truncated
    loss.backward()


def test_an_exception_in_a_module_leaves_the_log_usable(log):
    class Raises(nn.Module):
        def forward(self, x):
            raise KeyError("x")

    with pytest.raises(KeyError):
        Raises()(torch.ones(1))
    model = nn.Sequential(nn.Linear(3, 3), Divide())
    model(torch.randn(2, 3)).sum().backward()
    assert culprit_of(log, model).module == "1"


def test_copies_and_pickles_of_a_model_know_nothing_of_the_log(log):
    import copy
    import pickle

    model = nn.Linear(3, 3)
    model(torch.randn(2, 3))
    assert pickle.loads(pickle.dumps(model)).weight.equal(copy.deepcopy(model).weight)
