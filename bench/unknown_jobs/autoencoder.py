"""Train a convolutional autoencoder on random images, with Carpool's training library."""

import argparse

import torch
from torch import nn
from torch.nn import functional

from carpool.train import Training

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--size", type=int, default=64)
options = parser.parse_args()

device, width = "cuda" if torch.cuda.is_available() else "cpu", options.width
model = nn.Sequential(
    nn.Conv2d(3, width, 3, 2, 1), nn.GELU(), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.GELU(),
    nn.Conv2d(2 * width, 4 * width, 3, 2, 1), nn.GELU(), nn.Conv2d(4 * width, 32, 1),
    nn.ConvTranspose2d(32, 4 * width, 2, 2), nn.GELU(), nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.GELU(),
    nn.ConvTranspose2d(2 * width, 3, 2, 2),
).to(device)  # fmt: skip
training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
images = torch.randn(options.batch, 3, options.size, options.size, device=device)


def loss_of(batch: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(batch), batch)


for step in training.steps(options.steps):
    loss = training.step(images, loss_of)
    if step % 20 == 19:
        print(f"step {step + 1} loss {loss.item():.3f}", flush=True)
