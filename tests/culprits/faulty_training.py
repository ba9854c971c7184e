"""A script that trains one of several models and makes one planted mistake, in a stranger's style.

    python faulty_training.py MODEL PRECISION STEPPING FAULT once|lasting

It knows nothing of Gradilocks but where STEPPING is a part of it.
"""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

MODEL, PRECISION, STEPPING, FAULT, HOW_OFTEN = sys.argv[1:6]
AT, STEPS = 6, 10
step = 0


def now(fault):
    """Whether this fault is to happen at this step."""
    return fault == FAULT and (step == AT if HOW_OFTEN == "once" else step >= AT)


class Gate(nn.Module):
    """An activation that divides by zero when its time has come."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def forward(self, x):
        y = F.gelu(x)
        return y / (y - y) if self.bad and now("forward") else y


class Length(nn.Module):
    """The length of vectors, whose gradient at zero is 0 / 0."""

    def forward(self, x):
        kept = 0.0 if now("backward") else 1.0
        return x + (x * kept).square().sum(-1, keepdim=True).sqrt()


class Block(nn.Module):
    def __init__(self, dim, bad):
        super().__init__()
        self.ln = nn.LayerNorm(dim)
        self.c_fc = nn.Linear(dim, 2 * dim)
        self.gate = Gate(bad)
        self.c_proj = nn.Linear(2 * dim, dim)
        self.length = Length() if bad else nn.Identity()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.length(self.c_proj(self.gate(self.c_fc(self.ln(x))))))


class GPT(nn.Module):
    """Tied embeddings, loss inside."""

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
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.gate, self.length = Gate(bad=True), Length()
        self.head = nn.Linear(4 * 16, 3)

    def forward(self, x):
        return self.head(self.length(self.gate(self.stem(x)).flatten(1)))


class RNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 8, batch_first=True)
        self.gate, self.length = Gate(bad=True), Length()
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.length(self.gate(self.lstm(x)[0][:, -1])))


class Parts(nn.Module):
    """An encoder and a decoder that the loop calls one after the other."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), Gate(bad=True), nn.Linear(8, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Length(), nn.Linear(8, 3))


def batch():
    if MODEL == "gpt":
        return torch.randint(20, (4, 6)), torch.randint(20, (4, 6))
    shape = {"cnn": (6, 1, 6, 6), "rnn": (6, 4, 5), "parts": (6, 6)}[MODEL]
    x = torch.randn(shape)
    if now("data"):
        x[0] = float("nan")
    return x, torch.randint(3, (6,))


torch.manual_seed(0)
model = {"gpt": GPT, "cnn": CNN, "rnn": RNN, "parts": Parts}[MODEL]()
if PRECISION == "bf16-weights":
    model = model.to(torch.bfloat16)
weights = torch.ones(3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if STEPPING == "sgd":
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", enabled=STEPPING == "scaler", init_scale=1024.0)
control = None
if STEPPING == "dropin":
    import gradilocks

    scaler = gradilocks.GradScaler("cpu", init_scale=1024.0)
if STEPPING == "control":
    import gradilocks

    control = gradilocks.GradientControl(optimizer, model=model, clip=1.0)
MICRO = 2 if STEPPING == "accumulated" else 1
DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(PRECISION)


def loss_of(x, y):
    with torch.autocast("cpu", dtype=DTYPE or torch.bfloat16, enabled=DTYPE is not None):
        if PRECISION == "bf16-weights" and x.is_floating_point():
            x = x.to(torch.bfloat16)
        if MODEL == "gpt":
            loss = model(x, y)
        elif MODEL == "parts":
            loss = F.cross_entropy(
                model.decoder(model.encoder(x).relu()).float(), y, weight=weights
            )
        else:
            loss = F.cross_entropy(model(x).float(), y, weight=weights)
        return loss * float("nan") if now("loss") else loss


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
            list(model.parameters())[2].grad.view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        if now("weights"):
            list(model.parameters())[1].view(-1)[0] = float("nan")
        if now("state"):
            first = list(model.parameters())[1]
            optimizer.state[first]["exp_avg"].fill_(float("inf"))
        if now("rate"):
            optimizer.param_groups[0]["lr"] = 1e30
    print(step, loss.item(), flush=True)
print("drawn", torch.rand(1).item())
