"""The training script of the demo: a small network on random data, on one GPU or as a gang, with Carpool's library.

On a CPU every step sleeps for a while, as a process does while its accelerator works. Without that, a dozen jobs would
measure only how they compete for the cores. `carpool demo` runs it as
`python -m carpool.live.commands.demo_job ITERATIONS WIDTH REST_MS` (REST_MS: milliseconds of sleep per step).
"""

import os
import sys
import time


def main() -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    from carpool.train import Training

    iterations, width, rest_ms = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ.get("RANK", "0")))
    has_gpu, rank = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if has_gpu else torch.device("cpu")
    gang = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if gang:
        dist.init_process_group("nccl" if has_gpu else "gloo")
    layers = [nn.Linear(64, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 10)]
    model: nn.Module = nn.Sequential(*layers).to(device)
    if gang:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    training = Training(model, optimizer, can_shrink=True)
    inputs = torch.randn(64, 64, device=device)
    labels = torch.randint(0, 10, (64,), device=device)

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    for i in training.steps(iterations):
        loss = training.step((inputs, labels), loss_of)
        if not has_gpu:
            time.sleep(rest_ms / 1000.0)
        if i % 100 == 0:
            print(f"iteration {i}: loss {loss.item():.3f}", flush=True)
    if gang:
        dist.barrier()


if __name__ == "__main__":
    main()
