"""ResNet-50 on ImageNet (synthetic pictures). Its BatchNorm layers make `carpool check` refuse to split its batch."""

import common
import torch
from resnet import resnet50
from torch.nn import functional

from carpool.train import Training

args = common.options(
    __doc__,
    small={"batch_size": 8, "width": 8, "picture": 64, "classes": 100},
    full={"batch_size": 100, "width": 64, "picture": 224, "classes": 1000},
)
device = common.prepare(args.device)
model = common.distribute(resnet50(args.classes, args.width).to(memory_format=torch.channels_last), device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30_000)
shape = (args.batch_size, 3, args.picture, args.picture)
pool = [(torch.randn(shape), torch.randint(0, args.classes, (args.batch_size,))) for _ in range(2)]


def loss_fn(batch):
    pictures, labels = batch
    with common.mixed_precision(device):
        return functional.cross_entropy(model(pictures), labels, label_smoothing=0.1)


training = Training(
    model, optimizer, schedule=schedule, device=device, accumulation=args.accumulation, checkpoints=args.checkpoints
)
with common.summary(training, args.batch_size):
    for i in training.steps(args.iterations):
        loss = training.step(pool[i % len(pool)], loss_fn)
        if training.iteration == args.iterations:
            print(f"loss {loss:.4f}")
