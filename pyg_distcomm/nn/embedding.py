"""Stores an embedding table sharded over the ranks; gradients travel to the rows' owners."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch_geometric.data.storage import NodeStorage

from pyg_distcomm.comm import collectives, random
from pyg_distcomm.comm.consistency import check_alike, on_all_ranks
from pyg_distcomm.comm.mesh import Mesh, init, latest_mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.ops.id_plan import IdPlan, plan_ids, route_of
from pyg_distcomm.process import PROCESS
from pyg_distcomm.sharded.dist_tensor import DistTensor, is_rows
from pyg_distcomm.sharded.edges import DistEdgeIndex, from_local

_OF_WHOLE_TABLES = torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class DistEmbedding(torch.nn.Module):
    r"""Learns a vector for each node, as `torch.nn.Embedding` does, row-sharded over the ranks.

        forward()      the whole table, as a DistTensor  [n, dim]
        forward(v)     y_i = weight[v_i], for this rank's ids v
        backward       dL/dweight[v] = 1/P sum of dL/dy_i over all ranks' i with v_i = v

    Full-graph models use `emb()` or `emb.weight`; models of minibatches `emb(batch.n_id)`,
    which looks up the rows of each rank's own minibatch. `emb.parameters()` holds only this
    rank's rows `[n_i, dim]`. Any elementwise optimizer updates them locally
    (`torch.optim.SparseAdam`, `SGD`, `Adagrad` with `sparse=True`); Adafactor, LBFGS and Muon,
    which read the whole table, raise an error. `pdc.replicate` leaves them out, and
    `pdc.save_checkpoint` saves them and their optimizer state for any number of ranks.
    Gradients of minibatches are means over the ranks, as in DistributedDataParallel;
    contributions are added in the order of ranks.

    Args:
        num_embeddings: n, the number of nodes.
        embedding_dim: dim.
        like: determines the rows of each rank: a share of `pdc.partition` (of a
            HeteroData `share["author"]`), its `edge_index` or one of its row-sharded
            tensors, or a Mesh, whose ranks get equal blocks (default: the mesh that
            `pdc.init` made last).
        sparse: whether gradients of minibatches are sparse tensors, for optimizers that
            support these; the cost of a step then depends on the minibatch, not on n_i.
        device: the device of the table (default: that of `like`, or of the mesh).
        dtype: the dtype of the table.

    The initial table equals that of torch.nn.Embedding on one process with the same generator.

    Shapes (this rank): v [...] with k ids in all, y [..., dim].

    Raises:
        ValueError: on all ranks, if `like` does not have n rows, sizes are not whole numbers,
            or the ranks make different tables; if the parameter was replaced by one that is
            no shard; and in the step of an optimizer that reads the whole table.
        IndexError: on all ranks, if ids are not integers in [0, n).
        RuntimeError: in a model under torch's own DistributedDataParallel, which has sent
            rank 0's rows to all ranks; see `pdc.replicate`.
        TypeError: if `like` has no rows.

    A loader with the embedding, `DistNeighborLoader(..., embedding=emb)`, sends the ids of a
    minibatch to their owners with its bulk, in the background. A step with the loader's
    `batch.n_id` (unchanged, on the CPU, on all ranks) then only moves rows and their gradients,
    with bitwise the same result. Rows are fetched in the step, so they are never stale.

    Price: a lookup by ids is collective over all ranks: h ids and h rows of dim words (h the
    distinct rows of other ranks), and h rows in the backward pass, each in one all-to-all,
    after one of counts. Without ids nothing travels. The constructor is collective, too. The
    backward pass of a lookup is also collective: a rank without a loss calls backward on
    `0 * y.sum()`. Functions that read the gradients of all parameters only see this rank's
    rows: clip gradients by `pdc.clip_grad_norm_`.
    """

    _checked = 0  # the parameter that was last found to hold this rank's rows

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        like: Any = None,
        *,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sparse = sparse
        facts: dict[str, Any] = {"num_embeddings": num_embeddings}
        facts |= {"embedding_dim": embedding_dim, "sparse": sparse, "dtype": dtype}
        self.rows = _agreed_rows(like, facts)
        device = self.rows.mesh.device if device is None else device
        shape = (len(self.rows), embedding_dim)
        local = torch.empty(shape, device=device, dtype=dtype)
        self.register_parameter("weight", torch.nn.Parameter(local))
        self._checked = id(self.shard)
        self.reset_parameters()

    @classmethod
    def from_pretrained(
        cls, embeddings: DistTensor, freeze: bool = True, sparse: bool = False
    ) -> DistEmbedding:
        """Returns an embedding that starts as a row-sharded tensor [n, dim], such as `data.x`.

        Args:
            embeddings: the table; it is copied.
            freeze: whether the table is not trained, as in torch.nn.Embedding.
            sparse: as in the constructor.
        """
        if not is_rows(embeddings) or embeddings.dim() != 2:
            raise TypeError(
                "from_pretrained takes a row-sharded tensor of 2 dims, such as data.x of "
                f"pdc.partition; got a {type(embeddings).__name__}"
            )
        local = embeddings.to_local().detach()
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made.num_embeddings, made.embedding_dim = embeddings.rows.count, local.size(1)
        made.sparse, made.rows = sparse, embeddings.rows
        made.register_parameter(
            "weight", torch.nn.Parameter(local.clone(), requires_grad=not freeze)
        )
        made._checked = id(made.shard)
        return made

    @property
    def weight(self) -> DistTensor:
        """Returns the whole table as a DistTensor `[n, dim]`, differentiably."""
        self._check()
        return from_local(self.shard, DistTensor.wrap(self.shard.detach(), self.rows))

    @property
    def shard(self) -> torch.nn.Parameter:
        """Returns the parameter: this rank's rows `[n_i, dim]`."""
        try:
            shard: Any = self._parameters["weight"]
        except KeyError:
            raise AttributeError("the embedding has no rows yet") from None
        shard.is_shard = True  # other ranks' are others: see `Averager`
        shard.is_part = self.rows.mesh.size > 1
        if not PROCESS.watches_optimizers:
            register_optimizer_step_pre_hook(_refuse_optimizer)
            PROCESS.watches_optimizers = True
        return shard  # type: ignore[no-any-return]

    def reset_parameters(self) -> None:
        """Draws all rows anew from the standard normal distribution, as one process does."""
        local = self.shard.data
        drawn = random.draw_rows(
            torch.nn.init.normal_, local, self.rows.count, self.rows.place
        )
        local.copy_(drawn)

    def forward(self, ids: Tensor | None = None) -> Tensor:
        """Returns the rows of this rank's ids, or of all nodes; see the class."""
        if ids is None:
            return self.weight
        if isinstance(ids, DistTensor):
            return self.weight[ids]
        self._check()
        plan = self._plan(ids).to(self.shard.device)
        out: Tensor = _Lookup.apply(self.shard, plan, self.rows.mesh, self.sparse)
        return out.view(*ids.shape, self.embedding_dim)

    def _check(self) -> None:
        """Raises if the parameter was replaced by one that is no shard; collective then."""
        shard, now = self._parameters.get("weight"), id(self._parameters.get("weight"))
        if shard is not None and self._checked != now:
            problem = None
            if len(shard) != len(self.rows):
                problem = (
                    f"the rows of a DistEmbedding were replaced by a parameter "
                    f"{[*shard.shape]}; a rank holds only its own rows; write values into "
                    "the table instead, by emb.weight.data.copy_(values), or make it by "
                    "DistEmbedding.from_pretrained"
                )
            collectives.agree(problem, self.rows.mesh.world)
            self._checked = now
        self._refuse_ddp()

    def _refuse_ddp(self) -> None:
        """Raises under DistributedDataParallel, which would average different rows."""
        around: Any = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if around is None or self.rows.mesh.size == 1:
            return
        if any(p is self.shard for p in around._module_parameters):
            raise RuntimeError(
                "torch's DistributedDataParallel has sent rank 0's rows of a DistEmbedding to "
                "all ranks; wrap the model by pdc.replicate(model, mesh), which leaves them"
            )

    def _plan(self, ids: Tensor) -> IdPlan:
        """Returns the plan attached to a minibatch's ids, or makes one, which is collective."""
        known = route_of(ids, self.rows) if isinstance(ids, Tensor) else None
        if known is not None:
            return known
        n, problem = self.num_embeddings, None
        if not isinstance(ids, Tensor) or ids.dtype not in _INTEGERS:
            got = str(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
            problem = f"give ids as a tensor of integers in [0, {n}), got {got}"
        elif ids.layout != torch.strided or ids.is_meta:
            got = "one without values" if ids.is_meta else str(ids.layout)
            problem = (
                f"give ids as an ordinary tensor of integers in [0, {n}), got {got}"
            )
        else:
            ids = ids.detach().reshape(-1).long()  # int8 holds no n to compare with
            low, high = (int(v) for v in ids.aminmax()) if len(ids) else (0, -1)
            if low < 0 or high >= n:
                bad = int(ids[(ids < 0) | (ids >= n)][0])
                problem = f"give ids in [0, {n}), the number of nodes; got {bad}"
        mesh = self.rows.mesh
        if problem is not None:
            ids = torch.empty(0, dtype=torch.int64)
        return plan_ids([ids], self.rows, mesh.control, problem)[0]

    def extra_repr(self) -> str:
        """Describes the table and this rank's part of it."""
        sparse = ", sparse=True" if self.sparse else ""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}{sparse}, {len(self.rows)} rows on "
            f"rank {self.rows.mesh.rank}/{self.rows.mesh.size}"
        )


class _Lookup(torch.autograd.Function):
    """Gathers rows by ids; the gradient of a row is summed at its owner."""

    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, plan: IdPlan, mesh: Mesh, sparse: bool
    ) -> Tensor:
        ctx.plan, ctx.mesh, ctx.sparse, ctx.shape = plan, mesh, sparse, shard.shape
        return plan.gather(shard)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        slot, plan = ctx.plan.asked
        sums = plan.sum(g / ctx.mesh.size)
        if ctx.sparse:
            grad = torch.sparse_coo_tensor(
                slot.unsqueeze(0),
                sums,
                ctx.shape,
                is_coalesced=True,
                check_invariants=False,
            )
        else:
            grad = g.new_zeros(ctx.shape).index_copy(0, slot, sums)
        return grad, None, None, None


def _refuse_optimizer(optimizer: Any, *_: Any) -> None:
    """Raises for an optimizer that would treat this rank's rows as the whole table."""
    if not isinstance(optimizer, _OF_WHOLE_TABLES):
        return
    held = (p for group in optimizer.param_groups for p in group["params"])
    if any(getattr(p, "is_part", False) for p in held):
        raise ValueError(
            f"{type(optimizer).__name__} reads all rows of a table at once, but a rank holds "
            "its own rows of a DistEmbedding alone; take an optimizer that treats each "
            "number by itself, such as Adam, SGD or Adagrad, for them"
        )


def sharded_parameters(model: torch.nn.Module) -> dict[str, Rows]:
    """Returns the row-sharded parameters of a model by name, each with its rows."""
    return {
        f"{name}.weight" if name else "weight": module.rows
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, DistEmbedding)
    }


def _agreed_rows(like: Any, facts: dict[str, Any]) -> Rows:
    """Returns this rank's rows, once all ranks agree on the table; collective."""
    if like is None:
        like = latest_mesh() or init()
    with on_all_ranks(_mesh_of(like).control):
        for size in facts["num_embeddings"], facts["embedding_dim"]:
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise ValueError(
                    f"sizes must be whole numbers of at least 0, got {size!r}"
                )
        rows = _rows_of(like, facts["num_embeddings"])
    check_alike(facts, rows.mesh.control)
    return rows


def _mesh_of(like: Any) -> Mesh:
    if isinstance(like, Mesh):
        return like
    rows = _rows_in(like)
    return (latest_mesh() or init()) if rows is None else rows.mesh


def _rows_in(like: Any) -> Rows | None:
    """Returns the node rows of a share, its edges or one of its tensors; None if none."""
    edge_index = getattr(like, "edge_index", like)
    if isinstance(edge_index, DistEdgeIndex):
        return edge_index.nodes
    if is_rows(like):
        return like.rows
    if not isinstance(like, NodeStorage):
        return None
    for value in like.values():
        if is_rows(value):
            return value.rows
    for store in getattr(like._parent(), "edge_stores", ()):
        edges = store.get("edge_index")
        if isinstance(edges, DistEdgeIndex) and like._key == store._key[-1]:
            return edges.nodes
        if isinstance(edges, DistEdgeIndex) and like._key == store._key[0]:
            return edges.sources
    return None


def _rows_of(like: Any, total: int) -> Rows:
    if isinstance(like, Mesh):
        return Rows.blocks(total, like)
    rows = _rows_in(like)
    if rows is None:
        raise TypeError(
            "like says which rank holds which rows: a share of pdc.partition, its "
            "edge_index, a row-sharded tensor of it, or a Mesh; got a "
            f"{type(like).__name__}"
        )
    if not rows.whole or rows.total != total:
        raise ValueError(
            f"an embedding of {total} nodes needs as many rows, but `like` has "
            f"{rows.count}; give num_embeddings=data.num_nodes and like=data"
        )
    return rows


def clip_grad_norm_(
    model: torch.nn.Module, max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Clips the norm of all gradients, including the rows of other ranks; collective.

        g <- g min(1, max_norm / (|g| + 1e-6)),   |g| over all parameters of the model

    torch.nn.utils.clip_grad_norm_ is right where no parameter is a `DistEmbedding`'s. With
    one, each rank would see another norm, and replicated weights would drift apart.

    Args:
        model: replicated, or of one process; the same on all ranks.
        max_norm: the norm that gradients have at most.
        norm_type: p of the p-norm, above 0; may be infinity.

    Returns:
        The norm before clipping, the same on all ranks.

    Raises:
        TypeError: if it is given parameters instead of the model.
        ValueError: if p is not above 0.

    Price: an all-reduce of one word, if the model has a `DistEmbedding`.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            "clip_grad_norm_ takes the model, not its parameters, which do not say whose "
            f"rows they are; got a {type(model).__name__}"
        )
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be a number above 0, got {norm_type}")
    shards = {id(m.shard): m for m in model.modules() if isinstance(m, DistEmbedding)}
    held = [p for p in model.parameters() if p.grad is not None]
    own: list[Any] = [p.grad for p in held if id(p) not in shards]
    rows: list[Any] = [p.grad for p in held if id(p) in shards]
    extreme = math.isinf(norm_type)

    home = held[0].device if held else next(model.parameters(), torch.empty(0)).device

    def power(gradients: list[Any]) -> Tensor:
        values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        found = [torch.linalg.vector_norm(g.detach(), norm_type) for g in values]
        if not found:
            return torch.zeros((), dtype=torch.float64, device=home)
        every = torch.stack([n.to(home, torch.float64) for n in found])
        return every.max() if extreme else (every**norm_type).sum()

    total, spread = power(own), power(rows)
    if shards:
        axis = next(iter(shards.values())).rows.mesh.world
        spread = collectives.all_reduce(spread, axis, "max" if extreme else "sum")
    total = (
        torch.maximum(total, spread) if extreme else (total + spread) ** (1 / norm_type)
    )
    share = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for g in (*own, *rows):
        g.mul_(share.to(g.device))
    return total
