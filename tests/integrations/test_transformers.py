"""GradientControlTrainer, compared with loops of GradientControl and with the Trainer alone."""

from __future__ import annotations

import math

import pytest
import torch
from planted_overflow import (
    BAD_STEP,
    CLIP,
    CULPRIT,
    STEPS,
    Network,
    assert_same,
    batches,
    control_loop,
    each_precision,
    each_setting,
    join_process_group,
    reset_accelerate,
    use_float16,
    weights,
)
from torch.utils.data import Dataset

import gradilocks.optim
from gradilocks import QuantileClip
from ranks.rank_world import world

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from gradilocks.integrations.transformers import GradientControlMixin, GradientControlTrainer  # noqa: E402


class Rows(Dataset):
    """The rows of batches, one by one."""

    def __init__(self, made):
        self._rows = torch.cat(made)

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return {"rows": self._rows[index]}


class Model(Network):
    """The network as the Trainer calls it."""

    def forward(self, rows):
        return {"loss": super().forward(rows).mean()}


class OnCpu:
    """A Trainer that uses float16 on a CPU as on a GPU, with autocast and a scaler."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if getattr(self.args, "uses_float16", False):
            use_float16(self.accelerator)


class NativeTrainer(OnCpu, Trainer):
    """The Trainer alone."""


class ControlledTrainer(OnCpu, GradientControlTrainer):
    """The Trainer with a control."""


def new_trainer(folder, kind=ControlledTrainer, *, make=None, precision="no", rows=None, model=None, **settings):
    reset_accelerate()
    of_trainer = ("control_options", "callbacks", "optimizers", "model_init", "optimizer_cls_and_kwargs")
    given = {name: settings.pop(name) for name in of_trainer if name in settings}
    usual = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": precision == "bf16",
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 0.01,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "train_sampling_strategy": "sequential",
    }
    args = TrainingArguments(**usual | settings)
    args.uses_float16 = precision == "fp16"
    if "model_init" not in given and model is None:
        model = Model()
    if make is not None:
        given["optimizers"] = (make(model.parameters()), None)
    rows = batches(accumulate=args.gradient_accumulation_steps) if rows is None else rows
    return kind(model, args, train_dataset=Rows(rows) if isinstance(rows, list) else rows, **given)


def logged(trainer, name):
    """One number of each logged step."""
    return [line[name] for line in trainer.state.log_history if "loss" in line]


def linear(step):
    """The Trainer's schedule."""
    return max(0.0, (STEPS - step) / STEPS)


@each_setting
def test_without_a_clip_the_parameters_are_those_of_a_control_bit_for_bit(make, precision, accumulate, tmp_path):
    trainer = new_trainer(tmp_path, make=make, precision=precision, gradient_accumulation_steps=accumulate)
    trainer.train()
    expected, norms = control_loop(
        make, batches(accumulate=accumulate), linear, precision=precision, accumulate=accumulate
    )
    assert_same(weights(trainer.model), expected)
    assert logged(trainer, "grad_norm")[:BAD_STEP] == norms[:BAD_STEP]


@each_setting
def test_max_grad_norm_is_the_clip(make, precision, accumulate, tmp_path):
    settings = {"precision": precision, "gradient_accumulation_steps": accumulate}
    trainer = new_trainer(tmp_path, make=make, max_grad_norm=CLIP, **settings)
    trainer.train()
    expected, norms = control_loop(
        make, batches(accumulate=accumulate), linear, precision=precision, accumulate=accumulate, clip=CLIP
    )
    assert_same(weights(trainer.model), expected, tolerance=1e-6)
    assert logged(trainer, "grad_norm")[BAD_STEP + 1 :] == pytest.approx(norms[BAD_STEP + 1 :], rel=1e-6)


@each_precision
@pytest.mark.parametrize("max_norm", [0.0, CLIP])
def test_finite_training_is_that_of_the_trainer_alone(precision, max_norm, tmp_path):
    settings = {"precision": precision, "max_grad_norm": max_norm, "rows": batches(bad=None)}
    native = new_trainer(tmp_path, NativeTrainer, **settings)
    native.train()
    trainer = new_trainer(tmp_path, **settings)
    trainer.train()
    assert_same(weights(trainer.model), weights(native.model), tolerance=1e-6 if max_norm else 0.0)
    for name in ("loss", "grad_norm", "learning_rate"):
        assert logged(trainer, name) == pytest.approx(logged(native, name), rel=1e-5)


@each_precision
def test_one_overflow_is_one_skip_in_the_log_the_schedule_and_the_outcome(precision, tmp_path):
    trainer = new_trainer(tmp_path, precision=precision, optim="adamw_torch_fused", max_grad_norm=CLIP)
    outcomes = []
    trainer.add_callback(OnStep(lambda: outcomes.append(trainer.gradient_control.outcome)))
    trainer.train()
    assert logged(trainer, "skipped_steps") == [int(step == BAD_STEP) for step in range(STEPS)]
    assert logged(trainer, "learning_rate") == pytest.approx([0.01 * n / 6 for n in (6, 5, 4, 4, 3, 2)])
    assert not math.isfinite(logged(trainer, "grad_norm")[BAD_STEP])
    assert outcomes[BAD_STEP].culprits[0] == CULPRIT
    if precision == "fp16":
        assert logged(trainer, "loss_scale") == [65536.0] * 3 + [32768.0] * 3


class OnStep(TrainerCallback):
    """Calls a function after each step."""

    def __init__(self, function):
        self._function = function

    def on_step_end(self, *_, **__):
        self._function()


@pytest.mark.parametrize("hides", [True, False])
def test_a_nan_loss_does_not_spoil_the_losses_after_it(hides, tmp_path):
    rows = batches(bad=None)
    rows[BAD_STEP] = torch.full_like(rows[BAD_STEP], torch.nan)
    rows[BAD_STEP][:, -1] = 0.0
    trainer = new_trainer(tmp_path, rows=rows, logging_nan_inf_filter=hides)
    trainer.train()
    assert [math.isnan(loss) for loss in logged(trainer, "loss")] == [
        step == BAD_STEP and not hides for step in range(STEPS)
    ]
    assert logged(trainer, "skipped_steps") == [int(step == BAD_STEP) for step in range(STEPS)]


@each_precision
def test_callbacks_before_the_step_read_unscaled_gradients(precision, tmp_path):
    seen = {}

    class Reader(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            seen[kind] = [param.grad.clone() for param in model.parameters()]

    for kind in (NativeTrainer, ControlledTrainer):
        new_trainer(tmp_path, kind, precision=precision, rows=batches(1, bad=None), callbacks=[Reader()]).train()
    assert_same(seen[ControlledTrainer], seen[NativeTrainer])


# --- checkpoints ------------------------------------------------------------------------------------------------------


@each_setting
def test_a_checkpoint_resumes_bit_for_bit(make, precision, accumulate, tmp_path):
    settings = {"make": make, "precision": precision, "gradient_accumulation_steps": accumulate}
    settings |= {"save_strategy": "steps", "save_steps": 4}
    settings["control_options"] = {"clip": QuantileClip(0.5, window=4)}
    whole = new_trainer(tmp_path, **settings)
    whole.train()
    resumed = new_trainer(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert_same(weights(resumed.model), weights(whole.model))
    assert str(resumed.gradient_control.state_dict()) == str(whole.gradient_control.state_dict())
    assert logged(resumed, "learning_rate") == logged(whole, "learning_rate")


# --- in other styles --------------------------------------------------------------------------------------------------


def test_a_trainer_with_its_own_loss_scheduler_and_optimizer_class(tmp_path):
    class OwnTrainer(GradientControlMixin, Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(**inputs)
            return (2.0 * outputs["loss"], outputs) if return_outputs else 2.0 * outputs["loss"]

        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=0.5, total_iters=100)
            return super().create_scheduler(num_training_steps, optimizer)

    trainer = new_trainer(
        tmp_path, OwnTrainer, max_grad_norm=CLIP, optimizer_cls_and_kwargs=(gradilocks.optim.AdamW, {"lr": 0.01})
    )
    trainer.train()
    assert trainer.gradient_control.outcome.step == STEPS
    assert logged(trainer, "learning_rate") == [0.005] * STEPS


def test_a_scheduler_that_is_created_without_super_is_an_error_and_not_a_training_without_control(tmp_path):
    class OwnTrainer(GradientControlTrainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)
            return self.lr_scheduler

    with pytest.raises(RuntimeError, match=r"must call super\(\).create_scheduler"):
        new_trainer(tmp_path, OwnTrainer).train()


def test_training_twice_continues_with_the_same_control(tmp_path):
    trainer = new_trainer(tmp_path)
    trainer.train()
    control = trainer.gradient_control
    trainer.train()
    assert trainer.gradient_control is control
    assert control.outcome.step == 2 * STEPS


def test_each_model_of_model_init_gets_its_own_control(tmp_path):
    trainer = new_trainer(tmp_path, model_init=lambda: Model())
    trainer.train()
    first = trainer.gradient_control
    trainer.train()
    assert trainer.gradient_control is not first
    assert trainer.gradient_control.outcome.step == STEPS


def test_a_batch_that_does_not_fit_is_tried_smaller(tmp_path):
    class OwnTrainer(GradientControlTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            loss = super().training_step(model, inputs, *args, **kwargs)
            if len(inputs["rows"]) > 4:
                raise RuntimeError("CUDA out of memory.")
            return loss

    settings = {"auto_find_batch_size": True, "per_device_train_batch_size": 5, "max_grad_norm": CLIP}
    trainer = new_trainer(tmp_path, OwnTrainer, **settings)
    trainer.train()
    usual = new_trainer(tmp_path, max_grad_norm=CLIP)
    usual.train()
    assert_same(weights(trainer.model), weights(usual.model))
    assert logged(trainer, "skipped_steps") == logged(usual, "skipped_steps")


def test_a_language_model_with_a_run_file_and_evaluation(tmp_path):
    class Tokens(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            tokens = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": tokens, "labels": tokens}

    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    path = tmp_path / "run.jsonl"
    settings = {"gradient_accumulation_steps": 2, "control_options": {"record": str(path)}}
    trainer = new_trainer(tmp_path, model=GPT2LMHeadModel(config), rows=Tokens(), **settings)
    trainer.train()
    assert trainer.evaluate(Tokens())["eval_loss"] > 0
    assert trainer.gradient_control.outcome.step == 2
    assert "transformer.h.0.attn.c_attn.weight" in trainer.gradient_control.outcome.names
    assert path.is_file()


def test_a_clip_option_beside_max_grad_norm_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"max_grad_norm=0.5 and control_options\['clip'\] are both given"):
        new_trainer(tmp_path, max_grad_norm=0.5, control_options={"clip": 1.0})
    with pytest.raises(RuntimeError, match="no control yet"):
        _ = new_trainer(tmp_path).gradient_control


# --- two processes ----------------------------------------------------------------------------------------------------


def train_on_rank(rank, folder):
    join_process_group(rank)
    rows = batches(2 * STEPS, bad=2 * BAD_STEP + 1)  # Only rank 1 has the bad batch.
    settings = {"rows": rows, "max_grad_norm": CLIP, "ddp_backend": "gloo", "save_strategy": "steps", "save_steps": 4}
    whole = new_trainer(folder, GradientControlTrainer, **settings)
    whole.train()
    resumed = new_trainer(folder, GradientControlTrainer, **settings)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
    assert_same(weights(resumed.model), weights(whole.model))
    return weights(whole.model), logged(whole, "skipped_steps"), logged(whole, "learning_rate")


@pytest.mark.slow
def test_two_processes_end_with_the_same_weights_and_one_skip(tmp_path):
    ours, other = world(2).run(train_on_rank, str(tmp_path))
    assert_same(ours[0], other[0])
    for _, skipped, rates in (ours, other):
        assert skipped == [int(step == BAD_STEP) for step in range(STEPS)]
        assert rates == pytest.approx([0.01 * n / 6 for n in (6, 5, 4, 4, 3, 2)])
