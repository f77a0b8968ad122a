"""Defines the rules of matrix samplers: the matrices Q and A, and a function of P = Q A.

Samplers of one algebra differ in their rule: the rows of Q, the entries of the matrix that
Q multiplies, and a function applied to P = Q A before columns are drawn from it. With `Ahat`
the matrix A + I, or A, divided by the sums of its rows,

    GraphSAGE            p_vu  ~  A[v,u]                           each row for itself
    Ladies("code")       p_u   ~  sum over rows v of Ahat[v,u]^2,        A + I
    Ladies("cagnet")     p_u   ~  |N(u) n rows|,                         A
    Ladies("paper")      p_u   ~  |N(u) n rows|^2,                       A
    FastGCN              p_u   ~  sum over all v of Ahat[v,u]^2,         A + I
    UserRule(f)          p_u   ~  f(P)_u,  P_u = sum over rows v of A[v,u]

A[v,u] is the weight of the edges u -> v: row v holds what v samples from. Parallel edges
are one entry of their summed weight. "Rows" are those of one minibatch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar

import torch

from pyg_distcomm.sampling.algebra import BulkMatrix, BulkNodes

__all__ = ["FastGCN", "GraphSAGE", "Ladies", "Rule", "UserRule", "rule_name"]

SQUARED, PLAIN, COUNTED = 2, 1, 0  # Q multiplies: Ahat^2, A, or 1 where A > 0


class Rule(ABC):
    """Defines the probability matrix P of a layer-wise sampler (abstract).

    Attributes:
        shared: whether all minibatches draw from one row.
        keeps_batch: whether the batch is among the columns of every layer, by default.
    """

    shared: ClassVar[bool] = False
    keeps_batch: ClassVar[bool] = True

    @property
    def loops(self) -> bool:
        """Returns whether A + I replaces A."""
        return False

    @property
    @abstractmethod
    def power(self) -> int:
        """Returns the power of A that Q multiplies: `SQUARED`, `PLAIN` or `COUNTED`."""

    def query(self, rows: BulkNodes, num_nodes: int) -> BulkMatrix:
        """Returns Q [k, n], ones at the rows of each minibatch, which its row of P adds up."""
        return BulkMatrix.row_per_batch(rows, num_nodes)

    def judge(self, p: BulkMatrix, scale: float) -> BulkMatrix:
        """Returns the weights to draw from, given P in units of 1 / scale."""
        return p


@dataclass(frozen=True)
class GraphSAGE(Rule):
    """Draws for each node from its own neighbours ([Hamilton17]); Q has a row for each.

    The matrix form of `KeyedNeighborSampler`, which builds no matrix and has the same
    distribution; for the algebra, not for `KeyedLayerSampler`.
    """

    power = PLAIN

    def query(self, rows: BulkNodes, num_nodes: int) -> BulkMatrix:
        """Returns Q [total rows, n], a one in each row."""
        return BulkMatrix.row_per_node(rows, num_nodes)


@dataclass(frozen=True)
class Ladies(Rule):
    """Draws for a minibatch from the neighbours of its rows ([Zou19]).

    There are three definitions: "code", that of the authors' code; "cagnet", what CAGNET's
    sampler computes on a graph without weights; and "paper", the text of [Tripathy24]. The
    last two have no self-loops, and count an edge whatever its weight.
    """

    definition: str = "code"

    def __post_init__(self) -> None:
        if self.definition not in ("code", "cagnet", "paper"):
            raise ValueError(
                "definition must be 'code', 'cagnet' or 'paper', got "
                f"{self.definition!r}"
            )

    @property
    def loops(self) -> bool:
        """Returns whether A + I replaces A, as in the authors' code."""
        return self.definition == "code"

    @property
    def power(self) -> int:
        """Returns the power of A that Q multiplies: squares in the authors' code, else ones."""
        return SQUARED if self.definition == "code" else COUNTED

    def judge(self, p: BulkMatrix, scale: float) -> BulkMatrix:
        """Squares the counts, for "paper"."""
        return p.with_value(p.values**2) if self.definition == "paper" else p


@dataclass(frozen=True)
class FastGCN(Rule):
    """Draws for all minibatches from all nodes, by one row of weights ([Chen18]).

    The row is never copied. A row of the batch may end with no column at all.
    """

    shared: ClassVar[bool] = True
    keeps_batch: ClassVar[bool] = False

    loops = True
    power = SQUARED

    def query(self, rows: BulkNodes, num_nodes: int) -> BulkMatrix:
        """Returns Q [1, n], all ones."""
        each = torch.arange(num_nodes)
        return BulkMatrix.row_per_batch(BulkNodes.of([each]), num_nodes)


@dataclass(frozen=True)
class UserRule(Rule):
    """Applies a function of your own to P, such as `lambda P: P.sqrt()`.

    Args:
        function: takes P [k, n], a `BulkMatrix` of float64, and returns it with other
            values, finite and not negative. Functions that keep zeros apply to its
            entries, as `P.sqrt()`, `P**0.5` or `2 * P`; for others, `P.values` [nnz] are
            the values of its entries, `P.row` and `P.col` say which these are, and
            `P.with_value(values)` returns it with others. It must treat each row for itself, or
            minibatches will depend on `bulk_size`. On several ranks all give the same one.
        counted: whether P adds up ones, rather than the weights of edges.
        loops: whether A + I stands in for A.
    """

    function: Callable[[BulkMatrix], BulkMatrix]
    counted: bool = False
    loops: bool = False

    @property
    def power(self) -> int:
        """Returns the power of A that Q multiplies: ones, or the weights as they are."""
        return COUNTED if self.counted else PLAIN

    def judge(self, p: BulkMatrix, scale: float) -> BulkMatrix:
        """Calls the function, and checks what it returns."""
        given = p.with_value(p.values.double() / scale)
        try:
            found = self.function(given)
        except (AttributeError, TypeError) as error:
            if BulkMatrix.__name__ not in str(error):
                raise
            raise TypeError(f"the rule failed: {error}") from error
        got = type(found).__name__
        if isinstance(found, BulkMatrix):
            same = torch.equal(found.rowptr, p.rowptr) and torch.equal(found.col, p.col)
            if same and found.values.shape == p.col.shape:
                return found
            got = f"{len(found.values)} values" if same else "others"
        raise ValueError(
            f"got {got} from a rule, wanted the {p.nnz} entries of P with other values; return "
            "P.sqrt(), or P.with_value(P.values.sqrt())"
        )


def rule_name(rule: Rule) -> str:
    """Returns a name of a rule, to compare between ranks.

    Functions are told apart by their names, and what they make of a few numbers.
    """
    if isinstance(rule, UserRule):
        function = getattr(rule.function, "__qualname__", type(rule.function).__name__)
        ones = torch.ones(8, dtype=torch.float64)
        rows, first = torch.arange(8), torch.zeros(8, dtype=torch.int64)
        probe = BulkMatrix.from_edges(rows, first, ones, (8, 1))
        try:
            found = rule.function(probe.with_value(torch.arange(1, 9) / ones / 7))
            made = sha256(found.values.double().numpy().tobytes()).hexdigest()[:16]
        except Exception:  # a rule may need what only a graph has
            made = "?"
        return f"UserRule({function} #{made}, {rule.counted}, {rule.loops})"
    if type(rule).__repr__ is object.__repr__:  # it contains an address
        return type(rule).__qualname__
    return repr(rule)
