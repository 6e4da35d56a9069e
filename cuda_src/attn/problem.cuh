// What a generated source says about its problem (dlattn/plans/source.py writes it):
//
//   struct Problem {
//     using Element = bf16;                               // q, k, v, o and their gradients
//     static constexpr int head_dim_qk = 128, head_dim_v = 128;
//     using Score = Edits<PositiveScale>;                 // attn/score.cuh
//     using Mask = Masks<Padding, Band<false, true>>;     // attn/mask.cuh
//     static constexpr bool stats = true;                 // the forward writes them
//     using Stats = float;
//     static constexpr bool score_max = false, score_sum_exp = false;  // the forward writes them
//     static constexpr bool flash_stats = false;          // +inf where nothing is attended
//     static constexpr bool sink = false;                 // the softmax has one; dSink is wanted
//     using Dropout = NoDropout;                          // attn/dropout.cuh
//     static constexpr bool paged_k = false, paged_v = false;  // rows of k and dK, of v and dV
//     static constexpr bool ragged = false;               // some tensor is
//     static constexpr int access_bytes = 16;             // or 2: rows that are not 16-byte aligned
//     static constexpr int shared_memory = 104448;        // what the launch asks for
//     using ElementMask = ScoreMask;                      // attn/score_mask.cuh; if a function masks
//   };
#pragma once

#include "attn/dropout.cuh"
#include "attn/mask.cuh"
#include "attn/score.cuh"

namespace dlattn {

// Row maxima are results, and not only what exponents are relative to.
template <class Problem>
inline constexpr bool wants_maxima = Problem::score_max || Problem::score_sum_exp;

// What dK and dQ are multiplied by once.
template <class Problem>
DLATTN_DEVICE float gradient_factor(const ScoreValues& values) {
  return Problem::Score::gradient_factor(values) * dropout_scale<Problem>(values.p);
}

}  // namespace dlattn
