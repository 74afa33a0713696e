"""DeepSpeech 2 (Amodei et al., 2016) on synthetic spectrograms: convolutions, recurrent layers, the CTC loss."""

import common
import torch
from torch import nn
from torch.nn import functional

from carpool.train import Training

args = common.options(
    __doc__,
    small={"batch_size": 4, "frames": 64, "layers": 2, "width": 32},
    full={"batch_size": 20, "frames": 800, "layers": 5, "width": 768},
)
LETTERS = 29
BINS = 161


class Recurrent(nn.Module):
    """A bidirectional GRU over normalised inputs; the two directions are added."""

    def __init__(self, inputs, width, normalise):
        super().__init__()
        self.norm = nn.BatchNorm1d(inputs) if normalise else nn.Identity()
        self.gru = nn.GRU(inputs, width, batch_first=True, bidirectional=True)

    def forward(self, x):
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        forward, backward = self.gru(x)[0].chunk(2, -1)
        return forward + backward


class DeepSpeech2(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.conv = nn.Sequential(
            *(nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5), bias=False), nn.BatchNorm2d(32), nn.Hardtanh(0, 20)),
            *(nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5), bias=False), nn.BatchNorm2d(32), nn.Hardtanh(0, 20)),
        )
        inputs = 32 * (((BINS + 1) // 2 + 1) // 2)
        sizes = [inputs] + [width] * (layers - 1)
        self.recurrent = nn.Sequential(*(Recurrent(size, width, i > 0) for i, size in enumerate(sizes)))
        self.head = nn.Linear(width, LETTERS)

    def forward(self, spectrograms):
        x = self.conv(spectrograms[:, None])
        x = self.recurrent(x.flatten(1, 2).transpose(1, 2))
        return self.head(x).float().log_softmax(-1)


device = common.prepare(args.device)
model = common.distribute(DeepSpeech2(args.width, args.layers), device)
optimizer = torch.optim.SGD(model.parameters(), lr=3e-4, momentum=0.9, nesterov=True)


def synthetic_batch():
    """Utterances of different lengths, padded to the longest."""
    lengths = torch.randint(args.frames // 2, args.frames + 1, (args.batch_size,))
    letters = torch.randint(1, LETTERS, (args.batch_size, args.frames // 8))
    return {
        "spectrograms": torch.randn(args.batch_size, BINS, args.frames),
        "frames": lengths // 2,
        "letters": letters,
        "counts": torch.randint(1, args.frames // 8 + 1, (args.batch_size,)),
    }


def loss_fn(batch):
    with common.mixed_precision(device):
        scores = model(batch["spectrograms"])
    return functional.ctc_loss(
        scores.transpose(0, 1), batch["letters"], batch["frames"], batch["counts"], zero_infinity=True
    )


pool = [synthetic_batch() for _ in range(4)]
training = Training(
    model,
    optimizer,
    clip_norm=400.0,
    device=device,
    accumulation=args.accumulation,
    checkpoints=args.checkpoints,
)
with common.summary(training, args.batch_size):
    for i in training.steps(args.iterations):
        loss = training.step(pool[i % len(pool)], loss_fn)
        if training.iteration == args.iterations:
            print(f"loss {loss:.4f}")
