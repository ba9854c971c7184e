"""fastai's Learner with our callback, beside fastai's own parts and beside a plain loop."""

from __future__ import annotations

import contextlib
import io
import math

import pytest
import torch
from fastai.basics import Adam, Callback, DataLoader, DataLoaders, Learner, OptimWrapper, ranger
from fastai.callback.core import CancelBatchException, CancelStepException
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.schedule import ParamScheduler, SchedLin
from fastai.callback.training import GradientAccumulation, GradientClip

import gradilocks
from gradilocks import HeadroomScale, ZScoreClip
from gradilocks.integrations.fastai import GradientControlCallback
from tests.frameworks import planted_fastai
from tests.integrations import task
from tests.observe.plain_loop import plain_loop, recorded

pytestmark = pytest.mark.filterwarnings("ignore")  # fastai's own deprecations.

OPTIMIZERS = {
    "fastai's adam": Adam,
    "fastai's ranger": ranger,
    "sgd": lambda params, lr: OptimWrapper(params, torch.optim.SGD, lr=lr, momentum=0.9),
    "fused adamw": lambda params, lr: OptimWrapper(params, torch.optim.AdamW, lr=lr, fused=True),
    "ours": lambda params, lr: OptimWrapper(params, gradilocks.optim.AdamW, lr=lr),
}
each_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def learner(kind, *, precision="16-mixed", accumulate=1, bad=task.BAD, cbs=(), **options):
    case = {"accumulate": accumulate, "bad": bad, "lr": 0.05, "precision": precision}
    own = [GradientAccumulation(accumulate * task.BATCH)] if accumulate > 1 else []
    return planted_fastai.learner(case, opt_func=OPTIMIZERS[kind], cbs=[*own, *cbs], **options)


def fit(learn, epochs=1, **options):
    with learn.no_logging(), learn.no_mbar(), contextlib.redirect_stdout(io.StringIO()):
        learn.fit(epochs, **options)
    return task.weights(learn.model)


class OnCPU(MixedPrecision):
    """fastai's own mixed precision, which is for CUDA, with torch's parts for the CPU."""

    def before_fit(self):
        super().before_fit()
        half = torch.float16 if self.amp_mode.value == "fp16" else torch.bfloat16
        self.autocast = torch.autocast("cpu", half)
        self.learn.scaler = torch.amp.GradScaler("cpu", enabled=half is torch.float16)


def natives(precision, clip):
    """fastai's own callbacks."""
    amp = {"16-mixed": [OnCPU()], "bf16-mixed": [OnCPU(amp_mode="bf16")], "32-true": []}[precision]
    return [*amp, *([GradientClip(clip)] if clip is not None else [])]


def ours(precision, clip=None, **options):
    amp = {"16-mixed": "fp16", "bf16-mixed": "bf16", "32-true": None}[precision]
    return GradientControlCallback(amp=amp, clip=clip, **options)


@each_optimizer
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "32-true"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_without_a_clip_every_bit_is_fastais(kind, precision, accumulate):
    bad = task.BAD if precision == "16-mixed" else None  # Nothing of fastai's skips elsewhere.
    options = {"precision": precision, "accumulate": accumulate, "bad": bad}
    theirs = fit(learner(kind, cbs=natives(precision, None), **options))
    callback = ours(precision)
    assert task.same(fit(learner(kind, cbs=[callback], **options)), theirs)
    assert callback.control.scale == (32768.0 if precision == "16-mixed" else 1.0)
    assert callback.outcome.step == task.STEPS


@each_optimizer
@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
def test_a_clip_is_fastais_to_1e_6(kind, precision):
    options = {"precision": precision, "accumulate": 2}
    options["bad"] = task.BAD if precision == "16-mixed" else None
    theirs = fit(learner(kind, cbs=natives(precision, 0.01), **options))
    mine = fit(learner(kind, cbs=[ours(precision, 0.01)], **options))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@each_optimizer
def test_in_float32_too_a_bad_step_is_skipped(kind):
    weights = fit(learner(kind, precision="32-true", cbs=[ours("32-true")]))
    assert all(each.isfinite().all() for each in weights)
    theirs = fit(learner(kind, precision="32-true"))
    assert not all(each.isfinite().all() for each in theirs)


@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["sgd", "fused adamw"])
def test_the_run_file_is_that_of_a_plain_loop(kind, precision, accumulate, tmp_path):
    scale = "dynamic" if precision == "32-true" else "auto"
    callback = ours(precision, 0.05, scale=scale, record=tmp_path / "a.jsonl", config={"epochs": 1})
    fit(learner(kind, precision=precision, accumulate=accumulate, cbs=[callback]))
    callback.control.recorder.close()
    run = gradilocks.read_run(tmp_path / "a.jsonl")
    case = {
        "precision": precision,
        "accumulate": accumulate,
        "clip": 0.05,
        "bad": task.BAD,
        "scaled": True,
        "schedule": "never",
    }
    makers = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
    }
    expected = plain_loop(case, makers[kind])
    assert recorded(run, 0) == expected
    assert run.header.config == {"epochs": 1}


class Watcher(Callback):
    """Counts what fastai tells of steps, and looks at gradients before them."""

    order = 20

    def __init__(self):
        self.seen = []
        self.norms = []

    def before_step(self):
        grads = [p.grad for p in self.learn.model.parameters()]
        self.norms.append(torch.cat([g.flatten() for g in grads]).norm().item())

    def after_cancel_step(self):
        self.seen.append("cancelled")

    def after_step(self):
        self.seen.append("over")


def test_fastai_is_told_of_a_skip_and_later_callbacks_see_true_gradients(tmp_path):
    watcher, callback = Watcher(), ours("16-mixed", record=tmp_path / "a.jsonl")
    learn = learner("sgd", cbs=[watcher, callback])
    fit(learn)
    skipped = ["cancelled", "over"]
    assert watcher.seen == [*["over"] * task.BAD, *skipped, *["over"] * (task.STEPS - task.BAD - 1)]
    assert learn.train_iter == task.STEPS
    callback.control.recorder.close()
    norms = [step.norm for step in gradilocks.read_run(tmp_path / "a.jsonl").steps]
    for seen, norm in zip(watcher.norms, norms, strict=True):
        assert not math.isfinite(seen) if norm is None else seen == pytest.approx(norm, rel=1e-5)


def test_schedules_go_by_batches_whether_steps_are_skipped_or_not():
    def rates(cbs):
        schedule = ParamScheduler({"lr": SchedLin(0.05, 0.01)})
        fit(learner("sgd", cbs=[*cbs, schedule]))
        return schedule.hps["lr"]

    assert rates([ours("16-mixed")]) == rates(natives("16-mixed", None))
    assert len(set(rates([ours("16-mixed")]))) == task.STEPS


class Cancelling(Callback):
    order = 30

    def before_step(self):
        if self.learn.train_iter == 1:
            raise CancelStepException


def test_a_step_that_another_callback_cancels_is_none():
    theirs = fit(learner("sgd", cbs=[*natives("16-mixed", None), Cancelling()]))
    callback = ours("16-mixed")
    mine = fit(learner("sgd", cbs=[callback, Cancelling()]))
    assert task.same(mine, theirs)
    assert callback.outcome.step == task.STEPS - 1


class Leaving(Callback):
    def after_pred(self):
        if self.learn.training and self.learn.train_iter == 1:
            raise CancelBatchException


def test_a_batch_that_is_left_early_leaves_no_autocast_behind():
    fit(learner("sgd", cbs=[ours("16-mixed"), Leaving()]))
    assert not torch.is_autocast_enabled("cpu")


def policies():
    return {"scale": HeadroomScale(), "clip": ZScoreClip(warmup=2)}


@each_optimizer
def test_learn_save_and_load_go_on_to_the_bit(kind, tmp_path):
    def made():
        return learner(kind, cbs=[ours("16-mixed", **policies())], path=tmp_path)

    straight = made()
    fit(straight)
    whole = fit(straight)
    first = made()
    fit(first)
    first.save("half")
    second = made()
    second.load("half")
    assert second.gradient_control.control.state_dict() == (
        first.gradient_control.control.state_dict()
    )
    assert task.same(fit(second), whole)
    assert second.gradient_control.outcome.step == 2 * task.STEPS


@each_optimizer
def test_files_load_with_us_and_without(kind, tmp_path):
    with_us = learner(kind, cbs=[ours("16-mixed")], path=tmp_path)
    fit(with_us)
    with_us.save("ours")
    native = learner(kind, cbs=natives("16-mixed", None), path=tmp_path)
    native.load("ours")
    assert task.same(task.weights(native.model), task.weights(with_us.model))
    fit(native)
    native.save("theirs")
    again = learner(kind, cbs=[ours("16-mixed")], path=tmp_path)
    again.load("theirs")
    assert again.gradient_control.control.scale == 65536.0
    assert task.same(fit(again), fit(native))


def test_a_state_that_does_not_fit_says_so(tmp_path):
    first = learner("sgd", cbs=[ours("16-mixed", ZScoreClip(warmup=2))], path=tmp_path)
    fit(first)
    first.save("a")
    state = torch.load(tmp_path / "models" / "a.pth")
    state["opt"]["gradilocks"]["gradilocks"]["version"] = 99
    torch.save(state, tmp_path / "models" / "a.pth")
    second = learner("sgd", cbs=[ours("16-mixed", ZScoreClip(warmup=2))], path=tmp_path)
    with pytest.warns(UserWarning, match="GradientControlCallback was not loaded"):
        second.load("a")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda learn: learn.to_fp16(), "has MixedPrecision beside.*to_fp16.*amp='fp16'"),
        (lambda learn: learn.to_bf16(), "has MixedPrecision beside.*amp='bf16'"),
        (lambda learn: learn.add_cb(GradientClip(0.5)), r"GradientControlCallback\(clip=0.5\)"),
        (lambda learn: learn.add_cb(GradientControlCallback()), "twice"),
    ],
)
def test_a_second_scaler_or_clip_is_refused(other, said):
    learn = learner("sgd", cbs=[ours("32-true")])
    other(learn)
    with pytest.raises(ValueError, match=said):
        fit(learn)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="amp must be 'fp16', 'bf16' or None, got 'half'"):
        GradientControlCallback(amp="half")
    with pytest.raises(TypeError, match="clips"):
        GradientControlCallback(clips=1.0)


class Failing(Callback):
    order = 5

    def before_step(self):
        raise KeyError("a bug of the user's")


def test_a_learner_is_itself_again_without_the_callback():
    learn = learner("sgd", bad=None, cbs=[ours("16-mixed")])
    with pytest.raises(KeyError):
        fit(learn, cbs=[Failing()])
    learn.remove_cb(learn.gradient_control)
    learn.model.load_state_dict(task.Network().state_dict())
    learn.model.zero_grad()  # Of the batch that failed.
    learn.create_opt()
    assert task.same(fit(learn), fit(learner("sgd", bad=None)))
    assert "_step" not in vars(learn)
    assert "gradilocks" not in learn.opt.state_dict()


def test_it_serves_one_fit_after_another_and_fit_one_cycle(tmp_path):
    import fastai.callback.schedule  # noqa: F401 # fit_one_cycle, lr_find

    callback = ours("16-mixed", 0.05, record=tmp_path / "a.jsonl")
    learn = learner("fastai's adam", path=tmp_path)
    with learn.no_logging(), learn.no_mbar():
        learn.fit_one_cycle(1, cbs=[callback])
        learn.fit_one_cycle(1, cbs=[callback], reset_opt=True)
    assert callback.outcome.step == 2 * task.STEPS
    callback.control.recorder.close()
    run = gradilocks.read_run(tmp_path / "a.jsonl")
    assert [step.step for step in run.steps] == list(range(1, 2 * task.STEPS + 1))


def test_lr_find_leaves_the_control_as_it_was(tmp_path):
    import fastai.callback.schedule  # noqa: F401

    callback = ours("16-mixed", ZScoreClip(warmup=2))
    learn = learner("sgd", cbs=[callback], path=tmp_path)
    fit(learn)
    before = callback.state_dict()
    with learn.no_logging(), learn.no_mbar():
        learn.lr_find(num_it=5, show_plot=False, suggest_funcs=())
    assert callback.state_dict() == before


class Rows(list):
    def new_empty(self):
        return Rows()


def test_a_learner_is_exported_with_it_and_comes_back(tmp_path):
    from fastai.learner import load_learner

    learn = learner("sgd", cbs=[ours("16-mixed", 0.05)], path=tmp_path)
    fit(learn)
    data = DataLoader(Rows([(torch.zeros(7), torch.zeros(()))]), bs=1)
    learn.dls = DataLoaders(data, data)
    learn.export("learner.pkl")
    back = load_learner(tmp_path / "learner.pkl")
    assert isinstance(back.gradient_control, GradientControlCallback)
    assert isinstance(back, Learner)
    assert task.same(task.weights(back.model), task.weights(learn.model))
