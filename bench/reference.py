"""What every contender must compute: attention in float32 on the GPU, a few heads at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.cases import BACKWARD, FORWARD, SOFTCAP, Case

if TYPE_CHECKING:
    import torch

#: Largest relative distance (Frobenius norms) of a right output. The rounding of bf16 inputs,
#: probabilities and outputs leaves 2e-3 to 5e-3; a wrong mask or a lost tile leaves far more.
TOLERANCE = 1e-2

#: With dropout, distances from attention without: each of n probabilities is off by
#: sqrt(p / (1 - p)) of itself, a third. Nothing dropped, or something else computed, is outside.
DROPPED = (0.1, 0.7)

#: Scores held at a time, in elements.
_CHUNK = 1 << 28

#: Names of each pass's outputs.
OUTPUTS = {FORWARD: ("o",), BACKWARD: ("dQ", "dK", "dV")}
#: What a backward makes besides, by what the case has.
_MORE = {"sink": ("dSink_token",), "dbias": ("dBias",)}


def outputs_of(case: Case, direction: str) -> tuple[str, ...]:
    """Names of a pass's outputs."""
    return OUTPUTS[direction] + (_MORE.get(case.extra, ()) if direction == BACKWARD else ())


def is_off(case: Case, distance: float) -> bool:
    """Whether an output at this relative distance is wrong."""
    least, most = DROPPED if case.extra == "dropout" else (-1.0, TOLERANCE)
    return not least < distance < most


@dataclass
class Tensors:
    """A case's memory, BSHD storage: what contenders read, and what they must write.

    Attributes:
        q, k, v, dO: normally distributed inputs, (B, S, H, D).
        lengths: (B,) int32 actual lengths, or ``None``.
        o: the forward's output in the element type, which backward passes read.
        stats: its log-sum-exp, natural, (B, Hq, Sq) float32.
        expected: float32 outputs of the passes, by name, (B, S, H, D).
        extras: what ``extra`` of the case reads, by the graph's names: ``bias`` (1, Hq, Sq, Skv),
            ``sink_token`` (1, Hq, 1, 1) float32, ``seed`` and ``offset`` (1, 1, 1, 1) int64.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dO: torch.Tensor
    lengths: torch.Tensor | None
    o: torch.Tensor
    stats: torch.Tensor
    expected: dict[str, torch.Tensor] = field(default_factory=dict)
    extras: dict[str, torch.Tensor] = field(default_factory=dict)

    def like(self, output: str) -> torch.Tensor:
        """The tensor that an output looks like."""
        of_extras = {"dSink_token": "sink_token", "dBias": "bias"}
        if output in of_extras:
            return self.extras[of_extras[output]]
        return {"o": self.o, "dQ": self.q, "dK": self.k, "dV": self.v}[output]


def make_tensors(
    case: Case, passes: tuple[str, ...], device: str = "cuda", seed: int = 0
) -> Tensors:
    """Random inputs and the expected outputs of the passes."""
    import torch

    torch.manual_seed(seed)
    tensors = random_tensors(case, device)
    if tensors.lengths is not None:  # nobody feeds a gradient to rows that are no output
        _blank_padding(tensors.dO, tensors.lengths)
    tensors.stats.zero_()
    names = [name for direction in (FORWARD, *passes) for name in outputs_of(case, direction)]
    for name in names:
        like = tensors.like(name)
        tensors.expected[name] = torch.zeros_like(like, dtype=torch.float32)
    _fill(case, tensors)
    tensors.o.copy_(tensors.expected["o"])
    return tensors


def random_tensors(case: Case, device: str) -> Tensors:
    """Inputs, and what is neither computed nor expected yet; ``meta`` is a device, too."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]

    def bshd(seq: int, heads: int, head_dim: int) -> torch.Tensor:
        return torch.randn(case.batch, seq, heads, head_dim, device=device, dtype=dtype)

    q = bshd(case.seq_q, case.heads_q, case.head_dim_qk)
    k = bshd(case.seq_kv, case.heads_kv, case.head_dim_qk)
    v = bshd(case.seq_kv, case.heads_kv, case.head_dim_v)
    dO = bshd(case.seq_q, case.heads_q, case.head_dim_v)
    lengths = None
    if case.lengths is not None:
        lengths = torch.tensor(case.lengths, device=device, dtype=torch.int32)
    stats = torch.empty(case.batch, case.heads_q, case.seq_q, device=device)
    extras = {}
    if case.extra in ("bias", "dbias"):
        size = (1, case.heads_q, case.seq_q, case.seq_kv)
        extras["bias"] = torch.randn(size, device=device, dtype=dtype)
    if case.extra == "sink":
        extras["sink_token"] = torch.randn(1, case.heads_q, 1, 1, device=device)
    if case.extra == "dropout":
        for name, value in (("seed", 8), ("offset", 0)):
            extras[name] = torch.full((1, 1, 1, 1), value, device=device, dtype=torch.int64)
    return Tensors(q, k, v, dO, lengths, torch.empty_like(dO), stats, extras=extras)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The output of one sequence, (Sq, H, D) float32, under a causal mask that ends in the bottom
    right corner.

    Args:
        q: (Sq, H, D), scaled by ``D ** -0.5``.
        k, v: (Skv, heads of keys, D).
    """
    import torch

    k, v = (t.float().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * q.shape[-1] ** -0.5
    last = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    scores.masked_fill_(torch.arange(len(k), device=q.device) > last, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def error(got: torch.Tensor, expected: torch.Tensor, lengths: torch.Tensor | None) -> float:
    """Relative distance of an output, rows beyond the lengths aside; NaN if it holds any."""
    got = got.float()
    if lengths is not None and len(got) == len(lengths):
        got = got.clone()
        _blank_padding(got, lengths)
    return float((got - expected).norm() / expected.norm())


def _blank_padding(t: torch.Tensor, lengths: torch.Tensor) -> None:
    for entry, length in enumerate(lengths.tolist()):
        t[entry, length:] = 0


def _fill(case: Case, tensors: Tensors) -> None:
    """Writes the expected outputs and the stats, some (batch, head) pairs at a time."""
    import torch

    q, k, v, dO = tensors.q, tensors.k, tensors.v, tensors.dO
    expected, extras = tensors.expected, tensors.extras
    group = case.heads_q // case.heads_kv
    pairs = torch.arange(case.batch * case.heads_q, device=q.device)
    step = max(1, _CHUNK // (case.seq_q * case.seq_kv))
    for chunk in pairs.split(step):
        b, h = chunk // case.heads_q, chunk % case.heads_q
        q_c, k_c, v_c = q[b, :, h].float(), k[b, :, h // group].float(), v[b, :, h // group].float()
        scores = torch.bmm(q_c, k_c.mT).mul_(case.scale)
        slope = None
        if case.extra == "softcap":
            scores.div_(SOFTCAP).tanh_()
            slope = 1 - scores * scores
            scores.mul_(SOFTCAP)
        if "bias" in extras:
            scores += extras["bias"][0, h]
        if case.extra == "alibi":
            scores += _alibi(case, h)
        dropped = _dropped(case, tensors.lengths, b, q.device)
        if dropped is not None:
            scores.masked_fill_(dropped, float("-inf"))
        lse = torch.logsumexp(scores, -1)
        if "sink_token" in extras:
            sink = extras["sink_token"][0, h, 0]
            lse = torch.logaddexp(lse, sink)
        tensors.stats[b, h] = lse
        p = scores.sub_(lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp_()
        o_c = torch.bmm(p, v_c)
        expected["o"][b, :, h] = o_c
        if "dQ" not in expected:
            continue
        dO_c = dO[b, :, h].float()
        delta = (dO_c * o_c).sum(-1, keepdim=True)
        dS = torch.bmm(dO_c, v_c.mT).sub_(delta).mul_(p)
        if "dBias" in expected:
            expected["dBias"][0].index_put_((h,), dS, accumulate=True)
        if "dSink_token" in expected:
            share = -((sink - lse).exp() * delta[..., 0]).sum(-1)
            expected["dSink_token"][0, :, 0, 0].index_put_((h,), share, accumulate=True)
        dS = (dS if slope is None else dS.mul_(slope)).mul_(case.scale)
        expected["dQ"][b, :, h] = torch.bmm(dS, k_c)
        _add(expected["dK"], b, h // group, torch.bmm(dS.mT, q_c))
        _add(expected["dV"], b, h // group, torch.bmm(p.mT, dO_c))


def _alibi(case: Case, heads: torch.Tensor) -> torch.Tensor:
    """What ALiBi adds to the scores of these heads, (n, Sq, Skv); a power of two of them in all."""
    import torch

    slopes = 2.0 ** (-8.0 * (heads + 1) / case.heads_q)
    query = torch.arange(case.seq_q, device=heads.device)[:, None]
    return slopes[:, None, None] * (torch.arange(case.seq_kv, device=heads.device) - query)


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
