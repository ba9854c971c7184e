"""What forward passes show: outputs that a format cannot hold, and who computes their gradients."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradilocks
from gradilocks.lab.audit import Audit


def mean(model, batch):
    return model(batch).square().mean()


def takers(model, batch=None, loss=mean):
    torch.manual_seed(0)
    found = gradilocks.audit(model, loss, [torch.randn(4, 8) if batch is None else batch])
    return {module.name: module.outputs.takers for module in found.modules if module.outputs}


def fp16_of(found):
    return next(each for each in found.formats if each.format.name == "fp16")


def train(make, loss_fn, draw, *, format=None, scale=None, keep=(), steps=60):
    """The final loss, and how many steps were skipped."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    control = gradilocks.GradientControl(optimizer, model=model, scale=scale, give_up_after=None)
    kept = [model.get_submodule(name) for name in keep]
    inside = gradilocks.emulate(format, keep=kept) if format else contextlib.nullcontext()
    drawn, skipped, losses = torch.Generator().manual_seed(2), 0, []
    for _ in range(steps):
        with inside:
            loss = loss_fn(model, draw(drawn))
        control.backward(loss)
        skipped += control.step().skipped
        control.zero_grad()
        losses.append(loss.item())
    return sum(losses[-6:]) / 6, skipped


# --- outputs that are too large ----------------------------------------------------------------


def large_inside():
    """A layer that returns hundreds of thousands, and a LayerNorm that makes ones of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 4))
    model[0].weight.data.mul_(3e5)
    return model


def classes(drawn):
    rule = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))
    inputs = torch.randn(64, 16, generator=drawn)
    return inputs, (inputs @ rule).argmax(1)


def entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def test_a_model_whose_forward_pass_overflows_fp16_is_not_sent_there_and_what_it_gets_trains():
    drawn = torch.Generator().manual_seed(1)
    found = gradilocks.audit(large_inside(), entropy, [classes(drawn) for _ in range(4)])
    advice = found.recommendation
    assert (advice.format, fp16_of(found).holds) == ("bf16", False)
    assert any("does not hold what module 0 returns: it" in words for words in advice.words)
    assert any("fp16 ends at 65504, which no loss scale" in words for words in advice.words)
    assert found.modules[0].outputs.largest > 65504
    right, _ = train(large_inside, entropy, classes)
    given, skipped = train(large_inside, entropy, classes, format=advice.format, keep=advice.keep)
    assert skipped == 0
    assert given == pytest.approx(right, rel=0.02)
    scale = gradilocks.DynamicScale(init_scale=fp16_of(found).scale)
    assert train(large_inside, entropy, classes, format="fp16", scale=scale, steps=10)[1] == 10


def test_one_module_with_large_outputs_among_many_is_kept_with_its_taker():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    for layer in model:
        nn.init.orthogonal_(layer.weight)
    model[4].weight.data.mul_(1e6)
    model[5].weight.data.mul_(1e-6)
    found = gradilocks.audit(model, mean, [torch.randn(16, 8)])
    assert fp16_of(found).keep == ("4", "5")
    assert any(
        "Keep module 4 in float32: it returns values" in w for w in found.recommendation.words
    )


def test_large_outputs_of_a_frozen_part_count_too():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Linear(8, 8).requires_grad_(False)
            self.backbone.weight.mul_(1e6)
            self.norm = nn.LayerNorm(8)
            self.head = nn.Linear(8, 1)

        def forward(self, x):
            return self.head(self.norm(self.backbone(x)))

    found = gradilocks.audit(Frozen(), mean, [torch.randn(4, 8)])
    assert "backbone" in [module.name for module in found.modules]
    assert not fp16_of(found).holds
    assert Audit.from_plain(found.to_plain()) == found
    assert "backbone" in str(found)


def test_a_loss_in_a_module_may_be_as_large_as_it_likes():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.measure = nn.Linear(8, 1), nn.MSELoss(reduction="sum")

        def forward(self, x):
            return self.measure(self.layer(x), torch.full((len(x), 1), 1e4))

    found = gradilocks.audit(Whole(), lambda model, x: model(x) * 1e-9, [torch.randn(4, 8)])
    assert fp16_of(found).holds


def test_outputs_that_are_not_finite_are_counted_and_the_largest_of_the_others_is_told():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([-3.0, 1.0]))

        def forward(self, x):
            return torch.where(x > 0, self.weight, float("-inf"))

    found = gradilocks.audit(Masked(), lambda m, x: m(x)[0].sum(), [torch.tensor([[1.0], [-1.0]])])
    assert (found.modules[0].outputs.largest, found.modules[0].outputs.nonfinite) == (3.0, 2)


def test_an_audit_written_before_outputs_were_noted_is_still_read():
    found = gradilocks.audit(nn.Linear(8, 1), mean, [torch.randn(4, 8)])
    plain = found.to_plain()
    for module in plain["modules"]:
        del module["outputs"]
    assert Audit.from_plain(plain).modules[0].outputs is None


# --- who takes what ----------------------------------------------------------------------------


def test_takers_are_found_through_modules_functions_and_places_in_place():
    chain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    assert takers(chain) == {"0": ("1",), "1": ("2",), "2": ()}

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            h = self.norm(x)
            q, k, v = self.q(h), self.k(h), self.v(h)
            return x + self.out(F.scaled_dot_product_attention(q, k, v))

    assert takers(Attention()) == {
        "norm": ("q", "k", "v"), "q": ("out",), "k": ("out",), "v": ("out",), "out": (),
    }  # fmt: skip
    model = nn.Sequential(Attention(), Attention())
    assert takers(model)["0.out"] == ("1.norm",)


def test_a_block_with_parameters_of_its_own_does_not_stand_for_the_part_that_takes():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.gain = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

        def forward(self, x):
            return self.gain * self.inner(x)

    found = takers(nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 1)))
    assert found["0"] == ("1.inner",)
    assert found["1"] == ("2",)


def test_arguments_by_name_are_seen_and_the_next_batch_is_no_taker():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x):
            return self.second(input=self.first(input=x))

    def twice(model, batch):
        return mean(model, batch) + mean(model, batch)

    assert takers(Named(), loss=twice) == {"first": ("second",), "second": ()}


# --- keep --------------------------------------------------------------------------------------


class Branch(nn.Module):
    """A branch that begins with next to nothing, as of LoRA, Fixup or ReZero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.rest = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.b.weight.data.mul_(1e-9)

    def forward(self, x):
        h = x + self.b(self.a(x))
        for layer in self.rest:
            h = torch.tanh(layer(h))
        return h


def test_who_computes_the_gradient_that_is_lost_is_kept_too_and_then_nothing_is_lost():
    model, batch = Branch(), torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    advice = gradilocks.audit(model, mean, [batch]).recommendation
    assert (advice.format, advice.keep) == ("fp16", ("a", "b"))
    assert any(words.startswith("Keep b as well") for words in advice.words)

    def gradient(format, keep):
        model.zero_grad()
        kept = [model.get_submodule(name) for name in keep]
        with gradilocks.emulate(format, keep=kept):
            loss = mean(model, batch)
        (loss * advice.scale).backward()
        return model.a.weight.grad / advice.scale

    right = gradient("fp32", ())
    assert gradient("fp16", ("a",)).abs().max() == 0
    assert gradient("fp16", ("b",)).abs().max() == 0
    assert (gradient("fp16", advice.keep) - right).norm() < 0.01 * right.norm()


class Times(nn.Linear):
    """A layer whose weight is multiplied by a constant."""

    def __init__(self, factor):
        super().__init__(16, 16)
        self.factor = factor

    def forward(self, x):
        return F.linear(x, self.weight * self.factor, self.bias)


def large_between():
    """Large numbers between two layers, and tiny gradients for them."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(8)]
    layers[4:4] = [Times(2.0**24), Times(2.0**-24)]
    model = nn.Sequential(*layers)
    for layer in model:
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return model


def numbers(drawn):
    rule = torch.randn(16, generator=torch.Generator().manual_seed(5))
    inputs = torch.randn(64, 16, generator=drawn)
    return inputs, inputs @ rule


def error(model, batch):
    return F.mse_loss(model(batch[0]).sum(1), batch[1])


def test_training_needs_what_is_to_be_kept_and_matches_float32_with_it():
    drawn = torch.Generator().manual_seed(1)
    found = gradilocks.audit(large_between(), error, [numbers(drawn) for _ in range(4)])
    advice = found.recommendation
    assert (advice.format, advice.keep) == ("fp16", ("4", "5"))
    right, _ = train(large_between, error, numbers)

    def trained(keep):
        scale = gradilocks.StaticScale(advice.scale)
        return train(large_between, error, numbers, format="fp16", scale=scale, keep=keep)

    kept, skipped = trained(advice.keep)
    assert skipped == 0
    assert kept == pytest.approx(right, rel=0.05)
    for fewer in ((), ("4",), ("5",)):
        lost, skipped = trained(fewer)
        assert skipped > 30 or lost > 1.25 * right


def test_an_attention_is_kept_as_a_whole_since_it_computes_with_its_projection():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.rest = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))

        def forward(self, x):
            return self.rest(x + 1e-12 * self.attention(x, x, x)[0])

    model = Attending()
    found = gradilocks.audit(model, mean, [torch.randn(16, 5, 8)])
    keep = found.recommendation.keep
    assert "attention" in keep
    kept = [model.get_submodule(name) for name in keep]
    with gradilocks.emulate("fp16", keep=kept):
        mean(model, torch.randn(2, 5, 8))
