"""Train a recurrent network on random speech-like sequences, with Carpool's training library."""

import argparse

import torch
from torch import nn
from torch.nn import functional

from carpool.train import Training

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--frames", type=int, default=120)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"


class Speech(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(80, width, 3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 40)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(frames)[0])


model = Speech(options.width).to(device)
training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3), clip_norm=1.0)
frames = torch.randn(options.batch, options.frames, 80, device=device)
labels = torch.randint(40, (options.batch, options.frames), device=device)


def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


for step in training.steps(options.steps):
    loss = training.step((frames, labels), loss_of)
    if step % 50 == 49:
        print(f"step {step + 1} loss {loss.item():.3f}", flush=True)
