// One read of every tensor yields its norm, its largest magnitude, and how many of its elements are
// 0, NaN and Inf. Multiplying and bounding in place.
//
// Powers are added in float64 in an order that depends on nothing but the tensors' sizes: element i
// of a chunk goes to lane i % 16, the lanes are added in their order, then the chunks in theirs. So
// the bits do not depend on the number of threads, nor on the width of the processor's vectors: the
// square of a float32 is exact in float64, and no product is fused with a sum.
//
// The largest magnitude is found among the bits as whole numbers: they are in the same order, NaN
// above Inf above all else, so one comparison finds all three.
//
// Reading on two Zen 4 cores, GB/s of one core in its cache and out of it: 16 lanes in plain arrays
// 30 and 24.5 (AVX2 31 and 24.6, SSE2 13 and 12.6), where memcpy reads and writes 24 out of the cache.
// As vectors of 8 lanes (GCC's vector_size) 28 and 23, 16 lanes 29 and 24, 64 lanes 29 and 23.5; but
// only 2.6 to 9 where AVX2 is all that there is.
#include "cpu_measure.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu_elements.h"

namespace gradilocks {

namespace {

constexpr int LANES = 16;
constexpr double INFINITE = std::numeric_limits<double>::infinity();
// Elements that take some 10 us, as long as waking a thread does.
constexpr int64_t READ_GRAIN = 1 << 16;
constexpr int64_t WRITE_GRAIN = 1 << 15;
// A sum of fewer squares of float64 may have lost some.
constexpr double SMALLEST_SQUARE = 1e-290;

template <class W>
using Bits = std::conditional_t<std::is_same_v<W, double>, uint64_t, uint32_t>;

template <class W>
constexpr Bits<W> MAGNITUDE = ~Bits<W>{0} >> 1;

// The bits of Inf; those of NaN are more.
template <class W>
Bits<W> infinite_bits() {
  return bit_cast<Bits<W>>(std::numeric_limits<W>::infinity());
}

struct Part {
  double sum = 0.0;   // Of the powers, in units of `unit`.
  double unit = 1.0;
  double largest = 0.0;
  int64_t zeros = 0, nan = 0, inf = 0;
};

// Where 16 elements are added up.
template <class W>
struct Lanes {
  double sums[LANES] = {};
  Bits<W> peaks[LANES] = {};
  Bits<W> zeros[LANES] = {};
};

template <int POWER, class W>
inline void add(Lanes<W>& lanes, const W* x) {
  for (int lane = 0; lane < LANES; ++lane) {
    const Bits<W> magnitude = bit_cast<Bits<W>>(x[lane]) & MAGNITUDE<W>;
    const double wide = bit_cast<W>(magnitude);
    if constexpr (POWER == 2) {
      lanes.sums[lane] += wide * wide;
    } else if constexpr (POWER == 1) {
      lanes.sums[lane] += wide;
    }
    lanes.peaks[lane] = magnitude > lanes.peaks[lane] ? magnitude : lanes.peaks[lane];
    lanes.zeros[lane] += magnitude == 0;
  }
}

// Reads 16 elements, writes them back multiplied if that is asked for, and leaves them in `wide`.
template <bool MULTIPLY, class T, class W>
inline void take(T* x, W factor, W* wide) {
  widen(x, wide, LANES);
  if constexpr (MULTIPLY) {
    for (int lane = 0; lane < LANES; ++lane) {
      wide[lane] *= factor;
    }
    narrow(wide, x, LANES);
    if constexpr (!std::is_same_v<T, W>) {
      widen(x, wide, LANES);
    }
  }
}

// Counts NaN and Inf, finds the largest of the others, and adds up what the first read could not.
template <class T>
void read_again(Part& part, const T* x, int64_t length, int order) {
  using W = Work<T>;
  part.largest = 0.0;
  for (int64_t i = 0; i < length; ++i) {
    const double size = std::fabs(static_cast<double>(widened(x[i])));
    part.nan += std::isnan(size);
    part.inf += size == INFINITE;
    part.largest = size > part.largest ? size : part.largest;
  }
  if (std::is_same_v<W, double> && part.nan == 0 && part.inf == 0 && order != 0) {
    part.unit = part.largest > 0.0 ? part.largest : 1.0;
    double sums[LANES] = {};
    for (int64_t i = 0; i < length; ++i) {
      const double size = std::fabs(static_cast<double>(widened(x[i]))) / part.unit;
      sums[i % LANES] += order == 2 ? size * size : size;
    }
    part.sum = 0.0;
    for (double sum : sums) {
      part.sum += sum;
    }
  }
}

template <int POWER, bool MULTIPLY, class T>
Part sweep(T* x, int64_t length, Work<T> factor) {
  using W = Work<T>;
  Lanes<W> lanes;
  W wide[LANES];
  const int64_t full = length / LANES * LANES, rest = length - full;
  for (int64_t i = 0; i < full; i += LANES) {
    take<MULTIPLY>(x + i, factor, wide);
    add<POWER>(lanes, wide);
  }
  if (rest > 0) {
    T tail[LANES] = {};
    std::memcpy(tail, x + full, static_cast<size_t>(rest) * sizeof(T));
    take<MULTIPLY>(tail, factor, wide);
    if constexpr (MULTIPLY) {
      std::memcpy(x + full, tail, static_cast<size_t>(rest) * sizeof(T));
    }
    std::fill(wide + rest, wide + LANES, W{0});  // 0 times an infinite factor is NaN.
    add<POWER>(lanes, wide);
  }
  Part part;
  Bits<W> peak = 0;
  for (int lane = 0; lane < LANES; ++lane) {
    part.sum += lanes.sums[lane];
    peak = std::max(peak, lanes.peaks[lane]);
    part.zeros += static_cast<int64_t>(lanes.zeros[lane]);
  }
  part.zeros -= rest > 0 ? LANES - rest : 0;
  part.largest = bit_cast<W>(peak);
  bool trusted = peak < infinite_bits<W>();
  if constexpr (std::is_same_v<W, double> && POWER != 0) {  // Squares of float64 may vanish.
    const bool vanished = part.sum < static_cast<double>(length) * SMALLEST_SQUARE && peak != 0;
    trusted = trusted && part.sum < INFINITE && !vanished;
  }
  if (!trusted) {
    read_again(part, x, length, POWER);
  }
  return part;
}

template <class T>
Part sweep_as(T* x, int64_t length, int order, double factor) {
  if (factor != 1.0) {
    return sweep<0, true>(x, length, static_cast<Work<T>>(factor));
  }
  const Work<T> one = 1;
  return order == 2   ? sweep<2, false>(x, length, one)
         : order == 1 ? sweep<1, false>(x, length, one)
                      : sweep<0, false>(x, length, one);
}

// One tensor's numbers from those of its chunks, in their order.
Found gathered(const Part* part, const Part* end, int order) {
  Found found = {0.0, 0.0, 0, 0, 0};
  double sum = 0.0;
  bool plain = true;
  for (const Part* each = part; each != end; ++each) {
    found.largest = std::max(found.largest, each->largest);
    found.zeros += each->zeros;
    found.nan += each->nan;
    found.inf += each->inf;
    sum += each->sum;
    plain = plain && each->unit == 1.0;
  }
  if (found.nan > 0 || found.inf > 0) {
    found.norm = found.nan > 0 ? std::numeric_limits<double>::quiet_NaN() : INFINITE;
  } else if (order == 0) {
    found.norm = found.largest;
  } else if (plain && sum < INFINITE) {
    found.norm = order == 2 ? std::sqrt(sum) : sum;
  } else {  // In units of the largest chunk's norm.
    const auto norm = [order](const Part& each) {
      return (order == 2 ? std::sqrt(each.sum) : each.sum) * each.unit;
    };
    double unit = 0.0;
    for (const Part* each = part; each != end; ++each) {
      unit = std::max(unit, norm(*each));
    }
    sum = 0.0;
    for (const Part* each = part; unit < INFINITE && each != end; ++each) {
      const double size = norm(*each) / unit;
      sum += order == 2 ? size * size : size;
    }
    found.norm = unit < INFINITE ? (order == 2 ? std::sqrt(sum) : sum) * unit : unit;
  }
  return found;
}

template <class T>
void multiply_chunk(T* x, int64_t length, Work<T> factor) {
  if constexpr (std::is_same_v<T, Work<T>>) {
    for (int64_t i = 0; i < length; ++i) {
      x[i] *= factor;
    }
  } else {
    Work<T> wide[LANES];
    for (int64_t i = 0; i < length; i += LANES) {
      const int64_t count = std::min<int64_t>(LANES, length - i);
      widen(x + i, wide, count);
      for (int lane = 0; lane < LANES; ++lane) {
        wide[lane] = lane < count ? wide[lane] * factor : wide[lane];
      }
      narrow(wide, x + i, count);
    }
  }
}

template <class T>
void clamp_chunk(T* x, int64_t length, Work<T> bound) {
  for (int64_t i = 0; i < length; ++i) {
    const Work<T> value = widened(x[i]);
    round_to(x[i], value > bound ? bound : value < -bound ? -bound : value);
  }
}

double largest_of(int64_t dtype) {
  switch (dtype) {
    case FLOAT16:
      return 65504.0;
    case BFLOAT16:
      return 3.3895313892515355e38;
    case FLOAT64:
      return std::numeric_limits<double>::max();
    default:
      return std::numeric_limits<float>::max();
  }
}

}  // namespace

FoundAll measure(const Chunks& tensors, const int64_t* pointers, int order, double factor) {
  std::vector<Part> parts(tensors.chunks.size());
  tensors.run(factor == 1.0 ? READ_GRAIN : WRITE_GRAIN, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const Chunk& chunk = tensors.chunks[i];
      with_type(static_cast<int>(tensors.codes[chunk.tensor]), [&](auto* type) {
        auto* x = reinterpret_cast<decltype(type)>(pointers[chunk.tensor]) + chunk.start;
        parts[i] = sweep_as(x, chunk.length, order, factor);
      });
    }
  });
  FoundAll found(tensors.codes.size());
  for (size_t tensor = 0; tensor < found.size(); ++tensor) {
    const Part* first = parts.data();
    found[tensor] = gathered(first + tensors.begin[tensor], first + tensors.begin[tensor + 1], order);
  }
  return found;
}

void multiply(const Chunks& tensors, const int64_t* pointers, const double* factors, bool each) {
  tensors.run(WRITE_GRAIN, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const Chunk& chunk = tensors.chunks[i];
      const double factor = factors[each ? chunk.tensor : 0];
      if (factor == 1.0) {
        continue;
      }
      with_type(static_cast<int>(tensors.codes[chunk.tensor]), [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        T* x = reinterpret_cast<T*>(pointers[chunk.tensor]) + chunk.start;
        multiply_chunk(x, chunk.length, static_cast<Work<T>>(factor));
      });
    }
  });
}

void clamp(const Chunks& tensors, const int64_t* pointers, double bound) {
  tensors.run(WRITE_GRAIN, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const Chunk& chunk = tensors.chunks[i];
      const int64_t dtype = tensors.codes[chunk.tensor];
      if (!(bound <= largest_of(dtype))) {
        continue;
      }
      with_type(static_cast<int>(dtype), [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        T* x = reinterpret_cast<T*>(pointers[chunk.tensor]) + chunk.start;
        clamp_chunk(x, chunk.length, static_cast<Work<T>>(bound));
      });
    }
  });
}

}  // namespace gradilocks
