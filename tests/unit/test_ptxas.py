"""Reading ptxas's report."""

from __future__ import annotations

from dlattn.runtime.ptxas import Usage, read_report

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'other' for 'sm_90a'
ptxas info    : Function properties for other
ptxas         .     8 bytes stack frame, 80 bytes spill stores, 88 bytes spill loads
ptxas info    : Used 29 registers, used 0 barriers
ptxas info    : Compiling entry function 'fwd' for 'sm_90a'
ptxas info    : Function properties for fwd
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Function properties for _Z6helperi
ptxas         .     32 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
"""


def test_report() -> None:
    """The kernel's numbers, its functions' spills added, its neighbour's left out."""
    usage = read_report("fwd", REPORT)
    assert usage is not None
    assert usage == Usage(
        registers=168,
        spill_stores=5,
        spill_loads=14,
        stack=16,
        shared=1024,
        warnings=(
            "ptxas info    : (C7510) Potential Performance Loss: "
            "wgmma.mma_async instructions are serialized",
        ),
    )
    assert read_report("bwd", REPORT) is None
