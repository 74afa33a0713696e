"""Trainings for `bench/demands.py`: eight models in plain PyTorch with random data, each from GPT to a tiny network.

None of them is in a profile. On an H200, `gpt`, `vit` and `unet` keep the GPU busy; `lstm`, `mlp` and `convnet` are
bound by the launches of their kernels; `resnet` and `bert` lie between. With `tiny`, all run on a CPU in milliseconds.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Loss = Callable[[], Tensor]


@dataclass
class Training:
    """A model, its optimizer, and the loss of one batch."""

    model: nn.Module
    loss: Loss
    batch: int
    autocast: bool
    """Whether it computes in bfloat16."""

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.device = next(self.model.parameters()).device.type

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            loss = self.loss()
        loss.backward()
        self.optimizer.step()


class Block(nn.Module):
    """A transformer block with PyTorch's fused attention."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=2)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))


class Tokens(nn.Module):
    """Embedding, blocks and a head over the vocabulary: GPT (causal) or BERT."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, causal: bool) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 64), causal) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.place(places))))


class VisionTransformer(nn.Module):
    def __init__(self, size: int, patch: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.place = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, max(1, width // 64), False) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.place
        return self.head(self.blocks(x).mean(1))


class Residual(nn.Module):
    """A residual block of the U-Net, which takes the step of the diffusion."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(8, outside), nn.SiLU(), nn.Conv2d(outside, outside, 3, padding=1))
        self.time = nn.Linear(time, outside)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.skip(x) + self.second(self.first(x) + self.time(time)[:, :, None, None])


class UNet(nn.Module):
    """Predicts the noise in an image: three resolutions down and up, two residual blocks each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        time, widths = 4 * width, [width, 2 * width, 3 * width]
        self.steps = nn.Sequential(nn.Embedding(1000, time), nn.SiLU(), nn.Linear(time, time))
        self.enter, self.leave = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.up, inside = nn.ModuleList(), nn.ModuleList(), width
        for outside in widths:
            self.down.append(nn.ModuleList([Residual(inside, outside, time), Residual(outside, outside, time)]))
            inside = outside
        for outside in reversed(widths):
            self.up.append(nn.ModuleList([Residual(inside + outside, outside, time), Residual(outside, outside, time)]))
            inside = outside

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        time, x, kept = self.steps(step), self.enter(x), []
        for first, second in self.down:
            x = second(first(x, time), time)
            kept.append(x)
            x = functional.avg_pool2d(x, 2)
        for first, second in self.up:
            x = functional.interpolate(x, scale_factor=2.0)
            x = second(first(torch.cat([x, kept.pop()], 1), time), time)
        return self.leave(x)


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        same = stride == 1 and inside == out
        self.skip = nn.Identity() if same else nn.Sequential(nn.Conv2d(inside, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.skip(x))


def resnet(blocks: tuple[int, ...], width: int, classes: int) -> nn.Module:
    """Return a residual network; (3, 4, 6, 3) and 64 make a ResNet-50."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3), nn.BatchNorm2d(width), nn.ReLU(True), nn.MaxPool2d(3, 2)]
    inside = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            layers.append(Bottleneck(inside, width << stage, 2 if stage and not number else 1))
            inside = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


class Recurrent(nn.Module):
    """A language model with two LSTM layers."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


# ---- the eight trainings ---------------------------------------------------------------------------------------------


def _language(model: nn.Module, vocabulary: int, shape: tuple[int, int], device: str, autocast: bool) -> Training:
    model.to(device)

    def loss() -> Tensor:
        tokens = torch.randint(vocabulary, shape, device=device)
        return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return Training(model, loss, shape[0], autocast)


def _images(model: nn.Module, shape: tuple[int, ...], classes: int, device: str, autocast: bool) -> Training:
    model.to(device)

    def loss() -> Tensor:
        labels = torch.randint(classes, shape[:1], device=device)
        return functional.cross_entropy(model(torch.randn(shape, device=device)), labels)

    return Training(model, loss, shape[0], autocast)


def gpt(device: str, tiny: bool) -> Training:
    """124 million parameters, sequences of 1024."""
    words, length, width, depth, batch = (100, 16, 64, 2, 2) if tiny else (50257, 1024, 768, 12, 12)
    return _language(Tokens(words, length, width, depth, True), words, (batch, length), device, True)


def bert(device: str, tiny: bool) -> Training:
    words, length, width, depth, batch = (100, 16, 64, 1, 2) if tiny else (30522, 128, 512, 4, 32)
    return _language(Tokens(words, length, width, depth, False), words, (batch, length), device, True)


def lstm(device: str, tiny: bool) -> Training:
    words, length, width, batch = (100, 8, 16, 2) if tiny else (10000, 35, 650, 20)
    return _language(Recurrent(words, width), words, (batch, length), device, False)


def vit(device: str, tiny: bool) -> Training:
    size, width, depth, batch = (32, 64, 1, 2) if tiny else (224, 768, 12, 64)
    return _images(VisionTransformer(size, 16, width, depth, 10), (batch, 3, size, size), 10, device, True)


def unet(device: str, tiny: bool) -> Training:
    """Diffusion: the noise of an image is predicted."""
    width, size, batch = (8, 8, 2) if tiny else (128, 64, 32)
    model = UNet(width).to(device)

    def loss() -> Tensor:
        images, noise = (torch.randn(batch, 3, size, size, device=device) for _ in range(2))
        step = torch.randint(1000, (batch,), device=device)
        share = (step / 1000)[:, None, None, None]
        return functional.mse_loss(model(images * (1 - share) + noise * share, step), noise)

    return Training(model, loss, batch, True)


def resnet50(device: str, tiny: bool) -> Training:
    blocks, width, size, batch = ((1, 1), 8, 32, 2) if tiny else ((3, 4, 6, 3), 64, 224, 32)
    return _images(resnet(blocks, width, 10), (batch, 3, size, size), 10, device, True)


def mlp(device: str, tiny: bool) -> Training:
    width = 16 if tiny else 512
    layers = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    return _images(layers, (256, 784), 10, device, False)


def convnet(device: str, tiny: bool) -> Training:
    width = 4 if tiny else 32
    layers = nn.Sequential(
        nn.Conv2d(3, width, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72 * width, 10),
    )  # fmt: skip
    return _images(layers, (64, 3, 32, 32), 10, device, False)


MODELS: dict[str, Callable[[str, bool], Training]] = {
    "gpt": gpt, "vit": vit, "unet": unet, "resnet": resnet50,
    "bert": bert, "lstm": lstm, "mlp": mlp, "convnet": convnet,
}  # fmt: skip
