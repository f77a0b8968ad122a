"""One seam: the Link moves rows to where they are needed, and sums back."""

from pyg_distcomm.exchange.halo import Halo as Halo
from pyg_distcomm.exchange.link import Link as Link
