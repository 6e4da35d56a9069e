"""Charts of a result file: ``python -m bench.plots bench/results/h200/dense.csv [folder]``.

One PNG for each pass and timing: TFLOP/s by sequence length, a panel for each head dimension and
mask. Needs matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.peers import has_module, is_ours
from bench.results import Row, head_dims, read_csv

#: Panels (head dimensions, heads, mask) of lines (contender) of points (sequence length, TFLOP/s).
Panels = dict[str, dict[str, list[tuple[int, float]]]]


def panels(rows: Sequence[Row]) -> Panels:
    """The figures of one pass and timing, arranged for drawing; points by sequence length."""
    found: Panels = {}
    for row in rows:
        words = row.case.split()
        seq = next((w for w in words if w[0] == "s" and w[1:].isdigit()), None)
        if seq is None:
            continue
        mask = " ".join(words[words.index(f"d{head_dims(row.case)}") + 1 :])
        heads = next(w for w in words if w[0] == "h")
        title = f"d{head_dims(row.case)} {heads} {mask}"
        found.setdefault(title, {}).setdefault(row.impl, []).append((int(seq[1:]), row.tflops))
    return {
        title: {impl: sorted(points) for impl, points in lines.items()}
        for title, lines in found.items()
    }


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """One PNG of one pass and timing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arranged = panels(rows)
    columns = min(len(arranged), 4)
    lines = -(-len(arranged) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4 * columns, 3.2 * lines), squeeze=False, layout="constrained"
    )
    impls = list(dict.fromkeys(row.impl for row in rows))
    colours = {impl: f"C{i}" for i, impl in enumerate(impls)}
    for axis in axes.flat[len(arranged) :]:
        axis.set_visible(False)
    for axis, (panel, by_impl) in zip(axes.flat, arranged.items(), strict=False):
        for impl, points in by_impl.items():
            axis.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=3,
                linewidth=2.4 if is_ours(impl) else 1.2,
                color=colours[impl],
                label=impl,
            )
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title(panel, fontsize=9)
        axis.grid(alpha=0.3)
        axis.set_xlabel("sequence length")
        axis.set_ylabel("TFLOP/s")
    handles = [
        plt.Line2D([], [], color=colours[impl], label=impl, linewidth=2.4 if is_ours(impl) else 1.2)
        for impl in impls
    ]
    figure.suptitle(title)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(impls))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    given = [Path(a) for a in (sys.argv[1:] if arguments is None else arguments)]
    if len(given) not in (1, 2):
        print(__doc__)
        return 2
    if not has_module("matplotlib"):
        print("bench.plots needs matplotlib, which is not installed.")
        return 1
    source, folder = given[0], given[-1] if len(given) == 2 else given[0].parent
    rows = read_csv(source)
    folder.mkdir(parents=True, exist_ok=True)
    for direction, timing in dict.fromkeys((r.direction, r.timing) for r in rows):
        chosen = [r for r in rows if (r.direction, r.timing) == (direction, timing)]
        path = folder / f"{source.stem}-{direction}-{timing}.png"
        draw(chosen, f"{source.stem}, {direction}, {timing}: {source.parent.name}", path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
