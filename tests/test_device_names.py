"""Every kernel and codec has a line that says what comes back on the device.

Cases run twice, on the CPU and on `second_device`'s device: results lie where they were asked
for, and have the CPU's numbers. Layers, and the algebra of samplers, run there by the fixture
`place`, samplers and loaders by `test_sample_device.py`.
"""

from __future__ import annotations

import alike
import pytest
import second_device
import test_codec
import torch
import worlds

from pyg_distcomm import kernels
from pyg_distcomm.halo import codecs
from pyg_distcomm.kernels.registry import Op

CPU = torch.device("cpu")
# a matrix [3, 3] in the forms that kernels take, and what it is multiplied by
ROW, COL = torch.tensor([0, 0, 1, 2, 2]), torch.tensor([0, 2, 1, 0, 1])
ROWPTR, INTS = torch.tensor([0, 2, 3, 5]), torch.tensor([3, 1, 4, 1, 5])
X, IDS = torch.arange(6.0).view(3, 2).sin(), torch.tensor([2, 0])
EDGES = torch.arange(10.0).view(5, 2).cos()  # a number or two an edge
KEYS, KEY = torch.tensor([17, 4, 9]), 2**62 + 12345


def told(why, names):
    """Lines of names that run elsewhere, or not on devices."""
    return dict.fromkeys(names.split(), why)


def matrix(at, values=None):
    return at(ROWPTR), at(COL), None if values is None else at(values)


def segments(at, y=EDGES):
    return kernels.segment_softmax(at(ROWPTR), at(y))


def largest(at):
    return kernels.segment_max(at(ROWPTR), at(COL), at(X))


def drawn(at, draw, *more):
    ptr = at(torch.tensor([0, 1, 2, 3]))
    return draw(at(ROWPTR), at(INTS), *more, at(KEYS), ptr)


def pairs(at):
    rows = at(X).unsqueeze(-1)
    return at(ROWPTR), at(COL), rows, rows, rows[0]


KERNELS = {
    "coo_to_csr": lambda at: kernels.coo_to_csr(at(ROW), at(COL), 3),
    "count_positive": lambda at: kernels.count_positive(at(ROWPTR), at(INTS)),
    "csr_transpose": lambda at: kernels.csr_transpose(at(ROWPTR), at(COL), 3),
    "draw": lambda at: drawn(
        at, lambda *given: kernels.draw(*given, False), at(ROWPTR).diff()
    ),
    "extract": lambda at: kernels.extract(
        matrix(at)[:2], *[(at(IDS), at(torch.tensor([0, 2])))] * 2
    ),
    "gather_rows": lambda at: kernels.gather_rows(at(X), at(IDS)),
    "keyed_bits": lambda at: kernels.keyed_bits(KEY, at(IDS), 3),
    "keyed_dropout": lambda at: kernels.keyed_dropout(
        at(X), KEY, at(IDS)[[0, 1, 0]], 0.5
    ),
    "keyed_mask": lambda at: kernels.keyed_mask(KEY, at(IDS), 3, 0.5),
    "normalize_rows": lambda at: kernels.normalize_rows(at(ROWPTR), at(INTS).double()),
    "pair_scores": lambda at: kernels.pair_scores(*pairs(at), 0.2),
    "pair_scores_grad": lambda at: kernels.pair_scores_grad(
        *pairs(at), 0.2, at(EDGES), True
    ),
    "count_ids": lambda at: kernels.count_ids(at(COL), at(torch.zeros(5).long())),
    "hash_edges": lambda at: kernels.hash_edges(at(ROW), at(COL), at(COL)),
    "place_pairs": lambda at: kernels.place_pairs(
        at(ROW), at(COL), at(COL), at(ROWPTR[:-1]), at(torch.zeros(10).long())
    ),
    "read_rows": lambda at: kernels.read_rows(at(X), at(IDS)),
    "scatter_add_rows": lambda at: kernels.scatter_add_rows(at(X), at(IDS), at(X)[:2]),
    "sddmm": lambda at: kernels.sddmm(at(ROWPTR), at(COL), at(X), at(X)),
    "segment_max": largest,
    "segment_max_grad": lambda at: kernels.segment_max_grad(
        at(ROWPTR), at(COL), at(X), largest(at), at(X)
    ),
    "segment_softmax": segments,
    "rank_select_index": lambda at: kernels.rank_select_index(
        at(torch.tensor([0, 2])), 3
    )(at(IDS)),
    "segment_softmax_grad": lambda at: kernels.segment_softmax_grad(
        at(ROWPTR), segments(at), at(EDGES)
    ),
    "spgemm": lambda at: kernels.spgemm(matrix(at, INTS), matrix(at, EDGES[:, 0]), 3),
    "spmm": lambda at: kernels.spmm(*matrix(at, EDGES[:, 0]), at(X)),
    "weighted_sampler": lambda at: kernels.weighted_sampler(at(INTS))(
        at(KEYS), at(torch.tensor([0, 2, 4, 6])), False
    ),
    **told("KeyedNeighborSampler", "neighbor_sampler"),
    **told("the host", "describe layer_weights minimum_cover quantiser warm_up"),
}


def coded(name):
    def run(at):
        found, x = [], at(torch.randn(21, 33, generator=torch.manual_seed(0)).relu())
        ids = at(torch.arange(21)) * 3
        key = codecs.RngKey(KEY, ids, degree=ids % 5)
        for codec in CODED:
            if type(codec).__name__ != name:
                continue
            for _ in range(2):
                message = codec.encode(x, key)
                out = codec.decode(message, torch.empty_like(x), key)
                found += [message, out.clone()]
        assert found, f"no {name} in tests/test_codec.py"
        return found

    return run


CODED = [*test_codec.EVERY, codecs.RowSample(2.5), codecs.DegreeBits(1)]
CODED += [codecs.RangeBits(4)]
CODECS = {name: coded(name) for name in {type(codec).__name__ for codec in CODED}}
CODECS |= told("no codec", "CODECS Codec RngKey codec_of known_codecs")


TABLES = KERNELS, CODECS


def test_every_name_has_a_line():
    """A name that is not here comes back on no one knows which device."""
    assert sorted(set(kernels.__all__) ^ set(KERNELS)) == []
    assert sorted(set(codecs.__all__) ^ set(CODECS)) == []
    host = {n for n in KERNELS if isinstance(KERNELS[n], str)}
    run_on_devices = {n for n in kernels.__all__ if isinstance(getattr(kernels, n), Op)}
    assert not run_on_devices & host


class At:
    """Puts tensors on a device."""

    def __init__(self, device):
        self.device = device

    def __call__(self, t):
        return t.clone().to(self.device)


def tensors(value):
    """The tensors in a value, in lists and objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)
    elif type(value).__module__.startswith("pyg_distcomm"):
        yield from tensors(list(vars(value).values()))


def at_home(t):
    return alike.whole(t).detach().cpu()


def run_tables(place):
    """Runs cases on both devices: nothing is elsewhere, or has other numbers."""
    device = second_device.device_of(place)

    def check(case):
        want = [at_home(t) for t in tensors(case(At(CPU)))]
        found = list(tensors(case(At(device))))
        astray = {str(t.device) for t in found} - {str(device)}
        assert not astray, f"tensors on {astray}"
        assert want, "no tensors"
        loose = 1e-5 * (place == "cuda")  # terms come in any order
        alike.same([at_home(t) for t in found], want, rtol=loose, atol=loose)

    cases = {n: c for table in TABLES for n, c in table.items() if callable(c)}
    alike.assert_none([alike.failures_of(cases, check)])


@pytest.mark.exhaustive
@pytest.mark.skipif(not second_device.can_build(), reason="no C++ compiler")
@worlds.on(1, worlds.anew)
def test_tables():
    run_tables("spare")


@pytest.mark.cuda
@worlds.on(1, worlds.anew)
def test_on_cuda():
    run_tables("cuda")
