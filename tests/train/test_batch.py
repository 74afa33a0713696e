"""Splitting batches: every sample once, in order, in pieces that differ by at most one; errors that name the place."""

import dataclasses
import itertools
from collections import UserDict
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from carpool.train import BatchError, Training, split
from carpool.train.batch import batch_size, sizes
from tests.support.effort import cases
from tests.support.training_models import weights


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Record:
    a: Any
    b: Any


@given(st.integers(1, 300), st.integers(1, 300))
def test_sizes_differ_by_at_most_one(samples, parts):
    result = sizes(samples, parts)
    assert sum(result) == samples
    assert len(result) == min(samples, parts)
    assert max(result) - min(result) <= 1
    assert max(result) == -(-samples // len(result))


def leaf(n, dim):
    shape = st.lists(st.integers(1, 3), min_size=dim, max_size=dim + 2)
    return shape.map(lambda s: torch.randn(*s[:dim], n, *s[dim:]))


def structures(n, dim):
    leaves = leaf(n, dim)
    return st.recursive(
        leaves | st.sampled_from([None, 3, 2.5, "kind", torch.tensor(4.0)]),
        lambda inner: st.one_of(
            st.tuples(inner, inner),
            st.builds(Pair, inner, inner),
            st.builds(Record, inner, inner),
            st.dictionaries(st.sampled_from("xyz"), inner, min_size=1),
            st.dictionaries(st.sampled_from("xyz"), inner, min_size=1).map(UserDict),
        ),
        max_leaves=5,
    ).flatmap(lambda tree: leaves.map(lambda first: (first, tree)))


def join(parts, dim):
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts, dim) if first.ndim else first
    if isinstance(first, dict | UserDict):
        return type(first)({key: join([p[key] for p in parts], dim) for key in first})
    if isinstance(first, tuple):
        joined = [join(list(column), dim) for column in zip(*parts, strict=True)]
        return Pair(*joined) if isinstance(first, Pair) else tuple(joined)
    if isinstance(first, Record):
        return Record(join([p.a for p in parts], dim), join([p.b for p in parts], dim))
    return first


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict | UserDict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Record):
        return same(a.a, b.a) and same(a.b, b.b)
    return a == b


@pytest.mark.slow
@settings(deadline=None, max_examples=cases(150))
@given(st.data())
def test_pieces_put_together_are_the_batch(data):
    n, parts, dim = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 12)), data.draw(st.integers(0, 1))
    batch = data.draw(structures(n, dim))
    pieces = split(batch, parts, dim)
    assert [batch_size(piece, dim) for piece in pieces] == sizes(n, parts)
    assert same(join(pieces, dim), batch)


def test_pieces_are_views():
    x = torch.zeros(6, 2)
    split({"x": x}, 3)[1]["x"].fill_(1)
    assert x.sum() == 4


def test_numpy_and_collated_lists():
    pieces = split([torch.arange(5), numpy.arange(5) * 2], 2)
    assert [p[0].tolist() for p in pieces] == [[0, 1, 2], [3, 4]]
    assert [p[1].tolist() for p in pieces] == [[0, 2, 4], [6, 8]]
    assert isinstance(pieces[0], list)
    assert [[t.tolist() for t in p] for p in split([torch.zeros(2), torch.ones(2)], 2)] == [[[0], [1]], [[0], [1]]]


def test_a_list_with_one_entry_per_sample():
    boxes = [torch.zeros(i, 4) for i in range(4)]
    pieces = split({"images": torch.zeros(4, 3), "boxes": boxes, "names": list("abcd")}, 3)
    assert [len(p["boxes"]) for p in pieces] == [2, 1, 1]
    assert pieces[0]["boxes"][1] is boxes[1]
    assert pieces[2]["names"] == ["d"]


def test_lists_of_images_of_three_channels_are_not_split_by_channel():
    images = [torch.zeros(3, 8, 8 + i) for i in range(4)]
    pieces = split((images, [{"box": torch.zeros(i, 4)} for i in range(4)]), 2)
    assert [len(p[0]) for p in pieces] == [2, 2]
    assert pieces[0][0][0].shape == (3, 8, 8)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": torch.zeros(4), "y": torch.zeros(5)}, r"batch\['y'\] has shape \(5,\)"),
        ((torch.zeros(4), object()), r"batch\[1\] is a object"),
        ({"x": torch.zeros(2, 2), "l": [torch.zeros(2), torch.zeros(2)]}, r"batch\['l'\] is a list of 2 tensors"),
        ({"k": 3}, "holds no tensor"),
        ([(torch.zeros(3), 1), (torch.zeros(3), 2)], "list of samples"),
        (torch.tensor(3.0), "holds no tensor"),
    ],
)
def test_no_guessing(batch, words):
    with pytest.raises(BatchError, match=words):
        split(batch, 2)


def test_time_major_batches_are_split_in_their_second_dimension():
    batch = torch.randn(5, 6, 3).double()

    def run(accumulation):
        torch.manual_seed(0)
        model = nn.LSTM(3, 4).double()
        training = Training(model, torch.optim.SGD(model.parameters(), 0.1), accumulation=accumulation, split=1)
        training.step(batch, lambda part: model(part)[0].square().mean())
        return weights(model)

    assert (run(1) - run(4)).abs().max() < 1e-14


def test_a_structure_of_ones_own():
    """Boxes of all images in one tensor, each row naming its image: only the script can split that."""

    def by_image(batch, parts):
        images, boxes = batch
        pieces = []
        for index in torch.arange(len(images)).tensor_split(min(parts, len(images))):
            rows = boxes[(boxes[:, 0] >= index[0]) & (boxes[:, 0] <= index[-1])].clone()
            rows[:, 0] -= index[0]
            pieces.append((images[index], rows))
        return pieces

    images, boxes = torch.randn(5, 2).double(), torch.tensor([[0, 1.0], [2, 3.0], [4, 2.0], [4, 1.0]]).double()

    def run(accumulation):
        torch.manual_seed(0)
        model = nn.Linear(2, 1).double()
        training = Training(model, torch.optim.SGD(model.parameters(), 0.1), accumulation=accumulation, split=by_image)

        def loss(batch):
            out = model(batch[0])[:, 0]
            return (out[batch[1][:, 0].long()] * batch[1][:, 1]).sum() / len(batch[0])

        training.step((images, boxes), loss)
        return weights(model), training.accumulation.samples

    (expected, samples), (got, _) = run(1), run(3)
    assert samples == 5
    assert (expected - got).abs().max() < 1e-14


@settings(deadline=None, max_examples=cases(25))
@given(
    widths=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    samples=st.integers(1, 9),
    accumulation=st.integers(1, 12),
    weighted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_models_and_splits_train_the_same(widths, samples, accumulation, weighted, seed):
    """Any shape, any split, with and without weights of one's own: the gradient is the full batch's."""

    def run(count):
        torch.manual_seed(seed)
        layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
        model = nn.Sequential(*layers).double()
        batch = {"x": torch.randn(samples, widths[0]).double(), "w": torch.rand(samples).double() + 0.1}

        def loss(part):
            each = model(part["x"]).square().mean(1)
            return (each * part["w"]).sum() / part["w"].sum() if weighted else each.mean()

        average = (lambda part: part["w"].sum()) if weighted else "samples"
        training = Training(model, torch.optim.Adam(model.parameters()), accumulation=count, average=average)
        for _ in range(3):
            training.step(batch, loss)
        return weights(model)

    assert (run(1) - run(accumulation)).abs().max() <= 1e-11
