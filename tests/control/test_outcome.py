"""What a step tells: the Outcome's fields, when they are read, and what the culprits are called."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import gradilocks.step.outcome
from gradilocks import (
    ClipByNorm,
    ClipByValue,
    DynamicScale,
    GradientControl,
    GradScaler,
    Outcome,
    SkipSpikes,
)
from gradilocks.errors import NeverFinite
from tests.control.gradient_scripts import INF, NAN, control_step, loss_making, parameter


@pytest.fixture
def reads(monkeypatch):
    """Counts how often scalars are brought to the host."""
    counted = []
    real = gradilocks.step.outcome.fetch

    def counting(*scalars):
        counted.append(len(scalars))
        return real(*scalars)

    monkeypatch.setattr(gradilocks.step.outcome, "fetch", counting)
    return counted


def chain(depth=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(depth)))


def step_with(control, model, planted):
    """A step on finite gradients but for those planted by name."""
    control.zero_grad()
    control.backward(model(torch.ones(1, 2)).sum())
    for name, values in planted.items():
        gradient = model.get_parameter(name).grad.view(-1)
        gradient[: len(values)] = torch.tensor(values)
    return control.step()


def test_a_finite_step_tells_its_norm_its_scale_and_no_culprits():
    p, q = parameter(0.0, 0.0), parameter(0.0, 0.0, 0.0)
    control = GradientControl(torch.optim.SGD([p, q], lr=0.1), scale=64.0)
    outcome = control_step(
        control, (p, torch.tensor([3.0, 4.0])), (q, torch.tensor([0.0, 0.0, 12.0]))
    )
    assert isinstance(outcome, Outcome)
    assert outcome.step == 1
    assert outcome.skipped is False
    assert outcome.clipped is False
    assert outcome.norm == pytest.approx(13.0, rel=1e-7)
    assert outcome.limit == INF
    assert outcome.scale == 64.0
    assert outcome.culprits == ()
    assert dict(outcome.counts) == {}
    assert outcome.describe() == "finite gradients"


def test_a_clipped_step_tells_the_limit_and_the_norm_before_it():
    p = parameter(0.0, 0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), clip=1.0)
    outcome = control_step(control, (p, torch.tensor([3.0, 4.0])))
    assert (outcome.clipped, outcome.limit) == (True, 1.0)
    assert outcome.norm == pytest.approx(5.0, rel=1e-7)


@pytest.mark.parametrize("clip", [ClipByNorm(1e-3), ClipByValue(1e-3)])
@pytest.mark.parametrize(("bad", "norm"), [(INF, INF), (-INF, INF), (NAN, NAN)])
def test_a_skipped_step_is_not_a_clipped_one(clip, bad, norm):
    p = parameter(0.0, 0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), clip=clip)
    outcome = control_step(control, (p, torch.tensor([5.0, bad])))
    assert (outcome.skipped, outcome.clipped) == (True, False)
    assert outcome.norm == pytest.approx(norm, nan_ok=True)


def test_the_scale_told_is_the_one_that_the_gradients_carried():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=DynamicScale(init_scale=32.0))
    first = control_step(control, (p, INF))
    second = control_step(control, (p, 1.0))
    assert (first.scale, second.scale) == (32.0, 16.0)


def test_outcomes_read_late_tell_what_was_true_then():
    p = parameter(0.0, 0.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1),
        scale=DynamicScale(init_scale=8.0, growth_interval=1),
        clip=3.0,
    )
    script = [1.0, INF, 4.0, NAN, 2.0]
    outcomes = [control_step(control, (p, torch.tensor([g, 0.0]))) for g in script]
    assert [o.step for o in outcomes] == [1, 2, 3, 4, 5]
    assert [o.skipped for o in outcomes] == [False, True, False, True, False]
    assert [o.clipped for o in outcomes] == [False, False, True, False, False]
    assert [o.scale for o in outcomes] == [8.0, 16.0, 8.0, 16.0, 8.0]
    assert [o.norm for o in outcomes] == pytest.approx([1, INF, 4, NAN, 2], nan_ok=True)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0, ClipByValue(1.0)])
def test_stepping_and_holding_outcomes_reads_nothing(reads, fused, clip):
    p = parameter(0.0, 0.0)
    control = GradientControl(torch.optim.Adam([p], lr=0.1, fused=fused), clip=clip)
    held = [control_step(control, (p, INF if k % 7 == 3 else 1.0)) for k in range(50)]
    assert reads == []
    assert held[3].skipped
    assert len(reads) == 1


def test_an_outcome_is_read_once_whatever_is_asked(reads):
    p = parameter(0.0, 0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), clip=1.0)
    outcome = control_step(control, (p, NAN))
    for _ in range(3):
        _ = outcome.skipped, outcome.norm, outcome.clipped, outcome.scale, outcome.limit
        _ = outcome.culprits, outcome.counts, outcome.describe(), repr(outcome)
    assert len(reads) == 1


def test_the_step_number_costs_no_reading(reads):
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1))
    assert control_step(control, (p, 1.0)).step == 1
    assert reads == []


def test_the_counter_of_bad_steps_is_read_once_in_give_up_after_steps(monkeypatch):
    p = parameter(0.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1, fused=True), give_up_after=10, scale=None
    )
    counted = []
    real = torch.Tensor.item
    monkeypatch.setattr(
        torch.Tensor, "item", lambda t: counted.append(t.dtype) or real(t), raising=True
    )
    for _ in range(40):
        control_step(control, (p, 1.0))
    assert counted.count(torch.int32) == 4


def test_culprits_come_in_backward_order_with_their_counts():
    model = chain()
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    outcome = step_with(
        control, model, {"0.bias": [NAN], "1.weight": [INF, -INF, NAN], "2.weight": [INF]}
    )
    assert outcome.culprits == ("2.weight", "1.weight", "0.bias")
    counts = outcome.counts
    assert [(c.nan, c.inf) for c in counts.values()] == [(0, 1), (1, 2), (1, 0)]
    assert [str(c) for c in counts.values()] == ["Inf", "NaN and Inf", "NaN"]
    assert outcome.describe() == "Inf in 2.weight, NaN and Inf in 1.weight, NaN in 0.bias"
    assert outcome.describe(at_most=1) == "Inf in 2.weight (+2 more)"


def test_backward_order_is_the_models_when_weights_and_biases_have_their_own_groups():
    model = chain()
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    control = GradientControl(torch.optim.AdamW(groups, lr=0.1), model=model)
    planted = {name: [NAN] for name, _ in model.named_parameters()}
    outcome = step_with(control, model, planted)
    assert outcome.culprits == ("2.bias", "2.weight", "1.bias", "1.weight", "0.bias", "0.weight")


def test_backward_order_is_the_models_when_the_head_has_an_optimizer_of_its_own():
    model = chain()
    head = torch.optim.SGD(model[2].parameters(), lr=0.1)
    body = torch.optim.SGD(model[:2].parameters(), lr=0.1)
    control = GradientControl(head, body, model=model)
    outcome = step_with(control, model, {"0.weight": [INF], "2.weight": [NAN]})
    assert outcome.culprits == ("2.weight", "0.weight")


def test_without_a_model_a_culprit_is_named_by_its_place_in_the_optimizer():
    p, q, r = parameter(0.0), parameter(0.0), parameter(0.0)
    groups = [{"params": [p]}, {"params": [q, r]}]
    control = GradientControl(torch.optim.SGD(groups, lr=0.1))
    outcome = control_step(control, (p, 1.0), (q, 1.0), (r, NAN))
    assert outcome.culprits == ("param_groups[1]['params'][1]",)


def test_without_a_model_the_place_tells_several_optimizers_apart():
    p, q = parameter(0.0), parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), torch.optim.SGD([q], lr=0.1))
    outcome = control_step(control, (p, NAN), (q, INF))
    assert outcome.culprits == (
        "optimizers[1].param_groups[0]['params'][0]",
        "optimizers[0].param_groups[0]['params'][0]",
    )


def test_an_optimizer_built_from_named_parameters_brings_the_names():
    model = chain(2)
    control = GradientControl(torch.optim.SGD(model.named_parameters(), lr=0.1))
    assert step_with(control, model, {"1.bias": [NAN]}).culprits == ("1.bias",)


def test_two_optimizers_whose_named_parameters_are_called_alike_lose_no_culprit():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    control = GradientControl(
        torch.optim.SGD(one.named_parameters(), lr=0.1),
        torch.optim.SGD(two.named_parameters(), lr=0.1),
    )
    control.backward(two(one(torch.ones(1, 2))).sum())
    one.weight.grad[0] = NAN
    two.weight.grad[0] = INF
    counts = control.step().counts
    assert len(counts) == 2
    assert all("weight" in name for name in counts)


def test_the_model_names_parameters_better_than_the_optimizer():
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2)})
    control = GradientControl(
        torch.optim.SGD(model["encoder"].named_parameters(), lr=0.1), model=model
    )
    control.backward(model["encoder"](torch.ones(1, 2)).sum())
    model["encoder"].weight.grad[0, 0] = INF
    assert control.step().culprits == ("encoder.weight",)


def test_a_mapping_of_models_puts_its_keys_before_the_names():
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    control = GradientControl(
        torch.optim.SGD(generator.parameters(), lr=0.1),
        torch.optim.SGD(critic.parameters(), lr=0.1),
        model={"generator": generator, "critic": critic},
    )
    control.backward(critic(generator(torch.ones(1, 2))).sum())
    generator.bias.grad[0] = NAN
    critic.weight.grad[0, 0] = INF
    assert control.step().culprits == ("critic.weight", "generator.bias")


def test_a_culprit_outside_the_model_is_named_by_its_place():
    model, extra = nn.Linear(2, 2), parameter(0.0)
    control = GradientControl(torch.optim.SGD([*model.parameters(), extra], lr=0.1), model=model)
    control.backward(model(torch.ones(1, 2)).sum() + extra.sum())
    extra.grad[0] = NAN
    assert control.step().culprits == ("param_groups[0]['params'][2]",)


def test_a_tied_weight_has_one_name_and_is_counted_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(2, 2, bias=False)
            self.head = nn.Linear(2, 2, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    model = Tied()
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    control.backward(model(torch.ones(1, 2)).sum())
    norm = model.embed.weight.grad.div(control.scale).norm().item()
    assert control.step().norm == pytest.approx(norm, rel=1e-6)
    control.zero_grad()
    control.backward(model(torch.ones(1, 2)).sum())
    model.head.weight.grad[0, 0] = NAN
    outcome = control.step()
    assert {name: c.nan for name, c in outcome.counts.items()} == {"embed.weight": 1}


def test_repr_shows_what_happened():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1))
    shown = repr(control_step(control, (p, NAN)))
    for part in ("step=1", "skipped=True", "scale=65536", "param_groups[0]['params'][0]"):
        assert part in shown


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_the_norm_told_is_of_the_order_that_is_clipped(order):
    p, q = parameter(0.0, 0.0), parameter(0.0, 0.0, 0.0)
    control = GradientControl(torch.optim.SGD([p, q], lr=1.0), clip=ClipByNorm(1.0, order=order))
    outcome = control_step(
        control, (p, torch.tensor([3.0, 4.0])), (q, torch.tensor([0.0, 0.0, 12.0]))
    )
    expected = {1.0: 19.0, 2.0: 13.0, 3.0: 1819 ** (1 / 3), math.inf: 12.0}[order]
    assert outcome.norm == pytest.approx(expected, rel=1e-7)
    if order == 2.0:
        torch.testing.assert_close(-p.detach(), torch.tensor([0.23076922, 0.30769229]))
    if order == math.inf:
        torch.testing.assert_close(-p.detach(), torch.tensor([0.24999999, 0.33333331]))


def test_the_norm_of_gradients_that_unscale_made_true_is_not_divided_again():
    p = parameter(0.0, 0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=1024.0)
    control.backward(loss_making((p, torch.tensor([3.0, 4.0]))))
    control.unscale_()
    outcome = control.step()
    assert outcome.norm == pytest.approx(5.0, rel=1e-7)
    assert outcome.scale == 1024.0


@pytest.mark.parametrize("factor", [NAN, INF])
def test_a_loss_that_was_not_finite_names_no_parameter(factor):
    model = chain()
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    control.backward(model(torch.ones(1, 2)).sum() * factor)
    outcome = control.step()
    assert outcome.describe() == (
        "the loss itself was NaN or Inf (forward or loss, module unknown)"
    )
    assert len(outcome.culprits) == 6  # Who has them is told all the same.


def test_gradients_that_are_all_bad_do_not_tell_where_it_began():
    model = chain()
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    every = {name: [NAN] for name, _ in model.named_parameters()}
    outcome = step_with(control, model, every)
    assert outcome.describe() == (
        "NaN or Inf in all 6 gradients, so they do not tell where it began"
    )
    del every["2.bias"]
    assert step_with(control, model, every).describe().startswith("NaN in 2.weight, NaN in 1.bias")


def test_errors_of_steps_with_a_bad_loss_name_no_parameter_as_the_cause():
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    control = GradientControl(optimizer, model=model, give_up_after=2)

    def train():
        for _ in range(2):
            control.backward(model(torch.ones(1, 2)).sum() * NAN)
            control.step()
            control.zero_grad()

    with pytest.raises(NeverFinite) as caught:
        train()
    assert "forward or loss, module unknown" in str(caught.value)
    assert "2.bias" not in str(caught.value)
    assert caught.value.culprits[0] == "2.bias"


@pytest.mark.parametrize("planted", [{}, {"1.weight": [INF]}], ids=["taken", "skipped"])
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_the_tensors_of_an_outcome_say_what_its_properties_read_and_read_nothing(
    planted, clip, reads
):
    model = chain()
    control = GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.1), model=model, clip=clip, give_up_after=None
    )
    outcome = step_with(control, model, planted)
    reads.clear()
    tensors = outcome.tensors
    assert reads == []
    assert all(tensor.dim() == 0 for tensor in tensors.values())
    step_with(control, model, {"0.bias": [NAN]})  # What comes later does not write to them.
    assert outcome.skipped == bool(planted)
    assert outcome.clipped == (clip == 1e-3 and not planted)
    for name, tensor in tensors.items():
        assert tensor.item() == pytest.approx(getattr(outcome, name), rel=0, abs=0, nan_ok=True)
        assert isinstance(tensor.item(), type(getattr(outcome, name)))


def test_the_tensors_of_a_rejected_step_say_that_it_was_skipped():
    p = parameter(0.0)
    clip = SkipSpikes(window=2, at_least=2)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), clip=clip)
    for size in (1.0, 1.1, 1e6):
        outcome = control_step(control, (p, torch.tensor([size])))
    assert outcome.rejected
    assert outcome.tensors["skipped"].item() is True
    assert outcome.tensors["norm"].item() == 1e6


@pytest.mark.parametrize("bad", [None, INF])
def test_an_outcome_can_be_pickled_and_tells_the_same(bad):
    p = parameter(3)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), clip=1.0)
    outcome = control_step(control, (p, 1.0 if bad is None else bad))
    for copied in (pickle.loads(pickle.dumps(outcome)), copy.deepcopy(outcome)):
        for name in ("step", "skipped", "clipped", "norm", "scale", "limit", "culprits"):
            assert repr(getattr(copied, name)) == repr(getattr(outcome, name))
        assert copied.describe() == outcome.describe()
        with pytest.raises(AttributeError, match="nothing on the device"):
            copied.statistics  # noqa: B018
        with pytest.raises(AttributeError, match="nothing on the device"):
            copied.tensors  # noqa: B018
        assert repr(copied) == repr(outcome)


def test_the_outcome_of_a_scaler_can_be_pickled():
    p = nn.Parameter(torch.ones(2))
    scaler, optimizer = GradScaler("cpu"), torch.optim.SGD([p], lr=0.1)
    scaler.scale((p * INF).sum()).backward()
    scaler.step(optimizer)
    copied = pickle.loads(pickle.dumps(scaler.outcome))
    assert copied.skipped
    assert copied.scale == scaler.outcome.scale
    assert copied.culprits == scaler.outcome.culprits
