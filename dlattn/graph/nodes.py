"""Attention nodes: the arguments of one ``sdpa`` or ``sdpa_backward`` call, made consistent.

What contradicts itself is refused here, at the call. What is consistent and merely not supported
is recorded, so that ``validate`` can refuse it with the argument's name.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from dlattn.dtypes import data_type, from_any
from dlattn.errors import InvalidArgumentError
from dlattn.graph.checks import flag
from dlattn.graph.dropout import DropoutArgument, dropout_argument
from dlattn.graph.tensor import Attributes, tensor
from dlattn.graph.vocabulary import attention_implementation, diagonal_alignment
from dlattn.problem import (
    PAGE_TABLES,
    RAGGED_ROLES,
    SCORE_GRADIENT_ROLES,
    SCORE_MOD_ROLES,
    Direction,
    offset_role,
)
from dlattn.problem.score import SOFTCAPS, is_float32
from dlattn.records import dataclass

if TYPE_CHECKING:
    from dlattn.graph.score_mod.callback import ScoreMod
    from dlattn.problem import ScoreProgram

#: Arguments that are graph tensors, by operation; the rest are numbers, flags and callables.
TENSOR_ARGUMENTS = {
    "sdpa": (
        *("q", "k", "v", "bias", "alibi_slopes", "block_mask", "seq_len_q", "seq_len_kv"),
        "rng_dump",
        *("paged_attention_k_table", "paged_attention_v_table"),
        *("score_max", "score_sum_exp", "sink_token", "debug_softmax"),
    ),
    "sdpa_backward": (
        *("q", "k", "v", "o", "dO", "stats", "bias", "dBias", "alibi_slopes", "block_mask"),
        *("seq_len_q", "seq_len_kv", "rng_dump", "sink_token", "dSink_token"),
        *("paged_attention_k_table", "paged_attention_v_table"),
    ),
}

#: Tensors that the user may give: to read; and to write, by operation.
_OPTIONAL_INPUTS = (
    *("seq_len_q", "seq_len_kv", *PAGE_TABLES.values()),
    *("bias", "alibi_slopes", "block_mask", "sink_token"),
)
_GIVEN_OUTPUTS = {
    "sdpa": ("score_max", "score_sum_exp", "rng_dump", "debug_softmax"),
    "sdpa_backward": ("dBias", "dSink_token", "rng_dump"),
}

#: What an operation returns; ``None`` in place of what was not asked for.
_RETURNED = {"sdpa": ("o", "stats"), "sdpa_backward": ("dQ", "dK", "dV")}


@dataclass(frozen=True)
class Diagonal:
    """A diagonal band: see :class:`dlattn.problem.Geometry` for the meaning of the bounds, and
    :class:`dlattn.problem.Band` for that of the corner, as functions of scores measure it."""

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    corner_as_given: bool = False


@dataclass(frozen=True)
class AttentionNode:
    """One attention operation of a graph.

    Attributes:
        operation: ``"sdpa"`` or ``"sdpa_backward"``.
        name: the node's name, in messages and in the default names of its outputs.
        inputs: role -> tensor; roles as in :class:`dlattn.problem.Geometry`.
        outputs: role -> tensor; those that the operation makes, then those that the user gave.
        attn_scale: the scale when there is no ``attn_scale`` input.
        softcap: the bound of soft-capped scores, or None.
        alibi: ``use_alibi_mask``: ALiBi with cuDNN's slopes.
        padding: ``use_padding_mask``.
        max_seq_kv: ``paged_attention_max_seq_len_kv``.
        diagonal: the band.
        dropout: what is dropped, or None.
        compute_data_type: as given, or ``NOT_SET``.
        deterministic: ``use_deterministic_algorithm``.
        max_total: argument -> value of those of ``max_total_seq_len_q`` and
            ``max_total_seq_len_kv`` that were given.
        score_mod: what the user's functions of scores have added, or None; the tensors that they
            read are inputs.
        program: what remains of them when the node has got what they mean (see
            :func:`dlattn.graph.score_mod.meaning.meant`), or None.
        partials: its derivatives by what it reads, of the gradients that are outputs, by role.
    """

    operation: str
    name: str
    inputs: Mapping[str, tensor]
    outputs: Mapping[str, tensor]
    attn_scale: float
    softcap: float | None
    alibi: bool
    padding: bool
    max_seq_kv: int | None
    diagonal: Diagonal
    dropout: DropoutArgument | None
    compute_data_type: data_type
    deterministic: bool
    max_total: Mapping[str, int]
    score_mod: ScoreMod | None = None
    program: ScoreProgram | None = None
    partials: Mapping[str, ScoreProgram] = field(default_factory=dict)

    @property
    def direction(self) -> Direction:
        return Direction.FORWARD if self.operation == "sdpa" else Direction.BACKWARD

    @property
    def returned(self) -> list[tensor | None]:
        """What the operation returns to the user."""
        asked = [t for role, t in self.outputs.items() if role in SCORE_GRADIENT_ROLES]
        return [*(self.outputs.get(role) for role in _RETURNED[self.operation]), *asked]

    @property
    def offsets(self) -> dict[str, tensor]:
        """Role -> ragged offset, of the tensors and tables that have memory and one."""
        return {
            offset_role(role): t.attributes.ragged_offset
            for role, t in {**self.inputs, **self.outputs}.items()
            if t.attributes.ragged_offset is not None and not t.get_is_virtual()
        }

    @property
    def tensors(self) -> dict[str, tensor]:
        """Role -> tensor: inputs, outputs, then the offsets of ragged tensors and packed tables."""
        return {**self.inputs, **self.outputs, **self.offsets}

    def is_ragged(self, role: str) -> bool:
        """Whether the node has the tensor, and it is ragged."""
        return role in RAGGED_ROLES and offset_role(role) in self.offsets

    def label(self, role: str) -> str:
        """The user's name for a tensor, or its role."""
        return self.tensors[role].get_name() or role


def sdpa_node(name: str, given: Mapping[str, Any]) -> AttentionNode:
    """The forward node; it makes ``o`` and, if asked for, ``stats``.

    Raises:
        InvalidArgumentError: arguments contradict each other.
        TypeError: an argument has the wrong Python type.
    """
    wants_stats = _wants_stats(given["generate_stats"], given["is_inference"])
    flag("unfuse_fma", given["unfuse_fma"])
    if not isinstance(given["implementation"], attention_implementation):
        raise TypeError(
            "implementation must be a dlattn.attention_implementation; got "
            f"{given['implementation']!r}."
        )
    if given["debug_softmax"] is not None and not wants_stats:
        raise InvalidArgumentError(
            "sdpa was given debug_softmax without statistics, which it is made from; set "
            "generate_stats=True."
        )
    outputs = {"o": _output(name, "O")}
    if wants_stats:
        outputs["stats"] = _output(name, "Stats")
    return _node("sdpa", name, given, ("q", "k", "v"), outputs)


def sdpa_backward_node(name: str, given: Mapping[str, Any]) -> AttentionNode:
    """The backward node; it makes ``dQ``, ``dK`` and ``dV``. Raises as the forward does."""
    for gradient, of in (("dSink_token", "sink_token"), ("dBias", "bias")):
        if given[gradient] is not None and given[of] is None:
            raise InvalidArgumentError(
                f"sdpa_backward was given {gradient} without {of}; give the forward's {of}."
            )
    outputs = {role: _output(name, role) for role in ("dQ", "dK", "dV")}
    for number, role in enumerate(_score_gradients(given)):
        outputs[role] = _output(name, f"dScoreMod.{number}")
    required = ("q", "k", "v", "o", "dO", "stats")
    return _node("sdpa_backward", name, given, required, outputs)


def _score_gradients(given: Mapping[str, Any]) -> list[str]:
    """The roles of the gradients that ``score_mod_gradients`` asks for, in its order."""
    asked, mod = given["score_mod_gradients"] or (), given["score_mod"]
    if asked and (mod is None or mod.d_score is not None):
        why = (
            "without score_mod, which reads what they are of; give the forward's score_mod"
            if mod is None
            else "with score_mod_bprop, which tells the gradient of the score alone; leave that "
            "out, so that score_mod is differentiated"
        )
        raise InvalidArgumentError(f"sdpa_backward was given score_mod_gradients {why}.")
    roles = {t: role for role, t in mod.inputs.items()} if asked else {}
    found: list[str] = []
    for t in asked:
        if t not in roles:
            raise InvalidArgumentError(
                f"score_mod_gradients has {t.get_name()!r}, which score_mod's result does not "
                "depend on; leave it out, or have score_mod read that very tensor."
            )
        role = SCORE_GRADIENT_ROLES[SCORE_MOD_ROLES.index(roles[t])]
        if role in found:
            raise InvalidArgumentError(
                f"score_mod_gradients has {t.get_name()!r} twice; name each tensor once."
            )
        found.append(role)
    return found


def _node(
    operation: str,
    name: str,
    given: Mapping[str, Any],
    required: tuple[str, ...],
    outputs: Mapping[str, tensor],
) -> AttentionNode:
    inputs = {}
    for role in required:
        if given[role] is None:
            raise TypeError(f"{operation} needs the tensor {role}; got None.")
        inputs[role] = given[role]
    for role in _OPTIONAL_INPUTS:
        if given[role] is not None:
            inputs[role] = given[role]
    alibi = flag("use_alibi_mask", given["use_alibi_mask"])
    if alibi and "alibi_slopes" in inputs:
        raise InvalidArgumentError(
            "use_alibi_mask=True means cuDNN's slopes, but alibi_slopes was given too; give one of "
            "them."
        )
    dropout = dropout_argument(operation, given)
    if dropout is not None:
        inputs.update(dropout.inputs)
    if given["score_mod"] is not None:
        inputs.update(given["score_mod"].inputs)
    written = {role: given[role] for role in _GIVEN_OUTPUTS[operation] if given[role] is not None}
    _check_written(operation, inputs, written)
    scale = given["attn_scale"]
    if isinstance(scale, tensor):
        constant = scale.attributes.value
        if constant is None:
            inputs["attn_scale"] = scale
        scale = constant
    return AttentionNode(
        operation=operation,
        name=name,
        inputs=inputs,
        outputs={**outputs, **written},
        attn_scale=_number("attn_scale", 1.0 if scale is None else scale),
        softcap=_softcap(given["softcap"]),
        alibi=alibi,
        padding=flag("use_padding_mask", given["use_padding_mask"]),
        max_seq_kv=_bound(
            "paged_attention_max_seq_len_kv", given["paged_attention_max_seq_len_kv"], least=1
        ),
        diagonal=_diagonal(given),
        dropout=dropout,
        compute_data_type=from_any(given["compute_data_type"]),
        deterministic=flag("use_deterministic_algorithm", given.get("use_deterministic_algorithm")),
        max_total={
            argument: total
            for argument in ("max_total_seq_len_q", "max_total_seq_len_kv")
            if (total := _bound(argument, given.get(argument), least=1)) is not None
        },
        score_mod=given["score_mod"],
    )


def _check_written(
    operation: str, inputs: Mapping[str, tensor], written: Mapping[str, tensor]
) -> None:
    for role, t in written.items():
        for other, same in {**inputs, **written}.items():
            if other != role and same is t:
                raise InvalidArgumentError(
                    f"{operation} was given one tensor as {role}, which it writes, and as {other}; "
                    "give each its own."
                )


def _output(node: str, port: str) -> tensor:
    return tensor(Attributes(name=f"{node}::{port}", is_virtual=True))


def _wants_stats(generate_stats: Any, is_inference: Any) -> bool:
    if (generate_stats is None) == (is_inference is None):
        number = "neither" if generate_stats is None else "both"
        raise InvalidArgumentError(
            f"sdpa needs exactly one of generate_stats and is_inference; got {number}."
        )
    name, value = (
        ("generate_stats", generate_stats)
        if is_inference is None
        else ("is_inference", is_inference)
    )
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError(f"{name} must be True or False; got {value!r:.100}.")
    return bool(value) if is_inference is None else not value


def _diagonal(given: Mapping[str, Any]) -> Diagonal:
    """The band that flags, alignment and bounds describe together."""
    top_left = flag("use_causal_mask", given["use_causal_mask"])
    bottom_right = flag("use_causal_mask_bottom_right", given["use_causal_mask_bottom_right"])
    alignment = given["diagonal_alignment"]
    if alignment is None:
        alignment = diagonal_alignment.TOP_LEFT
    if not isinstance(alignment, diagonal_alignment):
        raise TypeError(
            f"diagonal_alignment must be a dlattn.diagonal_alignment; got {alignment!r}."
        )
    left = _bound("diagonal_band_left_bound", given["diagonal_band_left_bound"])
    right = _bound("diagonal_band_right_bound", given["diagonal_band_right_bound"])
    window = _bound("sliding_window_length", given["sliding_window_length"], least=1)

    if top_left and bottom_right:
        raise InvalidArgumentError(
            "use_causal_mask and use_causal_mask_bottom_right are both True; choose one."
        )
    if (top_left or bottom_right) and right is not None:
        mask = "use_causal_mask" if top_left else "use_causal_mask_bottom_right"
        raise InvalidArgumentError(
            f"{mask} means diagonal_band_right_bound=0, but diagonal_band_right_bound={right} was "
            "given too; give one of them."
        )
    if top_left and alignment is diagonal_alignment.BOTTOM_RIGHT:
        raise InvalidArgumentError(
            "use_causal_mask is aligned to the top left, but diagonal_alignment is BOTTOM_RIGHT; "
            "use use_causal_mask_bottom_right, or diagonal_band_right_bound=0 with the alignment."
        )
    if window is not None and left is not None:
        raise InvalidArgumentError(
            "sliding_window_length is another name for diagonal_band_left_bound; give one of them."
        )
    return Diagonal(
        left=window if left is None else left,
        right=0 if top_left or bottom_right else right,
        bottom_right=bottom_right or alignment is diagonal_alignment.BOTTOM_RIGHT,
    )


def _bound(name: str, value: Any, least: int | None = None) -> int | None:
    if value is None:
        return None
    try:
        bound = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        bound = None
    if bound is None:
        raise InvalidArgumentError(f"{name} must be an int or None; got {value!r}.")
    if least is not None and bound < least:
        raise InvalidArgumentError(
            f"{name} must be at least {least}, or None to leave it out; got {bound}."
        )
    return bound


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, a graph tensor or None; got {value!r}.")
    if not is_float32(value):
        raise InvalidArgumentError(f"{name} must be a finite number of FLOAT; got {value}.")
    return float(value)


def _softcap(value: Any) -> float | None:
    if value is None:
        return None
    cap = _number("softcap", value)
    least, most = SOFTCAPS
    if not least <= cap <= most:
        raise InvalidArgumentError(
            f"softcap must be from {least} to {most}, or None for no soft cap; got {cap}."
        )
    return cap
