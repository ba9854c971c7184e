"""Trainings in other people's style, with NaN in some steps; prints what each of them leaves.

With `reference` as its argument each leaves out those steps by itself.
"""

import json
import sys

import torch
from torch import nn

REFERENCE = "reference" in sys.argv
BAD = (3, 4, 8)
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def plain(thing):
    if isinstance(thing, torch.Tensor):
        return thing.to_dense().tolist() if thing.is_sparse else thing.tolist()
    if isinstance(thing, dict):
        return {str(key): plain(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [plain(each) for each in thing]
    return thing if isinstance(thing, (int, float, str, bool, type(None))) else str(type(thing))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def batch(number):
    made = torch.Generator().manual_seed(number)
    x = torch.randn(5, 4, generator=made)
    if number in BAD:
        x[0, 0] = float("nan")
    return x


def left(model, *others):
    return plain([model.state_dict(), *(each.state_dict() for each in others)])


def train(model, optimizer, *others, step=None):
    for number in range(11):
        optimizer.zero_grad()
        model(batch(number)).square().mean().backward()
        if not (REFERENCE and number in BAD):
            (step or optimizer.step)()
        for each in others:
            each.step()
    return left(model, optimizer, *others)


def train_by_closure(model, optimizer, poison=lambda number, evaluations: number in BAD):
    for number in range(11):
        evaluations = 0

        def closure(number=number):
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            x = batch(20 + number)
            if poison(number, evaluations):
                x[0, 0] = float("inf")
            loss = model(x).square().mean()
            loss.backward()
            return loss

        if not (REFERENCE and number in BAD):
            optimizer.step(closure)
    return left(model, optimizer)


@case
def adamw():
    model = net()
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


@case
def adam_foreach_after_adamw():
    model = net()
    return train(model, torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True, amsgrad=True))


@case
def fused():
    model = net()
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))


@case
def sgd_with_groups_and_a_schedule():
    model = net()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters()}],
        lr=0.1, momentum=0.9, nesterov=True,
    )  # fmt: skip
    return train(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))


@case
def bound_before():
    model = net()
    optimizer = torch.optim.RMSprop(model.parameters())
    return train(model, optimizer, step=optimizer.step)


@case
def closure_under_sgd():
    model = net()
    return train_by_closure(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@case
def closure_under_adam():
    model = net()
    return train_by_closure(model, torch.optim.Adam(model.parameters()))


@case
def lbfgs():
    model = net()
    return train_by_closure(model, torch.optim.LBFGS(model.parameters(), max_iter=4))


@case
def lbfgs_in_its_line_search():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    return train_by_closure(model, optimizer, lambda number, n: number in BAD and n == 3)


class Own(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p].get("count", 0)
                self.state[p]["count"] = count + 1
                p -= group["lr"] * p.grad.sign()


@case
def own():
    model = net()
    return train(model, Own(model.parameters(), 0.01))


class Counting(torch.optim.Adam):
    calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step(closure)


@case
def own_on_super():
    model = net()
    optimizer = Counting(model.parameters(), lr=0.01)
    return [train(model, optimizer), optimizer.calls]


class Inherits(torch.optim.AdamW):
    pass


@case
def own_that_inherits():
    model = net()
    return train(model, Inherits(model.parameters(), lr=0.01))


class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner, every=2):
        self.inner, self.every, self.count = inner, every, 0
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % self.every == 0:
            fast = [p for g in self.param_groups for p in g["params"]]
            for slow, p in zip(self.slow, fast, strict=True):
                slow += 0.5 * (p.detach() - slow)
                p.data.copy_(slow)
        return loss


@case
def lookahead():
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = Lookahead(inner)
    return [train(model, optimizer), optimizer.count, left(model, inner)]


class SAM(torch.optim.Optimizer):
    """Climbs, evaluates the closure there, and descends from where it was."""

    def __init__(self, params, base, rho=0.05, **more):
        super().__init__(params, {"rho": rho, **more})
        self.base = base(self.param_groups, **more)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure):
        evaluate = torch.enable_grad()(closure)
        params = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old"] = p.data.clone()
            p += p.grad * (0.05 / (norm + 1e-12))
        self.zero_grad()
        evaluate()
        for p in params:
            p.data = self.state[p]["old"]
        self.base.step()


@case
def sam():
    model = net()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for number in range(11):

        def closure(number=number):
            loss = model(batch(number)).square().mean()
            loss.backward()
            return loss

        closure()
        if not (REFERENCE and number in BAD):
            optimizer.step(closure)
        optimizer.zero_grad()
    return left(model, optimizer, optimizer.base)


@case
def sparse():
    torch.manual_seed(0)
    model = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    for number in range(11):
        optimizer.zero_grad()
        factor = float("nan") if number in BAD else 1.0
        (model(torch.tensor([number % 6, 1])).square().sum() * factor).backward()
        if not (REFERENCE and number in BAD):
            optimizer.step()
    return left(model, optimizer)


@case
def two_networks():
    one, two = net(), net()
    first = torch.optim.Adam(one.parameters(), lr=0.01)
    second = torch.optim.Adam(two.parameters(), lr=0.01)
    for number in range(11):  # Of the second alone a step is bad.
        for model, optimizer, bad in ((one, first, False), (two, second, number in BAD)):
            optimizer.zero_grad()
            loss = model(batch(100 + number)).square().mean()
            (loss * float("inf") if bad else loss).backward()
            if not (REFERENCE and bad):
                optimizer.step()
    return [left(one, first), left(two, second)]


@case
def in_backward():
    model = net()
    every = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(p):
        if not (REFERENCE and number in BAD):
            every[p].step()
        every[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for number in range(11):
        model(batch(number)).square().mean().backward()
    return left(model, *every.values())


@case
def clipped_by_an_infinite_norm():
    """`clip_grad_norm_` to Inf makes NaN of gradients whose norm overflows."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(11):
        optimizer.zero_grad()
        (model(batch(100 + number)).mean() * (1e25 if number in BAD else 1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"), foreach=False)
        if not (REFERENCE and number in BAD):
            optimizer.step()
    return left(model, optimizer)


@case
def scaler():
    """Skips by itself, and goes on counting as it does."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    for number in range(11):
        optimizer.zero_grad()
        scaler.scale(model(batch(number)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return left(model, optimizer, scaler)


@case
def spoilt_after_the_scaler_has_looked():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    for number in range(11):
        optimizer.zero_grad()
        scaler.scale(model(batch(100 + number)).square().mean()).backward()
        scaler.unscale_(optimizer)
        if number in BAD:
            model[0].weight.grad[0, 0] = float("nan")
        if not (REFERENCE and number in BAD):
            scaler.step(optimizer)
        scaler.update()
    return left(model, optimizer, scaler)


@case
def copied():
    import copy

    model = net()
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    (model, optimizer) = copy.deepcopy((model, optimizer))
    return train(model, optimizer)


@case
def control():
    import gradilocks

    results = []
    for kind, more in ((torch.optim.AdamW, {"fused": True}), (gradilocks.optim.AdamW, {})):
        model = net()
        optimizer = kind(model.parameters(), lr=0.01, **more)
        control = gradilocks.GradientControl(optimizer, model=model, clip=0.1)
        for number in range(11):
            control.backward(model(batch(number)).square().mean())
            control.step()
            control.zero_grad()
        results.append(left(model, optimizer, control))
    return results


@case
def our_optimizer_by_itself():
    import gradilocks

    model = net()
    return train(model, gradilocks.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


for name, run in CASES.items():
    print(json.dumps([name, run()]))
