"""The Weights & Biases callback, offline."""

from __future__ import annotations

import math
import time

import pytest
import torch
import wandb
from torch import nn

from gradilocks import GradientControl
from gradilocks.integrations.wandb import WandbCallback


class Rows:
    """A run whose rows behave as those of wandb: what is logged with commit=False joins the next row."""

    def __init__(self):
        self.rows, self.open = [], {}

    def log(self, numbers, step=None, commit=True):
        self.open |= numbers
        if commit:
            self.rows.append(self.open)
            self.open = {}


@pytest.fixture
def control():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model, clip=0.5)


def step(control, factor=1.0):
    control.zero_grad()
    (weight, bias) = (param for group in control.optimizers[0].param_groups for param in group["params"])
    control.backward((weight.sum() + bias.sum() + 1.0) * factor)
    control.step()


def test_the_numbers_join_the_rows_that_the_user_logs(control):
    run = Rows()
    control.subscribe(WandbCallback(run))
    for index in range(6):
        step(control, math.inf if index == 2 else 1.0)
        if index % 3 == 0:
            run.log({"mine": index}, step=index)
    assert [row["mine"] for row in run.rows] == [0, 3]
    assert [row["gradilocks/step"] for row in run.rows] == [1, 4]
    assert [row["gradilocks/skipped"] for row in run.rows] == [0.0, 0.0]
    assert [row["gradilocks/skipped_steps"] for row in run.rows] == [0, 1]
    assert run.rows[0]["gradilocks/norm"] == pytest.approx(5**0.5)


def test_an_offline_run_has_them(control, tmp_path, monkeypatch):
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    run = wandb.init(mode="offline", settings=wandb.Settings(silent=True, x_disable_stats=True))
    callback = WandbCallback(run)
    control.subscribe(callback)
    for index in range(3):
        step(control)
        run.log({"mine": 0.5}, step=10 * index)  # The callback does not move the user's axis.
    assert run.step == 20
    callback.flush()
    run.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 120  # The process of wandb writes the file, on a busy machine after finish() returns.
    while file.read_bytes().count(b"gradilocks/skipped_steps") < 3:
        assert time.monotonic() < deadline, "wandb has not written the rows"
        time.sleep(0.1)


def test_something_else_than_a_run_is_rejected():
    with pytest.raises(TypeError, match="takes the result of wandb"):
        WandbCallback("my project")
