// Gradients that somebody else uses, walked over and measured in one call (observe/gradient_reader.py):
// between two of a script's operations each further call finds cold caches.
#pragma once
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>

#include "gradient_walk.h"
#include "native.h"

namespace gradilocks {
namespace {

// The memory of a tensor of the CPU with so many elements of that type, one after another; nullptr
// with a Python error set if it is none.
template <class T>
T* elements_of(PyObject* object, c10::ScalarType type, int64_t count) {
  if (!THPVariable_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "measure_walk expects tensors.");
    return nullptr;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (!tensor.is_cpu() || tensor.scalar_type() != type || !tensor.is_contiguous() ||
      tensor.numel() != count) {
    PyErr_SetString(PyExc_ValueError, "measure_walk expects room for every gradient.");
    return nullptr;
  }
  return static_cast<T*>(tensor.data_ptr());
}

// measure_walk(walk, lists, chunks, numbers, rows): the gradients that a GradientWalk finds, measured
// with these CpuChunks into `rows`, float64 [5, gradients]. `numbers` says where they lay. None if
// they have to be looked at again; else where they lie, if that is new, and else None; the norm of all
// of them, and how many NaN and Inf there are.
PyObject* measure_walk(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 5 ||
      Py_TYPE(args[0]) != reinterpret_cast<PyTypeObject*>(gradient_walk_type)) {
    PyErr_SetString(PyExc_TypeError,
                    "measure_walk takes a GradientWalk, lists, chunks, numbers and rows");
    return nullptr;
  }
  const Chunks* chunks = chunks_in(args[2]);
  if (chunks == nullptr) {
    return nullptr;
  }
  PyObject* made = nullptr;
  const bool done = guarded([&] {
    PyObject* const given[] = {args[1], Py_False};
    const py::object found = py::reinterpret_steal<py::object>(walk_renew(args[0], given, 2));
    if (!found) {
      throw PythonRaised();
    }
    if (found.is_none()) {
      made = Py_NewRef(Py_None);
      return;
    }
    PyObject* renewed = PyTuple_GET_ITEM(found.ptr(), 1);  // Beside what holds their memory.
    const int64_t tensors = count_of(*chunks);
    const auto* pointers = elements_of<const int64_t>(renewed == Py_None ? args[3] : renewed,
                                                      at::kLong, tensors);
    auto* rows = pointers == nullptr ? nullptr
                                     : elements_of<double>(args[4], at::kDouble, 5 * tensors);
    Sums sums{};
    if (rows == nullptr || !measure_into(*chunks, pointers, rows, &sums)) {
      throw PythonRaised();
    }
    made = Py_BuildValue("(Oddd)", renewed, sums.norm, sums.nan, sums.inf);
    if (made == nullptr) {
      throw PythonRaised();
    }
  });
  return done ? made : nullptr;
}

PyMethodDef gradient_meter_functions[] = {
    {"measure_walk", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(measure_walk)),
     METH_FASTCALL,
     "measure_walk(walk, lists, chunks, numbers, rows): where they lie now, norm, NaN and Inf."},
    {nullptr, nullptr, 0, nullptr}};

inline bool add_gradient_meter(PyObject* module) {
  return PyModule_AddFunctions(module, gradient_meter_functions) == 0;
}

}  // namespace
}  // namespace gradilocks
