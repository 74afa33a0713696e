"""BERT fine-tuned to find answers in a text, as on SQuAD (synthetic questions): two positions per sample."""

import common
import torch
from torch import nn
from torch.nn import functional

from carpool.train import Training

args = common.options(
    __doc__,
    small={"batch_size": 8, "length": 32, "layers": 2, "width": 64, "vocabulary": 1000},
    full={"batch_size": 12, "length": 384, "layers": 12, "width": 768, "vocabulary": 30522},
)


class Bert(nn.Module):
    def __init__(self, vocabulary, width, layers, length):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(
            width, width // 32 if width < 768 else 12, 4 * width, dropout=0.1, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.spans = nn.Linear(width, 2)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.norm(self.words(tokens) + self.places(places)))
        return self.spans(self.encoder(x)).unbind(-1)


device = common.prepare(args.device)
model = common.distribute(Bert(args.vocabulary, args.width, args.layers, args.length), device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: max(0.0, 1 - i / args.iterations))


def synthetic_batch():
    return {
        "tokens": torch.randint(0, args.vocabulary, (args.batch_size, args.length)),
        "start": torch.randint(0, args.length, (args.batch_size,)),
        "end": torch.randint(0, args.length, (args.batch_size,)),
    }


def loss_fn(batch):
    with common.mixed_precision(device):
        start, end = model(batch["tokens"])
        return (functional.cross_entropy(start, batch["start"]) + functional.cross_entropy(end, batch["end"])) / 2


pool = [synthetic_batch() for _ in range(4)]
training = Training(
    model,
    optimizer,
    schedule=schedule,
    clip_norm=1.0,
    device=device,
    accumulation=args.accumulation,
    checkpoints=args.checkpoints,
)
with common.summary(training, args.batch_size):
    for i in training.steps(args.iterations):
        loss = training.step(pool[i % len(pool)], loss_fn)
        if training.iteration == args.iterations:
            print(f"loss {loss:.4f}")
