"""Attention over a cache: what is appended first, and the plan that then reads the cache."""

from __future__ import annotations

from collections.abc import Mapping

from dlattn import dtypes
from dlattn.plans.append import Append
from dlattn.plans.base import Plan
from dlattn.problem import TensorSpec

#: Of each array in the workspace.
_ALIGNMENT = 256


class CachedAttention:
    """Two plans, the second of which reads what the first wrote, in the caches and in between.

    Args:
        append, attention: the plans.
        between: what only they know: the first's role -> its spec, without gaps.
        read: the second's role -> the first's that it reads as such; of every other role, the
            caller's tensor of that name.
    """

    def __init__(
        self,
        append: Append,
        attention: Plan,
        between: Mapping[str, TensorSpec],
        read: Mapping[str, str],
    ) -> None:
        self.append = append
        self.attention = attention
        self._read = {role: read.get(role, role) for role in attention.geometry.tensors}
        self._places: dict[str, int] = {}
        self._scratch = 0
        for role, spec in between.items():
            self._places[role] = self._scratch
            nbytes = dtypes.itemsize(spec.dtype)
            for extent in spec.dim:
                nbytes *= extent
            self._scratch += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def workspace_size(self) -> int:
        return self._scratch + self.attention.workspace_size

    def build(self) -> None:
        """Compile and load; see :meth:`dlattn.plans.base.Plan.build`."""
        self.append.build()
        self.attention.build()

    def execute(self, pointers: Mapping[str, int], workspace: int, stream: int) -> None:
        """Enqueue both; see :meth:`dlattn.plans.base.Plan.execute`."""
        there = dict(pointers)
        for role, place in self._places.items():
            there[role] = workspace + place
        self.append.execute(there, 0, stream)
        self.attention.execute(
            {role: there[source] for role, source in self._read.items()},
            workspace + self._scratch,
            stream,
        )
