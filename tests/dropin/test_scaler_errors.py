"""Every error of torch's GradScaler comes from ours too: same type, same text at its start."""

import contextlib
import pickle
import re

import pytest
import torch

import gradilocks
from gradilocks import GradScaler
from gradilocks.errors import BadState, GradilocksError, MissingKey

SCALERS = {"torch": torch.amp.GradScaler, "gradilocks": GradScaler}
NO_SCALE = (
    "Attempted {} but _scale is None.  This may indicate your script did not use "
    "scaler.scale(loss or outputs) earlier in the iteration."
)
NEW_SCALE = (
    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with "
    "requires_grad=False."
)
PICKLED = (
    "A GradScaler instance may only be pickled at the beginning of an iteration, or at the end "
    "after scaler.update()."
)
EMPTY = (
    "The source state dict is empty, possibly because it was saved from a disabled instance of "
    "GradScaler."
)


@pytest.fixture(params=sorted(SCALERS))
def scaler_class(request):
    """Each test states a fact of torch's scaler, and that ours keeps it."""
    return SCALERS[request.param]


@pytest.fixture
def param():
    return torch.nn.Parameter(torch.tensor([1.0, 2.0]))


@contextlib.contextmanager
def raises(kind, text):
    with pytest.raises(kind, match="^" + re.escape(text)) as caught:
        yield caught
    assert str(caught.value).startswith(text)


def started(scaler_class, param, **settings):
    """A scaler after one scaled backward pass."""
    scaler = scaler_class("cpu", init_scale=4.0, **settings)
    scaler.scale((param * param).sum()).backward()
    return scaler


def sgd(param, **settings):
    return torch.optim.SGD([param], lr=0.1, **settings)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_growth_factor_of_one_or_less_is_refused(scaler_class, factor):
    with raises(AssertionError, "The growth factor must be > 1.0."):
        scaler_class("cpu", growth_factor=factor)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_backoff_factor_of_one_or_more_is_refused(scaler_class, factor):
    with raises(AssertionError, "The backoff factor must be < 1.0."):
        scaler_class("cpu", backoff_factor=factor)


def test_bad_factors_do_not_matter_to_a_disabled_scaler(scaler_class):
    scaler = scaler_class("cpu", growth_factor=0.5, backoff_factor=2.0, enabled=False)
    assert not scaler.is_enabled()


@pytest.mark.parametrize("name", ["step", "unscale_", "update"])
def test_a_call_before_the_first_scale_says_so_with_two_spaces(scaler_class, param, name):
    scaler = scaler_class("cpu")
    arguments = () if name == "update" else (sgd(param),)
    with raises(AssertionError, NO_SCALE.format(name)):
        getattr(scaler, name)(*arguments)


def test_update_with_a_value_before_the_first_scale_says_so_too(scaler_class):
    with raises(AssertionError, NO_SCALE.format("update")):
        scaler_class("cpu").update(2.0)


def test_the_inf_check_before_the_first_scale_says_so_too(scaler_class, param):
    with raises(AssertionError, NO_SCALE.format("_check_inf_per_device")):
        scaler_class("cpu")._check_inf_per_device(sgd(param))


def test_a_step_without_gradients_has_no_inf_checks(scaler_class, param):
    scaler = started(scaler_class, param)
    param.grad = None
    with raises(AssertionError, "No inf checks were recorded for this optimizer."):
        scaler.step(sgd(param))


def test_a_fused_step_without_gradients_passes_and_update_fails_instead(scaler_class, param):
    scaler = started(scaler_class, param)
    param.grad = None
    assert scaler.step(sgd(param, fused=True)) is None
    with raises(AssertionError, "No inf checks were recorded prior to update."):
        scaler.update()


def test_an_update_without_a_step_has_no_inf_checks(scaler_class, param):
    scaler = started(scaler_class, param)
    with raises(AssertionError, "No inf checks were recorded prior to update."):
        scaler.update()


def test_pickling_between_unscale_and_update_is_refused(scaler_class, param):
    scaler = started(scaler_class, param)
    scaler.unscale_(sgd(param))
    with raises(AssertionError, PICKLED):
        pickle.dumps(scaler)


@pytest.mark.parametrize("fused", [False, True])
def test_pickling_between_step_and_update_is_refused(scaler_class, param, fused):
    scaler = started(scaler_class, param)
    scaler.step(sgd(param, fused=fused))
    with raises(AssertionError, PICKLED):
        pickle.dumps(scaler)


def test_a_second_unscale_is_refused(scaler_class, param):
    scaler, optimizer = started(scaler_class, param), sgd(param)
    scaler.unscale_(optimizer)
    text = "unscale_() has already been called on this optimizer since the last update()."
    with raises(RuntimeError, text):
        scaler.unscale_(optimizer)
    assert param.grad.tolist() == [2.0, 4.0]


@pytest.mark.parametrize("fused", [False, True])
def test_unscale_after_step_is_refused(scaler_class, param, fused):
    scaler, optimizer = started(scaler_class, param), sgd(param, fused=fused)
    scaler.step(optimizer)
    with raises(RuntimeError, "unscale_() is being called after step()."):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_a_second_step_is_refused(scaler_class, param, fused):
    scaler, optimizer = started(scaler_class, param), sgd(param, fused=fused)
    scaler.step(optimizer)
    before = param.detach().clone()
    with raises(RuntimeError, "step() has already been called since the last update()."):
        scaler.step(optimizer)
    assert torch.equal(param, before)


@pytest.mark.parametrize("closure", [None, lambda: 1.0])
@pytest.mark.parametrize("fused", [False, True])
def test_a_closure_by_keyword_is_refused_even_if_it_is_none(scaler_class, param, fused, closure):
    scaler = started(scaler_class, param)
    text = "Closure use is not currently supported if GradScaler is enabled."
    with raises(RuntimeError, text):
        scaler.step(sgd(param, fused=fused), closure=closure)


def test_a_closure_by_keyword_is_refused_before_anything_else_is(scaler_class, param):
    with raises(RuntimeError, "Closure use is not currently supported if GradScaler is enabled."):
        scaler_class("cpu").step(sgd(param), closure=None)


@pytest.mark.parametrize("fused", [False, True])
def test_a_positional_closure_runs(scaler_class, param, fused):
    scaler = started(scaler_class, param)
    called = []
    returned = scaler.step(sgd(param, fused=fused), lambda: called.append("yes") or 2.5)
    assert returned == 2.5
    assert called == ["yes"]


def test_an_empty_state_dict_is_refused(scaler_class):
    with raises(RuntimeError, EMPTY):
        scaler_class("cpu").load_state_dict({})


def test_a_disabled_scaler_loads_anything(scaler_class):
    scaler = scaler_class("cpu", enabled=False)
    scaler.load_state_dict({})
    scaler.load_state_dict({"scale": 0.0})
    assert scaler.state_dict() == {}


@pytest.mark.parametrize("key", sorted(torch.amp.GradScaler("cpu").state_dict()))
def test_a_state_dict_without_a_key_is_a_key_error(scaler_class, key):
    state = torch.amp.GradScaler("cpu").state_dict()
    del state[key]
    with pytest.raises(KeyError, match=key):
        scaler_class("cpu").load_state_dict(state)


@pytest.mark.parametrize("where", ["step", "unscale_"])
def test_fp16_gradients_are_not_unscaled(scaler_class, where):
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = started(scaler_class, param)
    with raises(ValueError, "Attempting to unscale FP16 gradients."):
        getattr(scaler, where)(sgd(param))
    assert param.grad.tolist() == [8.0, 8.0]


def test_an_explicit_unscale_of_fp16_gradients_is_refused_for_a_fused_optimizer_too(scaler_class):
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = started(scaler_class, param)
    with raises(ValueError, "Attempting to unscale FP16 gradients."):
        scaler.unscale_(sgd(param, fused=True))


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("make", ["AdamW", "SGD", "ours"])
def test_who_has_a_fused_optimizer_is_not_told_to_take_one(make, clip):
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    settings = {"lr": 0.1} if make == "ours" else {"lr": 0.1, "fused": True}
    kind = gradilocks.optim.AdamW if make == "ours" else getattr(torch.optim, make)
    scaler = GradScaler("cpu", init_scale=8.0, clip=clip)
    scaler.scale(param.float().sum()).backward()
    optimizer = kind([param], **settings)
    with pytest.raises(ValueError, match=r"leave out scaler\.unscale_\(optimizer\)") as caught:
        scaler.unscale_(optimizer)
    assert "fused=True" not in str(caught.value)
    scaler.step(optimizer)  # As it says.
    assert (param < 1.0).all()


def test_a_subclass_that_knows_when_it_unscales_clips_fp16_with_a_fused_optimizer():
    class Counting(GradScaler):
        unscaled = 0

        def unscale_(self, optimizer):
            self.unscaled += 1
            super().unscale_(optimizer)

    for fused in (True, False):
        dtype = torch.float16 if fused else torch.float32
        param = torch.nn.Parameter(torch.ones(2, dtype=dtype))
        scaler = Counting("cpu", init_scale=8.0, clip=0.5)
        scaler.scale(param.float().sum()).backward()
        scaler.step(torch.optim.AdamW([param], lr=0.1, fused=fused))
        assert scaler.outcome.clipped
        assert (param < 1.0).all()
        assert scaler.unscaled == (not fused)  # As torch's own step calls it.


def test_a_fused_step_takes_fp16_gradients(scaler_class):
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    scaler = started(scaler_class, param)
    scaler.step(sgd(param, fused=True))
    assert param.tolist() == pytest.approx([0.8, 0.8], abs=1e-3)


@pytest.mark.parametrize("outputs", [1.0, None, 3])
def test_outputs_that_are_no_tensors_are_refused(scaler_class, outputs):
    with raises(ValueError, "outputs must be a Tensor or an iterable of Tensors"):
        scaler_class("cpu").scale(outputs)


def test_a_list_with_something_else_in_it_is_refused(scaler_class):
    with raises(ValueError, "outputs must be a Tensor or an iterable of Tensors"):
        scaler_class("cpu").scale([torch.ones(()), 1.0])


@pytest.mark.parametrize(
    "new_scale",
    [torch.ones(2), torch.ones(()).requires_grad_(), torch.ones((), device="meta")],
    ids=["two elements", "requires grad", "another device"],
)
def test_a_new_scale_that_is_no_plain_number_is_refused(scaler_class, param, new_scale):
    scaler, optimizer = started(scaler_class, param), sgd(param)
    scaler.step(optimizer)
    with raises(AssertionError, NEW_SCALE):
        scaler.update(new_scale)
    assert scaler.get_scale() == 4.0
    with raises(RuntimeError, "step() has already been called since the last update()."):
        scaler.step(optimizer)  # A refused update does not begin the next iteration.


def test_a_parameter_that_is_no_tensor_is_refused(scaler_class, param):
    class Optimizer:
        def __init__(self):
            self.param_groups = [{"params": [param, "weight"]}]

    scaler = started(scaler_class, param)
    with raises(AssertionError, "expected param to be torch.Tensor, got str"):
        scaler.unscale_(Optimizer())


def test_an_unscale_that_was_refused_can_be_tried_again(scaler_class):
    half = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    single = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([single, half], lr=0.1)
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale((single * 3).sum() + half.float().sum()).backward()
    with raises(ValueError, "Attempting to unscale FP16 gradients."):
        scaler.unscale_(optimizer)
    half.grad = None
    scaler.unscale_(optimizer)
    assert single.grad.tolist() == [3.0, 3.0]


# --- what ours adds ---------------------------------------------------------------------------


def test_the_fp16_error_names_the_parameter_and_the_way_out():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1).half())
    scaler = GradScaler("cpu", model=model)
    scaler.scale(model[1](model[0](torch.ones(1, 2)).half()).sum()).backward()
    with pytest.raises(ValueError, match=r"1\.weight is float16.*fused=True"):
        scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_state_dict_with_an_impossible_scale_is_refused_and_changes_nothing(scale):
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    with pytest.raises(BadState, match="the scale in the state_dict must lie in"):
        scaler.load_state_dict({**before, "scale": scale, "growth_interval": 5})
    assert scaler.state_dict() == before


def test_a_state_dict_with_a_missing_key_changes_nothing():
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    state = {**before, "scale": 2.0, "growth_factor": 4.0}
    del state["_growth_tracker"]
    with pytest.raises(MissingKey, match="has no '_growth_tracker'") as caught:
        scaler.load_state_dict(state)
    assert isinstance(caught.value, GradilocksError)
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("_growth_tracker", None),
        ("_growth_tracker", "3"),
        ("growth_interval", None),
        ("growth_factor", None),
        ("backoff_factor", "0.5"),
        ("scale", None),
        ("scale", "8"),
    ],
)
def test_a_state_dict_with_a_value_of_the_wrong_type_is_refused_and_changes_nothing(key, value):
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    with pytest.raises(BadState, match=key):
        scaler.load_state_dict({**before, "scale": 2.0, "growth_factor": 4.0, key: value})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("value", [0.0, -2.0, float("nan"), float("inf")])
def test_an_impossible_new_scale_is_refused_and_changes_nothing(param, value):
    scaler, optimizer = started(GradScaler, param), sgd(param)
    scaler.step(optimizer)
    with pytest.raises(ValueError, match="new_scale must be positive and finite"):
        scaler.update(value)
    assert scaler.get_scale() == 4.0
    scaler.update()
    assert scaler._get_growth_tracker() == 1


@pytest.mark.parametrize("value", [0.0, -2.0, float("nan"), float("inf"), 1e-40])
def test_a_scale_to_start_from_that_cannot_work_is_refused(value):
    with pytest.raises(ValueError, match="init_scale must be positive and finite"):
        GradScaler("cpu", init_scale=value)


@pytest.mark.parametrize(
    "bounds", [{"min_scale": 8.0}, {"max_scale": 2.0}, {"min_scale": 0.0}, {"max_scale": 1e39}]
)
def test_bounds_that_do_not_enclose_the_first_scale_are_refused(bounds):
    with pytest.raises(ValueError, match="lie between min_scale and max_scale"):
        GradScaler("cpu", init_scale=4.0, **bounds)


def test_what_is_no_model_is_refused_at_once():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module.*got list"):
        GradScaler("cpu", model=[torch.nn.Linear(1, 1)])


@pytest.mark.parametrize("name", ["Adam", "SGD", "Adagrad"])
def test_a_fused_step_after_an_unscale_that_saw_no_gradients_is_refused(name):
    # An unfused optimizer is refused here; torch's fused ones fail with an AttributeError.
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = getattr(torch.optim, name)([param], lr=0.1, fused=True)
    scaler = GradScaler("cpu", init_scale=1024.0)
    loss = scaler.scale((param * param).sum())
    scaler.unscale_(optimizer)
    loss.backward()
    with raises(AssertionError, "No inf checks were recorded for this optimizer."):
        scaler.step(optimizer)
    assert param.tolist() == [1.0, 1.0]
