// The elements of parameters that a recorder looks at (record/sample.py): a list of tensors enters;
// of large ones a view of some runs leaves, in their own memory (400 take 0.2 ms, in Python 1), and
// small ones of the CPU are copied one after another (400 take 0.02 ms, by torch 0.4) and compared
// with that copy later.
#pragma once
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu_elements.h"
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

// Adds the squares of `before`, and of what has changed since; four sums each, which a processor adds
// at a time.
template <class T, class W>
void add_squares(const T* now, const W* before, int64_t count, double* sums) {
  double was[4] = {}, change[4] = {};
  int64_t i = 0;
  const auto add = [&](int lane) {
    const double old = before[i], step = static_cast<double>(static_cast<W>(widened(now[i]))) - old;
    was[lane] += old * old;
    change[lane] += step * step;
    ++i;
  };
  while (i + 4 <= count) {
    add(0), add(1), add(2), add(3);
  }
  while (i < count) {
    add(0);
  }
  sums[0] = was[0] + was[1] + was[2] + was[3];
  sums[1] = change[0] + change[1] + change[2] + change[3];
}

// moved_norms(tensors, before, out) -> bool: of each of these tensors of the CPU the norm of what it
// was, which `before` holds as `copy_elements` has left it, in float32 or float64, and behind those
// the norms of what has changed since, into `out`, float64 [2, tensors]. False as `copy_elements`.
PyObject* moved_norms(PyObject*, PyObject* args) {
  PyObject* given = nullptr;
  PyObject* copy = nullptr;
  PyObject* target = nullptr;
  if (!PyArg_ParseTuple(args, "OOO", &given, &copy, &target)) {
    return nullptr;
  }
  try {
    py::object tensors = py::reinterpret_steal<py::object>(PySequence_Tuple(given));
    if (!tensors) {
      return nullptr;
    }
    if (!THPVariable_Check(copy) || !THPVariable_Check(target)) {
      PyErr_SetString(PyExc_TypeError, "moved_norms expects tensors.");
      return nullptr;
    }
    const at::Tensor before = THPVariable_Unpack(copy), out = THPVariable_Unpack(target);
    const Py_ssize_t count = PyTuple_GET_SIZE(tensors.ptr());
    const bool is_double = before.scalar_type() == at::kDouble;
    if (!before.is_cpu() || !before.is_contiguous() ||
        (!is_double && before.scalar_type() != at::kFloat) || !out.is_cpu() ||
        !out.is_contiguous() || out.scalar_type() != at::kDouble || out.numel() != 2 * count) {
      Py_RETURN_FALSE;
    }
    auto* norms = static_cast<double*>(out.data_ptr());
    int64_t at = 0;
    for (Py_ssize_t place = 0; place < count; ++place) {
      PyObject* object = PyTuple_GET_ITEM(tensors.ptr(), place);
      if (!THPVariable_CheckExact(object)) {
        Py_RETURN_FALSE;
      }
      const at::Tensor& tensor = THPVariable_Unpack(object);
      const c10::ScalarType type = tensor.scalar_type();
      const int64_t size = tensor.numel();
      if (!tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.is_neg() ||
          !tensor.is_non_overlapping_and_dense() || at + size > before.numel() ||
          (type == at::kDouble) != is_double) {
        Py_RETURN_FALSE;
      }
      double sums[2] = {};
      const void* now = size == 0 ? nullptr : tensor.data_ptr();
      if (is_double) {
        add_squares(static_cast<const double*>(now),
                    static_cast<const double*>(before.data_ptr()) + at, size, sums);
      } else {
        const float* old = static_cast<const float*>(before.data_ptr()) + at;
        if (type == at::kFloat) {
          add_squares(static_cast<const float*>(now), old, size, sums);
        } else if (type == at::kHalf) {
          add_squares(static_cast<const Half*>(now), old, size, sums);
        } else if (type == at::kBFloat16) {
          add_squares(static_cast<const BFloat16*>(now), old, size, sums);
        } else {
          Py_RETURN_FALSE;
        }
      }
      norms[place] = std::sqrt(sums[0]);
      norms[count + place] = std::sqrt(sums[1]);
      at += size;
    }
    return PyBool_FromLong(at == before.numel());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyMethodDef weight_sample_functions[] = {
    {"moved_norms", moved_norms, METH_VARARGS,
     "moved_norms(tensors, before, out): the norms of a copy, and of what has changed since."},
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
