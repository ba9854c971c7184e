"""A small GPT in the style of nanoGPT, with a fault that the command line plants.

    small_gpt.py PRECISION FAULT FROM [TO]

PRECISION is fp32, bf16 (autocast), scaler (torch's GradScaler) or control (GradientControl). FAULT
is the place: gelu0, gelu1, gelu2, ln_f, loss, grad (of h.1.mlp.c_fc.weight), weight (of
h.1.attn.c_proj), overflow (a gradient that turns Inf in backward alone) or none. It is there at the
steps FROM to TO, or for good. Prints whether a step of these has moved a parameter.
"""

import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

precision, fault = sys.argv[1:3]
begin = int(sys.argv[3])
end = int(sys.argv[4]) if len(sys.argv) > 4 else 10**9
steps = 60
now = 0


def bad(place):
    return fault == place and begin <= now <= end


class GELU(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        return F.gelu(x) * (math.inf if bad(f"gelu{self.number}") else 1.0)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (p.view(rows, length, self.heads, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(rows, length, width))


class MLP(nn.Module):
    def __init__(self, width, number):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.gelu = GELU(number)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width, heads, number):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width), MLP(width, number)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary=32, length=16, width=16, heads=2, layers=3):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(length, width),
                "h": nn.ModuleList([Block(width, heads, i) for i in range(layers)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, tokens, targets):
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.size(1)))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x) * (math.inf if bad("ln_f") else 1.0)
        logits = self.lm_head(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def spoil(gradient):
    if bad("grad"):
        gradient = gradient.clone()
        gradient[0, 0] = math.nan
    return gradient


def overflow(gradient):
    return gradient * math.inf if bad("overflow") else gradient


torch.manual_seed(1337)
model = GPT()
model.transformer.h[1].mlp.c_fc.weight.register_hook(spoil)
model.transformer.h[2].ln_1.register_full_backward_hook(
    lambda module, inputs, outputs: tuple(map(overflow, inputs))
)
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3
)
scaler = torch.amp.GradScaler("cpu", enabled=precision == "scaler")
control = None
if precision == "control":
    import gradilocks

    control = gradilocks.GradientControl(optimizer, model=model, scale=None, give_up_after=None)
moved = False
for now in range(1, steps + 1):
    if fault == "weight" and now == begin:
        with torch.no_grad():
            model.transformer.h[1].attn.c_proj.weight[0, 0] = math.nan
    tokens = torch.randint(0, 32, (4, 16))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model(tokens, tokens.roll(-1, 1))
    if bad("loss"):
        loss = loss * math.nan
    before = [p.detach().clone() for p in model.parameters()]
    if control is not None:
        control.backward(loss)
        control.step()
    else:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer) if precision == "scaler" else None
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if begin <= now <= end:
        pairs = zip(before, model.parameters(), strict=True)
        moved |= not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
print("moved" if moved else "as they were")
