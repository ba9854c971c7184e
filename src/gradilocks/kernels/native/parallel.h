// Division of tensors among the threads of torch's OpenMP pool.
#pragma once
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <type_traits>

namespace gradilocks {

// Compiled for three instruction sets, chosen when the library is loaded; results have the same bits. A function so
// marked is a loop over many elements, because calls to it are not inlined.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((noinline, target_clones("avx512f", "avx2", "default")))
#else
#define VECTORIZED __attribute__((noinline))
#endif

// Marks a function that Python calls.
#define EXPORT extern "C" __attribute__((visibility("default")))

// The functions of the OpenMP library that torch has loaded, which Python looks up: linking a second OpenMP library
// would double the threads. Null: everything runs on the calling thread.
struct OpenMP {
  void (*parallel)(void (*work)(void*), void* data, unsigned threads, unsigned flags);
  int (*thread_number)();
  int (*thread_count)();
};
extern OpenMP openmp;

// float32 tensors by address. Those with address 0 are left out.
struct Tensors {
  const int64_t* addresses;
  const int64_t* sizes;
  int64_t count;
  int threads;  // Number that torch is set to use.

  float* elements(int64_t tensor) const { return reinterpret_cast<float*>(addresses[tensor]); }
  int64_t size(int64_t tensor) const { return addresses[tensor] == 0 ? 0 : sizes[tensor]; }
};

// A range of one tensor's elements, beginning at a multiple of the chunk size.
struct Piece {
  int64_t tensor, begin, end;
  int64_t chunk;  // Number of chunks before it, over all tensors.
};

inline int64_t divided_up(int64_t a, int64_t b) { return a <= 0 ? 0 : (a + b - 1) / b; }

// Calls `work` with pieces that cover all tensors. Each thread has one contiguous range of chunks, the same at every
// call, so that what it has read is in its cache when it writes. Chunks of one tensor form one piece: AdamW's loop
// loses 400 ns whenever it starts (Zen 5, 124 M float32 on two cores: 36.7 ms in chunks of 4,096, 27.6 in pieces).
//
// CHUNK: elements; a power of two. grain: number of elements that are worth a thread.
template <int64_t CHUNK, class F>
void for_each_piece(const Tensors& tensors, int64_t grain, const F& work) {
  int64_t total = 0;
  for (int64_t i = 0; i < tensors.count; ++i) {
    total += tensors.size(i);
  }
  // A chunk belongs to the range [from, to) in which it begins.
  const auto run = [&](int64_t from, int64_t to) {
    int64_t position = 0, chunk = 0;
    for (int64_t i = 0; i < tensors.count && position < to; ++i) {
      const int64_t size = tensors.size(i), chunks = divided_up(size, CHUNK);
      const int64_t first = std::min(divided_up(from - position, CHUNK), chunks);
      const int64_t last = std::min(divided_up(to - position, CHUNK), chunks);
      if (first < last) {
        work(Piece{i, first * CHUNK, std::min(last * CHUNK, size), chunk + first});
      }
      position += size;
      chunk += chunks;
    }
  };
  if (total <= grain || tensors.threads == 1 || openmp.parallel == nullptr) {
    return run(0, total);
  }
  const auto on_each_thread = [&] {
    // All threads are started, because libgomp ends those that a smaller team leaves out.
    const int64_t useful = divided_up(total, grain);
    const int64_t length = divided_up(total, std::min<int64_t>(openmp.thread_count(), useful));
    const int64_t from = openmp.thread_number() * length;
    if (from < total) {
      run(from, std::min(total, from + length));
    }
  };
  using Body = std::remove_const_t<decltype(on_each_thread)>;
  openmp.parallel([](void* body) { (*static_cast<const Body*>(body))(); },
                  const_cast<void*>(static_cast<const void*>(&on_each_thread)),
                  static_cast<unsigned>(tensors.threads), 0);
}

}  // namespace gradilocks
