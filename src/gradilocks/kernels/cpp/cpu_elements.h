// The dtypes of tensors' elements, and what widens them for arithmetic and rounds them back.
//
// Half precision is widened to float32 and rounded once, to the nearest, ties to even, as torch
// does it; the fall-backs without F16C compute the same bits, and neither depends on whether the
// processor flushes subnormal numbers.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace gradilocks {

// As `native_backend.CODES` has them.
enum Dtype : int { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, FLOAT64 = 3 };

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// What a dtype is computed in: float32, or float64 for float64.
template <class T>
using Work = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float widened(float x) { return x; }
inline double widened(double x) { return x; }
inline float widened(BFloat16 x) { return bit_cast<float>(uint32_t{x.bits} << 16); }
inline float widened(Half x) {
  const uint32_t magnitude = x.bits & 0x7fffu, sign = (x.bits & 0x8000u) << 16;
  // A subnormal one is a small whole number of 2^-24.
  const float whole = static_cast<float>(static_cast<int32_t>(magnitude));
  const uint32_t small = bit_cast<uint32_t>(whole * 0x1p-24f);
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t broken = (magnitude << 13) | 0x7f800000u;
  const uint32_t large = magnitude >= 0x7c00u ? broken : normal;
  return bit_cast<float>(sign | (magnitude < 0x400u ? small : large));
}

inline void round_to(float& to, float x) { to = x; }
inline void round_to(float& to, double x) { to = static_cast<float>(x); }
inline void round_to(double& to, double x) { to = x; }
inline void round_to(BFloat16& to, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to.bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
}
inline void round_to(Half& to, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  // Beside 0.5 float32 counts in 2^-24, as the subnormal numbers of float16 do.
  const uint32_t small = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  uint32_t half = magnitude < 0x38800000u ? small : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // From 65520 on.
  half = magnitude > 0x7f800000u ? nan : half;
  to.bits = static_cast<uint16_t>(((bits >> 16) & 0x8000u) | half);
}

template <class T, class W>
inline void widen(const T* from, W* to, int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, Half> && std::is_same_v<W, float>) {
    for (; i + 8 <= count; i += 8) {
      __m128i eight;
      std::memcpy(&eight, from + i, sizeof(eight));
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(eight));
    }
  }
#endif
  for (; i < count; ++i) {
    to[i] = static_cast<W>(widened(from[i]));
  }
}

template <class T, class W>
inline void narrow(const W* from, T* to, int64_t count) {
  int64_t i = 0;
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, Half> && std::is_same_v<W, float>) {
    for (; i + 8 <= count; i += 8) {
      const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
      std::memcpy(to + i, &eight, sizeof(eight));
    }
  }
#endif
  for (; i < count; ++i) {
    round_to(to[i], static_cast<Work<T>>(from[i]));
  }
}

// Calls `work` with a null pointer to the type that `dtype` names.
template <class F>
inline void with_type(int dtype, F&& work) {
  switch (dtype) {
    case FLOAT16:
      return work(static_cast<Half*>(nullptr));
    case BFLOAT16:
      return work(static_cast<BFloat16*>(nullptr));
    case FLOAT64:
      return work(static_cast<double*>(nullptr));
    default:
      return work(static_cast<float*>(nullptr));
  }
}

}  // namespace gradilocks
