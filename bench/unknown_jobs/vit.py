"""Train a vision transformer on random images, with Carpool's training library."""

import argparse

import torch
from torch import nn
from torch.nn import functional

from carpool.train import Training

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=96)
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--depth", type=int, default=12)
parser.add_argument("--size", type=int, default=224)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"


class VisionTransformer(nn.Module):
    def __init__(self, size: int, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.place = nn.Parameter(torch.zeros(1, (size // 16) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 100)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.body(x + self.place).mean(1))


model = VisionTransformer(options.size, options.width, options.depth).to(device)
training = Training(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
images = torch.randn(options.batch, 3, options.size, options.size, device=device)
labels = torch.randint(100, (options.batch,), device=device)


def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    with torch.autocast(device, torch.bfloat16):
        return functional.cross_entropy(model(batch[0]), batch[1])


for step in training.steps(options.steps):
    loss = training.step((images, labels), loss_of)
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.3f}", flush=True)
