// GradientMemory: where the gradients of parameters lay at one moment, and how often each had been
// written to (observe/gradient_memory.py). Lists of parameters enter; whether their gradients lie
// there still leaves.
//
// A gradient is known by its storage and where it begins in it. The storage is held weakly: its
// memory goes when its user lets it go, and no other storage has its address as long as this is
// there. No Python object is made of a gradient or a storage: 2,000 take 0.04 ms, where storages and
// weak references of Python take 3, and make its garbage collector run.
#pragma once
#include <ATen/SparseTensorImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gradient_marks.h"
#include "native.h"

namespace gradilocks {
namespace {

// Where a gradient is now. Of a sparse one, where its values are; of one without a storage, itself.
struct GradientPlace {
  const void* memory = nullptr;  // Null if there is no gradient.
  int64_t offset = 0;
  uint32_t version = 0;

  bool is_at(const GradientPlace& other) const {
    return memory == other.memory && offset == other.offset;
  }
};

// The tensor whose memory that of a gradient is.
inline const c10::TensorImpl* elements_in(const c10::TensorImpl* gradient) {
  if (gradient->layout() != at::kSparse || gradient->is_python_dispatch()) {
    return gradient;
  }
  // Held by the gradient itself.
  return static_cast<const at::SparseTensorImpl*>(gradient)->values().unsafeGetTensorImpl();
}

inline GradientPlace place_of(const c10::TensorImpl* gradient) {
  const c10::TensorImpl* elements = elements_in(gradient);
  GradientPlace place;
  place.memory = elements;
  if (elements->has_storage()) {
    place.memory = elements->unsafe_storage().unsafeGetStorageImpl();
    place.offset = elements == gradient ? elements->storage_offset() : 0;
  }
  const c10::VariableVersion& counter = gradient->version_counter();
  place.version = counter.enabled() ? counter.current_version() : 0;  // Of inference none is kept.
  return place;
}

// A gradient as it was; one of the two is there, unless there was none.
struct HeldGradient {
  GradientPlace place;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> tensor;

  void hold(const c10::TensorImpl* gradient) {
    place = place_of(gradient);
    const c10::TensorImpl* elements = elements_in(gradient);
    if (elements->has_storage()) {
      storage.emplace(elements->unsafe_storage().getWeakStorageImpl());
    } else {
      const auto held = c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(
          const_cast<c10::TensorImpl*>(elements));
      tensor.emplace(held);
    }
  }

  bool is_gone() const {
    return (!storage || storage->use_count() == 0) && (!tensor || tensor->use_count() == 0);
  }
};

struct KeyHash {
  size_t operator()(const std::pair<const void*, int64_t>& key) const {
    return std::hash<const void*>()(key.first) * 31 + std::hash<int64_t>()(key.second);
  }
};

struct HeldGradients {
  std::vector<HeldGradient> rows;  // One a parameter.
  // By memory and offset: the row. Filled when somebody asks for a gradient out of its place.
  std::unordered_map<std::pair<const void*, int64_t>, int64_t, KeyHash> places;

  int64_t row_of(const GradientPlace& place, size_t likely) {
    if (likely < rows.size() && rows[likely].place.is_at(place)) {
      return static_cast<int64_t>(likely);
    }
    if (places.empty()) {
      for (size_t row = 0; row < rows.size(); ++row) {
        places[{rows[row].place.memory, rows[row].place.offset}] = static_cast<int64_t>(row);
      }
    }
    const auto found = places.find({place.memory, place.offset});
    return found == places.end() ? -1 : found->second;
  }
};

struct GradientMemory {
  PyObject_HEAD HeldGradients* held;
};

inline HeldGradients& held_by(PyObject* self) {
  return *reinterpret_cast<GradientMemory*>(self)->held;
}

// A sequence of parameters as a tuple, which nobody changes meanwhile.
inline py::object as_tuple(PyObject* params) {
  py::object listed = py::reinterpret_steal<py::object>(PySequence_Tuple(params));
  if (!listed) {
    throw python_error();
  }
  return listed;
}

inline PyObject* new_memory(PyTypeObject* type, PyObject* args, PyObject* named) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"params", nullptr};
  PyObject* params = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, named, "O", const_cast<char**>(names), &params)) {
    return nullptr;
  }
  const py::object listed = as_tuple(params);
  auto held = std::make_unique<HeldGradients>();
  held->rows.resize(static_cast<size_t>(PyTuple_GET_SIZE(listed.ptr())));
  each_gradient(listed.ptr(), false, [&](Py_ssize_t row, const c10::TensorImpl* gradient) {
    held->rows[static_cast<size_t>(row)].hold(gradient);
    return true;
  });
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    reinterpret_cast<GradientMemory*>(self)->held = held.release();
  }
  return self;
  END_HANDLE_TH_ERRORS
}

inline void free_memory(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<GradientMemory*>(self)->held;
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyObject* holds_memory(PyObject* self, PyObject* params) {
  HANDLE_TH_ERRORS
  const py::object listed = as_tuple(params);
  const auto& rows = held_by(self).rows;
  if (static_cast<size_t>(PyTuple_GET_SIZE(listed.ptr())) != rows.size()) {
    Py_RETURN_FALSE;
  }
  size_t next = 0;  // Up to here all are the same.
  const auto lacks = [&](size_t end) {
    while (next < end && rows[next].place.memory == nullptr) {
      ++next;
    }
    return next == end;
  };
  bool same = true;
  each_gradient(listed.ptr(), false, [&](Py_ssize_t place, const c10::TensorImpl* gradient) {
    const auto row = static_cast<size_t>(place);
    same = lacks(row) && rows[row].place.is_at(place_of(gradient));
    next = row + 1;
    return same;
  });
  return PyBool_FromLong(same && lacks(rows.size()));
  END_HANDLE_TH_ERRORS
}

inline PyObject* rows_in_memory(PyObject* self, PyObject* params) {
  HANDLE_TH_ERRORS
  const py::object listed = as_tuple(params);
  const auto count = static_cast<size_t>(PyTuple_GET_SIZE(listed.ptr()));
  std::vector<int64_t> found(count, -1);
  size_t likely = 0;
  each_gradient(listed.ptr(), false, [&](Py_ssize_t place, const c10::TensorImpl* gradient) {
    const int64_t row = held_by(self).row_of(place_of(gradient), likely);
    found[static_cast<size_t>(place)] = row;
    likely = row < 0 ? likely : static_cast<size_t>(row) + 1;
    return true;
  });
  py::object told = py::reinterpret_steal<py::object>(PyList_New(static_cast<Py_ssize_t>(count)));
  if (!told) {
    throw python_error();
  }
  for (size_t place = 0; place < count; ++place) {
    PyObject* row = PyLong_FromLongLong(found[place]);
    if (row == nullptr) {
      throw python_error();
    }
    PyList_SET_ITEM(told.ptr(), static_cast<Py_ssize_t>(place), row);
  }
  return told.release().ptr();
  END_HANDLE_TH_ERRORS
}

inline PyObject* changed_memory(PyObject* self, PyObject* given) {
  HANDLE_TH_ERRORS
  PyObject* params = nullptr;
  PyObject* wanted = nullptr;
  if (!PyArg_ParseTuple(given, "OO", &params, &wanted)) {
    return nullptr;
  }
  const py::object listed = as_tuple(params), where = as_tuple(wanted);
  const auto count = static_cast<size_t>(PyTuple_GET_SIZE(listed.ptr()));
  if (static_cast<size_t>(PyTuple_GET_SIZE(where.ptr())) != count) {
    PyErr_SetString(PyExc_ValueError, "changes expects a row for every parameter.");
    return nullptr;
  }
  std::vector<GradientPlace> now(count);
  each_gradient(listed.ptr(), false, [&](Py_ssize_t place, const c10::TensorImpl* gradient) {
    now[static_cast<size_t>(place)] = place_of(gradient);
    return true;
  });
  const auto& rows = held_by(self).rows;
  std::vector<char> told(count, 2);
  for (size_t place = 0; place < count; ++place) {
    const Py_ssize_t row = PyNumber_AsSsize_t(
        PyTuple_GET_ITEM(where.ptr(), static_cast<Py_ssize_t>(place)), PyExc_OverflowError);
    if (row == -1 && PyErr_Occurred()) {
      return nullptr;
    }
    if (row >= 0 && static_cast<size_t>(row) < rows.size()) {
      const GradientPlace& then = rows[static_cast<size_t>(row)].place;
      const bool moved = then.memory != now[place].memory;
      told[place] = static_cast<char>(moved ? 2 : then.version != now[place].version);
    }
  }
  return PyBytes_FromStringAndSize(told.data(), static_cast<Py_ssize_t>(count));
  END_HANDLE_TH_ERRORS
}

inline PyObject* is_memory_gone(PyObject* self, PyObject*) {
  for (const HeldGradient& row : held_by(self).rows) {
    if (!row.is_gone()) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
}

}  // namespace

inline bool add_gradient_memory(PyObject* module) {
  static PyMethodDef methods[] = {
      {"holds", holds_memory, METH_O,
       "Whether the gradients of these parameters lie, one by one, where those were."},
      {"rows_of", rows_in_memory, METH_O,
       "Of each of these parameters the row whose gradient lay where its own lies; -1: none."},
      {"changes", changed_memory, METH_VARARGS,
       "changes(params, rows): of each parameter a byte: 0 if its gradient lies where that of this "
       "row did and nobody has written to it, 1 if somebody has, 2 if it lies elsewhere."},
      {"is_gone", is_memory_gone, METH_NOARGS, "Whether nobody uses that memory any more."},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(new_memory)},
      {Py_tp_dealloc, reinterpret_cast<void*>(free_memory)},
      {Py_tp_methods, methods},
      {Py_tp_doc, const_cast<char*>("Where the gradients of parameters lay at one moment.")},
      {0, nullptr}};
  static PyType_Spec spec = {"gradilocks_native.GradientMemory", sizeof(GradientMemory), 0,
                             Py_TPFLAGS_DEFAULT, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) {
    return false;
  }
  const bool added = PyModule_AddObjectRef(module, "GradientMemory", type) == 0;
  Py_DECREF(type);
  return added;
}

}  // namespace gradilocks
