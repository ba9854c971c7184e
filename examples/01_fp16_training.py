"""fp16 training with autocast and a scaler: torch's loop, with one import changed.

Runs on a GPU if there is one. The first scale of 2**24 is far too large, so the first steps overflow and are skipped.
"""

import torch
from torch import nn

from gradilocks import GradScaler

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = GradScaler(device, init_scale=2.0**24, model=model)
inputs = torch.randn(256, 16, device=device)
targets = inputs.sum(dim=1, keepdim=True)

skipped, losses = 0, []
for _ in range(100):
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    if scaler.outcome.skipped:  # Waits for the device, as scaler.step() has done already.
        skipped += 1
        print(f"skipped at scale {scaler.outcome.scale:g}: non-finite gradients in {scaler.outcome.culprits}")
    scaler.update()
    losses.append(loss.item())

print(f"{skipped} steps skipped, scale {scaler.get_scale():g}, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
assert skipped > 0
assert losses[-1] < 0.1 * losses[0]
