"""Numbers that `gradilocks run` records for scripts of many styles."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from gradilocks.view.runfile import read
from run.scripts import Finished, run_plain, run_recorded

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
truth = open("truth", "w")

def note(*numbers):
    print(*map(float, numbers), file=truth, flush=True)

def norm():
    return torch.stack([param.grad.norm() for param in model.parameters()]).norm()

"""


def recorded(body: str, cwd, **options) -> tuple[Finished, list[list[float]]]:
    """Runs a script that notes the true numbers of each step itself."""
    finished = run_recorded(HEAD + body, cwd=cwd, **options)
    assert finished.exit_code == 0, finished.err
    assert "stopped recording" not in finished.err
    truth = [[float(number) for number in line.split()] for line in (cwd / "truth").read_text().splitlines()]
    return finished, truth


def test_loss_norm_and_learning_rate_of_a_plain_loop(tmp_path):
    finished, truth = recorded(
        """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
for _ in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    note(loss, norm(), schedule.get_last_lr()[0])
    optimizer.step()
    schedule.step()
""",
        tmp_path,
    )
    assert [[line["loss"], line["norm"], line["lr"]] for line in finished.steps] == [
        pytest.approx(numbers, rel=1e-5) for numbers in truth
    ]
    assert all("scale" not in line and "limit" not in line for line in finished.steps)
    (optimizer,) = finished.of_kind("optimizer")
    assert (optimizer["class"], optimizer["names"][0]) == ("AdamW", "0.weight")


def test_the_norm_before_clipping_and_the_limit(tmp_path):
    finished, truth = recorded(
        """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for number in range(6):
    optimizer.zero_grad()
    (model(torch.randn(8, 4)) * number).square().mean().backward()
    note(norm())
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
""",
        tmp_path,
    )
    for line, (norm,) in zip(finished.steps, truth, strict=True):
        assert line["norm"] == pytest.approx(norm, rel=1e-5)
        assert (line["limit"], line["clipped"]) == (1.0, norm > 1.0)
    assert {line["clipped"] for line in finished.steps} == {False, True}


@pytest.mark.parametrize("unscales", [True, False])
def test_a_scaler_with_a_clip_before_or_after_unscaling(unscales, tmp_path):
    finished, truth = recorded(
        f"""
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for number in range(1, 7):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss = loss * float("inf") if number == 4 else loss
    scaler.scale(loss).backward()
    note(loss, norm() / scaler.get_scale(), scaler.get_scale())
    if {unscales}:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5 * scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
""",
        tmp_path,
        has_trace=False,
    )
    for line, (loss, norm, scale) in zip(finished.steps, truth, strict=True):
        assert (line["scale"], line["limit"]) == (scale, 0.5)
        assert line["skipped"] == (line["step"] == 4)
        if math.isfinite(loss):
            assert (line["loss"], line["norm"]) == pytest.approx((loss, norm), rel=1e-5)
        else:
            assert (line["loss"], line["norm"]) == ("inf", "nan")


def test_the_scaler_of_gradilocks_is_recorded_like_torchs(tmp_path):
    body = """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for number in range(1, 7):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    scaler.scale(loss * float("inf") if number == 4 else loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
    names = "step", "loss", "norm", "scale", "skipped", "nan", "inf"
    found = []
    for line in ('scaler = torch.amp.GradScaler("cpu")', 'import gradilocks; scaler = gradilocks.GradScaler("cpu")'):
        finished, _ = recorded(line + body, tmp_path, has_trace=False)
        found.append([[step[name] for name in names] for step in finished.steps])
    assert found[0] == found[1]
    assert [step[4] for step in found[0]] == [False, False, False, True, False, False]


def test_a_skipped_step_of_a_fused_optimizer(tmp_path):
    finished, _ = recorded(
        """
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cpu")
for number in range(1, 7):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    scaler.scale(loss * float("inf") if number == 4 else loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
        tmp_path,
        has_trace=False,
    )
    assert [line["skipped"] for line in finished.steps] == [False, False, False, True, False, False]


def test_accumulated_losses_are_added(tmp_path):
    finished, truth = recorded(
        """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for _ in range(4):
    optimizer.zero_grad()
    losses = [model(torch.randn(8, 4)).square().mean() / 3 for _ in range(3)]
    for loss in losses:
        loss.backward()
    note(sum(losses), norm())
    optimizer.step()
""",
        tmp_path,
    )
    assert [[line["loss"], line["norm"]] for line in finished.steps] == [
        pytest.approx(numbers, rel=1e-5) for numbers in truth
    ]


def test_a_loss_that_the_script_discards_does_not_count(tmp_path):
    finished, truth = recorded(
        """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for number in range(6):
    loss = model(torch.randn(8, 4)).square().mean() * (float("nan") if number == 3 else 1)
    loss.backward()
    if loss.isfinite():
        note(loss)
        optimizer.step()
    optimizer.zero_grad()
""",
        tmp_path,
    )
    assert [line["loss"] for line in finished.steps] == [pytest.approx(loss) for (loss,) in truth]
    assert finished.culprits == []


def test_a_closure_is_measured_after_it_has_run(tmp_path):
    finished, truth = recorded(
        """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for _ in range(4):
    x = torch.randn(8, 4)
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        note(loss, norm())
        return loss
    optimizer.step(closure)
""",
        tmp_path,
    )
    assert [[line["loss"], line["norm"]] for line in finished.steps] == [
        pytest.approx(numbers, rel=1e-5) for numbers in truth
    ]


def test_lbfgs_runs_the_same_and_has_the_first_loss_and_the_whole_update_of_each_step(tmp_path):
    body = """
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
x = torch.randn(8, 4)
for _ in range(4):
    before = [param.detach().clone() for param in model.parameters()]
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean() + 1
        loss.backward()
        return loss
    note(optimizer.step(closure))
    note(*((param - old).norm() / old.norm() for param, old in zip(model.parameters(), before)))
print([param.sum().item() for param in model.parameters()])
"""
    finished, truth = recorded(body, tmp_path, detail_every=1)
    assert [line["loss"] for line in finished.steps] == [pytest.approx(loss) for (loss,) in truth[::2]]
    assert [line["updates"] for line in finished.steps] == [pytest.approx(list(u), rel=1e-3) for u in truth[1::2]]
    assert run_plain(HEAD + body, cwd=tmp_path).out == finished.out


def test_steps_of_a_control_are_recorded_once(tmp_path):
    finished, truth = recorded(
        """
import gradilocks
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
control = gradilocks.GradientControl(optimizer, model=model, clip=0.5)
for number in range(1, 7):
    loss = model(torch.randn(8, 4)).square().mean()
    control.backward(loss * float("inf") if number == 4 else loss)
    outcome = control.step()
    note(loss, outcome.norm)
    control.zero_grad()
    control.log(accuracy=number)
""",
        tmp_path,
        has_trace=False,
    )
    assert [line["step"] for line in finished.steps] == [1, 2, 3, 4, 5, 6]
    assert [line["skipped"] for line in finished.steps] == [False, False, False, True, False, False]
    assert finished.steps[0]["norm"] == pytest.approx(truth[0][1])
    assert len(finished.of_kind("optimizer")) == 1
    assert [line["step"] for line in finished.of_kind("log")] == [1, 2, 3, 4, 5, 6]


def test_a_skipped_step_of_a_control_and_its_culprit_are_both_in_the_file(tmp_path):
    finished, _ = recorded(
        """
import gradilocks
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
control = gradilocks.GradientControl(optimizer, model=model)
for number in range(1, 7):
    x = torch.randn(8, 4)
    control.backward(model(x * float("nan") if number == 4 else x).square().mean())
    control.step()
    control.zero_grad()
""",
        tmp_path,
    )
    assert [line["step"] for line in finished.steps] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in finished.culprits] == [4]
    run = read(tmp_path / "run.jsonl")
    assert [step["skipped"] for step in run.steps[0].values()] == [False, False, False, True, False, False]
    assert [step for step, *_ in run.culprits] == [4]


def test_numbers_of_each_tensor(tmp_path):
    finished, truth = recorded(
        """
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for number in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    before = [param.detach().clone() for param in model.parameters()]
    grads = [param.grad for param in model.parameters()]
    note(*(grad.norm() for grad in grads), *((grad == 0).float().mean() for grad in grads))
    optimizer.step()
    note(*((param - old).norm() / old.norm() for param, old in zip(model.parameters(), before)))
""",
        tmp_path,
        detail_every=2,
    )
    for i in (0, 2):
        line, numbers, updates = finished.steps[i], truth[2 * i], truth[2 * i + 1]
        assert line["norms"] == pytest.approx(numbers[:4], rel=1e-5)
        assert line["zeros"] == pytest.approx(numbers[4:], rel=1e-5)
        assert line["updates"] == pytest.approx(updates, rel=1e-4)
    assert "norms" not in finished.steps[1]


def test_two_models_are_named_by_their_variables(tmp_path):
    finished, _ = recorded(
        """
class Trainer:
    def __init__(self):
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(2, 1)
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.actor, self.critic)]

    def run(self):
        for _ in range(3):
            self.critic(self.actor(torch.randn(2, 4))).square().mean().backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

del model
Trainer().run()
""",
        tmp_path,
    )
    assert len(finished.steps) == 6
    names = [line["names"] for line in finished.of_kind("optimizer")]
    assert names[1] == ["critic.weight", "critic.bias"] or names[1] == ["weight", "bias"]


def test_scripts_that_create_an_optimizer_for_every_batch_stay_readable(tmp_path):
    finished, _ = recorded(
        """
import copy, gc
for _ in range(30):
    fast = copy.deepcopy(model)
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    fast(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
""",
        tmp_path,
    )
    assert len(finished.steps) == 30
    assert len(finished.of_kind("optimizer")) <= 4


def test_equal_optimizers_in_use_are_recorded_separately(tmp_path):
    finished, _ = recorded(
        """
models = [torch.nn.Linear(4, 1) for _ in range(6)]
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
for _ in range(5):
    for m, o in zip(models, optimizers):
        m(torch.randn(2, 4)).square().mean().backward()
        o.step()
""",
        tmp_path,
    )
    assert Counter(line["optimizer"] for line in finished.steps) == dict.fromkeys(range(6), 5)


def test_a_script_without_gradients_at_a_step(tmp_path):
    finished, _ = recorded(
        """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.step()
model(torch.randn(2, 4)).square().mean().backward()
optimizer.step()
""",
        tmp_path,
    )
    assert [line["norm"] > 0 for line in finished.steps] == [False, True]
    assert "loss" not in finished.steps[0]


def test_sparse_half_and_complex_gradients(tmp_path):
    finished, _ = recorded(
        """
words = nn.Embedding(10, 4, sparse=True)
spectrum = nn.Parameter(torch.randn(3, dtype=torch.complex64))
half = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
optimizer = torch.optim.SGD([*words.parameters(), spectrum, half], lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    loss = words(torch.tensor([1, 1, 2])).square().sum() + spectrum.abs().square().sum() + half.float().square().sum()
    loss.backward()
    optimizer.step()
""",
        tmp_path,
    )
    assert all(line["norm"] > 0 and line["nan"] == 0 for line in finished.steps)


def test_optimizers_that_step_after_one_backward_share_its_loss(tmp_path):
    finished, truth = recorded(
        """
optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
for _ in range(3):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    for optimizer in optimizers:
        note(loss)
        optimizer.step()
        optimizer.zero_grad()
""",
        tmp_path,
    )
    assert [line["loss"] for line in finished.steps] == [pytest.approx(loss) for (loss,) in truth]
    assert [line["optimizer"] for line in finished.steps] == [0, 1] * 3


def test_a_sum_of_scaled_losses_is_recorded_without_the_scale(tmp_path):
    finished, truth = recorded(
        """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for _ in range(3):
    optimizer.zero_grad()
    losses = [model(torch.randn(8, 4)).square().mean() for _ in range(2)]
    sum(scaler.scale(loss) for loss in losses).backward()
    note(sum(losses))
    scaler.step(optimizer)
    scaler.update()
""",
        tmp_path,
    )
    assert [line["loss"] for line in finished.steps] == [pytest.approx(loss) for (loss,) in truth]


def test_a_step_that_raises_does_not_end_the_recording(tmp_path):
    finished, _ = recorded(
        """
class Sometimes(torch.optim.SGD):
    def step(self, closure=None):
        if number == 2:
            raise KeyError("x")
        return super().step(closure)

optimizer = Sometimes(model.parameters(), lr=0.1)
for number in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    try:
        optimizer.step()
    except KeyError:
        pass
""",
        tmp_path,
    )
    assert len(finished.steps) == 4


def test_steps_of_other_optimizers_are_recorded_after_one_that_raised(tmp_path):
    finished, _ = recorded(
        """
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for number in range(4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        def closure():
            if number == 0:
                raise MemoryError
            return None if number == 1 else model(torch.randn(8, 4)).square().mean().backward()
        try:
            if number == 1:
                scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
                optimizer.param_groups[0]["lr"] = "high"
                scaler.step(optimizer)
            else:
                optimizer.step(closure)
        except (MemoryError, TypeError):
            break
""",
        tmp_path,
    )
    assert len(finished.steps) == 4


def test_gradients_that_are_not_cleared_are_marked(tmp_path):
    """A norm that grows smoothly, as that of a critic, was "Gradients add up, as if zero_grad() were missing"."""
    loop = """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for number in range(1, 6):
    CLEAR
    (number * model(torch.ones(8, 4)).square().mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    note(number)
"""
    for i, (clear, expected) in enumerate(
        {
            "pass": [False, True, True, True, True],
            "optimizer.zero_grad()": [False] * 5,
            "model.zero_grad(set_to_none=False)": [False] * 5,
            "[param.grad.zero_() for param in model.parameters() if number > 1]": [False] * 5,
        }.items()
    ):
        (tmp_path / str(i)).mkdir()
        finished, _ = recorded(loop.replace("CLEAR", clear), tmp_path / str(i))
        assert [line.get("leftover", False) for line in finished.steps] == expected
