"""The fastai recipe against fastai's own callbacks."""

from __future__ import annotations

import pickle

import pytest
import torch
from fastai.basics import DataLoader, DataLoaders, Learner, OptimWrapper
from fastai.callback.core import Callback
from fastai.callback.training import GradientClip
from fastcore.foundation import L
from recipes import BAD, PlantedLoss, assert_equal, batches, network, recipe, weights

import gradilocks
from gradilocks import kernels


class Watch(Callback):
    """Records the weights, the norms and the cancelled steps."""

    order = 100

    def __init__(self):
        self.seen, self.cancelled, self.outcomes = [], [], []

    def after_step(self):
        self.seen.append(weights(self.model))
        control = getattr(getattr(self.learn, "scaler", None), "control", None)
        self.outcomes.append(control and control.outcome)

    def after_cancel_step(self):
        self.cancelled.append(self.train_iter)


def split(model):
    return [list(model[0].parameters()), list(model[2].parameters())]


def learner(*callbacks, bad=None, epochs=1, **options):
    data = DataLoader([pair for batch in batches() for pair in zip(*batch, strict=True)], bs=8)
    model, watch = network(), Watch()
    learn = Learner(DataLoaders(data, data), model, loss_func=PlantedLoss(bad), cbs=[watch, *callbacks], **options)
    with learn.no_bar(), learn.no_logging():
        learn.fit(epochs, lr=1e-2)
    return learn, watch


@pytest.fixture(scope="module")
def precision():
    return recipe("fastai")["ControlledPrecision"]


@pytest.mark.parametrize("options", [{}, {"splitter": split}], ids=["one group", "two groups"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_weights_are_those_of_fastai_alone(precision, clip, options):
    native, _ = learner(*([GradientClip(clip)] if clip else []), **options)
    ours, watch = learner(precision(clip=clip), **options)
    assert isinstance(ours.opt.param_groups[0]["params"], L)
    assert_equal(weights(ours.model), weights(native.model), is_exact=clip is None)
    assert not watch.cancelled
    assert all(outcome.clipped for outcome in watch.outcomes) == bool(clip)


def test_lists_of_fastai_reach_the_c_extension():
    """fastai's `L` is not a list: with the extension, 0.2 failed on it in every loop."""
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    for param in parameters:
        param.grad = torch.full_like(param, 2.0)
    assert kernels.norm(L(param.grad for param in parameters), 2.0) == pytest.approx(20**0.5)
    assert gradilocks.clip_grad_norm_(L(parameters), 1.0).item() == pytest.approx(20**0.5)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, gradilocks.optim.AdamW], ids=["torch", "ours"])
def test_optimizers_of_torch_work_in_their_wrapper(precision, optimizer):
    def make(params, lr):
        return OptimWrapper(params, optimizer, lr=lr)

    native, _ = learner(GradientClip(1.0), opt_func=make)
    ours, _ = learner(precision(clip=1.0), opt_func=make)
    assert_equal(weights(ours.model), weights(native.model), is_exact=False)


def test_one_planted_inf_is_one_skipped_step(precision):
    _, watch = learner(precision(clip=1.0), bad=BAD)
    assert [outcome.skipped for outcome in watch.outcomes] == [index == BAD for index in range(10)]
    assert watch.cancelled == [BAD]
    assert all(map(torch.equal, watch.seen[BAD], watch.seen[BAD - 1]))
    assert not all(map(torch.equal, watch.seen[BAD + 1], watch.seen[BAD]))
    assert watch.outcomes[BAD].culprits[0] == "2.bias"
    assert [outcome.scale for outcome in watch.outcomes] == [65536.0] * (BAD + 1) + [32768.0] * 4


def test_the_state_carries_over_to_the_next_fit_and_the_learner_can_be_pickled(precision, monkeypatch):
    monkeypatch.setitem(globals(), "ControlledPrecision", precision)
    monkeypatch.setattr(precision, "__module__", __name__)  # So that pickle finds the class.
    learn, watch = learner(precision(clip=1.0), bad=BAD)
    with learn.no_bar(), learn.no_logging():
        learn.fit(1)
    assert watch.outcomes[-1].step == 20
    assert watch.outcomes[-1].scale == 32768.0
    learn.remove_cb(watch)
    learn.dls = None  # As `learn.export` does.
    assert_equal(weights(pickle.loads(pickle.dumps(learn)).model), weights(learn.model), is_exact=True)
