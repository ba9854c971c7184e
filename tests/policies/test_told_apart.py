"""Several optimizers under one scaler: whose memory is whose, and how their groups are numbered."""

from __future__ import annotations

import copy
import gc
import json
import pickle

import pytest
import torch
from torch import nn

from gradilocks import (
    AdaGC,
    ClipByNorm,
    ClipPerGroup,
    GradientControl,
    GradScaler,
    QuantileClip,
    SkipSpikes,
    chain,
)
from gradilocks.errors import BadState

LEARNING = {
    "QuantileClip": lambda: QuantileClip(0.5, window=8),
    "AdaGC": lambda: AdaGC(warmup=2),
    "chain": lambda: chain(SkipSpikes(window=8, at_least=4), ClipByNorm(1e6)),
}
each_clip = pytest.mark.parametrize("make", LEARNING.values(), ids=LEARNING)
SMALL, LARGE = 1.0, 100.0


def pair(*shapes):
    """Two parameters and an optimizer each; their gradients differ by a factor of 100."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    return params, [torch.optim.SGD([param], lr=0.1) for param in params]


def step(scaler, param, optimizer, size, *, update=True):
    scaler.scale((param * size).sum()).backward()
    scaler.step(optimizer)
    if update:
        scaler.update()
    param.grad = None
    return scaler.outcome if isinstance(scaler, GradScaler) else scaler.control.outcome


def trained(scaler, params, optimizers, count=6):
    for _ in range(count):
        for param, optimizer, size in zip(params, optimizers, (SMALL, LARGE), strict=True):
            step(scaler, param, optimizer, size, update=optimizer is optimizers[-1])
    return scaler


def learned(scaler):
    states = scaler.state_dict()["gradilocks_scaler"]["clip"]["states"]
    return [state["memory"] for state in states]


@each_clip
def test_two_that_cannot_be_told_apart_are_refused_and_nothing_changes(make):
    params, optimizers = pair(4, 4)
    saved = trained(GradScaler("cpu", clip=make()), params, optimizers).state_dict()
    again = trained(GradScaler("cpu", clip=make()), params, optimizers, count=2)
    before = again.state_dict()
    with pytest.raises(BadState, match=r"of 2 optimizers .* cannot be told.* model=\{") as caught:
        again.load_state_dict(saved)
    assert again.state_dict() == before
    assert "['clip']['states'] = ()" in str(caught.value)
    saved["gradilocks_scaler"]["clip"]["states"] = ()  # The way out that the message names.
    again.load_state_dict(saved)
    assert step(again, params[1], optimizers[1], LARGE).norm == 200.0


def test_it_is_no_matter_who_is_who_where_nothing_was_learned():
    params, optimizers = pair(4, 4)
    for clip in (1.0, QuantileClip(0.5, window=8)):
        scaler = GradScaler("cpu", clip=clip)
        for param, optimizer in zip(params, optimizers, strict=True):
            step(scaler, param, optimizer, 1.0)  # The same of both.
        again = GradScaler("cpu", clip=clip)
        again.load_state_dict(scaler.state_dict())
        for param, optimizer in [*zip(params, optimizers, strict=True)][::-1]:
            step(again, param, optimizer, 1.0)


@each_clip
@pytest.mark.parametrize("through", [lambda it: it, lambda it: json.loads(json.dumps(it))])
def test_shapes_tell_apart_what_has_as_many_elements(make, through):
    params, optimizers = pair((2, 6), (3, 4))
    scaler = trained(GradScaler("cpu", clip=make()), params, optimizers)
    again = GradScaler("cpu", clip=make())
    again.load_state_dict(through(scaler.state_dict()))
    for place in (1, 0):  # In the other order.
        told = [
            step(each, params[place], optimizers[place], (SMALL, LARGE)[place])
            for each in (scaler, again)
        ]
        assert told[0].limit == told[1].limit
        assert told[0].norm == told[1].norm
    assert learned(again) == learned(scaler)


def test_of_a_state_without_shapes_equal_sizes_are_refused():
    params, optimizers = pair((2, 6), (3, 4))
    saved = trained(GradScaler("cpu", clip=QuantileClip(window=8)), params, optimizers).state_dict()
    for state in saved["gradilocks_scaler"]["clip"]["states"]:
        del state["shapes"], state["groups"]
    with pytest.raises(BadState, match="cannot be told"):
        GradScaler("cpu", clip=QuantileClip(window=8)).load_state_dict(saved)


@pytest.mark.parametrize("named_by", ["model", "optimizer"])
def test_names_tell_them_apart(named_by):
    params, optimizers = pair(4, 4)
    holders = {name: nn.ParameterList([param]) for name, param in zip("ab", params, strict=True)}
    model = holders if named_by == "model" else None
    if named_by == "optimizer":
        named = zip("ab", params, strict=True)
        optimizers = [torch.optim.SGD([(f"{name}.w", param)], lr=0.1) for name, param in named]
    scaler = trained(
        GradScaler("cpu", clip=QuantileClip(0.5, window=8), model=model), params, optimizers
    )
    again = GradScaler("cpu", clip=QuantileClip(0.5, window=8), model=model)
    again.load_state_dict(scaler.state_dict())
    assert step(again, params[1], optimizers[1], LARGE).limit == 200.0
    assert step(again, params[0], optimizers[0], SMALL).limit == 2.0


def test_one_that_was_named_when_it_was_saved_is_not_taken_for_another_without_names():
    params, optimizers = pair(4, 4)
    model = {"a": nn.ParameterList([params[0]])}  # Which knows the first alone.
    saved = trained(
        GradScaler("cpu", clip=QuantileClip(0.5, window=8), model=model), params, optimizers
    ).state_dict()
    again = GradScaler("cpu", clip=QuantileClip(0.5, window=8))
    again.load_state_dict(saved)
    with pytest.raises(BadState, match="cannot be told"):
        step(again, params[0], optimizers[0], SMALL)
    with_names = GradScaler("cpu", clip=QuantileClip(0.5, window=8), model=model)
    with_names.load_state_dict(saved)
    assert step(with_names, params[0], optimizers[0], SMALL).limit == 2.0
    assert step(with_names, params[1], optimizers[1], LARGE).limit == 200.0


@pytest.mark.parametrize("how", ["copy", "deepcopy", "deepcopy of all"])
def test_a_copy_in_this_process_knows_them_by_themselves(how):
    params, optimizers = pair(4, 4)
    scaler = trained(GradScaler("cpu", clip=QuantileClip(0.5, window=8)), params, optimizers)
    if how == "deepcopy of all":
        params, optimizers, other = copy.deepcopy((params, optimizers, scaler))
    else:
        other = getattr(copy, how)(scaler)
    other = copy.copy(other)  # A copy of one that has met nobody yet.
    assert step(other, params[1], optimizers[1], LARGE).limit == 200.0
    assert step(other, params[0], optimizers[0], SMALL).limit == 2.0


def test_in_another_process_they_cannot_be_told_apart():
    params, optimizers = pair(4, 4)
    scaler = trained(GradScaler("cpu", clip=QuantileClip(0.5, window=8)), params, optimizers)
    sent = pickle.loads(pickle.dumps(scaler))
    before = params[1].detach().clone()
    with pytest.raises(BadState, match="cannot be told"):
        step(sent, params[1], optimizers[1], LARGE)
    assert torch.equal(params[1], before)


@each_clip
def test_one_that_is_made_anew_over_the_same_parameters_goes_on_with_what_was_learned(make):
    (param,), optimizers = pair(4)
    scaler = GradScaler("cpu", clip=make())
    for _ in range(6):
        step(scaler, param, optimizers[0], LARGE)
    (before,) = learned(scaler)
    optimizers[0] = torch.optim.Adam([param], lr=0.1)
    gc.collect()
    step(scaler, param, optimizers[0], LARGE)
    (after,) = learned(scaler)
    count = next(name for name in before if name.endswith("count"))
    assert (before[count], after[count]) == (6, 7)
    again = GradScaler("cpu", clip=make())
    again.load_state_dict(scaler.state_dict())
    assert learned(again) == [after]


@pytest.mark.parametrize("named", [False, True])
def test_two_that_live_over_the_same_parameters_have_a_memory_each(named):
    params = nn.ParameterList([nn.Parameter(torch.zeros(4))])
    optimizers = [torch.optim.SGD(params, lr=0.1) for _ in range(2)]
    given = {"clip": QuantileClip(0.5, window=8), "model": params if named else None}
    scaler = trained(GradScaler("cpu", **given), [params[0]] * 2, optimizers)
    for other in (scaler, copy.deepcopy(scaler)):
        assert step(other, params[0], optimizers[1], LARGE).limit == 200.0
        assert step(other, params[0], optimizers[0], SMALL).limit == 2.0
    assert len(learned(scaler)) == 2
    with pytest.raises(BadState, match=r"of 2 optimizers .* cannot be told"):
        GradScaler("cpu", **given).load_state_dict(scaler.state_dict())
    sent = pickle.loads(pickle.dumps(scaler))
    if named:
        sent.model = params
    with pytest.raises(BadState, match="cannot be told") as caught:
        step(sent, params[0], optimizers[1], LARGE)
    assert ("a scaler of its own" in str(caught.value)) is named


# --- the numbers of groups ------------------------------------------------------------------------

BY_NUMBER = {0: 0.1, 2: 0.3, 3: None}


def grouped(named=False):
    """Two optimizers, of two groups and of three."""
    params = [[nn.Parameter(torch.ones(k + 2)) for k in range(count)] for count in (2, 3)]
    optimizers = [
        torch.optim.SGD([{"params": [p]} for p in each], lr=0.0, fused=True) for each in params
    ]
    return params, optimizers


def norms_of(params):
    return [round(p.grad.norm().item(), 4) for each in params for p in each]


def loss_of(params):
    return sum(p.sum() for each in params for p in each)


def cleared(params):
    for each in params:
        for p in each:
            p.grad = None


EXPECTED = [0.1, round(3**0.5, 4), 0.3, round(3**0.5, 4), 2.0]


def by_control(params, optimizers, how, **options):
    control = GradientControl(*optimizers, clip=ClipPerGroup(BY_NUMBER), **options)
    control.backward(loss_of(params))
    for only in optimizers if how == "one by one" else [None]:
        control.step(only=only)
    return control


def by_scaler(params, optimizers, scaler=None):
    scaler = scaler or GradScaler("cpu", clip=ClipPerGroup(BY_NUMBER))
    scaler.scale(loss_of(params)).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    return scaler


@pytest.mark.parametrize("how", ["together", "one by one", "as_scaler", "scaler", "disabled"])
def test_groups_are_numbered_alike_in_a_control_and_in_a_scaler(how):
    params, optimizers = grouped()
    if how == "as_scaler":
        by_scaler(params, optimizers, GradientControl(clip=ClipPerGroup(BY_NUMBER)).as_scaler())
    elif how in ("scaler", "disabled"):
        clip = ClipPerGroup(BY_NUMBER)
        by_scaler(params, optimizers, GradScaler("cpu", enabled=how == "scaler", clip=clip))
    else:
        by_control(params, optimizers, how)
    assert norms_of(params) == EXPECTED


@pytest.mark.parametrize("kind", ["scaler", "as_scaler"])
def test_the_numbers_stay_when_they_step_in_another_order_after_a_load(kind):
    def made():
        clip = ClipPerGroup(BY_NUMBER)
        return (
            GradScaler("cpu", clip=clip)
            if kind == "scaler"
            else GradientControl(clip=clip).as_scaler()
        )

    params, optimizers = grouped()
    saved = by_scaler(params, optimizers, made()).state_dict()
    for _ in range(2):  # And once more from what such a run has saved after its first step alone.
        cleared(params)
        again = made()
        again.load_state_dict(json.loads(json.dumps(saved)))
        again.scale(loss_of(params)).backward()
        again.step(optimizers[1])
        saved = again.state_dict()
        again.step(optimizers[0])
        again.update()
        assert norms_of(params) == EXPECTED


def test_groups_that_are_added_later_move_the_numbers_of_those_behind():
    told = []
    for kind in ("control", "scaler"):
        params, optimizers = grouped()
        added = nn.Parameter(torch.ones(9))
        clip = ClipPerGroup({2: 0.1, 3: 0.3})
        if kind == "control":
            control = GradientControl(*optimizers, clip=clip)
        else:
            scaler = by_scaler(params, optimizers, GradScaler("cpu", clip=clip))
            cleared(params)
        optimizers[0].add_param_group({"params": [added]})
        params[0].append(added)
        if kind == "control":
            control.backward(loss_of(params))
            control.step()
        else:
            by_scaler(params, optimizers, scaler)
        told.append(norms_of(params))
    assert told[0] == told[1]
    assert told[0][2:4] == [0.1, 0.3]


def test_one_that_is_made_anew_has_the_numbers_of_the_one_before():
    params, optimizers = grouped()
    scaler = by_scaler(params, optimizers)
    cleared(params)
    optimizers[0] = torch.optim.SGD([{"params": [p]} for p in params[0]], lr=0.0)
    gc.collect()
    by_scaler(params, optimizers[::-1], scaler)  # The new one is met last.
    assert norms_of(params) == EXPECTED


def test_numbers_of_optimizers_that_are_alike_are_refused_after_a_load():
    params, optimizers = pair(4, 4)
    scaler = GradScaler("cpu", clip=ClipPerGroup({0: 0.1, 1: None}))
    trained(scaler, params, optimizers, count=1)
    with pytest.raises(BadState, match="cannot be told"):
        GradScaler("cpu", clip=ClipPerGroup({0: 0.1})).load_state_dict(scaler.state_dict())


def test_a_number_that_no_group_has_is_warned_of():
    params, optimizers = grouped()
    scaler = GradScaler("cpu", clip=ClipPerGroup({5: 0.1}))
    with pytest.warns(UserWarning, match=r"limits\[5\] fits no parameter. There are 5 groups"):
        by_scaler(params, optimizers, scaler)


# --- the same of a control whose optimizers are handed over one by one ----------------------------


def handed(clip, **options):
    return GradientControl(clip=clip, **options).as_scaler()


def limits_after(saved, params, optimizers, order, **options):
    again = handed(QuantileClip(0.5, window=8), **options)
    again.load_state_dict(saved)
    told = {}
    for place in order:
        told[place] = step(again, params[place], optimizers[place], (SMALL, LARGE)[place]).limit
    return told


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("told_by", ["sizes", "shapes", "names"])
def test_a_control_finds_what_it_has_learned_of_each_whatever_the_order(told_by, order):
    shapes = {"sizes": (4, 5), "shapes": ((2, 6), (3, 4)), "names": (4, 4)}[told_by]
    params, optimizers = pair(*shapes)
    options = {}
    if told_by == "names":
        holders = zip("ab", params, strict=True)
        options["model"] = {name: nn.ParameterList([param]) for name, param in holders}
    scaler = trained(handed(QuantileClip(0.5, window=8), **options), params, optimizers)
    expected = {
        place: SIZE * params[place].numel() ** 0.5 for place, SIZE in enumerate((SMALL, LARGE))
    }
    found = limits_after(scaler.state_dict(), params, optimizers, order, **options)
    assert found == pytest.approx(expected)


def test_a_control_refuses_what_it_cannot_tell_apart_before_anything_moves():
    params, optimizers = pair(4, 4)
    scaler = trained(handed(QuantileClip(0.5, window=8)), params, optimizers)
    again = handed(QuantileClip(0.5, window=8))
    again.load_state_dict(scaler.state_dict())
    with pytest.raises(BadState, match=r"which of them comes first cannot be told.*control\.bind"):
        step(again, params[1], optimizers[1], LARGE)
    assert again.control.optimizers == ()
    again.control.bind(*optimizers)  # The order, said.
    assert step(again, params[1], optimizers[1], LARGE).limit == 200.0


def test_a_bad_state_changes_nothing_where_optimizers_are_alike():
    params, optimizers = pair(4, 4)
    scaler = trained(handed(QuantileClip(0.5, window=8)), params, optimizers)
    before = scaler.state_dict()
    for refused in (before, {**before, "scale": -1.0}):
        with pytest.raises(BadState):
            scaler.load_state_dict(refused)
        assert scaler.state_dict() == before
    assert step(scaler, params[1], optimizers[1], LARGE).limit == 200.0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_optimizers_given_in_another_order_find_what_is_theirs(order):
    params, optimizers = pair(4, 5)
    control = GradientControl(*optimizers, clip=QuantileClip(0.5, window=8))
    trained(control.as_scaler(), params, optimizers)
    other = GradientControl(
        *(optimizers[place] for place in order), clip=QuantileClip(0.5, window=8)
    )
    other.load_state_dict(control.state_dict())
    assert step(other.as_scaler(), params[0], optimizers[0], SMALL).limit == 2.0


@pytest.mark.parametrize("bound", [True, False])
def test_what_is_learned_of_each_parameter_bears_another_optimizer(bound):
    """Behind as_scaler(), where the first has learned before the second comes."""
    params, optimizers = pair(4, 5)
    control = GradientControl(*optimizers[:bound], clip=AdaGC(warmup=1))
    scaler = control.as_scaler()
    for _ in range(3):
        step(scaler, params[0], optimizers[0], SMALL)
    trained(scaler, params, optimizers, count=2)
    states = [state["gradilocks"] for _, state in control.state_dict()["gradilocks"]["parts"]]
    assert [state["clip_state"]["count"] for state in states] == [5, 2]
    assert [len(state["clip_state"]["usual"]) for state in states] == [1, 1]


def test_what_nobody_has_claimed_yet_is_saved_on():
    params, optimizers = pair(4, 5)
    saved = trained(handed(QuantileClip(0.5, window=8)), params, optimizers).state_dict()
    again = handed(QuantileClip(0.5, window=8))
    again.load_state_dict(saved)
    step(again, params[1], optimizers[1], LARGE)
    found = limits_after(again.state_dict(), params, optimizers, (0,))
    assert found == {0: 2.0}
    copied = pickle.loads(pickle.dumps(again))
    assert copied.state_dict() == again.state_dict()


@pytest.mark.parametrize("met", [(), (0,), (1,), (0, 1), (2,)])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("make", [LEARNING["AdaGC"], lambda: chain(AdaGC(warmup=2), 1e6)])
def test_what_is_learned_of_each_parameter_loads_whoever_was_met(make, named, met):
    """Behind as_scaler(), where the others are still to come."""
    params, optimizers = pair(4, 5, 6)
    options = {"model": nn.ParameterList(params)} if named else {}
    scaler = trained(handed(make(), **options), params[:2], optimizers[:2])
    saved = scaler.state_dict()
    again = handed(make(), **options)
    for place in met:
        step(again, params[place], optimizers[place], SMALL)
    again.load_state_dict(saved)
    told = []
    for each in (scaler, again):
        for place in (2, 1, 0):  # The first is none of those that the checkpoint knows.
            step(each, params[place], optimizers[place], (SMALL, LARGE, SMALL)[place])
        parts = [state["gradilocks"] for _, state in each.state_dict()["gradilocks"]["parts"]]
        told.append({part["optimizer"]["sizes"][0]: part["clip_state"] for part in parts})
    assert [set(each) for each in told] == [{4, 5, 6}] * 2
    assert [told[0][size] for size in (4, 5)] == [told[1][size] for size in (4, 5)]


# --- an optimizer that has changed since ----------------------------------------------------------

EACH = {"scaler": lambda clip, **given: GradScaler("cpu", clip=clip, **given), "control": handed}
each_object = pytest.mark.parametrize("make", EACH.values(), ids=EACH)


def stepped(scaler, *params, size):
    """The outcome of a step of an optimizer that is made for it."""
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler.scale(sum((param * size).sum() for param in params)).backward()
    scaler.step(optimizer)
    scaler.update()
    for param in params:
        param.grad = None
    return (scaler.outcome if isinstance(scaler, GradScaler) else scaler.control.outcome), optimizer


def of_two(make, **given):
    """Three parameters that names alone tell apart, and what was learned of the first two."""
    params = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(3)])
    given = {"model": params} if given.get("named") else {}
    scaler = make(QuantileClip(0.5, window=8), **given)
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in params[:2]]
    saved = trained(scaler, params[:2], optimizers).state_dict()
    again = make(QuantileClip(0.5, window=8), **given)
    again.load_state_dict(saved)
    return again, params


@each_object
def test_names_tell_an_optimizer_to_which_parameters_were_added(make, caplog):
    again, (small, large, added) = of_two(make, named=True)
    outcome, kept = stepped(again, added, large, size=LARGE)
    assert outcome.limit == 200.0  # What was learned of the second, and no more of the new one.
    outcome, also_kept = stepped(again, small, size=SMALL)
    assert outcome.limit == 2.0
    assert "afresh" not in caplog.text
    assert kept is not also_kept


@each_object
def test_two_that_have_become_one_start_afresh_and_say_so(make, caplog):
    again, (small, large, _) = of_two(make, named=True)
    outcome, kept = stepped(again, small, large, size=LARGE)
    assert outcome.limit == outcome.norm
    assert "starts afresh for an optimizer of 2 parameters (0, ...)" in caplog.text
    assert kept.param_groups


def test_a_control_says_of_whom_a_checkpoint_knows_nothing(caplog):
    params, optimizers = pair(4, 5)
    control = GradientControl(*optimizers, clip=QuantileClip(0.5, window=8))
    saved = trained(control.as_scaler(), params, optimizers).state_dict()
    optimizers[1].add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    again = GradientControl(*optimizers, clip=QuantileClip(0.5, window=8))
    again.load_state_dict(saved)
    (told,) = [each.getMessage() for each in caplog.records if "afresh" in each.getMessage()]
    assert "QuantileClip starts afresh for an optimizer of 2 parameters (optimizers[1]." in told
    assert "GradientControl(model=...)" in told


@each_object
@pytest.mark.parametrize("named", [False, True])
def test_of_two_that_are_alike_one_is_known_and_the_other_comes_first(make, named):
    params, optimizers = pair(4, 4)
    clip, given = QuantileClip(0.5, window=8), {}
    if named:
        given["model"] = nn.ParameterList(params)
    scaler = make(clip, **given)
    for _ in range(4):
        step(scaler, params[0], optimizers[0], SMALL)
    again = make(clip, **given)
    again.load_state_dict(scaler.state_dict())
    step(again, params[1], optimizers[1], LARGE)
    if named:
        assert step(again, params[0], optimizers[0], LARGE).limit == 2.0
        return
    for _ in range(2):
        before = params[0].detach().clone()
        with pytest.raises(BadState, match=r"is of one of two .* cannot be told.*model=\{"):
            step(again, params[0], optimizers[0], SMALL)
        assert torch.equal(params[0], before)
        params[0].grad = None


def test_of_two_that_are_alike_and_known_a_state_of_one_is_refused():
    params, optimizers = pair(4, 4)
    scaler = handed(QuantileClip(0.5, window=8))
    step(scaler, params[0], optimizers[0], SMALL)
    saved = scaler.state_dict()
    again = trained(handed(QuantileClip(0.5, window=8)), params, optimizers, count=2)
    before = again.state_dict()
    with pytest.raises(BadState, match="is of one of two"):
        again.load_state_dict(saved)
    assert again.state_dict() == before


@pytest.mark.parametrize("spoilt", [{"sizes": [None]}, {"shapes": [4]}, {"names": [3]}])
def test_a_signature_that_is_none_is_a_bad_state(spoilt):
    params, optimizers = pair(4, 5)
    scaler = trained(GradScaler("cpu", clip=QuantileClip(0.5, window=8)), params, optimizers)
    saved = scaler.state_dict()
    saved["gradilocks_scaler"]["clip"]["states"][0].update(spoilt)
    with pytest.raises(BadState, match="does not fit"):
        scaler.load_state_dict(saved)
