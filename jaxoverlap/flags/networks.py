"""NCCL's variables for each network, as its vendor publishes them, and their conflicts."""

from __future__ import annotations

from jaxoverlap.flags import sources as src
from jaxoverlap.flags.setting import Conflict, Setting
from jaxoverlap.flags.variables import VARIABLES


def published(source: str, **values: str) -> tuple[Setting, ...]:
    """Return settings of variables from one source, each with its meaning as the reason."""
    return tuple(Setting(n, v, VARIABLES[n].meaning, source) for n, v in values.items())


_PIECES = dict(
    NCCL_DYNAMIC_CHUNK_SIZE="524288",
    NCCL_P2P_NET_CHUNKSIZE="524288",
    NCCL_P2P_PCI_CHUNKSIZE="524288",
    NCCL_P2P_NVL_CHUNKSIZE="1048576",
)
_RAILS = dict(NCCL_CROSS_NIC="0", NCCL_NET_GDR_LEVEL="PIX")
_ETH0 = dict(NCCL_SOCKET_IFNAME="eth0")

TCPX = published(
    f"{src.AXLEARN}, a3-high",
    **_RAILS,
    NCCL_ALGO="Ring",
    NCCL_PROTO="Simple",
    NCCL_NVLS_ENABLE="0",
    NCCL_P2P_PXN_LEVEL="0",
    NCCL_GPUDIRECTTCPX_FORCE_ACK="0",
    NCCL_GPUDIRECTTCPX_TX_COMPLETION_NANOSLEEP="1000",
    NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS="1000000",
    NCCL_GPUDIRECTTCPX_TX_BINDINGS="eth1:8-21,112-125;eth2:8-21,112-125;"
    "eth3:60-73,164-177;eth4:60-73,164-177",
    NCCL_GPUDIRECTTCPX_RX_BINDINGS="eth1:22-35,124-139;eth2:22-35,124-139;"
    "eth3:74-87,178-191;eth4:74-87,178-191",
    NCCL_GPUDIRECTTCPX_SOCKET_IFNAME="eth1,eth2,eth3,eth4",
    NCCL_GPUDIRECTTCPX_CTRL_DEV="eth0",
    NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX="/run/tcpx",
    **_PIECES,
    NCCL_NSOCKS_PERTHREAD="4",
    NCCL_SOCKET_NTHREADS="1",
    **_ETH0,
)
TCPX_CHANNELS = Conflict(
    "NCCL_MIN_NCHANNELS, NCCL_MAX_NCHANNELS",
    (("12 and 12", src.MAXTEXT_LAUNCH), ("not set", f"{src.AXLEARN}, a3-high")),
    "",
    "as few SMs for collectives as NCCL needs: matmuls run at the same time",
)
TCPXO = published(
    f"{src.RECIPES_MEGA}; {src.AXLEARN}, a3-mega",
    **_RAILS,
    NCCL_ALGO="Ring,Tree",
    NCCL_PROTO="Simple",
    NCCL_NVLS_ENABLE="0",
    NCCL_MIN_NCHANNELS="4",
    NCCL_BUFFSIZE="8388608",
    NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY="/dev/aperture_devices",
    NCCL_FASTRAK_CTRL_DEV="eth0",
    NCCL_FASTRAK_IFNAME="eth1,eth2,eth3,eth4,eth5,eth6,eth7,eth8",
    NCCL_FASTRAK_USE_LLCM="1",
    NCCL_FASTRAK_NUM_FLOWS="2",
    NCCL_FASTRAK_USE_SNAP="1",
    NCCL_FASTRAK_PLUGIN_ACCEPT_TIMEOUT_MS="600000",
    NCCL_FASTRAK_ENABLE_CONTROL_CHANNEL="0",
    NCCL_FASTRAK_ENABLE_HOTPATH_LOGGING="0",
    **_PIECES,
    **_ETH0,
)
TCPXO_BUFFERS = Conflict(
    "NCCL_BUFFSIZE",
    (
        ("8388608", f"{src.RECIPES_MEGA}; {src.MAXTEXT_LAUNCH}"),
        ("not set", f"{src.AXLEARN}, a3-mega"),
    ),
    "8388608",
    "AxLearn's is a copy of an older version of the first",
)
TUNER = Conflict(
    "NCCL_TUNER_PLUGIN",
    (("libnccl-tuner.so, with Google's table", f"{src.RECIPES_MEGA}; {src.AXLEARN}, a3-mega"),),
    "",
    "the table's path depends on the image, and a plan's own table would replace it",
)
ROCE = dict(
    **_RAILS,
    NCCL_P2P_NET_CHUNKSIZE="131072",
    NCCL_P2P_PCI_CHUNKSIZE="131072",
    NCCL_P2P_NVL_CHUNKSIZE="524288",
    NCCL_NVLS_CHUNKSIZE="524288",
    NCCL_IB_GID_INDEX="3",
    NCCL_IB_ADAPTIVE_ROUTING="1",
    NCCL_IB_QPS_PER_CONNECTION="4",
    NCCL_IB_TC="52",
    NCCL_IB_FIFO_TC="84",
)
GIB = Conflict(
    "NCCL_*",
    (
        ("as taken", src.AXLEARN),
        ("whatever /usr/local/gib/scripts/set_nccl_env.sh sets", src.RECIPES_GIB),
    ),
    "as AxLearn",
    "the script is in Google's image alone; where it is, let it have the last word",
)
EFA = published(src.EFA, FI_EFA_USE_HUGE_PAGE="0", NCCL_SOCKET_IFNAME="en")
EFA_OLD = Conflict(
    "FI_PROVIDER, FI_EFA_USE_DEVICE_RDMA, FI_EFA_FORK_SAFE, NCCL_PROTO, NCCL_NVLS_ENABLE",
    (
        ("efa, 1, 1, not set, 0", src.AWS_JAX),
        ("not set: for aws-ofi-nccl up to 1.6 and kernels before 5.15", src.EFA),
        ("not set, and NCCL_BUFFSIZE=16777216", src.TOOLBOX_EKS),
    ),
    "",
    "the sbatch is for jax 0.4.18; six of its XLA flags are dead",
)
