"""Every kernel, codec, sampler and loader has a line that says what comes back on the device.

Cases run twice, on the CPU and on `second_device`'s device: results lie where they were asked
for, and have the CPU's numbers. Models and layers run there by the fixture `place`.
"""

from __future__ import annotations

import inspect

import alike
import pytest
import second_device
import test_codec
import tiers
import torch
import torch_geometric.loader
import worlds
from batches import arguments
from problems import GRAPHS
from torch_geometric import seed_everything
from torch_geometric.data import TemporalData
from torch_geometric.sampler import NodeSamplerInput

import pyg_distcomm.loader as loading
from pyg_distcomm import kernels, ops, sampling
from pyg_distcomm.halo import codecs
from pyg_distcomm.kernels.registry import Op
from pyg_distcomm.ops.csr import spgemm
from pyg_distcomm.sampling import algebra

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


def block(at, values=EDGES[:, 0]):
    pattern = ops.Pattern(at(ROWPTR), at(COL), 3)
    return ops.CSR(pattern, None if values is None else at(values))


OPS = {
    "CSR": lambda at: [
        block(at).matmul(at(X)),
        block(at).transposed.matmul(at(X)),
        block(at).value_gradient(at(X), at(X)),
    ],
    "Pattern": lambda at: [
        ops.Pattern.build(at(ROW), at(COL), (3, 3)),
        ops.Pattern(at(ROWPTR), at(COL), 3).transpose,
    ],
    "GridMatrix": "the product of GCNConv",
    "spgemm": lambda at: spgemm(block(at), block(at)),
}


def bulk(at):
    return sampling.BulkNodes.of([at(IDS), at(torch.tensor([1]))])


def weights(at, values=INTS):
    whole = None if values is None else at(values)
    return sampling.BulkMatrix.from_edges(at(ROW), at(COL), whole, (3, 3))


def sampled_by(make):
    def run(at):
        data = GRAPHS["undirected"]()
        found = make(data, None if at.device == CPU else at.device)
        seeds = NodeSamplerInput(None, torch.tensor([3, 7, 20]))
        out = found.sample_from_nodes(seeds)
        return [out.node, out.row, out.col, out.edge]

    return run


def by_rule(rule):
    return sampled_by(
        lambda d, where: sampling.KeyedLayerSampler(
            d, [9, 9], rule, seed=5, device=where
        )
    )


SAMPLING = {
    "BulkMatrix": lambda at: [
        weights(at),
        weights(at, None),
        sampling.BulkMatrix.row_per_node(bulk(at), 3),
        sampling.BulkMatrix.row_per_batch(bulk(at), 3),
        weights(at).sqrt() * 2,
        weights(at).dense(),
    ],
    "BulkNodes": lambda at: [bulk(at), bulk(at).batch, bulk(at).split()],
    "FastGCN": by_rule(sampling.FastGCN()),
    "Ladies": by_rule(sampling.Ladies()),
    "UserRule": by_rule(sampling.UserRule(lambda p: p.with_value(p.values.sqrt()))),
    "KeyedNeighborSampler": sampled_by(
        lambda d, where: sampling.KeyedNeighborSampler(d, [4, 3], seed=5, device=where)
    ),
    **told("Ladies", "KeyedLayerSampler LayerEdges LayerSamplerOutput LocalLayerGraph"),
    **told("KeyedNeighborSampler", "GraphSAGE"),
    **told("hosts", "PartitionedLayerGraph PartitionedNeighborSampler"),
    **told("abstract, or below", "LayerGraph Rule Sample algebra"),
}
ALGEBRA = {
    **told("above, or sample", "BulkMatrix BulkNodes Sample"),
    "SharedRow": lambda at: algebra.SharedRow(
        sampling.BulkMatrix(at(ROWPTR)[[0, 3]], at(COL), at(INTS), 3, at(IDS).sort()[0])
    ).sample(2, at(KEYS)),
    "add": lambda at: algebra.add([weights(at), weights(at, None)]),
    "extract": lambda at: algebra.extract(weights(at), bulk(at), bulk(at)),
    "fixed_point": lambda at: algebra.fixed_point(weights(at, EDGES[:, 1].exp())),
    "norm": lambda at: algebra.norm(weights(at)),
    "product": lambda at: algebra.product(
        sampling.BulkMatrix.row_per_batch(bulk(at), 3), weights(at, EDGES[:, 0])
    ),
    "sample": lambda at: algebra.sample(weights(at), 1, at(KEYS)),
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


def batches(make):
    """What the batches of a loader hold, made on the device."""

    def run(at):
        place = {} if at.device == CPU else {"device": at.device}
        return [batch.to_dict() for batch in make(GRAPHS["undirected"](), place)]

    return run


def moved(make):
    """What the batches of a loader hold, which makes them on the host."""

    def run(at):
        found = make(GRAPHS["undirected"]())
        return [batch.to(at.device).to_dict() for batch in found]

    return run


def events():
    g = torch.Generator().manual_seed(0)
    src, dst = torch.randint(9, (2, 30), generator=g)
    return TemporalData(src=src, dst=dst, t=torch.arange(30), msg=torch.ones(30, 2))


def fetched(at):
    store = loading.DistFeatureStore.from_replicated(at(X), worlds.mesh())
    return store[at(IDS)]


def sampled(at):
    edges = at(GRAPHS["undirected"]().edge_index)
    loader = loading.NeighborSampler(edges, [-1, -1], batch_size=9)
    found = [
        (n_id, *(part for adj in adjs for part in adj[:2])) for _, n_id, adjs in loader
    ]
    return [[part.to(at.device) for part in parts] for parts in found]


class ByWeight(loading.GraphSAINTSampler):
    def sample_nodes(self, batch_size, key):
        return torch.arange(batch_size)


LOADER = {
    **told(
        "test_sample_device.py has it on every device",
        "NeighborLoader LinkNeighborLoader DistLayerLoader ClusterLoader HGTLoader "
        "RandomNodeLoader ShaDowKHopSampler GraphSAINTEdgeSampler "
        "GraphSAINTRandomWalkSampler",
    ),
    "NeighborSampler": sampled,
    "GraphSAINTSampler": batches(
        lambda d, place: ByWeight(d, 9, 2, **arguments(seed=1, **place))
    ),
    "GraphSAINTNodeSampler": batches(
        lambda d, place: loading.GraphSAINTNodeSampler(
            d, 16, 2, **arguments(seed=1, **place)
        )
    ),
    "DataLoader": moved(lambda d: loading.DataLoader([d, d, d], batch_size=2)),
    "TemporalDataLoader": moved(lambda _: loading.TemporalDataLoader(events(), 9)),
    "DistFeatureStore": fetched,
    **told("a loader above", "ClusterData DistLinkNeighborLoader DistNeighborLoader"),
    **told("the host", "ImbalancedSampler Phases LoaderOptions shared"),
}


def own(mine, theirs):
    """The names of a mirror of PyG's that are not PyG's own, modules apart."""
    pairs = ((name, getattr(mine, name)) for name in mine.__all__)
    kept = ((name, value) for name, value in pairs if not inspect.ismodule(value))
    return {name for name, value in kept if value is not getattr(theirs, name, None)}


TABLES = {"kernels": KERNELS, "ops": OPS, "algebra": ALGEBRA, "codecs": CODECS}
TABLES |= {"sampling": SAMPLING, "loader": LOADER}


def test_every_name_has_a_line():
    """A name that is not here comes back on no one knows which device."""
    of_ops = {name for name in vars(ops) if inspect.isclass(getattr(ops, name))}
    public = {
        "kernels": set(kernels.__all__),
        "ops": of_ops | {"spgemm"},
        "sampling": set(sampling.__all__),
        "algebra": set(algebra.__all__),
        "codecs": set(codecs.__all__),
        "loader": own(loading, torch_geometric.loader),
    }
    for name, names in public.items():
        assert sorted(names ^ set(TABLES[name])) == [], (
            f"{name}: lines and names differ"
        )
    host = {n for n in KERNELS if isinstance(KERNELS[n], str)}
    run_on_devices = {n for n in kernels.__all__ if isinstance(getattr(kernels, n), Op)}
    assert not run_on_devices & host


class At:
    """Puts tensors on a device."""

    def __init__(self, device):
        self.device = device

    def __call__(self, t):
        return t.clone().to(self.device)


def tensors(value, seen):
    """The tensors in a value, in lists, dictionaries and objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors(one, seen)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one, seen)
    elif type(value).__module__.startswith("pyg_distcomm") and id(value) not in seen:
        seen.append(id(value))
        yield from tensors(vars(value), seen)


def at_home(t):
    return alike.whole(t).detach().cpu()


def run_table(names, place):
    """Runs cases on both devices: nothing is elsewhere, or has other numbers."""
    device = second_device.device_of(place)

    def check(which):
        table, name = which
        case = TABLES[table][name]
        if isinstance(case, str):
            return
        seed_everything(3)
        want = [at_home(t) for t in tensors(case(At(CPU)), [])]
        seed_everything(3)
        found = list(tensors(case(At(device)), []))
        astray = {str(t.device) for t in found} - {str(device)}
        assert not astray, f"tensors on {astray}"
        assert want, "no tensors"
        loose = 1e-5 * (table == "ops" or place == "cuda")  # terms come in any order
        alike.same([at_home(t) for t in found], want, rtol=loose, atol=loose)

    cases = {
        f"{table}.{name}": (table, name) for table in names for name in TABLES[table]
    }
    alike.assert_none([alike.failures_of(cases, check)])


@pytest.mark.skipif(not second_device.can_build(), reason="no C++ compiler")
@tiers.parametrize("names", [tuple(TABLES)[:4], tuple(TABLES)[4:]], [])
@worlds.on(1, worlds.anew)
def test_tables(names):
    run_table(names, "spare")


@pytest.mark.cuda
@worlds.on(1, worlds.anew)
def test_on_cuda():
    run_table(TABLES, "cuda")
