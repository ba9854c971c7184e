"""Transformers' Trainer trains as its users write it, with one planted Inf; cases as in
planted_lightning, and with each what the Trainer has logged.

fp16 is put in by hand, as in planted_accelerate. The last case is a GPT-2 with random weights.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

sys.path.append(str(Path(__file__).resolve().parents[3]))
from tests.integrations import task


class Regression(task.Network):
    def forward(self, rows):
        return {"loss": super().forward(rows).mean()}


class HalfTrainer(Trainer):
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.state._mixed_precision = "fp16"
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu")


def arguments(case, folder):
    return TrainingArguments(
        folder,
        use_cpu=True,
        bf16=case["precision"] == "bf16-mixed",
        per_device_train_batch_size=task.BATCH,
        gradient_accumulation_steps=case["accumulate"],
        max_grad_norm=case["clip"] or 0.0,
        num_train_epochs=1,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )


def fit(trainer):
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    return [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history[:-1]]


def train(case):
    model = Regression()
    optimizer = task.OPTIMIZERS[case["optimizer"]](model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
    rows = task.rows(accumulate=case["accumulate"], bad=case["bad"])
    kind = HalfTrainer if case["precision"] == "16-mixed" else Trainer
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(
            model,
            arguments(case, folder),
            train_dataset=[{"rows": row} for row in rows],
            optimizers=(optimizer, scheduler),
        )
        return fit(trainer)


def train_gpt2():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )
    tokens = torch.randint(0, 32, (32, 16), generator=torch.Generator().manual_seed(1))
    lengths = torch.randint(4, 16, (32,), generator=torch.Generator().manual_seed(2))
    labels = torch.where(torch.arange(16) < lengths[:, None], tokens, -100)
    case = {"precision": "32-true", "accumulate": 2, "clip": 1.0}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model,
            arguments(case, folder),
            train_dataset=[
                {"input_ids": each, "labels": label}
                for each, label in zip(tokens, labels, strict=True)
            ],
        )
        return {"logged": fit(trainer), "names": sorted(n for n, _ in model.named_parameters())}


def case(precision, optimizer, accumulate, clip):
    # Without a scaler the bad step is taken, and nothing after it is worth a look.
    bad = task.BAD if precision == "16-mixed" else task.STEPS - 1
    # Of skips by fused optimizers Accelerate knows nothing, and steps the schedule.
    schedule = "taken" if optimizer == "sgd" else "always"
    return locals()


CASES = [
    case("16-mixed", "sgd", 1, None),
    case("16-mixed", "sgd", 2, 0.05),
    case("16-mixed", "fused adamw", 2, 0.05),
    case("bf16-mixed", "sgd", 2, 0.05),
    case("32-true", "ours", 1, None),
]

if __name__ == "__main__":
    for each in CASES:
        print(json.dumps({**each, "logged": train(each)}))
    print(json.dumps(train_gpt2()))
