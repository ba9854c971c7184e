"""A GradScaler goes to another process, as spawn launchers send it, and goes on there by names.

The model stays behind. Names are told by shapes that only one parameter has, by the model given
again, or not at all: then what needs them is refused.
"""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from gradilocks import (
    AdaGC,
    AdaptiveClip,
    ClipByNorm,
    ClipPerGroup,
    GradScaler,
    HeadroomScale,
    ZScoreClip,
)

CLIPS = {
    "a number": lambda: 1.0,
    "learns a norm": lambda: ZScoreClip(),
    "learns of each parameter": lambda: AdaGC(),
    "patterns": lambda: AdaptiveClip(0.01, exclude=("head.*",)),
    "groups": lambda: ClipPerGroup({"*.bias": 0.5, "first.weight": 1.0}),
}
each_clip = pytest.mark.parametrize("make", CLIPS.values(), ids=CLIPS)


class Distinct(nn.Module):
    """No two parameters have the same shape."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, rows):
        return self.head(torch.tanh(self.first(rows)))


class Alike(nn.Module):
    """Two layers of the same shape, as those of a transformer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, rows):
        return self.head(torch.tanh(self.first(rows)))


def train(model, optimizer, scaler, steps, *, bad=None):
    for step in steps:
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 6).view(2, 3)).square().sum() * (1.0 + step)
        scaler.scale(loss).backward()
        if step == bad:
            model.head.weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
    return [param.detach().clone() for param in model.parameters()]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def same(one, other):
    return all(map(torch.equal, one, other))


def sent(scaler):
    return pickle.loads(pickle.dumps(scaler))


def twins(kind):
    """Two models that are alike, with an optimizer each."""
    first = kind()
    second = copy.deepcopy(first)
    return (first, sgd(first)), (second, sgd(second))


def moved_on(kind, make, give_model):
    """Trained with a scaler that was sent after some steps, and with one that was not."""
    here, there = twins(kind)
    scaler = GradScaler("cpu", model=here[0], policy=HeadroomScale(), clip=make())
    train(*here, scaler, range(8))
    there[0].load_state_dict(here[0].state_dict())
    again = sent(scaler)
    assert again.model is None
    if give_model:
        again.model = there[0]
        assert again.model is there[0]
    return train(*there, again, range(8, 14)), train(*here, scaler, range(8, 14))


@each_clip
def test_where_shapes_tell_the_parameters_it_goes_on_without_the_model(make):
    assert same(*moved_on(Distinct, make, give_model=False))


@each_clip
@pytest.mark.parametrize("kind", [Distinct, Alike])
def test_with_the_model_given_again_it_goes_on_bit_for_bit(make, kind):
    assert same(*moved_on(kind, make, give_model=True))


@pytest.mark.parametrize("name", ["a number", "learns a norm"])
def test_what_needs_no_names_goes_on_without_them(name):
    assert same(*moved_on(Alike, CLIPS[name], give_model=False))


@pytest.mark.parametrize("name", ["patterns", "groups", "learns of each parameter"])
def test_what_needs_names_that_cannot_be_told_is_refused_before_anything_moves(name):
    model = Alike()
    scaler = GradScaler("cpu", model=model, clip=CLIPS[name]())
    first = sgd(model)
    train(model, first, scaler, range(2))
    other = copy.deepcopy(model)
    optimizer, again = sgd(other), sent(scaler)
    with pytest.raises(ValueError, match=r"scaler\.model = model") as caught:
        train(other, optimizer, again, [2])
    assert "param_groups[0]['params'][0]" in str(caught.value)
    assert same(other.parameters(), model.parameters())
    again.model = other
    train(other, optimizer, again, [2])
    train(model, first, scaler, [2])
    assert same(other.parameters(), model.parameters())


def test_a_fresh_one_that_learns_of_each_parameter_needs_no_names():
    model = Alike()
    again = sent(GradScaler("cpu", model=model, clip=AdaGC()))
    other = copy.deepcopy(model)
    train(other, sgd(other), again, range(3))
    scaler = GradScaler("cpu", model=model, clip=AdaGC())
    train(model, sgd(model), scaler, range(3))
    assert same(other.parameters(), model.parameters())


def test_groups_that_the_optimizer_names_are_enough():
    model = Alike()
    clip = ClipPerGroup({"slow": 0.5})
    again = sent(GradScaler("cpu", model=model, clip=clip))
    groups = [
        {"params": model.first.parameters(), "name": "slow"},
        {"params": model.head.parameters()},
    ]
    train(model, torch.optim.SGD(groups, lr=0.01), again, range(2))


def test_names_that_the_optimizer_was_given_are_enough():
    ends = []
    for send in (True, False):
        model = Alike()
        scaler = GradScaler("cpu", model=model, clip=AdaptiveClip(0.01, exclude=("head.*",)))
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.01)
        ends.append(train(model, optimizer, sent(scaler) if send else scaler, range(3)))
    assert same(*ends)


def test_two_optimizers_of_one_size_are_not_taken_for_each_other():
    one, other = Alike(), Alike()
    scaler = GradScaler("cpu", model={"one": one, "other": other}, clip=ZScoreClip())
    optimizers = [sgd(model) for model in (one, other)]
    for model, optimizer in zip((one, other), optimizers, strict=True):
        train(model, optimizer, scaler, range(3))
    again = sent(scaler)
    with pytest.raises(ValueError, match="what it has learned so far"):
        train(other, sgd(other), again, [3])


def test_another_model_is_refused_by_its_first_difference():
    again = sent(GradScaler("cpu", model=Alike(), clip=ZScoreClip()))
    with pytest.raises(ValueError, match=r"first\.weight of shape \(3, 3\) where this model has"):
        again.model = Distinct()
    assert again.model is None
    smaller = nn.Module()
    smaller.first = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"head\.weight of shape \(3, 3\) where .* has no more"):
        again.model = smaller
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        again.model = "model"


def test_a_culprit_is_named_where_its_shape_tells_it_and_else_by_its_place():
    for kind, name in ((Distinct, "head.weight"), (Alike, "param_groups[0]['params'][2]")):
        model = kind()
        again, optimizer = sent(GradScaler("cpu", model=model)), sgd(model)
        train(model, optimizer, again, [0], bad=0)
        assert again.outcome.culprits == (name,)
        again.model = model
        train(model, optimizer, again, [0], bad=0)
        assert again.outcome.culprits == ("head.weight",)


def test_a_model_may_be_given_while_steps_are_taken():
    model = Alike()
    optimizer = sgd(model)
    scaler = GradScaler("cpu", clip=ClipByNorm(1.0))
    train(model, optimizer, scaler, [0], bad=0)
    assert scaler.outcome.culprits == ("param_groups[0]['params'][2]",)
    scaler.model = model
    train(model, optimizer, scaler, [0], bad=0)
    assert scaler.outcome.culprits == ("head.weight",)


def test_it_is_sent_on_from_there():
    model = Distinct()
    scaler = sent(
        sent(GradScaler("cpu", model=model, clip=AdaptiveClip(0.01, exclude=("head.*",))))
    )
    assert copy.deepcopy(scaler).model is None
    train(model, sgd(model), copy.deepcopy(scaler), range(2))


def _worker(rank, scaler, state, result):
    """What a launcher runs in each process that it spawns."""
    model = Alike()
    model.load_state_dict(state)
    scaler.model = model
    optimizer = sgd(model)
    ends = train(model, optimizer, scaler, range(8, 12), bad=9)
    train(model, optimizer, scaler, [0], bad=0)
    result.put((rank, [end.tolist() for end in ends], scaler.outcome.culprits))


def test_a_spawned_process_goes_on_by_names():
    model = Alike()
    scaler = GradScaler("cpu", model=model, clip=AdaGC())
    optimizer = sgd(model)
    train(model, optimizer, scaler, range(8))
    state = copy.deepcopy(model.state_dict())
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_worker, args=(scaler, state, results), nprocs=1)
    rank, ends, culprits = results.get()
    expected = train(model, optimizer, scaler, range(8, 12), bad=9)
    assert rank == 0
    assert same([torch.tensor(end) for end in ends], expected)
    assert culprits == ("head.weight",)
