// What the units of the native library share. Each adds its functions and types to the module.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace gradilocks {

// Each returns false with a Python error set if it fails.
bool add_tensor_walk(PyObject* module);
bool add_cpu_kernels(PyObject* module);
bool add_cuda_launch(PyObject* module);

// What a CpuChunks holds; nullptr with a Python error set if `object` is none.
class Chunks;
const Chunks* chunks_in(PyObject* object);
int64_t count_of(const Chunks& tensors);

// What all tensors have together: the 2-norm, rounded as `total_norm` does it, and how many elements
// are NaN and Inf.
struct Sums {
  double norm, nan, inf;
};

// Measures the tensors at these addresses into `rows`, as `CpuChunks.measure` does, and adds them up,
// without the GIL; false with a Python error set if it fails.
bool measure_into(const Chunks& tensors, const int64_t* pointers, double* rows, Sums* sums);

// Where a tensor on this GPU lies; false with a Python error set if it is none.
bool cuda_address(PyObject* tensor, int device, uint64_t* out);

// The memory of a contiguous tensor on the CPU; how many bytes the elements of a contiguous tensor
// take. False with a Python error set if it is none.
bool cpu_memory(PyObject* tensor, const void** out, size_t* bytes);
bool memory_size(PyObject* tensor, size_t* bytes);

// Copies int64 of the host into a table of as many bytes, on GPU `device` in the order of a stream,
// or on the CPU (-1). 1 if it has, 0 if it cannot be done from here and nothing has been done, -1
// with a Python error set.
int send_numbers(PyObject* table, const void* numbers, size_t bytes, int device, PyObject* stream);

}  // namespace gradilocks
