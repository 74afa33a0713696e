"""The residents of GPUs, against lists that are kept GPU by GPU."""

from random import Random

import pytest

from carpool.core.cluster import Cluster
from carpool.core.perf import Placement
from carpool.core.record import JobRecord
from carpool.core.shapes import Shape
from tests.support.world import job, nodes

GPUS = range(8)


def cluster():
    made = Cluster(resident_per_gpu=3)
    for node in nodes("2x4"):
        made.join(node)
    return made


def record(seq, gpus):
    shape = Shape(len(gpus), 0, False, None, None, (), Placement(len(gpus), 1))
    made = JobRecord(job(f"j{seq}", len(gpus)), shape, seq, 1.0)
    made.gpus, made.memory, made.active = gpus, 1 + seq, True
    return made


@pytest.mark.parametrize("seed", range(20))
def test_residents_mates_and_memory_are_those_that_each_gpu_holds(seed):
    random, tested = Random(seed), cluster()
    held = {gpu: [] for gpu in GPUS}
    inside = []
    for step in range(80):
        room = [gpu for gpu in GPUS if len(held[gpu]) < 3]
        if inside and (not room or random.random() < 0.4):
            gone = inside.pop(random.randrange(len(inside)))
            tested.leave(gone)
            for gpu in gone.gpus:
                held[gpu].remove(gone)
        else:
            new = record(step, tuple(random.sample(room, random.randint(1, len(room)))))
            most = tested.enter(new)
            for gpu in new.gpus:
                held[gpu].append(new)
            assert most == max(len(held[gpu]) for gpu in new.gpus)
            inside.append(new)
        assert tested.residents == {gpu: tuple(there) for gpu, there in held.items()}
        assert tested.memory == {gpu: sum(one.memory for one in there) for gpu, there in held.items()}
        for one in inside:
            mates = dict.fromkeys(mate for gpu in one.gpus for mate in held[gpu] if mate is not one)
            assert tested.mates(one) == list(mates)
