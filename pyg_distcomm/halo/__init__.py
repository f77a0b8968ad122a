"""One seam: the Link moves rows to where they are needed, and sums back."""

from pyg_distcomm.halo.halo import Halo as Halo
from pyg_distcomm.halo.link import Link as Link
