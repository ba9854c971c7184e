// Walks over Python's tensors. The only unit that includes torch's Python headers, which take most of
// the time that building takes (10 s of g++ 12).
#include <torch/csrc/autograd/python_variable.h>

#include "native.h"
#include "parameter_marks.h"
#include "weight_sample.h"

namespace gradilocks {

bool add_tensor_walk(PyObject* module) {
  return add_parameter_marks(module) && add_weight_sample(module);
}

}  // namespace gradilocks
