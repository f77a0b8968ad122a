"""Runs PyG's own example scripts with the imports swapped, and compares with PyG.

    python tools/pyg_examples.py CHECKOUT [--only gcn,gat] [--ranks 1 2] [--write FILE]

CHECKOUT holds PyG's repository, at the tag of the PyG that is installed or the nearest.
Each script that trains on one graph is run as it is, on one process; then with
`torch_geometric.nn` and `torch_geometric.loader` replaced by `pyg_distcomm.nn` and
`pyg_distcomm.loader`, and two lines added, `mesh = pdc.init()` and
`data = pdc.partition(data, mesh)`, on each number of ranks. Compared are all numbers
printed (except in lines on time), and all parameters, buffers and gradients. Both runs are
adjusted alike by pyg_stage.py: float64, no dropout, few epochs, one seed, data sets at
hand, no more than 64 features (--columns): Planetoid's and DBLP where --data has them,
else and for all others generated graphs. Nothing of PyG is copied here.

Scripts on minibatches also get `model = pdc.replicate(model, mesh)`, and both runs take all
neighbours, in order. P ranks with minibatches of B seeds are compared with one process with
P B, in parameters and gradients: what a rank prints is of its own minibatches. PyG's loaders
need pyg-lib or torch-sparse (three scripts the latter); --compiled names a folder of them.

Exits with 1 if a script is WRONG or hangs.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import fnmatch
import importlib
import platform
import re
import shutil
import sys
import tempfile
import time
from importlib.machinery import PathFinder
from pathlib import Path

import torch
import torch_geometric
from ranks import Nursery

SHARED = Path(__file__).parents[2] / "shared" / "data"
REAL = ("planetoid", "hetero_dblp")  # generated where they are missing
GRACE = 15.0  # seconds that other ranks have once one has failed

# ----- which scripts ------------------------------------------------------------------

# one graph, all of it at every step
FULL = """
gcn gat cora agnn arma mixhop pmlp sgc tagcn super_gat dna dir_gnn gcn2_cora graph_unet
infomax_transductive glnn ogc rect linkx graphland tensorboard_logging unimp_arxiv
label_prop rgcn rgat signed_gcn link_pred ar_link_pred autoencoder
argva_node_clustering rgcn_link_pred jit/gcn jit/gat compile/gcn hetero/han_imdb
hetero/hetero_conv_dblp hetero/hgt_dblp hetero/dmgi_unsup hetero/hetero_link_pred
hetero/bipartite_sage explain/gnn_explainer explain/gnn_explainer_ba_shapes
explain/gnn_explainer_link_pred explain/graphmask_explainer contrib/rbcd_attack
""".split()

# batches of DataLoader or TemporalDataLoader, each of which is cut
MANY = "mutag_gin proteins_topk_pool proteins_gmt ppi film pna tgn".split()

# all of one graph is there at every step, and labels or edges come in batches
BATCHED = "sign lightgcn lpformer".split()

# minibatches of NeighborLoader and LinkNeighborLoader
MINIBATCH = """
reddit graph_sage_unsup hierarchical_sampling ogbn_train
hetero/to_hetero_mag hetero/hierarchical_sage hetero/bipartite_sage_unsup
hetero/recommender_system hetero/temporal_link_pred
""".split()

# minibatches of other loaders: run where pyg_distcomm.loader has one of its own
OTHER_LOADERS = {
    "cluster_gcn_reddit": "ClusterLoader",
    "graph_saint": "GraphSAINTRandomWalkSampler",
    "shadow": "ShaDowKHopSampler",
    "ogbn_proteins_deepgcn": "RandomNodeLoader",
    "rev_gnn": "RandomNodeLoader",
}

# minibatches of two ranks have other edges than one minibatch of all their nodes
INDUCED = ("ClusterLoader", "GraphSAINTRandomWalkSampler", "RandomNodeLoader")

# run by processes that can import one of SAMPLERS; the others run without
SAMPLERS = ("pyg_lib", "torch_sparse")
SPARSE = [*MINIBATCH, *OTHER_LOADERS, "correct_and_smooth"]

# the first pattern that fits tells why
LEFT_OUT = {
    "many small graphs": """
        attentive_fp cluster_gcn_ppi colors_topk_pool compile/gin
        contrib/pgm_explainer_graph_classification datapipe egc
        explain/mgnan_graph_mutagenicity faust gcn2_ppi geniepath gpse graph_gps
        graph_sage_unsup_ppi jit/film jit/gin mem_pool mnist_* proteins_*_pool
        pytorch_*/gin qm9_* renet seal_link_pred triangles_sag_pool upfd wl_kernel
        multi_gpu/distributed_batching multi_gpu/pcqm4m_ogb""",
    "point clouds": "dgcnn_* point_transformer_* pointnet2_* randlanet_*",
    "no graph: sets of numbers": "equilibrium_median lcm_aggr_2nd_min",
    "trains nothing": "cpp/save_model hetero/load_csv",
    "a language model": "llm/*",
    "needs several GPUs": "multi_gpu/model_parallel",
    "one graph, but random walks need pyg-lib": "node2vec hetero/metapath2vec",
    "minibatches, whose rows the script permutes by chance": "infomax_inductive",
    "one graph, but no layer on it: triplets in batches": "kge_fb15k_237",
    "one graph, but needs captum": "explain/captum_explainer*",
    "one graph, but needs pgmpy": "contrib/pgm_explainer_node_classification",
    "one graph, but needs higher": "contrib/rbcd_attack_poisoning",
    "one graph, but needs relbench": "relbench_example",
    "minibatches, and needs relbench and torch-frame": "rdl",
    "minibatches, and needs pytorch-lightning": "pytorch_lightning/*",
    "minibatches on several GPUs or machines, distributed already": """
        multi_gpu/* quiver/* distributed/*""",
}

# the script's own names of its graphs, where it is not `data`
SPLITS = ("train_data", "val_data", "test_data")
GRAPHS = {
    "link_pred": SPLITS,
    "autoencoder": SPLITS,
    "argva_node_clustering": SPLITS,
    "explain/gnn_explainer_link_pred": SPLITS,
    "hetero/hetero_link_pred": SPLITS,
    "hetero/bipartite_sage": SPLITS,
    "rect": ("zs_data",),
    "hetero/bipartite_sage_unsup": SPLITS,
    "signed_gcn": (),  # has edges and features, and no Data
    "graphland": (),  # reads dataset[0] anew in every step
    "reddit": (),  # looks up rows by n_id, other ids on each rank
}

# what a script is started with
ARGV = {
    "gcn": "--epochs 3",
    "gat": "--epochs 3",
    "mutag_gin": "--epochs 3",
    "autoencoder": "--epochs 3",
    "dir_gnn": "--epochs 3",
    "ar_link_pred": "--epochs 3",
    "graphland": "--name tolokers-2 --split RL",
    "lpformer": "--device cpu --epochs 3 --runs 1 --batch_size 256 --data_name ogbl",
    "ogbn_train": "--model sage --epochs 2 --num_workers 0 --batch_size {batch}",
}

# seeds of a minibatch, where 20 do not divide them evenly
BATCH = {"graph_sage_unsup": 377}

# features: GraphMaskExplainer would take 64 for 8 heads of 8, and a script wants 200
COLUMNS = {"explain/graphmask_explainer": 96, "rect": 256}

# scripts that PyG does not run as they are under this torch: edited for both runs
EDITED = ("jit/gat",)
# with the default seed two nodes of equal score are at the cut of a pool, and which of them
# is kept is decided by the last bit
SEEDS = {"graph_unet": 1}


@dataclasses.dataclass(frozen=True)
class Edit:
    """A change that a script needs beyond the swap: what it says, old text, new text."""

    why: str
    old: str
    new: str


def changed(why, *pairs):
    """Edits of one purpose."""
    return tuple(Edit(why, old, new) for old, new in pairs)


def first_batch(inputs):
    """The edits by which a lazy model sees a minibatch before it is replicated."""
    line = "model = pdc.replicate(model, mesh)\n"
    batch = "with torch.no_grad():\n    batch = next(iter(train_loader))\n"
    return changed(
        "a first minibatch before `replicate`",
        (line + "optimizer", "optimizer"),
        ("def train():\n", f"{batch}    {inputs}\n{line}\n\ndef train():\n"),
    )


LINKS = (
    "model(batch.x_dict, batch.edge_index_dict, batch['user', '{}'].edge_label_index)"
)
SAMPLED = (
    "model(batch.x_dict, batch.edge_index_dict, batch.num_sampled_edges_dict, "
    "batch.num_sampled_nodes_dict)"
)


SPECTRAL = (
    "x = model.create_spectral_features(train_pos_edge_index, train_neg_edge_index)\n"
)
# tried where the swap alone is not exact, all of a script's edits together
UNUSED = changed(
    "`replicate(..., find_unused_parameters=True)`",
    ("replicate(model, mesh)", "replicate(model, mesh, find_unused_parameters=True)"),
)
EDITS = {
    "jit/gcn": changed(
        "no torch.jit.script",
        ("torch.jit.script(model).to(device)", "model.to(device)"),
    ),
    "jit/gat": changed(
        "no torch.jit.script", ("model = torch.jit.script(model)\n", "")
    ),
    "compile/gcn": changed(
        "no torch.compile", ("model = torch.compile(model, dynamic=False)\n", "")
    ),
    "explain/graphmask_explainer": changed(
        "explain on whole tensors, `.full_tensor()`",
        (
            "explainer(data.x, data.edge_index,",
            "explainer(data.x.full_tensor(), data.edge_index.full_tensor(),",
        ),
    ),
    "reddit": changed(
        "`LoaderOptions(split=False)` for the loader of all nodes",
        ("loader import NeighborLoader", "loader import LoaderOptions, NeighborLoader"),
        (
            "num_neighbors=[-1], shuffle=False",
            "num_neighbors=[-1], shuffle=False, options=LoaderOptions(split=False)",
        ),
    ),
    "hetero/to_hetero_mag": UNUSED,
    "hetero/hierarchical_sage": (*first_batch(SAMPLED), *UNUSED),
    "hetero/bipartite_sage_unsup": first_batch(LINKS.format("item")),
    "hetero/recommender_system": first_batch(LINKS.format("movie")),
    "hetero/temporal_link_pred": first_batch(LINKS.format("movie")),
    "correct_and_smooth": changed(
        "scale the adjacency before it is cut",
        ("adj_t = data.adj_t.to(device)", "adj_t = dataset[0].adj_t.to(device)"),
        (
            "post = CorrectAndSmooth(",
            "from torch_geometric.data import Data\n\n"
            "def cut(adj_t):\n"
            "    row, col, weight = adj_t.coo()\n"
            "    whole = Data(edge_index=torch.stack([col, row]), edge_weight=weight)\n"
            "    whole.num_nodes = data.num_nodes\n"
            "    return pdc.partition(whole, mesh)\n\n"
            "DAD, DA = cut(DAD), cut(DA)\n"
            "post = CorrectAndSmooth(",
        ),
        ("train_idx, DAD)", "train_idx, DAD.edge_index, DAD.edge_weight)"),
        ("train_idx, DA)", "train_idx, DA.edge_index, DA.edge_weight)"),
    ),
    "graphland": changed(
        "partition where dataset[0] is read",
        ("    data = dataset[0]\n", "    data = pdc.partition(dataset[0], mesh)\n"),
    ),
    "signed_gcn": changed(
        "a Data of the features and edges",
        (
            SPECTRAL,
            f"{SPECTRAL}from torch_geometric.data import Data\n"
            "positive = pdc.partition(Data(x=x, edge_index=train_pos_edge_index), mesh)\n"
            "negative = Data(x=x, edge_index=train_neg_edge_index)\n"
            "negative = pdc.partition(negative, mesh, positive.x.rows.partition)\n"
            "x, train_pos_edge_index = positive.x, positive.edge_index\n"
            "train_neg_edge_index = negative.edge_index\n",
        ),
    ),
}


# ----- the swap -----------------------------------------------------------------------


def renamed(source):
    """The source with this package's `nn` and `loader` in the place of PyG's."""
    whole = re.compile(r"(?<![\w.])torch_geometric\.(nn|loader)(?![\w])")
    source = whole.sub(r"pyg_distcomm.\1", source)
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):  # from torch_geometric import nn
        if isinstance(node, ast.ImportFrom) and node.module == "torch_geometric":
            ours = [a for a in node.names if a.name in ("nn", "loader")]
            rest = [a for a in node.names if a not in ours]
            if ours:
                parts = {"pyg_distcomm": ours, node.module: rest}.items()
                new = [
                    ast.unparse(ast.ImportFrom(m, its, 0)) for m, its in parts if its
                ]
                lines[node.lineno - 1] = " " * node.col_offset + "; ".join(new) + "\n"
                for k in range(node.lineno, node.end_lineno):
                    lines[k] = "\n"
    return "".join(lines)


def assigned(statement):
    """The names that a statement binds, or whose attributes or items it sets or deletes."""
    targets = []
    if isinstance(statement, (ast.Assign, ast.Delete)):
        targets = statement.targets
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        targets = [statement.target]
    names = set()
    if isinstance(statement, ast.For):  # over the splits, say
        names = set().union(*map(assigned, statement.body))
    while targets:
        target, *targets = targets
        if isinstance(target, (ast.Tuple, ast.List)):
            targets += target.elts
        while isinstance(target, (ast.Attribute, ast.Subscript)):
            target = target.value
        if isinstance(target, ast.Name):
            names.add(target.id)
    return names


def scopes(tree):
    """Bodies in which a script may make its graph: the module, and what it runs as main."""
    yield tree.body
    for node in tree.body:
        if isinstance(node, (ast.If, ast.FunctionDef)):
            yield node.body


def places(tree, names):
    """For each name, the last statement that assigns it before the first loop."""
    for body in scopes(tree):
        found = {}
        for statement in body:
            own = assigned(statement) & set(names)
            trains = isinstance(statement, (ast.For, ast.While)) and not own
            if trains and found.keys() >= set(names):
                break
            found |= dict.fromkeys(own, statement)
        if names and found.keys() >= set(names):
            return found
    return None


def swapped(source, names, replicated=False):
    """The script with imports swapped and two lines added; None if there is no place."""
    source = renamed(source)
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    imports = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    new = {imports[-1].end_lineno: ["import pyg_distcomm as pdc\n"]}
    if replicated or not names:
        new[imports[-1].end_lineno].append("mesh = pdc.init()\n")
    if names:
        found = places(tree, names)
        if found is None:
            return None
        # all after the last of them: a split may be written to until then
        after = max(found.values(), key=lambda node: node.end_lineno)
        space = " " * after.col_offset
        added = [] if replicated else [f"{space}mesh = pdc.init()\n"]
        added += [f"{space}{name} = pdc.partition({name}, mesh)\n" for name in names]
        new.setdefault(after.end_lineno, []).extend(added)
    if replicated:
        found = places(tree, ("optimizer",))
        if found is None:
            return None
        before = found["optimizer"]
        space = " " * before.col_offset
        line = f"{space}model = pdc.replicate(model, mesh)\n"
        new.setdefault(before.lineno - 1, []).append(line)
    for number in sorted(new, reverse=True):
        lines[number:number] = new[number]
    return "".join(lines)


def edited(source, edits):
    """The swapped script with its edits made; each must apply."""
    for edit in edits:
        if edit.old not in source:
            raise ValueError(f"the edit {edit.why!r} does not apply: {edit.old!r}")
        source = source.replace(edit.old, edit.new)
    return source


# ----- running ------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """What the ranks of one run printed and kept, or why there is nothing."""

    hung: bool
    seconds: float
    results: list  # one per rank: what pyg_stage.py saved, or None
    printed: list  # one per rank
    complaint: str  # the last line on stderr

    @property
    def error(self):
        """The first error: its text, its line of the script, and its place."""
        gone = {"error": f"died: {self.complaint}", "line": "", "place": ""}
        faults = [r for r in self.results if r and r["error"]]
        # a RankError only says that another rank has failed
        faults.sort(key=lambda fault: fault["error"].startswith("RankError"))
        return (faults or [gone if None in self.results else None])[0]


def run(nursery, job, ranks, deadline, folder):
    """Runs a script on some ranks, or without any as plain PyG; what came of it."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "out").mkdir(parents=True)
    job, begin = job | {"folder": str(folder)}, time.monotonic()
    ended = nursery.run(job, ranks, folder, folder / "out", deadline, GRACE)
    seconds, results = time.monotonic() - begin, []
    for rank in range(ranks or 1):
        file = folder / f"result{rank}.pt"
        result = torch.load(file, weights_only=True) if file.exists() else None
        if result and "tensors" in result:  # as torch.compile names them
            named = result["tensors"].items()
            result["tensors"] = {k.replace("_orig_mod.", ""): v for k, v in named}
        results.append(result)
    last = [text.strip().splitlines()[-1] for text in ended.said if text.strip()]
    return Run(ended.hung, seconds, results, ended.printed, (last or [""])[0])


KINDS = ("HANG", "WRONG", "refused", "ran", "exact")  # the worst first

# ----- comparing ----------------------------------------------------------------------

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf|nan)(?![\w])", re.I)


def numbers(text):
    """All numbers printed, except in lines on time."""
    timed = re.compile("time|took", re.I)
    lines = [line for line in text.splitlines() if not timed.search(line)]
    return [float(n) for line in lines for n in NUMBER.findall(line)]


def apart(a, b):
    """The largest difference of two tensors relative to the larger's largest entry."""
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    scale = max(float(a.nan_to_num().abs().max()), float(b.nan_to_num().abs().max()))
    gap = (a - b).abs().masked_fill(same, 0.0)
    return float(gap.max()) / (scale if scale and not gap.isnan().any() else 1.0)


def difference(plain, other, printed=True):
    """The largest relative difference of what is compared, and what it is of."""
    worst = (0.0, "")
    mine, tensors = numbers(plain.printed[0]), plain.results[0]["tensors"]
    # what is nothing but rounding (the gradient of a bias before batch norm, and then the
    # bias) is measured by the largest gradient, or the largest of the rest
    floors = {True: 0.0, False: 0.0}
    for key, t in tensors.items():
        if t.numel() and t.is_floating_point():
            most = float(t.nan_to_num().abs().max())
            floors["gradient" in key] = max(floors["gradient" in key], most)
    for rank, result in enumerate(other.results):
        theirs = numbers(other.printed[rank]) if printed else mine
        if len(mine) != len(theirs):
            text = f"rank {rank} printed {len(theirs)} numbers, not {len(mine)}"
            return float("inf"), text
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            gap = abs(a - b) / max(abs(a), abs(b), 1e-12) if a != b and a == a else 0.0
            gap = float("inf") if (a == a) != (b == b) else gap
            told = f"printed number {k}: {a:.9g}, rank {rank}: {b:.9g}"
            worst = max(worst, (gap, told))
        if result["tensors"].keys() != tensors.keys():
            odd = sorted(result["tensors"].keys() ^ tensors.keys())[0]
            return float("inf"), f"rank {rank}: only one of both has {odd}"
        for key, a in tensors.items():
            b = result["tensors"][key]
            gap = apart(a, b)
            floor = floors["gradient" in key]
            if floor and gap != float("inf") and a.numel() and not a.isnan().any():
                gap = min(gap, float((a - b).abs().max()) / floor)
            worst = max(worst, (gap, f"{key}, rank {rank}"))
    return worst


@dataclasses.dataclass
class Verdict:
    """How one run stands to the plain one."""

    kind: str  # one of KINDS
    text: str
    seconds: float = 0.0
    bytes: int | None = None

    def __str__(self):
        sent = f", {self.bytes:,} bytes" if self.bytes is not None else ""
        return f"{self.kind}: {self.text} ({self.seconds:.0f} s{sent})"


def judged(plain, other, tolerance, printed=True):
    if other.hung:
        return Verdict("HANG", f"killed; {other.complaint[:120]}", other.seconds)
    fault = other.error
    if fault:
        place = f" [line {fault['line']}, {Path(fault['place']).name}]"
        told = fault["error"][:200] + (place if fault["line"] else "")
        return Verdict("refused", told, other.seconds)
    if plain.hung or plain.error:
        return Verdict("ran", "nothing to compare with", other.seconds)
    gap, where = difference(plain, other, printed)
    sent = [r["bytes"] for r in other.results]
    sent = None if None in sent else sum(sent)
    if gap <= tolerance:
        return Verdict("exact", f"{gap:.0e}", other.seconds, sent)
    return Verdict("WRONG", f"{gap:.1e} ({where})", other.seconds, sent)


# ----- the whole ----------------------------------------------------------------------


def attempts(name, source):
    """The scripts to try, one after the other until one is exact: (what, text)."""
    graphs = () if name in MANY else GRAPHS.get(name, ("data",))
    edits = EDITS.get(name, ())
    batched = name in MINIBATCH or name in OTHER_LOADERS
    text = swapped(source, graphs, batched)
    if not graphs and batched:
        text = None  # not to be partitioned
    # without graphs, nothing would be distributed
    if text is not None and (graphs or name in MANY) and name not in EDITED:
        yield "", text
    if edits and text is not None:
        yield "; ".join(dict.fromkeys(e.why for e in edits)), edited(text, edits)
    if batched:
        text = swapped(source, (), batched)
        if text is not None:
            edits = [e for e in edits if e.old in text]
            what = "; ".join(dict.fromkeys(["no partition", *(e.why for e in edits)]))
            yield what, edited(text, edits)


class Example:
    """One script: its plain runs, and what came of the swapped ones."""

    def __init__(self, name, args, home, work, nursery):
        self.name, self.args, self.nursery = name, args, nursery
        self.script = Path(args.checkout, "examples", f"{name}.py").resolve()
        self.source = self.script.read_text()
        self.folder = work / name.replace("/", "_")
        self.batched = name in MINIBATCH or name in OTHER_LOADERS
        self.batch = BATCH.get(name, 20) if self.batched else None
        self.home = str(home)
        self.plain, self.tries, self.note = {}, [], ""

    def job(self, source, processes):
        """What pyg_stage.py is told; a plain run takes the minibatches of all ranks."""
        batch = self.batch and self.batch * processes
        period = {"period": self.batch} if self.name in BATCH else {}
        return period | {
            "script": str(self.script),
            "source": str(source),
            "argv": ARGV.get(self.name, "").format(batch=batch).split(),
            "epochs": self.args.epochs,
            "seed": SEEDS.get(self.name, self.args.seed),
            "apart": self.args.apart,
            "columns": COLUMNS.get(self.name, self.args.columns),
            "batch": batch,
            "home": self.home,
        }

    def missing(self):
        """Why PyG's own run can't be had here, or ''."""
        paths = [*filter(None, [self.args.compiled]), *sys.path]
        known = (PathFinder.find_spec(name, paths) for name in SAMPLERS)
        if self.name in SPARSE and not any(known):
            return "PyG's own run needs pyg-lib or torch-sparse"
        return ""

    def foreign(self):
        """Says of a loader that is PyG's own here, or ''."""
        loader = OTHER_LOADERS.get(self.name)
        home = importlib.import_module("pyg_distcomm.loader")
        ours = loader and getattr(home, loader)
        if ours and not ours.__module__.startswith("pyg_distcomm"):
            return f"{loader} is PyG's own: all ranks would draw the same minibatches"
        return ""

    def run_plain(self):
        self.folder.mkdir(exist_ok=True)
        script = self.script
        if self.name in EDITED:
            script = self.folder / f"plain_{script.name}"
            script.write_text(edited(self.source, EDITS[self.name]))
        for processes in self.args.ranks if self.batched else [1]:
            job = self.job(script, processes)
            folder = self.folder / f"plain{processes}"
            plain = run(self.nursery, job, 0, self.args.deadline, folder)
            self.plain[processes] = plain
            if plain.hung or plain.error:
                why = "hangs" if plain.hung else plain.error["error"][:160]
                self.note = f"PyG's own run: {why}"
        print(f"{self.name:<34} plain: {self.note or 'runs'}", flush=True)

    def run_swapped(self):
        for k, (what, text) in enumerate(attempts(self.name, self.source)):
            copy = self.folder / f"try{k}_{self.script.name}"
            copy.write_text(text)
            lines = self.source.splitlines(True), text.splitlines(True)
            diff = "".join(difflib.unified_diff(*lines, n=0))
            (self.folder / f"try{k}.diff").write_text(diff)
            verdicts = {}
            for ranks in self.args.ranks:
                folder = self.folder / f"try{k}_{ranks}"
                job, limit = self.job(copy, 1), self.args.deadline
                other = run(self.nursery, job, ranks, limit, folder)
                plain = self.plain[ranks if self.batched else 1]
                printed = not self.batched or ranks == 1
                found = judged(plain, other, self.args.tolerance, printed)
                induced = OTHER_LOADERS.get(self.name) in INDUCED and ranks > 1
                if induced and found.kind == "WRONG":
                    told = (
                        "subgraphs of its nodes: no minibatch of one process is equal"
                    )
                    found = Verdict("ran", told, found.seconds, found.bytes)
                verdicts[ranks] = found
            self.tries.append((what, verdicts))
            told = "; ".join(f"{ranks}: {v}" for ranks, v in verdicts.items())
            print(f"{self.name:<34} {what or 'swap'} | {told}", flush=True)
            if all(v.kind == "exact" for v in verdicts.values()):
                break

    def row(self):
        """How the best try ended, as plain data."""

        def rank(attempt):
            return min(KINDS.index(v.kind) for v in attempt[1].values())

        if not self.tries:
            return {"name": self.name, "note": self.note}
        what, verdicts = max(self.tries, key=rank)  # the first of the best
        bad = [
            f"{ranks} rank(s), {v.kind} by {way or 'the swap alone'}: {v.text}"
            for way, tried in self.tries
            for ranks, v in tried.items()
            if v.kind in ("HANG", "WRONG")
        ]
        return {
            "bad": bad,
            "name": self.name,
            "batched": self.batched,
            "needed": what,
            "verdicts": [dataclasses.asdict(v) for v in verdicts.values()],
        }


def table(rows, ranks):
    """The Markdown table of the scripts that were run, and a list of what lost."""
    yield f"| script | {' | '.join(f'{r} rank(s)' for r in ranks)} | bytes | needed |"
    yield "|---" * (len(ranks) + 3) + "|"
    lost = []
    for row in rows:
        if "verdicts" not in row:
            lost.append(f"- `{row['name']}`: {row['note']}")
            continue
        kinds = [verdict["kind"] for verdict in row["verdicts"]]
        sent = row["verdicts"][-1]["bytes"]
        needed = ["`replicate`"] if row["batched"] else []
        needed += [row["needed"]] if row["needed"] else []
        cells = [*kinds, f"{sent:,}" if sent is not None else "", "; ".join(needed)]
        yield f"| {row['name']} | {' | '.join(cells)} |"
        told = [
            f"{r} rank(s), {verdict['kind']}: {verdict['text']}"
            for r, verdict in zip(ranks, row["verdicts"], strict=True)
            if verdict["kind"] != "exact"
        ]
        lost += [f"- `{row['name']}`, {one}" for one in row["bad"] or told[:1]]
    yield from ["", f"What lost ({len(lost)}):" if lost else "", *lost]


def listed(checkout):
    """Every script of the checkout that is not run, with why."""
    root = Path(checkout, "examples")
    there = {str(p.relative_to(root).with_suffix("")) for p in root.rglob("*.py")}
    there -= {*FULL, *MANY, *BATCHED, *MINIBATCH, *OTHER_LOADERS, *SPARSE}
    for why, names in LEFT_OUT.items():
        here = sorted({n for p in names.split() for n in fnmatch.filter(there, p)})
        if here:
            yield f"| {why} | {len(here)} | {', '.join(here)} |"
        there -= set(here)
    if there:
        yield f"| not sorted yet | {len(there)} | {', '.join(sorted(there))} |"


def headline(args):
    """Versions."""
    init = Path(args.checkout, "torch_geometric", "__init__.py").read_text()
    tag = re.search(r"__version__ = '(.*)'", init)
    ours = f"Python {platform.python_version()}, torch {torch.__version__}"
    theirs = f"torch_geometric {torch_geometric.__version__}"
    return f"{ours}, {theirs}, examples of {tag[1] if tag else '?'}."


def written(args, rows):
    """The report."""
    good = [r for r in rows if {v["kind"] for v in r.get("verdicts", ())} == {"exact"}]
    alone = [r for r in good if not r["needed"]]
    head = f"""# PyG's example scripts with their imports swapped

**{len(good)} of {len(rows)} scripts give PyG's numbers, {len(alone)} of them by these lines
alone.**

    python tools/pyg_examples.py CHECKOUT --write docs/pyg-examples.md

{headline(args)} Every script of PyG's `examples/` that trains on one graph, and some that
train on many, were run with `torch_geometric.nn` and `.loader` replaced by those of
`pyg_distcomm`, with `mesh = pdc.init()`, and with `pdc.partition` of their graphs (`DataLoader`
cuts batches of many graphs). float64, {args.epochs} epochs, no dropout, data sets at hand or
generated.

- *Exact*: all parameters, buffers, gradients and printed numbers are those of PyG's own run on
  one process, to {args.tolerance:g} of the largest.
- Minibatches take all neighbours, in order. P ranks with B seed nodes each are compared with
  one process with P B, in parameters and gradients.
- *Needed* is what a user writes besides these lines.
- *Bytes* are those that all ranks of the last column sent.
"""
    others = ["", "Not run:", "", "| why | number | scripts |", "|---|---|---|"]
    lines = [head, *table(rows, args.ranks), *others, *listed(args.checkout)]
    return "\n".join(lines) + "\n"


def prepared(work, data):
    """A copy of the raw files that PyG's own classes read, since they write beside them."""
    home = work / "data"
    home.mkdir(exist_ok=True)
    for name in REAL:
        source = Path(data, name)
        if source.exists() and not (home / name).exists():
            shutil.copytree(source, home / name)
            for path in (home / name, *(home / name).rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
    return home


def run_all(names, args, work):
    """Runs scripts, those of SPARSE where SAMPLERS can be imported; their rows."""
    home, rows = prepared(work, args.data), []
    for sparse in (False, True):
        some = [name for name in names if (name in SPARSE) == sparse]
        paths = [args.compiled] if sparse and args.compiled else []
        nursery = Nursery("pyg_stage", *paths)
        for name in some:
            example = Example(name, args, home, work, nursery)
            example.note = example.missing() or example.foreign()
            if not example.note:
                example.run_plain()
            if not example.note:
                example.run_swapped()
            rows.append(example.row())
        nursery.close()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("checkout", help="PyG's repository")
    add("--only", default="", help="names, as gcn,hetero/han_imdb")
    add("--ranks", type=int, nargs="*", default=[1, 2])
    add("--compiled", help="where pyg-lib or torch-sparse is")
    add("--data", default=SHARED, help="a folder of real graphs")
    add("--epochs", type=int, default=3)
    add("--seed", type=int, default=12345)
    add("--columns", type=int, default=64, help="of features, at most")
    add("--apart", action="store_true", help="each rank another seed")
    add("--tolerance", type=float, default=1e-9)
    add("--deadline", type=float, default=180.0, help="seconds a run")
    add("--work", help="a folder to keep scripts and output in")
    add("--write", help="a file for the report")
    args = parser.parse_args()
    only = [name for name in args.only.split(",") if name]
    print(headline(args), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(args.work or scratch).resolve()
        work.mkdir(parents=True, exist_ok=True)
        rows = run_all(only or [*FULL, *MANY, *BATCHED, *SPARSE], args, work)
    report = written(args, rows)
    print("", *report.splitlines()[-40:], sep="\n")
    if args.write:
        Path(args.write).write_text(report)
    sys.exit(1 if any(row.get("bad") for row in rows) else 0)


if __name__ == "__main__":
    main()
