"""Policies of users: any object with the documented methods."""

from __future__ import annotations

import pytest
import torch

from gradilocks.clip import ClipByNorm, ClipPolicy, chain, resolve_clip
from gradilocks.scale import DynamicScale, ScalePolicy, StaticScale, resolve_scale
from policies.own_policies import NotAboveTheLast, Thirds


def test_a_subclass_without_update_keeps_its_state():
    class Constant(ClipPolicy):
        def init(self):
            return {"table": torch.ones(3)}

    assert Constant().update(torch.ones(1), torch.ones(()), None, Constant().init())["table"].tolist() == [1.0] * 3


def test_clip_resolves_none_numbers_policies_and_chains():
    own = NotAboveTheLast()
    assert resolve_clip(None) == ()
    assert resolve_clip(1) == (ClipByNorm(1.0),)
    assert resolve_clip(own)[0] is own
    assert resolve_clip(chain(chain(own, 2), 0.5)) == (own, ClipByNorm(2.0), ClipByNorm(0.5))


def test_scale_resolves_none_dynamic_numbers_and_policies():
    own = Thirds()
    assert resolve_scale(None) is None
    assert resolve_scale("dynamic") == DynamicScale()
    assert resolve_scale(8) == StaticScale(8.0)
    assert resolve_scale(own) is own


@pytest.mark.parametrize(
    ("state", "new"),
    [
        ({"scale": 8.0}, {"scale": 8.0}),
        ({"scale": torch.ones(1)}, {"scale": torch.ones(1)}),
        ({"scale": torch.tensor(8.0)}, {}),
        ({"scale": torch.tensor(8.0)}, {"scale": torch.tensor(8.0), "count": torch.tensor(1)}),
        ({"loss_scale": torch.tensor(8.0)}, {"loss_scale": torch.tensor(8.0)}),
    ],
)
def test_a_scale_policy_that_returns_the_wrong_type_or_keys_raises(state, new):
    class Own:
        def init(self):
            return state

        def update(self, state, overflow, largest):
            return new

    with pytest.raises(TypeError, match=r"init\(\) and update\(\) of Own must return dicts of 0-d tensors"):
        resolve_scale(Own())


def test_a_base_class_names_the_method_that_is_missing():
    with pytest.raises(NotImplementedError, match=r"ClipPolicy must define limit\(norms, total, state\)"):
        ClipPolicy().limit(torch.ones(1), torch.ones(()), {})
    with pytest.raises(NotImplementedError, match=r"ScalePolicy must define init\(\)"):
        ScalePolicy().init()
    with pytest.raises(NotImplementedError, match=r"ScalePolicy must define update\(state, overflow, largest\)"):
        ScalePolicy().update({}, torch.tensor(True), torch.tensor(0.0))
