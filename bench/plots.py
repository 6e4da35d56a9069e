"""Charts of a GPU's results: ``python -m bench.plots bench/results/h200 [folder]``.

Reads every CSV file of the folder and writes a PNG for each chart that there are figures for. Needs
matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import style, train_report
from bench.cases import MASKS, PASSES
from bench.peers import has_module
from bench.presets import MODELS, TOKENS
from bench.results import BANDWIDTH, COLUMNS, Row, decode_bytes, read_csv

#: What a GPU's memory reads at most, TB/s, by its folder's name (NVIDIA's data sheets).
MEMORY = {"h200": 4.8, "h100": 3.35}


@dataclass(frozen=True)
class Words:
    """The words of a case's name.

    Attributes:
        rest: what comes behind the mask.
    """

    batch: int
    heads: str
    seq: int
    head_dim: str
    mask: str
    rest: str


def words_of(name: str) -> Words | None:
    """The name of an attention's case taken apart, or ``None`` if it is another one's."""
    words = name.split()
    if [word[0] for word in words[:4]] != ["b", "h", "s", "d"] or len(words) < 5:
        return None
    batch, heads, seq, head_dim = (word[1:] for word in words[:4])
    if not (batch.isdigit() and seq.isdigit()):
        return None
    return Words(int(batch), heads, int(seq), head_dim, words[4], " ".join(words[5:]))


def rows_of(folder: Path) -> list[Row]:
    """The figures of all files: of a setting that several have, the newest with dlattn's."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(encoding="utf-8") as file:
            if file.readline().strip() != ",".join(COLUMNS):
                continue  # such as that of the training run, which has a chart of its own
        settings: dict[tuple[str, str, str], list[Row]] = {}
        for row in read_csv(path):
            settings.setdefault(row.setting, []).append(row)
        for setting, rows in settings.items():
            found[setting] = max(found.get(setting, []), rows, key=_telling)
    return [row for rows in found.values() for row in rows]


def _telling(rows: Sequence[Row]) -> tuple[bool, str, int]:
    has_ours = any(row.impl == "dlattn" for row in rows)
    return has_ours, max((row.date for row in rows), default=""), len(rows)


def kernels_alone(rows: Sequence[Row]) -> list[Row]:
    """By graph replay; eager only for passes of cases that were not timed so."""
    graph = {(r.case, r.direction) for r in rows if r.timing == "graph"}
    return [r for r in rows if r.timing == ("graph" if (r.case, r.direction) in graph else "eager")]


#: Heads times head dimension of the charts by length.
WIDTH = 2048

Drawn = tuple[Any, str, list[Row]]  # the figure, its title, and the rows in it


def by_length(rows: Sequence[Row], direction: str) -> Drawn | None:
    """Speed by sequence length: a panel for each head dimension and mask."""
    chosen: dict[tuple[str, str], list[tuple[Words, Row]]] = {}
    for row in kernels_alone(rows):
        words = words_of(row.case)
        if words is None or row.direction != direction or words.rest or row.impl == "dlattn:sm80":
            continue
        queries, keys = words.heads.split("/")
        if words.mask not in MASKS[:2] or queries != keys or "/" in words.head_dim:
            continue
        if words.batch * words.seq == TOKENS and int(queries) * int(words.head_dim) == WIDTH:
            chosen.setdefault((words.mask, words.head_dim), []).append((words, row))
    dims = sorted(
        {dim for (_, dim), points in chosen.items() if len({words.seq for words, _ in points}) > 2},
        key=int,
    )
    masks = [mask for mask in MASKS[:2] if any(mask == m for m, _ in chosen)]
    if not dims:
        return None
    figure, axes = style.panels(len(masks), len(dims), (3.5, 2.6), same_scale=True)
    used = []
    for mask, line in zip(masks, axes, strict=True):
        for dim, axis in zip(dims, line, strict=True):
            points = _at_several_lengths(chosen.get((mask, dim), []))
            used += [row for _, row in points]
            for impl in style.impls_of(row for _, row in points):
                style.line(axis, [(w.seq, r.tflops) for w, r in points if r.impl == impl], impl)
            seqs = sorted({w.seq for w, _ in points})
            axis.set_xscale("log", base=2)
            axis.set_xticks(seqs, [_short(s) for s in seqs])
            axis.minorticks_off()
            axis.set_title(f"head dimension {dim}, {mask}")
        line[0].set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    axes[0][0].set_ylim(0, 1.05 * max(row.tflops for row in used))
    return figure, f"{direction.title()}, bf16, {TOKENS} tokens of width {WIDTH}", used


def _at_several_lengths(points: list[tuple[Words, Row]]) -> list[tuple[Words, Row]]:
    """Without those that other presets measured in one of their cases, which are no lines."""
    lengths: dict[str, set[int]] = {}
    for words, row in points:
        lengths.setdefault(row.impl, set()).add(words.seq)
    return [(words, row) for words, row in points if len(lengths[row.impl]) > 1]


def by_head_dim(rows: Sequence[Row]) -> Drawn | None:
    """Speed by head dimension at 4096 tokens: a panel for each pass and mask."""
    chosen: dict[tuple[str, str], list[tuple[Words, Row]]] = {}
    for row in kernels_alone(rows):
        words = words_of(row.case)
        if words is None or words.rest or words.mask not in MASKS[:2] or "/" in words.head_dim:
            continue
        queries, keys = words.heads.split("/")
        if (words.batch, words.seq) == (4, 4096) and queries == keys and "dlattn:" not in row.impl:
            chosen.setdefault((words.mask, row.direction), []).append((words, row))
    sixteen = {
        key: [(w, r) for w, r in points if w.heads == "16/16"] for key, points in chosen.items()
    }
    many = {k: points for k, points in sixteen.items() if len({w.head_dim for w, _ in points}) > 4}
    chosen = many or chosen
    if not any(len({w.head_dim for w, _ in points}) > 1 for points in chosen.values()):
        return None
    sides = sorted(chosen, key=lambda key: (PASSES.index(key[1]), MASKS.index(key[0])))
    figure, axes = style.panels(1, len(sides), (3.2, 2.9), same_scale=True)
    used = [row for points in chosen.values() for _, row in points]
    for key, axis in zip(sides, axes[0], strict=True):
        points = chosen[key]
        for impl in style.impls_of(row for _, row in points):
            of_impl = [(int(w.head_dim), r.tflops) for w, r in points if r.impl == impl]
            style.line(axis, of_impl, impl)
        dims = sorted({int(w.head_dim) for w, _ in points})
        axis.set_xticks(dims, [str(d) if d % 32 == 0 else "" for d in dims], fontsize=8)
        axis.set_xlabel("head dimension")
        axis.set_title(f"{key[1]}, {key[0]}")
    axes[0][0].set_ylabel("TFLOP/s")
    axes[0][0].set_ylim(0, 1.05 * max(row.tflops for row in used))
    heads = "16 heads" if chosen is many else "width 2048"
    return figure, f"4 sequences of 4096 tokens, bf16, {heads}", used


def of_decode(rows: Sequence[Row], gpu: str) -> Drawn | None:
    """Bandwidth of a decode: a panel for each number of heads, with and without pages."""
    chosen: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    decodes = [row for row in rows if decode_bytes(row.case) and " q1 d128" in row.case]
    used = [row for row in decodes if not set(row.case.split()) & {"lengths", "uneven"}]
    for row in sorted(used, key=lambda row: decode_bytes(row.case)):
        batch, heads, keys, _, _, *page = row.case.split()
        label = f"{batch[1:]} x {_short(int(keys[1:]))}"
        layout = f"pages of {page[0][4:]}" if page else "one cache"
        of_panel = chosen.setdefault((heads[1:], layout), {})
        of_panel.setdefault(label, {})[row.impl] = BANDWIDTH.of(row)
    chosen = {key: groups for key, groups in sorted(chosen.items()) if len(groups) > 2}
    if not chosen:
        return None
    figure, axes = style.panels(1, len(chosen), (3.3, 4.2))
    impls = style.impls_of(used)
    for (key, groups), axis in zip(chosen.items(), axes[0], strict=True):
        style.bars(axis, groups, impls, ".2f")
        axis.set_title(f"{key[0]} heads, {key[1]}")
        axis.set_xlabel("TB/s of keys and values")
        if gpu in MEMORY:
            axis.axvline(MEMORY[gpu], color=style.INK, linestyle=":", linewidth=1)
    axes[0][0].set_ylabel("batch x keys")
    said = f" (dotted: the memory's {MEMORY[gpu]} TB/s)" if gpu in MEMORY else ""
    return figure, f"Decoding one token, head dimension 128, bf16{said}", used


def of_features(rows: Sequence[Row]) -> Drawn | None:
    """What a feature leaves of plain causal attention's speed, which is dlattn's."""
    plain: dict[str, Row] = {}
    chosen: dict[str, dict[str, list[Row]]] = {d: {} for d in PASSES}
    for row in kernels_alone(rows):
        words = words_of(row.case)
        if words is None or (words.heads, words.seq) != ("16/16", 4096):
            continue
        if words.batch != (16 if words.rest == "ragged" else 4):
            continue
        if (words.head_dim, words.mask) != ("128", "causal") or "score_mod" in words.rest:
            continue
        if words.rest:
            label = {"padded": "lengths", "dbias": "bias and its gradient"}.get(
                words.rest, words.rest.removeprefix("padded ").replace("page", "pages of ")
            )
            chosen[row.direction].setdefault(label, []).append(row)
        elif row.impl == "dlattn":
            plain[row.direction] = row
    passes = [d for d in PASSES if d in plain and len(chosen[d]) > 2]
    if not passes:
        return None
    most = max(len(chosen[d]) for d in passes)
    figure, axes = style.panels(1, len(passes), (4.8, 0.8 + 0.75 * most))
    used = [row for d in passes for of in chosen[d].values() for row in of]
    for direction, axis in zip(passes, axes[0], strict=True):
        base = plain[direction].tflops
        shown = {
            label: {r.impl: r.tflops / base for r in of} for label, of in chosen[direction].items()
        }
        style.bars(axis, shown, style.impls_of(used), ".2f")
        axis.axvline(1, color=style.INK, linestyle=":", linewidth=1)
        axis.set_title(direction)
        axis.set_xlabel("TFLOP/s, of dlattn's plain causal")
    return figure, "Beside plain causal attention: 16 heads of 128, 4096 tokens", used


def of_models(rows: Sequence[Row]) -> Drawn | None:
    """Layers of models that people run, by FlashAttention-3's speed."""
    base = "fa3"
    measured: dict[str, dict[str, dict[str, Row]]] = {d: {} for d in PASSES}
    for row in kernels_alone(rows):
        measured[row.direction].setdefault(row.case, {})[row.impl] = row
    used, groups = [], {}
    for direction, of in measured.items():
        known = {model: of.get(it.name, {}) for model, it in MODELS.items()}
        groups[direction] = {model: its for model, its in known.items() if base in its}
        used += [r for its in groups[direction].values() for r in its.values() if r.impl != base]
    passes = [d for d in PASSES if len(groups[d]) > len(MODELS) // 2]
    if not passes:
        return None
    figure, axes = style.panels(1, len(passes), (5.2, 0.6 + 0.42 * len(MODELS)))
    for direction, axis in zip(passes, axes[0], strict=True):
        shown = {
            model: {impl: row.tflops / its[base].tflops for impl, row in its.items()}
            for model, its in groups[direction].items()
        }
        style.bars(axis, shown, style.impls_of(used), ".2f")
        axis.axvline(1, color=style.INK, linestyle=":", linewidth=1)
        axis.set_ylim(len(shown) - 0.4, -0.6)
        axis.set_title(direction)
        axis.set_xlabel(f"speed, of {style.look(base)[0]}'s")
    return figure, "Attention layers of models, bf16", used


def of_calls(rows: Sequence[Row]) -> Drawn | None:
    """Host time of calls."""
    used = [row for row in rows if row.timing == "host"]
    return _one_panel(used, "us of CPU a call", "What a call costs the CPU", ".1f")


def of_starts(rows: Sequence[Row]) -> Drawn | None:
    """Fresh processes until their first result."""
    used = [row for row in rows if row.timing == "start"]
    title = "A fresh process, beyond CuPy and the CUDA context"
    return _one_panel(used, "ms until the first result", title, ".0f")


def _one_panel(used: list[Row], unit: str, title: str, form: str) -> Drawn | None:
    if not used:
        return None
    groups: dict[str, dict[str, float]] = {}
    for row in used:
        groups.setdefault(row.case, {})[row.impl] = row.ms * (1e3 if row.timing == "host" else 1)
    figure, axes = style.panels(1, 1, (7.5, 0.6 + 0.3 * len(groups)))
    impls = style.impls_of(used)
    style.bars(axes[0][0], groups, impls, form)
    axes[0][0].set_xlabel(unit)
    return figure, title, used


def of_functions(rows: Sequence[Row]) -> Drawn | None:
    """Functions of scores beside FlexAttention."""
    used = [row for row in kernels_alone(rows) if row.case.endswith("score_mod")]
    if not used:
        return None
    groups: dict[str, dict[str, float]] = {}
    for row in used:
        label = f"{row.case.split()[-2]}, {row.direction}"
        groups.setdefault(label, {})[row.impl] = row.tflops
    figure, axes = style.panels(1, 1, (7.5, 0.8 + 0.4 * len(groups)))
    impls = style.impls_of(used)
    style.bars(axes[0][0], groups, impls, ".0f")
    axes[0][0].set_xlabel("TFLOP/s")
    return figure, "score_mod, causal, 4 x 16 heads of 128, 4096 tokens, bf16", used


def _short(number: int) -> str:
    return f"{number // 1024}k" if number % 1024 == 0 else str(number)


def draw_folder(source: Path, folder: Path | None = None) -> list[Path]:
    """Every chart that a folder of results has figures for.

    Args:
        folder: where the PNG files go, else beside the results.
    """
    folder = folder or source
    rows, gpu = rows_of(source), source.resolve().name
    charts: dict[str, Callable[[], Drawn | None]] = {
        "speed-forward": lambda: by_length(rows, "forward"),
        "speed-backward": lambda: by_length(rows, "backward"),
        "head-dims": lambda: by_head_dim(rows),
        "decode": lambda: of_decode(rows, gpu),
        "features": lambda: of_features(rows),
        "models": lambda: of_models(rows),
        "score-mod": lambda: of_functions(rows),
        "host": lambda: of_calls(rows),
        "start": lambda: of_starts(rows),
    }
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, draw in charts.items():
        made = draw()
        if made is not None:
            figure, title, used = made
            path = folder / f"{name}.png"
            drawn.append(style.save(figure, title, used, f"NVIDIA {gpu.upper()}", path))
    trained = source / f"{train_report.NAME}.csv"
    return [*drawn, train_report.draw(trained, gpu, folder)] if trained.exists() else drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 2 if the arguments make no sense, 1 if nothing can be drawn."""
    given = [Path(a) for a in (sys.argv[1:] if arguments is None else arguments)]
    if len(given) not in (1, 2) or not given[0].is_dir():
        print(__doc__)
        return 2
    if not has_module("matplotlib"):
        print("bench.plots needs matplotlib, which is not installed.")
        return 1
    drawn = draw_folder(*given)
    print("\n".join(map(str, drawn)) or f"No figures in {given[0]}.")
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main())
