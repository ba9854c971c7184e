// Element types of tensors, and their conversion to and from float32, the type of all arithmetic.
//
// Results are rounded once, to nearest even, as torch does. The conversions are integer arithmetic that compilers
// vectorize, so they need no F16C and do not depend on flushing of subnormal numbers.
#pragma once
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <type_traits>

namespace gradilocks {

// The codes of `cpu.DTYPE_CODES`.
enum Dtype : int { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Compiled for three instruction sets, chosen when the library is loaded; results have the same bits. A function so
// marked is a loop over many elements, because calls to it are not inlined.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((noinline, target_clones("avx512f", "avx2", "default")))
#else
#define VECTORIZED __attribute__((noinline))
#endif

// Marks a function that Python calls.
#define EXPORT extern "C" __attribute__((visibility("default")))

// Elements that are processed at a time where a loop needs a buffer: 2 KiB.
constexpr int64_t BLOCK = 512;

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

inline float widened(float x) { return x; }
inline float widened(BFloat16 x) { return bit_cast<float>(uint32_t{x.bits} << 16); }
inline float widened(Half x) {
  const uint32_t magnitude = x.bits & 0x7fffu, sign = (x.bits & 0x8000u) << 16;
  // A subnormal number is a small multiple of 2^-24.
  const float integer = static_cast<float>(static_cast<int32_t>(magnitude));
  const uint32_t subnormal = bit_cast<uint32_t>(integer * 0x1p-24f);
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t nonfinite = (magnitude << 13) | 0x7f800000u;
  const uint32_t large = magnitude >= 0x7c00u ? nonfinite : normal;
  return bit_cast<float>(sign | (magnitude < 0x400u ? subnormal : large));
}

inline void round_to(float& to, float x) { to = x; }
inline void round_to(BFloat16& to, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to.bits = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded);
}
inline void round_to(Half& to, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  // Between 0.5 and 1 float32 has steps of 2^-24, as float16 has below its smallest normal number.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and above round to Inf.
  half = magnitude > 0x7f800000u ? nan : half;
  to.bits = static_cast<uint16_t>(((bits >> 16) & 0x8000u) | half);
}

template <class T>
VECTORIZED void widen(const T* __restrict from, float* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = widened(from[i]);
  }
}

template <class T>
VECTORIZED void narrow(const float* __restrict from, T* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    round_to(to[i], from[i]);
  }
}

// Calls `work` with a null pointer to the element type of `dtype`.
template <class F>
inline void with_type(int dtype, const F& work) {
  switch (dtype) {
    case FLOAT16: return work(static_cast<Half*>(nullptr));
    case BFLOAT16: return work(static_cast<BFloat16*>(nullptr));
    default: return work(static_cast<float*>(nullptr));
  }
}

}  // namespace gradilocks
