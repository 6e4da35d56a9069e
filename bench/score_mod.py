"""Functions of scores beside FlexAttention's: the preset ``score_mod`` of ``bench.run``.

A soft cap and slopes, as functions that dlattn compiles into its kernels and torch into
FlexAttention's; checked and timed as any case is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from bench.cases import SOFTCAP, case
from bench.jobs import CaseJob, Effort, Job
from bench.measure import Measured, measure
from bench.peers import Peer
from bench.peers.aten import Flex
from bench.peers.graph import Declared, Dlattn


class Functions(Declared):
    """A graph whose edits of scores are a ``score_mod``."""

    def edits(self) -> dict[str, Any]:
        import torch

        if self.case.extra == "softcap":
            return {"score_mod": soft_cap}
        heads = torch.arange(1, self.case.heads_q + 1, device=self.device)
        slopes = 2.0 ** (-8.0 * heads / self.case.heads_q)
        of_heads = self.plain(slopes.view(1, -1, 1, 1))
        return {"score_mod": lambda graph, score: alibi(graph, score, of_heads)}


def soft_cap(graph: Any, score: Any) -> Any:
    """``c * tanh(score / c)``."""
    cap = graph.tensor_scalar(SOFTCAP)
    return graph.mul(graph.tanh(graph.div(score, cap)), cap)


def alibi(graph: Any, score: Any, of_heads: Any) -> Any:
    """``score + slope * (key - query)``."""
    query, key = (graph.gen_index(score, axis=axis) for axis in (2, 3))
    return graph.add(score, graph.mul(graph.sub(key, query), of_heads))


class Own(Dlattn):
    """dlattn, by a function."""

    declared = Functions


class ScoreModJob(CaseJob):
    """A case with an edit of scores, by functions; peers are FlexAttention alone."""

    def measure(
        self, directions: Sequence[str], peers: Sequence[Peer], effort: Effort
    ) -> Iterable[Measured]:
        contenders = (Own(), Flex())
        options = (effort.timings, effort.rounds, effort.seconds)
        return measure(self.case, directions, contenders, *options)

    def compile(self, direction: str, device: Any) -> None:
        Own().compile(self.case, direction, device)


def jobs() -> list[Job]:
    """4 x 16 heads of 128 and 4096 rows, causal."""
    cases = [
        case(4, (16, 16), 4096, (128, 128), "causal", extra=extra) for extra in ("softcap", "alibi")
    ]
    return [ScoreModJob(dataclasses.replace(c, name=f"{c.name} score_mod")) for c in cases]
