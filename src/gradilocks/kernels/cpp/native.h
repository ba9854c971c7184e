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

// Where a tensor on this GPU lies; false with a Python error set if it is none.
bool cuda_address(PyObject* tensor, int device, uint64_t* out);

// The memory of a contiguous tensor on the CPU; how many bytes the elements of a contiguous tensor
// take. False with a Python error set if it is none.
bool cpu_memory(PyObject* tensor, const void** out, size_t* bytes);
bool memory_size(PyObject* tensor, size_t* bytes);

}  // namespace gradilocks
