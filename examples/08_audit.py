"""Will fp16 hold the gradients, and with which loss scale? Ask before training.

The loss is divided by 8192, as with 8192 micro-batches a step; one stands for all of them here. In
float32 that is of no matter; in fp16 most gradients would round to zero. The audit says so, finds
the scale, and a short training in emulated fp16 shows that it was right.
"""

import torch
from torch import nn
from torch.nn import functional as F

import gradilocks

MICRO_BATCHES = 8192


def make_model():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)]
    return nn.Sequential(*layers)


def draw(generator):
    inputs = torch.randn(256, 16, generator=generator)
    return inputs, inputs[:, :4].cumsum(1).argmax(1)


def loss_fn(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets) / MICRO_BATCHES


generator = torch.Generator().manual_seed(1)
found = gradilocks.audit(make_model(), loss_fn, [draw(generator) for _ in range(8)])
print(found)


def train(format, scale):
    model, generator = make_model(), torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    control = gradilocks.GradientControl(optimizer, model=model, scale=scale)
    for _ in range(200):
        with gradilocks.emulate(format):
            loss = loss_fn(model, draw(generator))
        control.backward(loss)
        control.unscale_()
        for param in model.parameters():
            param.grad.mul_(MICRO_BATCHES)  # The sum over all of them.
        control.step()
        control.zero_grad()
    return loss.item() * MICRO_BATCHES


print()
print(f"float32:                    {train('fp32', None):.4f}")
print(f"fp16 without a scale:       {train('fp16', None):.4f}")
scale = gradilocks.DynamicScale(init_scale=found.initial_scale)
print(f"fp16 as recommended:        {train('fp16', scale):.4f}")
