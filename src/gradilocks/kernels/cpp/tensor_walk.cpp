// Walks over Python's tensors. The only unit that includes torch's Python headers, which take most
// of the time that building takes (10 s of g++ 12).
#include <torch/csrc/autograd/python_variable.h>

#include "gradient_marks.h"
#include "gradient_memory.h"
#include "gradient_meter.h"
#include "gradient_walk.h"
#include "native.h"
#include "parameter_marks.h"
#include "step_watch.h"
#include "weight_sample.h"

namespace gradilocks {

bool cuda_address(PyObject* given, int device, uint64_t* out) {
  try {
    if (!THPVariable_CheckExact(given)) {
      PyErr_Format(PyExc_TypeError, "a launch takes tensors and numbers, got %s",
                   Py_TYPE(given)->tp_name);
      return false;
    }
    const at::Tensor& tensor = THPVariable_Unpack(given);
    if (!tensor.is_cuda() || tensor.get_device() != device) {
      PyErr_Format(PyExc_ValueError, "a launch on cuda:%d was given a tensor on %s", device,
                   tensor.device().str().c_str());
      return false;
    }
    *out = reinterpret_cast<uint64_t>(tensor.data_ptr());
    return true;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return false;
  }
}

bool memory_size(PyObject* given, size_t* bytes) {
  if (!THPVariable_CheckExact(given) || !THPVariable_Unpack(given).is_contiguous()) {
    PyErr_Format(PyExc_TypeError, "expected a contiguous tensor, got %s", Py_TYPE(given)->tp_name);
    return false;
  }
  *bytes = THPVariable_Unpack(given).nbytes();
  return true;
}

bool cpu_memory(PyObject* given, const void** out, size_t* bytes) {
  if (!memory_size(given, bytes)) {
    return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(given);
  if (!tensor.is_cpu()) {
    PyErr_Format(PyExc_ValueError, "expected a tensor on the CPU, got one on %s",
                 tensor.device().str().c_str());
    return false;
  }
  *out = tensor.const_data_ptr();
  return true;
}

bool add_tensor_walk(PyObject* module) {
  return add_gradient_walk(module) && add_gradient_meter(module) && add_gradient_marks(module) &&
         add_gradient_memory(module) && add_parameter_marks(module) && add_step_watch(module) &&
         add_weight_sample(module);
}

}  // namespace gradilocks
