// What every forward does with its rows before it stores them.
#pragma once

#include "attn/params.cuh"
#include "attn/problem.cuh"
#include "attn/softmax.cuh"
#include "ptx/convert.cuh"

namespace dlattn {

// Divides the output by the sums and stores the statistics of a warp's rows. Rows beyond the actual
// length get zeros and a log-sum-exp of -infinity.
template <class Problem, int m_tiles, int v_tiles>
DLATTN_DEVICE void finish_rows(const Params& p, int batch, int head, int first_query, int length_q,
                               OnlineSoftmax<m_tiles>& softmax,
                               Accumulator<m_tiles, v_tiles>& output) {
  using Output = Accumulator<m_tiles, v_tiles>;
  softmax.finish(output);
  const float factor = Problem::Score::factor(ScoreValues(p));
#pragma unroll
  for (int r = 0; r < 2 * m_tiles; ++r) {
    const int query = first_query + Output::row(r / 2, r % 2 * 2);
    const bool padded = query >= length_q;
    if constexpr (Problem::stats) {
      using Stats = typename Problem::Stats;
      if (threadIdx.x % 4 == 0 && query < p.seq_q) {
        *p.stats.rows<Stats>(batch, head, query) =
            from_float<Stats>(padded ? -infinity() : softmax.log_sum_exp(r, factor));
      }
    }
    if (padded) {
#pragma unroll
      for (int n = 0; n < v_tiles; ++n) {
        output.at[r / 2][n][r % 2 * 2] = 0.f;
        output.at[r / 2][n][r % 2 * 2 + 1] = 0.f;
      }
    }
  }
}

// Rows that attend to nothing: zeros, and a log-sum-exp of -infinity. By some threads side by side;
// rows are 16-byte aligned.
template <class Problem>
DLATTN_DEVICE void store_empty_rows(const Params& p, int batch, int head, int first, int rows,
                                    int thread, int threads) {
  using T = typename Problem::Element;
  constexpr int units = Problem::head_dim_v / 8;  // of 16 bytes
  for (int unit = thread; unit < rows * units; unit += threads) {
    T* row = p.o.rows<T>(batch, head, first + unit / units);
    reinterpret_cast<uint4*>(row)[unit % units] = uint4{0, 0, 0, 0};
  }
  if constexpr (Problem::stats) {
    using Stats = typename Problem::Stats;
    for (int row = thread; row < rows; row += threads) {
      *p.stats.rows<Stats>(batch, head, first + row) = from_float<Stats>(-infinity());
    }
  }
}

}  // namespace dlattn
