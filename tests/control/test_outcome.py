"""The Outcome of a step: its numbers, when they are read, and the names of the culprits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from control.given_gradients import INF, NAN, loss_giving, parameter, take_step
from gradilocks import ClipByNorm, ClipByValue, DynamicScale, GradientControl, Outcome, SkipSpikes
from gradilocks.kernels import STATISTICS


def chain_of_layers(device="cpu", depth=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(depth))).to(device)


def step_with(control, model, planted):
    """A step on finite gradients, except for the elements planted by parameter name."""
    control.zero_grad()
    control.backward(model(torch.ones(1, 2, device=model[0].weight.device)).sum())
    for name, values in planted.items():
        gradient = model.get_parameter(name).grad.view(-1)
        gradient[: len(values)] = torch.tensor(values)
    return control.step()


def test_a_finite_step_reports_norm_and_scale_and_no_culprits(device):
    p, q = parameter(0.0, 0.0, device=device), parameter(0.0, 0.0, 0.0, device=device)
    control = GradientControl(torch.optim.SGD([p, q], lr=0.1), scale=64.0)
    outcome = take_step(control, (p, torch.tensor([3.0, 4.0])), (q, torch.tensor([0.0, 0.0, 12.0])))
    assert isinstance(outcome, Outcome)
    assert outcome is control.outcome
    assert (outcome.step, outcome.skipped, outcome.rejected, outcome.clipped) == (1, False, False, False)
    assert outcome.norm == pytest.approx(13.0, rel=1e-7)
    assert (outcome.limit, outcome.scale, outcome.culprits, dict(outcome.counts)) == (INF, 64.0, (), {})
    assert outcome.describe() == "finite gradients"
    assert repr(outcome) == "Outcome(step=1, skipped=False, norm=13, clipped=False, scale=64, culprits=())"


@pytest.mark.parametrize("clip", [ClipByNorm(1e-3), ClipByValue(1e-3)])
@pytest.mark.parametrize(("bad", "norm"), [(INF, INF), (-INF, INF), (NAN, NAN)])
def test_a_skipped_step_is_not_clipped(clip, bad, norm, device):
    p = parameter(0.0, 0.0, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), clip=clip)
    outcome = take_step(control, (p, torch.tensor([5.0, bad])))
    assert (outcome.skipped, outcome.clipped) == (True, False)
    assert outcome.norm == pytest.approx(norm, nan_ok=True)


def test_outcomes_read_late_report_their_own_step(device):
    p = parameter(0.0, 0.0, device=device)
    policy = DynamicScale(init_scale=8.0, growth_interval=1)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=policy, clip=3.0)
    outcomes = [take_step(control, (p, torch.tensor([g, 0.0]))) for g in (1.0, INF, 4.0, NAN, 2.0)]
    assert [o.step for o in outcomes] == [1, 2, 3, 4, 5]
    assert [o.skipped for o in outcomes] == [False, True, False, True, False]
    assert [o.clipped for o in outcomes] == [False, False, True, False, False]
    assert [o.scale for o in outcomes] == [8.0, 16.0, 8.0, 16.0, 8.0]
    assert [o.norm for o in outcomes] == pytest.approx([1, INF, 4, NAN, 2], nan_ok=True)
    assert [len(o.culprits) for o in outcomes] == [0, 1, 0, 1, 0]


def test_culprits_come_in_backward_order_with_their_counts(device):
    model = chain_of_layers(device)
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    outcome = step_with(control, model, {"0.bias": [NAN], "1.weight": [INF, -INF, NAN], "2.weight": [INF]})
    assert outcome.culprits == ("2.weight", "1.weight", "0.bias")
    assert [tuple(count) for count in outcome.counts.values()] == [(0, 1), (1, 2), (1, 0)]
    assert [str(count) for count in outcome.counts.values()] == ["Inf", "NaN and Inf", "NaN"]
    assert outcome.describe() == "Inf in 2.weight, NaN and Inf in 1.weight, NaN in 0.bias"
    values = {name: [NAN] for name, _ in model.named_parameters()}
    assert step_with(control, model, values).describe().endswith(f" (+{len(values) - 3} more)")


def test_backward_order_is_the_models_whatever_the_optimizers():
    model = chain_of_layers()
    weights, biases = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    expected = ("2.bias", "2.weight", "1.bias", "1.weight", "0.bias", "0.weight")
    planted = {name: [NAN] for name, _ in model.named_parameters()}
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases}]
    for optimizers in (
        [torch.optim.AdamW(groups, lr=0.1)],
        [torch.optim.SGD(biases, lr=0.1), torch.optim.SGD(weights, lr=0.1)],
    ):
        control = GradientControl(*optimizers, model=model)
        assert step_with(control, model, planted).culprits == expected


def test_names_come_from_the_model_or_the_optimizer_or_the_position():
    model = chain_of_layers(depth=1)
    stranger = parameter(1.0)
    named = torch.optim.SGD(model.named_parameters(), lr=0.1)
    cases = [
        (GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model={"net": model}), "net.0.bias"),
        (GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=nn.DataParallel(model)), "0.bias"),
        (GradientControl(named), "0.bias"),
        (GradientControl(torch.optim.SGD(model.parameters(), lr=0.1)), "param_groups[0]['params'][1]"),
        (
            GradientControl(torch.optim.SGD([stranger], lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)),
            "optimizers[1].param_groups[0]['params'][1]",
        ),
    ]
    for control, name in cases:
        model.zero_grad()
        assert take_step(control, (model[0].weight, 1.0), (model[0].bias, NAN)).culprits == (name,)


def test_names_are_unique_if_two_optimizers_name_their_parameters_alike():
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(layer.named_parameters(), lr=0.1) for layer in (first, second)]
    control = GradientControl(*optimizers)
    outcome = take_step(control, (first.weight, NAN), (second.weight, INF))
    assert len(outcome.culprits) == 2


def test_a_rejected_step_reports_the_bound_that_rejected_it(device):
    p = parameter(0.0, device=device)
    clip = SkipSpikes(window=4)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), clip=clip, scale=4.0)
    for size in (1.0, 1.1, 1e6):
        outcome = take_step(control, (p, size))
    assert (outcome.skipped, outcome.rejected, outcome.culprits) == (True, True, ())
    assert outcome.norm == pytest.approx(1e6)
    assert outcome.limit < 2.0
    assert outcome.describe().startswith("finite gradients, rejected by the clip policy: norm 1e+06 above 1.4")
    assert outcome.tensors["skipped"].item() is True


def test_tensors_and_statistics_are_on_the_device(device):
    p, q = parameter(0.0, 0.0, device=device), parameter(0.0, device=device)
    control = GradientControl(torch.optim.SGD([p, q], lr=0.1), scale=2.0, clip=ClipByValue(100.0))
    outcome = take_step(control, (p, torch.tensor([3.0, 0.0])), (q, 4.0))
    numbers = outcome.tensors
    assert set(numbers) == {"norm", "scale", "limit", "skipped", "clipped"}
    assert all(number.device.type == device and number.dim() == 0 for number in numbers.values())
    assert numbers["norm"].item() == pytest.approx(5.0)
    statistics = dict(zip(STATISTICS, outcome.statistics.tolist(), strict=True))
    assert statistics["norm"] == [6.0, 8.0]
    assert statistics["largest"] == [6.0, 8.0]
    assert statistics["zeros"] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("losses", "expected"), [((1.0,), True), ((INF,), False), ((1.0, NAN), False), ((1e38, 1e38), True)]
)
def test_the_outcome_knows_whether_the_loss_itself_was_finite(losses, expected):
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1))
    for value in losses:
        control.backward(loss_giving((p, INF), value=value))
    outcome = control.step()
    assert outcome.loss_is_finite is expected
    reason = "Inf in param_groups[0]['params'][0]" if expected else "the loss itself is NaN or Inf"
    assert outcome.describe() == reason


def test_without_a_loss_nothing_is_said_about_it():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=None)
    loss_giving((p, NAN), value=NAN).backward()
    assert control.step().loss_is_finite is None


def test_losses_that_were_discarded_are_forgotten():
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1))
    control.backward(loss_giving((p, 1.0), value=NAN))
    control.zero_grad()
    assert take_step(control, (p, INF)).loss_is_finite


def test_an_outcome_is_read_once(monkeypatch):
    p = parameter(0.0, 0.0)
    outcome = take_step(GradientControl(torch.optim.SGD([p], lr=0.1), clip=1.0), (p, NAN))
    reads = []
    original = outcome._row
    monkeypatch.setattr(outcome, "_row", lambda: reads.append(1) or original())
    for _ in range(3):
        _ = outcome.skipped, outcome.norm, outcome.clipped, outcome.scale, outcome.culprits, repr(outcome)
    assert len(reads) == 1
