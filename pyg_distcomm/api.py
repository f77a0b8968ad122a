"""Lists the public names of the package, and loads all that they need.

`pyg_distcomm/__init__.py` imports this module when one of them is first used.
"""

from pyg_distcomm.checkpoint import load_checkpoint as load_checkpoint
from pyg_distcomm.checkpoint import save_checkpoint as save_checkpoint
from pyg_distcomm.comm.launch import launch as launch
from pyg_distcomm.comm.launch import on_preempt as on_preempt
from pyg_distcomm.comm.ledger import Ledger as Ledger
from pyg_distcomm.comm.mesh import Mesh as Mesh
from pyg_distcomm.comm.rows import Rows as Rows
from pyg_distcomm.comm.store import RankError as RankError
from pyg_distcomm.comm.trace import trace as trace
from pyg_distcomm.graph.partition_data import load_partition as load_partition
from pyg_distcomm.graph.partition_data import partition as partition
from pyg_distcomm.graph.partition_data import partition_report as partition_report
from pyg_distcomm.halo.policy import BNS as BNS
from pyg_distcomm.halo.policy import SANCUS as SANCUS
from pyg_distcomm.halo.policy import VARCO as VARCO
from pyg_distcomm.halo.policy import LinkPolicy as LinkPolicy
from pyg_distcomm.halo.policy import PipeGCN as PipeGCN
from pyg_distcomm.halo.policy import Sylvie as Sylvie
from pyg_distcomm.nn.embedding import DistEmbedding as DistEmbedding
from pyg_distcomm.nn.embedding import clip_grad_norm_ as clip_grad_norm_
from pyg_distcomm.nn.layers import convert as convert
from pyg_distcomm.nn.replicate import replicate as replicate
from pyg_distcomm.partition.partition import Partition as Partition
from pyg_distcomm.partition.partition import PartitionReport as PartitionReport
from pyg_distcomm.pipeline.pipeline import Pipeline as Pipeline
from pyg_distcomm.plan.init import Auto as Auto
from pyg_distcomm.plan.init import init as init
from pyg_distcomm.plan.planner import Plan as Plan
from pyg_distcomm.plan.planner import Plans as Plans
from pyg_distcomm.plan.planner import RandomGraph as RandomGraph
from pyg_distcomm.plan.planner import plan as plan
from pyg_distcomm.sharded.dist_tensor import DistTensor as DistTensor
from pyg_distcomm.sharded.edges import DistEdgeIndex as DistEdgeIndex
from pyg_distcomm.sharded.edges import from_local as from_local
from pyg_distcomm.watch.metrics import CSVWriter as CSVWriter
from pyg_distcomm.watch.metrics import TensorBoardWriter as TensorBoardWriter
from pyg_distcomm.watch.metrics import metrics as metrics
