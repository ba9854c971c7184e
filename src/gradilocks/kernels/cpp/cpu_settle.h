// A step decided on a CPU: norm, clip coefficient, skip flag and next scale.
#pragma once
#include <cstdint>

#include "cpu_measure.h"

namespace gradilocks {

// Which rules apply.
struct Rules {
  int order;  // 1, 2, or 0 for the largest magnitude.
  bool clips;
  bool moves;     // Whether the scale moves on.
  bool unscaled;  // Whether the gradients have lost the scale already.
  bool is_double;
  bool overflowed;  // Whether NaN or Inf were found in the gradients before.
};

// What settling reads and moves on, by address.
struct Standing {
  const double* numbers;  // Largest norm, roof, growth, backoff, interval, min, max, hysteresis.
  float* scale;
  int32_t* tracker;
  int32_t* hysteresis;
  int32_t* streak;
  int64_t* steps;
  float* skip;
  float* divisor;
  double* multiplier;
};

// The norm of all tensors as if they were one vector, never overflowing on the way, rounded once to
// float32 as `reference.rounded` does it; NaN before Inf.
double total_norm(const FoundAll& found, int order, bool is_double);

// What bounds a norm: min(1, bound / (norm + 1e-6)), as torch has it; 1 if it is not finite.
double coefficient_for(double norm, double bound, bool broken);

// Decides one step and moves scale, streak and count of steps on; whether it is skipped. `row` is
// filled as `triton_settle` fills it.
bool settle(const FoundAll& found, const Rules& rules, const Standing& standing, bool loss_broken,
            double* row);

// The rule of `DynamicScale`; `numbers`: growth, backoff, interval, min, max, hysteresis.
void advance(const double* numbers, float* scale, int32_t* tracker, int32_t* hysteresis,
             bool skipped);

}  // namespace gradilocks
