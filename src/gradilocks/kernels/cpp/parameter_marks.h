// Marks of parameters that somebody else trains (observe/parameter_marks.py): a list of parameters
// enters; who they are, and which of them have no gradient, leave.
//
// It is asked at every backward pass of a watched script: 2,000 parameters take 6 us, where Python
// takes 90. Nothing of a parameter is held. A parameter of a class of its own is asked in Python,
// which may run code that changes the list: what is looked at is a tuple of what was in it.
#pragma once
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <cstring>

#include "native.h"

namespace gradilocks {
namespace {

// 1 if a parameter has no gradient, 0 if it has one, -1 with a Python error set.
inline int lacks_gradient(PyObject* parameter) {
  if (THPVariable_CheckExact(parameter)) {
    return THPVariable_Unpack(parameter).grad().defined() ? 0 : 1;
  }
  PyObject* gradient = PyObject_GetAttrString(parameter, "grad");
  if (gradient == nullptr) {
    return -1;
  }
  const int lacks = gradient == Py_None;
  Py_DECREF(gradient);
  return lacks;
}

// parameter_marks(params) -> (ids, lacking): 8 bytes and 1 byte a parameter.
PyObject* parameter_marks(PyObject*, PyObject* given) {
  try {
    py::object params = py::reinterpret_steal<py::object>(PySequence_Tuple(given));
    if (!params) {
      return nullptr;
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(params.ptr());
    auto bytes = [](Py_ssize_t size) {
      return py::reinterpret_steal<py::object>(PyBytes_FromStringAndSize(nullptr, size));
    };
    py::object ids = bytes(count * static_cast<Py_ssize_t>(sizeof(int64_t)));
    py::object lacking = bytes(count);
    if (!ids || !lacking) {
      return nullptr;
    }
    for (Py_ssize_t place = 0; place < count; ++place) {
      PyObject* parameter = PyTuple_GET_ITEM(params.ptr(), place);
      const int lacks = lacks_gradient(parameter);
      if (lacks < 0) {
        return nullptr;
      }
      const auto id = reinterpret_cast<int64_t>(parameter);
      std::memcpy(PyBytes_AS_STRING(ids.ptr()) + place * sizeof(id), &id, sizeof(id));
      PyBytes_AS_STRING(lacking.ptr())[place] = static_cast<char>(lacks);
    }
    return PyTuple_Pack(2, ids.ptr(), lacking.ptr());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyMethodDef parameter_marks_functions[] = {{"parameter_marks", parameter_marks, METH_O,
                                            "parameter_marks(params): their ids, 8 bytes each; 1 "
                                            "byte each: 1 without a gradient, else 0."},
                                           {nullptr, nullptr, 0, nullptr}};

inline bool add_parameter_marks(PyObject* module) {
  return PyModule_AddFunctions(module, parameter_marks_functions) == 0;
}

}  // namespace
}  // namespace gradilocks
