"""A fault is planted in a script; `run`, the log, `report`, `watch`, `compare` say what is known.

Without a trace, what cannot be known is said to be unknown, by all of them: after NaN or Inf has
gone into the weights, and after a loss that was not finite. With one, which is the default, the
module is named, of the first bad step and of it alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradilocks import read_run
from gradilocks.cli.app import app
from tests.observe.sessions import SCRIPTS, forked, write

UNKNOWN = "forward or loss, module unknown"


def shown(*words: object) -> str:
    """What a command of gradilocks prints, in this process."""
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


class Told:
    """Everything that a user reads of one run."""

    def __init__(self, folder: Path, *words: str, trace: bool = False) -> None:
        options = [] if trace else ["--no-trace"]
        done = forked(*options, "-o", "a.jsonl", *words, cwd=folder)
        assert done.status == 0, done.err
        self.out, self.log, self.last = done.out, done.err, done.told[-1]
        self.run = read_run(folder / "a.jsonl")
        path = folder / "a.jsonl"
        (found,) = json.loads(shown("report", "--json", path))["runs"]
        self.verdict, self.sentence = found["verdict"], found["sentence"]
        self.findings = {each["rule"]: each for each in found["findings"]}
        self.watch = shown("watch", "--once", path).replace(str(folder), "")
        self.compare = shown("compare", path, path)
        told = [f"{each['title']} {each['sentence']}" for each in found["findings"]]
        self.report = "\n".join([self.sentence, *told])
        self.everything = "\n".join([self.log, self.report, self.watch, self.compare])

    def names(self) -> set[str]:
        """Parameters that are named anywhere, and modules that hold some."""
        parameters = {name for info in self.run.optimizers for name in info.names}
        modules = {name.rpartition(".")[0] for name in parameters} | {
            name.removesuffix("c_fc.weight") + "gelu"
            for name in parameters
            if name.endswith("mlp.c_fc.weight")
        }
        return {name for name in parameters | modules - {""} if name in self.everything}

    def culprits(self) -> set[str]:
        return {each["culprit"] for each in self.findings.values() if each["culprit"]}


def gpt(folder: Path, *words: str, trace: bool = False) -> Told:
    return Told(folder, str(SCRIPTS / "small_gpt.py"), *words, trace=trace)


# --- without a scaler: the weights are spoilt ----------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "fault"),
    [("fp32", "gelu1"), ("bf16", "ln_f"), ("fp32", "loss"), ("fp32", "weight")],
)
def test_a_forward_fault_without_a_scaler_and_a_trace_names_nobody(precision, fault, tmp_path):
    told = gpt(tmp_path, precision, fault, "30", "30")
    assert told.names() == set()
    assert told.culprits() == set()
    spoilt = told.findings["taken-though-nonfinite"]
    assert spoilt["title"] == "The weights are spoilt since step 30 at the latest"
    assert spoilt["step"] == 30
    assert UNKNOWN in spoilt["sentence"]
    assert "What follows comes from that" in spoilt["sentence"]
    assert "Go back to a checkpoint before step 30" in spoilt["sentence"]
    assert "step 30 taken though not finite: the loss itself was NaN or Inf" in told.log
    assert "first appeared" not in told.everything
    assert "began in" not in told.everything


@pytest.mark.parametrize(
    ("precision", "fault", "culprit"),
    [
        ("fp32", "gelu0", "transformer.h.0.mlp.gelu"),
        ("bf16", "gelu2", "transformer.h.2.mlp.gelu"),
        ("fp32", "loss", None),
    ],
)
def test_a_fault_without_a_scaler_that_comes_once_is_named_before_it_is_taken(
    precision, fault, culprit, tmp_path
):
    told = gpt(tmp_path, precision, fault, "30", "30", trace=True)
    assert told.culprits() == ({culprit} if culprit else set())
    assert told.names() == told.culprits()
    (found,) = told.run.traces
    assert (found.step, found.certainty) == (30, "certain")
    assert found.where == ("module" if culprit else "after")
    spoilt = told.findings["taken-though-nonfinite"]
    assert "What follows comes from that" in spoilt["sentence"]
    assert "Go back to a checkpoint before step 30" in spoilt["sentence"]
    where = f"first appeared in {culprit or 'the loss, or after'}"
    assert f"At step 30 {found.what} {where}" in spoilt["sentence"]
    assert f"it {where}" in told.last


def test_a_run_that_ended_in_nan_says_so_last_and_everywhere_alike(tmp_path):
    told = gpt(tmp_path, "fp32", "gelu1", "41")
    ended = (
        "the loss is NaN or Inf since step 41 of 60, and the weights are spoilt since step 41 at "
        f"the latest; {UNKNOWN}"
    )
    assert told.last == f"gradilocks: in trouble. {told.sentence}"
    assert told.sentence == f"It ended in NaN or Inf: {ended}. 1 problem in 60 steps."
    assert "recorded 60 steps, none skipped, 20 taken with NaN or Inf, in a.jsonl" in told.log
    assert (told.verdict, ended in told.sentence) == ("in trouble", True)
    assert told.watch.splitlines()[-1].endswith(f", in NaN or Inf: {ended}")
    assert "finished, in NaN or Inf" in told.compare
    assert "NaN since step 41" in told.compare


def test_one_bad_step_that_was_taken_at_the_very_end_is_an_end_in_nan(tmp_path):
    told = gpt(tmp_path, "fp32", "grad", "60")
    ended = (
        "the gradients are NaN or Inf since step 60 of 60, and the weights are spoilt since step "
        "60; likely it arose in backward at transformer.h.1.mlp.c_fc.weight or just after it"
    )
    assert told.last == f"gradilocks: in trouble. {told.sentence}"
    assert ended in told.sentence
    assert told.watch.splitlines()[-1].endswith(ended)


def test_a_run_that_ended_well_says_nothing_of_nan(tmp_path):
    told = gpt(tmp_path, "fp32", "none", "30")
    assert told.last == f"gradilocks: healthy. {told.sentence}"
    assert told.verdict == "healthy"
    assert "NaN" not in told.everything.replace("taken with NaN", "")


def test_one_bad_gradient_of_the_first_bad_step_is_likely_and_the_steps_after_it_count_not(
    tmp_path,
):
    told = gpt(tmp_path, "fp32", "grad", "30", "30")
    name = "transformer.h.1.mlp.c_fc.weight"
    assert told.culprits() == {name}
    assert told.names() == {name, "transformer.h.1.mlp.c_fc.bias", "transformer.h.1.mlp.c_fc"}
    spoilt = told.findings["taken-though-nonfinite"]
    assert f"Likely it arose in backward at {name}, or between it and" in spoilt["sentence"]
    assert "time" not in spoilt["sentence"]
    assert f"step 30 taken though not finite: NaN in {name};" in told.log


# --- under a scaler or a control: the weights are as they were -----------------------------------


@pytest.mark.parametrize("precision", ["scaler", "control"])
def test_a_forward_fault_that_lasts_is_named_at_its_first_step(precision, tmp_path):
    told = gpt(tmp_path, precision, "gelu1", "30", trace=True)
    assert told.culprits() == {"transformer.h.1.mlp.gelu"}
    assert "traced" not in told.findings, "one event, one finding"
    traced = told.findings["loss-not-finite"]
    assert traced["title"].endswith("from step 30 on, from transformer.h.1.mlp.gelu")
    where = "At step 30 Inf first appeared in transformer.h.1.mlp.gelu (certain)"
    assert where in traced["sentence"]
    assert "was bad before it" not in traced["sentence"]
    assert "transformer.h.1.mlp.gelu (certain)" in told.last
    assert told.names() == {"transformer.h.1.mlp.gelu"}


@pytest.mark.parametrize("fault", ["gelu0", "gelu2", "loss"])
def test_skipped_steps_never_send_back_to_a_checkpoint(fault, tmp_path):
    told = gpt(tmp_path, "scaler", fault, "51")
    assert told.out == "as they were\n"
    assert sum(step.skipped for step in told.run.steps) == 10
    assert "checkpoint" not in told.everything
    assert "spoilt" not in told.everything
    assert told.names() == set()
    lost = told.findings["loss-not-finite"]
    assert "All of these steps were skipped and changed no weight" in lost["sentence"]
    assert UNKNOWN in lost["sentence"]
    skipped = "the steps since then were skipped and changed no weight"
    assert f"{skipped}; {UNKNOWN}. 1 problem" in told.last


@pytest.mark.parametrize("precision", ["scaler", "control"])
def test_a_fault_that_comes_once_is_named_and_the_weights_are_good(precision, tmp_path):
    told = gpt(tmp_path, precision, "gelu1", "41", "41", trace=True)
    assert told.culprits() == told.names() == {"transformer.h.1.mlp.gelu"}
    once = told.findings["loss-nonfinite-steps"]["sentence"]
    assert "At step 41 Inf first appeared in transformer.h.1.mlp.gelu (certain)" in once
    assert "checkpoint" not in told.everything
    assert "--trace" not in told.everything


def test_faults_of_two_modules_are_told_apart(tmp_path):
    text = (SCRIPTS / "small_gpt.py").read_text()
    text = text.replace(
        "return fault == place and begin <= now <= end",
        'return (place, now) in {("gelu0", 20), ("gelu2", 40), ("gelu2", 41)}',
    )
    write(tmp_path, "train.py", text)
    told = Told(tmp_path, "train.py", "scaler", "none", "70", trace=True)
    traced = told.findings["loss-nonfinite-steps"]
    assert "At step 20 Inf first appeared in transformer.h.0.mlp.gelu" in traced["sentence"]
    assert "At step 40 Inf first appeared in transformer.h.2.mlp.gelu" in traced["sentence"]
    assert (traced["step"], traced["culprit"]) == (20, None), "there are two"
    assert "likely for the same reason" not in told.report


def test_a_gradient_that_overflows_under_a_scaler_is_likely_where_backward_turned_bad(tmp_path):
    told = gpt(tmp_path, "scaler", "overflow", "30", "31")
    skipped = told.findings["skipped"]
    # The hook is on the gradient that leaves h.2.ln_1: what follows h.1 in forward is finite.
    assert skipped["culprit"].startswith("transformer.h.1.")
    assert f"Likely it arose in backward at {skipped['culprit']}" in skipped["sentence"]
    assert f"{skipped['culprit']} (2 x)" in told.compare


def test_a_weight_that_something_else_wrote_is_called_damaged_and_no_origin(tmp_path):
    told = gpt(tmp_path, "scaler", "weight", "30", trace=True)
    assert told.out == "as they were\n"
    damaged = told.findings["weights-not-finite"]
    assert damaged["severity"] == "problem"
    assert (
        "NaN in transformer.h.1.attn.c_proj.weight itself, before step 30" in (damaged["sentence"])
    )
    assert "first appeared" not in told.everything
    assert told.culprits() == set()


# --- a trace in loops where no module is at fault ------------------------------------------------

NO_MODULE = """
import copy
import sys
import torch
from torch import nn

torch.manual_seed(0)
fault = sys.argv[1]

class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(8)
        self.encoder = nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Linear(8, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

model = Parts()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=fault != "rollback")
for number in range(1, 41):
    bad = number in (20, 21)
    x = torch.randn(16, 4)
    if (fault == "data" and bad) or (fault in ("buffers", "rollback") and number == 20):
        x[0, 0] = float("nan")
    if fault == "buffers" and number == 30:
        model.encoder[1].eval()
    z = model.encoder(x)
    if fault == "between" and bad:
        z = z * float("inf")
    loss = (model.decoder(z) - x).square().mean()
    if fault == "loss" and bad:
        loss = loss * float("nan")
    optimizer.zero_grad()
    kept = copy.deepcopy(model.state_dict())
    scaler.scale(loss).backward()
    if fault == "gradients" and bad:
        model.decoder[0].weight.grad[0, 0] = float("nan")
    scaler.step(optimizer)
    scaler.update()
    if fault == "rollback" and number == 20:
        model.load_state_dict(kept)
"""

NO_MODULES = {
    "between": (
        "At step 20 Inf first appeared between modules, before decoder",
        "Inf first in forward, between modules, before decoder (Sequential): input",
    ),
    "data": (
        "At step 20 NaN was in the input",
        "NaN in the input: input (float32 16x4, 1 NaN) came into encoder (Sequential)",
    ),
    "loss": (
        "At step 20 NaN first appeared in the loss, or after decoder",
        "NaN in the loss, or in what follows decoder (Sequential), in forward: ",
    ),
    "gradients": (
        "At step 20 NaN came back in gradients, but in no module",
        "NaN in the gradient of decoder.0.weight, but in no module: likely it gets there "
        "after backward",
    ),
    "buffers": (
        "Buffers of encoder.1 held NaN before step 30 used them",
        "NaN in the buffers encoder.1.running_mean and encoder.1.running_var of encoder.1 "
        "(BatchNorm1d) before it ran: the forward of a skipped step, or of this one, may have "
        "written it",
    ),
    "rollback": (
        "At step 20 NaN was in the input",
        "NaN in the input: input (float32 16x4, 1 NaN) came into encoder (Sequential)",
    ),
}


@pytest.mark.parametrize("fault", NO_MODULES)
def test_a_trace_that_sees_no_module_at_fault_says_where_it_was_and_blames_none(fault, tmp_path):
    write(tmp_path, "train.py", NO_MODULE)
    told = Told(tmp_path, "train.py", fault, trace=True)
    title, text = NO_MODULES[fault]
    (found,) = [
        each for each in told.findings.values() if title in each["title"] + each["sentence"]
    ]
    assert found["culprit"] is None
    assert text in found["sentence"]
    assert f" traced: {text}" in told.log
    assert "weights-not-finite" not in told.findings
    assert "before this step" not in told.everything
    assert "none came back" not in told.everything


# --- other people's scripts ----------------------------------------------------------------------

CNN = """
import sys
import torch
from torch import nn

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)
    def forward(self, x):
        return self.head(self.body(self.conv_stem(x)).mean((2, 3)))

net, weight = Net(), torch.ones(3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for number in range(1, 81):
    x, y = torch.randn(8, 1, 8, 8), torch.arange(8) % 3
    if number == 61:
        weight[1] = float("nan")
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y, weight=weight).backward()
    optimizer.step()
"""

LIGHTNING = """
import logging, sys, warnings
warnings.simplefilter("ignore")
import lightning
import torch
from torch import nn

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Scaled(nn.Module):
    by = 1.0
    def forward(self, x):
        return x * self.by

class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Scaled(), nn.Linear(8, 1))
        self.seldom = Scaled()
    def training_step(self, batch, number):
        bad = float("nan") if number == 12 else 1.0
        if sys.argv[1] == "net.2":
            self.net[2].by = bad
            return self.net(batch[0]).square().mean()
        hidden = self.net[:2](batch[0])  # And never the model as a whole.
        if number == 12:
            self.seldom.by = bad
            hidden = hidden + self.seldom(hidden)
        return self.net[3](hidden).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)

lightning.seed_everything(0, verbose=False)
data = torch.utils.data.TensorDataset(torch.randn(80, 4))
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Lit(), torch.utils.data.DataLoader(data, batch_size=4))
"""

GAN = """
import torch
from torch import nn

torch.manual_seed(0)
netG = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
netD = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optG, optD = (torch.optim.Adam(net.parameters(), 1e-3) for net in (netG, netD))
for number in range(1, 41):
    fake = netG(torch.randn(8, 4))
    optD.zero_grad()
    (netD(fake.detach()).mean() - netD(torch.randn(8, 4)).mean()).backward()
    if number == 20:
        netD[0].weight.grad[0, 0] = float("nan")
    optD.step()
    optG.zero_grad()
    (-netD(fake).mean()).backward()
    optG.step()
"""


def test_nan_in_the_weights_of_a_cnns_loss_names_no_layer(tmp_path):
    write(tmp_path, "train.py", CNN)
    told = Told(tmp_path, "train.py", trace=True)
    assert told.names() == set()
    ended = (
        "the weights are spoilt since step 61 at the latest; it first appeared in the loss, or "
        "after the model (certain)"
    )
    assert f"the loss is NaN or Inf since step 61 of 80, and {ended}. 1 problem" in told.last


@pytest.mark.parametrize("layer", ["net.2", "seldom"])
def test_nan_in_a_layer_under_lightning_names_that_layer(layer, tmp_path):
    pytest.importorskip("lightning")
    write(tmp_path, "train.py", LIGHTNING)
    told = Told(tmp_path, "train.py", layer, trace=True)
    assert told.culprits() == {layer}
    assert {name for name in told.names() if "net" in name} <= {layer}
    assert "the weights are spoilt since step 13" in told.last
    assert f"it first appeared in {layer} (certain)" in told.last


def test_the_other_network_of_a_gan_is_not_blamed_for_what_the_first_has_spoilt(tmp_path):
    write(tmp_path, "train.py", GAN)
    told = Told(tmp_path, "train.py")
    (spoilt,) = [s for s in told.report.splitlines() if "The weights are spoilt since step" in s]
    assert spoilt.startswith("optimizer 0 (Adam, netD): ")
    assert "Likely it arose in backward at netD.0.weight" in spoilt
    assert spoilt.endswith("With them those of optimizer 1 (Adam, netG), since step 20.")
    assert "another optimizer's weights were spoilt before" in told.sentence
