// The elements of parameters that a recorder looks at (record/sample.py): a list of tensors enters;
// of large ones a view of some runs leaves, in their own memory (400 take 0.2 ms, in Python 1), and
// small ones of the CPU are copied one after another (400 take 0.02 ms, by torch 0.4).
#pragma once
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <cstring>

#include "native.h"

namespace gradilocks {
namespace {

// sampled_runs(tensors, runs, run) -> list of views of `runs` rows of `run` elements each.
PyObject* sampled_runs(PyObject*, PyObject* args) {
  PyObject* given = nullptr;
  long long runs = 0;
  long long run = 0;
  if (!PyArg_ParseTuple(args, "OLL", &given, &runs, &run)) {
    return nullptr;
  }
  try {
    py::object tensors = py::reinterpret_steal<py::object>(PySequence_Tuple(given));
    if (!tensors) {
      return nullptr;
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(tensors.ptr());
    py::object views = py::reinterpret_steal<py::object>(PyList_New(0));
    if (!views) {
      return nullptr;
    }
    for (Py_ssize_t place = 0; place < count; ++place) {
      PyObject* object = PyTuple_GET_ITEM(tensors.ptr(), place);
      if (!THPVariable_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "sampled_runs expects tensors.");
        return nullptr;
      }
      at::Tensor tensor = THPVariable_Unpack(object);
      if (runs < 2 || run < 1 || tensor.numel() < runs * run) {
        PyErr_SetString(PyExc_ValueError, "sampled_runs expects tensors of runs * run elements.");
        return nullptr;
      }
      if (!tensor.is_non_overlapping_and_dense()) {
        tensor = tensor.contiguous();
      }
      int64_t distance = (tensor.numel() - run) / (runs - 1);
      distance -= 1 - distance % 2;
      at::Tensor view = tensor.as_strided({runs, run}, {distance, 1}, tensor.storage_offset());
      py::object wrapped = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(view)));
      if (!wrapped || PyList_Append(views.ptr(), wrapped.ptr()) < 0) {
        return nullptr;
      }
    }
    return views.release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// copy_elements(tensors, out) -> bool: fills `out`, a 1-d tensor of the CPU, with their elements one
// after another, as they lie in memory. False if one of them is of another dtype, is not on the CPU,
// or does not lie in one piece: then nothing is said of what is in `out`.
PyObject* copy_elements(PyObject*, PyObject* args) {
  PyObject* given = nullptr;
  PyObject* target = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &given, &target)) {
    return nullptr;
  }
  try {
    py::object tensors = py::reinterpret_steal<py::object>(PySequence_Tuple(given));
    if (!tensors) {
      return nullptr;
    }
    if (!THPVariable_Check(target)) {
      PyErr_SetString(PyExc_TypeError, "copy_elements expects a tensor to copy to.");
      return nullptr;
    }
    const at::Tensor out = THPVariable_Unpack(target);
    if (!out.is_cpu() || !out.is_contiguous()) {
      Py_RETURN_FALSE;
    }
    auto* to = static_cast<char*>(out.data_ptr());
    size_t room = out.nbytes();
    const Py_ssize_t count = PyTuple_GET_SIZE(tensors.ptr());
    for (Py_ssize_t place = 0; place < count; ++place) {
      PyObject* object = PyTuple_GET_ITEM(tensors.ptr(), place);
      if (!THPVariable_CheckExact(object)) {
        Py_RETURN_FALSE;
      }
      const at::Tensor& tensor = THPVariable_Unpack(object);
      if (!tensor.is_cpu() || tensor.layout() != at::kStrided ||
          tensor.scalar_type() != out.scalar_type() || tensor.is_neg() ||
          !tensor.is_non_overlapping_and_dense()) {
        Py_RETURN_FALSE;
      }
      const size_t size = tensor.nbytes();
      if (size > room) {
        PyErr_SetString(PyExc_ValueError, "copy_elements has no room for that many elements.");
        return nullptr;
      }
      if (size > 0) {
        std::memcpy(to, tensor.data_ptr(), size);
      }
      to += size;
      room -= size;
    }
    return PyBool_FromLong(room == 0);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyMethodDef weight_sample_functions[] = {
    {"copy_elements", copy_elements, METH_VARARGS,
     "copy_elements(tensors, out): fills out with the elements of tensors of the CPU."},
    {"sampled_runs", sampled_runs, METH_VARARGS,
     "sampled_runs(tensors, runs, run): of each large tensor `runs` runs of `run` elements."},
    {nullptr, nullptr, 0, nullptr}};

inline bool add_weight_sample(PyObject* module) {
  return PyModule_AddFunctions(module, weight_sample_functions) == 0;
}

}  // namespace
}  // namespace gradilocks
