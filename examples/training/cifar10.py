"""ResNet-18 on CIFAR-10 (synthetic pictures). Its BatchNorm layers make `carpool check` refuse to split its batch."""

import common
import torch
from resnet import resnet18
from torch.nn import functional

from carpool.train import Training

args = common.options(
    __doc__, small={"batch_size": 16, "width": 8, "picture": 32}, full={"batch_size": 128, "width": 64, "picture": 32}
)
device = common.prepare(args.device)
model = common.distribute(resnet18(10, args.width), device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.iterations)
shape = (args.batch_size, 3, args.picture, args.picture)
pool = [(torch.randn(shape), torch.randint(0, 10, (args.batch_size,))) for _ in range(4)]


def loss_fn(batch):
    pictures, labels = batch
    with common.mixed_precision(device):
        return functional.cross_entropy(model(pictures), labels)


training = Training(
    model, optimizer, schedule=schedule, device=device, accumulation=args.accumulation, checkpoints=args.checkpoints
)
with common.summary(training, args.batch_size):
    for i in training.steps(args.iterations):
        loss = training.step(pool[i % len(pool)], loss_fn)
        if training.iteration == args.iterations:
            print(f"loss {loss:.4f}")
