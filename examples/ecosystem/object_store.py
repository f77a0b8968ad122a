# torchrun --nproc-per-node 2 examples/ecosystem/object_store.py
"""Parts and checkpoints in an object store (s3://, gs://), by fsspec.

Each rank copies its own part to a local disk, where it is memory-mapped. Checkpoints go
through torch.distributed.checkpoint, whose FsspecWriter and FsspecReader take such addresses.
s3:// needs `pip install s3fs`, and gs:// needs gcsfs.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch_geometric.nn import GraphSAGE

import pyg_distcomm as pdc
from pyg_distcomm.cli import main as pyg_distcomm

sys.path.append(str(Path(__file__).parents[1]))  # examples/
from graphs import node_loss, num_outputs


def upload(folder, url):
    """Copies a partition folder to an object store, once, on any machine."""
    files, place = fsspec.core.url_to_fs(url)
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file():
            there = f"{place}/{path.relative_to(folder).as_posix()}"
            files.makedirs(there.rpartition("/")[0], exist_ok=True)
            files.put_file(str(path), there)


def download_part(url, part, folder):
    """Copies one part, and the files that all parts share, to a local folder."""
    files, place = fsspec.core.url_to_fs(url)
    for name in files.find(place):
        inside = name[len(place.rstrip("/")) + 1 :]
        if not inside.startswith("part_") or inside.startswith(f"part_{part:05d}/"):
            target = Path(folder) / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            files.get_file(name, str(target))


def state_of(model, optimizer, epoch):
    """Returns what a checkpoint holds, as torch.distributed.checkpoint wants it."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "epoch": torch.tensor(epoch)}


def train(url, epochs, mesh):
    """Trains on the parts at URL/parts, with a checkpoint at URL/checkpoint; the last loss."""
    local = tempfile.mkdtemp()
    download_part(f"{url}/parts", mesh.rank, local)
    share = pdc.load_partition(local, mesh)
    torch.manual_seed(0)
    model = pdc.convert(GraphSAGE(share.num_features, 32, 2, num_outputs(share.y)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    last, begin = f"{url}/checkpoint", 0
    files, place = fsspec.core.url_to_fs(f"{last}/.metadata")
    if files.exists(place):
        state = state_of(model, optimizer, 0)  # which is loaded in place
        dcp.load(state, storage_reader=FsspecReader(last))
        begin = int(state.pop("epoch"))
        names = {"model": "model_state_dict", "optimizer": "optim_state_dict"}
        set_state_dict(model, optimizer, **{names[k]: v for k, v in state.items()})
    for _ in range(begin, epochs):
        optimizer.zero_grad()
        out = model(share.x, share.edge_index)
        loss = node_loss(out[share.train_mask], share.y[share.train_mask])
        loss.backward()
        optimizer.step()
    state = state_of(model, optimizer, epochs)
    dcp.save(state, storage_writer=FsspecWriter(last))
    shutil.rmtree(local)
    return float(loss.detach())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="s3://bucket/run; a local folder if left out")
    parser.add_argument("--dataset", default="generated-2000")
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    mesh = pdc.init()
    url = args.url or f"file://{Path('runs/object_store').resolve()}"
    if mesh.rank == 0:
        with tempfile.TemporaryDirectory() as local:
            words = ["partition", args.dataset, f"{local}/parts"]
            if pyg_distcomm([*words, "--parts", str(mesh.size)]):
                raise SystemExit(1)
            upload(f"{local}/parts", f"{url}/parts")
    if mesh.size > 1:
        dist.barrier()
    loss = train(url, args.epochs, mesh)
    if mesh.rank == 0:
        print(f"{url}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
