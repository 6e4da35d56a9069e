// What probabilities are made anew of, after a forward: the log-sum-exps that it stored.
#pragma once

#include "base/math.cuh"

namespace dlattn {

// In units of log2, to be subtracted from exponents of scores. `raised` makes probabilities 2^raised as large.
DLATTN_DEVICE float log2_of_sum(float log_sum_exp, float raised = 0.f) {
  // A row without keys has -infinity: +infinity makes its probabilities exactly zero.
  if (log_sum_exp == -infinity()) return infinity();
  const float log2 = fmaf(log_sum_exp, log2_e, -raised);
  // Of huge scores, as of keys that a bias of -1e9 masks, probabilities could be infinite, which in fp16 2^4 is in
  // Hopper's backward: five roundings, of scores, their factor, products, statistics and here, are 2^-24 of the
  // number each. What is below 1e7 stays as it is.
  return log2 + fmaxf(fmaf(fabsf(log2), 5 * 0x1p-24f, -3.f), 0.f);
}

}  // namespace dlattn
