"""A training script as a user would write it: shuffled data, dropout, Adam, a schedule. Killed and resumed by tests.

Usage: train_script.py CHECKPOINTS ITERATIONS RESULT [seconds to sleep per step]
"""

import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from carpool.train import Checkpoints, Training

torch.set_num_threads(1)
directory, iterations, result, pause = *sys.argv[1:4], float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 3)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
data = TensorDataset(torch.randn(37, 6).double(), torch.randint(0, 3, (37,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
training = Training(
    model, optimizer, schedule=schedule, accumulation=2, checkpoints=Checkpoints(directory, every=3), clip_norm=1.0
)
print("resumed at", training.iteration, flush=True)
for batch in training.batches(loader, iterations=int(iterations)):
    training.step(batch, lambda part: functional.cross_entropy(model(part[0]), part[1]))
    time.sleep(pause)
torch.save({"weights": model.state_dict(), "lr": schedule.get_last_lr(), "draw": torch.rand(3)}, result)
