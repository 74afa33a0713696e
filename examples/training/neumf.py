"""Neural collaborative filtering, NeuMF (He et al., 2017), as on MovieLens (synthetic ratings)."""

import common
import torch
from torch import nn
from torch.nn import functional

from carpool.train import Training

args = common.options(
    __doc__,
    small={"batch_size": 256, "users": 1000, "items": 500, "factors": 8},
    full={"batch_size": 2048, "users": 138_493, "items": 26_744, "factors": 64},
)


class NeuMF(nn.Module):
    """A product of factors beside a small network; both see the user and the item."""

    def __init__(self, users, items, factors):
        super().__init__()
        self.user_product, self.item_product = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.user_network, self.item_network = nn.Embedding(users, 2 * factors), nn.Embedding(items, 2 * factors)
        self.network = nn.Sequential(
            *(nn.Linear(4 * factors, 2 * factors), nn.ReLU(), nn.Linear(2 * factors, factors), nn.ReLU())
        )
        self.head = nn.Linear(2 * factors, 1)

    def forward(self, users, items):
        product = self.user_product(users) * self.item_product(items)
        network = self.network(torch.cat([self.user_network(users), self.item_network(items)], -1))
        return self.head(torch.cat([product, network], -1))[:, 0]


device = common.prepare(args.device)
model = common.distribute(NeuMF(args.users, args.items, args.factors), device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def synthetic_batch():
    users = torch.randint(0, args.users, (args.batch_size,))
    items = torch.randint(0, args.items, (args.batch_size,))
    return users, items, ((users + items) % 5 == 0).float()


def loss_fn(batch):
    users, items, liked = batch
    with common.mixed_precision(device):
        scores = model(users, items)
    return functional.binary_cross_entropy_with_logits(scores.float(), liked)


pool = [synthetic_batch() for _ in range(8)]
training = Training(model, optimizer, device=device, accumulation=args.accumulation, checkpoints=args.checkpoints)
with common.summary(training, args.batch_size):
    for i in training.steps(args.iterations):
        loss = training.step(pool[i % len(pool)], loss_fn)
        if training.iteration == args.iterations:
            print(f"loss {loss:.4f}")
