"""``show``: the generated source of a problem's kernels, their registers, spills and memory."""

from __future__ import annotations

import argparse
from dataclasses import replace

from dlattn.cli.machine import cuda_devices
from dlattn.cli.sizes import size
from dlattn.dtypes import data_type
from dlattn.errors import DlattnError
from dlattn.plans.cuda import CudaPlan
from dlattn.plans.kernels import KernelLaunch
from dlattn.plans.select import select
from dlattn.problem import (
    BLOCK,
    PAGE_TABLES,
    Alibi,
    Band,
    Bias,
    BlockMask,
    Direction,
    Dropout,
    Edit,
    FlashDropout,
    Geometry,
    GivenMask,
    Mask,
    Padding,
    Philox,
    Problem,
    Scale,
    SoftCap,
    TensorSpec,
)
from dlattn.runtime.jit import CompiledKernel, compile_kernels
from dlattn.runtime.target import KNOWN, Target

_DTYPES = {"fp16": data_type.HALF, "bf16": data_type.BFLOAT16}
_PAGES = tuple(2**n for n in range(13))
_BIASES = {**_DTYPES, "fp32": data_type.FLOAT, "bool": data_type.BOOLEAN}

_DROPOUTS: dict[str | None, Dropout] = {
    "philox": Philox(),
    "flash": FlashDropout(),
    "mask": GivenMask(data_type.BOOLEAN, contiguous=True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The problem (what changes code), the sizes (what changes the grid), the architecture."""
    add = parser.add_argument
    add("--pass", dest="direction", choices=("forward", "backward"), default="forward")
    add("--dtype", choices=_DTYPES, default="bf16", help="element type (default: bf16)")
    add("--head-dim", type=size, default=128, help="elements per head of q and k (default: 128)")
    add("--head-dim-v", type=size, help="elements per head of v and o (default: --head-dim)")
    one = parser.add_mutually_exclusive_group().add_argument
    one("--causal", action="store_true", help="the same as --right 0")
    add("--left", type=int, help="left bound of the diagonal band")
    one("--right", type=int, help="right bound of the diagonal band")
    add("--block-mask", action="store_true", help="blocks of 128 x 128 are kept or dropped")
    add("--softcap", action="store_true", help="scores have a soft cap")
    add("--bias", choices=_BIASES, help="a bias of this type, with contiguous keys")
    add("--alibi", choices=("cudnn", "slopes"), help="ALiBi, with slopes of cuDNN or of the user")
    add("--dropout", choices=("philox", "flash", "mask"),
        help="dropout, at random, as FlashAttention's, or by a boolean mask")  # fmt: skip
    add("--page", type=int, choices=_PAGES, metavar="ROWS", help="k and v lie in pages of 2^n rows")
    add("--no-stats", action="store_true", help="a forward for inference alone")
    add("--batch", type=size, default=4, help="(default: 4)")
    add("--heads", type=size, default=16, help="heads of q (default: 16)")
    add("--heads-kv", type=size, help="heads of k and v (default: --heads)")
    add("--seq", type=size, default=4096, help="sequence length (default: 4096)")
    add("--arch", choices=KNOWN, help="compile for this one (default: the GPU here, else sm_90a)")
    add("--no-source", action="store_true", help="leave the generated sources out")


def run(arguments: argparse.Namespace) -> int:
    """Choose a plan, compile its kernels, which needs NVRTC but no GPU, and print them."""
    target = _target(arguments.arch)
    problem, geometry = _problem(arguments)
    plan = select(problem, geometry, target)[0](problem, geometry, target)
    assert isinstance(plan, CudaPlan), "every plan for a CUDA target has kernels"
    kernels = [*plan.first_kernels(), *plan.kernels()]
    print(f"{plan.name} on {target.arch}, workspace {plan.workspace_size} bytes")
    sources = [kernel.source for kernel in kernels]
    for kernel, compiled in zip(kernels, compile_kernels(sources, target.arch), strict=True):
        print(f"\n{_facts(kernel, compiled)}")
        if not arguments.no_source:
            print(f"\n{kernel.source.text.strip()}")
    return 0


def _target(arch: str | None) -> Target:
    here = [] if arch is not None else [device.target for device in cuda_devices()]
    # Messages say of others that they are described.
    return here[0] if here else replace(KNOWN[arch or "sm_90a"], index=-1)


def _facts(kernel: KernelLaunch, compiled: CompiledKernel) -> str:
    lines = [
        f"{compiled.name}: grid {' x '.join(map(str, kernel.grid))}, block {kernel.block}",
        f"  {compiled.registers} registers per thread, stack {compiled.stack} bytes, "
        f"spilled {compiled.spill_stores} stored and {compiled.spill_loads} loaded",
        f"  {(compiled.shared + kernel.shared) / 1024:.1f} KiB shared memory per block",
        f"  {compiled.cubin}",
        *(f"  {warning}" for warning in compiled.warnings),
    ]
    return "\n".join(lines)


def _problem(arguments: argparse.Namespace) -> tuple[Problem, Geometry]:
    """What a graph with dense row-major tensors of these sizes lowers to."""
    dtype = _DTYPES[arguments.dtype]
    width, width_v = arguments.head_dim, arguments.head_dim_v or arguments.head_dim
    batch, heads, seq = arguments.batch, arguments.heads, arguments.seq
    heads_kv = arguments.heads_kv or heads
    if heads % heads_kv:
        raise DlattnError(f"--heads-kv: expected a divisor of --heads, {heads}, got {heads_kv}.")
    right = 0 if arguments.causal else arguments.right
    forward = arguments.direction == "forward"

    dims = {
        "q": (batch, heads, seq, width),
        "k": (batch, heads_kv, seq, width),
        "v": (batch, heads_kv, seq, width_v),
        "o": (batch, heads, seq, width_v),
    }
    if not forward:
        dims |= {"dO": dims["o"], "dQ": dims["q"], "dK": dims["k"], "dV": dims["v"]}
    page = arguments.page
    if page is not None:
        pages = -(-seq // page)
        dims |= {
            role: (batch * pages, dim[1], page, dim[3])
            for role, dim in dims.items()
            if role in ("k", "v", "dK", "dV")
        }
    tensors = {role: _spec(role, dim, dtype) for role, dim in dims.items()}
    if page is not None:
        for table in PAGE_TABLES.values():
            tensors[table] = _spec(table, (batch, 1, pages, 1), data_type.INT32)
        for length in ("seq_len_q", "seq_len_kv"):
            tensors[length] = _spec(length, (batch, 1, 1, 1), data_type.INT32)
    if arguments.block_mask:
        blocks = -(-seq // BLOCK)
        dim = (batch, heads, blocks, -(-blocks // 8))
        tensors["block_mask"] = _spec("block_mask", dim, data_type.UINT8)
    stats = not forward or not arguments.no_stats
    if stats:
        tensors["stats"] = _spec("stats", (batch, heads, seq, 1), data_type.FLOAT)

    problem = Problem(
        direction=Direction(arguments.direction),
        dtype=dtype,
        head_dim_qk=width,
        head_dim_v=width_v,
        edits=_edits(arguments),
        masks=_masks(arguments.left is not None, right is not None, arguments.block_mask),
        stats=data_type.FLOAT if stats else None,
        dropout=_DROPOUTS.get(arguments.dropout),
        paged_k=page is not None,
        paged_v=page is not None,
    )
    geometry = Geometry(
        tensors,
        attn_scale=width**-0.5,
        band_left=arguments.left,
        band_right=right,
        max_seq_kv=None if page is None else seq,
    )
    return problem, geometry


def _edits(arguments: argparse.Namespace) -> tuple[Edit, ...]:
    edits: list[Edit] = [Scale()]
    if arguments.softcap:
        edits.append(SoftCap())
    if arguments.bias is not None:
        edits.append(Bias(_BIASES[arguments.bias], contiguous=True))
    if arguments.alibi is not None:
        edits.append(Alibi(symmetric=arguments.alibi == "slopes"))
    return tuple(edits)


def _masks(left: bool, right: bool, blocks: bool) -> tuple[Mask, ...]:
    masks: list[Mask] = [Padding()]
    if left or right:
        masks.append(Band(left, right))
    if blocks:
        masks.append(BlockMask())
    return tuple(masks)


def _spec(role: str, dim: tuple[int, int, int, int], dtype: data_type) -> TensorSpec:
    _, heads, seq, width = dim
    return TensorSpec(role, dim, (heads * seq * width, seq * width, width, 1), dtype)
