"""YOLOv3 (Redmon & Farhadi, 2018), as on PASCAL VOC (synthetic pictures). Every picture has its own list of boxes."""

import common
import torch
from torch import nn
from torch.nn import functional

from carpool.train import Training

args = common.options(
    __doc__, small={"batch_size": 2, "width": 4, "picture": 64}, full={"batch_size": 8, "width": 32, "picture": 416}
)
CLASSES = 20
ANCHORS = (
    torch.tensor([[[116, 90], [156, 198], [373, 326]], [[30, 61], [62, 45], [59, 119]], [[10, 13], [16, 30], [33, 23]]])
    / 416.0
)  # width and height for each of three scales, coarse to fine, as parts of the picture


def conv(inputs, outputs, size, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.LeakyReLU(0.1, inplace=True),
    )


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(conv(width, width // 2, 1), conv(width // 2, width, 3))

    def forward(self, x):
        return x + self.body(x)


class YoloV3(nn.Module):
    """Darknet-53, then predictions at strides 32, 16 and 8, each scale seeing the coarser one."""

    def __init__(self, width):
        super().__init__()
        stages, inputs = [conv(3, width, 3)], width
        for blocks in (1, 2, 8, 8, 4):
            residuals = [Residual(2 * inputs) for _ in range(blocks)]
            stages.append(nn.Sequential(conv(inputs, 2 * inputs, 3, 2), *residuals))
            inputs *= 2
        self.stages = nn.ModuleList(stages)
        self.necks, self.heads, self.ups = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        coming = 0
        for outputs in (inputs // 2, inputs // 4, inputs // 8):
            neck = [conv(2 * outputs + coming, outputs, 1)]
            for _ in range(2):
                neck += [conv(outputs, 2 * outputs, 3), conv(2 * outputs, outputs, 1)]
            self.necks.append(nn.Sequential(*neck))
            head = nn.Conv2d(2 * outputs, 3 * (5 + CLASSES), 1)
            self.heads.append(nn.Sequential(conv(outputs, 2 * outputs, 3), head))
            coming = outputs // 2
            self.ups.append(nn.Sequential(conv(outputs, coming, 1), nn.Upsample(scale_factor=2)))

    def forward(self, x):
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        predictions, carried = [], None
        for scale, (neck, head, up) in enumerate(zip(self.necks, self.heads, self.ups, strict=True)):
            x = features[-1 - scale]
            x = neck(x if carried is None else torch.cat([carried, x], 1))
            out = head(x)
            n, _, rows, columns = out.shape
            predictions.append(out.view(n, 3, 5 + CLASSES, rows, columns).permute(0, 1, 3, 4, 2))
            if scale < 2:
                carried = up(x)
        return predictions


def yolo_loss(predictions, boxes):
    """Boxes are lists of (class, x, y, width, height) per picture, in parts of the picture; the mean over pictures."""
    total = predictions[0].new_zeros((), dtype=torch.float32)
    for scale, out in enumerate(predictions):
        rows, columns = out.shape[2:4]
        out = out.float()
        wanted = torch.zeros_like(out[..., 4])
        for index, mine in enumerate(boxes):
            if not len(mine):
                continue
            shapes = mine[:, None, None, 3:5], ANCHORS.to(mine)
            overlap = torch.minimum(*shapes).prod(-1)
            union = shapes[0].prod(-1) + shapes[1].prod(-1) - overlap
            best = (overlap / union).flatten(1).argmax(1)  # of nine anchors; each box belongs to one scale
            mine, anchor = mine[best // 3 == scale], best[best // 3 == scale] % 3
            x, y = mine[:, 1] * columns, mine[:, 2] * rows
            at = (index, anchor, y.long().clamp(max=rows - 1), x.long().clamp(max=columns - 1))
            wanted[at] = 1.0
            found = out[at]
            centre = torch.stack([x % 1, y % 1], 1)
            size = (mine[:, 3:5] / ANCHORS[scale].to(mine)[anchor]).log()
            label = functional.one_hot(mine[:, 0].long(), CLASSES).to(found)
            total = total + functional.binary_cross_entropy_with_logits(found[:, :2], centre, reduction="sum")
            total = total + functional.mse_loss(found[:, 2:4], size, reduction="sum")
            total = total + functional.binary_cross_entropy_with_logits(found[:, 5:], label, reduction="sum")
        total = total + functional.binary_cross_entropy_with_logits(out[..., 4], wanted, reduction="sum")
    return total / len(boxes)


def synthetic_batch():
    pictures = torch.randn(args.batch_size, 3, args.picture, args.picture)
    counts = torch.randint(0, 6, (args.batch_size,)).tolist()
    boxes = [torch.cat([torch.randint(0, CLASSES, (c, 1)), torch.rand(c, 4) * 0.9 + 0.05], 1) for c in counts]
    return {"pictures": pictures, "boxes": boxes}


device = common.prepare(args.device)
model = common.distribute(YoloV3(args.width), device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=5e-4)


def loss_fn(batch):
    with common.mixed_precision(device):
        predictions = model(batch["pictures"])
    return yolo_loss(predictions, batch["boxes"])


pool = [synthetic_batch() for _ in range(2)]
training = Training(
    model,
    optimizer,
    clip_norm=10.0,
    device=device,
    accumulation=args.accumulation,
    checkpoints=args.checkpoints,
)
with common.summary(training, args.batch_size):
    for i in training.steps(args.iterations):
        loss = training.step(pool[i % len(pool)], loss_fn)
        if training.iteration == args.iterations:
            print(f"loss {loss:.4f}")
