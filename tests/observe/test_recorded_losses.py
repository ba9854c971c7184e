"""The loss of a step is the user's: what was run backward since the last one, each loss once."""

from __future__ import annotations

import json

import pytest

from gradilocks import read_run
from gradilocks.report import examine
from tests.observe.sessions import SCRIPTS, forked, write


def said_and_recorded(shown, path):
    """By case: what the script says of its steps' losses, and what the run file says."""
    assert shown.status == 0, shown.err
    run = read_run(path)
    said = [json.loads(line) for line in shown.out.splitlines()]
    assert len(run.optimizers) == len(said)
    recorded = [[s.loss for s in run.steps if s.optimizer == o.index] for o in run.optimizers]
    return {name: (losses, recorded[place]) for place, (name, losses) in enumerate(said)}


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_frameworks_that_divide_the_loss_record_what_their_users_see(framework, tmp_path):
    pytest.importorskip(framework, reason=f"{framework} is not installed here")
    script = str(SCRIPTS / f"{framework}_losses.py")
    plain = forked(script, cwd=tmp_path, command="python")
    assert plain.status == 0, plain.err
    shown = forked("-o", "a.jsonl", script, cwd=tmp_path)
    assert shown.out == plain.out
    cases = said_and_recorded(shown, tmp_path / "a.jsonl")
    assert len(cases) >= 3
    for name, (losses, recorded) in cases.items():
        assert recorded == pytest.approx(losses, rel=1e-6), name


LOOPS = """
import json
import torch

data = torch.randn(8, 4, 6, generator=torch.Generator().manual_seed(1))

def model_and(kind, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, getattr(torch.optim, kind)(model.parameters(), **options)

def loss_of(model, batch):
    return model(batch).square().mean() + 0.5

def say(name, losses):
    print(json.dumps([name, losses]))

def divided(every):
    model, optimizer = model_and("SGD", lr=0.05)
    steps, now = [], 0.0
    for number, batch in enumerate(data):
        loss = loss_of(model, batch) / every
        now += loss.item()
        loss.backward()
        if (number + 1) % every == 0 or number + 1 == len(data):
            optimizer.step()
            optimizer.zero_grad()
            steps.append(now)
            now = 0.0
    say(f"divided by {every}", steps)

def epochs_with_a_rest(rest):
    model, optimizer = model_and("SGD", lr=0.05)
    steps, now = [], 0.0
    for epoch in range(3):
        if rest == "thrown away":
            optimizer.zero_grad()
            now = 0.0
        elif rest == "thrown away in place":
            model.zero_grad(set_to_none=False)
            now = 0.0
        for number, batch in enumerate(data[: 8 if epoch < 2 else 4]):
            loss = loss_of(model, batch) / 3
            now += loss.item()
            loss.backward()
            if (number + 1) % 3 == 0 or (epoch == 2 and number == 3):
                optimizer.step()
                optimizer.zero_grad()
                steps.append(now)
                now = 0.0
    say(f"the rest of an epoch {rest}", steps)

def two_that_share_a_pass():
    (one, first), (other, second) = model_and("SGD", lr=0.01), model_and("AdamW", lr=0.01)
    steps = []
    for batch in data:
        first.zero_grad()
        loss = loss_of(one, batch)
        loss.backward()
        second.zero_grad()  # Of the other: what has been run backward still counts.
        more = loss_of(other, batch)
        more.backward()
        first.step()
        second.step()
        steps.append(loss.item() + more.item())
    say("two that share a pass, first", steps)
    say("two that share a pass, second", steps)

def summed():
    model, optimizer = model_and("AdamW", lr=0.01)
    steps = []
    for one, other in zip(data[::2], data[1::2]):
        optimizer.zero_grad()
        first, second = loss_of(model, one), loss_of(model, other)
        first.backward()
        second.backward()
        optimizer.step()
        steps.append(first.item() + second.item())
    say("summed", steps)

def in_half_precision():
    model, optimizer = model_and("SGD", lr=0.01)
    steps = []
    for k in range(2):
        now = 0.0
        for batch in data:
            loss = loss_of(model, batch).bfloat16()
            now += loss.item()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(now)
    say("bfloat16", steps)

def closure_evaluated_often(search):
    model, optimizer = model_and("LBFGS", lr=0.1, max_iter=4, line_search_fn=search)
    steps = []
    for batch in data:
        seen = []
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            seen.append(loss.item())
            loss.backward()
            return loss
        optimizer.step(closure)
        steps.append(seen[0])
    say(f"LBFGS, {search}", steps)

def closure_of_two_halves():
    model, optimizer = model_and("LBFGS", lr=0.1, max_iter=3)
    steps = []
    for batch in data:
        seen = []
        def closure():
            optimizer.zero_grad()
            halves = [loss_of(model, half) / 2 for half in batch.chunk(2)]
            for half in halves:
                half.backward()
            seen.append(sum(half.item() for half in halves))
            return sum(half.detach() for half in halves)
        optimizer.step(closure)
        steps.append(seen[0])
    say("LBFGS, two halves", steps)

def last_micro_batch_in_the_closure(kind):
    model, optimizer = model_and(kind, lr=0.01)
    steps = []
    for first, second, third in (data[0:3], data[3:6]):
        now = []
        def closure():
            loss = loss_of(model, third) / 3
            now.append(loss.item())
            loss.backward()
            return loss
        optimizer.zero_grad()
        for batch in (first, second):
            loss = loss_of(model, batch) / 3
            now.append(loss.item())
            loss.backward()
        optimizer.step(closure)
        steps.append(sum(now[:3]))
    say(f"{kind}, the last in the closure", steps)

def closure_that_does_nothing():
    model, optimizer = model_and("SGD", lr=0.01)
    steps = []
    for batch in data:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step(lambda: None)
        optimizer.zero_grad()
        steps.append(loss.item())
    say("nothing in the closure", steps)

def closure_that_begins_anew(clear):
    model, optimizer = model_and("SGD", lr=0.01)
    steps = []
    for batch in data:
        loss_of(model, batch * 2).backward()  # Looked at, and thrown away.
        seen = []
        def closure():
            if clear == "in place":
                optimizer.zero_grad(set_to_none=False)
            else:
                model.zero_grad()
            loss = loss_of(model, batch)
            seen.append(loss.item())
            loss.backward()
            return loss
        optimizer.step(closure)
        steps.append(seen[0])
    say(f"cleared {clear}", steps)

class SAM(torch.optim.Optimizer):
    def __init__(self, params, lr, rho=0.05):
        super().__init__(params, dict(lr=lr, rho=rho))
        self.base = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        moves = [0.05 * p.grad for p in params]
        for p, move in zip(params, moves):
            p.add_(move)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, move in zip(params, moves):
            p.sub_(move)
        self.base.step()

def sam():
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    optimizer = SAM(model.parameters(), lr=0.05)
    steps = []
    for batch in data:
        seen = []
        def closure():
            loss = loss_of(model, batch)
            seen.append(loss.item())
            loss.backward()
            return loss
        closure()
        optimizer.step(closure)
        optimizer.zero_grad()
        steps.append(seen[1])
    say("SAM", steps)

def closure_that_raised_once():
    model, optimizer = model_and("SGD", lr=0.01)
    steps = []
    for number, batch in enumerate(data):
        seen = []
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            if number == 2 and not seen:
                seen.append(0.0)
                raise MemoryError
            seen.append(loss.item())
            return loss
        try:
            optimizer.step(closure)
        except MemoryError:
            optimizer.step(closure)
        steps.append(seen[-1])
    say("raised once", steps)

def two_after_one_closure():
    model, first = model_and("LBFGS", lr=0.1, max_iter=3)
    other = torch.nn.Linear(6, 1)
    second = torch.optim.SGD(other.parameters(), lr=0.01)
    firsts, lasts = [], []
    for batch in data:
        seen = []
        def closure():
            first.zero_grad(), second.zero_grad()
            loss = loss_of(model, batch) + loss_of(other, batch)
            seen.append(loss.item())
            loss.backward()
            return loss
        first.step(closure)
        second.step()
        firsts.append(seen[0])
        lasts.append(seen[-1])
    say("two optimizers, first", firsts)
    say("two optimizers, second", lasts)

def dropped_by_hand():
    beside, another = model_and("SGD", lr=0.01)  # Whose gradients stay.
    loss = loss_of(beside, data[0])
    loss.backward()
    another.step()
    say("beside", [loss.item()])
    model, optimizer = model_and("SGD", lr=0.01)
    steps = []
    for number, batch in enumerate(data):
        if number in (0, 3):
            (loss_of(model, batch) * float("nan")).backward()
            for p in model.parameters():
                p.grad = None
        halves = [loss_of(model, half) / 2 for half in batch.chunk(2)]
        for half in halves:
            half.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(sum(half.item() for half in halves))
    say("dropped by hand", steps)

def of_a_gan(first):
    torch.manual_seed(0)
    G, D = torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)
    forG, forD = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (G, D))
    ofG, ofD = [], []
    def generate(batch):
        loss = -D(G(batch)).mean()
        loss.backward()
        D.zero_grad()
        forG.step()
        G.zero_grad()
        ofG.append(loss.item())
    def judge(batch):
        loss = D(G(batch).detach()).mean() - D(batch).mean()
        loss.backward()
        forD.step()
        D.zero_grad()
        ofD.append(loss.item())
    turns = {"G": (generate, judge), "D": (judge, generate)}[first]
    for batch in data:
        for turn in turns:
            turn(batch)
    names = {"G": (ofG, ofD), "D": (ofD, ofG)}[first]
    say(f"{first} first, first", names[0])
    say(f"{first} first, second", names[1])

def thrown_away_before_any_step():
    model, optimizer = model_and("SGD", lr=0.01)
    loss_of(model, data[0]).backward()
    optimizer.zero_grad()
    loss = loss_of(model, data[1])
    loss.backward()
    optimizer.step()
    say("thrown away before any step", [loss.item()])

dropped_by_hand(), of_a_gan("G"), of_a_gan("D")
thrown_away_before_any_step()
divided(1), divided(4), divided(3), two_that_share_a_pass()
for rest in ("kept", "thrown away", "thrown away in place"):
    epochs_with_a_rest(rest)
summed(), in_half_precision()
for search in (None, "strong_wolfe"):
    closure_evaluated_often(search)
closure_of_two_halves()
for kind in ("SGD", "AdamW", "LBFGS"):
    last_micro_batch_in_the_closure(kind)
closure_that_does_nothing()
for clear in ("to None", "in place"):
    closure_that_begins_anew(clear)
sam(), closure_that_raised_once(), two_after_one_closure()
"""


def test_loops_of_every_make_record_each_loss_once(tmp_path):
    name = write(tmp_path, "train.py", LOOPS)
    plain = forked(name, cwd=tmp_path, command="python")
    assert plain.status == 0, plain.err
    shown = forked("-o", "a.jsonl", name, cwd=tmp_path)
    assert shown.out == plain.out
    cases = said_and_recorded(shown, tmp_path / "a.jsonl")
    assert len(cases) == 30
    for case, (losses, recorded) in cases.items():
        assert recorded == pytest.approx(losses, rel=1e-6), case


BUFFERS = """
import json
import torch
from torch import nn

torch.manual_seed(0)
models = [nn.Linear(4, 1), nn.Linear(4, 1)]
a, b = models
for_a, for_b = (torch.optim.SGD(each.parameters(), lr=0.01) for each in models)
ofa, ofb = [], []

def lay(*owners):
    params = [param for owner in owners for param in owner.parameters()]
    flat, begin = torch.zeros(sum(param.numel() for param in params)), 0
    for param in params:
        param.grad = flat[begin : begin + param.numel()].view_as(param)
        begin += param.numel()

def backward(losses, *owners):
    loss = sum(owner(torch.ones(1, 4)).square().sum() for owner in owners) + 5
    loss.backward()
    losses.append(loss.item())

{lay}
for number in range(3):
    for_a.zero_grad(set_to_none=False)
    backward(ofa, a)
    for_a.step()
    for_b.zero_grad(set_to_none=False)
    backward([], {reached})
    for_{cleared}.zero_grad(set_to_none=False)
    {again}
    for_b.step()
print(json.dumps(["a", ofa]))
print(json.dumps(["b", ofb]))
"""
THROWN_AWAY = {"reached": "b", "cleared": "b", "again": "backward(ofb, b)"}
STILL_THERE = {"reached": "a, b", "cleared": "a", "again": "ofb.append(0.0)"}


def of_two_optimizers(folder, lay, case):
    name = write(folder, "train.py", BUFFERS.format(lay=lay, **case))
    cases = said_and_recorded(forked("-o", "a.jsonl", name, cwd=folder), folder / "a.jsonl")
    said, recorded = cases["a"]
    assert recorded == pytest.approx(said, rel=1e-6)
    return cases["b"]


@pytest.mark.parametrize("lay", ["lay(a), lay(b)", "lay(a)", ""])
def test_a_loss_that_was_thrown_away_in_a_buffer_of_its_optimizer_does_not_count(lay, tmp_path):
    said, recorded = of_two_optimizers(tmp_path, lay, THROWN_AWAY)
    assert recorded == pytest.approx(said, rel=1e-6)


def test_a_loss_of_two_optimizers_stays_if_the_gradients_of_one_are_cleared(tmp_path):
    _, recorded = of_two_optimizers(tmp_path, "lay(a), lay(b)", STILL_THERE)
    assert all(loss is not None and loss >= 5 for loss in recorded)


@pytest.mark.parametrize("case", [THROWN_AWAY, STILL_THERE], ids=["thrown away", "still there"])
def test_a_loss_is_unknown_where_two_optimizers_write_to_one_buffer(case, tmp_path):
    """All views of it share one counter of writes."""
    _, recorded = of_two_optimizers(tmp_path, "lay(a, b)", case)
    assert recorded == [None, None, None]


LEFT_OUT = """
import sys
import torch

torch.manual_seed(0)
way = sys.argv[1]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for number in range(1, 31):
    x = torch.randn(8, 4)
    loss = model(x).square().mean()
    if way != "finite" and number % 10 == 0:
        loss = loss * float("nan" if number % 20 else "inf")
    if way == "none":
        for each in model.parameters():
            each.grad = None
    elif way != "after":
        optimizer.zero_grad()
    loss.backward()
    if number % 10 == 0:
        if way == "after":
            optimizer.zero_grad()
        continue
    optimizer.step()
    if way == "after":
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("way", "many"), [("before", 3), ("after", 3), ("none", 3), ("finite", 0)])
def test_bad_losses_that_the_script_itself_leaves_out_are_counted(way, many, tmp_path):
    write(tmp_path, "train.py", LEFT_OUT)
    shown = forked("-o", "a.jsonl", "train.py", way, cwd=tmp_path)
    run = read_run(tmp_path / "a.jsonl")
    assert len(run.steps) == 27
    said = "backward passes on a loss that was NaN or Inf, the first after step 9, went into no"
    assert (f"gradilocks: 3 {said} step" in shown.err) is bool(many)
    assert (run.end.left_out or 0, run.end.left_out_after) == (many, 9 if many else None)
    found = {each.rule: each for each in examine(run).findings}
    assert ("losses-left-out" in found) is bool(many)
    if many:
        assert found["losses-left-out"].title.endswith("left out by the script 3 times")
        assert found["losses-left-out"].severity == "note"


def test_evaluations_that_an_optimizer_asks_for_are_not_left_out(tmp_path):
    script = """
import torch
x = torch.nn.Parameter(torch.tensor([3.0]))
optimizer = torch.optim.LBFGS([x], lr=1.0, max_iter=4)
calls = [0]
def closure():
    optimizer.zero_grad()
    calls[0] += 1
    loss = (x ** 2).sum() * (float("nan") if calls[0] == 3 else 1.0)
    loss.backward()
    return loss
optimizer.step(closure)
"""
    write(tmp_path, "train.py", script)
    forked("-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert read_run(tmp_path / "a.jsonl").end.left_out is None
