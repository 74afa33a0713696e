"""Train a small adversarial network on random images: two networks with an optimizer each."""

import argparse

import torch
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()

device, width = "cuda" if torch.cuda.is_available() else "cpu", options.width
maker = nn.Sequential(
    nn.ConvTranspose2d(100, 4 * width, 4), nn.BatchNorm2d(4 * width), nn.ReLU(),
    nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
    nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
    nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh(),
).to(device)  # fmt: skip
critic = nn.Sequential(
    nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2),
    nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4 * width, 1, 4), nn.Flatten(),
).to(device)  # fmt: skip
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=2e-4, betas=(0.5, 0.999))
ones, zeros = torch.ones(options.batch, 1, device=device), torch.zeros(options.batch, 1, device=device)
guess = functional.binary_cross_entropy_with_logits

for step in range(1, options.steps + 1):
    real = torch.randn(options.batch, 3, 32, 32).to(device)
    fake = maker(torch.randn(options.batch, 100, 1, 1, device=device))
    critic_loss = guess(critic(real), ones) + guess(critic(fake.detach()), zeros)
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()
    maker_loss = guess(critic(fake), ones)
    maker_optimizer.zero_grad()
    maker_loss.backward()
    maker_optimizer.step()
    if step % 50 == 0:
        print(f"step {step} loss {maker_loss.item():.3f}", flush=True)
