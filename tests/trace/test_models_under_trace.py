"""Models of every kind run under a trace as they do without, and are left as they were."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradilocks


class Bad(nn.Module):
    def forward(self, x):
        return x * float("inf")


def model_with(*parts):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *parts, nn.Linear(4, 1))


@dataclasses.dataclass
class Out:
    main: torch.Tensor
    more: dict


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, pair, *, scale):
        out = self.inner(pair["x"][0]) * scale
        return Out(out, {"aux": (out.detach(), [torch.tensor(1)])})


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Sqrt(nn.Module):
    def forward(self, x):
        return (x - x.detach()).sqrt()


KINDS = {
    "in place": model_with(nn.ReLU(inplace=True), nn.Dropout(0.5)),
    "shared": (lambda part: model_with(part, nn.Tanh(), part))(nn.Linear(4, 4)),
    "frozen": model_with(nn.Linear(4, 4).requires_grad_(False)),
    "normed": model_with(nn.BatchNorm1d(4), nn.LayerNorm(4)),
    "attention": nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    "checkpointed": model_with(Checkpointed(nn.Linear(4, 4), reentrant=False)),
    "checkpointed again": model_with(Checkpointed(nn.Linear(4, 4), reentrant=True)),
    "embedded": nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1)),
    "views": model_with(nn.Flatten(0), nn.Unflatten(0, (3, 4)), nn.ReLU(inplace=True)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_traced_step_has_the_same_gradients_and_finds_nothing(kind):
    model = KINDS[kind]
    inputs = torch.tensor([1, 4]) if kind == "embedded" else torch.randn(3, 4)
    gradients = []
    for armed in (False, True):
        model.zero_grad()
        torch.manual_seed(1)
        tracer = gradilocks.trace(model)
        if armed:
            tracer.arm()
        model(inputs).square().mean().backward()
        gradients.append([p.grad.to_dense().clone() for p in model.parameters() if p.requires_grad])
        tracer.close()
        assert tracer.findings == []
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_born_in_a_checkpoint_is_found(reentrant):
    model = model_with(Checkpointed(nn.Sequential(nn.Linear(4, 4), Sqrt()), reentrant))
    with gradilocks.trace(model) as tracer:
        tracer.arm()
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    (found,) = tracer.findings
    assert (found.phase, found.module, found.kind) == ("backward", "1.inner.1", "Sqrt")


def test_tensors_in_mappings_and_dataclasses_are_seen():
    model = Wrapped(model_with(Bad()))
    with gradilocks.trace(model) as tracer:
        tracer.arm()
        out = model({"x": (torch.ones(1, 4),)}, scale=torch.tensor(2.0))
        out.main.sum().backward()
    (found,) = tracer.findings
    assert found.module == "inner.1"
    model = Wrapped(model_with())
    with gradilocks.trace(model) as tracer:
        tracer.arm()
        model({"x": (torch.ones(1, 4),)}, scale=torch.tensor(float("nan")))
    assert "in the input: scale (float32 scalar, 1 NaN)" in tracer.findings[0].text


def test_wrappers_do_not_show_in_names():
    inner = model_with(Bad())
    for model in (nn.DataParallel(inner), torch.compile(inner, backend="eager")):
        with gradilocks.trace(model) as tracer:
            tracer.arm()
            model(torch.ones(1, 4)).sum().backward()
        assert [found.module for found in tracer.findings] == ["1"]


def test_a_compiled_model_runs_compiled_again_after_a_trace():
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    model = torch.compile(model_with(), backend=backend)
    with gradilocks.trace(model) as tracer:
        tracer.arm()
        model(torch.ones(1, 4)).sum().backward()
        assert not calls
    model(torch.ones(1, 4)).sum().backward()
    assert calls


def test_a_forward_that_raises_does_not_confuse_the_trace():
    class Raises(nn.Module):
        def forward(self, x):
            raise KeyError("no")

    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Sequential(Raises()), Bad()

        def forward(self, x):
            try:
                return self.first(x)
            except KeyError:
                return self.second(x)

    model = nn.Sequential(nn.Linear(2, 2), Tries())
    with gradilocks.trace(model) as tracer:
        tracer.arm()
        with pytest.raises(TypeError):
            model("no tensor")
        model(torch.ones(1, 2)).sum().backward()
    assert [found.module for found in tracer.findings] == ["1.second"]


def control_on(model, **more):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    return gradilocks.GradientControl(optimizer, model=model, **more)


def test_a_bad_step_of_a_control_is_run_once_more_and_told_once():
    class Sometimes(nn.Module):
        by = 1.0

        def forward(self, x):
            return x * self.by

    part = Sometimes()
    model = model_with(part)
    control = control_on(model)
    tracer = gradilocks.trace(model, control=control)
    for bad in (False, True, True, False, True, False, False):
        part.by = float("inf") if bad else 1.0
        control.backward(model(torch.ones(1, 4)).sum())
        control.step()
        control.zero_grad()
        assert not tracer.armed
    (found,) = tracer.findings
    assert (found.step, found.module, found.certainty) == (2, "1", "certain")
    tracer.close()
    part.by = float("inf")
    control.backward(model(torch.ones(1, 4)).sum())
    control.step()
    assert len(tracer.findings) == 1
    assert not model._forward_pre_hooks


def test_a_bad_loss_that_does_not_come_again_names_nobody_and_no_gradients():
    class Once(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * float("inf") if self.calls == 1 else x

    model = model_with(Once())
    with gradilocks.trace(model) as tracer:
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        assert not all(param.grad.isfinite().all() for param in model.parameters())
        tracer.look(1, tracer.kept.take(), loss_is_bad=True, gone=True)
        (found,) = tracer.findings
        assert (found.where, found.module, found.certainty) == ("unknown", "", "unknown")
        assert "what it returned was NaN or Inf, and run once more it was finite" in found.text


def test_a_tracer_needs_no_variable_and_writes_to_the_controls_recorder(tmp_path):
    model = model_with(Bad())
    control = control_on(model, record=tmp_path / "a.jsonl")
    gradilocks.trace(model, control=control)
    for _ in range(6):
        control.backward(model(torch.ones(1, 4)).sum())
        control.step()
        control.zero_grad()
    control.recorder.close()
    traces = gradilocks.read_run(tmp_path / "a.jsonl").traces
    assert [(found.step, found.module) for found in traces] == [(1, "1")]


def test_parts_that_are_called_without_the_model_are_followed_too():
    model = model_with(Bad())
    with gradilocks.trace(model) as tracer:
        tracer.arm()
        model[2](model[1](model[0](torch.ones(1, 4)))).sum().backward()
    assert [found.module for found in tracer.findings] == ["1"]


def test_a_tracer_does_not_keep_a_model_alive():
    model = model_with()
    alive = weakref.ref(model)
    tracer = gradilocks.trace(model)
    del model
    gc.collect()
    assert alive() is None
    tracer.arm()
    assert not tracer.armed


def test_a_policy_that_rejects_finite_gradients_arms_nothing():
    model = model_with()
    clip = gradilocks.chain(gradilocks.SkipSpikes(at_least=16), gradilocks.ClipByNorm(1.0))
    control = control_on(model, clip=clip)
    tracer = gradilocks.trace(model, control=control)
    for number in range(40):
        factor = 1e4 if number == 35 else 1.0
        control.backward(model(torch.ones(1, 4)).square().sum() * factor)
        outcome = control.step()
        control.zero_grad()
        assert not tracer.armed
        assert outcome.rejected == (number == 35)


def test_a_trace_that_ends_inside_an_emulation_leaves_torch_as_it_was():
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = torch.compile(model_with(), backend=backend)
    with gradilocks.trace(model) as tracer:
        tracer.arm()
        with gradilocks.emulate("bf16"):
            tracer.disarm()
            model(torch.ones(1, 4))
        assert not calls
    model(torch.ones(1, 4))
    assert calls


def test_a_finding_has_the_number_of_the_controls_step_after_a_checkpoint():
    def controlled() -> tuple[nn.Module, gradilocks.GradientControl]:
        model = nn.Sequential(nn.Linear(2, 2), Bad())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, gradilocks.GradientControl(optimizer, model=model, scale=None)

    model, control = controlled()
    for _ in range(3):
        control.backward(model[0](torch.ones(1, 2)).sum())
        control.step()
        control.zero_grad()
    resumed, after = controlled()
    after.load_state_dict(control.state_dict())
    with gradilocks.trace(resumed, control=after) as tracer:
        for _ in range(2):
            after.backward(resumed(torch.ones(1, 2)).sum())
            outcome = after.step()
            after.zero_grad()
    assert outcome.step == 5
    assert [found.step for found in tracer.findings] == [4]


def test_a_forward_that_cannot_run_twice_ends_neither_the_training_nor_the_trace():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.noise = iter([1.0, float("inf")])

        def forward(self, x):
            return x * next(self.noise)

    model = nn.Sequential(nn.Linear(4, 4), Noisy())
    control = gradilocks.GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    with gradilocks.trace(model, control=control) as tracer:
        for _ in range(2):
            control.backward(model(torch.ones(2, 4)).square().mean())
            control.step()
            control.zero_grad()
        assert tracer.findings == []
        assert tracer.armed  # The next step is followed as it trains.
