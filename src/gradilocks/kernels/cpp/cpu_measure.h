// Measures and changes tensors on a CPU.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu_chunks.h"

namespace gradilocks {

// What is in one tensor, as `kernel_results` has it.
struct Found {
  double norm, largest;
  int64_t zeros, nan, inf;
};

// What `measure` finds, tensor by tensor.
using FoundAll = std::vector<Found>;

// `order`: 1, 2, or 0 for the largest magnitude. A `factor` other than 1 multiplies first, and then
// `order` must be 0.
FoundAll measure(const Chunks& tensors, const int64_t* pointers, int order, double factor = 1.0);

// x = x * factor; reads nothing if that is 1. With `each` a factor for every tensor.
void multiply(const Chunks& tensors, const int64_t* pointers, const double* factors, bool each);

// x = min(max(x, -bound), bound); NaN stays, and a bound that the dtype cannot hold bounds nothing.
void clamp(const Chunks& tensors, const int64_t* pointers, double bound);

}  // namespace gradilocks
