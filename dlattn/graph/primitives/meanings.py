"""What tensors inside an attention mean, from the product of q and k to the product with v; and the
node whose result means nothing."""

from __future__ import annotations

from dlattn.graph.primitives.nodes import PrimitiveNode
from dlattn.graph.primitives.positions import Affine, Predicate
from dlattn.graph.tensor import Tensor
from dlattn.records import dataclass


@dataclass(frozen=True)
class Given:
    """A tensor of the user's, perhaps with its last two axes swapped, perhaps scaled."""

    tensor: Tensor
    transposed: bool = False
    scales: tuple[Factor, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether nothing was done to it."""
        return not (self.transposed or self.scales)

    @property
    def dim(self) -> tuple[int, ...]:
        """Of a k that the first product takes transposed: (B, H, Skv, D)."""
        dim = self.tensor.attributes.dim
        return dim if self.transposed else (*dim[:2], dim[3], dim[2])


@dataclass(frozen=True)
class Factor:
    """A tensor of one element, which multiplies; or divides, if ``inverse``."""

    tensor: Tensor
    inverse: bool = False


@dataclass(frozen=True)
class Scores:
    """Scores as far as they were edited.

    Attributes:
        q, k: the operands.
        scales: what they are multiplied by.
        bias: what is added then.
        keep: which positions are kept of those.
        fills: what masked scores were set to: tensors of one element.
        lengths: side -> what the product takes for the lengths of ``"q"`` and ``"kv"``.
    """

    q: Given
    k: Given
    scales: tuple[Factor, ...] = ()
    bias: Tensor | None = None
    keep: Predicate = Predicate()
    fills: tuple[Tensor, ...] = ()
    lengths: tuple[tuple[str, Tensor], ...] = ()

    @property
    def dim(self) -> tuple[int, ...]:
        """(B, H, Sq, Skv)."""
        return (*self.q.tensor.attributes.dim[:3], self.k.dim[2])


@dataclass(frozen=True)
class OfScores:
    """A step of a softmax over scores: ``max``, ``shifted``, ``exp``, ``sum``, ``inverse`` (of the
    sum), ``log`` (of the sum) or ``stats``."""

    what: str
    scores: Scores


@dataclass(frozen=True)
class Drawn:
    """A keep mask that ``rng`` draws."""

    node: PrimitiveNode


@dataclass(frozen=True)
class Weights:
    """Probabilities, with dropout as far as there is."""

    scores: Scores
    mask: Drawn | Given | None = None
    scales: tuple[Factor, ...] = ()


@dataclass(frozen=True)
class Output:
    """The product with v: attention."""

    weights: Weights
    v: Given
    lengths: tuple[tuple[str, Tensor], ...] = ()


Meaning = Given | Scores | OfScores | Drawn | Weights | Output | Affine | Predicate


class Misfit(Exception):
    """The first node that is no part of an attention, and why."""

    def __init__(self, node: PrimitiveNode, why: str) -> None:
        super().__init__(f"{node} {why}")
