"""Small trainings with one planted fault each, at step 5 of 8: python other_faults.py NAME."""

import copy
import logging
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

FAULT = sys.argv[1]
step = 0


def is_now():
    return step == 5


class Block(nn.Module):
    """A layer that computes `function(x)` at the faulty step."""

    def __init__(self, function, dim=8):
        super().__init__()
        self.linear, self.function = nn.Linear(dim, dim), function

    def forward(self, x):
        x = self.linear(x)
        return self.function(x) if is_now() else x


def around(function, dim=8):
    """A model with a faulty block in the middle."""
    return nn.Sequential(nn.Linear(4, dim), nn.Tanh(), Block(function, dim), nn.Linear(dim, 3))


def train(model, loss_of=None, optimizer=None, params=None, lr=1e-2, after_backward=None):
    global step
    params = list(model.parameters()) if params is None else params
    optimizer = optimizer or torch.optim.AdamW(params, lr=lr)
    for step in range(1, 9):  # noqa: B007 (read by `is_now`)
        x, y = torch.randn(6, 4), torch.randint(3, (6,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) if loss_of is None else loss_of(x, y)
        loss.backward()
        if after_backward is not None:
            after_backward()
        optimizer.step()


class Attention(nn.Module):
    """Written by hand; a row without any visible key becomes NaN."""

    def __init__(self, dim=8, as_sub=False):
        super().__init__()
        self.qkv, self.as_sub = nn.Linear(dim, 3 * dim), as_sub

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(mask[:, None, :], float("-inf"))
        if self.as_sub:
            scores = (scores - scores.amax(-1, keepdim=True)).exp()
            return scores / scores.sum(-1, keepdim=True) @ v
        return scores.softmax(-1) @ v


class Masked(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Attention(**options) for _ in range(2))

    def forward(self, x):
        mask = torch.zeros(6, 5, dtype=torch.bool)
        if is_now():
            mask[0] = True
        x = self.embed(x[:, None].expand(-1, 5, -1))
        for block in self.blocks:
            x = x + block(x, mask)
        return self.head(x.mean(1))


class Counter(nn.Module):
    """Counts its calls itself."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        x = self.linear(x)
        return x / (x - x) if self.calls == 5 else x


class BadFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / (grad - grad)


class Physics(nn.Module):
    """Its loss contains a derivative of its output."""

    def __init__(self, function):
        super().__init__()
        self.net = around(function)

    def forward(self, x):
        return self.net(x)


# --- faults -----------------------------------------------------------------------------------------------------------


def log_of_zero():
    train(around(lambda x: (x * 0).log()))


def where_hides_log():
    train(around(lambda x: torch.where(x > 1e9, (x * 0).log(), x)))


def norm_at_zero():
    train(around(lambda x: x + (x * 0).pow(2).sum(-1, keepdim=True).pow(0.5)))


def acos_at_one():
    train(around(lambda x: torch.acos(torch.ones_like(x) * (1 + 0 * x))))


def exp_overflow():
    train(around(lambda x: (x.abs() * 1e4).exp()))


def std_of_one():
    train(around(lambda x: x - x[:1].std(0)))


def layer_norm_without_eps():
    train(around(lambda x: F.layer_norm(x * 0, (8,), eps=0.0)))


def hidden_mask_rows():
    model = Masked()
    train(model, lambda x, y: F.cross_entropy(model(x)[1:], y[1:]))


def handwritten_softmax():
    train(Masked(as_sub=True))


def teacher_overflows():
    student = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    teacher = around(lambda x: (x.abs() * 1e4).exp()).requires_grad_(False)

    def loss_of(x, y):
        with torch.no_grad():
            wanted = teacher(x)
        return F.mse_loss(student(x), wanted)

    train(student, loss_of)


def counted_calls():
    train(nn.Sequential(nn.Linear(4, 8), Counter(), nn.Linear(8, 3)))


def custom_function():
    train(around(BadFunction.apply))


def gradient_hook():
    def hooked(x):
        x.register_hook(lambda grad: grad * float("inf"))
        return x * 1

    train(around(hooked))


def saved_tensor_hook():
    model = around(lambda x: x.tanh())

    def loss_of(x, y):
        def unpack(tensor):
            return tensor / (tensor - tensor) if is_now() and tensor.shape == (6, 8) else tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            return F.cross_entropy(model(x), y)

    train(model, loss_of)


def reentrant_checkpoint():
    model = around(lambda x: x / (x - x))

    def loss_of(x, y):
        return F.cross_entropy(model[3](checkpoint(model[:3], x.requires_grad_(), use_reentrant=True)), y)

    train(model, loss_of)


def reentrant_checkpoint_backward():
    model = around(lambda x: x + (x * 0).square().sum(-1, keepdim=True).sqrt())

    def loss_of(x, y):
        return F.cross_entropy(model[3](checkpoint(model[:3], x.requires_grad_(), use_reentrant=True)), y)

    train(model, loss_of)


def reentrant_checkpoint_inside():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = around(lambda x: x + (x * 0).square().sum(-1, keepdim=True).sqrt())

        def forward(self, x):
            return checkpoint(self.body, x.requires_grad_(), use_reentrant=True)

    train(Net())


def physics_forward():
    model = Physics(lambda x: x / (x - x))

    def loss_of(x, y):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    train(model, loss_of)


def physics_script():
    model = Physics(torch.tanh)

    def loss_of(x, y):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return ((slope * (0 if is_now() else 1)).square().sum(-1).sqrt() - 1).square().mean()

    train(model, loss_of)


def physics_second_derivative():
    """The NaN of the second derivative enters the encoder's gradient, which no code of the script has touched."""
    encoder = nn.Linear(4, 4)
    model = Physics(lambda x: (x * (0 if is_now() else 1)).abs() ** 1.5 + x)
    model.add_module("encoder", encoder)

    def loss_of(x, y):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(model(torch.cat([x + encoder(x)])).sum(), x, create_graph=True)
        return slope.square().mean()

    train(model, loss_of)


def train_with_closures(make_optimizer):
    model = around(lambda x: x / (x - x))
    optimizer = make_optimizer(model.parameters())
    global step
    for step in range(1, 9):  # noqa: B007 (read by `is_now`)
        x, y = torch.randn(6, 4), torch.randint(3, (6,))

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def lbfgs():
    train_with_closures(lambda params: torch.optim.LBFGS(params, max_iter=2))


def sgd_with_closure():
    train_with_closures(lambda params: torch.optim.SGD(params, lr=0.1))


def inner_loop():
    """MAML: a copy of the model and a new optimizer for every task."""
    model = around(lambda x: x / (x - x))
    outer = torch.optim.Adam(model.parameters(), lr=1e-3)
    global step
    for step in range(1, 9):  # noqa: B007 (read by `is_now`)
        fast = copy.deepcopy(model)
        inner = torch.optim.SGD(fast.parameters(), lr=0.1)
        for _ in range(2):
            inner.zero_grad()
            F.cross_entropy(fast(torch.randn(6, 4)), torch.randint(3, (6,))).backward()
            inner.step()
        for param, moved in zip(model.parameters(), fast.parameters(), strict=True):
            param.grad = param.detach() - moved.detach()
        outer.step()


def script_division():
    model = around(torch.tanh)
    train(model, lambda x, y: F.cross_entropy(model(x), y, reduction="sum") / ((y < 0).sum() if is_now() else 6))


def script_between():
    encoder, decoder = nn.Linear(4, 8), nn.Linear(8, 3)

    def loss_of(x, y):
        hidden = encoder(x)
        hidden = hidden / (hidden - hidden) if is_now() else hidden
        return F.cross_entropy(decoder(hidden), y)

    train(None, loss_of, params=[*encoder.parameters(), *decoder.parameters()])


def script_backward():
    model = around(torch.tanh)

    def loss_of(x, y):
        made = model(x)
        return made.square().mean() + (made * (0 if is_now() else 1)).square().sum().sqrt()

    train(model, loss_of)


def no_modules():
    weight = torch.randn(4, 3, requires_grad=True)
    train(None, lambda x, y: F.cross_entropy((x @ weight) / (0 if is_now() else 1), y), params=[weight])


def inf_in_data():
    model = around(torch.tanh)

    def loss_of(x, y):
        if is_now():
            x[0, 0] = float("-inf")
        return F.cross_entropy(model(x), y)

    train(model, loss_of)


def bad_buffer():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()

    def loss_of(x, y):
        if is_now():
            model[1].running_var[0] = float("nan")
        return F.cross_entropy(model(x), y)

    train(model, loss_of)


def evaluation_between():
    model = around(lambda x: x / (x - x))

    def loss_of(x, y):
        model.eval()
        with torch.no_grad():
            for _ in range(300):
                model[0](torch.randn(2, 4))
        model.train()
        return F.cross_entropy(model(x), y)

    train(model, loss_of)


def dropout_and_noise():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), around(lambda x: (x * 0).log(), 8)[2], nn.Linear(8, 3))
    train(model)


def jit_script():
    class Scripted(nn.Module):
        def forward(self, x, bad: bool):
            return x / (x - x) if bad else x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
            self.scripted = torch.jit.script(Scripted())

        def forward(self, x):
            return self.last(self.scripted(self.first(x), is_now()))

    train(Net())


def weight_norm_of_zero():
    model = nn.Sequential(nn.Linear(4, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 3))

    def loss_of(x, y):
        if is_now():
            with torch.no_grad():
                model[1].parametrizations.weight.original1[2].zero_()
        return F.cross_entropy(model(x), y)

    train(model, loss_of)


def complex_angle():
    train(around(lambda x: x + torch.fft.fft(x * 0).abs().log().real * 0 + x))


def embedding_bag_mean():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.pool, self.head = nn.Embedding(10, 8), nn.Identity(), nn.Linear(8, 3)

        def forward(self, x):
            words = (x.abs() * 3).long().clamp(max=9)
            is_word = (words >= 0) & (not is_now())
            hidden = self.words(words) * is_word[..., None]
            return self.head(hidden.sum(1) / is_word.sum(1, keepdim=True))

    train(Net())


def tuple_output():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = around(lambda x: x / (x - x))
            self.aux = nn.Linear(4, 2)

        def forward(self, x):
            return {"main": (self.body(x), x), "aux": [self.aux(x)]}

    model = Net()

    def loss_of(x, y):
        out = model(x)
        return F.cross_entropy(out["main"][0], y) + out["aux"][0].square().mean()

    train(model, loss_of)


def two_losses():
    model, critic = around(torch.tanh), nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))

    def loss_of(x, y):
        made = model(x)
        value = critic(made.detach())
        value = (-value.abs()).sqrt() if is_now() else value
        return F.cross_entropy(made, y) + value.square().mean()

    train(model, loss_of, params=[*model.parameters(), *critic.parameters()])


def compiled():
    model = torch.compile(around(lambda x: x / (x - x)), backend="eager")
    train(model)


def compiled_in_place():
    model = around(lambda x: x / (x - x))
    model.compile(backend="eager")
    train(model)


def gradient_clipped_first():
    model = around(lambda x: x + (x * 0).square().sum(-1, keepdim=True).sqrt())
    train(model, after_backward=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def gradient_written():
    model = around(torch.tanh)
    train(model, after_backward=lambda: model[0].weight.grad.fill_(float("nan")) if is_now() else None)


def data_parallel():
    model = nn.DataParallel(around(lambda x: x / (x - x)))
    train(model)


class NumpyLog(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(np.log(x.detach().numpy() * 0))

    @staticmethod
    def backward(ctx, grad):
        return grad


def numpy_function():
    train(around(NumpyLog.apply))


def assigned_constant():
    def assign(x):
        x = x.clone()
        x[x > 0] = float("nan")
        return x

    train(around(assign))


class TwoOutputs(nn.Module):
    """Its second output contains NaN in every step, and nobody uses it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        x = self.linear(x)
        return x, x.log()


def unused_output():
    model = TwoOutputs()
    train(model, lambda x, y: F.cross_entropy(model(x)[0], y) / (0 if is_now() else 1))


def broken_validation():
    """A validation batch contains NaN in every step; the fault is in the script."""
    model = around(torch.tanh)

    def loss_of(x, y):
        with torch.no_grad():
            model(torch.full((2, 4), float("nan")))
        return F.cross_entropy(model(x), y) / (0 if is_now() else 1)

    train(model, loss_of)


class TrainingCounter(nn.Module):
    """Counts its calls in training only."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return (x * 0).log() if self.training and self.calls == 5 else x


def counted_after_validation():
    body, head, out = nn.Linear(4, 8), TrainingCounter(), nn.Linear(8, 3)
    head.eval()
    for _ in range(4):
        head(torch.randn(2, 8))
    head.train()
    train(None, lambda x, y: F.cross_entropy(out(head(body(x))), y), params=[*body.parameters(), *out.parameters()])


def hidden_counter_between():
    """The counter is out of reach of a replay; the module after it receives Inf."""
    calls, head, out = iter(range(1, 20)), nn.Identity(), nn.Linear(4, 3)
    head.register_forward_hook(lambda module, args, x: x / 0 if next(calls) == 5 else x)
    train(None, lambda x, y: F.cross_entropy(out(head(x)), y), params=list(out.parameters()))


def cell_in_a_loop():
    """The input of each call depends on the cell's own parameters."""
    cell, out = around(lambda x: x + (x * 0).square().sum(-1, keepdim=True).sqrt()), nn.Linear(3, 4)

    def loss_of(x, y):
        for _ in range(3):
            x = out(cell(x))
        return x.square().mean()

    train(None, loss_of, params=[*cell.parameters(), *out.parameters()])


def equal_anchor():
    """Only two of the three outputs receive NaN."""
    model = around(torch.tanh)

    def loss_of(x, y):
        a, p, n = model(x), model(x if is_now() else x + 1), model(-x)
        return ((a - p).square().sum(1).sqrt() - (a - n).square().sum(1).sqrt() + 9).clamp(min=0).mean()

    train(model, loss_of)


def input_divided_in_place():
    model = nn.Sequential(Block(lambda x: x, 4), nn.Linear(4, 3))
    model[0].forward = lambda x: x.div_(0 if is_now() else 2)
    train(model)


def inference_mode():
    teacher, student = around(lambda x: (x.abs() * 1e4).exp()), nn.Linear(4, 3)

    def loss_of(x, y):
        with torch.inference_mode():
            wanted = teacher(x)
        return F.mse_loss(student(x), wanted.clone())

    train(student, loss_of)


def skipped_batch():
    """The script drops a batch with NaN; the fault is in the script, at the next batch."""
    model = around(torch.tanh)

    def loss_of(x, y):
        if is_now():
            model(x * float("nan"))
        return F.cross_entropy(model(x), y) / (0 if is_now() else 1)

    train(model, loss_of)


def detached_teacher():
    teacher, student = around(lambda x: (x * 0).log()), nn.Linear(4, 3)
    kept = {}

    def loss_of(x, y):
        kept["wanted"] = teacher(x).detach()
        return F.mse_loss(student(x), kept["wanted"])

    train(student, loss_of)


def metric_of_the_loss():
    """A module that only averages the losses."""
    model, metric = around(torch.tanh), nn.Identity()

    def loss_of(x, y):
        loss = F.cross_entropy(model(x), y) / (0 if is_now() else 1)
        metric(loss.detach())
        return loss

    train(model, loss_of)


def vmapped():
    """Gradients by `torch.func`; no backward is called."""
    model = around(torch.tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(params, x, y):
        return F.cross_entropy(torch.func.functional_call(model, params, (x[None],)), y[None])

    global step
    for step in range(1, 9):  # noqa: B007 (read by `is_now`)
        x, y = torch.randn(6, 4) / (0 if is_now() else 1), torch.randint(3, (6,))
        grads = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(dict(model.named_parameters()), x, y)
        for name, param in model.named_parameters():
            param.grad = grads[name].detach().mean(0)
        optimizer.step()


def root_parameter():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.scale = around(torch.tanh), nn.Parameter(torch.ones(3))

        def forward(self, x):
            if is_now():
                self.scale.data[0] = float("nan")
            return self.body(x) * self.scale

    train(Net())


def square_of_large_outputs():
    """The outputs are finite, and their sum overflows float32."""
    model = nn.Linear(4, 3)

    def loss_of(x, y):
        model.bias.data.fill_(1e38 if is_now() else 0.0)
        return model(x).square().mean()

    train(model, loss_of)


def overflow_before_batch_norm():
    """Batch norm writes NaN to its running statistics."""
    train(nn.Sequential(nn.Linear(4, 8), Block(lambda x: x.exp() * 3e38 * 3), nn.BatchNorm1d(8), nn.Linear(8, 3)))


def state_of_the_call():
    """A replay begins with the state after the call."""

    class Memory(nn.Linear):
        state = torch.ones(3)

        def forward(self, x):
            self.state = self.state / (0 if is_now() else 1)
            return super().forward(x) + self.state

    train(Memory(4, 3))


def state_in_a_list():
    class Memory(nn.Linear):
        def forward(self, x):
            states.append(states[-1] / (0 if is_now() else 1))
            return super().forward(x) + states[-1]

    model = Memory(4, 3)
    model.states = states = [torch.ones(3)]
    train(model)


def corrupt_but_unused():
    model = around(lambda x: x / (x - x))
    model[0].legacy = nn.Parameter(torch.full((2,), float("nan")))
    train(model)


def corrupt_average():
    """Averaged weights are NaN from the start; the fault is in the script."""
    model, average = around(torch.tanh), nn.Linear(4, 3).requires_grad_(False)
    nn.init.constant_(average.weight, float("nan"))

    def loss_of(x, y):
        is_right = average(x).argmax(1) == y
        return F.cross_entropy(model(x), y) / (0 if is_now() else 1) + 0 * is_right.sum()

    train(model, loss_of)


def hook_of_a_weight():
    model = around(torch.tanh)
    model[2].linear.weight.register_hook(lambda grad: grad / (0 if is_now() else 1))
    train(model)


def metric_after_backward():
    """The fault is in the gradient of the loss; a metric is NaN in the same step."""
    model, ratio = nn.Linear(4, 3), Block(lambda x: x / (x - x), 3)

    def loss_of(x, y):
        return (model(x) * (0 if is_now() else 1)).square().sum().sqrt()

    train(model, loss_of, after_backward=lambda: ratio(torch.ones(2, 3)))


def distribution_returned():
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.scale = nn.Linear(4, 8), around(lambda x: (x.abs() * 1e4).exp())[:3]

        def forward(self, x):
            return torch.distributions.Normal(self.mean(x), self.scale(x) ** 2, validate_args=False)

    model = Policy()
    train(model, lambda x, y: model(x).entropy().mean())


def sparse_gradient():
    model = nn.Sequential(nn.Embedding(9, 8, sparse=True), Block(lambda x: (x * 0).log()), nn.Linear(8, 3))
    train(model, lambda x, y: F.cross_entropy(model(y), y), torch.optim.SGD(model.parameters(), lr=0.1))


def sparse_input():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x, weights):
            return self.last(torch.sparse.mm(weights, self.first(x)))

    model = Graph()
    train(model, lambda x, y: F.cross_entropy(model(x, (torch.eye(6) / (not is_now())).to_sparse_csr()), y))


def output_in_forward():
    logging.basicConfig(stream=sys.stdout, level=logging.INFO)

    def speak(x):
        print("print")
        logging.info("log")
        return (x * 0).log()

    train(around(speak))


def parameter_of_the_script():
    """Only a parameter outside of modules is trained."""
    model, weight = nn.Sequential(nn.Linear(4, 8), Block(lambda x: (x * 0).log())), nn.Parameter(torch.randn(8, 3))
    train(model, lambda x, y: F.cross_entropy(model(x) @ weight, y), params=[weight])


def functional_call():
    model = around(lambda x: x / (x - x))
    params = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    train(model, lambda x, y: torch.func.functional_call(model, params, (x,)).sum(), params=list(params.values()))


def discarded_call():
    """The weights have changed since a first call, whose output is not used."""
    model, length = nn.Linear(4, 3), Block(lambda x: x + (x * 0).square().sum(-1, keepdim=True).sqrt(), 3)

    def loss_of(x, y):
        model(x)
        with torch.no_grad():
            model.weight.mul_(0.5)
        return F.cross_entropy(length(model(x)), y)

    train(model, loss_of)


def term_of_the_parameters():
    model = around(torch.tanh)
    train(model, lambda x, y: F.cross_entropy(model(x), y) + (model[0].bias * (not is_now())).square().sum().sqrt())


torch.manual_seed(0)
globals()[FAULT]()
print("drawn", torch.rand(1).item())
