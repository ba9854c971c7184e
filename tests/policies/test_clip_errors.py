"""What the clip policies refuse, in words, and that nothing has changed then."""

from __future__ import annotations

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
    GradientControl,
    QuantileClip,
    SkipSpikes,
    ZScoreClip,
    chain,
)
from gradilocks.errors import BadState
from tests.policies.learned import learned

REFUSED = [
    (lambda: QuantileClip(0.5, window=0), ValueError, "window must be at least 2, got 0"),
    (lambda: QuantileClip(0.0), ValueError, "quantile must lie between 0 and 1, got 0.0"),
    (lambda: QuantileClip(1.0), ValueError, "quantile must lie between 0 and 1, got 1.0"),
    (lambda: QuantileClip(math.nan), ValueError, "quantile must lie between 0 and 1, got nan"),
    (lambda: QuantileClip("0.5"), TypeError, "quantile must be a number, got str"),
    (lambda: QuantileClip(0.5, window=2.0), TypeError, "window must be an int, got float"),
    (lambda: ZScoreClip(threshold=0.0), ValueError, "threshold must be positive and finite"),
    (lambda: ZScoreClip(alpha=1.0), ValueError, "alpha must lie between 0 and 1"),
    (lambda: ZScoreClip(warmup=0), ValueError, "warmup must be at least 1"),
    (lambda: AdaGC(ratio=-1.0), ValueError, "ratio must be positive"),
    (lambda: AdaGC(warmup_norm=-1.0), ValueError, "warmup_norm must not be negative"),
    (lambda: SkipSpikes(sigmas=math.inf), ValueError, "sigmas must be positive and finite"),
    (lambda: SkipSpikes(window=1), ValueError, "window must be at least 2"),
    (lambda: SkipSpikes(window=8, at_least=9), ValueError, "at_least must not be above window"),
    (lambda: AdaptiveClip(0.0), ValueError, "clipping must be positive"),
    (lambda: AdaptiveClip(exclude="head"), TypeError, "exclude must be a tuple of patterns"),
    (lambda: ClipPerTensor(-1.0), ValueError, "max_norm must not be negative"),
    (lambda: ClipPerTensor(1.0, order=0.5), ValueError, "order must be at least 1"),
    (lambda: ClipPerGroup({}), TypeError, "limits must be a dict"),
    (lambda: ClipPerGroup({1.5: 1.0}), TypeError, "named by a str or an int, got 1.5"),
    (lambda: ClipPerGroup({"a": -1.0}), ValueError, r"limits\['a'\] must not be negative"),
    (lambda: chain(ClipByNorm(1.0)), ValueError, "two policies or more, got 1"),
    (lambda: chain(ClipByNorm(1.0), None), TypeError, "takes clip policies .* got None"),
    (lambda: chain(ClipByNorm(1.0), -1.0), ValueError, "must not be negative or NaN, got -1.0"),
    (lambda: chain(ClipByNorm(1.0), ClipByNorm(1.0, order=1.0)), ValueError, "the same order"),
    (lambda: chain(ClipByValue(1.0), ClipByNorm(1.0)), ValueError, "must be the last of a chain"),
    (lambda: chain(ClipByNorm(1.0), AdaptiveClip()), ValueError, "must be the first of a chain"),
    (
        lambda: chain(chain(ClipByNorm(1.0), ClipByValue(1.0)), ClipByNorm(1.0)),
        ValueError,
        "must be the last of a chain",
    ),
]


@pytest.mark.parametrize(("make", "error", "words"), REFUSED)
def test_settings_that_make_no_sense_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def control_with(policy, **settings):
    model = nn.Linear(2, 1)
    return GradientControl(
        torch.optim.SGD(model.parameters(), lr=0.1), model=model, clip=policy, **settings
    )


@pytest.mark.parametrize(
    "policy",
    [
        ClipPerGroup({"head.*": 1.0}),
        ClipPerGroup({3: 1.0}),
        chain(ClipByNorm(1.0), ClipPerGroup({"head.*": 1.0})),
        AdaptiveClip(exclude=("head.*",)),
    ],
    ids=str,
)
def test_a_group_that_is_not_there_is_refused_when_the_control_is_made(policy):
    with pytest.raises(ValueError, match=r"fits no parameter.* such as weight, bias"):
        control_with(policy)


def test_a_checkpoint_of_another_policy_is_refused_and_changes_nothing():
    saved = control_with(ZScoreClip()).state_dict()
    control = control_with(QuantileClip(0.5))
    before = control.state_dict()
    with pytest.raises(BadState, match=r"ZScoreClip, this control has QuantileClip"):
        control.load_state_dict(saved)
    assert control.state_dict() == before


def stepped(policy):
    control = control_with(policy)
    for param in control._all_parameters():
        param.grad = None
    loss = sum(param.sum() for param in control._all_parameters())
    control.backward(loss)
    control.step()
    return control


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda state: state.pop("count"), "must have 'norms', 'count'"),
        (lambda state: state["norms"].append(1.0), "has 5 numbers, expected 4"),
        (lambda state: state.update(count=[1]), "count .* has 1 numbers, expected 1"),
        (lambda state: state["norms"].__setitem__(0, "x"), "norms in the state_dict must be a num"),
        (lambda state: state["norms"].__setitem__(0, math.nan), "norms in the state_dict must be"),
    ],
)
def test_a_spoilt_memory_is_refused_and_changes_nothing(spoil, words):
    control = stepped(QuantileClip(0.5, window=4))
    saved = control.state_dict()
    before = control.state_dict()
    spoil(saved["gradilocks"]["clip_state"])
    with pytest.raises(BadState, match=words):
        control.load_state_dict(saved)
    assert control.state_dict() == before


def test_another_number_of_parameters_is_refused():
    saved = stepped(AdaGC()).state_dict()
    param = nn.Parameter(torch.zeros(1))
    control = GradientControl(torch.optim.SGD([param], lr=0.1), clip=AdaGC())
    with pytest.raises(BadState, match=r"usual .* has 2 numbers, expected 1"):
        control.load_state_dict(saved)


def test_parameters_that_are_added_later_start_afresh():
    control = stepped(AdaGC(warmup=1))
    (optimizer,) = control._optimizers
    before = learned(control)["usual"]
    new = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [new]})
    assert learned(control)["usual"] == [*before, math.inf]  # What is saved fits what is there.
    control.zero_grad()
    control.backward(sum(param.sum() for param in control._all_parameters()))
    control.step()
    after = learned(control)["usual"]
    assert len(after) == 3
    assert after[:2] == pytest.approx(before, rel=0.1)
    assert after[2] == pytest.approx(1.0, rel=1e-4)


def test_what_was_learned_stays_with_its_parameter():
    """One is added before others, and one takes another's place."""
    params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    first, second = torch.optim.SGD(params[:1], lr=0.0), torch.optim.SGD(params[1:], lr=0.0)
    control = GradientControl(first, second, clip=AdaGC(warmup=1, warmup_norm=math.inf))

    def step(*sizes):
        control.zero_grad()
        every = list(control._all_parameters())
        control.backward(sum((p * size).sum() for p, size in zip(every, sizes, strict=True)))
        control.step()
        return learned(control)["usual"]

    assert step(1.0, 1000.0, 10.0) == pytest.approx([1.0, 1000.0, 10.0])
    first.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert step(1.0, 5.0, 1000.0, 10.0) == pytest.approx([1.0, 5.0, 1000.0, 10.0])
    second.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(1))
    assert step(1.0, 5.0, 7.0, 10.0) == pytest.approx([1.0, 5.0, 7.0, 10.0])
