"""Small models and data for the tests: an MLP and a transformer, without anything that mixes samples."""

import torch
from torch import nn
from torch.nn import functional


def mlp(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)).to(dtype)


class TinyTransformer(nn.Module):
    def __init__(self, vocabulary=11, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.randn(1, 32, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens) + self.place[:, : tokens.shape[1]]))


def transformer(dtype=torch.float64):
    torch.manual_seed(2)
    return TinyTransformer().to(dtype)


def vectors(samples, dtype=torch.float64, seed=3):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=g, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 3, (samples,), generator=g)


def sentences(samples, length=7, seed=4):
    """Tokens and labels; a different part of each sentence counts, and the last sentence hardly at all."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (samples, length), generator=g)
    labels = torch.randint(0, 11, (samples, length), generator=g)
    lengths = torch.randint(1, length + 1, (samples,), generator=g)
    labels[torch.arange(length)[None] >= lengths[:, None]] = -100
    return {"tokens": tokens, "labels": labels}


def vector_loss(model):
    return lambda batch: functional.cross_entropy(model(batch[0]), batch[1])


def token_loss(model):
    def loss(batch):
        return functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    return loss


def tokens(batch):
    return (batch["labels"] != -100).sum()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01),
}


def weights(model):
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def gradients(model):
    return torch.cat([p.grad.detach().flatten().double() for p in model.parameters()])
