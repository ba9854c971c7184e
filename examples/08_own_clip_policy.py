"""A clip policy of your own: clip to a multiple of the smallest norm of the run so far.

A policy is a frozen dataclass with pure functions over tensors, so it runs on the device without a synchronization.
The control discards the results of `limit` and `update` for steps with NaN or Inf, and saves the state.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradilocks import GradientControl
from gradilocks.clip import ClipPolicy, Limit


@dataclass(frozen=True)
class ClipToSmallest(ClipPolicy):
    ratio: float = 2.0

    def init(self) -> dict[str, Tensor]:
        return {"smallest": torch.tensor(torch.inf, dtype=torch.float64)}

    def limit(self, norms: Tensor, total: Tensor, state: Mapping[str, Tensor]) -> Limit:
        bound = self.ratio * state["smallest"]
        factor = (bound / total.clamp(min=1e-12)).clamp(max=1.0)
        return Limit(factor=factor, bound=bound, reject=torch.zeros_like(total, dtype=torch.bool))

    def update(self, norms: Tensor, total: Tensor, limit: Limit, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"smallest": torch.minimum(state["smallest"], total)}


torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
control = GradientControl(optimizer, model=model, scale=None, clip=ClipToSmallest(ratio=2.0))
for step in range(1, 21):
    x = torch.randn(64, 8) * (50.0 if step == 15 else 1.0)  # One batch with wrong units.
    control.backward((model(x) - x.sum(dim=1, keepdim=True)).square().mean())
    outcome = control.step()
    control.zero_grad()
    if outcome.clipped:
        print(f"step {step}: norm {outcome.norm:.4g} clipped to {outcome.limit:.4g}")
    assert outcome.clipped == (step == 15)
