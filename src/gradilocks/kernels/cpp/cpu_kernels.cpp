// Kernels for the CPU, threaded by torch's own pool.
#include <ATen/Parallel.h>

#include "native.h"

namespace gradilocks {

bool add_cpu_kernels(PyObject* module) {
  (void)module;
  return true;
}

}  // namespace gradilocks
