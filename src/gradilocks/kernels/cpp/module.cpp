// The Python module `gradilocks_native`: nothing but what its units add to it.
#include "native.h"

static PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                 "gradilocks_native",
                                 "Walks over tensors, CPU kernels and launches.",
                                 -1,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr,
                                 nullptr};

PyMODINIT_FUNC PyInit_gradilocks_native() {
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) {
    return nullptr;
  }
  if (!gradilocks::add_tensor_walk(module) || !gradilocks::add_cpu_kernels(module) ||
      !gradilocks::add_cuda_launch(module)) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
