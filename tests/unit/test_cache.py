"""The folder of compiled kernels: intact entries or none, whatever happens to the files."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dlattn.runtime import cache

FILES = {"kernel.cu": b"source", "kernel.cubin": b"\x7fELF\0code", "kernel.log": b""}
FACTS = {"name": "k", "registers": 58}


@pytest.fixture(autouse=True)
def private_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The fallback folder of this process, fresh for each test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache._private_root.cache_clear()
    cache._warned.clear()
    yield cache._private_root()
    cache._private_root.cache_clear()


def test_round_trip(tmp_path: Path) -> None:
    """What was written is read, and nothing else lies around."""
    root = tmp_path / "new" / "root"
    assert cache.read(root, "entry") is None
    folder = cache.write(root, "entry", FILES, FACTS)
    assert cache.read(root, "entry") == cache.Entry(root / "entry", FILES, FACTS)
    assert folder == root / "entry"
    assert [path.name for path in root.iterdir()] == ["entry"]


@given(
    file=st.sampled_from([*FILES, "kernel.json"]),
    damage=st.sampled_from(["missing", "short", "long", "flipped", "a folder"]),
    position=st.floats(0, 1, exclude_max=True),
)
@example(file="kernel.json", damage="short", position=1 - 2**-20)  # the last byte alone
def test_damage_is_a_miss(file: str, damage: str, position: float) -> None:
    """One byte wrong anywhere and the entry is not there; writing it again repairs it."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        path = cache.write(root, "entry", FILES, FACTS) / file
        content = bytearray(path.read_bytes())
        at = int(position * len(content))
        path.unlink()
        if damage == "short" and content:
            path.write_bytes(content[:at])
        elif damage == "long":
            path.write_bytes(content + b"!")
        elif damage == "flipped" and content:
            content[at] ^= 0x15  # keeps JSON's white space from becoming other white space
            path.write_bytes(content)
        elif damage == "a folder":
            path.mkdir()
        assert cache.read(root, "entry") is None
        cache.write(root, "entry", FILES, FACTS)
        assert cache.read(root, "entry") == cache.Entry(root / "entry", FILES, FACTS)
        assert [path.name for path in root.iterdir()] == ["entry"]


def test_an_intact_entry_is_kept(tmp_path: Path) -> None:
    """Of two writers the first wins: its files may be in use."""
    folder = cache.write(tmp_path, "entry", FILES, FACTS)
    before = (folder / "kernel.cubin").stat().st_ino
    assert cache.write(tmp_path, "entry", FILES, FACTS) == folder
    assert (folder / "kernel.cubin").stat().st_ino == before


def test_many_writers(tmp_path: Path) -> None:
    """Whoever comes, and whatever was there before, one intact entry results."""
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry" / "kernel.json").write_text("{}")
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(cache.write, tmp_path, "entry", FILES, FACTS) for _ in range(64)]:
            done.result()
    assert cache.read(tmp_path, "entry") is not None
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_unwritable(tmp_path: Path, private_root: Path) -> None:
    """A cache that cannot be written costs one warning, and works for the process."""
    root = tmp_path / "file" / "cache"
    root.parent.write_text("a file where a folder should be")
    with pytest.warns(RuntimeWarning, match="cannot be written.*DLATTN_CACHE_DIR"):
        folder = cache.write(root, "entry", FILES, FACTS)
    assert folder == private_root / "entry"
    assert cache.read(root, "entry") == cache.Entry(folder, FILES, FACTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.write(root, "other", FILES, FACTS)
    shutil.rmtree(private_root)


def test_a_file_in_the_way(tmp_path: Path) -> None:
    """A stray file under the entry's name is no entry, and is replaced."""
    (tmp_path / "entry").write_text("stray")
    assert cache.read(tmp_path, "entry") is None
    cache.write(tmp_path, "entry", FILES, FACTS)
    assert cache.read(tmp_path, "entry") is not None
