// Statistics of tensors in one read; multiplication and clamping in place.
//
// Powers are added in float64, in an order that depends only on the size of the tensor: element i of a chunk is added
// to lane i % 16, then the lanes in order, then the chunks in order. The bits depend neither on the number of threads
// nor on the width of vectors: the square of a float32 is exact in float64, and no product is fused with a sum. No sum
// of squares of float32 overflows or vanishes in float64.
//
// The largest magnitude is found among bit patterns as integers, which are ordered like the numbers, Inf above them and
// NaN above Inf: one comparison finds all three.
//
// Elements are prefetched 8 KiB ahead, because the processor's own prefetching ends with each page of 4 KiB: one Zen 5
// core reads 34 GB/s from memory instead of 29, and 56 GB/s from its caches (AVX2 36, SSE2 15).
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "parallel.h"

namespace gradilocks {

OpenMP openmp = {nullptr, nullptr, nullptr};

namespace {

constexpr int LANES = 16;
constexpr int64_t READ_CHUNK = 1 << 15, WRITE_CHUNK = 1 << 12;
// Elements that take about 10 us, as long as waking a thread.
constexpr int64_t READ_GRAIN = 1 << 16, WRITE_GRAIN = 1 << 15;
constexpr int64_t PREFETCH = 1 << 11;  // Elements.
constexpr int64_t BLOCK = 512;         // Elements that stay in the L1 cache: 2 KiB.
constexpr int32_t INFINITY_BITS = 0x7f800000;

// The codes of `cpu.py`.
enum Operation : int { MULTIPLY = 0, CLAMP = 1, UNSCALE = 2 };

template <class To, class From>
To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

struct Lanes {
  double powers[LANES];    // Sums of powers.
  int32_t largest[LANES];  // Bit patterns.
  int32_t zeros[LANES];
};

struct Statistics {
  double sum = 0.0;  // Of the p-th powers.
  double largest = 0.0;
  int64_t zeros = 0, nan = 0, inf = 0;

  void operator+=(const Statistics& other) {
    sum += other.sum;
    largest = other.largest > largest ? other.largest : largest;
    zeros += other.zeros;
    nan += other.nan;
    inf += other.inf;
  }
};

// `count` is a multiple of LANES. The compiler keeps a local copy of the lanes in registers: in memory they take four
// times as long.
template <int POWER>
VECTORIZED void add_elements(Lanes& lanes, const float* x, int64_t count) {
  Lanes sums = lanes;
  for (int64_t i = 0; i < count; i += LANES) {
    __builtin_prefetch(x + i + PREFETCH);
    for (int lane = 0; lane < LANES; ++lane) {
      const int32_t magnitude = bit_cast<int32_t>(x[i + lane]) & 0x7fffffff;
      if constexpr (POWER != 0) {
        const double value = static_cast<double>(x[i + lane]);
        sums.powers[lane] += POWER == 1 ? fabs(value) : value * value;
      }
      sums.largest[lane] = sums.largest[lane] < magnitude ? magnitude : sums.largest[lane];
      sums.zeros[lane] += magnitude == 0;
    }
  }
  lanes = sums;
}

void count_nonfinite(Statistics& statistics, const float* x, int64_t count) {
  statistics.largest = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const double magnitude = fabs(static_cast<double>(x[i]));
    statistics.nan += magnitude != magnitude;
    statistics.inf += magnitude == INFINITY;
    statistics.largest = magnitude > statistics.largest ? magnitude : statistics.largest;
  }
}

template <int POWER>
Statistics measure_chunk(const float* x, int64_t length) {
  Statistics statistics;
  Lanes lanes = {};
  const int64_t full = length / LANES * LANES;
  add_elements<POWER>(lanes, x, full);
  if (full < length) {
    float tail[LANES] = {};
    memcpy(tail, x + full, static_cast<size_t>(length - full) * sizeof(float));
    add_elements<POWER>(lanes, tail, LANES);
    statistics.zeros -= full + LANES - length;
  }
  int32_t largest = 0;
  for (int lane = 0; lane < LANES; ++lane) {
    statistics.sum += lanes.powers[lane];
    statistics.zeros += lanes.zeros[lane];
    largest = std::max(largest, lanes.largest[lane]);
  }
  statistics.largest = static_cast<double>(bit_cast<float>(largest));
  if (largest >= INFINITY_BITS) {
    count_nonfinite(statistics, x, length);
  }
  return statistics;
}

VECTORIZED int32_t largest_bits(const float* x, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t magnitude = bit_cast<int32_t>(x[i]) & 0x7fffffff;
    largest = largest < magnitude ? magnitude : largest;
  }
  return largest;
}

VECTORIZED void multiply(float* x, float factor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    x[i] *= factor;
  }
}

VECTORIZED void clamp(float* x, float bound, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    x[i] = x[i] > bound ? bound : x[i] < -bound ? -bound : x[i];
  }
}

// Changes elements block by block. Returns true if a result is NaN or Inf and was looked for.
bool change(float* x, int64_t length, int operation, float number) {
  int32_t largest = 0;
  for (int64_t from = 0; from < length; from += BLOCK) {
    const int64_t count = std::min(BLOCK, length - from);
    if (operation == CLAMP) {
      clamp(x + from, number, count);
    } else if (number != 1.0f) {
      multiply(x + from, number, count);
    }
    if (operation == UNSCALE) {
      largest = std::max(largest, largest_bits(x + from, count));
    }
  }
  return largest >= INFINITY_BITS;
}

}  // namespace
}  // namespace gradilocks

using namespace gradilocks;

EXPORT void gl_set_parallel(void* parallel, void* thread_number, void* thread_count) {
  openmp = {reinterpret_cast<decltype(OpenMP::parallel)>(parallel),
            reinterpret_cast<decltype(OpenMP::thread_number)>(thread_number),
            reinterpret_cast<decltype(OpenMP::thread_count)>(thread_count)};
}

// order: 1, 2, or 0 for inf. out: [5][n], the rows of STATISTICS, then norm, largest magnitude and number of NaN and of
// Inf of all tensors together. Returns -1 if memory is exhausted, else 0.
EXPORT int gl_measure(const int64_t* addresses, const int64_t* sizes, int64_t n, int order, double* out, int threads) {
  const Tensors tensors{addresses, sizes, n, threads};
  int64_t chunks = 0;
  for (int64_t i = 0; i < n; ++i) {
    chunks += divided_up(tensors.size(i), READ_CHUNK);
  }
  auto* parts = static_cast<Statistics*>(malloc(static_cast<size_t>(chunks + 1) * sizeof(Statistics)));
  if (parts == nullptr) {
    return -1;
  }
  for_each_piece<READ_CHUNK>(tensors, READ_GRAIN, [&](const Piece& piece) {
    const float* x = tensors.elements(piece.tensor);
    for (int64_t from = piece.begin, chunk = piece.chunk; from < piece.end; from += READ_CHUNK, ++chunk) {
      const int64_t count = std::min(piece.end - from, READ_CHUNK);
      parts[chunk] = order == 2   ? measure_chunk<2>(x + from, count)
                     : order == 1 ? measure_chunk<1>(x + from, count)
                                  : measure_chunk<0>(x + from, count);
    }
  });
  const auto norm = [order](const Statistics& all) {
    const double root = order == 0 ? all.largest : order == 1 ? all.sum : sqrt(all.sum);
    return all.nan > 0 ? NAN : all.inf > 0 ? INFINITY : root;
  };
  const Statistics* part = parts;
  Statistics total;
  for (int64_t i = 0; i < n; ++i) {
    Statistics tensor;
    for (int64_t left = tensors.size(i); left > 0; left -= READ_CHUNK, ++part) {
      tensor += *part;
    }
    total += tensor;
    out[i] = norm(tensor);
    out[n + i] = tensor.largest;
    out[2 * n + i] = static_cast<double>(tensor.zeros);
    out[3 * n + i] = static_cast<double>(tensor.nan);
    out[4 * n + i] = static_cast<double>(tensor.inf);
  }
  out[5 * n] = norm(total);
  out[5 * n + 1] = total.largest;
  out[5 * n + 2] = static_cast<double>(total.nan);
  out[5 * n + 3] = static_cast<double>(total.inf);
  free(parts);
  return 0;
}

// numbers: one factor or bound, or with per_tensor one for each tensor. A factor of 1 and a bound above the largest
// float32 write nothing. Returns 1 if UNSCALE leaves an element that is NaN or Inf, else 0.
EXPORT int gl_change(const int64_t* addresses, const int64_t* sizes, int64_t n, int operation, const double* numbers,
                     int per_tensor, int threads) {
  int nonfinite = 0;
  const Tensors tensors{addresses, sizes, n, threads};
  for_each_piece<WRITE_CHUNK>(tensors, WRITE_GRAIN, [&](const Piece& piece) {
    const double number = numbers[per_tensor ? piece.tensor : 0];
    if (operation == CLAMP ? number > FLT_MAX : operation == MULTIPLY && number == 1.0) {
      return;
    }
    float* x = tensors.elements(piece.tensor) + piece.begin;
    if (change(x, piece.end - piece.begin, operation, static_cast<float>(number))) {
      __atomic_store_n(&nonfinite, 1, __ATOMIC_RELAXED);
    }
  });
  return nonfinite;
}
