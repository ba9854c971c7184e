"""timm's NativeScaler and ours, in the same loop: the same numbers, and states that interchange."""

from __future__ import annotations

import contextlib
import inspect
import io
import sys

import pytest
import torch

import gradilocks
from gradilocks import HeadroomScale, ZScoreClip
from gradilocks.integrations.timm import NativeScaler
from tests.frameworks import STAND_INS
from tests.integrations import task

pytestmark = pytest.mark.filterwarnings("ignore")  # timm's own deprecations.


@pytest.fixture(scope="module")
def timm():
    sys.path.insert(0, str(STAND_INS))
    import timm.models
    import timm.utils

    yield timm
    sys.path.remove(str(STAND_INS))


def train(scaler, kind, *, half=True, accumulate=1, steps=range(task.STEPS), start=None, **clip):
    """The parameters after a loop as timm's train.py has it, and what was made in it."""
    model, optimizer = start or (None, None)
    if model is None:
        model = task.Network()
        optimizer = task.OPTIMIZERS[kind](model.parameters())
    context = torch.autocast("cpu", torch.float16) if half else contextlib.nullcontext()
    parameters = clip.pop("parameters", lambda model: model.parameters())
    batches = task.batches(accumulate=accumulate)
    for number in range(steps.start * accumulate, steps.stop * accumulate):
        with context:
            loss = model(batches[number]).mean() / accumulate
        need_update = (number + 1) % accumulate == 0
        scaler(loss, optimizer, parameters=parameters(model), need_update=need_update, **clip)
        if need_update:
            optimizer.zero_grad()
    return task.weights(model), model, optimizer


def test_the_signature_is_timms(timm):
    theirs = inspect.signature(timm.utils.NativeScaler.__call__).parameters
    ours = inspect.signature(NativeScaler.__call__).parameters
    assert list(ours) == list(theirs)
    assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in theirs.items()}
    assert NativeScaler.state_dict_key == timm.utils.NativeScaler.state_dict_key
    made = inspect.signature(timm.utils.NativeScaler).parameters
    assert inspect.signature(NativeScaler).parameters["device"].default == made["device"].default


@pytest.mark.parametrize("kind", task.OPTIMIZERS)
@pytest.mark.parametrize("half", [True, False], ids=["fp16", "fp32"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_without_a_clip_every_bit_is_timms(kind, half, accumulate, timm):
    theirs, *_ = train(timm.utils.NativeScaler("cpu"), kind, half=half, accumulate=accumulate)
    scaler = NativeScaler("cpu")
    ours, *_ = train(scaler, kind, half=half, accumulate=accumulate)
    assert task.same(ours, theirs)
    assert scaler.control.scale == 32768.0  # One Inf was planted.


@pytest.mark.parametrize("kind", task.OPTIMIZERS)
@pytest.mark.parametrize("half", [torch.bfloat16, None])
def test_without_a_scale_it_is_the_loop_that_timm_has_for_bf16(kind, half, timm):
    def loop(step):
        model = task.Network()
        optimizer = task.OPTIMIZERS[kind](model.parameters())
        context = torch.autocast("cpu", half) if half else contextlib.nullcontext()
        for batch in task.batches(bad=None):
            with context:
                loss = model(batch).mean()
            step(loss, optimizer, model)
            optimizer.zero_grad()
        return task.weights(model)

    def theirs(loss, optimizer, model):
        loss.backward()
        timm.utils.dispatch_clip_grad(model.parameters(), value=0.02, mode="norm")
        optimizer.step()

    scaler = NativeScaler("cpu", scale=None)

    def ours(loss, optimizer, model):
        scaler(loss, optimizer, clip_grad=0.02, parameters=model.parameters())

    for one, other in zip(loop(ours), loop(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert scaler.control.scale == 1.0


def all_but_the_head(model):
    return list(model.parameters())[:-2]


def all_of(model):
    return model.parameters()


@pytest.mark.parametrize("kind", task.OPTIMIZERS)
@pytest.mark.parametrize(
    ("mode", "bound", "parameters"),
    [
        ("norm", 0.02, all_of),
        ("norm", 0.002, all_but_the_head),
        ("value", 0.003, all_of),
        ("agc", 0.01, all_of),
        ("agc", 0.01, all_but_the_head),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_each_clip_mode_is_timms_to_1e_6(kind, mode, bound, parameters, named, timm):
    clip = {"clip_grad": bound, "clip_mode": mode, "parameters": parameters, "accumulate": 2}
    theirs, *_ = train(timm.utils.NativeScaler("cpu"), kind, **clip)
    free, *_ = train(timm.utils.NativeScaler("cpu"), kind, accumulate=2)
    model = task.Network()
    optimizer = task.OPTIMIZERS[kind](model.parameters())
    scaler = NativeScaler("cpu", model=model if named else None)
    ours, *_ = train(scaler, kind, start=(model, optimizer), **clip)
    assert not task.same(theirs, free)  # The clip bites.
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert scaler.control.outcome.clipped


def test_the_outcome_comes_back_and_the_run_is_recorded(tmp_path):
    model = task.Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = NativeScaler("cpu", model=model, record=tmp_path / "a.jsonl", config={"lr": 0.05})
    outcomes = []
    for batch in task.batches(accumulate=2):
        outcomes.append(
            scaler(
                model(batch).mean() / 2,
                optimizer,
                clip_grad=0.05,
                parameters=model.parameters(),
                need_update=len(outcomes) % 2 == 1,
            )
        )
        if outcomes[-1] is not None:
            optimizer.zero_grad()
    assert outcomes[::2] == [None] * task.STEPS
    norms = [outcome.norm for outcome in outcomes[1::2]]
    scaler.control.recorder.close()
    run = gradilocks.read_run(tmp_path / "a.jsonl")
    assert [step.norm for step in run.steps if not step.skipped] == pytest.approx(
        [norm for place, norm in enumerate(norms) if place != task.BAD]
    )
    (skipped,) = [step for step in run.steps if step.skipped]
    assert (skipped.step, [c.name for c in skipped.culprits]) == (task.BAD + 1, [task.CULPRIT])
    assert run.header.config == {"lr": 0.05}


@pytest.mark.parametrize("kind", task.OPTIMIZERS)
def test_a_checkpoint_of_timms_saver_goes_on_to_the_bit(kind, timm, tmp_path):
    def made():
        model = task.Network()
        optimizer = task.OPTIMIZERS[kind](model.parameters())
        scaler = NativeScaler("cpu", model=model, scale=HeadroomScale(), clip=ZScoreClip(warmup=2))
        return model, optimizer, scaler

    def go(model, optimizer, scaler, steps):
        return train(scaler, kind, steps=steps, start=(model, optimizer))[0]

    whole = go(*made(), range(task.STEPS))
    model, optimizer, scaler = made()
    go(model, optimizer, scaler, range(4))
    with contextlib.redirect_stdout(io.StringIO()):
        saver = timm.utils.CheckpointSaver(
            model, optimizer, amp_scaler=scaler, checkpoint_dir=str(tmp_path)
        )
        saver.save_checkpoint(0, metric=1.0)
    model, optimizer, scaler = made()
    timm.models.resume_checkpoint(
        model, str(tmp_path / "last.pth.tar"), optimizer, scaler, log_info=False
    )
    assert task.same(go(model, optimizer, scaler, range(4, task.STEPS)), whole)


def test_states_load_into_each_other(timm):
    theirs, ours = timm.utils.NativeScaler("cpu"), NativeScaler("cpu")
    train(theirs, "sgd")
    train(ours, "sgd")
    assert ours.state_dict().items() >= theirs.state_dict().items()
    fresh = NativeScaler("cpu")
    fresh.load_state_dict(theirs.state_dict())
    native = timm.utils.NativeScaler("cpu")
    native.load_state_dict(ours.state_dict())
    assert fresh.control.scale == native._scaler.get_scale() == 32768.0
    assert train(fresh, "sgd")[0][0].equal(train(native, "sgd")[0][0])


def test_what_does_not_fit_is_refused():
    model = task.Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch = task.batches(bad=None)[0]
    with pytest.raises(ValueError, match="one of norm, value, agc, got 'quantile'"):
        NativeScaler("cpu")(model(batch).mean(), optimizer, clip_grad=1.0, clip_mode="quantile")
    with pytest.raises(ValueError, match=r"made with clip=ZScoreClip\(.* Leave --clip-grad out"):
        NativeScaler("cpu", clip=ZScoreClip())(model(batch).mean(), optimizer, clip_grad=1.0)
    with pytest.raises(ValueError, match=r"leaves out 2 of them, such as head\.weight"):
        NativeScaler("cpu", model=model)(
            model(batch).mean(),
            optimizer,
            clip_grad=1.0,
            clip_mode="value",
            parameters=all_but_the_head(model),
        )


def test_names_are_those_of_the_model_inside_its_wrappers():
    model = task.Network()
    scaler = NativeScaler("cpu", model=torch.nn.DataParallel(model))
    train(
        scaler,
        "sgd",
        start=(model, torch.optim.SGD(model.parameters(), lr=0.05)),
        clip_grad=0.01,
        clip_mode="agc",
        parameters=all_but_the_head,
        steps=range(3),
    )
    assert list(scaler.control.outcome.culprits) == [task.CULPRIT]
