"""What users may call, read from the source alone: no framework is imported for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

#: The modules that users import; public is what they import ``as`` itself, or have in ``__all__``.
MODULES = ("dlattn", "dlattn.flash", "dlattn.jax", "dlattn.torch")

Definition = ast.ClassDef | ast.FunctionDef


class Entry(NamedTuple):
    """One public class, function, method or property.

    Attributes:
        name: as users write it, such as ``dlattn.pygraph.sdpa``.
        home: where it is defined, such as ``dlattn.graph.operations.Operations.sdpa``.
    """

    name: str
    home: str
    definition: Definition

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.definition) or ""

    @property
    def parameters(self) -> list[str]:
        """Names, without self; of a class those of its ``__init__``, of which it tells."""
        it = self.definition
        if isinstance(it, ast.ClassDef):
            made = [x for x in it.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
            if not made:
                return []
            it = made[0]
        given = it.args
        named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        return [x.arg for x in named if x is not None and x.arg not in ("self", "cls")]

    @property
    def raised(self) -> set[str]:
        """The exceptions that the function raises itself, and does not catch."""
        if isinstance(self.definition, ast.ClassDef):
            return set()
        inside = list(ast.walk(self.definition))
        raises = (x.exc for x in inside if isinstance(x, ast.Raise))
        caught = (ast.walk(x.type) for x in inside if isinstance(x, ast.ExceptHandler) and x.type)
        names = {x.id for types in caught for x in types if isinstance(x, ast.Name)}
        return {ast.unparse(x.func) for x in raises if isinstance(x, ast.Call)} - names


def surface() -> list[Entry]:
    """Every public class and function of :data:`MODULES`, and the classes' public methods."""
    return [entry for module in MODULES for entry in _of_module(module)]


def _of_module(module: str) -> Iterator[Entry]:
    tree = _tree(module)
    listed = [x for x in tree.body if isinstance(x, ast.Assign) and _is_all(x)]
    public = set(ast.literal_eval(listed[0].value)) if listed else None
    for it in ast.walk(tree):
        if not isinstance(it, ast.ImportFrom) or it.module is None or it.module == "dlattn":
            continue
        for alias in it.names:
            if alias.asname == alias.name if public is None else alias.name in public:
                yield from _entries(f"{module}.{alias.name}", *_found(it.module, alias.name))


def _is_all(it: ast.Assign) -> bool:
    return any(isinstance(x, ast.Name) and x.id == "__all__" for x in it.targets)


def _entries(name: str, module: str, definition: Definition) -> Iterator[Entry]:
    yield Entry(name, f"{module}.{definition.name}", definition)
    if isinstance(definition, ast.ClassDef):
        for method, (home, it) in _methods(module, definition).items():
            yield Entry(f"{name}.{method}", f"{home}.{method}", it)


def _methods(module: str, it: ast.ClassDef) -> dict[str, tuple[str, ast.FunctionDef]]:
    """The public ones with their class, those of bases too; a class comes before its bases."""
    found: dict[str, tuple[str, ast.FunctionDef]] = {}
    for base in reversed(it.bases):
        where = _origin(module, base.id) if isinstance(base, ast.Name) else None
        if where is not None:
            owner, inherited = _found(*where)
            assert isinstance(inherited, ast.ClassDef)
            found |= _methods(owner, inherited)
    own = [x for x in it.body if isinstance(x, ast.FunctionDef) and not x.name.startswith("_")]
    return found | {x.name: (f"{module}.{it.name}", x) for x in own}


def _found(module: str, name: str) -> tuple[str, Definition]:
    """The definition of a name, and the module that has it."""
    for it in _tree(module).body:
        if isinstance(it, Definition) and it.name == name:
            return module, it
    where = _origin(module, name)
    assert where is not None, f"{module} has no {name}"
    return _found(*where)


def _origin(module: str, name: str) -> tuple[str, str] | None:
    """The module of dlattn's that a name is defined in, or imported from."""
    for it in _tree(module).body:
        if isinstance(it, Definition) and it.name == name:
            return module, name
        if isinstance(it, ast.ImportFrom) and (it.module or "").startswith("dlattn"):
            for alias in it.names:
                if (alias.asname or alias.name) == name:
                    return str(it.module), alias.name
    return None


@cache
def _tree(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))
