"""The Trainer of Transformers; an activation takes the logarithm of zero in step 4."""

import warnings

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

warnings.filterwarnings("ignore")


class Fault(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.transformer.h[1].mlp.act.is_bad = state.global_step == 3


class Gelu(torch.nn.Module):
    is_bad = False

    def forward(self, x):
        return torch.log(x * 0) if self.is_bad else torch.nn.functional.gelu(x)


torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0)
)
for block in model.transformer.h:
    block.mlp.act = Gelu()
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(50, (24, 8))]
arguments = TrainingArguments(
    "out_folder",
    max_steps=6,
    per_device_train_batch_size=4,
    report_to=[],
    save_strategy="no",
    logging_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
    max_grad_norm=1.0,
)
Trainer(model, arguments, train_dataset=rows, callbacks=[Fault()]).train()
