"""The calls of a script's models are seen, and neither the script nor a compiler notices."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn

from gradilocks.lab.trace import KeptCalls
from gradilocks.observe.script_calls import ScriptCalls
from gradilocks.observe.torch_hooks import TorchHooks
from gradilocks.step.events import EVENTS


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.decoder(self.encoder(x).relu())


@pytest.fixture
def watched():
    """What is kept of each step, as the modules that were called in it."""
    begun = []
    calls = ScriptCalls(keeps=True, began=lambda: begun.append(1))
    steps = []

    class Taker:
        def __getattr__(self, name):
            return lambda *args, **kwargs: None

        def step_ended(self, step):
            steps.append([call.module() for call in calls.kept.take().calls])

    taker, hooks = Taker(), TorchHooks()
    for listener in (calls, taker):
        EVENTS.add(listener)
    hooks.install()
    yield calls, steps, begun
    hooks.remove()
    calls.close()
    for listener in (calls, taker):
        EVENTS.discard(listener)


def train(forward, optimizer, steps=3, width=4):
    for _ in range(steps):
        optimizer.zero_grad()
        forward(torch.randn(5, width)).square().sum().backward()
        optimizer.step()


def test_the_model_that_is_called_is_kept_from_the_first_step_on(watched):
    calls, steps, begun = watched
    net = Net()
    train(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert steps == [[net]] * 3
    assert calls.kept.followed == [net]
    assert len(begun) >= 3


def test_parts_that_the_loop_calls_are_kept_in_their_order(watched):
    calls, steps, _ = watched
    net = Net()
    train(lambda x: net.decoder(net.encoder(x).relu()), torch.optim.SGD(net.parameters(), lr=0.1))
    assert steps == [[net.encoder, net.decoder]] * 3
    assert calls.kept.followed == [net, net.encoder, net.decoder]


class Auxiliary(Net):
    """With parts that the loop calls by themselves, and not in every step."""

    def __init__(self):
        super().__init__()
        self.seldom = nn.Sequential(nn.Tanh(), nn.Identity())
        self.teacher = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)


@pytest.mark.parametrize("rehearsed", [False, True], ids=["", "after an evaluation"])
def test_a_part_that_the_loop_calls_for_the_first_time_late_is_kept_too(rehearsed, watched):
    calls, steps, _ = watched
    net = Auxiliary()
    optimizer = torch.optim.SGD(net.encoder.parameters(), lr=0.1)
    if rehearsed:  # As frameworks do before they train.
        with torch.no_grad():
            net.eval()(torch.randn(5, 4))
    train(lambda x: net.decoder(net.encoder(x)), optimizer)
    train(lambda x: net.decoder(net.seldom(net.encoder(x))), optimizer, steps=2)
    assert steps == [[net.encoder, net.decoder]] * 3 + [[net.encoder, net.seldom, net.decoder]] * 2
    assert not {*net.seldom} & {*calls.kept.followed}  # They run inside of it.


def test_what_runs_inside_of_others_has_no_hooks_and_what_never_ran_keeps_them(watched):
    calls, steps, _ = watched
    net = Auxiliary()
    net.decoder = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(net, optimizer, steps=2)
    assert calls.kept.followed == [net, net.seldom, net.teacher, *net.seldom, *net.teacher]
    net.decoder.append(net.seldom)
    train(net, optimizer, steps=2)
    assert calls.kept.followed == [net, net.teacher, *net.teacher]
    train(lambda x: net(net.teacher(x)), optimizer, steps=2)
    assert calls.kept.followed == [net, net.teacher]
    assert steps == [[net]] * 6


def test_a_part_that_makes_data_without_gradients_is_seen_at_every_step(watched):
    calls, _, _ = watched
    net = Auxiliary()
    optimizer = torch.optim.SGD(net.encoder.parameters(), lr=0.1)
    for _ in range(4):
        with torch.no_grad():
            taught = net.teacher(torch.randn(5, 4))
        net.decoder(net.encoder(taught)).sum().backward()
        assert calls.kept.take().others
        optimizer.step()
    assert net.teacher in calls.kept.followed
    assert not {*net.teacher} & {*calls.kept.followed}


def test_a_script_that_calls_others_later_is_followed_there(watched):
    _, steps, _ = watched
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(net, optimizer, steps=2)
    train(lambda x: net.decoder(net.encoder(x)), optimizer)
    assert steps == [[net], [net], [], [net.encoder, net.decoder], [net.encoder, net.decoder]]


def test_two_models_with_an_optimizer_each_are_both_kept(watched):
    calls, steps, _ = watched
    one, two = Net(), nn.Linear(2, 1)
    first = torch.optim.SGD(one.parameters(), lr=0.1)
    second = torch.optim.SGD(two.parameters(), lr=0.1)
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        two(one(torch.randn(5, 4))).sum().backward()
        first.step()
        second.step()
    assert steps[::2] == [[one, two]] * 3
    assert calls.kept.followed == [one, two]


def test_a_closure_calls_the_model_inside_the_step(watched):
    calls, steps, _ = watched
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.randn(5, 4)).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert steps == [[net]] * 3
    assert calls.kept.followed == [net]


@pytest.mark.parametrize("when", ["before the optimizer", "after it"])
@pytest.mark.parametrize("way", ["wrapper", "in place", "in place, a part", "a function around it"])
def test_compiled_code_is_compiled_once_whole_and_without_a_warning(way, when, watched, recwarn):
    _, steps, _ = watched
    torch.compiler.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    def compile_it():
        if way == "wrapper":
            return torch.compile(net, backend=backend, fullgraph=True)
        if way == "a function around it":
            return torch.compile(lambda x: net(x) * 2, backend=backend, fullgraph=True)
        (net if way == "in place" else net.inner).compile(backend=backend, fullgraph=True)
        return net

    net = Net()
    net.inner = Net()
    net.decoder = nn.Sequential(net.decoder, nn.Linear(2, 4), net.inner)
    forward = compile_it() if when == "before the optimizer" else None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(compile_it() if forward is None else forward, optimizer, steps=5)
    assert len(compiled) == 1
    assert not [each for each in recwarn if "hook" in str(each.message)]
    seen = [getattr(module, "_orig_mod", module) for module in steps[-1]]
    assert seen == ([] if way == "a function around it" else [net])


@pytest.mark.parametrize("way", ["in place", "a function around it"])
def test_a_part_that_is_compiled_late_is_compiled_once_whole_and_without_a_warning(
    way, watched, recwarn
):
    torch.compiler.reset()
    compiled, net = [], Auxiliary()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(lambda x: net.decoder(net.encoder(x)), optimizer, steps=2)

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    if way == "in place":
        net.seldom.compile(backend=backend, fullgraph=True)
        seldom = net.seldom
    else:
        seldom = torch.compile(lambda h: net.seldom(h) * 2, backend=backend, fullgraph=True)
    train(lambda x: net.decoder(seldom(net.encoder(x))), optimizer, steps=4)
    assert len(compiled) == 1
    assert not [each for each in recwarn if "hook" in str(each.message)]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_class_knows_the_names_that_its_caller_knows(watched):
    def doubled(x: float) -> float:
        return 2.0 * x

    def make():
        class Scripted:
            def __init__(self, x: float) -> None:
                self.x = doubled(x)

        return torch.jit.script(Scripted)

    assert make()(2.0).x == 4.0


def test_nothing_of_ours_goes_into_copies_pickles_or_scripts(watched):
    calls, steps, _ = watched
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(net, optimizer, steps=2)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other(torch.randn(5, 4))
        assert calls.kept.calls == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(net)
        torch.jit.trace(net, torch.ones(1, 4))
    assert torch.equal(scripted(torch.ones(1, 4)), net(torch.ones(1, 4)))
    train(net, optimizer, steps=1)
    assert steps[-1] == [net]
    calls.close()
    assert torch.jit.script.__module__.startswith("torch.")
    assert not net._forward_hooks
    assert not net._forward_pre_hooks


def test_transforms_of_functions_are_not_kept(watched):
    calls, _, _ = watched
    net = Net()
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), steps=1)
    weights = dict(net.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(net, weights, (x,)).sum()

    torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, torch.randn(3, 1, 4))
    assert calls.kept.calls == []


def test_two_threads_that_train_at_once_are_told_apart(watched):
    calls, _, _ = watched
    both = threading.Barrier(2)

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            both.wait(10)  # Both are in their forward.
            return x * self.weight

    nets = [Slow(), Slow()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    threads = [threading.Thread(target=lambda n=n: n(torch.ones(4)).sum().backward()) for n in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {id(call.module()) for call in calls.kept.take().calls} == set(map(id, nets))
    assert optimizers


def test_what_goes_wrong_ends_the_keeping_and_not_the_training(monkeypatch, caplog):
    kept = KeptCalls()
    net = Net()
    kept.follow([net])

    def fail(*args):
        raise ZeroDivisionError("here")

    monkeypatch.setattr(kept, "_begin", fail)
    net(torch.randn(5, 4)).sum().backward()
    assert net.encoder.weight.grad is not None
    assert kept.take().missing == (
        "the calls of the model could not be kept (ZeroDivisionError: here)"
    )
    assert kept.followed == []
    assert "bad steps will not be run once more" in caplog.text
