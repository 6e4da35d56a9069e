"""Every exception that dlattn raises on purpose.

Messages are sentences: the tensor or argument, what was expected, what was got, what to do.
"""

from __future__ import annotations


class DlattnError(Exception):
    """Base of every error raised by dlattn."""


class InvalidGraphError(DlattnError, ValueError):
    """The graph itself is wrong: a missing shape, two tensors with one uid, a bad argument."""


class InvalidArgumentError(DlattnError, RuntimeError):
    """Arguments of one call contradict each other (cuDNN raises RuntimeError for these)."""


class cudnnGraphNotSupportedError(DlattnError):  # noqa: N801 - cuDNN's public spelling
    """The graph is valid, and no plan can run it; the message carries every plan's reason."""


class CompileError(DlattnError, RuntimeError):
    """NVRTC refused a kernel; the message has the first error and the kept source's path."""


class InvalidVariantPackError(DlattnError, ValueError):
    """A tensor given to ``execute`` is not what the graph declared."""
