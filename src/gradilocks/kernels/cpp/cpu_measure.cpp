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
// A block of 512 elements is read twice, the second time from the first cache: once for the bits,
// once for the sums. One Zen 4 core reads so 6.5 G float32 a second from its cache (26 GB/s; with
// AVX2 27, with SSE2 10), where memory gives it 24; without sums 16 G. In one loop for both, with
// all lanes in registers, 7 G, but 4.3 G without sums, and of float64 1.6 G where two loops take
// 5.7 G; with the lanes in memory 1.7 G. As GCC's vectors of 8 lanes, 1 to 8 of them, 7 G with
// AVX-512 but 0.7 to 2.3 G with AVX2.
#include "cpu_measure.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu_elements.h"

namespace gradilocks {

namespace {

constexpr int LANES = 16;
// Elements that are widened, multiplied and looked at in turn: 1 to 4 KiB of them.
constexpr int64_t BLOCK = 512;
constexpr double INFINITE = std::numeric_limits<double>::infinity();
// Elements that take some 10 us, as long as waking a thread does.
constexpr int64_t READ_GRAIN = 1 << 16;
constexpr int64_t WRITE_GRAIN = 1 << 15;
// A sum of fewer squares of float64 may have lost some.
constexpr double SMALLEST_SQUARE = 1e-290;

template <class W>
using Bits = std::conditional_t<std::is_same_v<W, double>, int64_t, int32_t>;

template <class W>
constexpr Bits<W> MAGNITUDE = std::numeric_limits<Bits<W>>::max();

// The bits of Inf; those of NaN are more.
template <class W>
Bits<W> infinite_bits() {
  return bit_cast<Bits<W>>(std::numeric_limits<W>::infinity());
}

struct Part {
  double sum = 0.0;  // Of the powers, in units of `unit`.
  double unit = 1.0;
  double largest = 0.0;
  int64_t zeros = 0, nan = 0, inf = 0;
};

// Adds the powers of runs of 16 elements, a lane each. The lanes are in an array of this function
// alone, so that the compiler keeps them in registers: in memory they take four times as long.
template <int POWER, class W>
__attribute__((noinline)) void add(double* lanes, const W* x, int64_t count) {
  double sums[LANES];
  std::copy(lanes, lanes + LANES, sums);
  for (int64_t i = 0; i < count; i += LANES) {
    for (int lane = 0; lane < LANES; ++lane) {
      const double wide = POWER == 1 ? std::fabs(x[i + lane]) : x[i + lane];
      sums[lane] += POWER == 1 ? wide : wide * wide;
    }
  }
  std::copy(sums, sums + LANES, lanes);
}

// Finds the largest bits and counts the zeros, which need no order.
template <class W>
__attribute__((noinline)) void look(Bits<W>& peak, int64_t& zeros, const W* x, int64_t count) {
  Bits<W> largest = peak, found = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Bits<W> magnitude = bit_cast<Bits<W>>(x[i]) & MAGNITUDE<W>;
    largest = std::max(largest, magnitude);
    found += magnitude == 0;
  }
  peak = largest;
  zeros += found;
}

// Multiplies elements in place if that is asked for; returns them widened, in `wide` unless they
// are wide already. Both fit into the first cache.
template <bool MULTIPLY, class T, class W>
inline const W* take(T* x, W factor, W* wide, int64_t count) {
  if constexpr (std::is_same_v<T, W>) {
    for (int64_t i = 0; MULTIPLY && i < count; ++i) {
      x[i] *= factor;
    }
    return x;
  } else {
    widen(x, wide, count);
    if constexpr (MULTIPLY) {
      for (int64_t i = 0; i < count; ++i) {
        wide[i] *= factor;
      }
      narrow(wide, x, count);
      widen(x, wide, count);
    }
    return wide;
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
  Part part;
  double lanes[LANES] = {};
  Bits<W> peak = 0;
  W wide[BLOCK];
  for (int64_t from = 0; from < length; from += BLOCK) {
    const int64_t count = std::min(BLOCK, length - from), full = count / LANES * LANES;
    const W* values = take<MULTIPLY>(x + from, factor, wide, count);
    look(peak, part.zeros, values, count);
    if constexpr (POWER != 0) {
      add<POWER>(lanes, values, full);
      if (full < count) {
        W tail[LANES] = {};
        std::copy(values + full, values + count, tail);
        add<POWER>(lanes, tail, LANES);
      }
    }
  }
  for (double sum : lanes) {
    part.sum += sum;
  }
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
void multiply_piece(T* x, int64_t length, Work<T> factor) {
  if constexpr (std::is_same_v<T, Work<T>>) {
    for (int64_t i = 0; i < length; ++i) {
      x[i] *= factor;
    }
  } else {
    Work<T> wide[BLOCK];
    for (int64_t from = 0; from < length; from += BLOCK) {
      const int64_t count = std::min(BLOCK, length - from);
      widen(x + from, wide, count);
      for (int64_t i = 0; i < count; ++i) {
        wide[i] *= factor;
      }
      narrow(wide, x + from, count);
    }
  }
}

template <class T>
void clamp_piece(T* x, int64_t length, Work<T> bound) {
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
    const Part* first = parts.data() + tensors.begin[tensor];
    found[tensor] = gathered(first, parts.data() + tensors.begin[tensor + 1], order);
  }
  return found;
}

void multiply(const Chunks& tensors, const int64_t* pointers, const double* factors, bool each) {
  tensors.run_pieces(WRITE_GRAIN, [&](const Chunk& piece) {
    const double factor = factors[each ? piece.tensor : 0];
    if (factor == 1.0) {
      return;
    }
    with_type(static_cast<int>(tensors.codes[piece.tensor]), [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      T* x = reinterpret_cast<T*>(pointers[piece.tensor]) + piece.start;
      multiply_piece(x, piece.length, static_cast<Work<T>>(factor));
    });
  });
}

void clamp(const Chunks& tensors, const int64_t* pointers, double bound) {
  tensors.run_pieces(WRITE_GRAIN, [&](const Chunk& piece) {
    const int64_t dtype = tensors.codes[piece.tensor];
    if (!(bound <= largest_of(dtype))) {
      return;
    }
    with_type(static_cast<int>(dtype), [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      T* x = reinterpret_cast<T*>(pointers[piece.tensor]) + piece.start;
      clamp_piece(x, piece.length, static_cast<Work<T>>(bound));
    });
  });
}

}  // namespace gradilocks
