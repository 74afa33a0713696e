"""A small training to try Carpool with: `python -m carpool.train.example --lr 0.1 --width 64`.

A network learns the output of another network, which has random weights, at random points. It runs on a GPU or a CPU,
alone or as a gang, saves checkpoints and continues from them, as any script with `carpool.train` does.
"""

import argparse
import os
import time


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m carpool.train.example", description="Train a small network.")
    parser.add_argument("--iterations", type=int, default=300, help="number of steps (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="size of the hidden layer (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=256, help="points in a batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="random seed of the network (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    given = options()
    import torch  # after the options, so that --help is quick
    import torch.distributed as dist
    from torch import nn

    from carpool.train import Training

    torch.set_num_threads(1)
    has_gpu, rank = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if has_gpu else torch.device("cpu")
    gang = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if gang:
        dist.init_process_group("nccl" if has_gpu else "gloo")

    def network(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 10)).to(device)

    torch.manual_seed(0)
    teacher = network(64)
    torch.manual_seed(given.seed)
    model = network(given.width)
    if gang:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=given.lr, momentum=0.9)
    training = Training(model, optimizer)

    def loss_of(points: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            labels = teacher(points).argmax(-1)
        return nn.functional.cross_entropy(model(points), labels)

    for i in training.steps(given.iterations):
        loss = training.step(torch.randn(given.batch_size, 32, device=device), loss_of)
        if not has_gpu:
            time.sleep(0.01)  # as a process waits for its GPU: twenty of these must not compete for the cores
        if i % 50 == 0 or i == given.iterations - 1:
            print(f"iteration {i}: loss {loss.item():.3f}", flush=True)
    if gang:
        dist.barrier()


if __name__ == "__main__":
    main()
