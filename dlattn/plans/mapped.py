"""What the Hopper plans share: tensors that the copy engine moves, by maps beside ``Params``."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import gcd
from typing import ClassVar

from dlattn.dtypes import itemsize
from dlattn.plans.argument import MappedParams, Params
from dlattn.plans.cuda import CudaPlan
from dlattn.plans.params import params_for
from dlattn.problem import PAGE_TABLES, Bias, Edit, Geometry, Problem, Stored, TensorSpec
from dlattn.problem.layout import MOST_RAGGED_ELEMENTS
from dlattn.runtime import tensormap
from dlattn.runtime.target import Target

#: Rows after which the swizzle of slabs repeats: a box begins at a multiple of them.
LEAST_PAGE = 8


#: Bytes of a row of a slab, and of the widest box; a line of L2 has as many.
_SLAB_ROW = 128


def slab_bytes(rows: int, columns: int, element_bytes: int = 2) -> int:
    """Bytes of a ``SlabTile`` (``cuda_src/tile/slab_tile.cuh``)."""
    return -(-columns * element_bytes // _SLAB_ROW) * rows * _SLAB_ROW


def bias_tile_bytes(problem: Problem, rows: int, columns: int) -> int:
    """Bytes of a tile of the bias (``StagedTile`` in ``cuda_src/attn/staged_bias.cuh``)."""
    assert problem.bias is not None
    rows = LEAST_PAGE if problem.bias.one_row else rows
    return slab_bytes(rows, columns, itemsize(problem.bias.dtype))


def bias_rows(problem: Problem, rows: int) -> int:
    """Rows that a copy of the bias moves, for so many queries."""
    return 1 if problem.bias is not None and problem.bias.one_row else rows


def staged(problem: Problem) -> Problem:
    """The problem, with a bias that the kernel reads by tiles: one of booleans only if the copy
    engine moves them."""

    def by_tiles(edit: Edit) -> Edit:
        if isinstance(edit, Bias) and (edit.aligned or not edit.is_boolean):
            return replace(edit, staged=True)
        return edit

    return replace(problem, edits=tuple(map(by_tiles, problem.edits)))


#: What the copy engine's least stride is, in elements, and how many of them it can count.
_UNIT, _MOST_UNITS = 8, 2**31 - 1


def map_of(spec: TensorSpec) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Where a tensor's map begins, in bytes from the tensor, and its shape and strides in elements.

    A ragged tensor's has elements, eight at a time, in place of batch entries, and begins as many
    rows before the tensor as its longest sequence has: ``cuda_src/kernels/ragged.cuh`` says why.
    """
    if not spec.ragged:
        # Memory that is repeated exists once.
        dim = tuple(n if s else 1 for n, s in zip(spec.dim, spec.stride, strict=True))
        return 0, dim, spec.stride
    before = 2 * spec.dim[2] * spec.stride[2]
    return -before, (_MOST_UNITS, *spec.dim[1:]), (_UNIT, *spec.stride[1:])


class MappedPlan(CudaPlan):
    """A plan whose main kernel takes a :class:`MappedParams`."""

    #: The argument of the main kernel, with maps before ``p``.
    argument_type: ClassVar[type[MappedParams]]

    @cached_property
    def _maps(self) -> dict[str, int]:
        """Where each map is."""
        argument = ctypes.addressof(self._argument)
        return {
            role: argument + getattr(self.argument_type, role).offset for role in self.box_rows()
        }

    @abstractmethod
    def box_rows(self) -> Mapping[str, int]:
        """Rows that one copy moves, by role; it moves as many columns as a slab has."""

    def l2_promotion(self, spec: TensorSpec) -> int:
        """What a copy brings into L2 at a time: less where rows are not whole lines of L2, of which
        more would be other rows', and come again with these."""
        steps = [step for n, step in zip(spec.dim[:-1], spec.stride, strict=False) if n > 1]
        whole = all(n * itemsize(spec.dtype) % _SLAB_ROW == 0 for n in (spec.dim[-1], *steps))
        return tensormap.L2_PROMOTION_256B if whole else tensormap.L2_PROMOTION_128B

    def paged_rows(self, role: str, rows: int) -> int:
        """Rows of a box of k or v, where a tile has so many."""
        page = self.geometry.page_size(role)
        return rows if page is None else gcd(page, rows)

    def make_argument(self) -> ctypes.Structure:
        argument = self.argument_type.aligned()
        argument.p = params_for(self.geometry)
        return argument

    @staticmethod
    def params_in(argument: ctypes.Structure) -> Params:
        params: Params = argument.p
        return params

    def build(self) -> None:
        if self._operations is not None:
            return
        of_maps = []
        for role, rows in self.box_rows().items():
            spec, place = self.geometry.tensors[role], self._maps[role]
            begin, dim, stride = map_of(spec)
            box = (1, 1, rows, _SLAB_ROW // itemsize(spec.dtype))
            tensormap.encode(place, spec.dtype, dim, stride, box, self.l2_promotion(spec))
            of_maps.append((role, tensormap.address_slot(place), begin))
        self._slots += of_maps
        super().build()

    @classmethod
    def mapping_refusal(cls, problem: Problem, geometry: Geometry, target: Target) -> str | None:
        """Why the copy engine cannot move the tensors, or ``None``."""
        if target.capability != (9, 0):
            return f"it needs compute capability 9.0 (Hopper); {target} has {target.version}."
        for role in PAGE_TABLES:
            page = geometry.page_size(role)
            if page is not None and page < LEAST_PAGE:
                return (
                    f"the copy engine moves {LEAST_PAGE} rows or more; pages of "
                    f"{geometry.tensors[role].name} have {page}."
                )
        if any(isinstance(edit, Stored) for edit in problem.edits):
            return "probabilities that a forward stored are read by the portable kernels."
        if problem.access_bytes != 16:
            return "the copy engine needs 16-byte aligned tensors and strides."
        for role in cls.argument_type.required:
            spec = geometry.tensors[role]
            first = int(spec.ragged)
            sizes, steps = spec.dim[first:], spec.stride[first:]
            if any(n > 1 and s == 0 for n, s in zip(sizes, steps, strict=True)):
                return f"the copy engine cannot repeat memory; {spec.name} has a stride of 0."
            elements = (geometry.most_tokens(role) or 0) * spec.stride[2]
            if spec.ragged and elements > MOST_RAGGED_ELEMENTS:
                return (
                    f"the copy engine counts {MOST_RAGGED_ELEMENTS} elements of a ragged tensor; "
                    f"{spec.name} may have {elements}."
                )
        return None
