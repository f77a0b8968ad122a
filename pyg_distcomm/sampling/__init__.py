"""Sampling of minibatches: the sampler behind the loaders, usable by itself.

Letters: n nodes, E edges, k fan-out, t the number of a minibatch in its epoch.
"""

from pyg_distcomm.sampling.neighbor_sampler import (
    KeyedNeighborSampler as KeyedNeighborSampler,
)
