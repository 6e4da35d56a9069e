"""The contenders: dlattn and the libraries it is measured against, behind one interface.

A contender is named ``impl`` or, for dlattn with a chosen plan, ``dlattn:fwd_sm80`` (one pass) or
``dlattn:sm80`` (both). None is needed: what is not installed, or does not support a case, is left
out with a reason. Where the binaries of FlashAttention-3 are no installed package, ``PEERS`` names
a folder that holds ``fa3/_C.so``.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.peers.aten import Fa2, Flex, TorchCudnn
from bench.peers.base import Peer, Prepared, has_module
from bench.peers.flash import Fa3, Fa3Splits, Fa4
from bench.peers.graph import Cudnn, Dlattn

PEERS: dict[str, Callable[[], Peer]] = {
    "dlattn": Dlattn,
    "fa2": Fa2,
    "fa3": Fa3,
    "fa3_splits": Fa3Splits,
    "fa4": Fa4,
    "cudnn": Cudnn,
    "torch_cudnn": TorchCudnn,
    "flex": Flex,
}


def make_peer(name: str) -> Peer:
    """The contender of this name.

    Raises:
        ValueError: there is none.
    """
    base, _, engine = name.partition(":")
    if base == "dlattn":
        return Dlattn(engine or None)
    if engine or base not in PEERS:
        raise ValueError(f"Unknown contender {name!r}; known: {', '.join(PEERS)}, dlattn:<engine>")
    return PEERS[base]()


def is_ours(name: str) -> bool:
    """Whether an ``impl`` is dlattn, with whatever engine."""
    return name.partition(":")[0] == "dlattn"


__all__ = ["PEERS", "Peer", "Prepared", "has_module", "is_ours", "make_peer"]
