"""Runs PyG's own example scripts with the imports swapped, and compares with PyG.

    python tests/pyg_examples.py CHECKOUT [--only gcn,gat] [--ranks 1 2] [--report FILE]

CHECKOUT holds PyG's repository, at the tag of the PyG that is installed or the nearest.
Each script that trains on one graph is run as it is, on one process; then with
`torch_geometric.nn` and `torch_geometric.loader` replaced by `pyg_distcomm.nn` and
`pyg_distcomm.loader`, and two lines added, `mesh = pdc.init()` and
`data = pdc.partition(data, mesh)`, on each number of ranks. Compared are all numbers
printed (except in lines on time), and all parameters, buffers and gradients. Both runs are
adjusted alike by pyg_stage.py: float64, no dropout, few epochs, one seed, data sets at
hand, no more than 256 features (--columns). The real ones are read from ../shared/data.
Nothing of PyG is copied here.

Exits with 1 if a script is WRONG or hangs.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import collections
import contextlib
import dataclasses
import difflib
import gc
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pyg_stage
import torch
import torch_geometric

SHARED = Path(__file__).parents[2] / "shared" / "data"
NEEDED = ("planetoid", "hetero_dblp")
GRACE = 15.0  # seconds that other ranks have once one has failed

# ----- which scripts ------------------------------------------------------------------

# one graph, all of it at every step
FULL = """
gcn gat agnn arma mixhop pmlp sgc tagcn super_gat dna dir_gnn gcn2_cora graph_unet
infomax_transductive glnn ogc rect linkx graphland tensorboard_logging unimp_arxiv
label_prop rgcn rgat signed_gcn link_pred ar_link_pred autoencoder
argva_node_clustering rgcn_link_pred jit/gcn jit/gat compile/gcn hetero/han_imdb
hetero/hetero_conv_dblp hetero/hgt_dblp hetero/dmgi_unsup hetero/hetero_link_pred
hetero/bipartite_sage explain/gnn_explainer explain/gnn_explainer_ba_shapes
explain/gnn_explainer_link_pred explain/graphmask_explainer contrib/rbcd_attack
""".split()

# all of one graph is there at every step, and labels or edges come in batches
BATCHED = "sign lightgcn lpformer".split()

# minibatches: draws of neighbours are other ones than PyG's by design, so these may be
# tried (--minibatch), but are not counted
MINIBATCH = """
reddit graph_sage_unsup cluster_gcn_reddit graph_saint shadow hierarchical_sampling
infomax_inductive ogbn_train ogbn_proteins_deepgcn rev_gnn tgn node2vec kge_fb15k_237
hetero/metapath2vec hetero/to_hetero_mag hetero/hierarchical_sage
hetero/bipartite_sage_unsup hetero/recommender_system hetero/temporal_link_pred
""".split()

LEFT_OUT = {
    "many small graphs": """
        attentive_fp cluster_gcn_ppi colors_topk_pool compile/gin
        contrib/pgm_explainer_graph_classification datapipe egc
        explain/mgnan_graph_mutagenicity faust film gcn2_ppi geniepath gpse graph_gps
        graph_sage_unsup_ppi jit/film jit/gin mem_pool mnist_graclus mnist_nn_conv
        mnist_voxel_grid mutag_gin pna ppi proteins_diff_pool proteins_dmon_pool
        proteins_gmt proteins_mincut_pool proteins_topk_pool pytorch_ignite/gin
        pytorch_lightning/gin qm9_nn_conv qm9_pretrained_dimenet qm9_pretrained_schnet
        renet seal_link_pred triangles_sag_pool upfd wl_kernel
        multi_gpu/distributed_batching multi_gpu/pcqm4m_ogb""",
    "point clouds": """
        dgcnn_classification dgcnn_segmentation point_transformer_classification
        point_transformer_segmentation pointnet2_classification pointnet2_segmentation
        randlanet_classification randlanet_segmentation""",
    "no graph: sets of numbers": "equilibrium_median lcm_aggr_2nd_min",
    "trains nothing": "cpp/save_model hetero/load_csv",
    "a language model": """
        llm/g_retriever llm/git_mol llm/glem llm/molecule_gpt llm/protein_mpnn
        llm/relbench_gretriever llm/txt2kg_rag llm/txt2qa""",
    "needs several GPUs": "multi_gpu/model_parallel",
    "one graph, but needs pyg-lib (SplineConv)": "cora",
    "one graph, but needs torch-sparse (SparseTensor)": "correct_and_smooth",
    "one graph, but needs captum": """
        explain/captum_explainer explain/captum_explainer_hetero_link""",
    "one graph, but needs pgmpy": "contrib/pgm_explainer_node_classification",
    "one graph, but needs higher": "contrib/rbcd_attack_poisoning",
    "one graph, but needs relbench": "relbench_example",
    "minibatches, and needs relbench and torch-frame": "rdl",
    "minibatches, and needs pytorch-lightning": """
        pytorch_lightning/graph_sage pytorch_lightning/relational_gnn""",
    "minibatches on several GPUs or machines, distributed already": """
        multi_gpu/distributed_sampling multi_gpu/distributed_sampling_multinode
        multi_gpu/distributed_sampling_xpu multi_gpu/mag240m_graphsage
        multi_gpu/papers100m_gcn multi_gpu/papers100m_gcn_multinode multi_gpu/taobao
        quiver/multi_gpu_quiver quiver/single_gpu_quiver
        distributed/graphlearn_for_pytorch/dist_train_sage_supervised
        distributed/graphlearn_for_pytorch/launch
        distributed/graphlearn_for_pytorch/partition_ogbn_dataset
        distributed/kuzu/papers_100M/prepare_data distributed/kuzu/papers_100M/train""",
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
    "kge_fb15k_237": SPLITS,
    "tgn": SPLITS,
    "rect": ("zs_data",),
    "signed_gcn": (),  # has edges and features, and no Data
    "graphland": (),  # reads dataset[0] anew in every step
}

# what a script is started with; two words before `:` choose a variant of it
ARGV = {
    "gcn": "--epochs 3",
    "gat": "--epochs 3",
    "autoencoder": "--epochs 3",
    "dir_gnn": "--epochs 3",
    "ar_link_pred": "--epochs 3",
    "graphland": "--name tolokers-2 --split RL",
    "lpformer": "--device cpu --epochs 3 --runs 1 --batch_size 256 --data_name ogbl",
    "ogbn_train": "--model sage --epochs 2 --num_workers 0",
    "kge_fb15k_237": "--model distmult",
}


@dataclasses.dataclass(frozen=True)
class Edit:
    """A change that a script needs beyond the swap: what it says, old text, new text."""

    why: str
    old: str
    new: str


# tried where the swap alone is not exact, all of a script's edits together
EDITS = {
    "jit/gcn": (
        Edit(
            "no torch.jit.script",
            "model = torch.jit.script(model).to(device)",
            "model = model.to(device)",
        ),
    ),
    "jit/gat": (Edit("no torch.jit.script", "model = torch.jit.script(model)\n", ""),),
    "compile/gcn": (
        Edit("no torch.compile", "model = torch.compile(model, dynamic=False)\n", ""),
    ),
    "graphland": (
        Edit(
            "partition where dataset[0] is read",
            "        data = dataset[0]\n",
            "        data = pdc.partition(dataset[0], mesh)\n",
        ),
        Edit(
            "partition where dataset[0] is read",
            "    data = dataset[0]\n",
            "    data = pdc.partition(dataset[0], mesh)\n",
        ),
    ),
    "signed_gcn": (
        Edit(
            "a Data of the features and edges",
            "x = model.create_spectral_features(train_pos_edge_index, "
            "train_neg_edge_index)\n",
            "x = model.create_spectral_features(train_pos_edge_index, "
            "train_neg_edge_index)\n"
            "from torch_geometric.data import Data\n"
            "positive = pdc.partition(Data(x=x, edge_index=train_pos_edge_index), mesh)\n"
            "negative = pdc.partition(Data(x=x, edge_index=train_neg_edge_index), mesh)\n"
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
                new = [ast.unparse(ast.ImportFrom("pyg_distcomm", ours, 0))]
                new += (
                    [ast.unparse(ast.ImportFrom(node.module, rest, 0))] if rest else []
                )
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


def swapped(source, names):
    """The script with imports swapped and two lines added; None if there is no place."""
    source = renamed(source)
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    imports = [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    new = {imports[-1].end_lineno: ["import pyg_distcomm as pdc\n"]}
    if not names:
        new[imports[-1].end_lineno].append("mesh = pdc.init()\n")
    else:
        found = places(tree, names)
        if found is None:
            return None
        # all after the last of them: a split may be written to until then
        after = max(found.values(), key=lambda node: node.end_lineno)
        space = " " * after.col_offset
        new.setdefault(after.end_lineno, []).append(f"{space}mesh = pdc.init()\n")
        for name in names:
            line = f"{space}{name} = pdc.partition({name}, mesh)\n"
            new[after.end_lineno].append(line)
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
    results: list  # one a rank: what pyg_stage.py saved, or None
    printed: list  # one a rank
    complaint: str  # the last line on stderr

    @property
    def error(self):
        """The first error: its text, its line of the script, and its place."""
        gone = {"error": f"died: {self.complaint}", "line": "", "place": ""}
        faults = [r for r in self.results if r and r["error"]]
        # a RankError only says that another rank has failed
        faults.sort(key=lambda fault: fault["error"].startswith("RankError"))
        return (faults or [gone if None in self.results else None])[0]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run(job, ranks, deadline, folder):
    """Starts the ranks, and ends them and whatever they have started."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("result*.pt"):
        old.unlink()
    job = job | {"out": str(folder / "result{rank}.pt"), "folder": str(folder)}
    (folder / "job.json").write_text(json.dumps(job, indent=1))
    shared = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    children, begin = {}, time.monotonic()
    for rank in range(ranks or 1):  # no ranks: as plain PyG, nothing of a world is said
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
        world |= {"LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
        env = shared | ({k: str(v) for k, v in world.items()} if ranks else {})
        children[child(job, env, folder, rank)] = None
    hung = wait(children, begin + deadline)
    seconds = time.monotonic() - begin
    for pid, code in children.items():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # with what it has started
        if code is None:
            os.waitpid(pid, 0)
    (folder / "seconds.txt").write_text(str(seconds))
    return gathered(folder, ranks or 1, hung, seconds)


def child(job, env, folder, rank):
    """Forks a process, in a group of its own, that runs the script; its id.

    Forked, since torch and PyG are then read once and not for every rank of every run.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for stream, kind in ((0, None), (1, "out"), (2, "err")):
            path = folder / f"{kind}{rank}.txt" if kind else os.devnull
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), stream)
        os.environ.update(env)
        code = pyg_stage.main(job)
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(children, end):
    """Waits until all have ended, or soon after one has failed; whether they hung."""
    while None in children.values():
        if time.monotonic() > end:
            return not any(children.values())
        for pid in [pid for pid, code in children.items() if code is None]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children[pid] = os.waitstatus_to_exitcode(status)
                if children[pid]:
                    end = min(end, time.monotonic() + GRACE)
        time.sleep(0.02)
    return False


def kept(job, folder):
    """The plain run of the same job that a folder still holds, if any."""
    file = folder / "job.json"
    if not file.exists() or not (folder / "result0.pt").exists():
        return None
    before = json.loads(file.read_text())
    clock = folder / "seconds.txt"
    seconds = float(clock.read_text()) if clock.exists() else 0.0
    return (
        gathered(folder, 1, False, seconds) if job.items() <= before.items() else None
    )


def gathered(folder, ranks, hung, seconds):
    results, printed, complaint = [], [], ""
    for rank in range(ranks):
        file = folder / f"result{rank}.pt"
        result = torch.load(file, weights_only=True) if file.exists() else None
        if result and "tensors" in result:  # as torch.compile names them
            named = result["tensors"].items()
            result["tensors"] = {k.replace("_orig_mod.", ""): v for k, v in named}
        results.append(result)
        printed.append((folder / f"out{rank}.txt").read_text())
        said = (folder / f"err{rank}.txt").read_text().strip().splitlines()
        complaint = complaint or (said[-1] if said else "")
    return Run(hung, seconds, results, printed, complaint)


KINDS = ("HANG", "WRONG", "refused", "ran", "exact")  # the worst first

# ----- comparing ----------------------------------------------------------------------

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf|nan)(?![\w])", re.I)


def numbers(text):
    """All numbers printed, except in lines on time."""
    lines = [
        line for line in text.splitlines() if not re.search("time|took", line, re.I)
    ]
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
    return (
        float(gap.max()) / scale
        if scale and not gap.isnan().any()
        else float(gap.max())
    )


def difference(plain, other):
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
        theirs = numbers(other.printed[rank])
        if len(mine) != len(theirs):
            text = f"rank {rank} printed {len(theirs)} numbers, not {len(mine)}"
            return float("inf"), text
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            gap = abs(a - b) / max(abs(a), abs(b), 1e-12) if a != b and a == a else 0.0
            gap = float("inf") if (a == a) != (b == b) else gap
            worst = max(
                worst, (gap, f"printed number {k}: {a:.9g}, rank {rank}: {b:.9g}")
            )
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


def judged(plain, other, tolerance):
    if other.hung:
        return Verdict("HANG", f"killed; {other.complaint[:120]}", other.seconds)
    fault = other.error
    if fault:
        line = (
            f" [line {fault['line']}, {Path(fault['place']).name}]"
            if fault["line"]
            else ""
        )
        return Verdict("refused", fault["error"][:200] + line, other.seconds)
    if plain.hung or plain.error:
        return Verdict("ran", "nothing to compare with", other.seconds)
    gap, where = difference(plain, other)
    sent = [r["bytes"] for r in other.results]
    sent = None if None in sent else sum(sent)
    if gap <= tolerance:
        return Verdict("exact", f"{gap:.0e}", other.seconds, sent)
    return Verdict("WRONG", f"{gap:.1e} ({where})", other.seconds, sent)


# ----- the whole ----------------------------------------------------------------------


def attempts(name, source):
    """The scripts to try, one after the other until one is exact: (what, text)."""
    graphs, edits = GRAPHS.get(name, ("data",)), EDITS.get(name, ())
    text = swapped(source, graphs)
    if text is not None and graphs:  # without, nothing would be distributed
        yield "swap", text
    if edits and text is not None:
        yield ", ".join(dict.fromkeys(e.why for e in edits)), edited(text, edits)


class Example:
    """One script: its plain run, and what came of the swapped ones."""

    def __init__(self, name, args, home, work):
        self.name, self.args = name, args
        self.script = Path(args.checkout, "examples", f"{name}.py").resolve()
        self.source = self.script.read_text()
        self.folder = work / name.replace("/", "_")
        self.job = {
            "script": str(self.script),
            "source": str(self.script),
            "argv": ARGV.get(name, "").split(),
            "epochs": args.epochs,
            "seed": args.seed,
            "apart": args.apart,
            "columns": args.columns,
            "home": str(home),
        }
        self.tries = []

    def run_plain(self):
        folder = self.folder / "plain"
        plain = kept(self.job, folder) if self.args.reuse else None
        self.plain = plain or run(self.job, 0, self.args.deadline, folder)
        self.fault = self.plain.error
        if self.plain.hung or self.fault:
            text = "HANG" if self.plain.hung else self.fault["error"][:160]
        else:
            count = len(numbers(self.plain.printed[0]))
            count = f"{count} numbers, {len(self.plain.results[0]['tensors'])} tensors"
            text = f"runs, {count}"
        self.note = f"{self.name:<34} plain: {text} ({self.plain.seconds:.0f} s)"

    def run_swapped(self):
        if "runs" not in self.note and self.name not in MINIBATCH:
            return
        for k, (what, text) in enumerate(attempts(self.name, self.source)):
            copy = self.folder / f"try{k}_{self.script.name}"
            copy.write_text(text)
            lines = self.source.splitlines(True), text.splitlines(True)
            diff = "".join(difflib.unified_diff(*lines, n=0))
            (self.folder / f"try{k}.diff").write_text(diff)
            verdicts = {}
            for ranks in self.args.ranks:
                folder = self.folder / f"try{k}_{ranks}"
                job = self.job | {"source": str(copy)}
                other = run(job, ranks, self.args.deadline, folder)
                verdicts[ranks] = judged(self.plain, other, self.args.tolerance)
            self.tries.append((what, verdicts))
            if all(v.kind == "exact" for v in verdicts.values()):
                break

    def told(self):
        """The rows of the table: one for each try; the plain run's if there is none."""
        rows = []
        for what, verdicts in self.tries:
            kinds = {v.kind for v in verdicts.values()}
            worst = next(kind for kind in KINDS if kind in kinds)
            head = worst if what == "swap" else f"{worst} after: {what}"
            if kinds == {"exact"} and what == "swap":
                head = "exact by the swap alone"
            detail = "; ".join(f"{ranks}: {v}" for ranks, v in verdicts.items())
            rows.append(f"{self.name:<34} {head} | {detail}")
        return "\n".join(rows or [self.note])

    def ended(self):
        """In a few words, how the last try ended."""
        if not self.tries:
            return "plain run only" if "runs" in self.note else "no plain run"
        row = self.told().splitlines()[-1].removeprefix(self.name).strip()
        return row.partition("|")[0].partition(":")[0].strip()


def listed(checkout):
    """Every script of the checkout with its category; those that no category has, too."""
    root = Path(checkout, "examples")
    there = {str(p.relative_to(root).with_suffix("")) for p in root.rglob("*.py")}
    groups = {
        "one graph, full batch": FULL,
        "one graph, labels in batches": BATCHED,
        "minibatches of one graph (tried with --minibatch)": MINIBATCH,
    } | {f"left out: {why}": names.split() for why, names in LEFT_OUT.items()}
    for why, names in groups.items():
        here = [name for name in names if name in there]
        if here:
            yield f"{why} ({len(here)}): {' '.join(here)}"
        there -= set(here)
    if there:
        yield f"NOT SORTED YET ({len(there)}): {' '.join(sorted(there))}"


def headline(args):
    """Versions and the command."""
    init = Path(args.checkout, "torch_geometric", "__init__.py").read_text()
    tag = re.search(r"__version__ = '(.*)'", init)
    return [
        f"python {platform.python_version()}, torch {torch.__version__}, "
        f"torch_geometric {torch_geometric.__version__} installed, examples of "
        f"{tag.group(1) if tag else '?'}, pyg_distcomm at {package()}",
        "command: python tests/pyg_examples.py CHECKOUT "
        + " ".join(a for a in sys.argv[1:] if a != args.checkout),
    ]


def package():
    """The commit of the package that will be imported, which need not be this one."""
    root = Path(importlib.util.find_spec("pyg_distcomm").origin).parents[1]
    git = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def prepared(work):
    """A copy of the raw files that PyG's own classes read, since they write beside them."""
    home = work / "data"
    for name in NEEDED:
        if not (SHARED / name).exists():
            raise SystemExit(f"{SHARED / name} is missing: see the docstring")
        if not (home / name).exists():
            shutil.copytree(SHARED / name, home / name)
            for path in (home / name, *(home / name).rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
    return home


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", help="PyG's repository")
    parser.add_argument("--only", default="", help="names, as gcn,hetero/han_imdb")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument(
        "--minibatch", action="store_true", help="those scripts instead"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=12345)
    parser.add_argument("--columns", type=int, default=256, help="of features, at most")
    parser.add_argument("--apart", action="store_true", help="each rank another seed")
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--deadline", type=float, default=180.0, help="seconds a run")
    parser.add_argument("--work", help="a folder to keep scripts and output in")
    parser.add_argument(
        "--reuse", action="store_true", help="plain runs that --work still holds"
    )
    parser.add_argument("--report", help="a file for the table")
    args = parser.parse_args()
    names = MINIBATCH if args.minibatch else FULL + BATCHED
    only = [name for name in args.only.split(",") if name]
    names = only or names
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(args.work or scratch).resolve()
        work.mkdir(parents=True, exist_ok=True)
        home = prepared(work)
        examples = [Example(name, args, home, work) for name in names]
        report = headline(args)
        print("\n".join(report), flush=True)
        for example in examples:
            example.run_plain()
            print(example.note, flush=True)
        if args.ranks:
            warmed()
            for example in examples:
                example.run_swapped()
                print(example.told(), flush=True)
    counts = collections.Counter(example.ended() for example in examples)
    counts = [f"{count:3d} {ended}" for ended, count in sorted(counts.items())]
    print("\n".join(["", *counts]))
    report += ["", *(example.note for example in examples), ""]
    report += [*(e.told() for e in examples if e.tries), "", *counts, ""]
    if args.report:
        text = "\n".join([*report, *listed(args.checkout)])
        Path(args.report).write_text(f"{text}\n")
    last = [v.kind for e in examples for _, vs in e.tries[-1:] for v in vs.values()]
    sys.exit(1 if {"WRONG", "HANG"} & set(last) else 0)


def warmed():
    """Imports the package once, for all ranks to come; plain runs have been."""
    with contextlib.suppress(Exception):  # the ranks will tell of it
        for name in ("pyg_distcomm.nn", "pyg_distcomm.loader", "numba"):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
