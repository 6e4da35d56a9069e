"""What every file of compile tests needs."""

from __future__ import annotations

import pytest

from dlattn.config import settings
from dlattn.errors import CompileError
from dlattn.runtime import nvrtc


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    try:
        nvrtc.load(settings().cache_dir)
    except CompileError as missing:
        pytest.skip(str(missing))
