"""NaN and -inf that belong there, missing values and masks, are not blamed for a fault elsewhere.

Both sides of each rule: the same models with the fault in what was given, or in the mask itself.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradilocks
from gradilocks.lab.trace import Tracer

NAN, INF = float("nan"), float("inf")
CAUSAL = nn.Transformer.generate_square_subsequent_mask(4)
ALL_MASKED = CAUSAL.index_fill(0, torch.tensor(2), -INF)


def look(net, *given, loss=lambda out: out.square().mean(), **named):
    """Calls a model, runs it backward, and has the step looked at."""
    tracer = Tracer([net])
    tracer.kept.follow([net])
    net.zero_grad()
    cost = loss(net(*given, **named))
    cost.backward()
    bad = not bool(cost.isfinite().all())
    tracer.look(1, tracer.kept.take(), loss_is_bad=bad)
    tracer.close()
    return tracer.findings


def said(found):
    return found.where, found.module, found.certainty


class Gate(nn.Module):
    """Divides by what it is told to."""

    def __init__(self, by=0.0):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x / self.by


class Length(nn.Module):
    """Whose gradient is NaN at zero."""

    def forward(self, x):
        return x.square().sum(-1, keepdim=True).sqrt()


class Log(nn.Module):
    def forward(self, x):
        return x.relu().log()


class Masks(nn.Module):
    """Adds a mask of -inf."""

    def __init__(self, mask=CAUSAL):
        super().__init__()
        self.mask = mask

    def forward(self, scores):
        return scores + self.mask


# --- what the model was given ------------------------------------------------------------------


class Table(nn.Module):
    """Missing values are NaN, as pandas has them; filled before or in a module, or never."""

    def __init__(self, behind, fill=torch.nan_to_num):
        super().__init__()
        self.first, self.behind, self.last = nn.Linear(4, 4, bias=False), behind, nn.LazyLinear(2)
        self.fill = fill
        self(torch.ones(1, 4))

    def forward(self, x):
        return self.last(self.behind(self.first(self.fill(x))))


class Fill(nn.Module):
    def forward(self, x):
        return x.nan_to_num()


def with_missing():
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    x[0, 0] = NAN
    return x


@pytest.mark.parametrize("fill", [torch.nan_to_num, Fill()], ids=["inline", "module"])
def test_missing_values_that_are_filled_are_not_the_fault_of_a_later_module(fill):
    (found,) = look(Table(Gate(), fill), with_missing())
    assert said(found) == ("module", "behind", "certain")
    x = with_missing()
    x[1] = 0.0
    (found,) = look(Table(Length(), fill), x)
    assert (*said(found), found.phase) == ("module", "behind", "certain", "backward")
    assert look(Table(nn.Tanh(), fill), with_missing()) == []


@pytest.mark.parametrize("fill", [nn.Identity(), torch.clone, torch.neg])
def test_missing_values_that_nobody_fills_are_the_fault(fill):
    (found,) = look(Table(nn.Tanh(), fill), with_missing())
    assert said(found) == ("input", "", "certain")


def test_missing_values_with_a_fault_of_the_loss():
    (found,) = look(Table(nn.Tanh()), with_missing(), loss=lambda out: out.sum() * NAN)
    assert said(found) == ("after", "", "certain")


class Block(nn.Module):
    """Has something to compute between its modules."""

    def __init__(self, by):
        super().__init__()
        self.first, self.last, self.by = nn.Linear(4, 4), nn.Linear(4, 2), by

    def forward(self, x):
        return self.last(self.first(x) / self.by)


def test_missing_values_with_a_fault_between_modules():
    net = Table(Block(0.0))
    (found,) = look(net, with_missing())
    assert said(found) == ("module", "behind", "certain")
    assert "in what behind (Block) computes itself, before behind.last" in found.text

    class Fills(Block):  # Whether they were filled, nobody can see.
        def forward(self, x):
            return super().forward(x.nan_to_num())

    (found,) = look(Fills(0.0), with_missing())
    assert found.certainty == "likely"
    assert "on finite values after that, so that it may have been replaced" in found.text


class Tasks(nn.Module):
    """Labels that are missing are NaN."""

    def __init__(self, behind, masked=True):
        super().__init__()
        self.first, self.behind, self.last = nn.Linear(4, 4), behind, nn.Linear(4, 3)
        self.masked = masked

    def forward(self, x, labels=None):
        out = self.last(self.behind(self.first(x)))
        known = ~labels.isnan() if self.masked else slice(None)
        return (out[known] - labels[known]).square().mean(), out


def test_missing_labels_are_the_fault_only_if_they_are_not_masked():
    labels = torch.randn(5, 3)
    labels[0, 1] = NAN
    first = lambda out: out[0]  # noqa: E731
    (found,) = look(Tasks(Gate()), torch.randn(5, 4), loss=first, labels=labels)
    assert said(found) == ("module", "behind", "certain")
    (found,) = look(Tasks(nn.Tanh(), masked=False), torch.randn(5, 4), loss=first, labels=labels)
    assert said(found) == ("input", "", "likely")
    assert look(Tasks(nn.Tanh()), torch.randn(5, 4), loss=first, labels=labels) == []


def test_of_two_things_that_were_given_the_one_that_was_not_filled_is_told():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fill, self.last = Fill(), nn.Linear(4, 4)

        def forward(self, x, labels):
            return self.last(self.fill(x)) - labels

    (found,) = look(Both(), with_missing(), torch.full((5, 4), NAN))
    assert found.where == "input"
    assert "in the input: input[1] (float32 5x4, 20 NaN)" in found.text


def test_missing_values_that_one_module_fills_and_another_does_not_are_the_fault():
    class Both(nn.Module):
        def __init__(self, second):
            super().__init__()
            self.fill, self.second, self.last = Fill(), second, nn.Linear(4, 1)

        def forward(self, x):
            return self.last(self.fill(x) + self.second(x))

    (found,) = look(Both(nn.Linear(4, 4)), with_missing())
    assert said(found) == ("input", "", "likely")
    assert "a module had made something finite of it before" in found.text
    assert look(Both(Fill()), with_missing()) == []
    (found,) = look(Both(nn.Sequential(Fill(), Gate())), with_missing())
    assert said(found) == ("module", "second.1", "certain")


# --- masks -------------------------------------------------------------------------------------


class Attends(nn.Module):
    """Attention under a mask that it is given, and something behind it."""

    def __init__(self, behind, shown=lambda mask: mask):
        super().__init__()
        self.qkv, self.proj, self.behind = nn.Linear(8, 24), nn.Linear(8, 8), behind
        self.shown = shown

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) + self.shown(mask)
        return self.behind(x + self.proj(scores.softmax(-1) @ v))


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 8), block, nn.LazyLinear(3)
        self(torch.ones(1, 4, 4), torch.zeros(4, 4))

    def forward(self, x, mask=None):
        return self.last(self.block(self.first(x), mask))


def test_a_mask_that_was_given_is_not_the_fault_of_a_module_beside_it():
    x = torch.randn(2, 4, 4)
    (found,) = look(Model(Attends(Gate())), x, CAUSAL)
    assert said(found) == ("module", "block.behind", "certain")
    net = Model(Attends(Length()))
    nn.init.zeros_(net.block.proj.weight), nn.init.zeros_(net.block.proj.bias)
    nn.init.zeros_(net.first.bias)
    x[0, 1] = 0.0
    (found,) = look(net, x, CAUSAL)
    assert (*said(found), found.phase) == ("module", "block.behind", "certain", "backward")
    assert look(Model(Attends(nn.Identity())), torch.randn(2, 4, 4), CAUSAL) == []


def test_a_mask_that_hides_a_whole_row_is_no_certain_fault_of_the_data():
    (found,) = look(Model(Attends(nn.Identity())), torch.randn(2, 4, 4), ALL_MASKED)
    assert found.certainty == "likely"
    assert (found.where, found.module) == ("module", "block") or found.where == "input"

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x, mask):
            return self.attention(x, x, x, attn_mask=mask[:4, :4])[0]

    (found,) = look(Model(Layer()), torch.randn(2, 4, 4), ALL_MASKED)
    assert said(found) == ("module", "block.attention", "likely")
    assert "it was given -inf too, as a mask holds it" in found.text


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x.flatten(1), lambda x: x.clone()])
def test_data_with_minus_infinity_are_no_mask(change):
    """As the logarithm of an empty bin leaves it."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.last(self.first(change(x)))

    data = torch.randn(5, 4)
    data[1, 1] = -INF
    for net in (Plain(), nn.Linear(4, 2)):
        (found,) = look(net, data)
        assert said(found) == ("input", "", "certain"), found.text


class Scores(nn.Module):
    """Attention whose mask and softmax are modules, or are not."""

    def __init__(self, mask, softmax, behind):
        super().__init__()
        self.masks, self.softmax, self.behind = Masks(mask), softmax, behind
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        shares = self.softmax(self.masks(q @ k.transpose(-2, -1)))
        return self.proj(self.behind(shares @ v))


def inline(scores):
    return scores.softmax(-1)


@pytest.mark.parametrize("softmax", [nn.Softmax(-1), inline], ids=["module", "inline"])
def test_a_module_that_masks_is_not_the_fault_of_a_later_one(softmax):
    x = torch.randn(2, 4, 4)
    (found,) = look(Model(Scores(CAUSAL, softmax, Gate())), x)
    assert said(found) == ("module", "block.behind", "certain")
    (found,) = look(Model(Scores(CAUSAL, softmax, nn.Tanh())), x, loss=lambda out: out.sum() * NAN)
    assert said(found) == ("after", "", "certain")
    (found,) = look(Model(Scores(ALL_MASKED, softmax, nn.Tanh())), x)
    certainty = "certain" if softmax is not inline else "likely"
    assert said(found) == ("module", "block.masks", certainty)


def test_a_logarithm_of_zero_is_a_fault_as_soon_as_a_module_makes_more_of_it():
    net = nn.Sequential(nn.Linear(4, 4), Log(), nn.Dropout(0.0), nn.Linear(4, 2))
    (found,) = look(net, torch.randn(5, 4))
    assert said(found) == ("module", "1", "certain")


def test_a_module_that_makes_more_than_a_mask_stays_the_first():
    (found,) = look(nn.Sequential(nn.Linear(4, 4), Gate(), nn.Tanh(), Gate()), torch.randn(5, 4))
    assert said(found) == ("module", "1", "likely")
    assert "3 made Inf of finite values as well, later" in found.text

    class Branches(nn.Module):
        def __init__(self, second):
            super().__init__()
            self.first, self.gate, self.second = nn.Linear(4, 4), Gate(), second

        def forward(self, x):
            x = self.first(x)
            return self.gate(x) + self.second(x)

    (found,) = look(Branches(Gate()), torch.randn(5, 4))
    assert said(found) == ("module", "gate", "certain")
    (found,) = look(Branches(nn.Sequential(nn.Linear(4, 4), Gate())), torch.randn(5, 4))
    assert said(found) == ("module", "gate", "likely")
    assert "second.1 made Inf of finite values as well, later" in found.text


class Distances(nn.Module):
    """From oneself: infinite, so that one is not one's own neighbour."""

    def forward(self, x):
        return torch.cdist(x, x).masked_fill(torch.eye(len(x)).bool(), INF)


def test_infinities_that_a_model_replaces_itself_are_not_certainly_the_fault():
    class Neighbours(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.first, self.distances, self.last = nn.Linear(4, 4), Distances(), nn.Linear(4, 4)
            self.by = by

        def forward(self, x):
            x = self.first(x)
            return self.last((-self.distances(x)).softmax(-1) @ x) / self.by

    (found,) = look(Neighbours(0.0), torch.randn(5, 4))
    assert found.certainty == "likely"
    assert "so that it may have been replaced" in found.text
    (found,) = look(Neighbours(1.0), torch.randn(5, 4), loss=lambda out: out.sum() * NAN)
    assert said(found) == ("after", "", "certain")


def test_what_is_computed_beside_a_fault_makes_it_no_less_certain():
    class Queries(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries, self.keys = nn.Sequential(nn.Linear(4, 4), Gate()), nn.Linear(4, 4)
            self.last = nn.Linear(5, 1)

        def forward(self, x):
            return self.last(self.queries(x) @ self.keys(x).T)

    (found,) = look(Queries(), torch.randn(5, 4))
    assert said(found) == ("module", "queries.1", "certain")


# --- outputs that the loss does not use, and masks in those that it uses -------------------------


class TwoHeads(nn.Module):
    """A result, and something for a metric."""

    def __init__(self, behind, metric):
        super().__init__()
        self.first, self.behind, self.metric = nn.Linear(4, 4, bias=False), behind, metric

    def forward(self, x):
        return {"out": self.behind(self.first(x)), "metric": self.metric(self.first(x) * 1.0)}


@pytest.mark.parametrize("metric", [Log(), Gate()], ids=["-inf", "Inf"])
def test_an_output_that_gets_no_gradient_has_not_spoilt_any(metric):
    x = torch.randn(5, 4)
    x[1] = 0.0
    (found,) = look(TwoHeads(Length(), metric), x, loss=lambda out: out["out"].sum())
    assert (*said(found), found.phase) == ("module", "behind", "certain", "backward")
    (found,) = look(TwoHeads(nn.Tanh(), metric), x, loss=lambda out: out["out"].sum() * NAN)
    assert said(found) == ("after", "", "likely"), "it may have used that output, detached"
    assert "the model's output held " in found.text
    assert look(TwoHeads(nn.Tanh(), metric), x, loss=lambda out: out["out"].sum()) == []


def test_an_output_that_gets_no_gradient_is_told_if_the_loss_is_bad_and_nothing_else_is():
    both = lambda out: out["out"].sum() + out["metric"].detach().sum()  # noqa: E731
    (found,) = look(TwoHeads(nn.Tanh(), Gate()), torch.randn(5, 4), loss=both)
    assert said(found) == ("module", "metric", "likely")
    assert "no gradient came to the output that it spoilt" in found.text


def test_an_output_that_the_loss_uses_is_told():
    both = lambda out: out["out"].sum() + out["metric"].sum()  # noqa: E731
    for metric in (Log(), Gate()):
        (found,) = look(TwoHeads(nn.Tanh(), metric), torch.randn(5, 4), loss=both)
        assert said(found) == ("module", "metric", "certain"), found.text


class Shares(nn.Module):
    """An output that another module is given too."""

    def __init__(self, behind):
        super().__init__()
        self.first, self.behind = nn.Linear(4, 4, bias=False), behind

    def forward(self, x):
        x = self.first(x)
        return x, self.behind(x)


def test_a_bad_gradient_of_an_output_that_a_module_was_given_too():
    weighted = lambda out: (out[0] * out[1].detach()).sum()  # noqa: E731
    (found,) = look(Shares(Gate()), torch.randn(5, 4), loss=weighted)
    assert said(found) == ("after", "", "likely"), "behind was not run backward"
    assert "held Inf too, from behind, and the loss may have used that" in found.text
    (found,) = look(Shares(Length()), torch.zeros(5, 4), loss=lambda out: out[1].sum())
    assert (*said(found), found.phase) == ("module", "behind", "likely", "backward")
    assert "that is an output of the model too, and the loss may have made it" in found.text


def policy(reward):
    def loss(scores):
        taken = functional.log_softmax(scores, -1)[:, 0]
        return -(taken * torch.tensor([1.0, reward, 2.0, 1.0])).mean()

    return loss


def test_whether_the_loss_or_a_mask_in_what_it_was_given_made_nan_is_not_certain():
    net = nn.Sequential(nn.Linear(4, 4), Masks())
    (found,) = look(net, torch.randn(4, 4), loss=policy(NAN))
    assert said(found) == ("after", "", "likely")
    assert "the model's output held -inf too, from 1, and the loss may have used that" in found.text
    assert look(net, torch.randn(4, 4), loss=policy(1.0)) == []
    shifted = lambda scores: policy(1.0)(scores) + INF  # noqa: E731 # Its gradients are finite.
    (found,) = look(net, torch.randn(4, 4), loss=shifted)
    assert (found.where, found.certainty) == ("after", "likely")


def test_minus_infinity_that_the_loss_counts_is_no_mask():
    net = nn.Sequential(nn.Linear(4, 4), Log())
    for loss in (torch.sum, lambda out: out.square().mean()):
        (found,) = look(net, torch.randn(5, 4), loss=loss)
        assert said(found) == ("module", "1", "certain"), found.text


def test_what_a_loss_hides_is_not_what_spoils_it():
    x = torch.randn(4, 4)
    x[1] = 0.0

    def loss(out, last=1.0):
        known = out.isfinite()
        weights = torch.tensor([[1.0], [1.0], [1.0], [last]])
        return (torch.where(known, out, 0.0) * weights).sum()

    class Normalise(nn.Module):
        def forward(self, x):
            return x / x.detach().norm(dim=-1, keepdim=True)

    net = nn.Sequential(nn.Linear(4, 4, bias=False), Normalise())
    assert look(net, x[[0, 2, 3, 0]], loss=loss) == []
    (found,) = look(net, x, loss=lambda out: loss(out[[0, 0, 2, 3]], NAN))
    assert found.where == "after"
    assert found.certainty == "likely"


def test_masks_of_a_step_that_is_followed_as_it_trains_are_no_finding():
    net = nn.Sequential(nn.Linear(4, 4), Masks())
    with gradilocks.trace(net) as tracer:
        tracer.arm()
        before = net(torch.randn(4, 4)).softmax(-1).detach()  # A rollout.
        (policy(1.0)(net(torch.randn(4, 4))) + before.sum()).backward()
    assert tracer.findings == []
