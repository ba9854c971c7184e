"""Models and training loops under torch.compile."""

from __future__ import annotations

import pytest
import torch

from control.given_gradients import INF, batches, loss_of, small_model
from gradilocks import GradientControl


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_compiled_model_trains_as_the_eager_one_and_keeps_its_names():
    model, other = small_model(), small_model()
    compiled = torch.compile(model, backend="aot_eager")
    control = GradientControl(torch.optim.AdamW(model.parameters(), lr=0.01), model=compiled, clip=0.5)
    plain = GradientControl(torch.optim.AdamW(other.parameters(), lr=0.01), model=other, clip=0.5)
    for step, (x, y, _) in enumerate(batches(4)):
        factor = INF if step == 2 else 1.0
        control.zero_grad()
        plain.zero_grad()
        control.backward(loss_of(compiled, x, y, factor))
        plain.backward(loss_of(other, x, y, factor))
        one, two = control.step(), plain.step()
        assert (one.skipped, one.clipped, one.culprits) == (two.skipped, two.clipped, two.culprits)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)
