"""`control.scheduler(...)` inside the frameworks' own checkpoints: theirs and ours, both ways."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import lr_scheduler as lr

from gradilocks import GradientControl
from tests.integrations.task import Network, batches

SCHEDULES = {
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda n: 1.0 / (1 + n)),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.5, total_steps=40),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=2), lr.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ExponentialLR(o, 0.9), lr.StepLR(o, 3)]),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=0, factor=0.5),
}
each_schedule = pytest.mark.parametrize("name", SCHEDULES)
both_ways = pytest.mark.parametrize(
    ("first", "second"), [("ours", "bare"), ("bare", "ours"), ("ours", "ours")]
)
METRICS = [3.0, 2.0, 2.5, 2.6, 1.0, 1.5, 1.6, 1.7]


class Loop:
    """A model, its optimizer and a schedule, bare or of a control, in a loop that somebody wrote.

    `prepare` is what a framework makes of the three.
    """

    def __init__(self, name, whose, prepare=lambda *parts: parts):
        self.model = Network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        schedule = SCHEDULES[name](self.optimizer)
        self.control = None
        if whose == "ours":
            self.control = GradientControl(self.optimizer, scale=None, model=self.model)
            schedule = self.control.scheduler(schedule)
        self.metric = name == "ReduceLROnPlateau"
        _, self.stepped, self.schedule = prepare(self.model, self.optimizer, schedule)
        self.rates = []

    def run(self, numbers):
        data = batches(8, bad=None)
        for number in numbers:
            self.rates.append([group["lr"] for group in self.optimizer.param_groups])
            loss = self.model(data[number]).mean()
            if self.control is None:
                loss.backward()
                self.stepped.step()
            else:
                self.control.backward(loss)
                self.control.step()
            self.optimizer.zero_grad()
            self.schedule.step(*([METRICS[number]] if self.metric else []))
        return self


def straight(name):
    return Loop(name, "bare").run(range(8)).rates


# --- Accelerate -----------------------------------------------------------------------------------


@pytest.fixture
def accelerator():
    """Makes an Accelerator, one at a time: they share what is theirs for the life of a process.

    So does the one that a Trainer of Transformers makes.
    """
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def forget():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    def make(**settings):
        forget()
        return Accelerator(cpu=True, **settings)

    forget()
    yield make
    forget()


@both_ways
@each_schedule
def test_a_prepared_schedule_goes_through_save_state_and_load_state(
    name, first, second, accelerator, tmp_path
):
    accelerate = accelerator()
    before = Loop(name, first, accelerate.prepare).run(range(5))
    accelerate.save_state(str(tmp_path / "state"), safe_serialization=False)
    accelerate = accelerator()
    after = Loop(name, second, accelerate.prepare)
    accelerate.load_state(str(tmp_path / "state"))
    after.run(range(5, 8))
    assert before.rates + after.rates == straight(name)


def test_what_is_set_on_a_schedule_is_set_on_the_one_inside():
    loop = Loop("LambdaLR", "ours")
    loop.schedule.last_epoch = 4
    loop.schedule._step_count += 2
    loop.schedule.note_of_mine = "kept"
    assert loop.schedule.state_dict()["last_epoch"] == 4
    assert loop.schedule.state_dict()["_step_count"] == 3
    assert loop.schedule.note_of_mine == "kept"
    assert "note_of_mine" not in loop.schedule.state_dict()
    loop.run([0])
    assert loop.optimizer.param_groups[0]["lr"] == 0.05 / 6


# --- Lightning ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # Lightning's own.
@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("SequentialLR", "ours", "bare"), ("ReduceLROnPlateau", "bare", "ours")],
)
def test_a_schedule_goes_through_lightnings_checkpoints(name, first, second, tmp_path):
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")
    from tests.integrations.lightning_task import fitted, loader

    class Lit(lightning.LightningModule):
        """Steps by hand, as loops with a control of their own in Lightning do."""

        automatic_optimization = False

        def __init__(self, whose):
            super().__init__()
            self.net, self.whose, self.rates = Network(), whose, []

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
            schedule = SCHEDULES[name](optimizer)
            if self.whose == "ours":
                self.control = GradientControl(optimizer, scale=None, model=self.net)
                schedule = self.control.scheduler(schedule)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

        def training_step(self, batch, number):
            optimizer, schedule = self.optimizers(), self.lr_schedulers()
            self.rates.append([group["lr"] for group in optimizer.param_groups])
            loss = self.net(batch[0]).mean()
            if self.whose == "ours":
                self.control.backward(loss)
                self.control.step()
            else:
                self.manual_backward(loss)
                optimizer.step()
            optimizer.zero_grad()
            schedule.step(*([METRICS[len(self.rates) - 1]] if "Plateau" in name else []))

    settings = {"max_epochs": 1, "data": loader(4, bad=None)}
    modules = [Lit(first), Lit(second), Lit("bare")]
    trainer = fitted(lightning, modules[0], **settings)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    torch.load(tmp_path / "a.ckpt", weights_only=True)  # Plain values alone.
    settings["max_epochs"] = 2
    modules[1].rates = [[math.nan]] * 4  # Of the first epoch, by which metrics are counted.
    fitted(lightning, modules[1], ckpt_path=tmp_path / "a.ckpt", **settings)
    fitted(lightning, modules[2], **settings)
    assert modules[0].rates + modules[1].rates[4:] == modules[2].rates


# --- Transformers ---------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("name", ["LambdaLR", "OneCycleLR", "ChainedScheduler"])
def test_a_schedule_goes_through_the_files_of_a_transformers_trainer(
    name, first, second, accelerator, tmp_path
):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def trainer_of(loop):
        """Whose `optimizers` are those of somebody's loop."""
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True
        )
        pair = (loop.optimizer, loop.schedule)
        return transformers.Trainer(loop.model, arguments, optimizers=pair)

    before = Loop(name, first).run(range(5))
    trainer_of(before)._save_optimizer_and_scheduler(str(tmp_path))
    after = Loop(name, second)
    trainer_of(after)._load_optimizer_and_scheduler(str(tmp_path))
    after.run(range(5, 8))
    assert before.rates + after.rates == straight(name)
