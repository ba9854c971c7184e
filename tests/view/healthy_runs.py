"""Healthy trainings of many kinds, in plain torch; a warning about any of them is a false alarm."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Train = Callable[[], object]
HEALTHY: dict[str, Train] = {}


def healthy(train: Train) -> Train:
    HEALTHY[train.__name__] = train
    return train


# --- models and data -----------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).unsqueeze(1).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.c_proj(attended)
        return x + self.mlp(self.ln_2(x))


class TiedGPT(nn.Module):
    """A small GPT whose head shares its weight with the embedding."""

    def __init__(self, vocabulary: int = 64, width: int = 24, layers: int = 2) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(32, width),
                "h": nn.ModuleList(Block(width) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        for name, param in self.named_parameters():
            if param.dim() > 1:
                small = math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(param, std=0.02 / small)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        wte, wpe = self.transformer["wte"], self.transformer["wpe"]
        x = wte(tokens) + wpe(torch.arange(tokens.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


def sentences(rows: int, length: int = 16, vocabulary: int = 64) -> Tensor:
    """Tokens that follow from the one before by a rule, with noise."""
    tokens = torch.randint(vocabulary, (rows, 1))
    for _ in range(length):
        following = (tokens[:, -1:] * 5 + 7) % vocabulary
        other = torch.randint(vocabulary, (rows, 1))
        tokens = torch.cat([tokens, torch.where(torch.rand(rows, 1) < 0.1, other, following)], 1)
    return tokens


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def classes(rows: int, *, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Noisy points around one centre per class."""
    centres = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)) * 2
    labels = torch.randint(4, (rows,))
    return centres[labels] + noise * torch.randn(rows, 16), labels


def pictures(rows: int) -> tuple[Tensor, Tensor]:
    """Noisy stripes in one of four directions."""
    labels = torch.randint(4, (rows,))
    down, right = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    ways = torch.stack([down, right, down + right, down - right])
    return (torch.sin(1.5 * ways[labels]) + 0.5 * torch.randn(rows, 8, 8)).unsqueeze(1), labels


def mlp(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for begin, end in pairwise(widths):
        layers += [nn.Linear(begin, end), activation()]
    return nn.Sequential(*layers[:-1])


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def classify(
    steps: int,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    rows: int = 32,
    noise: float = 2.0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Trains a classifier for some steps."""
    for _ in range(steps):
        x, y = classes(rows, noise=noise)
        update(optimizer, F.cross_entropy(model(x.to(dtype)), y))


# --- language ------------------------------------------------------------------------------------


@healthy
def gpt_with_tied_embeddings() -> None:
    model = TiedGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warm, steps = 20, 120
    rate = lambda n: min((n + 1) / warm, 0.1 + 0.9 * (1 + math.cos(math.pi * n / steps)) / 2)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for _ in range(steps):
        loss = next_token(model, sentences(16))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()


@healthy
def gpt_during_its_warm_up_only() -> None:
    model = TiedGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for step in range(60):
        optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1) / 2000
        update(optimizer, next_token(model, sentences(8)))


@healthy
def gpt_in_bfloat16_with_accumulation() -> None:
    model = TiedGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(120):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = next_token(model, sentences(8)) / 2
        loss.backward()
        if (step + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


@healthy
def recurrent_network() -> None:
    embed, cell, head = nn.Embedding(32, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 32)
    model = nn.ModuleDict({"embed": embed, "lstm": cell, "head": head})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(120):
        tokens = sentences(8, 12, 32)
        hidden, _ = cell(embed(tokens[:, :-1]))
        loss = F.cross_entropy(head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


@healthy
def sparse_embeddings() -> None:
    table, head = nn.Embedding(500, 16, sparse=True), nn.Linear(16, 4)
    rows = torch.optim.SparseAdam(table.parameters(), lr=1e-2)
    dense = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(120):
        words = torch.randint(500, (64, 5))
        loss = F.cross_entropy(head(table(words).mean(1)), words[:, 0] % 4)
        rows.zero_grad()
        dense.zero_grad()
        loss.backward()
        rows.step()
        dense.step()


# --- pictures ------------------------------------------------------------------------------------


@healthy
def cnn_with_batch_norm() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for _ in range(150):
        images, labels = pictures(32)
        update(optimizer, F.cross_entropy(model(images), labels))


@healthy
def gan() -> None:
    generator, critic = mlp(4, 32, 32, 2), mlp(2, 32, 32, 1, activation=lambda: nn.LeakyReLU(0.2))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    real_label, fake_label = torch.ones(32, 1), torch.zeros(32, 1)
    for _ in range(200):
        angle = torch.rand(32) * 2 * math.pi
        real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(32, 2)
        d_optimizer.zero_grad()
        fake = generator(torch.randn(32, 4))
        bce(critic(real), real_label).backward()
        bce(critic(fake.detach()), fake_label).backward()
        d_optimizer.step()
        update(g_optimizer, bce(critic(fake), real_label))


@healthy
def wasserstein_gan() -> None:
    generator, critic = mlp(4, 32, 2), mlp(2, 32, 1)
    g_optimizer = torch.optim.RMSprop(generator.parameters(), lr=5e-4)
    c_optimizer = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
    for _ in range(120):
        real, fake = torch.randn(32, 2) * 0.3 + 1, generator(torch.randn(32, 4))
        update(c_optimizer, critic(fake.detach()).mean() - critic(real).mean())
        for param in critic.parameters():
            param.data.clamp_(-0.1, 0.1)
        update(g_optimizer, -critic(fake).mean())


@healthy
def diffusion_model() -> None:
    model = mlp(3, 64, 64, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(200):
        clean = torch.randn(32, 2) * 0.1 + torch.tensor([1.0, 0.0])
        time, noise = torch.rand(32, 1), torch.randn(32, 2)
        noisy = (1 - time).sqrt() * clean + time.sqrt() * noise
        update(optimizer, F.mse_loss(model(torch.cat([noisy, time], 1)), noise))


@healthy
def variational_autoencoder() -> None:
    encode, decode = mlp(16, 32, 8), mlp(4, 32, 16)
    optimizer = torch.optim.Adam([*encode.parameters(), *decode.parameters()], lr=3e-3)
    for _ in range(150):
        x, _ = classes(64)
        mean, log_var = encode(x).chunk(2, dim=1)
        drawn = mean + torch.randn_like(mean) * (log_var / 2).exp()
        kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
        loss = F.mse_loss(decode(drawn), x, reduction="sum") / 64 + kl
        update(optimizer, loss)


# --- reinforcement learning ----------------------------------------------------------------------


def pretrain(model: nn.Module, steps: int, *, lr: float, noise: float = 1.0) -> None:
    """Trains a classifier without an optimizer, so that nothing of it is recorded."""
    for _ in range(steps):
        x, y = classes(64, noise=noise)
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        with torch.no_grad():
            for param, grad in zip(model.parameters(), grads, strict=True):
                param -= lr * grad


# --- fine-tuning, schedules and optimizers --------------------------------------------------------------------------


@healthy
def fine_tuning_with_frozen_layers() -> None:
    model = mlp(16, 64, 64, 4)
    for param in model[0].parameters():
        param.requires_grad = False
    classify(120, torch.optim.AdamW(model.parameters(), lr=1e-3), model)  # With the frozen ones.


@healthy
def low_rank_adapters() -> None:
    base = mlp(16, 64, 4)
    pretrain(base, 100, lr=0.1)
    base.requires_grad_(False)
    down, up = nn.Linear(16, 4, bias=False), nn.Linear(4, 64, bias=False)
    nn.init.zeros_(up.weight)
    optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()], lr=1e-2)
    for _ in range(120):
        x, y = classes(64)
        hidden = base[0](x) + up(down(x))
        loss = F.cross_entropy(base[2](base[1](hidden)), (y + 1) % 4)
        update(optimizer, loss)


@healthy
def float16_with_a_scale_that_settles() -> None:
    model = mlp(16, 64, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=100)
    for _ in range(150):
        x, y = classes(32, noise=2.0)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()


@healthy
def differential_equation() -> None:
    model = mlp(1, 32, 32, 1, activation=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    domain = torch.linspace(0, 1, 64)[:, None]
    for _ in range(150):
        at = domain.clone().requires_grad_()
        value = model(at)
        (slope,) = torch.autograd.grad(value.sum(), at, create_graph=True)
        begin = (model(torch.zeros(1, 1)) - 1).square().mean()
        update(optimizer, (slope + value).square().mean() + begin)


@healthy
def lbfgs_with_a_closure() -> None:
    model = mlp(2, 16, 1, activation=nn.Tanh)
    x = torch.rand(64, 2)
    y = (x[:, :1] * 3).sin() + x[:, 1:]
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(40):
        optimizer.step(closure)


@healthy
def one_sample_per_batch() -> None:
    model = mlp(16, 32, 4)
    classify(400, torch.optim.SGD(model.parameters(), lr=0.01), model, rows=1, noise=3.0)


@healthy
def regression_to_a_loss_near_zero() -> None:
    model = nn.Linear(8, 1)
    truth = torch.randn(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x = torch.randn(64, 8)
    for _ in range(400):
        update(optimizer, F.mse_loss(model(x), x @ truth))


@healthy
def a_tiny_model() -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(12):
        update(optimizer, ((weight - 3) ** 2).sum())


@healthy
def a_deep_net_without_residuals() -> None:
    model = mlp(16, *[32] * 6, 4, activation=nn.Tanh)
    classify(200, torch.optim.Adam(model.parameters(), lr=1e-3), model, noise=1.0)


@healthy
def mixture_of_experts() -> None:
    gate, experts = nn.Linear(16, 4), nn.ModuleList(mlp(16, 32, 4) for _ in range(4))
    model = nn.ModuleDict({"gate": gate, "experts": experts})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        x, y = classes(32, noise=2.0)
        weights, chosen = gate(x).softmax(1).max(1)
        rows = torch.stack([experts[int(k)](x[i]) for i, k in enumerate(chosen)])
        loss = F.cross_entropy(rows * weights[:, None] * 4, y)
        update(optimizer, loss)


@healthy
def weights_in_bfloat16() -> None:
    model = mlp(16, 64, 4).to(torch.bfloat16)
    classify(150, torch.optim.SGD(model.parameters(), lr=0.1), model, dtype=torch.bfloat16)


# --- losses that do not simply fall -----------------------------------------------------------------------------------


@healthy
def proximal_policy_optimization() -> None:
    model = mlp(4, 64, 4)  # Three logits and a value.
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for _ in range(40):
        state = torch.randn(64, 4)
        with torch.no_grad():
            old = model(state)
            action = torch.distributions.Categorical(logits=old[:, :3]).sample()
            old_log = old[:, :3].log_softmax(1).gather(1, action[:, None]).squeeze(1)
        reward = 10 * (action == state[:, :3].argmax(1)).float()
        advantage = reward - old[:, 3]
        for _ in range(4):
            out = model(state)
            ratio = (out[:, :3].log_softmax(1).gather(1, action[:, None]).squeeze(1) - old_log).exp()
            policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = policy + 0.5 * F.mse_loss(out[:, 3], reward)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


@healthy
def divergence_from_a_reference_that_begins_at_zero() -> None:
    model = mlp(4, 32, 3)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(200):
        state = torch.randn(64, 4)
        log, base = model(state).log_softmax(1), reference(state).log_softmax(1).detach()
        reward = (state[:, :3].argmax(1)[:, None] == torch.arange(3)).float()
        advantage = reward - reward.mean(1, keepdim=True)
        weight = (log - log.detach()).exp() * advantage
        loss = 0.1 * F.kl_div(log, base, log_target=True, reduction="batchmean") - weight.mean()
        update(optimizer, loss)


@healthy
def values_that_grow_with_the_targets() -> None:
    model = mlp(3, 64, 1)
    target = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(400):
        state = torch.rand(64, 3)
        with torch.no_grad():
            wanted = 1 + 0.99 * target(0.9 * state + 0.1 * torch.rand(64, 3))
        update(optimizer, F.mse_loss(model(state), wanted))
        if step % 10 == 0:
            target.load_state_dict(model.state_dict())


@healthy
def model_agnostic_meta_learning() -> None:
    model = mlp(1, 32, 32, 1, activation=nn.Tanh)
    outer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        outer.zero_grad()
        for _ in range(2):
            phase = math.pi * torch.rand(1)
            x, test = 10 * torch.rand(10, 1) - 5, 10 * torch.rand(10, 1) - 5
            fast = copy.deepcopy(model)
            inner = torch.optim.SGD(fast.parameters(), lr=0.01)
            for _ in range(2):
                update(inner, F.mse_loss(fast(x), (x + phase).sin()))
            fast.zero_grad()
            F.mse_loss(fast(test), (test + phase).sin()).backward()
            for param, copied in zip(model.parameters(), fast.parameters(), strict=True):
                param.grad = copied.grad.clone() if param.grad is None else param.grad + copied.grad
        outer.step()


@healthy
def a_curriculum_that_begins_with_a_loss_near_zero() -> None:
    model = mlp(16, 64, 4)
    pretrain(model, 300, lr=0.5, noise=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(300):
        classify(1, optimizer, model, noise=0.1 + step / 60)


@healthy
def a_second_task_after_the_first() -> None:
    model = mlp(16, 64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(150):
        x, y = classes(32)
        update(optimizer, F.cross_entropy(model(x), y if step < 130 else (y + 1) % 4))


@healthy
def triplets_that_are_soon_solved() -> None:
    encoder = mlp(16, 64, 8)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    for _ in range(200):
        (x, y), (other, z) = classes(32, noise=0.3), classes(32, noise=0.3)
        positive = x + 0.1 * torch.randn_like(x)
        loss = F.triplet_margin_loss(*map(encoder, (x, positive, torch.where((y == z)[:, None], -x, other))))
        update(optimizer, loss)


@healthy
def a_hinge_loss_that_is_solved_in_a_few_steps() -> None:
    model = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        x, y = classes(32, noise=0.1)
        update(optimizer, (1 - model(x).squeeze(1) * (2.0 * (y == 0) - 1)).clamp(min=0).mean())


@healthy
def a_density_whose_loss_falls_far_below_zero() -> None:
    model = mlp(1, 32, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(400):
        x = torch.rand(64, 1)
        mean, log_std = model(x).chunk(2, dim=1)
        loss = 50 * (0.5 * ((x - mean) / log_std.exp()) ** 2 + log_std).mean()
        update(optimizer, loss)


@healthy
def actor_and_critic() -> None:
    actor, critic = mlp(4, 32, 3), mlp(4, 32, 1)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
    for _ in range(150):
        state = torch.randn(32, 4)
        chosen = torch.distributions.Categorical(logits=actor(state))
        action = chosen.sample()
        reward = (action == state[:, :3].argmax(1)).float()
        value = critic(state).squeeze(1)
        update(critic_optimizer, F.mse_loss(value, reward))
        update(actor_optimizer, (-chosen.log_prob(action) * (reward - value.detach())).mean())


@healthy
def early_stopping() -> None:
    model = mlp(16, 64, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    best, patience = math.inf, 0
    for _ in range(300):
        classify(1, optimizer, model, noise=3.0)
        with torch.no_grad():
            x, y = classes(64, noise=3.0)
            score = float(F.cross_entropy(model(x), y))
        best, patience = min(best, score), 0 if score < best else patience + 1
        if patience == 15:
            break


@healthy
def a_loss_term_that_is_switched_on_later() -> None:
    """Norm and loss jump, and the new term never falls far: "did not recover from a spike" was an alarm."""
    model = mlp(16, 64, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(200):
        x, y = classes(32)
        loss = F.cross_entropy(model(x), y)
        if step >= 100:
            loss = loss + 100 * F.cross_entropy(model(torch.randn(64, 16)), torch.randint(4, (64,)))
        update(optimizer, loss)


@healthy
def cyclic_learning_rate() -> None:
    model = mlp(16, 64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.0, 0.2, step_size_up=20)
    for _ in range(200):
        classify(1, optimizer, model, noise=3.0)
        schedule.step()


@healthy
def one_cycle_with_a_decay_to_almost_nothing() -> None:
    model = mlp(16, 64, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=200)
    for _ in range(200):
        classify(1, optimizer, model, noise=3.0)
        schedule.step()


@healthy
def training_that_continues_from_good_weights() -> None:
    model = mlp(16, 64, 4)
    with torch.no_grad():
        model[2].weight *= 0.1
    pretrain(model, 400, lr=0.05, noise=3.0)
    classify(300, torch.optim.AdamW(model.parameters(), lr=1e-5), model, noise=3.0)


@healthy
def lbfgs_that_converges_early() -> None:
    weight = torch.zeros(4, requires_grad=True)
    truth = torch.tensor([1.0, -2.0, 3.0, 0.5])
    optimizer = torch.optim.LBFGS([weight], lr=1.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = ((weight - truth) ** 2).sum()
        loss.backward()
        return loss

    for _ in range(150):
        optimizer.step(closure)


@healthy
def lbfgs_that_converges_to_a_loss_above_zero() -> None:
    model = nn.Linear(16, 4)
    x, y = classes(128, noise=3.0)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + 0.01 * model.weight.square().sum()
        loss.backward()
        return loss

    for _ in range(60):
        optimizer.step(closure)


@healthy
def sparse_autoencoder() -> None:
    encode, decode = nn.Linear(16, 256), nn.Linear(256, 16)
    optimizer = torch.optim.Adam([*encode.parameters(), *decode.parameters()], lr=1e-3)
    for _ in range(200):
        x, _ = classes(16, noise=0.3)
        hidden = encode(x).relu()
        top = hidden.topk(4, dim=1)
        code = torch.zeros_like(hidden).scatter(1, top.indices, top.values)
        update(optimizer, F.mse_loss(decode(code), x))


@healthy
def heads_that_take_turns() -> None:
    body, heads = mlp(16, 64, 64), [nn.Linear(64, 4) for _ in range(8)]
    optimizer = torch.optim.Adam([p for module in (body, *heads) for p in module.parameters()], lr=3e-3)
    for step in range(200):
        x, y = classes(32)
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(heads[step % 8](body(x).relu()), (y + step % 8) % 4).backward()
        optimizer.step()


@healthy
def a_sum_over_the_batch_with_large_gradients() -> None:
    model = nn.Linear(16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(200):
        x, _ = classes(256)
        optimizer.zero_grad()
        F.mse_loss(1000 * model(x), 1000 * x[:, :1], reduction="sum").backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@healthy
def rare_batches_with_large_gradients() -> None:
    model = mlp(16, 64, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(300):
        x, y = classes(32, noise=2.0)
        update(optimizer, F.cross_entropy(model(x * (5 if step % 90 == 89 else 1)), y))


@healthy
def word_vectors() -> None:
    table = nn.Embedding(2000, 16)
    optimizer = torch.optim.Adam(table.parameters(), lr=1e-2)
    for _ in range(150):
        word = torch.randint(2000, (64,))
        near, far = (word + 1) % 2000, torch.randint(2000, (64,))
        positive, negative = ((table(word) * table(other)).sum(1) for other in (near, far))
        update(optimizer, (F.softplus(-positive) + F.softplus(negative)).mean())


@healthy
def rare_words_whose_loss_hardly_falls() -> None:
    """ "Gradients are mostly zero: units may be dead" was an alarm."""
    table, head = nn.Embedding(5000, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*table.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(120):
        word = torch.randint(5000, (32,))
        update(optimizer, F.cross_entropy(head(table(word)), word % 2))


@healthy
def a_critic_whose_gradients_grow_smoothly() -> None:
    """ "Gradients add up from step to step" was an alarm."""
    generator, critic = mlp(4, 16, 2), mlp(2, 128, 128, 1, activation=lambda: nn.LeakyReLU(0.2))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4)
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3)
    bce = nn.BCEWithLogitsLoss()
    for _ in range(200):
        real, fake = torch.randn(64, 2) * 0.1 + 5, generator(torch.randn(64, 4))
        c_optimizer.zero_grad()
        (bce(critic(real), torch.ones(64, 1)) + bce(critic(fake.detach()), torch.zeros(64, 1))).backward()
        c_optimizer.step()
        g_optimizer.zero_grad()
        bce(critic(fake), torch.ones(64, 1)).backward()
        g_optimizer.step()


@healthy
def a_loss_weight_that_grows_over_a_full_batch() -> None:
    model, (x, y) = mlp(16, 32, 1), classes(256)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for step in range(100):
        optimizer.zero_grad()
        ((step + 1) / 100 * F.mse_loss(model(x).squeeze(1), 5 + y.float())).backward()
        optimizer.step()


@healthy
def gradients_written_by_hand_as_in_reptile() -> None:
    """ "Gradients are not cleared" would be an alarm about the outer optimizer."""
    model = mlp(1, 16, 1)
    outer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        twin = copy.deepcopy(model)
        inner = torch.optim.SGD(twin.parameters(), lr=0.02)
        for _ in range(3):
            x = torch.rand(16, 1) * 6 - 3
            inner.zero_grad()
            F.mse_loss(twin(x), (1 + step % 4) * x.sin()).backward()
            inner.step()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            param.grad = param.detach() - other.detach()
        outer.step()


@healthy
def a_plateau_that_lowers_the_learning_rate_to_nothing() -> None:
    """The typical update is tiny; those of the beginning were not."""
    model = mlp(16, 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 1e-2 if step < 60 else 1e-9
        classify(1, optimizer, model, noise=6.0)


@healthy
def a_reward_that_is_maximized() -> None:
    weight = nn.Parameter(torch.full((8,), 0.01))
    optimizer = torch.optim.Adam([weight], lr=0.1, maximize=True)
    for _ in range(200):
        optimizer.zero_grad()
        (torch.rand(32, 8) @ weight).mean().backward()
        optimizer.step()


@healthy
def gradient_descent_that_arrives_above_zero() -> None:
    weight = nn.Parameter(torch.tensor([5.0, 3.0]))
    optimizer = torch.optim.SGD([weight], lr=0.4995)
    for _ in range(200):
        optimizer.zero_grad()
        ((weight - 1).square().sum() + 7).backward()
        optimizer.step()


def _few_steps(steps: int) -> Train:
    def train() -> None:
        model = mlp(16, 8, 4)
        classify(steps, torch.optim.AdamW(model.parameters(), lr=1e-3), model)

    return train


for _steps in range(1, 6):
    HEALTHY[f"a_run_of_{_steps}_steps"] = _few_steps(_steps)
