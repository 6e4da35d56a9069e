"""What tensors inside the backward of an attention mean, beside those of a forward: from what the
forward has kept, and the gradient of its output, to the gradients of its inputs."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from dlattn.graph.primitives.meanings import Drawn, Factor, Given, Scores
from dlattn.graph.primitives.meanings import Meaning as ForwardMeaning
from dlattn.graph.primitives.nodes import PrimitiveNode
from dlattn.graph.primitives.positions import Predicate
from dlattn.graph.tensor import Tensor
from dlattn.records import dataclass

Dim = tuple[int, ...]


def _swapped(dim: Dim) -> Dim:
    return (*dim[:2], dim[3], dim[2])


@dataclass(frozen=True)
class LessStats:
    """Scores less the log-sum-exp of their rows, (B, H, Sq, 1)."""

    scores: Scores
    stats: Tensor

    @property
    def dim(self) -> Dim:
        return self.scores.dim


@dataclass(frozen=True)
class Stored:
    """S, (B, H, Sq, Skv), of a forward: probabilities, by their signs dropped or kept."""

    s: Tensor

    @property
    def dim(self) -> Dim:
        return self.s.attributes.dim


@dataclass(frozen=True)
class Signs:
    """The keep mask that the signs of S are.

    Attributes:
        zeros: what S is compared with, where packs hold it.
    """

    s: Tensor
    zeros: tuple[Tensor, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Probabilities:
    """Probabilities, with dropout as far as there is.

    Attributes:
        of: scores and their statistics, or what the forward stored.
        mask: what is dropped.
        scales: what they are multiplied by.
        transposed: the last two axes are swapped.
        signed: they are S as it is, with its signs.
        keep: where some are set to 0.
        zeros: what they are set to, where packs hold it.
    """

    of: LessStats | Stored
    mask: Drawn | Given | Signs | None = None
    scales: tuple[Factor, ...] = ()
    transposed: bool = False
    signed: bool = False
    keep: Predicate = Predicate()
    zeros: tuple[Tensor, ...] = field(default=(), compare=False)

    @property
    def dim(self) -> Dim:
        return _swapped(self.of.dim) if self.transposed else self.of.dim


@dataclass(frozen=True)
class OfProbabilities:
    """The gradient of probabilities, dO by v transposed, with dropout as far as there is.

    Attributes:
        d_o, v: the operands; v as the product takes it, transposed.
        mask, scales, keep, zeros: as of probabilities.
        lengths: as of scores.
    """

    d_o: Given
    v: Given
    mask: Drawn | Given | Signs | None = None
    scales: tuple[Factor, ...] = ()
    keep: Predicate = Predicate()
    lengths: tuple[tuple[str, Tensor], ...] = ()
    zeros: tuple[Tensor, ...] = field(default=(), compare=False)

    @property
    def dim(self) -> Dim:
        return (*self.d_o.tensor.attributes.dim[:3], self.v.dim[2])


@dataclass(frozen=True)
class Products:
    """Two tensors multiplied, element by element: dO and o, or probabilities and their gradient."""

    factors: tuple[Tensor, Tensor] | tuple[Probabilities, OfProbabilities]


@dataclass(frozen=True)
class Delta:
    """Sums of the rows of such products."""

    of: Products
    scales: tuple[Factor, ...] = ()


@dataclass(frozen=True)
class Centered:
    """The gradient of probabilities less the sums of rows."""

    gradient: OfProbabilities
    delta: Delta
    scales: tuple[Factor, ...] = ()

    @property
    def dim(self) -> Dim:
        return self.gradient.dim


@dataclass(frozen=True)
class OfScores:
    """The gradient of scores: probabilities times what :class:`Centered` is.

    Attributes:
        keep, zeros: as of probabilities.
    """

    probabilities: Probabilities
    centered: Centered
    scales: tuple[Factor, ...] = ()
    transposed: bool = False
    keep: Predicate = Predicate()
    zeros: tuple[Tensor, ...] = field(default=(), compare=False)

    @property
    def dim(self) -> Dim:
        return _swapped(self.centered.dim) if self.transposed else self.centered.dim


@dataclass(frozen=True)
class OfBias:
    """The gradient of scores, summed along some axes."""

    of: OfScores


@dataclass(frozen=True)
class Result:
    """A gradient of q, k or v.

    Attributes:
        role: ``"dQ"``, ``"dK"`` or ``"dV"``.
        a, b: the operands of the product that it is.
        scales: what the product is multiplied by.
        lengths: side -> what the product takes for the lengths of ``"q"`` and ``"kv"``.
    """

    role: str
    a: Probabilities | OfScores
    b: Given
    scales: tuple[Factor, ...] = ()
    lengths: tuple[tuple[str, Tensor], ...] = ()


Gradient = (
    LessStats
    | Stored
    | Signs
    | Probabilities
    | OfProbabilities
    | Products
    | Delta
    | Centered
    | OfScores
    | OfBias
    | Result
)
Meaning = ForwardMeaning | Gradient


@dataclass(frozen=True)
class Written:
    """A tensor with memory, the node that makes it, and what it means."""

    tensor: Tensor
    node: PrimitiveNode
    means: Any

    @property
    def scales(self) -> tuple[Factor, ...]:
        """What the gradient of scores, of which it is made, is multiplied by."""
        of, means = self.of, self.means
        own = (*means.scales, *means.b.scales) if isinstance(means, Result) else ()
        return (*of.probabilities.scales, *of.centered.scales, *of.scales, *own)

    @property
    def of(self) -> OfScores:
        """That gradient."""
        of = self.means
        if isinstance(of, Result):
            of = of.a
        if isinstance(of, OfBias):
            of = of.of
        assert isinstance(of, OfScores)
        return of
