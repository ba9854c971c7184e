"""Drop-in: the same loop with torch's scaler and with ours, and the name of what overflowed.

Only the names differ. A loss that is a million times too large makes one step overflow.
What is left between the two is rounding: our norm is added up more precisely.
"""

import torch
from torch import nn

import gradilocks

STEPS, TOO_LARGE_AT = 30, 12


def train(make_scaler, clip_grad_norm_):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = make_scaler(model)
    for step in range(STEPS):
        inputs, targets = torch.randn(32, 16), torch.randn(32, 4)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(inputs).float() - targets).square().mean()
        if step == TOO_LARGE_AT:
            loss = loss * 1e6
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm=0.5)
        scaler.step(optimizer)
        outcome = getattr(scaler, "outcome", None)  # Ours only.
        if outcome is not None and outcome.skipped:
            print(f"step {step}: skipped at scale {outcome.scale:g}, {outcome.describe()}")
        scaler.update()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), scaler.get_scale()


def main():
    print("Training with gradilocks.GradScaler and gradilocks.clip_grad_norm_:")
    ours, our_scale = train(
        lambda model: gradilocks.GradScaler("cpu", model=model), gradilocks.clip_grad_norm_
    )
    theirs, their_scale = train(
        lambda model: torch.amp.GradScaler("cpu"), torch.nn.utils.clip_grad_norm_
    )
    apart = (ours - theirs).abs().max().item()
    print(f"The same loop with torch's names ends {apart:.1e} away, at scale {their_scale:g}.")
    assert our_scale == their_scale == 2.0**15
    assert apart < 1e-2


if __name__ == "__main__":
    main()
