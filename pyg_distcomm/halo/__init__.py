"""Moves rows between ranks: halos, codecs, staleness, and the policy of a link."""

from pyg_distcomm.halo.halo import Halo as Halo
from pyg_distcomm.halo.halo import Link as Link
