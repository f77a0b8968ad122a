"""Every layer of PyG that can be made, with what it is called on: the tests' table."""

from __future__ import annotations

import inspect

import torch
import torch_geometric.nn as pyg
from problems import GRAPHS
from torch.nn import BatchNorm1d, Linear, Module, ReLU, Sequential
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import MessagePassing

F = 7  # features of the problems' graphs
OUT = 6


def mlp(a, b):
    return Sequential(Linear(a, b), BatchNorm1d(b), ReLU(), Linear(b, b))


def plain(a, b):
    return Sequential(Linear(a, b), ReLU(), Linear(b, b))


def chained(*parts):
    """A stack of layers, each by its place: a module, or a number of one before."""
    calls = []
    for part in parts:
        one = calls[part][0] if isinstance(part, int) else part
        edges = "edge_index" in inspect.signature(one.forward).parameters
        calls.append((one, "x, edge_index -> x" if edges else "x -> x"))
    return pyg.Sequential("x, edge_index", calls)


class Checkpointed(Module):
    """Computes a model again in the backward pass, in one of torch's two ways."""

    def __init__(self, model, reentrant=False):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, *args):
        return checkpoint(self.model, *args, use_reentrant=self.reentrant)


class EdgeNorm(MessagePassing):
    """A user's layer that normalises its messages over all edges."""

    def __init__(self, **kwargs):
        super().__init__(aggr="mean", **kwargs)
        self.lin, self.norm = Linear(2 * F, OUT), BatchNorm1d(OUT)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        h = self.norm(self.lin(torch.cat([x_i, x_j - x_i], dim=1)))
        return h - h.mean(0) + h.max()


class OwnEdges(MessagePassing):
    """Makes an edge_index of its own."""

    def forward(self, x, edge_index):
        ring = torch.arange(x.size(0)).repeat(2, 1)
        return self.propagate(ring, x=x)


class Draws(MessagePassing):
    """Draws numbers that depend on how many edges are here."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)

    def message(self, x_j):
        return x_j * torch.rand(x_j.size(0), 1)


class GhostNorm(MessagePassing):
    """Normalises over sources, with ghosts."""

    def __init__(self):
        super().__init__()
        self.norm = BatchNorm1d(F)

    def forward(self, x: tuple[torch.Tensor, torch.Tensor], edge_index):
        x = (x, x) if isinstance(x, torch.Tensor) else x
        return self.propagate(edge_index, x=(self.norm(x[0]), x[1]))


def problem(graph):
    """A graph with everything any layer asks for."""
    data = GRAPHS[graph.removeprefix("sorted ")]()
    if graph.startswith("sorted "):
        data = data.sort(sort_by_row=False)
    g = torch.Generator().manual_seed(11)
    n, e = data.num_nodes, data.edge_index.size(1)
    data.h6 = torch.randn(n, 6, generator=g, dtype=torch.float64)
    data.x0 = torch.randn(n, F, generator=g, dtype=torch.float64)
    data.pos = torch.randn(n, 3, generator=g, dtype=torch.float64)
    data.normal = torch.randn(n, 3, generator=g, dtype=torch.float64)
    data.node_type = torch.randint(0, 3, (n,), generator=g)
    data.edge_type = torch.randint(0, 3, (e,), generator=g)
    data.pseudo = torch.rand(e, 3, generator=g, dtype=torch.float64)
    return data


EDGE_ATTRS = ("edge_weight", "edge_attr", "edge_type", "pseudo")
NODE_ATTRS = ("x", "h6", "x0", "pos", "normal", "node_type", "y", "train_mask")
W = ("x", "edge_index", "edge_weight")
A = ("x", "edge_index", "edge_attr")
T = ("x", "edge_index", "edge_type")
X = ("x", "edge_index")
DEG = torch.tensor([3, 5, 9, 4, 2, 1])
PNA = (
    ["mean", "min", "max", "std", "var", "sum"],
    ["identity", "amplification", "linear"],
)


def _gat(kind, **kwargs):
    return lambda: getattr(pyg, kind)(F, 3, heads=2, **kwargs)


EXACT = {
    "GATConv": (_gat("GATConv"), X),
    "GATConv edges": (_gat("GATConv", edge_dim=3, residual=True), A),
    "GATConv bare": (_gat("GATConv", edge_dim=3, add_self_loops=False), A),
    "GATConv fill": (_gat("GATConv", edge_dim=3, fill_value="max", concat=False), A),
    "GATv2Conv": (_gat("GATv2Conv"), X),
    "GATv2Conv edges": (_gat("GATv2Conv", edge_dim=3, residual=True), A),
    "GATv2Conv bare": (_gat("GATv2Conv", edge_dim=3, add_self_loops=False), A),
    "GATv2Conv shared": (_gat("GATv2Conv", share_weights=True, fill_value=0.5), X),
    "GINConv": (lambda: pyg.GINConv(mlp(F, OUT), train_eps=True), X),
    "GINEConv": (lambda: pyg.GINEConv(mlp(F, OUT), edge_dim=3), A),
    "GINConv by row": (lambda: pyg.GINConv(plain(F, OUT), train_eps=True), X),
    "GraphConv": (lambda: pyg.GraphConv(F, OUT), W),
    "GraphConv max": (lambda: pyg.GraphConv(F, OUT, aggr="max"), W),
    "TransformerConv": (_gat("TransformerConv", edge_dim=3, beta=True), A),
    "TransformerConv mean": (_gat("TransformerConv", concat=False), X),
    "GCN2Conv": (lambda: pyg.GCN2Conv(F, 0.1, 0.5, 2), ("x", "x0", *W[1:])),
    "GCN2Conv unshared": (
        lambda: pyg.GCN2Conv(F, 0.1, 0.5, 2, shared_weights=False, cached=True),
        ("x", "x0", *W[1:]),
    ),
    "APPNP": (lambda: pyg.APPNP(3, 0.1), W),
    "APPNP cached": (lambda: pyg.APPNP(3, 0.1, cached=True), X),
    "SGConv": (lambda: pyg.SGConv(F, OUT, K=2), W),
    "SGConv cached": (lambda: pyg.SGConv(F, OUT, K=2, cached=True), X),
    "SSGConv": (lambda: pyg.SSGConv(F, OUT, 0.2, K=2), W),
    "TAGConv": (lambda: pyg.TAGConv(F, OUT, K=2), W),
    "TAGConv raw": (lambda: pyg.TAGConv(F, OUT, K=2, normalize=False), W),
    "EdgeConv": (lambda: pyg.EdgeConv(plain(2 * F, OUT)), X),
    "EdgeConv norm": (lambda: pyg.EdgeConv(mlp(2 * F, OUT), aggr="mean"), X),
    "ResGatedGraphConv": (lambda: pyg.ResGatedGraphConv(F, OUT, edge_dim=3), A),
    "GENConv": (lambda: pyg.GENConv(F, OUT, learn_t=True, edge_dim=3), A),
    "GENConv power": (
        lambda: pyg.GENConv(
            F, OUT, aggr="powermean", learn_p=True, msg_norm=True, learn_msg_scale=True
        ),
        X,
    ),
    "PNAConv": (lambda: pyg.PNAConv(F, OUT, *PNA, DEG, edge_dim=3, towers=2), A),
    "PNAConv trained": (
        lambda: pyg.PNAConv(F, OUT, *PNA, DEG, train_norm=True, pre_layers=2),
        X,
    ),
    "LEConv": (lambda: pyg.LEConv(F, OUT), W),
    "ClusterGCNConv": (lambda: pyg.ClusterGCNConv(F, OUT, diag_lambda=0.5), X),
    "FAConv": (lambda: pyg.FAConv(F), ("x", "x0", "edge_index")),
    "FAConv raw": (lambda: pyg.FAConv(F, normalize=False), ("x", "x0", *W[1:])),
    "LGConv": (lambda: pyg.LGConv(), W),
    "GeneralConv": (
        lambda: pyg.GeneralConv(F, OUT, 3, heads=2, attention=True, l2_normalize=True),
        A,
    ),
    "GeneralConv dot": (
        lambda: pyg.GeneralConv(
            F, OUT, attention=True, attention_type="dot_product", directed_msg=False
        ),
        X,
    ),
    "NNConv": (lambda: pyg.NNConv(F, OUT, plain(3, F * OUT), aggr="mean"), A),
    "CGConv": (lambda: pyg.CGConv(F, 3, batch_norm=True), A),
    "PointNetConv": (
        lambda: pyg.PointNetConv(plain(F + 3, OUT), Linear(OUT, OUT)),
        ("x", "pos", "edge_index"),
    ),
    "PPFConv": (
        lambda: pyg.PPFConv(plain(F + 4, OUT), Linear(OUT, OUT)),
        ("x", "pos", "normal", "edge_index"),
    ),
    "PointTransformerConv": (
        lambda: pyg.PointTransformerConv(F, OUT),
        ("x", "pos", "edge_index"),
    ),
    "PointGNNConv": (
        lambda: pyg.PointGNNConv(plain(F, 3), plain(F + 3, OUT), plain(OUT, F)),
        ("x", "pos", "edge_index"),
    ),
    "FeaStConv": (lambda: pyg.FeaStConv(F, OUT, heads=2), X),
    "FiLMConv": (lambda: pyg.FiLMConv(F, OUT), X),
    "FiLMConv norm": (
        lambda: pyg.FiLMConv(F, OUT, nn=Sequential(Linear(F, 12), BatchNorm1d(12))),
        X,
    ),
    "FiLMConv types": (lambda: pyg.FiLMConv(F, OUT, num_relations=3), T),
    "MixHopConv": (lambda: pyg.MixHopConv(F, OUT, powers=[0, 1, 2]), W),
    "ChebConv": (lambda: pyg.ChebConv(F, OUT, K=3), W),
    "ChebConv rw": (lambda: pyg.ChebConv(F, OUT, K=3, normalization="rw"), W),
    "ChebConv raw": (lambda: pyg.ChebConv(F, OUT, K=3, normalization=None), X),
    "RGCNConv": (lambda: pyg.RGCNConv(F, OUT, 3, num_bases=2), T),
    "RGCNConv blocks": (lambda: pyg.RGCNConv(6, OUT, 3, num_blocks=2), ("h6", *T[1:])),
    "FastRGCNConv": (lambda: pyg.FastRGCNConv(F, OUT, 3), T),
    "RGATConv": (lambda: pyg.RGATConv(F, 3, 3, heads=2, edge_dim=3), (*T, "edge_attr")),
    "RGATConv within": (
        lambda: pyg.RGATConv(
            F,
            3,
            3,
            num_bases=2,
            heads=2,
            attention_mechanism="within-relation",
            attention_mode="multiplicative-self-attention",
            dim=1,
        ),
        T,
    ),
    "GMMConv": (lambda: pyg.GMMConv(F, OUT, 3, kernel_size=2), (*X, "pseudo")),
    "GMMConv separate": (
        lambda: pyg.GMMConv(F, OUT, 3, kernel_size=2, separate_gaussians=True),
        (*X, "pseudo"),
    ),
    "SignedConv": (lambda: pyg.SignedConv(F, OUT, True), ("x", *X[1:] * 2)),
    "AGNNConv": (lambda: pyg.AGNNConv(), X),
    "GatedGraphConv": (lambda: pyg.GatedGraphConv(9, 2), W),
    "DNAConv": (lambda: pyg.DNAConv(F), ("stacked", *W[1:])),
    "EGConv": (
        lambda: pyg.EGConv(F, 8, ["sum", "mean", "symnorm", "max", "std"], 4, 2),
        X,
    ),
    "PDNConv": (lambda: pyg.PDNConv(F, OUT, 3, 4), A),
    "HEATConv": (
        lambda: pyg.HEATConv(F, 3, 3, 3, 2, 3, 4, heads=2, concat=False),
        ("x", "edge_index", "node_type", "edge_type", "edge_attr"),
    ),
    "WLConvContinuous": (lambda: pyg.WLConvContinuous(), W),
    "SimpleConv": (lambda: pyg.SimpleConv("mean", combine_root="cat"), W),
    "SimpleConv sum": (lambda: pyg.SimpleConv("sum", combine_root="sum"), W),
    "SuperGATConv": (lambda: _gat("SuperGATConv", attention_type="SD")().eval(), X),
    "EdgeNorm": (EdgeNorm, X),
    "GraphConv back": (lambda: pyg.GraphConv(F, OUT, flow="target_to_source"), W),
    "APPNP back": (lambda: pyg.APPNP(2, 0.1, flow="target_to_source"), W),
    "ChebConv back": (lambda: pyg.ChebConv(F, OUT, K=3, flow="target_to_source"), W),
    "GATv2Conv back": (_gat("GATv2Conv", flow="target_to_source"), X),
    "GraphConv mean": (lambda: pyg.GraphConv(F, OUT, aggr="mean"), W),
}

# aggregations, through SAGEConv and through HaloConv(SAGEConv)
AGGREGATIONS = {
    **{name: {} for name in ("max", "min", "std", "var", "mul", "median")},
    "softmax": {"aggr_kwargs": {"learn": True}},
    "powermean": {"aggr_kwargs": {"learn": True}},
    "quantile": {"aggr_kwargs": {"q": 0.3}},
    "lstm": {"aggr_kwargs": {"in_channels": F, "out_channels": F}},
    "gru": {"aggr_kwargs": {"in_channels": F, "out_channels": F}},
    "variance_preserving": {},
    "deepsets": {},
}

# what reads more than both ends of its edges, or draws by edge; see test_sharded.py
OTHERS = {
    "ARMAConv": (lambda: pyg.ARMAConv(F, OUT, num_stacks=2), W),
    "MFConv": (lambda: pyg.MFConv(F, OUT), X),
    "HypergraphConv": (lambda: pyg.HypergraphConv(F, OUT), X),
    "SuperGATConv training": (_gat("SuperGATConv"), X),
    "GATConv back": (_gat("GATConv", edge_dim=3, flow="target_to_source"), A),
    "OwnEdges": (OwnEdges, X),
    "Draws": (Draws, X),
    "GhostNorm": (GhostNorm, X),
}

# no message passing on one edge_index, or not to be made here: never reached
NOT_LAYERS = {
    **dict.fromkeys(
        ("CuGraphSAGEConv", "CuGraphGATConv", "CuGraphRGCNConv"), "cugraph"
    ),
    **dict.fromkeys(("FusedGATConv", "SplineConv", "PANConv"), "needs another package"),
    **dict.fromkeys(("GravNetConv", "DynamicEdgeConv", "XConv"), "takes no edge_index"),
    **dict.fromkeys(("HeteroConv", "HGTConv", "HANConv"), "takes dictionaries"),
    "MessagePassing": "abstract",
    "WLConv": "no MessagePassing layer: hashes colours",
    "GPSConv": "no MessagePassing layer: attends over all nodes",
    "AntiSymmetricConv": "no MessagePassing layer; convert() makes what is inside it so",
    "DirGNNConv": "no MessagePassing layer; reads edge_index.flip",
    "MeshCNNConv": "takes no graph, but a mesh of four neighbours per edge",
    "GCNConv": "DistGCNConv",
    "SAGEConv": "DistSAGEConv",
}


def make(build) -> Module:
    torch.manual_seed(3)
    return build().double()
