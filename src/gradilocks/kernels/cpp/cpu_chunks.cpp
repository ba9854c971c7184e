// How the chunks of many tensors are shared out among torch's threads.
#include "cpu_chunks.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <exception>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#if defined(GRADILOCKS_OPENMP)
// What `#pragma omp parallel` of g++ calls. Called by name, because clang's pragma (and with it
// at::parallel_for) calls functions that libgomp, on which torch runs, does not have; the libraries
// of LLVM and Intel have these too.
extern "C" {
void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_num_threads(void);
int omp_get_thread_num(void);
}
#endif

namespace gradilocks {

namespace {

// What a chunk costs besides its elements, in elements: 20 ns.
constexpr int64_t CHUNK_COST = 64;

// Lets a thread treat subnormal numbers as another does (torch.set_flush_denormal holds for one
// thread alone), so that results do not depend on the number of threads.
#if defined(__SSE__)
class SameRounding {
 public:
  explicit SameRounding(unsigned wanted) : before_(_mm_getcsr()) { _mm_setcsr(wanted); }
  ~SameRounding() { _mm_setcsr(before_); }
  SameRounding(const SameRounding&) = delete;
  SameRounding& operator=(const SameRounding&) = delete;
  static unsigned here() { return _mm_getcsr(); }

 private:
  unsigned before_;
};
#else
class SameRounding {
 public:
  explicit SameRounding(unsigned) {}
  ~SameRounding() {}
  static unsigned here() { return 0; }
};
#endif

std::atomic<bool> on_one_thread{false};

using Stretch = std::function<void(int64_t, int64_t)>;

#if defined(GRADILOCKS_OPENMP)
// A loop over [0, end), of which each thread of the pool takes one stretch.
struct Loop {
  int64_t end;
  int64_t grain;
  const Stretch& work;
  std::atomic_flag has_failed = ATOMIC_FLAG_INIT;
  std::exception_ptr failure;

  void take_part() noexcept {
    const int64_t most = (end + grain - 1) / grain;
    const int64_t threads = std::min<int64_t>(omp_get_num_threads(), most);
    const int64_t length = (end + threads - 1) / threads;
    const int64_t from = omp_get_thread_num() * length;
    if (from >= end) {
      return;
    }
    try {
      work(from, std::min(end, from + length));
    } catch (...) {
      if (!has_failed.test_and_set()) {
        failure = std::current_exception();
      }
    }
  }
};

void share_out(int64_t end, int64_t grain, const Stretch& work) {
  if (end <= grain || at::in_parallel_region() || at::get_num_threads() == 1) {
    work(0, end);
    return;
  }
  Loop loop{end, grain, work, {}, {}};
  // 0: as many threads as torch has been set to use.
  GOMP_parallel([](void* given) { static_cast<Loop*>(given)->take_part(); }, &loop, 0, 0);
  if (loop.failure) {
    std::rethrow_exception(loop.failure);
  }
}
#else
void share_out(int64_t end, int64_t, const Stretch& work) { work(0, end); }
#endif

}  // namespace

Chunks::Chunks(const int64_t* sizes, const int64_t* given, int64_t count, int64_t chunk,
               bool any_double)
    : codes(given, given + count), is_double(any_double), weights_{0} {
  begin.reserve(static_cast<size_t>(count) + 1);
  for (int64_t tensor = 0; tensor < count; ++tensor) {
    begin.push_back(static_cast<int64_t>(chunks.size()));
    if (codes[tensor] < 0) {
      continue;
    }
    for (int64_t start = 0; start < sizes[tensor]; start += chunk) {
      const int64_t length = std::min(chunk, sizes[tensor] - start);
      chunks.push_back({tensor, start, length});
      weights_.push_back(weights_.back() + length + CHUNK_COST);
    }
  }
  begin.push_back(static_cast<int64_t>(chunks.size()));
}

void stay_on_one_thread() { on_one_thread = true; }

void Chunks::run(int64_t grain, const std::function<void(int64_t, int64_t)>& work) const {
  if (on_one_thread) {
    work(0, static_cast<int64_t>(chunks.size()));
    return;
  }
  const unsigned rounding = SameRounding::here();
  // Each thread gets one stretch, the same at every call, so that what it has read is in its cache
  // when it comes to write. A chunk belongs to the stretch in which it begins.
  share_out(weights_.back(), grain, [&](int64_t from, int64_t to) {
    const SameRounding same(rounding);
    const auto first = std::lower_bound(weights_.begin(), weights_.end() - 1, from);
    const auto last = std::lower_bound(first, weights_.end() - 1, to);
    work(first - weights_.begin(), last - weights_.begin());
  });
}

void Chunks::run_pieces(int64_t grain, const std::function<void(const Chunk&)>& work) const {
  run(grain, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to;) {
      const int64_t end = std::min(to, begin[chunks[i].tensor + 1]);
      const Chunk &first = chunks[i], &last = chunks[end - 1];
      work({first.tensor, first.start, last.start + last.length - first.start});
      i = end;
    }
  });
}

}  // namespace gradilocks
