"""For mkdocs: links of docstrings, and links that leave the documentation.

Docstrings are written for readers of the source, in the roles that Sphinx has, such as
:func:`dlattn.attention`; Markdown has none. What is of dlattn's inside has no page, and stays a
name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

_DOCS = Path(__file__).parent

_ROLE = re.compile(r":(class|data|func|meth|mod):`([\w.]+)`")

#: Modules that have pages; of others, what the package itself imports is public.
_PUBLIC = {"flash", "graph", "jax", "torch"}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A hook of mkdocs: links to files of the repository, which a site does not have, are text."""
    folder = (_DOCS / page.file.src_uri).parent

    def kept(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        is_outside = target.exists() and not target.is_relative_to(_DOCS)
        return link[1] if is_outside else link[0]

    return re.sub(r"\[([^\]]+)\]\((\.\./[^)#]+)(?:#[^)]*)?\)", kept, markdown)


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
