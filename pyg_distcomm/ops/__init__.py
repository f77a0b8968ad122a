"""Local sparse blocks, and the family of distributed products over them."""

from pyg_distcomm.ops.csr import CSR as CSR
from pyg_distcomm.ops.csr import Pattern as Pattern
from pyg_distcomm.ops.grid_matrix import GridMatrix as GridMatrix
