"""Residual networks (He et al., 2016) in one screen: ResNet-18 for small pictures, ResNet-50 for large ones."""

from torch import nn
from torch.nn import functional


def conv(inputs, outputs, size, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class Block(nn.Module):
    """Two 3×3 convolutions, or 1×1, 3×3, 1×1 with four times the channels at the end, around a shortcut."""

    def __init__(self, inputs, width, stride, bottleneck):
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            layers = [conv(inputs, width, 1), conv(width, width, 3, stride), conv(width, outputs, 1)[:2]]
        else:
            layers = [conv(inputs, width, 3, stride), conv(width, outputs, 3)[:2]]
        self.body = nn.Sequential(*layers)
        plain = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if plain else conv(inputs, outputs, 1, stride)[:2]

    def forward(self, x):
        return functional.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, blocks, classes, width=64, bottleneck=False, large_pictures=False):
        super().__init__()
        stem = [conv(3, width, 7, 2), nn.MaxPool2d(3, 2, 1)] if large_pictures else [conv(3, width, 3)]
        layers, inputs = [], width
        for stage, count in enumerate(blocks):
            for index in range(count):
                stride = 2 if stage and index == 0 else 1
                layers.append(Block(inputs, width << stage, stride, bottleneck))
                inputs = (width << stage) * (4 if bottleneck else 1)
        self.stem, self.stages = nn.Sequential(*stem), nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def resnet18(classes, width=64):
    return ResNet((2, 2, 2, 2), classes, width)


def resnet50(classes, width=64):
    return ResNet((3, 4, 6, 3), classes, width, bottleneck=True, large_pictures=True)
