"""Transformers' Trainer with a GradientControlCallback, beside the same Trainer without one."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import gradilocks.optim
from gradilocks import HeadroomScale, Outcome, Recorder, ZScoreClip, read_run
from gradilocks.errors import BadRunFile
from tests.integrations.task import (
    BAD,
    BATCH,
    CULPRIT,
    OPTIMIZERS,
    STEPS,
    WIDTH,
    Network,
    rows,
    same,
    weights,
)
from tests.scripts import serving

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from gradilocks.integrations.transformers import (  # noqa: E402
    GradientControlCallback,
    GradientControlMixin,
    GradientControlTrainer,
)
from tests.integrations.accelerate_on_cpu import forget, use_float16  # noqa: E402

# Of torch's and Transformers' own making.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers"),
]
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
each_precision = pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
each_accumulation = pytest.mark.parametrize("accumulate", [1, 2])


@pytest.fixture(autouse=True)
def one_accelerator_at_a_time():
    forget()
    yield
    forget()


class Rows(Dataset):
    def __init__(self, table):
        self.table = table

    def __len__(self):
        return len(self.table)

    def __getitem__(self, place):
        return {"rows": self.table[place]}


class Model(Network):
    """The network as the Trainer wants it: a call returns the loss."""

    def forward(self, rows):
        return {"loss": super().forward(rows).mean()}


class OnCpu(Trainer):
    """In float16 as on a GPU, if the arguments say so."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if getattr(self.args, "in_float16", False):
            use_float16(self.accelerator)


def bad_of(precision):
    return BAD if precision == "fp16" else None


def trainer(
    folder, *callbacks, make=None, precision="fp32", accumulate=1, bad="as usual", kind=OnCpu,
    model=None, evaluates=None, **settings,
):  # fmt: skip
    """A Trainer, as people make one; `make` makes its optimizer."""
    forget()
    usual = {
        "output_dir": str(folder), "use_cpu": True, "bf16": precision == "bf16",
        "per_device_train_batch_size": BATCH, "num_train_epochs": 1, "learning_rate": 0.01,
        "gradient_accumulation_steps": accumulate, "max_grad_norm": 0.0, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "lr_scheduler_type": "linear",
        "remove_unused_columns": False, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    args = TrainingArguments(**usual | settings)
    args.in_float16 = precision == "fp16"
    model = Model() if model is None else model
    table = rows(accumulate=accumulate, bad=bad_of(precision) if bad == "as usual" else bad)
    return kind(
        model,
        args,
        train_dataset=Rows(table),
        eval_dataset=evaluates,
        callbacks=list(callbacks),
        optimizers=(None if make is None else make(model.parameters()), None),
    )


def trained(*args, **settings):
    made = trainer(*args, **settings)
    made.train()
    return made


def steps_of(made):
    """What was logged of each step."""
    return [line for line in made.state.log_history if "loss" in line]


# --- the same numbers -----------------------------------------------------------------------------


@each_optimizer
@each_precision
@each_accumulation
def test_without_a_clip_the_parameters_are_the_trainers_own_bit_for_bit(
    make, precision, accumulate, tmp_path
):
    """With a constant rate: natively the schedule runs ahead of a fused optimizer that skips."""
    settings = {"make": make, "precision": precision, "accumulate": accumulate}
    settings["lr_scheduler_type"] = "constant"
    native = trained(tmp_path, **settings)
    control = GradientControlCallback()
    ours = trained(tmp_path, control, **settings)
    assert same(weights(ours.model), weights(native.model))
    assert control.control is ours.gradient_control
    assert control.control.outcome.step == STEPS
    keys = ("loss", "learning_rate", "epoch", "step")
    mine, theirs = (
        [[line[key] for key in keys] for line in steps_of(arm)] for arm in (ours, native)
    )
    assert mine == theirs


@each_optimizer
@each_precision
@each_accumulation
def test_max_grad_norm_is_the_clip_and_the_logged_norm_that_of_the_step(
    make, precision, accumulate, tmp_path
):
    settings = {"make": make, "precision": precision, "accumulate": accumulate}
    settings |= {"lr_scheduler_type": "constant", "max_grad_norm": 0.04}
    native = trained(tmp_path, **settings)
    ours = trained(tmp_path, GradientControlCallback(), **settings)
    torch.testing.assert_close(weights(ours.model), weights(native.model), rtol=0, atol=1e-6)
    mine, theirs = ([line["grad_norm"] for line in steps_of(each)] for each in (ours, native))
    assert mine == pytest.approx(theirs, rel=1e-6)
    assert mine[-1] == ours.gradient_control.outcome.norm
    clipped = [line["clipped_steps"] for line in steps_of(ours)]
    assert clipped == [int(0.04 < norm < math.inf) for norm in mine]
    assert sum(clipped)


def test_a_language_model_is_trained_under_the_names_of_its_parameters(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    tokens = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    ended = []
    for callbacks in ([], [GradientControlCallback(record=tmp_path / "a.jsonl")]):
        forget()
        torch.manual_seed(0)
        args = TrainingArguments(
            str(tmp_path), use_cpu=True, per_device_train_batch_size=4, max_steps=4, report_to=[],
            save_strategy="no", disable_tqdm=True, gradient_accumulation_steps=2, max_grad_norm=0.5,
            logging_steps=2,
        )  # fmt: skip
        made = Trainer(GPT2LMHeadModel(config), args, train_dataset=data, callbacks=callbacks)
        made.train()
        ended.append(weights(made.model))
    torch.testing.assert_close(*ended, rtol=0, atol=1e-6)
    run = read_run(tmp_path / "a.jsonl")
    assert len(run.steps) == 4
    assert run.optimizers[0].kind == "AdamW"
    names = {name for name, _ in made.model.named_parameters()}
    assert set(run.optimizers[0].names) == names
    assert run.header.config["max_grad_norm"] == 0.5


# --- skipped steps --------------------------------------------------------------------------------


@each_optimizer
def test_the_schedule_stands_still_on_a_skipped_step_and_the_log_says_who_it_was(make, tmp_path):
    seen = []

    class Looks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            made._get_learning_rate()
            seen.append(made.accelerator.optimizer_step_was_skipped)

    made = trainer(tmp_path, GradientControlCallback(), Looks(), make=make, precision="fp16")
    made.train()
    first = make([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]
    assert [line["learning_rate"] for line in steps_of(made)] == pytest.approx(
        [first * left / STEPS for left in (6, 5, 4, 4, 3, 2)]
    )
    assert seen == [step == BAD for step in range(STEPS)]
    assert [line["skipped_steps"] for line in steps_of(made)] == [0, 0, 1, 0, 0, 0]
    assert [line["loss_scale"] for line in steps_of(made)] == [2.0**16] * 3 + [2.0**15] * 3
    assert [line.get("culprits") for line in steps_of(made)] == [
        [f"Inf in {CULPRIT}"] if step == BAD else None for step in range(STEPS)
    ]
    json.dumps(made.state.log_history)


def test_the_trainer_itself_takes_a_skip_of_its_fused_optimizer_for_a_step(tmp_path):
    """If this fails, accelerate has mended issue 4242: docs/frameworks.md tells of it."""
    native = trained(tmp_path, precision="fp16")
    assert [line["learning_rate"] for line in steps_of(native)] == pytest.approx(
        [0.01 * left / STEPS for left in (6, 5, 4, 3, 2, 1)]
    )


def test_whether_a_step_was_skipped_is_read_for_the_log_alone(tmp_path, monkeypatch):
    """On a GPU reading it waits for the device."""
    reads = []
    skipped = Outcome.skipped
    counted = property(lambda self: reads.append(1) or skipped.fget(self))
    monkeypatch.setattr(Outcome, "skipped", counted)
    made = trained(tmp_path, GradientControlCallback(), precision="fp16", logging_strategy="no")
    assert not reads
    assert made.lr_scheduler.get_last_lr()[0] == pytest.approx(0.01 / STEPS)
    assert not made.accelerator.optimizer_step_was_skipped
    assert reads


@pytest.mark.parametrize("kept", [1000, 1])
def test_several_steps_between_two_logs_are_counted_together(kept, tmp_path, monkeypatch):
    monkeypatch.setattr("gradilocks.integrations.transformers._KEPT", kept)
    made = trained(tmp_path, GradientControlCallback(clip=0.04), precision="fp16", logging_steps=3)
    first, second = steps_of(made)
    assert (first["skipped_steps"], second["skipped_steps"]) == (1, 0)
    assert (first["clipped_steps"], second["clipped_steps"]) == (2, 2)
    assert first["grad_norm"] == math.inf
    assert first["culprits"] == [f"Inf in {CULPRIT}"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_hooks_before_the_step_see_gradients_without_the_scale(precision, tmp_path):
    """As natively; but that those are clipped already, by a bound that nothing reaches here."""

    class Looks(TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            self.seen.append([param.grad.clone() for param in model.parameters()])

    arms = []
    for callbacks in ([], [GradientControlCallback()]):
        looks = Looks()
        trained(tmp_path, looks, *callbacks, precision=precision, bad=None, max_grad_norm=1e9)
        arms.append(looks.seen)
    assert all(same(mine, theirs) for mine, theirs in zip(*arms, strict=True))


def test_a_loss_that_is_nan_is_shown_and_those_after_it_are_as_they_are(tmp_path):
    class Spoilt(Model):
        def forward(self, rows):
            loss = super().forward(rows)["loss"]
            return {"loss": loss * math.nan if self.bad else loss}

    settings = {"model": Spoilt(), "bad": BAD}
    made = trainer(tmp_path, GradientControlCallback(), **settings)
    made.train()
    losses = [line["loss"] for line in steps_of(made)]
    assert [math.isnan(loss) for loss in losses] == [step == BAD for step in range(STEPS)]
    assert steps_of(made)[BAD]["skipped_steps"] == 1
    assert "the loss itself was NaN or Inf" in steps_of(made)[BAD]["culprits"][0]
    assert all(bool(param.isfinite().all()) for param in made.model.parameters())
    assert made.args.logging_nan_inf_filter is True  # As it was.


# --- the run file ---------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_run_file_has_every_step_its_loss_the_skip_and_the_culprit(accumulate, tmp_path):
    callback = GradientControlCallback(record=tmp_path / "a.jsonl", clip=0.04)
    made = trained(tmp_path, callback, precision="fp16", accumulate=accumulate)
    run = read_run(tmp_path / "a.jsonl")
    assert run.end.status == "finished"
    assert [step.step for step in run.steps] == list(range(1, STEPS + 1))
    told = steps_of(made)
    assert [step.loss for step in run.steps] == pytest.approx([line["loss"] for line in told])
    norms = [line["grad_norm"] if line["grad_norm"] < math.inf else None for line in told]
    assert [step.norm for step in run.steps] == norms
    assert [step.scale for step in run.steps] == [line["loss_scale"] for line in told]
    assert [step.skipped for step in run.steps] == [step == BAD for step in range(STEPS)]
    assert [culprit.name for culprit in run.steps[BAD].culprits] == [CULPRIT]
    assert run.header.config["gradient_accumulation_steps"] == accumulate


def test_a_second_training_goes_on_in_the_run_file_and_another_one_does_not(tmp_path):
    callback = GradientControlCallback(record=tmp_path / "a.jsonl")
    made = trained(tmp_path, callback)
    made.train()
    run = read_run(tmp_path / "a.jsonl")
    assert [step.step for step in run.steps] == list(range(1, 2 * STEPS + 1))
    with pytest.raises(BadRunFile, match="exists"):
        trained(tmp_path, GradientControlCallback(record=tmp_path / "a.jsonl"))


def test_a_recorder_of_ones_own_stays_open(tmp_path):
    with Recorder(tmp_path / "a.jsonl") as recorder:
        trained(tmp_path, GradientControlCallback(record=recorder))
        assert recorder.recording
        assert recorder.steps == STEPS
    assert read_run(tmp_path / "a.jsonl").end.status == "finished"


def test_an_exception_ends_the_run_file_as_an_error(tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise RuntimeError("out of coffee")

    with pytest.raises(RuntimeError, match="coffee"):
        trained(tmp_path, GradientControlCallback(record=tmp_path / "a.jsonl"), Fails())
    run = read_run(tmp_path / "a.jsonl")
    assert (run.end.status, run.end.error) == ("error", "RuntimeError: out of coffee")
    assert len(run.steps) == 3


# --- checkpoints ----------------------------------------------------------------------------------

AT = 3


def adaptive(**settings):
    clip = ZScoreClip(threshold=0.5, alpha=0.9, warmup=2)
    return GradientControlCallback(clip=clip, **settings)


@each_optimizer
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_checkpoint_resumes_bit_for_bit_with_adaptive_policies(make, precision, tmp_path):
    settings = {"make": make, "precision": precision, "save_strategy": "steps", "save_steps": AT}
    policies = {"scale": HeadroomScale(init_scale=2.0**14)} if precision == "fp16" else {}
    whole = trained(tmp_path, adaptive(**policies, record=tmp_path / "a.jsonl"), **settings)
    free = trained(tmp_path / "free", GradientControlCallback(**policies), **settings)
    assert not same(weights(whole.model), weights(free.model))  # Some steps were clipped.
    resumed = trainer(tmp_path, adaptive(**policies, record=tmp_path / "a.jsonl"), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{AT}"))
    assert same(weights(resumed.model), weights(whole.model))
    assert resumed.gradient_control.state_dict() == whole.gradient_control.state_dict()
    assert steps_of(resumed) == steps_of(whole)
    run = read_run(tmp_path / "a.jsonl")
    assert [step.step for step in run.steps] == list(range(1, STEPS + 1))
    assert [step.step for step in run.superseded] == list(range(AT + 1, STEPS + 1))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("saves", ["native", "ours"])
def test_checkpoints_are_exchanged_with_the_trainer_itself(precision, saves, tmp_path):
    """The Trainer fails on a scaler's file where it has no scaler: ours has another name there."""
    settings = {"precision": precision, "save_strategy": "steps", "save_steps": AT, "bad": None}
    arms = {"native": [], "ours": [GradientControlCallback()]}
    before = trained(tmp_path, *arms[saves], **settings)
    names = {file.name for file in (tmp_path / f"checkpoint-{AT}").iterdir()}
    assert ("scaler.pt" in names) == (precision == "fp16")
    for file in (tmp_path / f"checkpoint-{AT}").iterdir():
        assert b"gradilocks." not in file.read_bytes(), file.name  # No class of ours.
    other = arms["native" if saves == "ours" else "ours"]
    after = trainer(tmp_path, *other, **settings)
    after.train(resume_from_checkpoint=True if saves == "ours" else str(tmp_path / "checkpoint-3"))
    if saves == "ours":  # The last one: nothing is left to do.
        after = trainer(tmp_path, **settings)
        after.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert same(weights(after.model), weights(before.model))
    if precision == "fp16":
        assert after.accelerator.scaler.state_dict()["_growth_tracker"] == STEPS


# --- other people's ways --------------------------------------------------------------------------


def test_the_default_optimizer_is_adopted_if_asked_for(tmp_path):
    ours = trained(tmp_path, GradientControlCallback(adopt=True, clip=0.04), precision="fp16")
    plain = trained(tmp_path, GradientControlCallback(clip=0.04), precision="fp16")
    assert type(plain.optimizer.optimizer) is torch.optim.AdamW
    assert isinstance(ours.optimizer.optimizer, gradilocks.optim.AdamW)
    assert ours.gradient_control.optimizers == (ours.optimizer.optimizer,)
    assert len(ours.optimizer.param_groups) == 2  # With and without decay, as the Trainer has them.
    torch.testing.assert_close(weights(ours.model), weights(plain.model), rtol=0, atol=1e-6)


def test_a_trainer_of_ones_own_keeps_its_methods_with_the_callback_and_with_the_mixin(tmp_path):
    class Doubles(OnCpu):
        def compute_loss(self, model, inputs, **kwargs):
            return 2 * super().compute_loss(model, inputs, **kwargs)

        def log(self, logs, *args, **kwargs):
            logs["mine"] = 1.0
            super().log(logs, *args, **kwargs)

    class Mixed(GradientControlMixin, Doubles):
        pass

    settings = {"precision": "fp16", "lr_scheduler_type": "constant"}
    native = trained(tmp_path, kind=Doubles, **settings)
    by_callback = trained(tmp_path, GradientControlCallback(), kind=Doubles, **settings)
    by_mixin = trained(tmp_path, kind=Mixed, **settings)
    for ours in (by_callback, by_mixin):
        assert isinstance(ours, Doubles)
        assert same(weights(ours.model), weights(native.model))
        assert steps_of(ours)[BAD]["skipped_steps"] == 1
        assert steps_of(ours)[BAD]["mine"] == 1.0
    assert type(by_callback).__name__ == "Doubles"


def test_the_trainer_class_works_without_a_callback_and_by_default_clips_at_max_grad_norm(tmp_path):
    class Mine(GradientControlTrainer, OnCpu):
        pass

    made = trained(tmp_path, kind=Mine, max_grad_norm=0.04)
    assert made.gradient_control.outcome.limit == pytest.approx(0.04)
    added = trainer(tmp_path, kind=Mine)
    added.add_callback(GradientControlCallback(clip=0.02))
    added.train()
    assert added.gradient_control.outcome.limit == pytest.approx(0.02)


def test_a_batch_that_does_not_fit_is_tried_smaller(tmp_path):
    class Small(Model):
        def forward(self, rows):
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 3:
                raise RuntimeError("CUDA out of memory. Tried to allocate")
            return super().forward(rows)

    callback = GradientControlCallback(record=tmp_path / "a.jsonl", clip=0.04)
    made = trainer(tmp_path, callback, model=Small(), auto_find_batch_size=True, precision="fp16")
    made.train()
    batches = math.ceil(STEPS * BATCH / 3)
    assert made.state.global_step == batches
    assert made.gradient_control.outcome.step == 2 + batches
    assert len(read_run(tmp_path / "a.jsonl").steps) == 2 + batches
    assert made.lr_scheduler.get_last_lr()[0] < 0.01


def test_each_model_of_model_init_begins_with_a_fresh_control(tmp_path):
    forget()
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=BATCH, num_train_epochs=1, remove_unused_columns=False,
        train_sampling_strategy="sequential", logging_steps=1,
    )  # fmt: skip
    args.in_float16 = True
    clip = ZScoreClip(threshold=0.5, warmup=2)
    callback = GradientControlCallback(clip=clip, record=tmp_path / "a.jsonl")
    made = OnCpu(
        args=args, model_init=lambda: Model(), train_dataset=Rows(rows()), callbacks=[callback]
    )
    made.train()
    first = weights(made.model), made.gradient_control.state_dict()
    made.train()
    assert same(weights(made.model), first[0])
    assert made.gradient_control.state_dict() == first[1]
    assert made.gradient_control.scale == 2.0**15
    runs = [read_run(tmp_path / name) for name in ("a.jsonl", "a-2.jsonl")]
    assert [len(run.steps) for run in runs] == [STEPS, STEPS]


def test_a_plateau_schedule_is_stepped_by_evaluations(tmp_path):
    made = trainer(
        tmp_path, GradientControlCallback(), precision="fp16", eval_strategy="steps", eval_steps=1,
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0},
        metric_for_best_model="eval_loss", learning_rate=10.0, label_names=["rows"],
        evaluates=Rows(torch.zeros(4, WIDTH + 1)),
    )  # fmt: skip
    made.train()
    assert made.lr_scheduler.get_last_lr()[0] < 10.0


# --- what is refused ------------------------------------------------------------------------------


def test_a_bound_beside_another_clip_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"max_grad_norm=0\.5\) stands beside .*clip=0\.04"):
        trainer(tmp_path, GradientControlCallback(clip=0.04), max_grad_norm=0.5)
    for bound, clip in ((1.0, 0.04), (0.0, 0.04), (0.5, 0.5), (1.0, ZScoreClip()), (1.0, None)):
        trainer(tmp_path, GradientControlCallback(clip=clip), max_grad_norm=bound)


def test_a_callback_that_comes_late_or_twice_is_refused(tmp_path):
    made = trainer(tmp_path)
    made.add_callback(GradientControlCallback())
    with pytest.raises(ValueError, match="or use GradientControlTrainer"):
        made.train()
    callback = GradientControlCallback()
    trainer(tmp_path, callback)
    with pytest.raises(ValueError, match="belongs to one Trainer"):
        trainer(tmp_path, callback)
    with pytest.raises(ValueError, match="has one GradientControlCallback"):
        trained(tmp_path, GradientControlCallback(), GradientControlCallback())


# --- two ranks ------------------------------------------------------------------------------------

RANKS = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from gradilocks import ZScoreClip
from gradilocks.integrations.transformers import GradientControlCallback

size = dict(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
config = GPT2Config(**size, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0)
tokens = torch.randint(0, 32, (48, 8), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in tokens]
FSDP = DistributedType.FSDP


class Sharded(Trainer):
    def create_accelerator_and_postprocess(self):  # Which Accelerate offers on GPUs only.
        super().create_accelerator_and_postprocess()
        PartialState._shared_state["distributed_type"] = FSDP
        self.accelerator.state.distributed_type = FSDP
        self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type="FULL_STATE_DICT"
        )
        self.is_fsdp_enabled = True


def train(*callbacks, resume=None, folder="ours", **settings):
    torch.manual_seed(0)
    args = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=4, max_steps=6, report_to=[],
        disable_tqdm=True, logging_steps=1, save_steps=3, **settings,
    )
    kind = Sharded if sys.argv[1] == "fsdp2" else Trainer
    trainer = kind(GPT2LMHeadModel(config), args, train_dataset=data, callbacks=[*callbacks])
    trainer.train(resume)
    params = [param.detach() for param in trainer.model.parameters()]
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in params]
    return trainer, [param.clone() for param in whole]


def adaptive():
    clip = ZScoreClip(threshold=0.5, alpha=0.9, warmup=2)
    return GradientControlCallback(clip=clip, record="run.jsonl")


_, native = train(folder="native", max_grad_norm=0.5)
_, ours = train(GradientControlCallback(), max_grad_norm=0.5)
torch.testing.assert_close(ours, native, rtol=0, atol=1e-6)
trainer, whole = train(adaptive(), folder="adaptive")
_, again = train(adaptive(), folder="adaptive", resume="adaptive/checkpoint-3")
assert all(map(torch.equal, whole, again)), "not resumed bit for bit"
torch.save(whole, f"{trainer.args.process_index}.pt")
"""


@pytest.fixture(scope="module")
def server():
    with serving("transformers.trainer", "torch.distributed.fsdp", "gradilocks.control") as server:
        yield server


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long)])
def test_two_ranks_end_with_equal_weights_as_the_trainers_own_and_one_run_file(
    strategy, server, tmp_path
):
    script = tmp_path / "train.py"
    script.write_text(RANKS)
    done = server.run(script, strategy, cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert same(torch.load(tmp_path / "0.pt"), torch.load(tmp_path / "1.pt"))
    assert [file.name for file in tmp_path.glob("*.jsonl")] == ["run.jsonl"]
    run = read_run(tmp_path / "run.jsonl")
    assert [step.step for step in run.steps] == list(range(1, 7))
    assert [step.step for step in run.superseded] == [4, 5, 6]
    assert run.optimizers[0].names[0].startswith("transformer.")
