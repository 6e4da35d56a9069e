"""For mkdocs: what docstrings refer to, such as :func:`dlattn.attention`, becomes a link.

The docstrings are written for readers of the source, in the roles that Sphinx has; Markdown has
none. What is referred to and is of dlattn's inside has no page, and stays a name.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(class|data|func|meth|mod):`([\w.]+)`")

#: Modules that have pages; of others, what the package itself imports is public.
_PUBLIC = {"flash", "graph", "jax", "torch"}


class Roles(griffe.Extension):
    """Rewrites every docstring of the package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        _rewrite(pkg)


def _rewrite(it: griffe.Object) -> None:
    if it.docstring is not None:
        text = _ROLE.sub(lambda role: _link(it, role[1], role[2]), it.docstring.value)
        it.docstring.value = re.sub(r"::(?=\n\n +)", ":", text)
    for member in it.members.values():
        if not member.is_alias:
            _rewrite(member)


def _link(it: griffe.Object, role: str, name: str) -> str:
    path = _path(it, role, name)
    if path is None or not _is_public(it.package, path):
        return f"`{name}`"
    return f'<autoref identifier="{path}"><code>{name}</code></autoref>'


def _path(it: griffe.Object, role: str, name: str) -> str | None:
    """The full name of what a docstring calls so."""
    if name.startswith("dlattn."):
        return name
    first = name.partition(".")[0]
    if role == "meth" and first == name:
        # Bases of pygraph speak of what it has from others.
        owner = it if it.is_class else it.parent
        return f"{owner.path if owner and name in owner.members else 'dlattn.pygraph'}.{name}"
    if first in it.package.members:
        return f"dlattn.{name}"
    member = it.module.members.get(first)
    if member is None:
        return None
    return (member.target_path if member.is_alias else member.path) + name.removeprefix(first)


def _is_public(package: griffe.Object, path: str) -> bool:
    """Whether there is a page for it: strict builds refuse links that lead nowhere."""
    room = path.split(".")[1]
    return room in _PUBLIC or room not in package.modules
