"""The published numbers of each clip policy, and what a NaN or a rejected step must not change."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

from gradilocks import (
    AdaGC,
    AdaptiveClip,
    ClipByNorm,
    ClipByValue,
    ClipPerGroup,
    ClipPerTensor,
    DynamicScale,
    GradientControl,
    GradScaler,
    QuantileClip,
    SkipSpikes,
    ZScoreClip,
    chain,
    read_run,
)
from tests.policies.learned import learned

NAN, INF = math.nan, math.inf
NORMS = (1.0, 2.0, 3.0, 2.0, 2.0, 10.0, 2.5)


class Run:
    """Steps a model whose gradients are given."""

    def __init__(self, policy, *sizes, scale=1024.0, fused=False, names=(), **settings):
        self.params = [nn.Parameter(torch.zeros(size)) for size in sizes or (1,)]
        given = list(zip(names, self.params, strict=True)) if names else self.params
        optimizer = torch.optim.SGD(given, lr=1.0, fused=fused)
        self.control = GradientControl(optimizer, clip=policy, scale=scale, **settings)

    def step(self, *norms):
        """Gradients of these norms; returns by what each was multiplied, and the Outcome."""
        self.control.zero_grad()
        before = [param.detach().clone() for param in self.params]
        loss = sum(
            (p * (norm / math.sqrt(p.numel()))).sum()
            for p, norm in zip(self.params, norms, strict=True)
        )
        self.control.backward(loss)
        outcome = self.control.step()
        moved = [(b - p.detach()).norm().item() for b, p in zip(before, self.params, strict=True)]
        return [m / n if n else 0.0 for m, n in zip(moved, norms, strict=True)], outcome

    @property
    def memory(self):
        return learned(self.control)


def limits(policy, norms):
    run = Run(policy)
    return [run.step(norm)[1].limit for norm in norms]


def test_zscore_clip():
    run = Run(ZScoreClip(warmup=4))
    for norm in NORMS[:4]:
        assert run.step(norm)[1].limit == INF
    assert run.memory == pytest.approx({"count": 4, "mean": 2.0, "var": 0.5})
    run.step(NORMS[4])
    assert run.memory["var"] == pytest.approx(0.485)
    (factor,), outcome = run.step(NORMS[5])
    assert outcome.limit == pytest.approx(2.37890673, rel=1e-7)
    assert outcome.clipped
    assert factor == pytest.approx(0.237890673, rel=1e-5)
    assert run.memory["mean"] == pytest.approx(2.0113672, rel=1e-7)
    assert run.memory["var"] == pytest.approx(0.47450256, rel=1e-7)
    run.step(NORMS[6])
    assert run.memory["mean"] == pytest.approx(2.02602619, rel=1e-7)
    assert run.memory["var"] == pytest.approx(0.46700702, rel=1e-7)


@pytest.mark.parametrize(
    ("quantile", "expected"),
    [(0.1, [1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]), (0.9, [1, 1.9, 2.8, 2.7, 2.6, 6.5, 5.8])],
)
def test_quantile_clip(quantile, expected):
    assert limits(QuantileClip(quantile), NORMS) == pytest.approx(expected)


def test_quantile_clip_forgets_what_is_older_than_its_window():
    found = limits(QuantileClip(0.5, window=3), [100.0, 100.0, 1.0, 2.0, 3.0])
    assert found[-1] == pytest.approx(2.0)


def test_quantile_clip_watches_first():
    assert limits(QuantileClip(0.1, warmup=2), [1.0, 2.0, 3.0]) == [INF, INF, pytest.approx(1.2)]


def test_adagc():
    run = Run(AdaGC(warmup=1, warmup_norm=INF))
    run.step(1.0)
    expected = [(1.0, 1.0, 1.0), (1.04, 1.0, 1.0008), (1.2, 0.8757, 1.0018008)]
    expected += [(3.0, 0.35063028, 1.0028026), (0.9, 1.0, 1.00074655)]
    for norm, factor, usual in expected:
        (found,), _ = run.step(norm)
        assert found == pytest.approx(factor, rel=1e-5)
        assert run.memory["usual"] == pytest.approx([usual], rel=1e-5)


def test_adagc_warms_up_by_a_common_norm_and_remembers_the_smallest():
    run = Run(AdaGC(warmup=2), 1, 1)
    factors, outcome = run.step(3.0, 4.0)
    assert factors == pytest.approx([0.2, 0.2], rel=1e-5)
    assert outcome.limit == 1.0
    run.step(0.3, 0.9)
    assert run.memory["usual"] == pytest.approx([0.3, 0.8], rel=1e-4)


def test_adagc_keeps_apart_who_has_a_gradient():
    run = Run(AdaGC(warmup=1), 1, 1)
    run.step(0.3, 0.4)
    run.control.zero_grad()
    run.control.backward((run.params[1] * 0.4).sum())  # The first one has none.
    run.control.step()
    assert run.memory["usual"] == pytest.approx([0.3, 0.4], rel=1e-4)


def test_adagc_does_not_hold_an_idle_layer_at_zero():
    run = Run(AdaGC(warmup=1), 1, 1)
    run.step(0.0, 0.5)
    run.step(0.0, 0.5)
    factors, _ = run.step(0.5, 0.5)
    assert factors[0] == pytest.approx(1.0)


@pytest.mark.parametrize("scale", [None, 1024.0])
@pytest.mark.parametrize("fused", [False, True])
def test_adaptive_clip(scale, fused):
    param = nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    control = GradientControl(optimizer, clip=AdaptiveClip(0.01), scale=scale)
    before = param.detach().clone()
    control.backward((param * torch.tensor([[0.3, 0.4], [0.003, 0.004]])).sum())
    outcome = control.step()
    assert outcome.clipped
    found = (before - param.detach()).flatten().tolist()
    assert found == pytest.approx([0.03, 0.04, 6e-6, 8e-6], rel=1e-4)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (3, 2, 2)])
@pytest.mark.parametrize("by", ["control", "scaler", "unscaled", "chain"])
def test_adaptive_clip_goes_by_the_magnitudes_of_complex_numbers(shape, by):
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(shape, dtype=torch.complex64))
    gradient = torch.randn(shape, dtype=torch.complex64) * 10.0
    optimizer = torch.optim.SGD([param], lr=0.0)
    clip = AdaptiveClip(0.5)
    if by == "chain":
        clip = chain(clip, ClipByNorm(math.inf))
    loss = (param * gradient.conj()).real.sum()
    if by == "scaler":
        scaler = GradScaler("cpu", clip=clip)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        outcome = scaler.outcome
    else:
        control = GradientControl(optimizer, clip=clip)
        control.backward(loss)
        if by == "unscaled":
            control.unscale_()
        outcome = control.step()
    dims = tuple(range(1, len(shape))) if len(shape) > 1 else None
    weights, lengths = (
        torch.linalg.vector_norm(it.detach(), dim=dims, keepdim=True) for it in (param, gradient)
    )
    limit = 0.5 * weights
    expected = gradient * torch.where(lengths > limit, limit / lengths, torch.ones(()))
    torch.testing.assert_close(param.grad, expected, rtol=1e-5, atol=0.0)
    assert outcome.clipped
    assert outcome.norm == pytest.approx(torch.linalg.vector_norm(gradient).item(), rel=1e-6)


def test_adaptive_clip_leaves_alone_what_is_below_its_limit_however_small_that_is():
    param = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=0.0)
    control = GradientControl(optimizer, clip=AdaptiveClip(1e-4), scale=None)  # A limit of 1e-7.
    for length, left in ((5e-8, 5e-8), (2e-7, 2e-7 * 1e-7 / 1e-6)):
        param.grad = torch.tensor([length, 0.0])
        assert control.step().clipped == (left != length)
        assert param.grad[0].item() == pytest.approx(left, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_clip_by_value_bounds_the_magnitudes_of_complex_numbers(dtype):
    values = [3.0 + 4.0j, 0.3j, -0.6 + 0.8j, 3e38 + 3e38j, 0.0]
    param, real = nn.Parameter(torch.zeros(5, dtype=dtype)), nn.Parameter(torch.zeros(2))
    control = GradientControl(
        torch.optim.SGD([param, real], lr=0.0), clip=ClipByValue(1.0), scale=None
    )
    param.grad, real.grad = torch.tensor(values, dtype=dtype), torch.tensor([-7.0, 0.5])
    assert control.step().clipped
    expected = torch.tensor([0.6 + 0.8j, 0.3j, -0.6 + 0.8j, 0.5**0.5 * (1 + 1j), 0.0], dtype=dtype)
    torch.testing.assert_close(param.grad, expected, rtol=1e-6, atol=0.0)
    assert real.grad.tolist() == [-1.0, 0.5]


@pytest.mark.parametrize(
    "clip",
    [AdaptiveClip(0.01), ClipByValue(0.5), ClipPerTensor(1.0), AdaGC(warmup=1), SkipSpikes()],
)
def test_a_nan_among_complex_numbers_leaves_all_as_it_was(clip):
    param = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
    control = GradientControl(torch.optim.SGD([param], lr=1.0), clip=clip)
    control.backward((param.abs() ** 2).sum())
    param.grad[1, 1] = complex(1.0, math.nan)
    before = torch.view_as_real(param.grad).clone()
    assert control.step().skipped
    assert torch.equal(param, torch.ones(3, 2, dtype=torch.complex64))
    assert torch.equal(torch.view_as_real(param.grad).nan_to_num(7.0), before.nan_to_num(7.0))


def test_adaptive_clip_leaves_out_what_is_excluded():
    run = Run(AdaptiveClip(0.01, exclude=("head.*",)), 3, 3, names=("body.weight", "head.weight"))
    factors, _ = run.step(1.0, 1.0)
    assert factors == pytest.approx([1e-5, 1.0], rel=1e-4)


def test_adaptive_clip_bounds_the_rows_that_a_sparse_gradient_has():
    table = nn.Embedding(10, 2, sparse=True)
    with torch.no_grad():
        table.weight.fill_(1.0)
    control = GradientControl(torch.optim.SGD(table.parameters(), lr=1.0), clip=AdaptiveClip(0.01))
    control.backward(table(torch.tensor([3])).sum())
    control.step()
    assert table.weight[3].tolist() == pytest.approx([0.99, 0.99], rel=1e-5)
    assert table.weight[4].tolist() == [1.0, 1.0]


def test_clip_per_tensor():
    factors, outcome = Run(ClipPerTensor(1.0), 2, 3).step(5.0, 0.5)
    assert factors == pytest.approx([0.2, 1.0], rel=1e-5)
    assert outcome.clipped
    assert outcome.norm == pytest.approx(math.hypot(5.0, 0.5))


def test_clip_per_group_by_pattern_number_and_name():
    policy = ClipPerGroup({"embed.*": 1.0, "head.*": None}, otherwise=2.0)
    run = Run(policy, 1, 1, 1, 1, names=("embed.a", "embed.b", "head.w", "body.w"))
    factors, _ = run.step(3.0, 4.0, 100.0, 8.0)
    assert factors == pytest.approx([0.2, 0.2, 1.0, 0.25], rel=1e-5)
    params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    groups = [
        {"params": params[:1]},
        {"params": params[1:2], "name": "muon"},
        {"params": params[2:]},
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    control = GradientControl(optimizer, clip=ClipPerGroup({0: 1.0, "muon": None}, otherwise=3.0))
    control.backward(sum((p * 6.0).sum() for p in params))
    control.step()
    assert [p.item() for p in params] == pytest.approx([-1.0, -6.0, -3.0], rel=1e-5)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, INF])
def test_clip_per_group_measures_any_order(order):
    run = Run(ClipPerGroup({0: 1.0}, order=order), 1, 1)
    factors, _ = run.step(3.0, 4.0)
    norm = max(3.0, 4.0) if order == INF else (3.0**order + 4.0**order) ** (1 / order)
    assert factors == pytest.approx([1 / norm] * 2, rel=1e-5)


def test_skip_spikes():
    run = Run(SkipSpikes(at_least=4, window=8), scale=DynamicScale(init_scale=64.0))
    for norm in (1.0, 1.1, 0.9, 1.0):
        assert not run.step(norm)[1].skipped
    factors, outcome = run.step(50.0)
    assert factors == [0.0]
    assert outcome.skipped
    assert outcome.rejected
    assert run.control.scale == 64.0  # Nothing overflowed.
    assert run.memory["count"] == 4
    assert outcome.limit == pytest.approx(1.0 + 6 * math.sqrt(0.02 / 3), rel=1e-5)
    _, outcome = run.step(1.05)
    assert not outcome.skipped
    assert not outcome.rejected


def test_skip_spikes_takes_what_rounding_makes_of_a_norm_that_never_varies():
    for norm, skipped in ((1.0 + 9e-7, False), (1.0 + 2e-6, True)):
        run = Run(SkipSpikes(at_least=4, window=8), scale=None)
        for _ in range(4):
            run.step(1.0)
        assert run.step(norm)[1].skipped == skipped


def test_rejected_steps_are_not_counted_as_nonfinite():
    run = Run(SkipSpikes(at_least=2, window=4), give_up_after=3)
    for norm in (1.0, 1.0, *[50.0] * 10):
        run.step(norm)
    assert run.control.state_dict()["gradilocks"]["streak"] == 0


MOVING = [
    QuantileClip(0.5),
    ZScoreClip(warmup=2),
    AdaGC(warmup=2),
    SkipSpikes(at_least=2, window=4),
]
MOVING.append(chain(SkipSpikes(at_least=2, window=4), ZScoreClip(warmup=2), ClipByNorm(1.0)))


@pytest.mark.parametrize("policy", MOVING, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_one_nonfinite_step_poisons_nothing(policy, bad):
    healthy, struck = Run(policy), Run(policy)
    for number in range(8):
        norm = 1.0 + 0.1 * number
        healthy.step(norm)
        if number in (0, 3, 5):
            assert struck.step(bad)[1].skipped
        struck.step(norm)
        assert struck.memory == healthy.memory


def test_a_step_that_another_policy_rejects_teaches_nobody():
    policy = chain(SkipSpikes(at_least=2, window=4), ZScoreClip(warmup=2))
    run = Run(policy)
    for norm in (1.0, 1.1, 1.0):
        run.step(norm)
    before = run.memory
    assert run.step(50.0)[1].rejected
    assert run.memory == before


def test_a_chain_hands_on_what_is_left():
    run = Run(chain(ClipPerTensor(3.0), ClipByNorm(1.0), ClipByValue(0.7)), 1, 1)
    factors, outcome = run.step(6.0, 4.0)  # 3 and 3, then 0.7071 each, then 0.7.
    assert [f * n for f, n in zip(factors, (6.0, 4.0), strict=True)] == pytest.approx([0.7, 0.7])
    assert outcome.clipped
    assert outcome.limit == 1.0


@pytest.mark.parametrize("policy", MOVING, ids=lambda p: type(p).__name__)
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(policy):
    whole, first = Run(policy, 2, 3), Run(policy, 2, 3)
    norms = [(1.0 + 0.3 * (k % 3), 2.0 + 0.1 * k) for k in range(12)]
    for pair in norms[:6]:
        whole.step(*pair)
        first.step(*pair)
    second = Run(policy, 2, 3)
    for mine, theirs in zip(second.params, first.params, strict=True):
        mine.data.copy_(theirs.data)
    second.control.load_state_dict(first.control.state_dict())
    for pair in norms[6:]:
        told = [str(run.step(*pair)) for run in (whole, second)]
        assert told[0] == told[1]
    assert whole.memory == second.memory
    assert whole.control.state_dict() == second.control.state_dict()


def test_small_norms_are_bounded_as_exactly_as_large_ones():
    """An absolute 1e-6 beside the norm would shrink a gradient of norm 1e-7 ten times."""
    run = Run(AdaGC(warmup=1, warmup_norm=INF))
    run.step(1e-7)
    (factor,), _ = run.step(1.06e-7)
    assert factor == pytest.approx(1.05 / 1.06, rel=1e-4)


@pytest.mark.parametrize("policy", MOVING, ids=lambda p: type(p).__name__)
def test_a_norm_beyond_float64_is_not_learned_from(policy):
    param = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    control = GradientControl(torch.optim.SGD([param], lr=0.0), clip=policy, scale=None)
    for size in (1.5e308, 1.0, 1.0, 1.0):
        control.zero_grad()
        control.backward((param * size).sum())
        control.step()
    memory = learned(control)
    for values in memory.values():
        assert torch.isfinite(torch.tensor(values)).all() or "usual" in str(memory.keys())
    control.load_state_dict(control.state_dict())


def test_a_rejected_step_leaves_the_scale_alone():
    run = Run(
        SkipSpikes(at_least=2, window=4), scale=DynamicScale(init_scale=4.0, growth_interval=4)
    )
    for norm in (1.0, 1.0, 1.0, 50.0):
        run.step(norm)
    assert run.control.scale == 4.0
    run.step(1.0)
    assert run.control.scale == 8.0


def test_a_rejected_step_is_no_nonfinite_gradient():
    run = Run(SkipSpikes(at_least=2, window=4), on_nonfinite="raise")
    for norm in (1.0, 1.0):
        run.step(norm)
    _, outcome = run.step(50.0)
    assert outcome.rejected
    assert outcome.describe().startswith("finite gradients, rejected: norm 50 over 1")


USUAL = (1.0, 1.5, 1.0, 1.5)
SPIKES = SkipSpikes(sigmas=2.0, at_least=4, window=8)
BOUND = 1.25 + 2.0 * math.sqrt(4 * 0.25**2 / 3)  # Of these norms, by this policy.


@pytest.mark.parametrize(
    ("policy", "bound"),
    [
        (SPIKES, BOUND),
        (chain(SPIKES, ClipByNorm(0.5)), BOUND),
        (chain(ClipByNorm(40.0), SPIKES), BOUND),
        (chain(SPIKES, SkipSpikes(sigmas=1.0, at_least=4, window=8), 0.5), (BOUND + 1.25) / 2),
        (chain(SkipSpikes(sigmas=1e3, at_least=4, window=8), SPIKES, 0.5), BOUND),
    ],
)
def test_a_rejection_tells_the_bound_that_rejected(policy, bound):
    run = Run(policy)
    for norm in USUAL:
        run.step(norm)
    _, outcome = run.step(50.0)
    assert outcome.rejected
    assert outcome.limit == pytest.approx(bound, rel=1e-5)
    assert outcome.tensors["limit"].item() == outcome.limit
    assert outcome.describe() == f"finite gradients, rejected: norm 50 over {outcome.limit:.6g}"


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_step_that_is_not_finite_is_rejected_by_nobody(bad):
    run = Run(chain(SPIKES, ClipByNorm(0.5)))
    for norm in USUAL:
        run.step(norm)
    _, outcome = run.step(bad)
    assert outcome.skipped
    assert not outcome.rejected
    assert outcome.limit == 0.5


class Shorter(ClipByNorm):
    """Of a user: also rejects what is shorter than 1, which is over no bound."""

    def limit(self, measurement, scale, state=None):
        limit = super().limit(measurement, scale)
        return dataclasses.replace(limit, reject=(measurement.norm / scale < 1.0).float())


@pytest.mark.parametrize("clip", [Shorter(4.0), Shorter(INF), chain(Shorter(4.0), 2.0)])
def test_a_rejection_by_another_rule_is_told_of_no_bound(clip, tmp_path, caplog):
    run = Run(clip, record=tmp_path / "a")
    assert not run.step(3.0)[1].rejected
    _, outcome = run.step(0.5)
    assert outcome.rejected
    assert outcome.describe() == "finite gradients, rejected by the clip policy"
    run.control.recorder.close()
    (line,) = (each.getMessage() for each in caplog.records if "skipped" in each.getMessage())
    assert line == "step 2 skipped: finite gradients, rejected by the clip policy; scale 1024"


def test_the_log_and_the_run_file_tell_the_bound_that_rejected(tmp_path, caplog):
    run = Run(chain(SPIKES, ClipByNorm(0.5)), record=tmp_path / "a")
    for norm in (*USUAL, 50.0):
        _, outcome = run.step(norm)
    run.control.recorder.close()
    (line,) = (each.getMessage() for each in caplog.records if "skipped" in each.getMessage())
    assert f"norm 50 over {outcome.limit:.6g}" in line
    limits = [step.limit for step in read_run(tmp_path / "a").steps]
    assert limits == [0.5] * 4 + [pytest.approx(BOUND, rel=1e-5)]


def test_numbers_of_groups_survive_json():
    control = Run(ClipPerGroup({0: 1.0})).control
    saved = json.loads(json.dumps(control.state_dict()))
    control.load_state_dict(saved)
    assert repr(control).endswith(f"clip={ClipPerGroup({0: 1.0})!r})")


LEARNING = {
    "QuantileClip": QuantileClip(0.5, window=4),
    "ZScoreClip": ZScoreClip(warmup=2),
    "AdaGC": AdaGC(warmup=2),
    "SkipSpikes": SkipSpikes(window=4, at_least=2),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", LEARNING)
def test_what_a_chain_learns_does_not_depend_on_the_scale(name, fused):
    found = []
    for scale in (None, 1024.0):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        clip = chain(AdaptiveClip(0.01), LEARNING[name])
        control = GradientControl(optimizer, model=model, scale=scale, clip=clip)
        inputs = torch.randn(8, 4)
        for _ in range(6):
            control.backward(model(inputs).square().mean())
            control.step()
            control.zero_grad()
        memory = [torch.tensor(each, dtype=torch.float64) for each in learned(control).values()]
        found.append([*memory, *model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["QuantileClip", "ZScoreClip", "AdaGC"])
def test_a_norm_beyond_every_float_does_not_zero_the_gradient(name):
    param = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    clip = LEARNING[name]
    control = GradientControl(torch.optim.SGD([param], lr=1.0), scale=None, clip=clip)
    for size in (1.0, 1.0, 1.0, 1.0, 1.7e308):
        before = param.detach().clone()
        param.grad = torch.full((4,), size, dtype=torch.float64)
        control.step()
    moved = before - param.detach()
    assert torch.isfinite(moved).all()
    assert (moved > 0.0).all()


def test_a_policy_stays_as_it_was_made():
    limits = {"a": 1.0}
    policy = ClipPerGroup(limits)
    limits["b"] = 2.0
    assert policy.limits == {"a": 1.0}


def test_a_number_in_a_chain_is_the_largest_norm():
    assert chain(SkipSpikes(), 1.0) == chain(SkipSpikes(), ClipByNorm(1.0))
