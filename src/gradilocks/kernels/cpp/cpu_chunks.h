// Tensors cut into chunks, and the one loop over the chunks of all of them, on torch's own threads.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

namespace gradilocks {

struct Chunk {
  int64_t tensor;
  int64_t start;   // Of its elements in the tensor.
  int64_t length;  // Of them.
};

// From here on all is computed by the thread that calls: in a child of a fork, which has lost the
// others.
void stay_on_one_thread();

// The chunks of tensors of given sizes: runs of at most `chunk` elements of one tensor, tensor by
// tensor. Nothing here depends on the number of threads.
class Chunks {
 public:
  // `codes`: what a kernel is to know of each tensor; below 0 leaves it out.
  Chunks(const int64_t* sizes, const int64_t* codes, int64_t count, int64_t chunk, bool is_double);

  // Calls `work` with the first chunk of a run and the one after its last, until all are done, on
  // as many threads as torch uses, or on this one alone after `stay_on_one_thread`.
  // `grain`: so few elements are not worth a thread of their own.
  void run(int64_t grain, const std::function<void(int64_t, int64_t)>& work) const;

  // Calls `work` with the same runs as pieces: chunks of one tensor that follow each other are one.
  // For what is done element by element. AdamW's loop loses 400 ns whenever it begins anew, in
  // which it steps 1,000 elements; why so much is not known (Zen 5, 124 M float32 on two cores:
  // 36.7 ms in chunks of 4,096, 27.6 in pieces; torch's fused step 32.1).
  void run_pieces(int64_t grain, const std::function<void(const Chunk&)>& work) const;

  int64_t count() const { return static_cast<int64_t>(codes.size()); }

  std::vector<Chunk> chunks;
  std::vector<int64_t> codes;
  std::vector<int64_t> begin;  // The first chunk of each tensor, and the number of all.
  bool is_double;              // Whether one of the tensors is float64.

 private:
  std::vector<int64_t> weights_;  // Of the chunks before each, and of all.
};

}  // namespace gradilocks
