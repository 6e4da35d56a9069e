"""Where figures come from: the GPU, the machine, the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path


def require_gpu(command: str) -> None:
    """Ends a command that can only measure on a GPU.

    Raises:
        SystemExit: torch sees none.
    """
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"{command} needs a CUDA device; there is none.")


def gpu_name() -> str:
    """The GPU as a folder name, e.g. ``h200``."""
    import torch

    words = torch.cuda.get_device_name().lower().split()
    return "-".join(word for word in words if word != "nvidia") or "gpu"


def machine() -> str:
    """GPU, clocks, driver and library versions, in one line."""
    import torch

    asked = "driver_version,clocks.max.sm,power.limit"
    parts = [torch.cuda.get_device_name()]
    parts.append("driver, maximal SM clock, power limit: " + (_output(
        "nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"
    ) or "unknown").splitlines()[0])  # fmt: skip
    parts.append(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    parts.append(f"cuDNN {torch.backends.cudnn.version()}")
    parts.append(f"Python {platform.python_version()}")
    return "; ".join(parts)


def commit() -> str:
    """dlattn's commit: ``DLATTN_COMMIT``, else git's abbreviated hash, else ``unknown``."""
    folder = str(Path(__file__).parent)
    return (
        os.environ.get("DLATTN_COMMIT")
        or _output("git", "-C", folder, "rev-parse", "--short", "HEAD")
        or "unknown"
    )


def _output(*command: str) -> str:
    """What a command prints, or nothing if it fails."""
    try:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=20
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
