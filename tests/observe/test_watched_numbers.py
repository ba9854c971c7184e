"""Watching changes no number: losses, parameters and random states are bit for bit the same."""

from __future__ import annotations

import pytest

from gradilocks import read_run
from tests.observe.sessions import SCRIPTS, forked, process, watched, write

LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, place):
        return torch.randn(4) + place

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for context, workers in (("fork", 2), ("spawn", 1)):  # A spawned one imports torch anew.
        for batch in DataLoader(Data(), 4, num_workers=workers, multiprocessing_context=context):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    print(model.weight.tolist(), torch.rand(1).item())
"""

COMPILED = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.01)

@torch.compile(backend="eager")
def step_compiled():
    optimizer.step()

for number in range(4):
    optimizer.zero_grad()
    compiled(torch.randn(3, 4)).square().mean().backward()
    step_compiled() if number == 3 else optimizer.step()
print([p.tolist() for p in model.parameters()], torch.rand(1).item())
"""


@pytest.fixture(scope="module")
def by_python(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    shown = forked(str(SCRIPTS / "habits.py"), cwd=folder, command="python")
    assert shown.status == 0, shown.err
    return shown.out


@pytest.mark.parametrize(
    ("run", "options"),
    [(watched, ["--detail-every", "1", "--flush-every", "1"]), (forked, ["--trace"])],
    ids=["every step", "trace"],
)
def test_every_way_to_train_gives_the_same_bits(run, options, by_python, tmp_path):
    shown = run(*options, "-o", "a.jsonl", str(SCRIPTS / "habits.py"), cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert shown.out.splitlines() == by_python.splitlines()


@pytest.mark.parametrize("text", [LOADER, COMPILED], ids=["data loaders", "compiled"])
def test_scripts_with_workers_and_compiled_models_give_the_same_numbers(text, tmp_path):
    name = write(tmp_path, "train.py", text)
    if text is LOADER:  # Spawned workers look for the script that they belong to.
        plain = process(name, cwd=tmp_path)
    else:
        plain = forked(name, cwd=tmp_path, command="python")
    shown = watched("-o", "a.jsonl", name, cwd=tmp_path)
    assert plain.status == 0, plain.err
    assert (shown.status, shown.out) == (0, plain.out), shown.err
    run = read_run(tmp_path / "a.jsonl")
    if text is LOADER:
        assert len(run.steps) == 8
    else:  # What is inside a compiled step may not be seen.
        assert len(run.steps) in (3, 4)
    assert run.optimizers[0].names[0] == ("weight" if text is LOADER else "0.weight")
