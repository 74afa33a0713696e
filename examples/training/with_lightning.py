"""Lightning: add one callback and hand its checkpoint to `fit`. The loader keeps the full batch."""

import common
import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from carpool.train.lightning import CarpoolCallback

args = common.options(__doc__, small={"batch_size": 16, "width": 32}, full={"batch_size": 256, "width": 1024})


class Classifier(pl.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return functional.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


pl.seed_everything(0, verbose=False)
samples = args.batch_size * args.iterations
data = TensorDataset(torch.randn(samples, 32), torch.randint(0, 10, (samples,)))
carpool = CarpoolCallback(accumulation=args.accumulation, checkpoints=args.checkpoints)
trainer = pl.Trainer(
    accelerator=args.device.replace("cuda", "gpu"),
    max_steps=args.iterations,
    gradient_clip_val=1.0,
    callbacks=[carpool],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(args.width), DataLoader(data, args.batch_size, shuffle=True), ckpt_path=carpool.resume)
print(f"{trainer.global_step} iterations with accumulation {carpool.accumulation.count}")
