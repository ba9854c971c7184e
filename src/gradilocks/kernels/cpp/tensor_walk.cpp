// Walks over Python's tensors. The only unit that includes torch's Python headers, which take most of
// the time that building takes (10 s of g++ 12).
#include <torch/csrc/autograd/python_variable.h>

#include "gradient_marks.h"
#include "native.h"

namespace gradilocks {

bool add_tensor_walk(PyObject* module) {
  return add_gradient_marks(module);
}

}  // namespace gradilocks
