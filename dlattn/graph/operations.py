"""The attention operations' signatures, shared by ``pygraph`` and the ``Graph`` wrapper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dlattn.dtypes import data_type
from dlattn.graph.primitives.methods import Primitives, arguments
from dlattn.graph.vocabulary import attention_implementation, diagonal_alignment


class Operations(Primitives):
    """A graph to which attention, and primitive operations, can be added.

    Where an argument is a tensor, ``pygraph`` takes the graph's tensors, and ``Graph`` also takes
    tensors of any DLPack framework.
    """

    def sdpa(
        self,
        q: Any,
        k: Any,
        v: Any,
        is_inference: bool | None = None,
        attn_scale: Any = None,
        bias: Any = None,
        block_mask: Any = None,
        use_alibi_mask: bool | None = False,
        use_padding_mask: bool | None = False,
        seq_len_q: Any = None,
        seq_len_kv: Any = None,
        use_causal_mask: bool | None = False,
        use_causal_mask_bottom_right: bool | None = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment | None = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: tuple[Any, ...] | None = None,
        rng_dump: Any = None,
        paged_attention_k_table: Any = None,
        paged_attention_v_table: Any = None,
        paged_attention_max_seq_len_kv: int | None = None,
        compute_data_type: data_type = data_type.NOT_SET,
        name: str = "",
        score_mod: Callable[..., Any] | None = None,
        generate_stats: bool | None = None,
        implementation: attention_implementation = attention_implementation.AUTO,
        score_max: Any = None,
        score_sum_exp: Any = None,
        sink_token: Any = None,
        unfuse_fma: bool | None = False,
        *,
        softcap: float | None = None,
        alibi_slopes: Any = None,
        dropout_algorithm: str | None = None,
        debug_softmax: Any = None,
    ) -> list[Any]:
        """Scaled dot product attention (cuDNN frontend 1.23 ``sdpa``).

        ``o = dropout(softmax(mask(edit(q @ k^T * attn_scale)))) @ v``, and statistics of the final
        scores. Edits and masks take part in the order: softcap, score_mod, bias, ALiBi, padding,
        band, block_mask.

        Args:
            q: (B, Hq, Sq, Dqk), fp16 or bf16 (the reference engine also takes fp32 and fp64); any
                strides whose last is 1.
            k: (B, Hk, Skv, Dqk); Hk divides Hq, and query head h reads head ``h // (Hq / Hk)``.
            v: (B, Hv, Skv, Dv); Hv divides Hq, independently of Hk.
            is_inference: ``not generate_stats``; give exactly one of the two.
            attn_scale: a number, or a tensor of one fp32 element on the device or the host;
                ``None`` means 1.
            bias: added to scores: HALF, BFLOAT16 or FLOAT, (B, Hq, Sq, Skv), of which any size may
                be 1, any strides. -inf masks; on GPUs, a row of nothing above -1e8 may count as
                masked, and one of nothing above -1e29 does. (Its log-sum-exp, and with it its
                gradients, are as exact as fp32 is there: from 1e6 on, to some percent.) BOOLEAN and
                UINT8 mask where they are 0; beside numbers, score_mod can mask
                by such a tensor. What lies beyond actual lengths is not read.
            block_mask: a bit for each block of 128 queries and 128 keys, lowest bit first: 1 where
                the block is attended to. UINT8, (B or 1, Hq or 1, ceil(Sq / 128),
                ceil(ceil(Skv / 128) / 8)), any strides. Blocks that are not cost next to nothing.
            use_alibi_mask: add ``slope * (key - query)`` to scores, whatever the alignment of the
                diagonal, with cuDNN's slopes, which fall from head to head (see
                :func:`dlattn.problem.alibi_slopes`).
            use_padding_mask: mask what lies beyond ``seq_len_q`` and ``seq_len_kv``. Then rows of
                o and score_sum_exp beyond seq_len_q are 0, those of stats and score_max -inf; so
                are rows that attend to nothing.
            seq_len_q, seq_len_kv: actual lengths, (B, 1, 1, 1), int32 or int64; either or both.
            use_causal_mask: top left alignment and right bound 0.
            use_causal_mask_bottom_right: bottom right alignment and right bound 0.
            sliding_window_length: another name for ``diagonal_band_left_bound``.
            diagonal_alignment: where the diagonal starts; ``shift`` below is 0 for ``TOP_LEFT``
                and ``seq_len_kv - seq_len_q`` for ``BOTTOM_RIGHT``.
            diagonal_band_left_bound: W keeps keys with ``key + W > query + shift``: of those up to
                the diagonal the last W, the diagonal included. Below 1, which cuDNN refuses, only
                keys beyond the diagonal.
            diagonal_band_right_bound: R keeps keys with ``key <= query + shift + R``; below 0,
                which cuDNN refuses, only keys before the diagonal.
            dropout: ``(p, seed, offset)`` drops each probability with the chance p, 0 to 1, and
                multiplies those that are kept by ``1 / (1 - p)``. Seed and offset are integers,
                or tensors of one INT32 or INT64 on the device or the host; with position they
                decide alone (see :func:`dlattn.philox_dropout_mask`), so that the backward, given
                the same, drops the same. Or ``(mask, scale)``: keeps what is 1 in a mask, of the
                types and shapes that bias has, drops what is 0, and multiplies what it keeps by
                scale, a number or a tensor of one FLOAT; the backward takes ``(mask, scale,
                scale_inv)``, where scale_inv is 1 / scale. In host memory other floats are
                refused; on a device they count as 1. Statistics are those before dropout. A p of 0
                drops nothing, and the tensors are not read.
            rng_dump: a tensor to write, (B, Hq, Sq, Skv), fp32 (on the CPU fp64, too): 1 where
                dropout keeps, 0 where it drops, at every position.
            paged_attention_k_table: k lies in pages: it is a container (pages, Hk, page, Dqk) of
                any strides, the page a power of two, and row t of sequence b is row ``t % page`` of
                page ``table[b, 0, t // page, 0]``. The table is int32, (B, 1, ceil(Skv / page), 1)
                or wider; it needs use_padding_mask and both lengths. Entries beyond an actual
                length are not looked at; on GPUs, pages that the container does not have read as 0
                (the reference engine refuses them). With ``set_ragged_offset`` of a (B + 1, 1, 1,
                1) tensor the table is packed: entries of sequence b begin at number ``offset[b]``.
            paged_attention_v_table: the same of v, (pages, Hv, page, Dv), with pages of its own.
                Either of k and v may be paged alone.
            paged_attention_max_seq_len_kv: Skv where k and v are paged. Unless given, it is the
                size of the one of k and v that is not paged, else the bias' last, else as many
                rows as the table has pages for.
            compute_data_type: FLOAT; the reference engine also takes DOUBLE.
            name: the node's name; outputs are called ``<name>::O`` and ``<name>::Stats``.
            generate_stats: also return the log-sum-exp, natural, (B, Hq, Sq, 1), fp32 unless its
                type is set: fp16 or bf16, on the CPU fp64, too.
            score_max, score_sum_exp: tensors to write, (B, Hq, Sq, 1), fp32 (on the CPU fp64, too):
                a row's largest score, natural, and the sum of its exponentials relative to that.
                Either, or both.
            sink_token: (1, Hq, 1, 1), fp32: one more score of every row of its head, for which
                there is no value. All statistics include it; a row that attends to nothing else
                has the sink as its stats and score_max, 1 as score_sum_exp, 0 as o. Finite, or
                -inf, which is none.
            implementation: AUTO, COMPOSITE or UNIFIED, all of which mean dlattn's one
                implementation.
            unfuse_fma: accepted; it changes nothing outside cuDNN's sm_100 kernels.
            softcap: dlattn's own: a number c > 0; scores become ``c * tanh(score / c)`` after
                the scale (FlashAttention's softcap).
            alibi_slopes: dlattn's own: fp32 slopes, (Hq), (B, Hq) or (1 or B, Hq, 1, 1), any
                strides; adds ``-slope * |query + len_kv - len_q - key|`` to scores, with actual
                lengths (FlashAttention's alibi_slopes).
            dropout_algorithm: dlattn's own: how ``(p, seed, offset)`` draws: ``"philox"``, the
                same as ``None``, or ``"flash"``, FlashAttention-2's masks and scale, bit for bit
                (see :class:`dlattn.problem.FlashDropout`).
            score_mod: ``function(graph, score)``, called once: adds pointwise operations to a graph
                and returns the new score; takes part after softcap. See ``docs/score_mod.md``.
                Lengths given without use_padding_mask are then for it to read.
            debug_softmax: dlattn's own: a tensor to write, of q's type, (B, Hq, Sq, Skv), or
                with Sq and Skv rounded up to multiples of 128: probabilities before dropout,
                ``exp(score - stats)``, 0 where nothing is attended or exists, and the sign set
                where dropout drops, at every position. It costs a second computation of the scores,
                and generate_stats=True. (FlashAttention's return_softmax has exponentials relative
                to the maximum so far in the place of probabilities.)

        Any of q, k, v, o, stats, score_max and score_sum_exp may be ragged: sequences packed one
        after the other, with or without gaps (``set_ragged_offset``). The element of batch entry b,
        head h, row r, column c is ``offset[b] + h * stride[1] + r * stride[2] + c``. Rows beyond an
        entry's length are neither read nor written. Lengths come from ``seq_len_q`` and
        ``seq_len_kv``; where one is not given, from the distances of q's offsets, and of k's (else
        v's). Offsets keep the alignment that the tensor declares. Packs hold such tensors as
        (tokens, heads, columns) views, memory of one dimension, or addresses.

        Returns:
            ``[o, stats]``, virtual until ``set_output(True)``; stats is ``None`` when not asked
            for. Shapes and strides that are not set are inferred: o in the layout of q, stats
            packed.

        Raises:
            InvalidArgumentError: arguments contradict each other (a ``RuntimeError``).
            TypeError: an argument has the wrong Python type.
        """
        return self._add("sdpa", arguments(locals()))

    def sdpa_backward(
        self,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        dO: Any,
        stats: Any,
        attn_scale: Any = None,
        bias: Any = None,
        dBias: Any = None,
        use_alibi_mask: bool | None = False,
        use_padding_mask: bool | None = False,
        seq_len_q: Any = None,
        seq_len_kv: Any = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        use_causal_mask: bool | None = False,
        use_causal_mask_bottom_right: bool | None = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment | None = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: tuple[Any, ...] | None = None,
        rng_dump: Any = None,
        use_deterministic_algorithm: bool | None = False,
        compute_data_type: data_type = data_type.NOT_SET,
        name: str = "",
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        sink_token: Any = None,
        dSink_token: Any = None,
        *,
        softcap: float | None = None,
        alibi_slopes: Any = None,
        dropout_algorithm: str | None = None,
        block_mask: Any = None,
        paged_attention_k_table: Any = None,
        paged_attention_v_table: Any = None,
        paged_attention_max_seq_len_kv: int | None = None,
        score_mod_gradients: Sequence[Any] | None = None,
    ) -> list[Any]:
        """The gradient of :meth:`sdpa` (cuDNN frontend 1.23 ``sdpa_backward``).

        Args:
            o: the forward's output, (B, Hq, Sq, Dv).
            dO: the gradient of o, same shape.
            stats: the forward's log-sum-exp, (B, Hq, Sq, 1), fp32.
            max_total_seq_len_q, max_total_seq_len_kv: of ragged tensors, bounds of the sums of all
                lengths. The first makes the workspace smaller; on GPUs, entries that would exceed
                it count as having no queries.
            use_deterministic_algorithm: the same bits in every run, in no more workspace.
            dBias: a tensor to write, of the shape of bias, HALF, BFLOAT16 or FLOAT (on the CPU
                DOUBLE, too), any strides: the gradient of bias, summed where bias broadcasts,
                always in the same order; 0 where masked or beyond actual lengths.
            dSink_token: a tensor to write, (1, Hq, 1, 1), fp32: the gradient of sink_token, always
                summed in the same order.
            score_mod_bprop: ``function(graph, gradient)``, or ``function(graph, gradient, score)``,
                called after score_mod: returns the gradient of the score from that of what
                score_mod returned, linearly. Without it, score_mod is differentiated symbolically.
            score_mod_gradients: dlattn's own: tensors that score_mod reads, of float types, whose
                gradients are returned after dV, in this order: each of the shape of its tensor and
                unless set of its type and layout, summed where it broadcasts, always in the same
                order; 0 where masked or beyond actual lengths. They are called
                ``<name>::dScoreMod.0`` and so on. Not together with score_mod_bprop.
            paged_attention_k_table, paged_attention_v_table, paged_attention_max_seq_len_kv:
                dlattn's own here: as in the forward call. dK, or dV, is then a container with as
                many pages as k, or v, and strides of its own. Every row of a page that holds
                tokens of a sequence is written, with 0 beyond its length. Other pages are left
                alone, so that a container which a call of ``Graph`` allocates may hold anything
                there. No two sequences may share a page of tokens: its gradient would be that of
                one of them (the reference engine refuses it).

        The other arguments are those of the forward call, and must be given alike; block_mask is
        dlattn's own here.

        Returns:
            ``[dQ, dK, dV]``, and what score_mod_gradients asks for, virtual until
            ``set_output(True)``; shapes and strides that are not set are those of q, k and v. Rows
            beyond the actual lengths are written as 0, of ragged gradients not at all. o, dO,
            stats, dQ, dK and dV may be ragged, too, each with its own offsets.

        Raises:
            InvalidArgumentError: arguments contradict each other, such as dBias without bias (a
                ``RuntimeError``).
            TypeError: an argument has the wrong Python type.
        """
        return self._add("sdpa_backward", arguments(locals()))

    def scaled_dot_product_flash_attention(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Another name for :meth:`sdpa`."""
        return self.sdpa(*args, **kwargs)

    def scaled_dot_product_flash_attention_backward(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Another name for :meth:`sdpa_backward`."""
        return self.sdpa_backward(*args, **kwargs)
