"""Resume: an interrupted and resumed run ends with the same parameters, bit for bit."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from gradilocks import GradientControl, QuantileClip

STEPS = 40


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
        # Scale and clip policy have state: the checkpoint must restore both.
        self.control = GradientControl(optimizer, model=self.model, scale="dynamic", clip=QuantileClip(0.5))
        self.schedule = self.control.scheduler(schedule)
        self.parts = {"model": self.model, "optimizer": optimizer, "control": self.control, "schedule": self.schedule}

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
            loss = (self.model(x) - x.sum(dim=1, keepdim=True)).square().mean()
            self.control.backward(loss * (torch.inf if step % 10 == 3 else 1.0))  # Four steps overflow.
            self.control.step()
            self.control.zero_grad()
            self.schedule.step()


whole = Training()
whole.run(0, STEPS)

path = Path(tempfile.mkdtemp()) / "checkpoint.pt"
interrupted = Training()
interrupted.run(0, 17)
torch.save({name: part.state_dict() for name, part in interrupted.parts.items()}, path)

resumed = Training()
checkpoint = torch.load(path, weights_only=True)
for name, part in resumed.parts.items():
    part.load_state_dict(checkpoint[name])
resumed.run(17, STEPS)

for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
    assert torch.equal(one, other)
assert whole.control.state_dict()["scale"] == resumed.control.state_dict()["scale"] == 65536.0 / 16
assert whole.schedule.get_last_lr() == resumed.schedule.get_last_lr()
print(f"identical after {STEPS} steps: scale {resumed.control.scale:g}, lr {resumed.schedule.get_last_lr()[0]:.4f}")
