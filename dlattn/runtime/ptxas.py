"""Reading what ptxas reports about a kernel."""

from __future__ import annotations

import re

from dlattn.records import dataclass

_ENTRY = r"Compiling entry function '(\w+)'"
_FUNCTION = r"Function properties for (\w+)"
_STACK = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
_REGISTERS = r"Used (\d+) registers"
_SHARED = r"(\d+) bytes smem"
_WARNING = r"\(C75\d\d\)"


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a kernel takes.

    Attributes:
        registers: per thread.
        spill_stores: bytes per thread, device functions that were not inlined included.
        spill_loads: likewise.
        stack: bytes per thread.
        shared: bytes of static shared memory per block.
        warnings: ptxas's performance warnings (C75xx), verbatim.
    """

    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    shared: int = 0
    warnings: tuple[str, ...] = ()


def read_report(kernel: str, log: str) -> Usage | None:
    """Read the output of ``--ptxas-options=-v``.

    Args:
        kernel: its name in the cubin.
        log: everything that NVRTC printed for one translation unit.

    Returns:
        ``None`` if no kernel of this name was compiled.
    """
    kernels = set(re.findall(_ENTRY, log))
    if kernel not in kernels:
        return None
    registers = spill_stores = spill_loads = stack = shared = 0
    function = ""
    for line in log.splitlines():
        if match := re.search(_FUNCTION, line):
            function = match[1]
        elif function in kernels - {kernel}:
            continue
        elif match := re.search(_STACK, line):
            spill_stores += int(match[2])
            spill_loads += int(match[3])
            stack = int(match[1]) if function == kernel else stack
        elif function == kernel and (match := re.search(_REGISTERS, line)):
            registers = int(match[1])
            shared = int(found[1]) if (found := re.search(_SHARED, line)) else 0
    return Usage(
        registers=registers,
        spill_stores=spill_stores,
        spill_loads=spill_loads,
        stack=stack,
        shared=shared,
        warnings=tuple(line.strip() for line in log.splitlines() if re.search(_WARNING, line)),
    )
