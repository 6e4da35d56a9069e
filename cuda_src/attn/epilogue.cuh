// What every forward does with its rows before it stores them.
#pragma once

#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/softmax.cuh"
#include "ptx/convert.cuh"

namespace dlattn {

// What the softmax knows of a row, in natural units; of one that attends to nothing, as it begins.
struct RowStats {
  float log_sum_exp = -infinity();
  float largest = -infinity();  // score
  float sum = 0.f;              // of exponentials relative to the largest

  RowStats() = default;
  template <class Softmax>
  DLATTN_DEVICE RowStats(const Softmax& softmax, int r, float factor)
      : log_sum_exp(softmax.log_sum_exp(r, factor)),
        largest(softmax.largest_score(r, factor)),
        sum(softmax.sum_of(r)) {}
  // Of a row that attends to its sink alone.
  DLATTN_DEVICE explicit RowStats(float sink)
      : log_sum_exp(sink), largest(sink), sum(sink == -infinity() ? 0.f : 1.f) {}

  // Padded: the row lies beyond the actual length.
  template <class Problem>
  DLATTN_DEVICE void store(const Params& p, int batch, int head, int query, bool padded) const {
    using Stats = typename Problem::Stats;
    if constexpr (Problem::stats) {
      float value = log_sum_exp;
      if constexpr (Problem::flash_stats) value = value == -infinity() ? infinity() : value;
      store_number<Problem, Stats>(p.stats, value, batch, head, query, padded);
    }
    if constexpr (Problem::score_max) {
      store_number<Problem, float>(p.score_max, largest, batch, head, query, padded);
    }
    if constexpr (Problem::score_sum_exp) {
      store_number<Problem, float>(p.score_sum_exp, sum, batch, head, query, padded);
    }
  }

 private:
  template <class Problem, class T>
  static DLATTN_DEVICE void store_number(const TensorRef& rows, float value, int batch, int head,
                                         int query, bool padded) {
    if (padded && rows.is_ragged<Problem::ragged>()) return;
    *rows.rows<T, Problem::ragged>(batch, head, query) = from_float<T>(value);
  }
};

template <class Problem>
inline constexpr bool wants_row_stats = Problem::stats || wants_maxima<Problem>;

// Whether rows beyond the actual length are stored at all: not if every output is ragged.
template <class Problem>
DLATTN_DEVICE bool stores_padding(const Params& p) {
  const auto is_padded = [](bool wanted, const TensorRef& rows) {
    return wanted && !rows.is_ragged<Problem::ragged>();
  };
  return is_padded(true, p.o) || is_padded(Problem::stats, p.stats) ||
         is_padded(Problem::score_max, p.score_max) ||
         is_padded(Problem::score_sum_exp, p.score_sum_exp);
}

// Completes the sums, divides the output by them, and stores the statistics of a warp's rows. Rows
// beyond the actual length get zeros and the statistics of nothing.
template <class Problem, class Softmax, int m_tiles, int v_tiles>
DLATTN_DEVICE void finish_rows(const Params& p, int batch, int head, int first_query, int length_q,
                               Softmax& softmax, Accumulator<m_tiles, v_tiles>& output) {
  using Output = Accumulator<m_tiles, v_tiles>;
  if constexpr (Problem::sink) {
    float shrink[Softmax::rows];
    softmax.add_sink(p.sink(head), shrink);
    softmax.rescale(output, shrink);
  }
  softmax.finish(output, dropout_scale<Problem>(p));
  const float factor = Problem::Score::factor(ScoreValues(p));
  const auto query_of = [&](int r) { return first_query + Output::row(r / 2, r % 2 * 2); };
  if constexpr (wants_row_stats<Problem>) {
#pragma unroll
    for (int first = 0; first < Softmax::rows; first += 4) {
      const int r = first + threadIdx.x % 4;  // of four rows, each lane that shares them takes one
      const int query = query_of(r);
      if (r < Softmax::rows && query < p.seq_q) {
        const bool padded = query >= length_q;
        const RowStats row = padded ? RowStats() : RowStats(softmax, r, factor);
        row.store<Problem>(p, batch, head, query, padded);
      }
    }
  }
  if (first_query + 16 * m_tiles <= length_q) return;
#pragma unroll
  for (int r = 0; r < Softmax::rows; ++r) {
    if (query_of(r) >= length_q) {
#pragma unroll
      for (int n = 0; n < v_tiles; ++n) {
        output.at[r / 2][n][r % 2 * 2] = 0.f;
        output.at[r / 2][n][r % 2 * 2 + 1] = 0.f;
      }
    }
  }
}

// The statistics of rows that attend to nothing but a sink. A warp's.
template <class Problem>
DLATTN_DEVICE void store_empty_stats(const Params& p, int batch, int head, Interval rows,
                                     int length_q) {
  if constexpr (wants_row_stats<Problem>) {
    // A loader has no registers for more than one statistic of several rows at a time.
    constexpr int rows_at_a_time = wants_maxima<Problem> ? 1 : 4;
#pragma unroll(rows_at_a_time)
    for (int row = rows.first + threadIdx.x % 32; row < rows.last; row += 32) {
      RowStats stats;
      if constexpr (Problem::sink) {
        if (row < length_q) stats = RowStats(p.sink(head));
      }
      stats.store<Problem>(p, batch, head, row, row >= length_q);
    }
  }
}

}  // namespace dlattn
