"""Keeps the node memory of TGN on TemporalData, sharded over the ranks.

[Note: sharded memory] Rank v mod P owns node v: its row of the memory, the time of its last
event, its last neighbours, and its pending messages. A rank computes and aggregates the
messages to its own nodes and updates their rows locally, with one exception: a message contains
the memory of both ends, so the distinct rows of the other ends are fetched. `update_state`
sends the ends and times of events to all ranks, and their other attributes to the owners of the
ends.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import TGNMemory as PygTGNMemory
from torch_geometric.nn.models import tgn
from torch_geometric.utils import scatter

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.consistency import digest
from pyg_distcomm.comm.mesh import Mesh, given_mesh, latest_mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.partition.partition import Partition
from pyg_distcomm.sharded.agreement import compare_lists
from pyg_distcomm.sharded.dist_tensor import DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex, rows_of_edges, shard_as
from pyg_distcomm.sharded.partial import entered
from pyg_distcomm.tensor.gather_by_id import IdPlan


class _Messages(NamedTuple):
    """Holds events of own nodes: the node here, the other end, time, number and features.

    Shapes: near, far, t, number [m]; raw [m, d]. `near` counts own nodes, `far` is a global id.
    """

    near: Tensor
    far: Tensor
    t: Tensor
    number: Tensor
    raw: Tensor

    def at(self, places: Tensor) -> _Messages:
        return _Messages(*(column[places] for column in self))


class TGNMemory(PygTGNMemory):
    r"""Stores a memory vector for each node of an event stream, as PyG's TGNMemory.

        m_e = msg(s_i, s_j, raw_e, phi(t_e - t_i))        for the last events e of node i
        s_i <- GRU(aggr{m_e}, s_i)

    On several ranks the owner of a node, rank i mod P, stores its row s_i of `[n, memory_dim]`
    and its other state. `memory(n_id)` returns the rows of `n_id`, ordinary ids that are the
    same on all ranks, as DistTensors sharded by owner; `update_state` takes events that are
    row-sharded, as those of `pyg_distcomm.loader.TemporalDataLoader`, or the same on all ranks.
    Losses, gradients and memory equal those of one process on the same batches, on any number
    of ranks. On one rank, and before `pdc.init`, it runs PyG's code.

    Args:
        num_nodes, raw_msg_dim, memory_dim, time_dim: as in PyG.
        message_module: as in PyG; its input is a DistTensor with a row for each message.
        aggregator_module: as in PyG. It is called on the messages to this rank's nodes, so its
            result for a node may only depend on the messages to that node. PyG's LastAggregator
            is replaced by `LastAggregator` of this module.
        mesh: the ranks; those of the last `pdc.init` if None.

    Shapes (this rank): memory [k_i, memory_dim] and last update [k_i], of k = len(n_id) rows.

    Price: `memory(n_id)` in training, and `update_state`, fetch the memory of the h distinct
    other ends of messages from other ranks, h memory_dim words, after their ids.
    `update_state` also receives 4 int64 for each event of other ranks, and raw_msg_dim words
    for those with an end on this rank. In the backward pass only gradients of parameters
    travel, if the memory was detached.

    Raises:
        ValueError: on all ranks, if ids repeat, differ between ranks or are out of range, or
            if events differ, have wrong shapes or types, or require gradients.
    """

    rows: Rows | None
    memory: Any

    def __init__(
        self,
        num_nodes: int,
        raw_msg_dim: int,
        memory_dim: int,
        time_dim: int,
        message_module: Any,
        aggregator_module: Any,
        *,
        mesh: Mesh | None = None,
    ) -> None:
        if type(aggregator_module) is tgn.LastAggregator:
            aggregator_module = LastAggregator()
        self.rows = _rows_of_nodes(num_nodes, mesh, "TGNMemory")
        if self.rows is not None:
            _check_aggregator(aggregator_module)
        dims = raw_msg_dim, memory_dim, time_dim
        here = num_nodes if self.rows is None else len(self.rows)
        super().__init__(here, *dims, message_module, aggregator_module)
        if self.rows is not None:
            self.num_nodes = num_nodes
            for name in ("memory", "last_update", "_assoc"):
                spread = DistTensor.wrap(_own(getattr(self, name)), self.rows)
                setattr(self, name, spread)

    def reset_state(self) -> None:
        """Sets the memory to zeros, and drops pending messages."""
        if self.rows is None:
            super().reset_state()
            return
        for name in ("memory", "last_update"):
            buffer = _own(getattr(self, name))
            setattr(self, name, DistTensor.wrap(torch.zeros_like(buffer), self.rows))
        self._reset_message_store()

    def _reset_message_store(self) -> None:
        if self.rows is None:
            super()._reset_message_store()
            return
        self.msg_s_store: dict[int, Any] = {}
        self.msg_d_store: dict[int, Any] = {}
        self._seen = 0  # events so far

    def detach(self) -> None:
        """Detaches the memory from the autograd graph."""
        if self.rows is None:
            super().detach()
        else:
            self.memory = self.memory.detach()

    def forward(self, n_id: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the memory of nodes, and the times of their last events; collective."""
        if self.rows is None:
            return super().forward(n_id)  # type: ignore[no-any-return]
        n_id = _same_nodes(n_id, self.rows, unique=self.training)
        kept = rows_at_owners(n_id, self.rows.mesh)
        lid = _local_ids(n_id[kept.gid.to(n_id.device)], self.rows)
        if self.training:
            memory, last = self._updated_memory(lid)
        else:
            memory, last = (
                _own(self.memory)[lid],
                _own(self.last_update)[lid],
            )
        return DistTensor.wrap(memory, kept), DistTensor.wrap(last, kept)

    def update_state(
        self, src: Tensor, dst: Tensor, t: Tensor, raw_msg: Tensor
    ) -> None:
        """Updates the memory with events, which may be on any rank; collective."""
        if self.rows is None:
            super().update_state(src, dst, t, raw_msg)
            return
        src, dst, t, raw, *orders = self._at_owners(src, dst, t, raw_msg)
        rank, size = self.rows.mesh.rank, self.rows.mesh.size
        nodes = torch.cat([src, dst]).unique()
        lid = _local_ids(nodes[nodes % size == rank], self.rows)
        if self.training:
            self._write(lid)
        stores, ends = (self.msg_s_store, self.msg_d_store), ((src, dst), (dst, src))
        for store, (near, far), order in zip(stores, ends, orders, strict=True):
            events = _Messages(_local_ids(near, self.rows), far, t, order, raw)
            _store_messages(store, events.at((near % size == rank).nonzero().view(-1)))
        if not self.training:
            self._write(lid)

    def message_state(self) -> bytes:
        """Returns the pending messages of the nodes of all ranks, as plain data; collective.

        They are no buffers, as in PyG. `save_checkpoint(..., messages=memory.message_state())`
        saves them, and what `load_checkpoint(..., messages=b"")` returns of them goes to
        `load_message_state`, on any number of ranks. `eval()` after training leaves none.

        Price: all messages, on every rank.
        """
        stores = self.msg_s_store, self.msg_d_store
        box = io.BytesIO()
        torch.save([_gathered(store, self) for store in stores], box)
        return box.getvalue()

    def load_message_state(self, state: bytes) -> None:
        """Restores the pending messages that `message_state` returned.

        Raises:
            ValueError: if they are none, or those of a memory of other nodes or widths.
        """
        try:
            tables = torch.load(io.BytesIO(state), weights_only=True)
            for ints, raw in tables:
                if raw.size(1) != self.raw_msg_dim:
                    raise ValueError(f"raw_msg_dim is {raw.size(1)}")
                if len(ints) and int(ints[:, :2].max()) >= self.num_nodes:
                    raise ValueError(f"there is a node {int(ints[:, :2].max())}")
        except (EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise ValueError(
                "give load_message_state what message_state returned for a memory of "
                f"{self.num_nodes} nodes and raw_msg_dim {self.raw_msg_dim}: {error}"
            ) from None
        self._reset_message_store()
        stores = self.msg_s_store, self.msg_d_store
        for store, (ints, raw) in zip(stores, tables, strict=True):
            near, far, t, number = ints.to(self.device).unbind(1)
            found = _Messages(near, far, t, number, raw.to(self.device))
            if self.rows is None:
                held: dict[int, Any] = {}
                _store_messages(held, found)
                store.update({k: (m.near, m.far, m.t, m.raw) for k, m in held.items()})
                continue
            mine = (
                (near % self.rows.mesh.size == self.rows.mesh.rank).nonzero().view(-1)
            )
            _store_messages(
                store, found._replace(near=_local_ids(near, self.rows)).at(mine)
            )
            self._seen = max(self._seen, int(number.max()) + 1 if len(number) else 0)

    def _update_memory(self, n_id: Tensor) -> None:
        """Updates rows before PyG's code drops their messages, as it does in `eval()`."""
        if self.rows is None:
            super()._update_memory(n_id)
            return
        self._write(torch.arange(len(self.rows), device=self.device))

    def _write(self, lid: Tensor) -> None:
        """Updates the rows of own nodes, of which a rank may have none."""
        memory, last = self._updated_memory(lid)
        old = _own(self.memory)
        if old.requires_grad:  # nobody has detached it: gradients go on
            new = old.index_copy(0, lid, memory)
        else:
            new = old.detach()
            new[lid] = memory
        assert self.rows is not None
        self.memory = DistTensor.wrap(new, self.rows)
        _own(self.last_update)[lid] = last

    def _updated_memory(self, lid: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the new memory, and times of last events, of own nodes; collective."""
        assert self.rows is not None
        places, memory = _own(self._assoc), _own(self.memory)
        places[lid] = torch.arange(len(lid), device=lid.device)
        waiting = [
            self._pending_messages(store, lid)
            for store in (self.msg_s_store, self.msg_d_store)
        ]
        every = torch.cat([m.far for m in waiting])
        plan = IdPlan.build(every.cpu(), self.rows).to(memory.device)
        far = plan.gather(memory).split([len(m.far) for m in waiting])
        modules = self.msg_s_module, self.msg_d_module
        msg = torch.cat(
            [
                self._make_messages(*one)
                for one in zip(modules, waiting, far, strict=True)
            ]
        )
        t = torch.cat([m.t for m in waiting])
        index = places[torch.cat([m.near for m in waiting])]
        mesh, named = self.rows.mesh, self.aggr_module.named_parameters()
        parameters = {name: entered(p, mesh) for name, p in named}
        given = msg, index, t, len(lid)
        aggr = torch.func.functional_call(self.aggr_module, parameters, given)
        nodes = _rows_of_ids(self.rows, self.rows.gid[lid.cpu()], self.rows.total)
        before = DistTensor.wrap(memory[lid], nodes)
        out = self.gru(DistTensor.wrap(aggr, nodes), before)
        return out.to_local(), scatter(t, index, 0, len(lid), reduce="max")

    def _pending_messages(self, store: dict[int, Any], lid: Tensor) -> _Messages:
        """Returns the pending messages of own nodes, in the order of their events."""
        found = [store[i] for i in lid.tolist() if i in store]
        if not found:
            none = lid.new_empty(0)
            raw = _own(self.memory).detach().new_empty((0, self.raw_msg_dim))
            return _Messages(none, none, none, none, raw)
        joined = _Messages(*(torch.cat(column) for column in zip(*found, strict=True)))
        return joined.at(joined.number.argsort())

    def _make_messages(self, module: Any, events: _Messages, far: Tensor) -> Tensor:
        """Returns the messages of events to own nodes, computed by a message module."""
        assert self.rows is not None
        rows = _rows_of_ids(self.rows, events.number.cpu(), self._seen)
        near, last = _own(self.memory)[events.near], _own(self.last_update)
        since = (events.t - last[events.near]).to(events.raw.dtype)
        t_enc = self.time_enc(DistTensor.wrap(since, rows))
        ends = (DistTensor.wrap(x, rows) for x in (near, far, events.raw))
        msg = module(*ends, t_enc)
        if not isinstance(msg, DistTensor) or len(msg.to_local()) != len(rows):
            raise TypeError(
                f"{type(module).__name__} must return a row for each message that is made "
                f"of what it was given; got a {type(msg).__name__}"
            )
        return msg.to_local()

    def _at_owners(self, *events: Tensor) -> list[Tensor]:
        """Sends events to the owners of their ends; collective.

        Returns:
            Source, target, time and features of those with an end here, in order, and their
            places among all events so far, sorted by sources and by targets as PyG does.
        """
        assert self.rows is not None
        mesh, rank, size = self.rows.mesh, self.rows.mesh.rank, self.rows.mesh.size
        found, rows, problem = _shard_events(events, mesh)
        problem = problem or self._problem(*found)
        facts = [0 if problem else len(rows), int(problem is not None)]
        every = collectives.all_gather_counts(facts, mesh.world)
        if any(row[1] for row in every):
            collectives.agree(problem, mesh.control)
        counts = [row[0] for row in every]
        *ends, raw = found
        ends.append(rows.place.to(raw.device))
        table = collectives.all_gather_rows(
            torch.stack(ends, 1), counts, mesh.world, op="events"
        )
        wants = (
            table[:, :2].unsqueeze(2) % size == torch.arange(size).to(raw.device)
        ).any(1)
        origin = torch.arange(size).repeat_interleave(torch.tensor(counts))
        coming = torch.bincount(origin[wants[:, rank].cpu()], minlength=size).tolist()
        asked = wants[(origin == rank).to(raw.device)].t().nonzero()
        sent = torch.bincount(asked[:, 0], minlength=size).tolist()
        raw = collectives.all_to_all(
            raw[asked[:, 1]], sent, coming, mesh.world, "events"
        ).wait()
        here = table[wants[:, rank]]
        order = here[:, 3].argsort()
        src, dst, t, place = here[order].unbind(1)
        table = table[table[:, 3].argsort()]
        first, self._seen = self._seen, self._seen + len(table)
        # PyG's sort is not stable: ties fall as they do there, where all are sorted, too
        sorted_by = [
            table[:, k].contiguous().sort().indices.argsort()[place] for k in (0, 1)
        ]
        return [src, dst, t, raw[order], *(first + places for places in sorted_by)]

    def _problem(self, src: Tensor, dst: Tensor, t: Tensor, raw: Tensor) -> str | None:
        """Returns the problem with this rank's events; None if there is none."""
        n = self.num_nodes
        for name, ids in (("src", src), ("dst", dst)):
            if ids.dtype != torch.int64 or ids.dim() != 1:
                return (
                    f"give {name} as int64 [events], got {ids.dtype}{list(ids.shape)}"
                )
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < n:
                bad = int(ids[(ids < 0) | (ids >= n)][0])
                return f"the memory has nodes 0 .. {n - 1}, but {name} names node {bad}"
        if t.dtype != torch.int64 or t.dim() != 1:
            return f"give times as int64 [events], got {t.dtype}{list(t.shape)}"
        if raw.dim() != 2 or raw.size(1) != self.raw_msg_dim:
            return (
                f"give raw_msg as [events, {self.raw_msg_dim}], the raw_msg_dim of the "
                f"memory, got {list(raw.shape)}"
            )
        if raw.requires_grad:
            return "give raw_msg.detach(): messages are kept without gradient"
        return None


class LastAggregator(tgn.LastAggregator):  # type: ignore[misc]
    """Takes the last message to each node, and zeros for a node without one.

    So does PyG's with torch-scatter. Without it, PyG 2.8 gives nodes without a message
    that of another node, wherever there are as many messages as nodes, which depends on
    what else is in the batch. Of messages of one time, the last one given is taken.
    """

    def forward(self, msg: Tensor, index: Tensor, t: Tensor, dim_size: int) -> Tensor:
        """Returns `[dim_size, d]`, of messages `[m, d]` to nodes `index` at times `t`."""
        latest = scatter(t, index, 0, dim_size, reduce="max")
        is_last = (t == latest[index]).nonzero().view(-1)
        last = scatter(is_last + 1, index[is_last], 0, dim_size, reduce="max") - 1
        found = last >= 0
        out = msg.new_zeros((dim_size, msg.size(-1)))
        out[found] = msg[last[found]]
        return out


class LastNeighborLoader(tgn.LastNeighborLoader):  # type: ignore[misc]
    """Keeps the last neighbours of each node of an event stream, as PyG's class does.

    On several ranks a node's owner keeps its neighbours and the numbers of their events, as
    `TGNMemory` does. A call takes ids that are the same on all ranks, and returns all ids
    that are needed, on all ranks, a DistEdgeIndex between their places, and the numbers of
    its events, cut as it is. On one rank, and before `pdc.init`, it is PyG's own.

    Args:
        num_nodes, size, device: as in PyG.
        mesh: the ranks; those of the last `pdc.init` if None.

    Shapes (this rank): neighbors, e_id [n_i, size].

    Price: a call brings `size` int64 for each id whose node another rank owns, and two
    words of each rank; `insert` 3 int64 for each event of other ranks.

    Raises:
        ValueError: on all ranks, if ids differ between ranks or are no nodes.
    """

    rows: Rows | None
    neighbors: Any
    e_id: Any

    def __init__(
        self, num_nodes: int, size: int, device: Any = None, *, mesh: Mesh | None = None
    ) -> None:
        self.rows = _rows_of_nodes(num_nodes, mesh, "LastNeighborLoader")
        here = num_nodes if self.rows is None else len(self.rows)
        super().__init__(here, size, device)
        if self.rows is not None:
            self.neighbors = DistTensor.wrap(self.neighbors, self.rows)
            self.e_id = DistTensor.wrap(self.e_id, self.rows)

    def __call__(self, n_id: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all nodes `[k]`, edges from last neighbours, and events; collective."""
        if self.rows is None:
            return super().__call__(n_id)  # type: ignore[no-any-return]
        mesh = self.rows.mesh
        n_id = _same_nodes(n_id, self.rows)
        owner = n_id % mesh.size
        mine = (owner == mesh.rank).nonzero().view(-1)
        lid = _local_ids(n_id[mine], self.rows)
        events = _own(self.e_id)[lid]
        near = _own(self.neighbors)[lid].masked_fill(events < 0, -1)
        counts = torch.bincount(owner, minlength=mesh.size).tolist()
        came = collectives.all_gather_rows(near, counts, mesh.world, op="neighbors")
        table = torch.empty_like(came)
        table[owner.argsort(stable=True)] = came
        valid = table >= 0
        every = torch.cat([n_id, table[valid]]).unique()
        nodes = rows_at_owners(every, mesh)
        here = valid[mine]
        place = (valid.view(-1).cumsum(0) - 1).view_as(valid)[mine][here]
        source = torch.searchsorted(every, table[mine][here])
        target = torch.searchsorted(every, n_id[mine]).unsqueeze(1).expand_as(here)
        edges = rows_of_edges(place.cpu(), int(valid.sum()), nodes)
        local = torch.stack([source, target[here]])
        edge_index = DistEdgeIndex.build(local, nodes, edges)
        return every, edge_index, DistTensor.wrap(events[here], edges)

    def insert(self, src: Tensor, dst: Tensor) -> None:
        """Adds events, which may be on any rank, in both directions; collective."""
        if self.rows is None:
            super().insert(src, dst)
            return
        mesh = self.rows.mesh
        if isinstance(src, DistTensor) and isinstance(dst, DistTensor):
            both: Any = torch.stack([src, dst], 1)
            src, dst = both.full_tensor().unbind(1)
        else:
            src, dst = (_same_nodes(end, self.rows) for end in (src, dst))
        if len(src) != len(dst):
            raise ValueError(f"give as many src as dst, got {len(src)} and {len(dst)}")
        number = torch.arange(self.cur_e_id, self.cur_e_id + len(src)).to(src.device)
        self.cur_e_id += len(src)
        # of all, so that ties fall as in PyG
        nodes, order = torch.cat([dst, src]).sort()
        mine = nodes % mesh.size == mesh.rank
        lid, order = _local_ids(nodes[mine], self.rows), order[mine]
        near, events = torch.cat([src, dst])[order], number.repeat(2)[order]
        here, run, counts = lid.unique_consecutive(
            return_inverse=True, return_counts=True
        )
        slot = counts.cumsum(0)[run] - 1 - torch.arange(len(lid), device=lid.device)
        new = slot < self.size
        shape = len(here), self.size
        new_events, new_near = events.new_full(shape, -1), near.new_full(shape, -1)
        new_events[run[new], slot[new]] = events[new]
        new_near[run[new], slot[new]] = near[new]
        kept, kept_near = _own(self.e_id), _own(self.neighbors)
        found, pick = torch.cat([kept[here], new_events], 1).topk(self.size, dim=1)
        kept[here] = found
        kept_near[here] = torch.cat([kept_near[here], new_near], 1).gather(1, pick)


def rows_at_owners(n_id: Tensor, mesh: Mesh) -> Rows:
    """Returns the rows of a tensor with a row for each of some nodes, sharded by owner."""
    owner = n_id.cpu() % mesh.size
    gid = (owner == mesh.rank).nonzero().view(-1)
    partition = Partition.from_owner(owner, mesh.size, len(owner))
    return Rows(gid, len(owner), mesh, partition)


def _rows_of_nodes(num_nodes: int, mesh: Mesh | None, call: str) -> Rows | None:
    """Returns this rank's nodes; None on one rank."""
    mesh = latest_mesh() if mesh is None else given_mesh(mesh, call)
    if mesh is None or mesh.size == 1:
        return None
    return rows_at_owners(torch.arange(num_nodes), mesh)


def _rows_of_ids(rows: Rows, gid: Tensor, total: int) -> Rows:
    """Returns the rows of some of `total` ids; their count is computed on demand."""
    return replace(rows, gid=gid, total=total, partition=None, whole=False)


def _own(value: Any) -> Any:
    """Returns this rank's rows of a row-sharded tensor; other values unchanged."""
    return value.to_local() if isinstance(value, DistTensor) else value


def _local_ids(n_id: Tensor, rows: Rows) -> Tensor:
    """Returns the local positions of own nodes."""
    return n_id.div(rows.mesh.size, rounding_mode="floor")


def _same_nodes(n_id: Tensor, rows: Rows, unique: bool = False) -> Tensor:
    """Returns ids of nodes that are the same on all ranks; collective.

    Raises:
        ValueError: on all ranks, unless they are, each in [0, n), and once where asked.
    """
    if isinstance(n_id, DistTensor):
        n_id = n_id.full_tensor()
    listed = n_id.dim() == 1 and n_id.dtype == torch.int64
    compare_lists(n_id if listed else torch.tensor([-1]), rows.mesh)
    if not listed:
        raise ValueError(f"give nodes as int64 [k], got {n_id.dtype}{list(n_id.shape)}")
    if len(n_id) and not 0 <= int(n_id.min()) <= int(n_id.max()) < rows.total:
        bad = int(n_id[(n_id < 0) | (n_id >= rows.total)][0])
        raise ValueError(f"there are nodes 0 .. {rows.total - 1}, got {bad}")
    if unique and len(n_id.unique()) != len(n_id):
        raise ValueError("give each node once, by n_id.unique(): some ids repeat")
    return n_id


def _gathered(store: dict[int, Any], memory: TGNMemory) -> tuple[Tensor, Tensor]:
    """Returns messages of all ranks, by node and then in order; collective.

    Returns:
        Node, other end, time and number `[m, 4]`, and features `[m, d]`, on the CPU.
    """
    rows, raw_dim = memory.rows, memory.raw_msg_dim
    held = [m for m in store.values() if len(m[0])]
    raw = torch.cat([_own(memory.memory).new_empty(0, raw_dim), *(m[-1] for m in held)])
    ints = [torch.stack([*m[:3]], 1) for m in held]
    near_far_t = torch.cat([torch.empty(0, 3).long().to(raw.device), *ints])
    number = torch.arange(len(raw), device=raw.device)
    if rows is None:
        return torch.cat([near_far_t, number.unsqueeze(1)], 1).cpu(), raw.detach().cpu()
    number = torch.cat([number[:0], *(m.number for m in held)])
    table = torch.cat([near_far_t, number.unsqueeze(1)], 1)
    table[:, 0] = table[:, 0] * rows.mesh.size + rows.mesh.rank
    world = rows.mesh.world
    counts = [row[0] for row in collectives.all_gather_counts([len(raw)], world)]
    table, raw = (
        collectives.all_gather_rows(x, counts, world, op="events") for x in (table, raw)
    )
    order = table[:, 3].argsort()
    order = order[table[order, 0].argsort(stable=True)]
    return table[order].cpu(), raw[order].detach().cpu()


def _store_messages(store: dict[int, Any], events: _Messages) -> None:
    """Replaces the pending messages of nodes by those of events."""
    lid, order = events.near.sort(stable=True)
    lid, counts = lid.unique_consecutive(return_counts=True)
    for node, places in zip(lid.tolist(), order.split(counts.tolist()), strict=True):
        store[node] = events.at(places)


def _shard_events(
    events: Sequence[Tensor], mesh: Mesh
) -> tuple[list[Tensor], Rows, str | None]:
    """Returns this rank's rows of event tensors, their `Rows`, and a problem if any."""
    spread = [x for x in events if isinstance(x, DistTensor)]
    rows = spread[0].rows if spread else Rows.blocks(events[0].shape[:1].numel(), mesh)
    plain = [digest(x) for x in events if not isinstance(x, DistTensor)]
    if plain:
        compare_lists(torch.tensor(plain), rows.mesh)
    found: list[Any] = []
    for x in events:
        if isinstance(x, DistTensor):
            found.append(shard_as(x, rows))
        else:
            same = x.dim() > 0 and len(x) == rows.count
            found.append(x[rows.place.to(x.device)] if same else None)
    if all(x is not None for x in found):
        return found, rows, None
    shapes = [list(x.shape) for x in events]
    return [], rows, f"give as many src, dst, t and raw_msg; got {shapes}"


def _check_aggregator(module: Any) -> None:
    """Raises for aggregators that mix nodes, or draw for the nodes of one rank alone."""
    mixing = torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd
    for part in module.modules():
        if isinstance(part, mixing):
            raise ValueError(
                f"leave the {type(part).__name__} out of the aggregator_module, which runs "
                "on the messages to one rank's nodes; the message_module may have it"
            )
