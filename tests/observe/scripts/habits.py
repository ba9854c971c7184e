"""Ways in which people train, each with a digest of every number that came out.

Run with `python habits.py` and with `gradilocks run habits.py`; the digests must be the same.
"""

import contextlib
import hashlib
import random
import sys

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import gradilocks


def model_of(seed=0, width=8):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, 1))


def batches(count, width=8):
    return [torch.randn(4, width) for _ in range(count)]


def digest(name, losses, *models):
    told = hashlib.sha256()
    for tensor in [*losses, *(p for m in models for p in m.parameters())]:
        told.update(tensor.detach().to_dense().contiguous().numpy().tobytes())
        told.update(str(tensor.stride()).encode())
    told.update(torch.get_rng_state().numpy().tobytes())
    told.update(repr(random.getstate()).encode())
    print(name, told.hexdigest())


def plain_sgd():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches(12):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    digest("plain_sgd", losses, model)


def torch_scaler():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    losses = []
    for number, batch in enumerate(batches(12)):
        optimizer.zero_grad()
        loss = model(batch).square().mean() * (float("inf") if number == 5 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss)
    digest("torch_scaler", [*losses, torch.tensor(scaler.get_scale())], model)


def unscaled_and_clipped():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for number, batch in enumerate(batches(12)):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        if number == 4:
            model[0].bias.grad[2] = float("inf")
        scaler.unscale_(optimizer)
        losses.append(clip_grad_norm_(model.parameters(), 0.05))
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss)
    digest("unscaled_and_clipped", losses, model)


def clipped_by_value():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(6):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    digest("clipped_by_value", [], model)


def accumulation():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number, batch in enumerate(batches(12)):
        loss = model(batch).square().mean() / 3
        loss.backward()
        losses.append(loss)
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    digest("accumulation", losses, model)


def two_optimizers():
    generator, critic = model_of(1), model_of(2, width=1)
    for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    for_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    losses = []
    for batch in batches(6):
        for_critic.zero_grad()
        real = critic(torch.randn(4, 1)).mean()
        real.backward()
        fake = -critic(generator(batch).detach()).mean()
        fake.backward()
        for_critic.step()
        for_generator.zero_grad()
        loss = critic(generator(batch)).mean()
        loss.backward()
        for_generator.step()
        losses += [real, fake, loss]
    digest("two_optimizers", losses, generator, critic)


def lbfgs():
    model = model_of()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    losses = []

    for batch in batches(3):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss)
            return loss

        optimizer.step(closure)
    digest("lbfgs", losses, model)


def sparse():
    torch.manual_seed(3)
    table = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        indices = torch.tensor([1, 1, 7, 3, 1])
        table(indices).square().sum().backward()
        assert not table.weight.grad.is_coalesced()
        optimizer.step()
        assert not table.weight.grad.is_coalesced(), "watching coalesced a gradient"
    digest("sparse", [], table)


def foreach_and_fused():
    for settings in ({"foreach": True}, {"fused": True}):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)
        scaler = torch.amp.GradScaler("cpu")
        for number, batch in enumerate(batches(6)):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            scaler.scale(loss).backward()
            if number == 2:
                model[2].weight.grad[0, 3] = float("nan")
            scaler.step(optimizer)
            scaler.update()
        digest("foreach_and_fused", [], model)


class Twice(torch.optim.SGD):
    """Its step calls that of its base class, which has hooks of its own."""

    def step(self, closure=None):
        return super().step(closure)


def step_of_a_base_class():
    model = model_of()
    torch.optim.SGD(model.parameters(), lr=0.1)  # So that the base class is hooked.
    optimizer = Twice(model.parameters(), lr=0.1)
    for batch in batches(4):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    digest("step_of_a_base_class", [], model)


def a_step_that_raises():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        raise KeyError("no data")

    for batch in batches(3):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        with contextlib.suppress(KeyError):
            optimizer.step(closure)
        optimizer.step()
    digest("a_step_that_raises", [], model)


def control_of_gradilocks():
    for settings in ({}, {"fused": True}):
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)
        control = gradilocks.GradientControl(optimizer, clip=0.05)
        for number, batch in enumerate(batches(6)):
            control.backward(model(batch).square().mean() * (float("nan") if number == 2 else 1))
            control.step()
            control.zero_grad()
        digest("control_of_gradilocks", [torch.tensor(control.scale)], model)


def scaler_of_gradilocks():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = gradilocks.GradScaler("cpu", clip=0.05)
    for number, batch in enumerate(batches(6)):
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean() * (float("inf") if number == 2 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    digest("scaler_of_gradilocks", [torch.tensor(scaler.get_scale())], model)


HABITS = [
    plain_sgd,
    torch_scaler,
    unscaled_and_clipped,
    clipped_by_value,
    accumulation,
    two_optimizers,
    lbfgs,
    sparse,
    foreach_and_fused,
    step_of_a_base_class,
    a_step_that_raises,
    control_of_gradilocks,
    scaler_of_gradilocks,
]

if __name__ == "__main__":
    random.seed(1)
    for habit in HABITS:
        if len(sys.argv) == 1 or habit.__name__ in sys.argv[1:]:
            habit()
