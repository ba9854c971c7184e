// The steps of `gradilocks.optim` on a CPU.
#pragma once
#include <cstdint>

#include "cpu_chunks.h"

namespace gradilocks {

enum Optimizer : int { ADAM = 1, SGD = 2 };

// What the elements of one tensor share, and what that is worked out from, all by address.
struct RateTables {
  const int64_t* own;      // Of each tensor, where its step (Adam) or its fresh flag (SGD) is.
  const int32_t* groups;   // The group of each tensor.
  const double* settings;  // 8 numbers a group.
  double* rates;           // 8 numbers a tensor, to be filled.
};

// Counts the step of each tensor and works out its rates, in float64.
void work_out_rates(Optimizer optimizer, const RateTables& tables, int64_t count);

// Steps every tensor. `places`: the addresses of parameters and state, row by row; `divisor`: what
// the gradients are divided by, or null.
void step(Optimizer optimizer, const Chunks& tensors, const int64_t* places,
          const int64_t* gradients, const double* rates, const float* divisor);

}  // namespace gradilocks
