"""What every contender must compute: attention in float32 on the GPU, a few heads at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.presets import BACKWARD, FORWARD, Case

if TYPE_CHECKING:
    import torch

#: Largest relative distance (Frobenius norms) of a right output. The rounding of bf16 inputs,
#: probabilities and outputs leaves 2e-3 to 5e-3; a wrong mask or a lost tile leaves far more.
TOLERANCE = 1e-2

#: Scores held at a time, in elements.
_CHUNK = 1 << 28

#: Names of each pass's outputs.
OUTPUTS = {FORWARD: ("o",), BACKWARD: ("dQ", "dK", "dV")}


@dataclass
class Tensors:
    """A case's memory, BSHD storage: what contenders read, and what they must write.

    Attributes:
        q, k, v, dO: normally distributed inputs, (B, S, H, D).
        lengths: (B,) int32 actual lengths, or ``None``.
        o: the forward's output in the element type, which backward passes read.
        stats: its log-sum-exp, natural, (B, Hq, Sq) float32.
        expected: float32 outputs of the passes, by name, (B, S, H, D).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dO: torch.Tensor
    lengths: torch.Tensor | None
    o: torch.Tensor
    stats: torch.Tensor
    expected: dict[str, torch.Tensor]

    def like(self, output: str) -> torch.Tensor:
        """The tensor that an output looks like."""
        return {"o": self.o, "dQ": self.q, "dK": self.k, "dV": self.v}[output]


def make_tensors(
    case: Case, passes: tuple[str, ...], device: str = "cuda", seed: int = 0
) -> Tensors:
    """Random inputs and the expected outputs of the passes."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    torch.manual_seed(seed)

    def bshd(seq: int, heads: int, head_dim: int) -> torch.Tensor:
        return torch.randn(case.batch, seq, heads, head_dim, device=device, dtype=dtype)

    q = bshd(case.seq_q, case.heads_q, case.head_dim_qk)
    k = bshd(case.seq_kv, case.heads_kv, case.head_dim_qk)
    v = bshd(case.seq_kv, case.heads_kv, case.head_dim_v)
    dO = bshd(case.seq_q, case.heads_q, case.head_dim_v)
    lengths = None
    if case.lengths is not None:
        lengths = torch.tensor(case.lengths, device=device, dtype=torch.int32)
        _blank_padding(dO, lengths)  # nobody feeds a gradient to rows that are no output
    o = torch.zeros_like(dO, dtype=torch.float32)
    stats = torch.zeros(case.batch, case.heads_q, case.seq_q, device=device)
    expected = {"o": o}
    if BACKWARD in passes:
        for name, like in (("dQ", q), ("dK", k), ("dV", v)):
            expected[name] = torch.zeros_like(like, dtype=torch.float32)
    _fill(case, (q, k, v, dO), lengths, stats, expected)
    return Tensors(q, k, v, dO, lengths, o.to(dtype), stats, expected)


def error(got: torch.Tensor, expected: torch.Tensor, lengths: torch.Tensor | None) -> float:
    """Relative distance of an output, rows beyond the lengths aside; NaN if it holds any."""
    got = got.float()
    if lengths is not None:
        got = got.clone()
        _blank_padding(got, lengths)
    return float((got - expected).norm() / expected.norm())


def _blank_padding(t: torch.Tensor, lengths: torch.Tensor) -> None:
    for entry, length in enumerate(lengths.tolist()):
        t[entry, length:] = 0


def _fill(
    case: Case,
    inputs: tuple[torch.Tensor, ...],
    lengths: torch.Tensor | None,
    stats: torch.Tensor,
    expected: dict[str, torch.Tensor],
) -> None:
    """Writes the expected outputs and the stats, some (batch, head) pairs at a time."""
    import torch

    q, k, v, dO = inputs
    group = case.heads_q // case.heads_kv
    pairs = torch.arange(case.batch * case.heads_q, device=q.device)
    step = max(1, _CHUNK // (case.seq_q * case.seq_kv))
    for chunk in pairs.split(step):
        b, h = chunk // case.heads_q, chunk % case.heads_q
        q_c, k_c, v_c = q[b, :, h].float(), k[b, :, h // group].float(), v[b, :, h // group].float()
        scores = torch.bmm(q_c, k_c.mT).mul_(case.scale)
        dropped = _dropped(case, lengths, b, q.device)
        if dropped is not None:
            scores.masked_fill_(dropped, float("-inf"))
        lse = torch.logsumexp(scores, -1)
        stats[b, h] = lse
        p = scores.sub_(lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp_()
        o_c = torch.bmm(p, v_c)
        expected["o"][b, :, h] = o_c
        if "dQ" not in expected:
            continue
        dO_c = dO[b, :, h].float()
        dP = torch.bmm(dO_c, v_c.mT)
        dS = dP.sub_((dO_c * o_c).sum(-1, keepdim=True)).mul_(p).mul_(case.scale)
        expected["dQ"][b, :, h] = torch.bmm(dS, k_c)
        _add(expected["dK"], b, h // group, torch.bmm(dS.mT, q_c))
        _add(expected["dV"], b, h // group, torch.bmm(p.mT, dO_c))


def _add(total: torch.Tensor, b: torch.Tensor, h: torch.Tensor, part: torch.Tensor) -> None:
    """Adds parts (n, S, D) into (B, S, H, D); several of them may belong to one head."""
    total.transpose(1, 2).index_put_((b, h), part, accumulate=True)


def _dropped(
    case: Case, lengths: torch.Tensor | None, b: torch.Tensor, device: torch.device
) -> torch.Tensor | None:
    """True where a query does not attend to a key, (1 or n, Sq, Skv)."""
    import torch

    query = torch.arange(case.seq_q, device=device)[:, None]
    key = torch.arange(case.seq_kv, device=device)[None, :]
    diagonal = query if lengths is not None else query + case.seq_kv - case.seq_q
    dropped = None
    if case.mask != "full":
        dropped = key > diagonal
        if case.window is not None:
            dropped |= key <= diagonal - case.window
        dropped = dropped[None]
    if lengths is not None:
        actual = lengths[b][:, None, None]
        beyond = (query >= actual) | (key >= actual)
        dropped = beyond if dropped is None else dropped | beyond
    return dropped
