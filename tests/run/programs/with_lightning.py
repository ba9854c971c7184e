"""Lightning trains a model whose second layer divides by zero at step 4."""

import logging
import warnings

import lightning as L
import torch
from torch import nn

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Gate(nn.Module):
    def forward(self, x):
        return x / (x - x) if lit.global_step == 3 else x


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), Gate(), nn.Linear(8, 2))

    def training_step(self, batch, index):
        return self.body(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


L.seed_everything(0)
lit = Lit()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 4)), batch_size=4)
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(max_epochs=1, accelerator="cpu", gradient_clip_val=0.5, barebones=False, **options)
trainer.fit(lit, loader)
print(sum(param.isnan().sum().item() for param in lit.parameters()) > 0)
