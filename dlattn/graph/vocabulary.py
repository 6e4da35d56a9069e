"""The enumerations of the graph API, with cuDNN's class and member names."""

# ruff: noqa: N801 - cuDNN's public spellings
from __future__ import annotations

from dlattn.enums import VocabularyEnum
from dlattn.records import dataclass


class heur_mode(VocabularyEnum):
    """How plans are ranked; dlattn has one measured ranking, and every mode means it.

    ``AUTOTUNED``, dlattn's own, puts before it what ``autotune`` remembered.
    """

    A = 0
    B = 1
    FALLBACK = 2
    OPENSOURCE = 3
    AUTOTUNED = 4


class build_plan_policy(VocabularyEnum):
    """Which plans ``build_plans`` compiles: the best one, or all of them."""

    HEURISTICS_CHOICE = 0
    ALL = 1


class diagonal_alignment(VocabularyEnum):
    """Where the diagonal of a band starts: the top left corner, or so that it ends bottom right."""

    TOP_LEFT = 0
    BOTTOM_RIGHT = 1


class attention_implementation(VocabularyEnum):
    """cuDNN's two lowerings; dlattn has one, and accepts every member."""

    AUTO = 0
    COMPOSITE = 1
    UNIFIED = 2


class tensor_reordering(VocabularyEnum):
    """Element orders inside a tensor; plans read only ``NONE``."""

    NONE = 0
    INT8x32 = 1
    F16x16 = 2
    F8_128x4 = 3


class reduction_mode(VocabularyEnum):
    """Reductions, for primitive operations."""

    ADD = 0
    MUL = 1
    MIN = 2
    MAX = 3
    AMAX = 4
    AVG = 5
    NORM1 = 6
    NORM2 = 7
    MUL_NO_ZEROS = 8
    NOT_SET = 9


class rng_distribution(VocabularyEnum):
    """Distributions of ``rng``; BERNOULLI is what attention drops by, and the one there is."""

    NOT_SET = 0
    BERNOULLI = 1
    UNIFORM = 2
    NORMAL = 3


class scalar_type(VocabularyEnum):
    """When a ``tensor_scalar`` is known; either way the graph keeps its value."""

    RUNTIME_PARAM = 0
    COMPILE_TIME_CONST = 1


class reshape_mode(VocabularyEnum):
    """How a reshape may move data, for primitive operations."""

    VIEW_ONLY = 0
    LOGICAL = 1


class numerical_note(VocabularyEnum):
    """Numerical properties by which plans are selected and deselected."""

    TENSOR_CORE = 0
    DOWN_CONVERT_INPUTS = 1
    REDUCED_PRECISION_REDUCTION = 2
    FFT = 3
    NONDETERMINISTIC = 4
    WINOGRAD = 5
    WINOGRAD_TILE_4x4 = 6
    WINOGRAD_TILE_6x6 = 7
    WINOGRAD_TILE_13x13 = 8
    STRICT_NAN_PROP = 9


class behavior_note(VocabularyEnum):
    """Behaviours by which plans are selected and deselected."""

    RUNTIME_COMPILATION = 0
    REQUIRES_FILTER_INT8x32_REORDER = 1
    REQUIRES_BIAS_INT8x32_REORDER = 2
    SUPPORTS_CUDA_GRAPH_NATIVE_API = 3
    CUBLASLT_DEPENDENCY = 4


class knob_type(VocabularyEnum):
    """cuDNN's engine knobs; dlattn's plans have ``KERNEL_CFG``."""

    NOT_SET = 0
    SWIZZLE = 1
    TILE_SIZE = 2
    EDGE = 3
    MULTIPLY = 4
    SPLIT_K_BUF = 5
    TILEK = 6
    STAGES = 7
    REDUCTION_MODE = 8
    SPLIT_K_SLC = 9
    IDX_MODE = 10
    SPECFILT = 11
    KERNEL_CFG = 12
    WORKSPACE = 13
    TILE_CGA_M = 14
    TILE_CGA_N = 15
    BLOCK_SIZE = 16
    OCCUPANCY = 17
    ARRAY_SIZE_PER_THREAD = 18
    SPLIT_COLS = 19
    TILE_ROWS = 20
    TILE_COLS = 21
    LOAD_SIZE = 22
    CTA_COUNT = 23
    STREAM_K = 24
    SPLIT_P_SLC = 25
    TILE_M = 26
    TILE_N = 27
    WARP_SPEC_CFG = 28


@dataclass(frozen=True)
class knob:
    """What can be set of an engine: any of ``range(min_value, max_value + 1, stride)``."""

    type: knob_type
    min_value: int
    max_value: int
    stride: int = 1

    def __str__(self) -> str:
        return f"{self.type} from {self.min_value} to {self.max_value}"
