"""Models with habits of their own: a replay changes nothing of them, and does not blame the wrong.

Counters, caches and statistics that a forward pass writes, state that has moved on since, data that
were refilled, hooks of the user's: what was not the same again is not called certain.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import gradilocks
from gradilocks.lab.trace import KeptCalls, Tracer
from tests.trace.test_replayed_steps import Gate, look


class Counts(nn.Module):
    """Divides by zero at its third call, which it counts by itself."""

    def __init__(self, where):
        super().__init__()
        self.where, self.n, self.seen, self.log = where, 0, {"n": 0}, []

    def forward(self, x):
        self.n, self.seen["n"] = self.n + 1, self.seen["n"] + 1
        self.log.append(1)
        count = {"number": self.n, "dict": self.seen["n"], "list": len(self.log)}[self.where]
        return x / (0.0 if count == 3 else 1.0)


@pytest.mark.parametrize("where", ["number", "dict", "list"])
def test_a_fault_that_depends_on_a_count_is_unknown_and_the_count_is_put_back(where):
    net = nn.Sequential(nn.Linear(2, 2), Counts(where))
    net(torch.ones(1, 2))
    net(torch.ones(1, 2))
    (found,) = look(net, [torch.ones(1, 2)], gone=True, loss_is_bad=True)
    assert (found.where, found.certainty) == ("unknown", "unknown")
    assert "what it returned was NaN or Inf, and run once more it was finite" in found.text
    assert (net[1].n, net[1].seen["n"], len(net[1].log)) == (3, 3, 3)


def test_a_batch_that_was_refilled_behind_torchs_back_is_unknown_and_not_the_loss():
    memory = np.full((2, 3), np.nan, dtype=np.float32)
    net = nn.Linear(3, 1)
    tracer = Tracer([net])
    tracer.kept.follow([net])
    net(torch.from_numpy(memory)).sum().backward()
    memory[:] = 1.0  # No version moves on.
    tracer.look(1, tracer.kept.take(), gone=True, loss_is_bad=True)
    (found,) = tracer.findings
    tracer.close()
    assert (found.where, found.certainty) == ("unknown", "unknown")


class Hidden(nn.Module):
    """Keeps its state in an attribute."""

    def __init__(self):
        super().__init__()
        self.cell, self.h = nn.Linear(2, 2), torch.zeros(1, 2)

    def forward(self, x):
        self.h = (self.cell(x) + self.h.detach()) * x.sum().exp()
        return self.h


def test_a_hidden_state_that_is_bad_by_now_makes_it_likely_and_is_put_back():
    net = Hidden()
    batch = torch.full((1, 2), 300.0)  # Its exponential overflows.
    (found,) = look(net, [batch])
    assert found.certainty == "likely"
    assert "tensors that the model keeps in attributes are NaN or Inf by now" in found.text
    good = Hidden()
    good(torch.ones(1, 2))
    kept = good.h
    look(good, [torch.ones(1, 2)], loss=lambda out: out.sum() * float("nan"))
    assert good.h is not kept
    assert good.h.isfinite().all()


def test_what_a_forward_pass_writes_is_written_once():
    class Writes(nn.Module):
        """As MoCo, a codebook, an embedding with max_norm and a graph network do."""

        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(4, 3, max_norm=0.5)
            self.line = nn.Linear(3, 3)
            self.key = nn.Linear(3, 3).requires_grad_(False)
            self.register_buffer("codes", torch.zeros(3))
            self.register_buffer("edges", torch.eye(3).to_sparse())
            self.ema = torch.zeros(3)
            self.own = torch.Generator().manual_seed(7)
            self.lazy = nn.LazyLinear(2)
            self.calls = Counter()

        def forward(self, x):
            for ours, theirs in zip(self.key.parameters(), self.line.parameters(), strict=True):
                ours.data = ours.data * 0.9 + theirs.data * 0.1
            x[0, 0] = 1  # Into what it was given.
            out = self.line(torch.sparse.mm(self.edges, self.words(x)[0].T).T) + self.key.bias
            self.codes.mul_(0.9).add_(out.detach().mean(0))
            self.ema.mul_(0.9).add_(out.detach().mean(0))
            self.calls["forward"] += 1
            return out * (torch.rand(3, generator=self.own) + 1.0)

    net = Writes()
    batch = torch.tensor([[3, 2]])
    tracer = Tracer([net])
    tracer.kept.follow([net])
    out = net(batch)
    (out.sum() * float("nan")).backward()
    batch[0, 0] = 2
    held = [p for p in net.parameters() if not isinstance(p, nn.UninitializedParameter)]
    held += [net.codes, net.ema, batch]
    before, versions = [each.detach().clone() for each in held], [each._version for each in held]
    state = net.own.get_state()
    tracer.look(1, tracer.kept.take(), gone=True, loss_is_bad=True)
    tracer.close()
    assert all(map(torch.equal, before, held))
    assert [each._version for each in held] == versions
    assert torch.equal(net.own.get_state(), state)
    assert net.calls == {"forward": 1}
    assert net.edges.is_sparse


def test_a_graph_that_is_still_to_be_run_backward_finds_the_statistics_that_it_has_saved():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    judge = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    tracer = Tracer([made, judge])
    tracer.kept.follow([made, judge])
    fake = made(torch.randn(5, 2))
    (judge(fake.detach()).mean() * float("nan")).backward()
    tracer.look(1, tracer.kept.take())
    judge(fake).mean().backward()  # Through `fake`, whose BatchNorm has saved its buffers.
    tracer.close()
    assert made[0].weight.grad.isfinite().all()


def test_hooks_of_the_user_run_once_and_what_one_makes_is_no_fault_of_the_module():
    net = nn.Linear(2, 1)
    seen = []
    net.register_forward_pre_hook(lambda module, args: (args[0].log10(),))
    net.weight.register_hook(lambda g: seen.append(1) or g / (g - g))
    (found,) = look(net, [torch.ones(1, 2)])
    assert seen == [1]
    assert (found.where, found.certainty) == ("gradients", "likely")


def test_a_call_that_was_left_out_or_only_looked_at_is_not_blamed():
    class Length(nn.Module):
        zero = False

        def forward(self, x):
            return (x * (0.0 if self.zero else 1.0)).square().sum(-1, keepdim=True).sqrt()

    net = nn.Sequential(nn.Linear(2, 2), Length())
    tracer = Tracer([net])
    tracer.kept.follow([net])
    bad = torch.full((1, 2), float("nan"))
    left_out = net(bad).sum()
    left_out.backward()  # The loop sees that it is NaN, and goes on with the next batch.
    net.zero_grad()
    tracer.kept.forget({id(param) for param in net.parameters()})
    looked_at = net(bad)  # A validation output that is still there.
    net[1].zero = True
    net(torch.ones(1, 2)).sum().backward()
    tracer.look(1, tracer.kept.take())
    (found,) = tracer.findings
    tracer.close()
    assert looked_at.isnan().all()
    assert (found.phase, found.module) == ("backward", "1")


def test_two_optimizers_after_one_backward_have_the_same_calls():
    net = nn.Linear(2, 1)
    kept = KeptCalls()
    kept.follow([net])
    net(torch.ones(1, 2)).sum().backward()
    first, second = kept.take(0), kept.take(1)
    assert [call.module() for call in second.calls] == [net]
    assert second is first
    assert kept.take(0).calls == []  # The next step of the first: of calls that nobody has seen.
    kept.close()


def test_no_graph_is_kept_alive_for_a_replay():
    encoder, decoder = nn.Linear(4, 4), nn.Linear(4, 4)
    kept = KeptCalls()
    kept.follow([encoder, decoder])
    nodes = []
    for _ in range(5):  # Evaluated, and `no_grad` forgotten.
        hidden = encoder(torch.ones(1, 4))
        node = Counter()  # Held by the graph alone.
        hidden.register_hook(lambda gradient, node=node: None)
        nodes.append(weakref.ref(node))
        decoder(hidden)
    del hidden, node
    gc.collect()
    assert [find() for find in nodes] == [None] * 5
    assert kept.take().calls == []
    kept.close()


def test_more_calls_than_are_kept_are_said(monkeypatch):
    net = nn.Sequential(nn.Linear(2, 2), Gate())
    net[1].by = 0.0
    tracer = Tracer([net])
    tracer.kept.follow([net])
    losses = [net(torch.full((1, 2), random.random())).sum() for _ in range(70)]
    sum(losses).backward()
    tracer.look(1, tracer.kept.take(), gone=True)
    (found,) = tracer.findings
    tracer.close()
    assert found.certainty != "certain"
    assert "the model was called more than 64 times" in found.text


def test_what_is_returned_in_an_object_is_not_seen_and_that_is_said():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.value = nn.Linear(2, 3), nn.Linear(2, 1)

        def forward(self, x):
            return torch.distributions.Categorical(logits=self.body(x)), self.value(x)

    net = Policy()
    tracer = Tracer([net])
    tracer.kept.follow([net])
    chosen, value = net(torch.ones(4, 2))
    (chosen.log_prob(torch.zeros(4)).sum() * float("nan") + value.sum()).backward()
    tracer.look(1, tracer.kept.take(), gone=True)
    (found,) = tracer.findings
    tracer.close()
    assert found.certainty == "unknown"
    assert "it returned objects whose tensors cannot be seen" in found.text


def test_skips_of_a_scale_that_looks_for_its_place_use_up_nothing():
    class Half(nn.Module):
        bad = False

        def __init__(self):
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", torch.float16):
                out = self.line(x)
            return out / (0.0 if self.bad else 1.0)

    torch.manual_seed(0)
    net = Half()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    scaler = gradilocks.GradScaler("cpu", init_scale=2.0**30, backoff_factor=0.9)
    tracer = gradilocks.trace(net, control=scaler)
    for step in range(60):
        optimizer.zero_grad()
        net.bad = step == 59
        scaler.scale(net(torch.randn(4, 4)).float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert tracer.findings[-1].step == 60
    assert tracer.findings[-1].phase == "forward"
    assert len(tracer.findings) < 4
    tracer.close()
