"""Train a decoder on random text: 134 million parameters with the default width and depth."""

import argparse

import torch
from torch import nn
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--depth", type=int, default=12)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--words", type=int, default=32000)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
layer = nn.TransformerEncoderLayer(
    options.width, max(1, options.width // 64), 4 * options.width, dropout=0.0, batch_first=True, norm_first=True
)
embed = nn.Embedding(options.words, options.width).to(device)
body = nn.TransformerEncoder(layer, options.depth, enable_nested_tensor=False).to(device)
head = nn.Linear(options.width, options.words).to(device)
parameters = [*embed.parameters(), *body.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=3e-4)
mask = nn.Transformer.generate_square_subsequent_mask(options.length, device=device)
text = torch.randint(options.words, (200_000,))

for step in range(1, options.steps + 1):
    begin = torch.randint(len(text) - options.length, (options.batch,)).tolist()
    tokens = torch.stack([text[i : i + options.length] for i in begin]).to(device, non_blocking=True)
    with torch.autocast(device, torch.bfloat16):
        logits = head(body(embed(tokens), mask, is_causal=True))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.3f}", flush=True)
