"""Compiled kernels on disk, and choices among them: one folder per entry, named by what it was
made from.

An entry is written beside its place and renamed into it, so readers see all of it or nothing,
and of several writers any one wins. ``kernel.json`` holds the hash of each file and of itself; an
entry that does not match its hashes is not there, and the next writer replaces it.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dlattn.records import dataclass

_FACTS = "kernel.json"
#: How ``rename`` says that a folder or a file has the name already.
_IN_THE_WAY = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


@dataclass(frozen=True)
class Entry:
    """One intact entry.

    Attributes:
        folder: where its files lie.
        files: content by name.
        facts: what was written with it.
    """

    folder: Path
    files: dict[str, bytes]
    facts: dict[str, Any]


def read(root: Path, name: str) -> Entry | None:
    """The entry of this name, or ``None`` when it is missing or damaged."""
    return _read(root / name) or _read(_private_root() / name)


def write(
    root: Path,
    name: str,
    files: Mapping[str, bytes],
    facts: Mapping[str, Any],
    *,
    replace: bool = False,
) -> Path:
    """Store an entry, replacing a damaged one, or any if asked to, and return its folder.

    Falls back to a folder of this process, with one warning, when ``root`` cannot be written.
    """
    content = {**files, _FACTS: _describe(files, facts)}
    try:
        return _publish(root, name, content, replace)
    except OSError as error:
        _warn_unwritable(root, error)
        return _publish(_private_root(), name, content, replace)


def _describe(files: Mapping[str, bytes], facts: Mapping[str, Any]) -> bytes:
    hashes = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    described = {**facts, "files": hashes}
    # No line break at the end: a file that lost it would still be JSON, and pass for intact.
    return json.dumps({**described, "seal": _seal(described)}, indent=2).encode()


def _seal(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _read(folder: Path) -> Entry | None:
    try:
        facts = json.loads((folder / _FACTS).read_bytes())
        if facts.pop("seal") != _seal(facts):
            return None
        files = {}
        for file, expected in facts.pop("files").items():
            files[file] = (folder / file).read_bytes()
            if hashlib.sha256(files[file]).hexdigest() != expected:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Entry(folder, files, facts)


def _publish(root: Path, name: str, content: Mapping[str, bytes], replace: bool) -> Path:
    place = root / name
    draft = _beside(place, "draft")
    draft.mkdir(parents=True)
    try:
        for file, data in content.items():
            (draft / file).write_bytes(data)
        while not _moved(draft, place):
            if not replace and _read(place) is not None:
                break  # another process was faster; its entry is as good
            _discard(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return place


def _moved(draft: Path, place: Path) -> bool:
    try:
        draft.rename(place)
    except OSError as error:
        if error.errno in _IN_THE_WAY:
            return False
        raise
    return True


def _discard(place: Path) -> None:
    """Remove a damaged entry in one step, so that no reader meets half of it."""
    waste = _beside(place, "waste")
    try:
        place.rename(waste)
    except FileNotFoundError:
        return  # another process did
    shutil.rmtree(waste, ignore_errors=True)


def _beside(place: Path, purpose: str) -> Path:
    return place.parent / f".{purpose}-{os.getpid()}-{os.urandom(4).hex()}"


@cache
def _private_root() -> Path:
    """A cache of this process alone. Not created here: most processes never need it."""
    root = Path(tempfile.gettempdir(), f"dlattn-{os.getpid()}-{os.urandom(4).hex()}")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


_warned: set[Path] = set()


def _warn_unwritable(root: Path, error: OSError) -> None:
    if root in _warned:
        return
    _warned.add(root)
    warnings.warn(
        f"The kernel cache {root} cannot be written ({error}); kernels are compiled anew by each "
        "process. Set DLATTN_CACHE_DIR to a folder that can be written.",
        RuntimeWarning,
        stacklevel=3,
    )
