"""Two ranks under Lightning's and Fabric's strategies, beside one process by torch alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from gradilocks import read_run
from tests import PATIENCE
from tests.integrations import task
from tests.ranks.rank_programs import run_all

pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
from tests.integrations import lightning_ranks

PROGRAMS = [
    lightning_ranks.ddp,
    lightning_ranks.fsdp2,
    lightning_ranks.fabric_ddp,
    lightning_ranks.fabric_fsdp2,
]
each_program = pytest.mark.parametrize("program", [each.__name__ for each in PROGRAMS])
TENSOR_PARALLEL = lightning_ranks.tensor_parallel
RESUMED = [lightning_ranks.ddp_resumed, lightning_ranks.fsdp2_resumed]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    return run_all(
        [*PROGRAMS, *RESUMED, TENSOR_PARALLEL, lightning_ranks.fsdp1],
        tmp_path_factory.mktemp("ranks"),
    )


def by_one_process(make=task.OPTIMIZERS["fused adamw"], bad=task.BAD):
    """The weights and the losses of the same training, where the bad step is left out."""
    model = task.Network()
    optimizer, losses = make(model.parameters()), []
    for step, batch in enumerate(task.batches(bad=None)):
        optimizer.zero_grad()
        loss = model(batch).mean()
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), lightning_ranks.CLIP)
        if step != bad:
            optimizer.step()
    return task.weights(model), losses


@pytest.mark.parametrize("program", [each.__name__ for each in (*PROGRAMS, TENSOR_PARALLEL)])
def test_ranks_end_with_the_same_weights_as_one_process(told, program):
    first, second = told[program]
    assert task.same(first["weights"], second["weights"])
    assert first["state"] == second["state"]
    assert first["state"]["scale"] == 2.0**15
    optimizer = "sgd" if program == "tensor_parallel" else "fused adamw"
    expected, _ = by_one_process(task.OPTIMIZERS[optimizer])
    torch.testing.assert_close(first["weights"], expected, rtol=1e-5, atol=1e-6)


@each_program
def test_ranks_write_one_run_file(told, program):
    (steps, status), other = (each["run"] for each in told[program])
    assert (steps, status) == other
    assert status == "finished"
    if program.endswith("fsdp2"):  # Data-parallel ranks tell each other their losses later on.
        _, losses = by_one_process()
        assert [loss for loss, _, _ in steps] == pytest.approx(losses, rel=1e-5)
    assert [skipped for _, skipped, _ in steps] == [k == task.BAD for k in range(task.STEPS)]
    prefix = "" if program.startswith("fabric") else "net."
    rank = " on rank 1" if program.endswith("fsdp2") else ""
    assert [n for _, _, names in steps for n in names] == [f"{prefix}{task.CULPRIT}{rank}"]


@pytest.mark.parametrize("program", ["ddp", "fsdp2"])
def test_ranks_in_half_precision_decide_alike(told, program):
    first, second = told[program]
    assert task.same(first["half weights"], second["half weights"])
    assert first["half state"] == second["half state"]
    assert first["half state"]["scale"] == 2.0**15


@pytest.mark.parametrize("program", [each.__name__ for each in RESUMED])
def test_ranks_that_are_resumed_go_on_bit_for_bit(told, program):
    for each in told[program]:
        (weights, state), (resumed, state_resumed) = each["whole"], each["resumed"]
        assert task.same(resumed, weights)
        assert state_resumed == state


def test_the_group_of_fully_sharded_models_is_found(told):
    for each in told["fsdp1"]:
        assert each["ranks"] == [0, 1]
        assert each["copies"] == {}
        assert each["said"] == {}
        expected, _ = by_one_process(lambda params: torch.optim.SGD(params, lr=0.1), bad=None)
        torch.testing.assert_close(each["weights"], expected, rtol=1e-5, atol=1e-6)


SPAWNING = """
import sys
import lightning.pytorch as pl
from gradilocks.integrations.lightning import GradientControlCallback
from tests.integrations.lightning_task import QUIET, loader, module_of

class Lit(module_of(pl)):
    pass

if __name__ == "__main__":
    callback = GradientControlCallback(clip=0.02, record=sys.argv[1])
    trainer = pl.Trainer(**{**QUIET, "devices": 2}, strategy="ddp_spawn", callbacks=[callback])
    trainer.fit(Lit("fused adamw"), loader(bad=None))
    print(sorted(trainer.callback_metrics))
"""


@pytest.mark.long
def test_processes_that_lightning_spawns_have_the_callback_too(tmp_path):
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    told = subprocess.run(
        [sys.executable, "-W", "ignore", script, tmp_path / "run.jsonl"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert "gradilocks/norm" in told.stdout, told.stderr
    run = read_run(tmp_path / "run.jsonl")
    assert (len(run.steps), run.end.status) == (task.STEPS // 2, "finished")
