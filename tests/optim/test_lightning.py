"""Lightning drives our optimizers and our scaler as it drives torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradilocks

lightning = pytest.importorskip(
    "lightning", reason="lightning is not installed; it is where the GPU tests run"
)
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # Of Lightning's own making.


class Lit(lightning.LightningModule):
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.make = make
        self.losses = []

    def training_step(self, batch, _):
        loss = self.net(batch[0]).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = self.make(self.net.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def trained(make, tmp_path, scaler=None):
    from lightning.pytorch.plugins import MixedPrecision

    inputs = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    chosen = {"precision": "16-mixed"}
    if scaler is not None:
        chosen = {"plugins": MixedPrecision("16-mixed", "cuda", scaler)}
    trainer = lightning.Trainer(
        accelerator="gpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, **chosen,
    )  # fmt: skip
    model = Lit(make)
    trainer.fit(model, DataLoader(TensorDataset(inputs), batch_size=8))
    return [p.detach().cpu() for p in model.parameters()], model.losses


OURS = {
    "AdamW": (
        lambda params: gradilocks.optim.AdamW(params, lr=0.01),
        lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    ),
    "SGD": (
        lambda params: gradilocks.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    ),
}


@pytest.mark.parametrize("ours_too", [False, True], ids=["torch's scaler", "our scaler"])
@pytest.mark.parametrize("name", OURS)
def test_training_goes_as_with_torchs_fused_optimizers(name, ours_too, tmp_path):
    mine, theirs = OURS[name]
    scaler = gradilocks.GradScaler("cuda", init_scale=2.0**10) if ours_too else None
    params, losses = trained(mine, tmp_path, scaler)
    expected, reference = trained(theirs, tmp_path)
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(reference, rel=2e-3)
    for one, other in zip(params, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=2e-3)
