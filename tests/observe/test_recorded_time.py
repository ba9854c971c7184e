"""The time between steps, the memory of a run, and what several networks are called."""

from __future__ import annotations

import threading

import pytest
import torch

from gradilocks import read_run
from gradilocks.cli.options import named_amount
from gradilocks.observe.data_wait import DataWait
from tests.observe.sessions import forked, write


@pytest.fixture
def clock():
    """Seconds that go by when the test says so."""
    now = [100.0]
    wait = DataWait(clock=lambda: now[0])

    def goes_on(seconds):
        now[0] += seconds

    yield wait, goes_on
    wait.close()


def test_the_time_from_a_step_to_the_next_call_of_a_model_is_told_once(clock):
    wait, goes_on = clock
    goes_on(5.0)
    assert wait.take() is None  # Before the first step nobody knows since when.
    wait.step_ended()
    goes_on(0.25)
    wait.forward_begins()
    goes_on(1.0)
    wait.forward_begins()  # Neither forward nor backward is waiting.
    goes_on(1.0)
    assert wait.take() == 0.25
    assert wait.take() is None


def test_what_lay_before_steps_that_did_not_take_it_adds_up(clock):
    wait, goes_on = clock
    for _ in range(3):
        wait.step_ended()
        goes_on(0.5)
        wait.forward_begins()
        goes_on(2.0)
    assert wait.take() == 1.5


def test_a_step_without_a_call_in_between_knows_nothing(clock):
    wait, goes_on = clock
    wait.step_ended()
    goes_on(0.5)
    wait.step_ended()
    assert wait.take() is None


def test_what_is_drawn_from_a_loader_at_other_times_is_added(clock):
    wait, goes_on = clock

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, at):
            goes_on(0.25)
            return torch.ones(2)

    original = vars(torch.utils.data.DataLoader)["__iter__"]
    wait.install()
    batches = iter(torch.utils.data.DataLoader(Slow()))
    next(batches)  # Before the first step.
    assert wait.take() is None
    for _ in range(2):
        wait.step_ended()
        goes_on(1.0)
        for _ in range(2):  # Two micro-batches.
            next(batches)
            wait.forward_begins()
            goes_on(5.0)
        assert wait.take() == 1.5
    thread = threading.Thread(target=next, args=(batches,))
    thread.start()
    thread.join()
    assert wait.take() is None  # Somebody else fetches ahead.
    assert list(batches) == []
    wait.close()
    assert vars(torch.utils.data.DataLoader)["__iter__"] is original
    assert type(batches).__next__.__module__.startswith("torch.")


SLOW_LOADER = """
import pickle
import time
import warnings
import torch
from torch import nn
from torch.utils.data import DataLoader

warnings.simplefilter("error")
torch.manual_seed(0)

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, at):
        time.sleep(0.002)
        return torch.full((4,), float(at)), torch.tensor(float(at))

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for x, y in DataLoader(Slow(), batch_size=4):
    loss = nn.functional.mse_loss(model(x)[:, 0], y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
pickle.dumps(model)  # There is nothing of ours in it.
"""


def test_a_slow_loader_shows_between_the_steps_and_memory_once_a_batch(tmp_path):
    write(tmp_path, "train.py", SLOW_LOADER)
    words = ("-o", "a.jsonl", "--flush-every", "5", "--per-step", "samples=4", "train.py")
    shown = forked(*words, cwd=tmp_path)
    assert shown.status == 0, shown.err
    run = read_run(tmp_path / "a.jsonl")
    assert len(run.steps) == 12
    first, *others = run.steps
    assert first.waited is None
    for before, step in zip(run.steps, others, strict=False):
        # Four samples of two milliseconds each; a busy machine may take longer, and never less.
        assert 0.008 <= step.waited <= step.time - before.time
    assert [step.step for step in run.steps if step.memory is not None] == [5, 10, 12]
    assert all(step.memory > 2**20 for step in run.steps if step.memory is not None)
    assert all(step.gpu_memory is None for step in run.steps)
    assert run.header.settings["per_step"] == {"samples": 4.0}


def test_an_amount_that_is_none_is_refused(tmp_path):
    assert named_amount("tokens per rank=6.5e4") == ("tokens per rank", 65000.0)
    for given in ("tokens", "tokens=", "tokens=0", "tokens=inf", "tokens=-1", "tokens=nan", "t=x"):
        with pytest.raises(ValueError, match=r"could not convert|not a number of more than 0"):
            named_amount(given)
    write(tmp_path, "train.py", "raise SystemExit(3)")
    shown = forked("--per-step", "=5", "train.py", cwd=tmp_path)
    assert shown.status == 2
    assert "expected a name and a number of more than 0, as in tokens=65536" in " ".join(
        shown.err.replace("│", " ").split()
    )


NETWORKS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(inputs, 4), nn.ReLU(), nn.Linear(4, outputs))
    def forward(self, x):
        return self.main(x)

def step(netG, netD, optimizerG, optimizerD):
    fake = netG(torch.randn(8, 3))
    optimizerD.zero_grad()
    netD(fake.detach()).mean().backward()
    optimizerD.step()
    optimizerG.zero_grad()
    (-netD(fake)).mean().backward()
    optimizerG.step()
"""
IN_A_FUNCTION = """
def main():
    netG, netD = Net(3, 2), nn.DataParallel(Net(2, 1))
    optimizerD = torch.optim.Adam(netD.parameters())
    optimizerG = torch.optim.Adam(netG.parameters())
    for _ in range(2):
        step(netG, netD, optimizerG, optimizerD)
main()
"""
IN_AN_OBJECT = """
class Trainer:
    def __init__(self):
        self.netG, self.netD = Net(3, 2), Net(2, 1)
        self.optimizerD = torch.optim.Adam(self.netD.parameters())
        self.optimizerG = torch.optim.Adam(self.netG.parameters())
    def fit(self):
        for _ in range(2):
            step(self.netG, self.netD, self.optimizerG, self.optimizerD)
Trainer().fit()
"""
NAMELESS = """
networks = [Net(3, 2), Net(2, 1)]
optimizers = [torch.optim.Adam(net.parameters()) for net in networks]
for _ in range(2):
    fake = networks[0](torch.randn(8, 3))
    loss = networks[1](fake).mean()
    loss.backward()
    for optimizer in reversed(optimizers):
        optimizer.step()
        optimizer.zero_grad()
"""
LATER = """
first = Net(3, 2)
optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
first(torch.randn(8, 3)).mean().backward()
optimizer.step()
second = Net(2, 1)
another = torch.optim.SGD(second.parameters(), lr=0.1)
second(torch.randn(8, 2)).mean().backward()
another.step()
"""


@pytest.mark.parametrize(
    ("script", "names"),
    [
        (IN_A_FUNCTION, ["netD.main.0.weight", "netG.main.0.weight"]),
        (IN_AN_OBJECT, ["netD.main.0.weight", "netG.main.0.weight"]),
        (NAMELESS, ["Net2.main.0.weight", "Net.main.0.weight"]),
        (LATER, ["main.0.weight", "second.main.0.weight"]),
    ],
    ids=["function", "object", "nameless", "later"],
)
def test_two_networks_with_an_optimizer_each_are_told_apart(tmp_path, script, names):
    write(tmp_path, "train.py", NETWORKS + script)
    shown = forked("-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    run = read_run(tmp_path / "a.jsonl")
    assert [info.names[0] for info in run.optimizers] == names


def test_two_optimizers_of_one_model_need_no_prefix(tmp_path):
    script = """
net = Net(3, 1)
ones = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (net.main[0], net.main[2])]
net(torch.ones(2, 3)).mean().backward()
for optimizer in ones:
    optimizer.step()
"""
    write(tmp_path, "train.py", NETWORKS + script)
    shown = forked("-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    names = [info.names for info in read_run(tmp_path / "a.jsonl").optimizers]
    assert names == [("main.0.weight", "main.0.bias"), ("main.2.weight", "main.2.bias")]
