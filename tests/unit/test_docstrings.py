"""What users may call says what it takes, what it raises and whose semantics it has.

Docstrings have Google's form, which the API reference is made from: a sentence, then ``Args``,
``Returns`` and ``Raises`` with items ``name: text``.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.surface import Entry, surface

SURFACE = surface()

#: In the place of a list of arguments, these words lead to another one.
ELSEWHERE = ("not listed", "other arguments", "Arguments and errors as of", "see :meth:", "See :")

#: Arguments that every operation of a graph has, and whose class tells of them.
COMMON = {"name", "compute_data_type"}

#: Whose semantics something has, as its docstring must say.
SOURCES = {
    r"dlattn\.(pygraph|Graph|tensor|graph|jit|create_handle|create_device_properties)": "cuDNN",
    r"dlattn\.(pygraph|Graph)\.sdpa(_backward)?": "cuDNN",
    r"dlattn\.attention_backward": "FlashAttention-2: Dao 2023",
    r"dlattn\.merge_states": "arXiv",
    r"dlattn\.philox_dropout_mask": "Salmon",
    r"dlattn\.flash\.mha_(fwd|bwd)": "PyTorch's ``flash_api.h``",
    r"dlattn\.flash\.mha_varlen_(fwd|bwd)": "mha_",
    r"dlattn\.flash\.flash_attn_with_kvcache": "FlashAttention-2",
    r"dlattn\.torch\.scaled_dot_product_attention": r"torch\.nn\.functional",
    r"dlattn\.jax\.dot_product_attention": r"jax\.nn",
}


def sections(docstring: str) -> dict[str, list[str]]:
    """Title -> the heads of its items, what is before the colon."""
    found = {}
    for title, body in re.findall(r"^([A-Z]\w+):\n((?:    .*\n|\n)+)", docstring + "\n", re.M):
        found[title] = [line.partition(":")[0] for line in re.findall(r"^    (\S.*)$", body, re.M)]
    return found


def names_of(items: list[str]) -> set[str]:
    """``q, k`` is two of them."""
    return {name for item in items for name in item.split(", ")}


def computes(entry: Entry) -> bool:
    """Whether it is attention, in any words."""
    return isinstance(entry.definition, ast.FunctionDef) and (
        entry.parameters[:1] in (["q"], ["query"], ["dout"], ["o1"])
    )


def public(entries: list[Entry]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("entry", entries, ids=[entry.name for entry in entries])


def test_the_surface_is_all_there() -> None:
    """The walk over the source finds what importing finds, and methods of bases."""
    import dlattn
    from dlattn import flash

    names = {entry.name for entry in SURFACE}
    classes = (
        name
        for name in dir(dlattn)
        if isinstance(getattr(dlattn, name), type) and name not in ("Any",)
    )
    assert {f"dlattn.{name}" for name in classes} <= names
    assert {f"dlattn.flash.{name}" for name in flash.__all__} <= names
    assert {"dlattn.pygraph.build_plans", "dlattn.Graph.sdpa", "dlattn.torch.attention"} <= names


@public(SURFACE)
def test_docstring_begins_with_a_sentence(entry: Entry) -> None:
    """There is a docstring, and its first paragraph is made of sentences."""
    first = entry.docstring.partition("\n\n")[0]
    assert first.endswith((".", ":")), f"{entry.name}: {first!r}"


@public(SURFACE)
def test_docstring_has_googles_form(entry: Entry) -> None:
    """Sections are Google's, and the items of arguments and errors are ``name: text``."""
    titles = re.findall(r"^([A-Z]\w+):$", entry.docstring, re.M)
    assert set(titles) <= {"Args", "Attributes", "Returns", "Yields", "Raises"}, entry.name
    assert not re.search(r"^\s*:(param|returns?|raises)\b|^-{3,}$", entry.docstring, re.M)
    for title, items in sections(entry.docstring).items():
        if title in ("Args", "Attributes", "Raises"):
            for item in items:
                assert re.fullmatch(r"\w+(, \w+)*", item), f"{entry.name}, {title}: {item}"


@public(SURFACE)
def test_arguments_are_those_of_the_signature(entry: Entry) -> None:
    """Each argument that is listed exists; where there is a list, no other is passed over.

    It may be told of by name in the text, or the text says where it is listed.
    """
    listed = sections(entry.docstring).get("Args")
    if listed is None:
        return
    parameters, names = set(entry.parameters), names_of(listed)
    assert names <= parameters, f"{entry.name} has no {sorted(names - parameters)}"
    if any(words in entry.docstring for words in ELSEWHERE):
        return
    left = parameters - names - COMMON - set(re.findall(r"\w+", entry.docstring))
    assert not left, f"{entry.name} does not tell of {sorted(left)}"


@public([entry for entry in SURFACE if entry.raised])
def test_errors_are_listed(entry: Entry) -> None:
    """What a function itself raises is in its ``Raises``."""
    listed = names_of(sections(entry.docstring).get("Raises", []))
    assert entry.raised <= listed, f"{entry.name} also raises {sorted(entry.raised - listed)}"


@public([entry for entry in SURFACE if computes(entry)])
def test_attention_tells_shapes_types_and_errors(entry: Entry) -> None:
    """Functions of q, k and v, or of what these give, say shapes, element types and errors.

    What another docstring says, which theirs names for arguments, they need not repeat.
    """
    text = entry.docstring
    assert "Raises" in sections(text), entry.name
    if not any(words in text for words in ELSEWHERE):
        assert re.search(r"\((\.\.\.|\w+), [\w ,./]+\)", text), f"{entry.name}: shapes"
        assert re.search(r"\b(fp16|bf16|fp32)\b", text), f"{entry.name}: element types"


@pytest.mark.parametrize("pattern", SOURCES)
def test_docstring_names_its_source(pattern: str) -> None:
    """What follows another library or a paper says which."""
    entries = [entry for entry in SURFACE if re.fullmatch(pattern, entry.name)]
    assert entries, pattern
    for entry in entries:
        assert re.search(SOURCES[pattern], entry.docstring), f"{entry.name}: {SOURCES[pattern]}"


def test_methods_made_at_import_have_docstrings() -> None:
    """So do the pointwise operations, whose methods are made from their table."""
    import dlattn

    for owner in (dlattn.pygraph, dlattn.Graph):
        for name in set(dir(owner)) - set(dir(object)):
            assert name.startswith("_") or getattr(owner, name).__doc__, f"{owner.__name__}.{name}"
