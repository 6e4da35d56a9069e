"""How charts look: one palette, one frame, one caption.

Colours are Okabe and Ito's (distinct to colour-blind readers, too), and every contender has a
marker of its own. The background is opaque, so that charts read the same on a light and on a dark
page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.peers import is_ours
from bench.results import Row

PAPER, INK, FAINT = "#fcfcfa", "#1f2328", "#d4d8dd"

#: Name, colour and marker of each contender.
LOOKS = {
    "dlattn": ("dlattn", "#D55E00", "o"),
    "fa3": ("FlashAttention-3", "#0072B2", "s"),
    "cudnn": ("cuDNN", "#009E73", "^"),
    "fa2": ("FlashAttention-2", "#CC79A7", "D"),
    "fa4": ("FlashAttention-4", "#000000", "v"),
    "flex": ("FlexAttention", "#56B4E9", "P"),
    "torch": ("PyTorch", "#7A7A7A", "X"),
    "torch_cudnn": ("cuDNN, by PyTorch", "#8C6D1F", "<"),
    "dlattn:sm80": ("dlattn, portable kernels", "#E69F00", "h"),
}


def look(impl: str) -> tuple[str, str, str]:
    """Name, colour and marker."""
    return LOOKS.get(impl, (impl, "#7A7A7A", "."))


def impls_of(rows: Iterable[Row]) -> list[str]:
    """Contenders of some rows, in the palette's order."""
    found = dict.fromkeys(row.impl for row in rows)
    return sorted(found, key=lambda i: list(LOOKS).index(i) if i in LOOKS else len(LOOKS))


def panels(
    lines: int, columns: int, size: tuple[float, float], *, same_scale: bool = False
) -> tuple[Any, Any]:
    """A figure of some panels, and its axes as a (lines, columns) array.

    Args:
        size: of a panel, in inches.
        same_scale: whether all have one vertical axis.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {
        "figure.facecolor": PAPER,
        "axes.facecolor": PAPER,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "grid.color": FAINT,
        "grid.linewidth": 0.7,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "font.size": 9,
    }
    with plt.rc_context(style):
        width, height = size
        return plt.subplots(
            lines,
            columns,
            figsize=(width * columns, height * lines + 0.9),
            squeeze=False,
            sharey=same_scale,
            layout="constrained",
        )


def line(axis: Any, points: Sequence[tuple[float, float]], impl: str) -> None:
    """A contender's line; dlattn's is the thick one, and on top."""
    _, colour, marker = look(impl)
    ours = is_ours(impl)
    axis.plot(
        *zip(*sorted(points), strict=True),
        color=colour,
        marker=marker,
        markersize=6 if ours else 5,
        linewidth=2.6 if ours else 1.3,
        zorder=4 if ours else 3,
    )


def bars(axis: Any, groups: dict[str, dict[str, float]], impls: Sequence[str], form: str) -> None:
    """Horizontal bars: a group for each label, a bar for each contender, figures beside."""
    height = 0.8 / max(1, len(impls))
    for index, impl in enumerate(impls):
        _, colour, _ = look(impl)
        places = [i + (index - (len(impls) - 1) / 2) * height for i in range(len(groups))]
        values = [of.get(impl, 0.0) for of in groups.values()]
        drawn = axis.barh(places, values, 0.9 * height, color=colour)
        texts = [format(value, form) if value else "" for value in values]
        axis.bar_label(drawn, texts, padding=3, fontsize=8, color=INK)
    axis.set_yticks(range(len(groups)), list(groups))
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.margins(x=0.12)


def save(figure: Any, title: str, rows: Sequence[Row], gpu: str, path: Path) -> Path:
    """Writes the PNG: the title and the contenders above, below where the figures come from."""
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    impls, has_lines = impls_of(rows), any(axis.lines and not axis.patches for axis in figure.axes)
    handles: list[Any] = []
    for impl in impls:
        name, colour, marker = look(impl)
        if has_lines:
            width = 2.6 if is_ours(impl) else 1.3
            handles.append(Line2D([], [], color=colour, marker=marker, linewidth=width, label=name))
        else:
            handles.append(Patch(color=colour, label=name))
    found = figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=max(1, len(impls)),
        frameon=False,
        labelcolor=INK,
        title=title,
        title_fontproperties={"size": 12, "weight": "bold"},
    )
    found.get_title().set_color(INK)
    measured = [row for row in rows if is_ours(row.impl)] or list(rows)
    commits = sorted({(row.date, row.commit) for row in measured})
    said = "; ".join(f"commit {commit}, {date}" for date, commit in commits)
    figure.supxlabel(f"{gpu}; {said}", fontsize=8, color="#57606a")
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return path
