"""Train a small network on a table of random numbers, with a plain loop over a DataLoader."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=512)
parser.add_argument("--width", type=int, default=256)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
rows = TensorDataset(torch.randn(20_000, 60), torch.randn(20_000, 1))
model = nn.Sequential(
    nn.Linear(60, options.width), nn.BatchNorm1d(options.width), nn.ReLU(), nn.Dropout(0.1),
    nn.Linear(options.width, options.width), nn.ReLU(), nn.Linear(options.width, 1),
).to(device)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

step = 0
while step < options.steps:
    for features, target in DataLoader(rows, options.batch, shuffle=True):
        loss = nn.functional.mse_loss(model(features.to(device)), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        step += 1
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
        if step >= options.steps:
            break
