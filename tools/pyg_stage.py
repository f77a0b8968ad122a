"""Runs one of PyG's example scripts offline, for tools/pyg_examples.py.

What is adjusted here is adjusted alike whether the script imports PyG or this package:
float64, no dropout, few epochs, a seed, data sets that are at hand, numbers printed in
full. Nothing of PyG is copied here.
"""

from __future__ import annotations

import ast
import os
import random
import re
import sys
import traceback
import types
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import sklearn.cluster
import sklearn.linear_model
import sklearn.manifold
import sklearn.metrics
import torch
import torch_geometric
import torch_geometric.datasets
import torch_geometric.logging
import torch_geometric.nn.conv.spline_conv
import torch_geometric.sampler
import torch_geometric.seed
import torch_geometric.typing
import tqdm
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch_geometric.contrib.nn import GRBCDAttack, PRBCDAttack
from torch_geometric.data import Data, HeteroData, InMemoryDataset
from torch_geometric.explain import Explanation

import pyg_distcomm.nn  # noqa: F401 - read once, for all ranks
from pyg_distcomm.loader import LoaderOptions
from pyg_distcomm.sampling import neighbor_sampler

KEPT = 5  # steps of each optimizer whose gradients are kept
LARGE = 1 << 20  # elements; of larger gradients a digest is kept


# ----- the script ---------------------------------------------------------------------


class Uniform(ast.NodeTransformer):
    """Few epochs, no dropout, no workers, and numbers printed in full.

    With `batch`, loaders yield minibatches of so many seeds, in order and with all
    neighbours, so that they are no matter of chance.
    """

    SHORT = ("epochs", "num_epochs", "n_steps")

    def __init__(self, epochs, batch):
        self.epochs, self.batch = epochs, batch

    def _capped(self, node):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return ast.Constant(min(node.value, self.epochs))
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        name = ast.unparse(node.func)
        numbers = [a.value for a in node.args if isinstance(a, ast.Constant)]
        if name == "range" and len(numbers) == len(node.args) < 3:
            first, last = ([0, *numbers])[-2:]
            if last - first >= 9:
                node.args = [ast.Constant(first), ast.Constant(first + self.epochs)]
        for word in node.keywords:
            thins = word.arg == "p" and name.split(".")[-1].startswith("dropout")
            thins |= word.arg == "dropout"
            if thins and isinstance(word.value, ast.Constant):
                word.value = ast.Constant(0.0)
            if word.arg in self.SHORT:
                word.value = self._capped(word.value)
            word.value = self._alone(word.arg, word.value)
        if name == "set" and "parameters()" in ast.unparse(node):  # in their order
            node.func = ast.parse("dict.fromkeys", mode="eval").body
        if isinstance(node.func, ast.Attribute) and node.func.attr == "float":
            if not node.args and not node.keywords:
                node.func.attr = "double"
        return node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if ast.unparse(node) in ("torch.float", "torch.float32"):
            node.attr = "float64"
        return node

    def _alone(self, name, value):
        if name in ("num_workers", "persistent_workers"):
            return ast.Constant(0 if name == "num_workers" else False)
        if self.batch is None:
            return value
        if name == "batch_size" and isinstance(value, ast.Constant):
            return ast.Constant(self.batch)
        if name == "shuffle":
            return ast.Constant(False)
        if name == "num_neighbors" and isinstance(value, ast.Constant):
            return ast.Constant(1 << 20)  # more than there are
        if name == "num_neighbors":
            return ast.parse(f"[-1 for _ in {ast.unparse(value)}]", mode="eval").body
        return value

    def visit_Dict(self, node):
        self.generic_visit(node)
        for k, key in enumerate(node.keys):
            if isinstance(key, ast.Constant):
                node.values[k] = self._alone(key.value, node.values[k])
        return node

    def visit_Assign(self, node):
        self.generic_visit(node)
        if isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in self.SHORT:
                node.value = self._capped(node.value)
            node.value = self._alone(name, node.value)
        return node

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        given = node.args.args[len(node.args.args) - len(node.args.defaults) :]
        for k, arg in enumerate(given):
            if arg.arg in self.SHORT:
                node.args.defaults[k] = self._capped(node.args.defaults[k])
        return node

    def visit_BinOp(self, node):  # `epoch % 50 == 0` comes true at the second epoch
        self.generic_visit(node)
        if isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Name):
            if node.left.id == "epoch" and isinstance(node.right, ast.Constant):
                node.right = ast.Constant(min(node.right.value, 2))
        return node

    def visit_FormattedValue(self, node):
        self.generic_visit(node)
        spec = ast.unparse(node.format_spec)[2:-1] if node.format_spec else ""
        if re.fullmatch(r"\d*\.\d+f", spec):
            node.format_spec = ast.JoinedStr([ast.Constant(".15g")])
        return node


def compiled(source, name, epochs, batch=None):
    tree = ast.fix_missing_locations(Uniform(epochs, batch).visit(ast.parse(source)))
    return compile(tree, name, "exec")


# ----- what the script finds ----------------------------------------------------------


def at_hand(data, columns):
    """The same data in float64, and no wider than so many columns."""
    for store in data.stores:
        if isinstance(store.get("x"), torch.Tensor) and store.x.dim() == 2:
            store.x = store.x[:, :columns].contiguous()
    return in_doubles(data)


def zeroed(tensor):
    tensor.detach().zero_()
    return tensor


def in_doubles(found):
    """The same graph, or graphs, in float64."""
    if isinstance(found, (tuple, list)):
        return type(found)(in_doubles(data) for data in found)
    if not isinstance(found, (Data, HeteroData)):
        return found
    return found.apply(lambda t: t.double() if t.is_floating_point() else t)


def whole(tensor):
    """All rows of a tensor, as an ordinary one."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return (tensor.to_dense() if tensor.is_sparse else tensor).clone()


class Anything:
    """In the place of what only shows something: takes every call."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: None


class Bar(Anything):
    """In the place of tqdm: prints what it says, once."""

    def __init__(self, iterable=(), *_, **__):
        self.iterable = iterable

    def __iter__(self):
        return iter(self.iterable)

    def set_description(self, text=None, *_):
        print(text)

    set_postfix_str = set_description


def dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    return input


def spline_basis(pseudo, sizes, is_open, degree):
    """In the place of pyg-lib's, for B-splines of degree 1: products of hat functions."""
    assert degree == 1
    at = pseudo * (sizes - is_open.to(sizes.dtype))
    low = at.floor()
    basis, step = torch.ones_like(at[:, :1]), 1
    index = torch.zeros_like(at[:, :1], dtype=sizes.dtype)
    for k, size in enumerate(sizes.tolist()):
        part = at[:, k] - low[:, k]
        part = torch.stack([1 - part, part], 1)
        place = (low[:, k].long().unsqueeze(1) + torch.arange(2)) % size * step
        basis = (basis.unsqueeze(2) * part.unsqueeze(1)).flatten(1)
        index = (index.unsqueeze(2) + place.unsqueeze(1)).flatten(1)
        step *= size
    return basis, index


def spline_weighting(x, weight, basis, index):
    share = x.new_zeros(x.size(0), len(weight)).scatter_add(1, index, basis)
    return sum(share[:, k, None] * (x @ w) for k, w in enumerate(weight))


def negatives(period):
    """In the place of draws: the same ids for every so many samples."""

    def sample(self, num_samples, endpoint=None, num_nodes=None):
        return (torch.arange(num_samples) % period * 13 + 7) % num_nodes

    return sample


def log(**values):
    print(", ".join(f"{k}: {v:.15g}" for k, v in values.items()))


def module(name, **names):
    """Puts a module of these names where it will be imported from."""
    home = types.ModuleType(name)
    vars(home).update(names)
    sys.modules[name] = home
    parent, _, child = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            module(parent)
        setattr(sys.modules[parent], child, home)


def last_messages(original):
    """Has TGN's nodes without messages take none, as they do with torch-scatter."""

    def argmax(src, index, dim, dim_size):
        found = original(src, index, dim=dim, dim_size=dim_size)
        count = torch.bincount(index, minlength=dim_size)
        return found.masked_fill(count == 0, len(src))

    return argmax


def adjust(seed, columns):
    """Adjusts torch, PyG and what scripts plot and log with."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.cuda.is_available = lambda: False
    torch.nn.functional.dropout = dropout
    torch_geometric.logging.log = log
    if not torch_geometric.typing.WITH_SPLINE:
        spline = torch_geometric.nn.conv.spline_conv
        torch_geometric.typing.WITH_SPLINE = True
        spline.spline_basis, spline.spline_weighting = spline_basis, spline_weighting

    tgn = torch_geometric.nn.models.tgn
    tgn.scatter_argmax = last_messages(tgn.scatter_argmax)
    get, item = InMemoryDataset.get, torch_geometric.data.Dataset.__getitem__
    InMemoryDataset.get = lambda self, idx: at_hand(get(self, idx), columns)
    ours = lambda self, idx: in_doubles(item(self, idx))  # noqa: E731 - of a transform
    torch_geometric.data.Dataset.__getitem__ = ours
    signed = torch_geometric.nn.SignedGCN
    spectral = signed.create_spectral_features
    signed.create_spectral_features = lambda *a, **how: spectral(*a, **how).double()
    empty = torch.empty  # what a layer leaves as it is has the same values in each run
    torch.empty = lambda *args, **kwargs: zeroed(empty(*args, **kwargs))

    matplotlib.use("Agg")
    tqdm.tqdm = Bar
    sklearn.manifold.TSNE.fit_transform = lambda self, x: x[:, :2]
    module("wandb", init=Anything, log=Anything)
    module("torch.utils.tensorboard", SummaryWriter=Anything)

    Explanation.visualize_feature_importance = lambda *_, **__: None
    Explanation.visualize_graph = lambda *_, **__: None
    for attack in (PRBCDAttack, GRBCDAttack):  # 125 epochs, and 100 with resampling
        start = attack.__init__
        few = {125: 3, 100: 2}
        given = start.__defaults__
        start.__defaults__ = tuple(
            few.get(d, d) if type(d) is int else d for d in given
        )
    torch_geometric.seed.seed_everything(seed)
    random.seed(seed)


def counted(sample):
    """Undoes what pyg-lib draws for nothing; tells how much each hop of torch-sparse found."""

    def run(self, seed, *args, **kwargs):
        with torch.random.fork_rng([]):  # lazy parameters are initialized later
            out = sample(self, seed, *args, **kwargs)
        one_type = isinstance(out, torch_geometric.sampler.SamplerOutput)
        if one_type and out.num_sampled_nodes is None:
            begin, ends, edges = 0, [len(seed)], []
            for _ in range(self.num_neighbors.num_hops):
                here = (out.col >= begin) & (out.col < ends[-1])
                begin = ends[-1]
                ends.append(max([begin, *(out.row[here] + 1).tolist()]))
                edges.append(int(here.sum()))
            out.num_sampled_nodes = [ends[0], *(np.diff(ends).tolist())]
            out.num_sampled_edges = edges
        return out

    return run


def drawing_nothing(iterate):
    """Leaves torch's generator as it is when minibatches begin."""

    def run(self):
        with torch.random.fork_rng([]):
            return iterate(self)

    return run


def calm_loaders(period):
    """Draws no negative samples by chance, PyG's or this package's, nor a loader's seed."""
    torch_geometric.sampler.NegativeSampling.sample = sample = negatives(period)
    loader = torch.utils.data.DataLoader
    loader.__iter__ = drawing_nothing(loader.__iter__)
    sampler = torch_geometric.sampler.NeighborSampler
    sampler._sample = counted(sampler._sample)
    neighbor_sampler.KeyedNegatives.sample = sample
    LoaderOptions.__init__.__kwdefaults__["seed"] = 0


# ----- data sets ----------------------------------------------------------------------


def numbers(name):
    """A generator of a data set's own, so that the script's draws stay as they are."""
    return np.random.default_rng(sum(map(ord, name)))


def ints(g, high, *shape):
    return torch.from_numpy(g.integers(0, high, shape))


def normal(g, *shape):
    return torch.from_numpy(g.standard_normal(shape))


def links(g, n, m, e):
    """`e` distinct edges from `n` nodes to `m`, no node without one."""
    count = max(n, m)
    some = torch.stack([torch.arange(count) % n, torch.arange(count) % m])
    rest = torch.stack([ints(g, n, e), ints(g, m, e)])
    return torch.cat([some, rest], 1).unique(dim=1).contiguous()


def masks(g, n, splits=None):
    """Masks of half the nodes, a quarter and a quarter, one column for each split."""
    draw = torch.from_numpy(g.random((n, splits or 1))).argsort(0) / n
    parts = draw < 0.5, (draw >= 0.5) & (draw < 0.75), draw >= 0.75
    parts = [part if splits else part[:, 0] for part in parts]
    return dict(zip(("train_mask", "val_mask", "test_mask"), parts, strict=True))


def both_ways(data, source, verb, target, back, edges):
    """Has edges of two types lead there and back."""
    data[source, verb, target].edge_index = edges
    data[target, back, source].edge_index = edges.flip(0)


def one_graph(name, n=400, e=2400, features=24, classes=4, splits=None):
    g = numbers(name)
    edges = links(g, n, n, e)
    edges = torch.cat([edges, edges.flip(0)], 1).unique(dim=1).contiguous()
    data = Data(x=normal(g, n, features), edge_index=edges)
    data.y = (data.x @ normal(g, features, classes)).argmax(-1)
    return Data(**data.to_dict(), **masks(g, n, splits))


class StandIn(InMemoryDataset):
    """A data set of graphs that `make` draws; PyG's class is not asked to download."""

    def __init__(self, *args, transform=None, pre_transform=None, **options):
        super().__init__(None, transform)
        at = [k for k, a in enumerate(args) if callable(a) and not isinstance(a, str)]
        self.transform = args[at[0]] if at and transform is None else transform
        names = [a for k, a in enumerate(args) if k and isinstance(a, str)]
        self.name = options.get("name") or (names or args or [""])[0]
        self.options = options
        graphs = self.make()
        graphs = graphs if isinstance(graphs, list) else [graphs]
        graphs = [pre_transform(d) if pre_transform else d for d in graphs]
        self.data, self.slices = self.collate(graphs)


def many_graphs(name, count=24, features=3, classes=2):
    """Graphs of 4 to 19 nodes, each with its class."""
    g, out = numbers(name), []
    for k in range(count):
        n = 4 + 5 * k % 16
        edges = links(g, n, n, 2 * n)
        edges = torch.cat([edges, edges.flip(0)], 1).unique(dim=1).contiguous()
        y = torch.tensor([k % classes])
        out.append(Data(x=normal(g, n, features), edge_index=edges, y=y))
    return out


class TUDataset(StandIn):
    def make(self):
        return many_graphs(self.name)


class PPI(StandIn):
    def make(self):
        graphs = many_graphs("PPI", 6, 50)
        for data in graphs:
            data.y = (data.x[:, :121] @ normal(numbers("PPI"), 50, 121) > 0).double()
        return graphs


class ZINC(StandIn):
    def make(self):
        graphs = many_graphs("ZINC")
        for data in graphs:
            g = numbers("ZINC")
            data.x, data.y = ints(g, 21, data.num_nodes, 1), normal(g, 1)
            data.edge_attr = ints(g, 4, data.num_edges)
        return graphs


def of_one_graph(kind, *args, **options):
    """A data set of one graph by its class's name."""
    return type(kind, (StandIn,), {"make": lambda self: one_graph(*args, **options)})


WikipediaNetwork = of_one_graph("WikipediaNetwork", "chameleon", splits=10)
LINKXDataset = of_one_graph("LINKXDataset", "Penn94", splits=5)
Flickr = of_one_graph("Flickr", "Flickr", classes=7)
Reddit = of_one_graph("Reddit", "Reddit", n=640, classes=5)


class GraphLandDataset(StandIn):
    GRAPHLAND_DATASETS = torch_geometric.datasets.GraphLandDataset.GRAPHLAND_DATASETS

    def make(self):
        self.split = self.options["split"]
        self.task = self.GRAPHLAND_DATASETS[self.name]
        data = one_graph("GraphLand", classes=2)
        data.y = data.y.double()
        return data


class Entities(StandIn):
    num_relations = property(lambda self: int(self._data.edge_type.max()) + 1)
    num_classes = property(lambda self: int(self._data.train_y.max()) + 1)

    def make(self):
        g, n = numbers("AIFB"), 300
        edges = links(g, n, n, 1500)
        edges = torch.cat([edges, edges.flip(0)], 1)
        kinds = torch.arange(edges.size(1)) % 8
        nodes = torch.from_numpy(g.permutation(n))[:150]
        y = torch.arange(150) % 4
        own = dict(zip(("train_idx", "test_idx"), nodes.split([100, 50]), strict=True))
        own |= {"train_y": y[:100], "test_y": y[100:], "num_nodes": n}
        return Data(edge_index=edges, edge_type=kinds, **own)


class RelLinkPredDataset(StandIn):
    num_relations = property(lambda self: int(self._data.edge_type.max()) + 1)

    def make(self):
        g, n, kinds = numbers("FB15k-237"), 200, 5
        edges = links(g, n, n, 900)
        types = torch.arange(edges.size(1)) % kinds
        order = torch.from_numpy(g.permutation(edges.size(1)))
        data = Data(num_nodes=n)
        parts = order.split([edges.size(1) - 16, 8, 8])
        for name, ids in zip(("train", "valid", "test"), parts, strict=True):
            data[f"{name}_edge_index"] = edges[:, ids]
            data[f"{name}_edge_type"] = types[ids]
        train, kind = data.train_edge_index, data.train_edge_type
        data.edge_index = torch.cat([train, train.flip(0)], 1)
        data.edge_type = torch.cat([kind, kind + kinds])
        return data


class BitcoinOTC(StandIn):
    def make(self):
        g, n, graphs = numbers("BitcoinOTC"), 200, []
        edges = links(g, n, n, 1500)
        order = torch.from_numpy(g.permutation(edges.size(1)))
        for ids in order.chunk(5):
            good = ints(g, 10, len(ids)) + 1
            sign = torch.where(ints(g, 4, len(ids)) > 0, 1, -1)
            how = {"edge_attr": good * sign, "num_nodes": n}
            graphs.append(Data(edge_index=edges[:, ids], **how))
        return graphs


class IMDB(StandIn):
    def make(self):
        g, data = numbers("IMDB"), HeteroData()
        for name, n in (("movie", 240), ("director", 80), ("actor", 200)):
            data[name].x = normal(g, n, 32)
        movie = data["movie"]
        movie.y = (movie.x @ normal(g, 32, 3)).argmax(-1)
        movie.update(masks(g, 240))
        for name, n, e in (("director", 80, 100), ("actor", 200, 500)):
            both_ways(data, "movie", "to", name, "to", links(g, 240, n, e))
        return data


class MovieLens(StandIn):
    def make(self):
        g, data = numbers("MovieLens"), HeteroData()
        data["movie"].x = normal(g, 150, 24)
        data["user"].num_nodes = 90
        rates = data["user", "rates", "movie"]
        rates.edge_index = links(g, 90, 150, 1200)[:, :1000]
        rates.edge_label = ints(g, 6, rates.edge_index.size(1))
        rates.time = ints(g, 10_000, rates.edge_index.size(1))
        return data


class AmazonBook(StandIn):
    def make(self):
        g, data = numbers("AmazonBook"), HeteroData()
        data["user"].num_nodes, data["book"].num_nodes = 120, 160
        edges = links(g, 120, 160, 1800)
        parts = edges[:, torch.from_numpy(g.permutation(edges.size(1)))]
        train, test = parts[:, :-300], parts[:, -300:]
        both_ways(data, "user", "rates", "book", "rated_by", train)
        data["user", "rates", "book"].edge_label_index = test
        return data


class OGB_MAG(StandIn):
    num_classes = 4

    def make(self):
        g, data = numbers("MAG"), HeteroData()
        sizes = {"paper": 320, "author": 200, "institution": 20, "field_of_study": 40}
        for name, n in sizes.items():
            data[name].x = normal(g, n, 16)
        data["paper"].y = ints(g, 4, 320)
        data["paper"].update(masks(g, 320))
        for a, verb, b in (
            ("author", "affiliated_with", "institution"),
            ("author", "writes", "paper"),
            ("paper", "cites", "paper"),
            ("paper", "has_topic", "field_of_study"),
        ):
            data[a, verb, b].edge_index = links(g, sizes[a], sizes[b], 900)
        return data


class Taobao(StandIn):
    def make(self):
        g, data = numbers("Taobao"), HeteroData()
        data["user"].num_nodes, data["item"].num_nodes = 150, 200
        data["category"].num_nodes = 10
        edges = links(g, 150, 200, 1500)[:, :1500]
        data["user", "to", "item"].edge_index = edges
        data["user", "to", "item"].time = ints(g, 10_000, edges.size(1))
        data["user", "to", "item"].behavior = ints(g, 4, edges.size(1))
        data["item", "to", "category"].edge_index = links(g, 200, 10, 50)
        return data


class JODIEDataset(StandIn):
    def make(self):
        from torch_geometric.data import TemporalData

        g, e = numbers("JODIE"), 600
        when = torch.from_numpy(np.sort(g.integers(0, 10_000, e)))
        msg = normal(g, e, 12)
        return TemporalData(ints(g, 40, e), ints(g, 30, e) + 40, when, msg)


class PygNodePropPredDataset(StandIn):
    """In the place of ogb's class of this name."""

    def make(self):
        self.name = self.name if self.name.startswith("ogbn") else "ogbn-arxiv"
        data = one_graph(self.name, classes=5)
        self.parts = {
            other: data[f"{name}_mask"].nonzero().view(-1)
            for other, name in (("train", "train"), ("valid", "val"), ("test", "test"))
        }
        n, g = data.num_nodes, numbers(self.name)
        kept = Data(x=data.x, y=data.y.view(-1, 1), edge_index=data.edge_index)
        if self.name == "ogbn-proteins":
            kept = Data(y=ints(g, 2, n, 6), edge_index=data.edge_index, num_nodes=n)
            kept.edge_attr = normal(g, data.num_edges, 8)
            kept.node_species = ints(g, 5, n, 1)
        return kept

    def get_idx_split(self):
        return self.parts


class PygLinkPropPredDataset(StandIn):
    """In the place of ogb's class of this name."""

    def make(self):
        g, data = numbers("ogbl"), one_graph("ogbl")
        edges = data.edge_index[:, data.edge_index[0] < data.edge_index[1]].t()
        edges = edges[torch.from_numpy(g.permutation(len(edges)))]
        self.parts = {}
        rows = edges.split([len(edges) - 200, 100, 100])
        for name, some in zip(("train", "valid", "test"), rows, strict=True):
            drawn = ints(g, data.num_nodes, 100, 2)
            self.parts[name] = {"edge": some, "edge_neg": drawn}
        train = self.parts["train"]["edge"].t()
        edges = torch.cat([train, train.flip(0)], 1)
        return Data(x=data.x, edge_index=edges, num_nodes=data.num_nodes)

    def get_edge_split(self):
        return self.parts


class Evaluator:
    """In the place of ogb's: accuracy, area under the curve, hits."""

    K = 20

    def __init__(self, name):
        self.name = name

    def eval(self, given):
        given = {k: v.detach().cpu().numpy() for k, v in given.items()}
        if "y_pred_pos" in given:
            border = np.sort(given["y_pred_neg"])[-self.K]
            return {f"hits@{self.K}": float((given["y_pred_pos"] > border).mean())}
        both = given["y_true"], given["y_pred"]
        if self.name == "ogbn-proteins":
            return {"rocauc": sklearn.metrics.roc_auc_score(*both)}
        return {"acc": float((both[0] == both[1]).mean())}


class Planetoid(StandIn):
    def make(self):
        return one_graph(self.name, n=800, e=1600, classes=7)


class DBLP(StandIn):
    def make(self):
        g, data = numbers("DBLP"), HeteroData()
        data["author"].x, data["paper"].x = normal(g, 120, 33), normal(g, 200, 42)
        data["term"].x, data["conference"].num_nodes = normal(g, 90, 5), 20
        data["author"].y = ints(g, 4, 120)
        data["author"].update(masks(g, 120))
        for name, n in (("author", 120), ("term", 90), ("conference", 20)):
            both_ways(data, "paper", "to", name, "to", links(g, 200, n, 400))
        return data


def furnish(home):
    """Puts the data sets that are at hand where scripts look for them."""
    real = torch_geometric.datasets

    def read_from(name, cls):
        class AtHand(cls):
            def __init__(self, root=None, *args, **options):
                super().__init__(str(Path(home, name)), *args, **options)

        return AtHand

    for name, cls in (("planetoid", "Planetoid"), ("hetero_dblp", "DBLP")):
        there = Path(home, name).exists()
        known = read_from(name, getattr(real, cls)) if there else globals()[cls]
        setattr(real, cls, known)
    for cls in StandIn.__subclasses__():
        if hasattr(real, cls.__name__) and cls not in (Planetoid, DBLP):
            setattr(real, cls.__name__, cls)
    for what, kind in (
        ("node", PygNodePropPredDataset),
        ("link", PygLinkPropPredDataset),
    ):
        module(f"ogb.{what}proppred", **{kind.__name__: kind, "Evaluator": Evaluator})


# ----- what is kept -------------------------------------------------------------------


class FailureMonitor:
    """Keeps the gradients of each optimizer's first steps, and its parameters."""

    def __init__(self):
        self.optimizers, self.kept = [], {}
        register_optimizer_step_post_hook(self.step)

    def step(self, optimizer, *_):
        if all(optimizer is not entry[0] for entry in self.optimizers):
            self.optimizers.append([optimizer, 0])
        k = next(k for k, (o, _) in enumerate(self.optimizers) if o is optimizer)
        self.optimizers[k][1] += 1
        step = self.optimizers[k][1]
        if step > KEPT or k > KEPT:
            return
        for p, value in enumerate(parameters(optimizer)):
            if value.grad is not None:
                grad = whole(value.grad)
                if grad.numel() > LARGE:
                    grad = torch.stack([grad.sum(), grad.norm()])
                self.kept[f"gradient of optimizer {k} step {step} parameter {p}"] = grad


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def harvest(names, watch):
    """All parameters and buffers of the script's modules, all gradients kept."""
    kept = dict(watch.kept)
    for name, value in names.items():
        if isinstance(value, torch.nn.Module):
            if type(value).__name__ in ("Alone", "Replicated"):  # pdc.replicate's
                value = value.module
            for kind in (value.named_parameters(), value.named_buffers()):
                for key, tensor in kind:
                    scratch = key.endswith("_assoc")  # of a memory's last call
                    if not scratch and not torch.nn.parameter.is_lazy(tensor):
                        kept[f"{name}.{key}"] = whole(tensor)
        explains = type(value).__name__ in ("Explanation", "HeteroExplanation")
        if explains and name != "data":  # as ExplainerDataset has it
            for key in ("node_mask", "edge_mask"):
                if isinstance(value.get(key), torch.Tensor):
                    mask = whole(value[key]).flatten().sort().values
                    kept[f"{name}.{key} (sorted)"] = mask
    for k, (optimizer, _) in enumerate(watch.optimizers[:KEPT]):
        for p, value in enumerate(parameters(optimizer)):
            kept[f"optimizer {k} parameter {p}"] = whole(value)
    return kept


def travelled(names):
    """The bytes that this rank's ledger has counted, None where there is no mesh."""
    mesh = names.get("mesh")
    return None if mesh is None else int(mesh.ledger.bytes())


def fault(error, script):
    """Type, first line and place of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f"{f.filename}:{f.lineno}" for f in frames if f.filename == script]
    first = (str(error).strip().splitlines() or [""])[0]
    last = frames[-1] if frames else None
    place = f"{last.filename}:{last.lineno}" if last else ""
    return {
        "error": f"{type(error).__name__}: {first}",
        "line": own[-1].rpartition(":")[2] if own else "",
        "place": place,
    }


def run_job(job):
    """Runs the script of a job, and saves what came of it."""
    source, rank = job["source"], int(os.environ.get("RANK", 0))
    sys.path.insert(0, str(Path(job["script"]).parent))
    sys.argv = [job["script"], *job["argv"]]
    adjust(job["seed"] + (1000 * rank if job["apart"] else 0), job["columns"])
    if job.get("batch"):
        calm_loaders(job.get("period", 10))
    furnish(job["home"])
    watch, result = FailureMonitor(), {"error": None, "line": "", "place": ""}
    text = Path(source).read_text()
    code = compiled(text, source, job["epochs"], job.get("batch"))
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    script.__file__ = source
    sys.modules[Path(source).stem] = script  # nn.Sequential imports it by this name
    try:
        exec(code, vars(script))
        result["tensors"] = harvest(vars(script), watch)
        result["bytes"] = travelled(vars(script))
    except SystemExit as stop:
        if stop.code not in (None, 0):
            result |= fault(stop, source)
    except BaseException as error:
        traceback.print_exc()
        result |= fault(error, source)
    torch.save(result, Path(job["folder"], f"result{rank}.pt"))
    if result["error"]:
        sys.exit(1)
