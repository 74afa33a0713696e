"""Accelerate: prepare as ever, then train with `AcceleratedTraining`. The loader keeps the full batch."""

import common
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from carpool.train.accelerate import AcceleratedTraining

args = common.options(__doc__, small={"batch_size": 16, "width": 32}, full={"batch_size": 256, "width": 1024})
torch.manual_seed(0)
accelerator = Accelerator(cpu=args.device == "cpu")
model = nn.Sequential(nn.Linear(32, args.width), nn.LayerNorm(args.width), nn.GELU(), nn.Linear(args.width, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(10 * args.batch_size, 32), torch.randint(0, 10, (10 * args.batch_size,)))
loader = DataLoader(data, args.batch_size, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def loss_fn(batch):
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


training = AcceleratedTraining(
    accelerator, model, optimizer, clip_norm=1.0, accumulation=args.accumulation, checkpoints=args.checkpoints
)
with common.summary(training, args.batch_size):
    for batch in training.batches(loader, iterations=args.iterations):
        loss = training.step(batch, loss_fn)
        if training.iteration == args.iterations:
            print(f"loss {loss:.4f}")
