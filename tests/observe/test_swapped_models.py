"""`torch.utils.swap_tensors` on models that somebody watches: it refuses tensors that have a weak
reference, and leaves hooks on tensors behind."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import GradientControl, Recorder, read_run
from gradilocks.lab.audit import Audit
from tests.observe.sessions import forked, write

MODEL = """
import torch
from torch import nn

torch.__future__.set_swap_module_params_on_conversion(True)

class Kept(nn.Module):
    # Hands its parameter out, and so to the next module.
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
    def forward(self):
        return self.weight

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept, self.join, self.body = Kept(), nn.Identity(), nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
    def forward(self, x):
        return self.head(self.body(x) @ self.join(self.kept()))

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def step(factor=1.0, clip=True, keep=False, scaler=None):
    dtype = model.body.weight.dtype
    loss = (model(torch.ones(2, 4, dtype=dtype)) * factor).square().mean()
    (scaler.scale(loss) if scaler else loss).backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer) if scaler else optimizer.step()
    if scaler:
        scaler.update()
    if not keep:
        optimizer.zero_grad()
"""

SWAPS = {
    "swap_tensors": """
for param in list(model.parameters()):
    torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone()))
""",
    "a dtype": "model.to(torch.float64)\n",
    "a dtype, with gradients": "step(keep=True)\nmodel.to(torch.float64)\noptimizer.zero_grad()\n",
    "meta and back": """
held = {name: value.clone() for name, value in model.state_dict().items()}
model.to("meta")
model.to_empty(device="cpu")
model.load_state_dict(held)
""",
}
REST = """
step()
step(float("inf"), clip=False, keep=True)
print([p.tolist() for p in model.parameters()])
"""


@pytest.mark.parametrize("swap", SWAPS)
def test_a_model_is_swapped_under_run_and_its_steps_keep_their_names(swap, tmp_path):
    write(tmp_path, "train.py", f"{MODEL}\nstep()\nstep()\n{SWAPS[swap]}\n{REST}")
    shown = forked("-o", "a.jsonl", "--detail-every", "1", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert "watching ended" not in shown.err
    assert "not recorded" not in shown.err
    assert shown.out == forked("train.py", cwd=tmp_path, command="python").out
    run = read_run(tmp_path / "a.jsonl")
    count = 5 if "gradients" in swap else 4
    assert [(s.step, s.optimizer) for s in run.steps] == [(n + 1, 0) for n in range(count)]
    (optimizer,) = run.optimizers
    assert optimizer.names == (
        "kept.weight", "body.weight", "body.bias", "head.weight", "head.bias",
    )  # fmt: skip
    taken, bad = run.steps[-2:]
    assert taken.clipped
    assert taken.limit == 0.5
    assert taken.loss is not None
    assert all(norm is not None for norm in taken.detail.norm)
    assert {each.name for each in bad.culprits} == set(optimizer.names)


@pytest.mark.parametrize("swap", SWAPS)
def test_losses_and_clips_since_the_last_step_outlive_a_swap(swap, tmp_path):
    """Two optimizers, and losses of two micro-batches: what is noted of gradients is not lost."""
    script = f"""
{MODEL}
other = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
step()
model(torch.ones(2, 4)).square().mean().backward()
optimizer.zero_grad()
{SWAPS[swap]}
for _ in range(2):
    loss = model(torch.ones(2, 4, dtype=model.body.weight.dtype)).square().mean() / 2
    loss.backward()
print(2 * loss.item())
optimizer.step()
"""
    write(tmp_path, "train.py", script)
    shown = forked("-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    run = read_run(tmp_path / "a.jsonl")
    assert run.steps[-1].loss == pytest.approx(float(shown.out), rel=1e-6)


@pytest.mark.parametrize("swap", SWAPS)
def test_a_script_is_audited_on_after_a_swap(swap, tmp_path):
    script = f"{MODEL}\nstep()\nstep()\n{SWAPS[swap]}\nfor _ in range(20): step()"
    write(tmp_path, "train.py", script)
    done = forked("-n", "5", "-o", "a.jsonl", "train.py", cwd=tmp_path, command="audit")
    assert done.status == 0, done.err
    found = Audit.from_plain(read_run(tmp_path / "a.jsonl").audit)
    counted = {m.name: m.parameters for m in found.modules if m.parameters is not None}
    values = {name: each.values + each.zeros for name, each in counted.items()}
    assert values == {"kept": 5 * 16, "body": 5 * 20, "head": 5 * 5}
    assert found.steps == 5


def test_an_audited_script_registers_hooks_after_a_swap_as_without_an_audit(tmp_path):
    script = f"""
{MODEL}
step()
{SWAPS["swap_tensors"]}
seen = []
for param in model.parameters():
    param.register_hook(lambda gradient: seen.append(gradient.shape))
step()
print(len(seen))
for _ in range(5): step()
"""
    write(tmp_path, "train.py", script)
    assert forked("train.py", cwd=tmp_path, command="python").out == "5\n"
    done = forked("-n", "4", "-o", "a.jsonl", "train.py", cwd=tmp_path, command="audit")
    assert done.out.startswith("5\n"), done.err


def test_a_script_is_swapped_under_trace(tmp_path):
    script = f"""
{MODEL}
scaler = torch.amp.GradScaler("cpu")
step(scaler=scaler, clip=False)
step(float("inf"), scaler=scaler, clip=False)
{SWAPS["a dtype"]}
step(float("inf"), scaler=scaler, clip=False)
step(scaler=scaler, clip=False)
"""
    write(tmp_path, "train.py", script)
    shown = forked("--trace", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    run = read_run(tmp_path / "a.jsonl")
    assert [s.skipped for s in run.steps] == [False, True, True, False]
    (found,) = run.traces
    assert (found.step, found.where) == (2, "after")


# --- the same by the functions --------------------------------------------------------------------


@pytest.fixture
def swap_on_conversion():
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def swap_each(model):
    for param in model.parameters():
        torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone()))


CONVERSIONS = {
    "swap_tensors": swap_each,
    "a dtype": functools.partial(nn.Module.to, dtype=torch.float64),
    "meta and back": lambda model: model.to("meta").to_empty(device="cpu").apply(filled),
}


def filled(module):
    for param in module.parameters(recurse=False):
        nn.init.constant_(param, 0.5)


class OnlyInTheGradient(nn.Module):
    """Its weight's gradient, and nothing else, is Inf where the input is 0."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Steep.apply(x, self.weight)


class Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * weight.to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.full_like(gradient.sum(0), float("inf"))


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.usefixtures("swap_on_conversion")
def test_a_model_is_swapped_between_the_steps_of_a_trace(conversion):
    model = nn.Sequential(nn.Linear(4, 4), OnlyInTheGradient())
    tracer = gradilocks.trace(model)
    tracer.arm()
    with torch.no_grad():
        model(torch.ones(2, 4))
    CONVERSIONS[conversion](model)
    dtype = model[0].weight.dtype
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    (found,) = tracer.findings
    assert (found.module, found.phase, found.where) == ("1", "backward", "module")
    assert "in the gradient of its weight" in found.text
    CONVERSIONS[conversion](model)  # Nothing is left behind.
    tracer.close()
    assert all(not param._backward_hooks for param in model.parameters())


def test_hooks_that_come_after_a_swap_are_called_while_a_model_is_traced():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    seen = []
    with gradilocks.trace(model) as tracer:
        tracer.arm()
        model(torch.ones(2, 4)).sum().backward()
        swap_each(model)
        for param in model.parameters():
            param.register_hook(seen.append)
        model(torch.ones(2, 4)).sum().backward()
        assert tracer.armed
    assert len(seen) == 4


@pytest.mark.usefixtures("swap_on_conversion")
def test_a_parameter_that_is_handed_to_a_module_is_swapped_under_trace():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = nn.Parameter(torch.tensor([0.0, -float("inf")]), requires_grad=False)
            self.add = Added()

        def forward(self, x):
            return self.add(x, self.mask)

    class Added(nn.Module):
        def forward(self, x, mask):
            return torch.softmax(x + mask, -1)

    model = nn.Sequential(nn.Linear(2, 2), Masked())
    with gradilocks.trace(model) as tracer:
        tracer.arm()
        model(torch.ones(3, 2))
        model.to(torch.float64)
        model(torch.ones(3, 2, dtype=torch.float64)).sum().backward()
        assert tracer.findings == []


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.usefixtures("swap_on_conversion")
def test_a_model_is_swapped_after_an_audit(conversion):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    for _ in range(2):
        dtype = model[0].weight.dtype
        batch = torch.ones(2, 4, dtype=dtype)
        found = gradilocks.audit(model, lambda m, x: m(x).square().mean(), [batch])
        assert found.parameters.values + found.parameters.zeros == 25
        CONVERSIONS[conversion](model)
        assert all(param._backward_hooks is None for param in model.parameters())


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.usefixtures("swap_on_conversion")
def test_a_model_is_swapped_under_a_recorder(conversion, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Recorder(tmp_path / "a.jsonl", detail_every=1) as recorder:
        control = GradientControl(optimizer, model=model, clip=1.0, record=recorder)
        for number in range(4):
            if number == 2:
                CONVERSIONS[conversion](model)
            factor = float("inf") if number == 3 else 1.0
            dtype = model[0].weight.dtype
            control.backward((model(torch.ones(2, 4, dtype=dtype)) * factor).square().mean())
            control.step()
            control.zero_grad()
    run = read_run(tmp_path / "a.jsonl")
    assert [(s.step, s.skipped) for s in run.steps] == [
        (1, False),
        (2, False),
        (3, False),
        (4, True),
    ]
    (info,) = run.optimizers
    assert info.names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert {each.name for each in run.steps[-1].culprits} == set(info.names)


DROPS = """
import gc, weakref
import torch
from torch import nn

def train(steps):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for param in model.parameters():  # A circle, for the collector of cycles.
        param.optimizer = optimizer
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if not steps:
        model(torch.ones(2, 4)).sum().backward()
    return [weakref.ref(each) for each in (model, *model.parameters())]
"""


@pytest.mark.parametrize(
    ("command", "options", "steps"),
    [("run", (), 2), ("run", ("--trace",), 2), ("audit", ("-n", "1"), 0)],
    ids=["run", "run --trace", "audit, a model that no optimizer steps"],
)
def test_nothing_is_kept_alive_that_the_script_drops(command, options, steps, tmp_path):
    script = f"{DROPS}\nrefs = train({steps})\ngc.collect()\nprint([r() for r in refs])\ntrain(3)"
    write(tmp_path, "train.py", script)
    shown = forked("-o", "a.jsonl", *options, "train.py", cwd=tmp_path, command=command)
    assert shown.out.startswith("[None, None, None]"), shown.err
