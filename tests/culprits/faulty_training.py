"""Trains one of several models with one planted fault.

    [DEVICE=cuda] python faulty_training.py MODEL PRECISION STEPPING FAULT once|lasting

Only the STEPPINGs "dropin" and "control" use Gradilocks.
"""

import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

MODEL, PRECISION, STEPPING, FAULT, HOW_OFTEN = sys.argv[1:6]
DEVICE = os.environ.get("DEVICE", "cpu")
AT, STEPS = 6, 10
step = 0


def now(fault):
    """True if this fault happens at this step."""
    return fault == FAULT and (step == AT if HOW_OFTEN == "once" else step >= AT)


# --- models --------------------------------------------------------------------------------------


class Gate(nn.Module):
    """An activation that divides by zero at the faulty step, or overflows."""

    def __init__(self, bad=True):
        super().__init__()
        self.bad = bad

    def forward(self, x):
        y = F.gelu(x)
        if self.bad and now("forward"):
            return y / (y - y)
        if self.bad and now("power"):
            return torch.exp(y.abs() * 1e5)
        return y


class Length(nn.Module):
    """Adds the length of each vector, whose gradient at zero is 0 / 0."""

    def forward(self, x):
        kept = 0.0 if now("backward") else 1.0
        return x + (x * kept).square().sum(-1, keepdim=True).sqrt()


class Block(nn.Module):
    def __init__(self, dim, bad):
        super().__init__()
        self.bad = bad
        self.ln = nn.LayerNorm(dim)
        self.c_fc = nn.Linear(dim, 2 * dim)
        self.gate = Gate(bad)
        self.c_proj = nn.Linear(2 * dim, dim)
        self.length = Length() if bad else nn.Identity()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = self.ln(x)
        if self.bad and now("overflow"):
            y = y * 1e5  # More than float16 holds, and nothing to float32.
        return x + self.drop(self.length(self.c_proj(self.gate(self.c_fc(y)))))


class GPT(nn.Module):
    """Tied embeddings; returns its loss."""

    def __init__(self, dim=16, words=20):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(words, dim),
                "h": nn.ModuleList(Block(dim, bad=place == 1) for place in range(3)),
                "ln_f": nn.LayerNorm(dim),
            }
        )
        self.lm_head = nn.Linear(dim, words, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, words, targets):
        x = self.transformer.wte(words)
        for block in self.transformer.h:
            again = MODEL == "checkpointed"
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        logits = self.lm_head(self.transformer.ln_f(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class CNN(nn.Module):
    def __init__(self, inplace=False):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace))
        self.gate, self.length = Gate(), Length()
        self.act = nn.ReLU(inplace)
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x):
        return self.head(self.act(self.length(self.gate(self.stem(x)).flatten(1))))


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 8, batch_first=True)
        self.gate, self.length = Gate(), Length()
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.length(self.gate(self.lstm(x)[0][:, -1])))


class Parts(nn.Module):
    """An encoder and a decoder that the loop calls one after the other."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), Gate(), nn.Linear(8, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Length(), nn.Linear(8, 3))


class Attention(nn.Module):
    """A sequence in which every word is masked makes a softmax NaN."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, x):
        padded = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        padded[:, -1] = True
        padded[0] |= now("mask")
        x = self.embed(x)
        seen, _ = self.attend(x, x, x, key_padding_mask=padded)
        return self.head(self.norm(x + seen)[:, 0])


class Tuned(nn.Module):
    """A backbone that is not trained, and a head that is."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), Gate(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)
        self.backbone.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


class Labelled(nn.Module):
    """Takes everything by keyword, and returns a dictionary with the loss in it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), Gate(), Length())
        self.classifier = nn.Linear(8, 3)

    def forward(self, *, input_values, labels=None, output_hidden=False):
        hidden = self.body(input_values)
        logits = self.classifier(hidden)
        found = {"logits": logits, "hidden": hidden if output_hidden else None}
        return found if labels is None else {"loss": F.cross_entropy(logits, labels), **found}


class FocalLoss(nn.Module):
    """A loss module that takes a logarithm."""

    def forward(self, logits, targets):
        likely = logits.softmax(-1).gather(1, targets[:, None]).squeeze(1)
        if now("criterion"):
            likely = likely * 0.0
        return (-((1 - likely) ** 2) * likely.log()).mean()


def mlp():
    return nn.Sequential(nn.Linear(6, 16), Gate(), Length(), nn.Linear(16, 3))


MODELS = {
    "gpt": GPT,
    "checkpointed": GPT,
    "cnn": CNN,
    "inplace": lambda: CNN(inplace=True),
    "rnn": RNN,
    "parts": Parts,
    "attention": Attention,
    "tuned": Tuned,
    "labelled": Labelled,
}
SHAPES = {"cnn": (6, 1, 6, 6), "inplace": (6, 1, 6, 6), "rnn": (6, 4, 5), "attention": (6, 4, 5)}


# --- how it trains -------------------------------------------------------------------------------


torch.manual_seed(0)
model = MODELS.get(MODEL, mlp)()
if PRECISION == "bf16-weights":
    model = model.to(torch.bfloat16)
model = model.to(DEVICE)
weights = torch.ones(3, device=DEVICE)
criterion = FocalLoss()
trained = [param for param in model.parameters() if param.requires_grad]
if STEPPING == "sgd":
    optimizer = torch.optim.SGD(trained, lr=50 if FAULT == "rate" else 1e-2, momentum=0.9)
else:
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
scaler = torch.amp.GradScaler(DEVICE, enabled=STEPPING == "scaler", init_scale=1024.0)
control = None
if STEPPING == "dropin":
    import gradilocks

    scaler = gradilocks.GradScaler(DEVICE, init_scale=1024.0)
if STEPPING == "control":
    import gradilocks

    control = gradilocks.GradientControl(optimizer, model=model, clip=1.0)
MICRO = 2 if STEPPING == "accumulated" else 1
DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(PRECISION)


def batch():
    if MODEL in ("gpt", "checkpointed"):
        return torch.randint(20, (4, 6)).to(DEVICE), torch.randint(20, (4, 6)).to(DEVICE)
    x, y = torch.randn(SHAPES.get(MODEL, (6, 6))), torch.randint(3, (6,))
    if now("data"):
        x[0] = float("nan")
    return x.to(DEVICE), y.to(DEVICE)


def loss_of(x, y):
    with torch.autocast(DEVICE, dtype=DTYPE or torch.bfloat16, enabled=DTYPE is not None):
        if PRECISION == "bf16-weights" and x.is_floating_point():
            x = x.to(torch.bfloat16)
        if MODEL in ("gpt", "checkpointed"):
            loss = model(x, y)
        elif MODEL == "labelled":
            loss = model(input_values=x, labels=y)["loss"]
        elif MODEL == "focal":
            loss = criterion(model(x), y)
        elif MODEL == "mlp":
            wanted = F.one_hot(y, 3).float()
            if now("target"):
                wanted[0, 0] = float("inf")
            loss = F.mse_loss(model(x), wanted)
        elif MODEL == "parts":
            scores = model.decoder(model.encoder(x).relu())
            loss = F.cross_entropy(scores.float(), y, weight=weights)
        else:
            if now("class weights"):
                weights[1] = float("nan")
            loss = F.cross_entropy(model(x).float(), y, weight=weights)
        return loss * float("nan") if now("loss") else loss


def train():
    global step
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for _ in range(MICRO):
            loss = loss_of(*batch()) / MICRO
            if control is not None:
                control.backward(loss)
            else:
                scaler.scale(loss).backward()
        if control is not None:
            control.step()
        else:
            if now("gradient"):
                trained[2].grad.view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        with torch.no_grad():
            if now("weights"):
                trained[1].view(-1)[0] = float("nan")
            if now("state"):
                name = "momentum_buffer" if STEPPING == "sgd" else "exp_avg"
                optimizer.state[trained[1]][name].fill_(float("inf"))
            if now("schedule"):
                optimizer.param_groups[0]["lr"] = 1e30
        print(step, loss.item(), flush=True)


def train_gan():
    """Two models and two optimizers; each steps in every round."""
    global step
    generator = nn.Sequential(nn.Linear(3, 8), Gate(), nn.Linear(8, 6)).to(DEVICE)
    critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), Length(), nn.Linear(8, 1)).to(DEVICE)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    bce = nn.BCEWithLogitsLoss()
    real, fake = torch.ones(4, 1, device=DEVICE), torch.zeros(4, 1, device=DEVICE)
    for step in range(1, STEPS + 1):
        critic.zero_grad()
        bce(critic(torch.randn(4, 6).to(DEVICE)), real).backward()
        made = generator(torch.randn(4, 3).to(DEVICE))
        critic_loss = bce(critic(made.detach()), fake)
        critic_loss.backward()
        critic_optimizer.step()
        generator.zero_grad()
        generator_loss = bce(critic(made), real)
        generator_loss.backward()
        generator_optimizer.step()
        print(step, critic_loss.item(), generator_loss.item(), flush=True)


def train_policy():
    """Policy gradient over a few moves; the returns of a single move have no standard deviation."""
    global step
    policy = model
    for step in range(1, STEPS + 1):
        state, chosen, rewards = torch.randn(6).to(DEVICE), [], []
        for _ in range(1 if now("rewards") else 4):
            likely = policy(state).log_softmax(-1)
            action = torch.multinomial(likely.exp().detach(), 1)
            chosen.append(likely[action])
            rewards.append(float(action))
            state = torch.randn(6).to(DEVICE)
        returns = torch.tensor(rewards, device=DEVICE)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        loss = -(torch.cat(chosen) * returns).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item(), flush=True)
        if not loss.isfinite():
            break


{"gan": train_gan, "policy": train_policy}.get(MODEL, train)()
print("drawn", torch.rand(1).item())
