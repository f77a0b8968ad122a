"""How a layer finds its link: its own, or that of the edges it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from pyg_distcomm.comm.consistency import comparer_of
from pyg_distcomm.comm.mesh import Mesh
from pyg_distcomm.comm.rows import Rows
from pyg_distcomm.graph.edge_index import DistEdgeIndex, settings_of
from pyg_distcomm.halo.compressed import LayerExchange
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.ops.local_blocks import Wrap

OwnLink: TypeAlias = LinkPolicy | Literal["exact"] | None


def check_link(link: OwnLink) -> OwnLink:
    """Returns what a layer can be given as its link, or says what that is."""
    if link is None or link == "exact" or isinstance(link, LinkPolicy):
        return link
    raise TypeError(
        "link must be a LinkPolicy, such as pdc.Sylvie() or pdc.VARCO(epochs), 'exact', or "
        f"None for that of the edge_index, got {link!r}"
    )


@dataclass(frozen=True, eq=False)
class LayerLink:
    """A layer at work, and the link it goes by.

    Args:
        layer: the layer.
        link: its link; None is exact.
        nodes: which nodes are where.
    """

    layer: torch.nn.Module
    link: LinkPolicy | None
    nodes: Rows

    @staticmethod
    def of(layer: torch.nn.Module, link: OwnLink, edges: DistEdgeIndex) -> LayerLink:
        """Returns a layer with its own link, or that of the edges; collective at first.

        Raises:
            ValueError: on all ranks, if their links differ.
        """
        if link is None:
            link = edges.topology.link
        edges.topology.read_by(layer, link)
        policy = link if isinstance(link, LinkPolicy) else None
        mesh: Any = edges.nodes.mesh
        if isinstance(mesh, Mesh):  # a pipeline compares the links of its stages itself
            comparer_of(mesh).check_given(layer, policy, lambda: settings_of(policy))
        return LayerLink(layer, policy, edges.nodes)

    @property
    def is_coded(self) -> bool:
        """Whether anything it exchanges may be coded or late."""
        link = self.link
        return link is not None and self.nodes.mesh.size > 1 and not link.is_exact

    def call(self, stage: Callable[[], int] | None = None) -> LayerExchange | None:
        """Returns one call of the layer, None if it is exact; see `LinkPolicy.begin`."""
        if self.link is None:
            return None
        return self.link.begin(self.layer, self.nodes, self.layer.training, stage)

    def wrap(self, stage: Callable[[], int] | None = None) -> Wrap | None:
        """Returns how one call of the layer wraps links, None if it is exact."""
        call = self.call(stage)
        return None if call is None else call.wrap

    @property
    def had_kept(self) -> bool:
        """Whether a run that goes on had seen this layer's input, and its own did not yet."""
        if self.link is None or not self.is_coded:
            return False
        trains = self.layer.training and torch.is_grad_enabled()
        return self.link.was_constant(self.layer, trains)

    def keep(self, graded: bool) -> None:
        """Tells the link that a product is made to be kept, where gradients are on or not."""
        if self.link is not None:
            self.link.note_cached(self.layer, self.nodes, self.layer.training and graded)
