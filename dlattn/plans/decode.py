"""The decode: ``cuda_src/kernels/decode.cuh``, of few queries to many keys, for compute capability
8.0 and up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from dlattn.plans.argument import Divisor, ItemsRef, MappedDecodeParams
from dlattn.plans.cuda import refusal
from dlattn.plans.decode_tiling import (
    MOST_BLOCKS,
    MOST_BOX_ROWS,
    MOST_CLUSTER_ROWS,
    MOST_QUERIES,
    DecodeTiling,
    all_box_tilings,
    box_tilings,
    cluster_of,
    cluster_tiling,
    items_of,
    items_side_by_side,
    rows_of,
    tilings,
)
from dlattn.plans.few_queries import fills_tiles, kernels_of_other
from dlattn.plans.kernels import KernelLaunch, round_up, shared_of_each
from dlattn.plans.mapped import MappedPlan
from dlattn.plans.params import Place, drawn_mark, places_of
from dlattn.plans.source import kernel_source
from dlattn.problem import PAGE_TABLES, Direction, Geometry, Problem, TensorSpec
from dlattn.runtime.jit import KernelSource
from dlattn.runtime.target import Target
from dlattn.runtime.tensormap import L2_PROMOTION_128B

#: For which a warp has the registers.
MOST_HEAD_DIM_QK, MOST_HEAD_DIM_V = 192, 128


class Decode(MappedPlan):
    """Keys split among all blocks, and heads that share keys packed into the rows of products."""

    name = "decode"
    argument_type = MappedDecodeParams

    def __init__(
        self,
        problem: Problem,
        geometry: Geometry,
        target: Target,
        tiling: DecodeTiling | None = None,
    ) -> None:
        super().__init__(problem, geometry, target)
        self.tiling = tiling or self.choices(problem, geometry, target)[0]
        heads = geometry.heads_together
        self._params.heads_per_block = Divisor.of(heads)
        self._params.items = ItemsRef(
            pairs=Divisor.of(self._width),
            heads=Divisor.of(geometry.heads_q // heads),
            parts=Divisor.of(max(1, self._blocks // self._width)),
        )
        self._params.parts.mark = drawn_mark()

    def l2_promotion(self, spec: TensorSpec) -> int:
        return L2_PROMOTION_128B  # each byte is read once

    def box_rows(self) -> Mapping[str, int]:
        return {"k": 16, "v": 16} if self.tiling.boxes else {}

    @classmethod
    def skipping(cls, problem: Problem) -> Problem:
        return problem.without_score_blocks

    @classmethod
    def supports(cls, problem: Problem, geometry: Geometry, target: Target) -> str | None:
        reason = refusal(problem, geometry, target, Direction.FORWARD, cls.name)
        if reason is not None:
            return reason
        for name, dim, most in (
            ("q and k", problem.head_dim_qk, MOST_HEAD_DIM_QK),
            ("v", problem.head_dim_v, MOST_HEAD_DIM_V),
        ):
            if dim > most:
                return f"the head dimension of {name} must be at most {most}; got {dim}."
        if geometry.seq_q > MOST_QUERIES:
            return f"it takes at most {MOST_QUERIES} queries; the graph has {geometry.seq_q}."
        rows = rows_of(geometry)
        most_rows = max((tiling.rows for tiling in tilings(problem, target)), default=0)
        if rows > most_rows:
            return (
                f"it takes at most {most_rows} rows, queries times heads that share keys; the "
                f"graph has {rows}."
            )
        if problem.access_bytes != 16:
            return "it needs 16-byte aligned tensors and strides."
        if problem.dropout is not None:
            return "it has no dropout, which decoding never has."
        whole = cls.skipping(problem)
        widest = 96 if whole.reads_tables else 128 if whole.gathers else MOST_HEAD_DIM_QK
        if max(problem.head_dim_qk, problem.head_dim_v) > widest:
            return (
                "a score_mod that reads elements of tensors leaves too few registers for head "
                f"dimensions above {widest}."
            )
        if whole.has_blocks:
            return "its few queries are in one block of a block mask, which skips nothing else."
        if geometry.batch * geometry.heads_q * -(-geometry.seq_kv // 64) >= 2**31:
            return "batch x heads x (keys / 64) must be below 2**31."
        return None

    @classmethod
    def gives_way(cls, to: str, problem: Problem, geometry: Geometry, target: Target) -> bool:
        return to == "fwd_sm90" and fills_tiles(problem, geometry, target)

    @classmethod
    def choices(
        cls, problem: Problem, geometry: Geometry, target: Target
    ) -> Sequence[DecodeTiling]:
        rows = rows_of(geometry)
        portable = [tiling for tiling in tilings(problem, target) if tiling.rows >= rows]
        if rows > MOST_BOX_ROWS:
            cluster = cluster_of(geometry, target)
            clustered = cluster and cluster_tiling(problem, target, rows, cluster)
            return [clustered, *portable] if clustered else portable
        if not cls._has_boxes(problem, geometry, target):
            return portable
        return [*box_tilings(problem, geometry, target), *portable]

    @classmethod
    def _has_boxes(cls, problem: Problem, geometry: Geometry, target: Target) -> bool:
        """Whether the copy engine can bring 16 rows at a time."""
        pages = (geometry.page_size(role) for role in PAGE_TABLES)
        if problem.ragged or any(page is not None and page % 16 for page in pages):
            return False
        return cls.mapping_refusal(problem, geometry, target) is None

    @cached_property
    def _width(self) -> int:
        """Items that blocks walk side by side, if they share all."""
        return items_side_by_side(self.geometry, self._at_once)

    @cached_property
    def _blocks(self) -> int:
        """One for each item, or a cluster; or as many as run at a time: none waits for one that has
        not begun."""
        items = items_of(self.geometry)
        if self.tiling.cluster:
            return items * self.tiling.cluster
        geometry, keys, width = self.geometry, 16 * self.tiling.warps, self._width
        tiles = items // width * (1 + -(-geometry.seq_kv // keys))
        return width * min(tiles, self._at_once // width)

    @property
    def _at_once(self) -> int:
        return self.target.multiprocessors * self.tiling.min_blocks

    @cached_property
    def scratch_bytes(self) -> int:
        if self.tiling.cluster:
            return 0
        return round_up(self._blocks * (self.tiling.part_bytes(self.problem) + 8), 256)

    def scratch_places(self) -> list[Place]:
        if self.tiling.cluster:
            return []
        parts, nbytes = self._params.parts, self._blocks * self.tiling.part_bytes(self.problem)
        return places_of([(parts, "data", nbytes), (parts, "marks", 8 * self._blocks)])

    def kernels(self) -> list[KernelLaunch]:
        source, shared = self._source(self.tiling), self.tiling.shared_memory(self.problem)
        # What a block more would need: one that shares a multiprocessor leaves another one idle.
        shared = max(shared, shared_of_each(self.target, self.tiling.min_blocks + 1) + 1)
        return [
            KernelLaunch(
                source,
                (self._blocks, 1, 1),
                self.tiling.threads,
                shared,
                cluster=max(1, self.tiling.cluster),
                programmatic=self.target.capability >= (9, 0),
            )
        ]

    def companions(self) -> list[KernelSource]:
        return [*self.other_tilings(), *kernels_of_other(self, "fwd_sm90")]

    def other_tilings(self) -> list[KernelSource]:
        """The same of other tilings."""
        found = {tiling.cpp: tiling for tiling in tilings(self.problem, self.target)}
        more = [cluster_tiling(self.problem, self.target, MOST_CLUSTER_ROWS, MOST_BLOCKS)]
        if self._has_boxes(self.problem, self.geometry, self.target):
            more += all_box_tilings(self.problem)
        found |= {tiling.cpp: tiling for tiling in more if tiling}
        return [self._source(it) for cpp, it in found.items() if cpp != self.tiling.cpp]

    def _source(self, tiling: DecodeTiling) -> KernelSource:
        return kernel_source(
            self.name,
            self.problem,
            tiling,
            tiling.shared_memory(self.problem),
            argument=MappedDecodeParams,
            constants={"part_bytes": tiling.part_bytes(self.problem)},
        )
