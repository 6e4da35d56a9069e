"""What the user says: tensors, attention nodes, and the graphs that hold them.

cuDNN has a function of this package's name: ``dlattn.graph(handle)`` is
:func:`dlattn.graph.helpers.graph`, whether modules of the package were imported or not.
"""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from dlattn.graph.helpers import graph

        return graph(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
