#!/bin/bash
# Starts this host's ranks of examples/elastic.py; run it on every host:
#
#     HEAD=node1 HOSTS=1:4 examples/cluster/torchrun.sh /shared/runs/gcn
#
# HEAD    the host of the rendezvous: one of them, or one more that only holds the store
# HOSTS   how many hosts there are; FEWEST:MOST lets the run go on with fewer
# RANKS   ranks on each host
# The folder is on a disk that all hosts share.
set -euo pipefail
folder=${1:?the folder of the run, on a disk that all hosts share}
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Where hosts have several networks, name the one between them, as `ip -br addr` shows it;
# left out, ranks take the one by which they reach HEAD.
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0

# Without it torch's agents do not tell a host that comes back where ranks meet: both end.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec torchrun \
    --nnodes "${HOSTS:-2}" \
    --nproc-per-node "${RANKS:-1}" \
    --max-restarts "${RESTARTS:-10}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:?the host of the rendezvous}:${PORT:-29400}" \
    --rdzv-id "${RUN_ID:-elastic}" \
    --rdzv-conf "join_timeout=600,last_call_timeout=30" \
    "$here/elastic.py" --folder "$folder" "$@"
