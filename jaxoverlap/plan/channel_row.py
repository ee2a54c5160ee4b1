"""A row of NCCL's channels, as plans keep it: `flags/nccl_tuner.py` writes it for NCCL and XLA."""

from __future__ import annotations

import msgspec

TUNED = ("all_gather", "all_reduce", "reduce_scatter")
SENDS = ("all_to_all", "collective_permute")
_ALGORITHMS = ("tree", "ring", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat")
_PROTOCOLS = ("ll", "ll128", "simple")
_MAX_CHANNELS = 64  # NCCL's MAXCHANNELS


class ChannelRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The channels on which the collectives of one kind and size run.

    Attributes:
        kind: all_gather, all_reduce, reduce_scatter, all_to_all or collective_permute.
        min_bytes, max_bytes: the sizes it holds for, both included. NCCL counts the whole of
            what is gathered, reduced or to be scattered.
        channels: how many; each takes an SM. None: NCCL's choice.
        chunk_bytes: bytes of a piece on its way; None: NCCL's choice. The plugin's file has no
            place for it: where all rows agree, `variables` gives the buffers that make it so.
        nodes, ranks: hosts and GPUs of the communicator; None: any.
        algorithm, protocol: by NCCL's names, in lower case.
    """

    kind: str
    min_bytes: int
    max_bytes: int
    channels: int | None
    chunk_bytes: int | None = None
    nodes: int | None = None
    ranks: int | None = None
    algorithm: str = "ring"
    protocol: str = "simple"

    def __post_init__(self) -> None:
        known = (*TUNED, *SENDS)
        if self.kind not in known:
            raise ValueError(f"kind {self.kind!r}: expected one of {', '.join(known)}")
        if self.algorithm not in _ALGORITHMS or self.protocol not in _PROTOCOLS:
            raise ValueError(
                f"{self.algorithm!r} over {self.protocol!r}: expected an algorithm of "
                f"{', '.join(_ALGORITHMS)} and a protocol of {', '.join(_PROTOCOLS)}"
            )
        if not 0 <= self.min_bytes <= self.max_bytes:
            raise ValueError(f"{self.min_bytes} to {self.max_bytes} bytes: expected a range from 0")
        if self.channels is not None and not 1 <= self.channels <= _MAX_CHANNELS:
            raise ValueError(f"{self.channels} channels: NCCL has 1 to {_MAX_CHANNELS}")
        for name in ("chunk_bytes", "nodes", "ranks"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name}={count}: expected 1 or more, or None for any")
