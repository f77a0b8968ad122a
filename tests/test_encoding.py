"""What ranks tell each other is data: it comes back as it was, and nothing of it is run."""

import json
import os
import pickle
import random
import struct
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import worlds
from problems import GRAPHS

import pyg_distcomm as pdc
from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.ledger import Entry
from pyg_distcomm.comm.serialization import decode, encode
from pyg_distcomm.halo.schedule import Linear

VALUES = [
    None,
    [True, 1, -(2**70), 1.5, float("inf"), "text\u2028\U0001f600"],
    (1, (2, [3, {}]), ()),
    {("halo", 1): {"a": [None]}, 3: {1, 2}, None: frozenset({"x"})},
    b"\x00\xff",
    torch.Size([2, 0]),
    (torch.bfloat16, torch.device("cpu")),
    Linear(2.0, 8.0),
]
ARRAYS = [
    torch.randn(3, 4).to(torch.bfloat16),
    torch.randn(4, 3).t(),
    torch.tensor(3),
    torch.empty(0, 5, dtype=torch.bool),
    torch.nn.Parameter(torch.arange(3.0)),
    np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2],
    np.zeros((0, 2)),
]
ENTRY = ["pyg_distcomm.comm.ledger", "Entry"]
FLOAT, FOUR = {"dtype": "float32"}, {"array": ["|u1", [4]]}


def test_values_come_back_as_they_were():
    assert decode(encode(VALUES)) == VALUES
    back = decode(encode({"arrays": ARRAYS, "number": np.float32(0.1)}))
    for was, now in zip(ARRAYS, back["arrays"], strict=True):
        assert (now.dtype, now.shape) == (was.dtype, was.shape)
        same = torch.equal if isinstance(was, torch.Tensor) else np.array_equal
        assert same(now, was)
    assert type(back["number"]) is np.float32
    assert back["number"] == np.float32(0.1)


def test_what_is_no_data_is_refused_by_name():
    rows = pdc.partition(GRAPHS["undirected"](), pdc.init()).x  # of all ranks
    for value in (object(), lambda: 0, random.Random(), os, rows):
        with pytest.raises(TypeError, match="send numbers, text, tensors"):
            encode([value])


@dataclass
class Foreign:
    value: int = 0


def crafted(tree, rest=b""):
    text = json.dumps(tree).encode()
    return struct.pack("<Q", len(text)) + text + rest


@pytest.mark.parametrize(
    "bytes_",
    [
        b"",
        pickle.dumps(os.system),
        crafted({"data": ["os", "system", {"dict": []}]}),
        crafted({"data": ["pyg_distcomm.cli.doctor", "os", {"dict": []}]}),
        crafted({"data": [__name__, "Foreign", {"dict": [["value", 1]]}]}),
        crafted({"data": [*ENTRY, {"dict": [["__class__", 1]]}]}),
        crafted({"dtype": "load"}),
        crafted({"tensor": [FLOAT, [1 << 40], FOUR]}, b"1234"),
        crafted({"tensor": [FLOAT, [-1], FOUR]}, b"1234"),
        crafted({"array": ["|u1", [5]]}, b"1234"),
        crafted({"array": ["|u1", [-2, -2]]}, b"1234"),
        crafted({"array": ["|O", [1]]}, b"12345678"),
        crafted({"nothing": 1}),
    ],
    ids=lambda b: repr(b[8:40]),
)
def test_other_bytes_are_refused(bytes_):
    with pytest.raises(ValueError, match="does not write"):
        decode(bytes_)


def test_random_bytes_never_run():
    whole = bytes(encode({"a": ARRAYS[0], "b": [Linear(1.0, 2.0), Entry()]}))
    draw = random.Random(0)
    for _ in range(2000):
        bad = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            bad[draw.randrange(len(bad))] = draw.randrange(256)
        try:
            decode(bad)
        except ValueError:
            continue


@worlds.on(2)
def test_ranks_tell_each_other_values_or_all_refuse():
    axis = worlds.mesh().world
    value = {"rank": axis.rank, "x": torch.arange(axis.rank)}
    every = collectives.all_gather_object(value, axis)
    assert [one["rank"] for one in every] == list(range(axis.size))
    assert [len(one["x"]) for one in every] == list(range(axis.size))
    assert collectives.broadcast_object(value, axis)["rank"] == 0
    with pytest.raises(TypeError, match=r"got builtins\.object"):
        collectives.all_gather_object(object() if axis.rank else 1, axis)
    with pytest.raises(TypeError, match=r"got builtins\.object"):
        collectives.broadcast_object(object() if axis.rank == 0 else None, axis)
