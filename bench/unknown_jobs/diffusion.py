"""Train a small diffusion model: a convolutional network with skips that predicts the noise in an image."""

import argparse

import torch
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--size", type=int, default=64)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"


def block(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU(),
        nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = block(4, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, image: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        first = self.down1(torch.cat([image, share.expand_as(image[:, :1])], 1))
        second = self.down2(functional.max_pool2d(first, 2))
        middle = self.middle(functional.max_pool2d(second, 2))
        x = self.up2(torch.cat([functional.interpolate(middle, scale_factor=2), second], 1))
        return self.out(self.up1(torch.cat([functional.interpolate(x, scale_factor=2), first], 1)))


model = UNet(options.width).to(device)
average = [value.detach().clone() for value in model.parameters()]
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
images = torch.randn(512, 3, options.size, options.size)

for step in range(1, options.steps + 1):
    clean = images[torch.randint(len(images), (options.batch,))].to(device)
    noise, share = torch.randn_like(clean), torch.rand(options.batch, 1, 1, 1, device=device)
    with torch.autocast(device, torch.bfloat16):
        loss = functional.mse_loss(model(clean * (1 - share) + noise * share, share), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch._foreach_lerp_(average, list(model.parameters()), 0.001)
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)
