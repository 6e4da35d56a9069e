"""Compiled kernels as text: sealed JSON, whose reader runs nothing of what it reads.

The seal finds damage, not malice: whoever writes a cubin decides what the GPU runs.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dlattn.errors import InvalidArgumentError, cudnnGraphNotSupportedError
from dlattn.runtime import jit
from dlattn.runtime.ptxas import Usage

#: Raise it when the meaning of anything here changes.
FORMAT = 1

_MOST_BYTES = 1 << 28


def seal(kind: str, facts: Mapping[str, Any]) -> str:
    """JSON text of some facts, with what :func:`unseal` checks.

    Args:
        kind: what it is, in words.
    """
    body = json.dumps({**facts, "headers": jit.headers_digest()}, separators=(",", ":"))
    outside = {"dlattn": kind, "format": FORMAT, "sha256": _sha256(body), "body": body}
    return json.dumps(outside)


def unseal(kind: str, text: str | bytes) -> dict[str, Any]:
    """The facts of :func:`seal`.

    Raises:
        InvalidArgumentError: they are damaged, or were never sealed.
        cudnnGraphNotSupportedError: another version of dlattn has sealed them.
    """
    outside = _parsed(kind, text)
    found, version = outside.get("dlattn"), outside.get("format")
    if found is not None and found != kind:
        raise InvalidArgumentError(f"The data is a {found!r} of dlattn; expected a {kind!r}.")
    if found is not None and version != FORMAT:
        raise cudnnGraphNotSupportedError(
            f"The {kind} has format {version!r}; this version of dlattn reads {FORMAT}. Serialise "
            "it with this version."
        )
    body = str(outside.get("body"))
    if found is None or outside.get("sha256") != _sha256(body):
        raise InvalidArgumentError(
            f"The data is no {kind} of dlattn, or is cut off or damaged: its checksum does not "
            "match. Serialise it anew."
        )
    facts = _parsed(kind, body)
    if facts.get("headers") != jit.headers_digest():
        raise cudnnGraphNotSupportedError(
            f"The {kind} was made by another version of dlattn, whose kernels differ from this "
            "one's; serialise it with this version."
        )
    return facts


def _parsed(kind: str, text: str | bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidArgumentError(
            f"The data is no {kind} of dlattn, or is cut off or damaged; serialise it anew."
        )
    return found


def write_kernels(kernels: Iterable[tuple[jit.KernelSource, jit.CompiledKernel]]) -> list[Any]:
    """Kernels as JSON values."""
    return [
        {
            "name": source.name,
            "source": source.text,
            "arch": kernel.arch,
            "usage": {name: getattr(kernel, name) for name in asdict(Usage())},
            "cubin": base64.b64encode(zlib.compress(code_of(kernel))).decode(),
        }
        for source, kernel in kernels
    ]


def code_of(kernel: jit.CompiledKernel) -> bytes:
    """The cubin."""
    return kernel.cubin.read_bytes() if kernel.code is None else kernel.code


def read_kernels(values: Any) -> list[tuple[jit.KernelSource, jit.CompiledKernel]]:
    """What :func:`write_kernels` has written.

    Raises:
        InvalidArgumentError: something else.
    """
    try:
        return [_kernel(it) for it in values]
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error, zlib.error) as error:
        raise InvalidArgumentError(
            f"The data has a kernel that cannot be read ({type(error).__name__}: {error}); "
            "serialise it anew."
        ) from error


def _kernel(it: Mapping[str, Any]) -> tuple[jit.KernelSource, jit.CompiledKernel]:
    inflate = zlib.decompressobj()
    code = inflate.decompress(base64.b64decode(it["cubin"], validate=True), _MOST_BYTES)
    if not inflate.eof or not code.startswith(b"\x7fELF"):
        raise ValueError("it is no cubin")
    name, arch, usage = str(it["name"]), str(it["arch"]), dict(it["usage"])
    usage["warnings"] = tuple(usage["warnings"])  # JSON has lists only
    called = Path(f"{name}-{arch}-{hashlib.sha256(code).hexdigest()[:32]}.cubin")
    kernel = jit.CompiledKernel(name=name, arch=arch, cubin=called, log="", code=code, **usage)
    return jit.KernelSource(name, str(it["source"])), kernel


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
