// GradientMarks: which gradients a scaler has unscaled, and how often each had been written to by
// then (step/call_order.py). Lists of parameters enter; answers about their gradients leave.
//
// A gradient is known by its address together with its version counter. The counter is held, some
// 24 bytes beside the tensor, so that it is nobody else's as long as the mark stands: a tensor that
// was made later at the same address has another. The gradient itself is not held, not even weakly:
// it goes when its user lets it go, and torch.utils.swap_tensors, which refuses a tensor that
// anybody else refers to, takes it. No Python object is made of a gradient: marking 2,000 takes
// 0.04 ms, and an attribute of the Python object of each 0.6 (EPYC, one core).
//
// The global lock is held throughout. Only asking a parameter of a foreign class for its gradient
// runs Python code, which may change the list or call in here again.
#pragma once
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

#include "native.h"
#include "tensor_classes.h"

namespace gradilocks {
namespace {

// A version counter has no comparison; two that are one object hold one pointer.
inline bool is_same_counter(const c10::VariableVersion& one, const c10::VariableVersion& other) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*), "more than a pointer to a counter");
  return std::memcmp(static_cast<const void*>(&one), static_cast<const void*>(&other),
                     sizeof(void*)) == 0;
}

struct Mark {
  const c10::TensorImpl* gradient;  // Not owned and perhaps gone: never looked into.
  c10::VariableVersion counter;
  uint32_t version;

  explicit Mark(const c10::TensorImpl* of)
      : gradient(of), counter(of->version_counter()), version(counter.current_version()) {}

  bool is_of(const c10::TensorImpl* other) const {
    return gradient == other && is_same_counter(counter, other->version_counter());
  }
  bool is_unwritten() const { return counter.current_version() == version; }
};

class Marks {
 public:
  // The mark of a gradient, null if it has none. `next` is where it is looked for first: gradients
  // are asked for in the order in which they were marked, as a rule.
  Mark* find(const c10::TensorImpl* gradient, size_t& next) {
    const size_t place = locate(gradient, next);
    return place < marks_.size() && marks_[place].is_of(gradient) ? &marks_[place] : nullptr;
  }

  void set(const c10::TensorImpl* gradient, size_t& next) {
    const bool first_list = next == marks_.size() && indexed_ == 0;
    const size_t place = first_list ? next++ : locate(gradient, next);
    if (place < marks_.size()) {  // Its own, or of a tensor that was at this address before.
      marks_[place] = Mark(gradient);
    } else {
      marks_.emplace_back(gradient);
    }
  }

  void renew(size_t place) {
    if (place < marks_.size()) {
      marks_[place].version = marks_[place].counter.current_version();
    }
  }

  size_t place_of(const Mark* mark) const { return static_cast<size_t>(mark - marks_.data()); }

  void clear() {
    marks_.clear();
    places_.clear();
    indexed_ = 0;
  }

 private:
  // Where the mark of a gradient at this address is; past the last if there is none.
  size_t locate(const c10::TensorImpl* gradient, size_t& next) {
    if (next >= marks_.size() || marks_[next].gradient != gradient) {
      for (; indexed_ < marks_.size(); ++indexed_) {
        places_[marks_[indexed_].gradient] = indexed_;
      }
      const auto found = places_.find(gradient);
      if (found == places_.end()) {
        return marks_.size();
      }
      next = found->second;
    }
    return next++;
  }

  std::vector<Mark> marks_;
  std::unordered_map<const c10::TensorImpl*, size_t> places_;
  size_t indexed_ = 0;  // How many of the marks are in `places_`.
};

// Calls `visit(place, gradient)` for every item of a list or tuple that has one, until it says
// false. The items are parameters, or the gradients themselves. Throws python_error if Python has
// raised.
template <typename Visit>
void each_gradient(PyObject* items, bool are_gradients, Visit visit) {
  py::object listed =
      py::reinterpret_steal<py::object>(PySequence_Fast(items, "expected a list of tensors"));
  if (!listed) {
    throw python_error();
  }
  PyTypeObject* known = nullptr;  // The class of the item before, and whether its `grad` is plain.
  bool plain = false;
  for (Py_ssize_t place = 0; place < PySequence_Fast_GET_SIZE(listed.ptr()); ++place) {
    PyObject* item = PySequence_Fast_GET_ITEM(listed.ptr(), place);
    if (!are_gradients && Py_TYPE(item) != known) {
      const py::object held = py::reinterpret_borrow<py::object>(item);  // Asking may run code.
      known = Py_TYPE(item);
      plain = has_plain("grad", known);
      --place;  // Which may have put another one there.
      continue;
    }
    if (!are_gradients && plain) {
      const c10::TensorImpl& param = *THPVariable_Unpack(item).unsafeGetTensorImpl();
      const at::Tensor& gradient = param.grad();
      if (gradient.defined() && !visit(place, gradient.unsafeGetTensorImpl())) {
        return;
      }
      continue;
    }
    py::object asked = py::reinterpret_borrow<py::object>(item);  // It may leave the list.
    if (!are_gradients) {
      asked = py::reinterpret_steal<py::object>(PyObject_GetAttrString(item, "grad"));
      if (!asked) {
        throw python_error();
      }
    }
    if (!asked.is_none() && THPVariable_Check(asked.ptr()) &&
        !visit(place, THPVariable_Unpack(asked.ptr()).unsafeGetTensorImpl())) {
      return;
    }
  }
}

struct GradientMarks {
  PyObject_HEAD Marks* marks;
};

inline Marks& marks_of(PyObject* self) { return *reinterpret_cast<GradientMarks*>(self)->marks; }

inline PyObject* new_marks(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    Marks* marks = new (std::nothrow) Marks();
    reinterpret_cast<GradientMarks*>(self)->marks = marks;
    if (marks == nullptr) {
      Py_DECREF(self);
      return PyErr_NoMemory();
    }
  }
  return self;
}

inline void free_marks(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<GradientMarks*>(self)->marks;
  type->tp_free(self);
  Py_DECREF(type);
}

inline PyObject* mark_gradients(PyObject* self, PyObject* params) {
  HANDLE_TH_ERRORS
  size_t next = 0;
  each_gradient(params, false, [&](Py_ssize_t, const c10::TensorImpl* gradient) {
    // Nobody counts the writes to those. (torch has no const method that asks.)
    if (!const_cast<c10::TensorImpl*>(gradient)->is_inference()) {
      marks_of(self).set(gradient, next);
    }
    return true;
  });
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* first_marked(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "first_marked(params, unwritten_only)");
    return nullptr;
  }
  const bool unwritten_only = args[1] == Py_True;
  Py_ssize_t found = -1;
  size_t next = 0;
  each_gradient(args[0], false, [&](Py_ssize_t place, const c10::TensorImpl* gradient) {
    const Mark* mark = marks_of(self).find(gradient, next);
    if (mark != nullptr && (!unwritten_only || mark->is_unwritten())) {
      found = place;
    }
    return found < 0;
  });
  return PyLong_FromSsize_t(found);
  END_HANDLE_TH_ERRORS
}

inline PyObject* knows_one_of(PyObject* self, PyObject* gradients) {
  HANDLE_TH_ERRORS
  bool known = false;
  size_t next = 0;
  each_gradient(gradients, true, [&](Py_ssize_t, const c10::TensorImpl* gradient) {
    known = marks_of(self).find(gradient, next) != nullptr;
    return !known;
  });
  return PyBool_FromLong(known);
  END_HANDLE_TH_ERRORS
}

inline PyObject* unwritten_marks(PyObject* self, PyObject* params) {
  HANDLE_TH_ERRORS
  std::vector<size_t> places;
  size_t next = 0;
  each_gradient(params, false, [&](Py_ssize_t, const c10::TensorImpl* gradient) {
    const Mark* mark = marks_of(self).find(gradient, next);
    if (mark != nullptr && mark->is_unwritten()) {
      places.push_back(marks_of(self).place_of(mark));
    }
    return true;
  });
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(places.data()),
                                   static_cast<Py_ssize_t>(places.size() * sizeof(size_t)));
  END_HANDLE_TH_ERRORS
}

inline PyObject* renew_marks(PyObject* self, PyObject* given) {
  HANDLE_TH_ERRORS
  char* bytes = nullptr;
  Py_ssize_t length = 0;
  if (PyBytes_AsStringAndSize(given, &bytes, &length) < 0) {
    return nullptr;
  }
  const Py_ssize_t wide = sizeof(size_t);
  for (Py_ssize_t at = 0; at + wide <= length; at += wide) {
    size_t place = 0;
    std::memcpy(&place, bytes + at, sizeof(place));
    marks_of(self).renew(place);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

inline PyObject* clear_marks(PyObject* self, PyObject*) {
  marks_of(self).clear();
  Py_RETURN_NONE;
}

template <typename Method>
PyCFunction as_method(Method method) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(method));
}

}  // namespace

inline bool add_gradient_marks(PyObject* module) {
  static PyMethodDef methods[] = {
      {"mark", mark_gradients, METH_O,
       "The gradients of these parameters are marked, as they are now."},
      {"first_marked", as_method(first_marked), METH_FASTCALL,
       "first_marked(params, unwritten_only): the place of the first parameter whose gradient is "
       "marked, and perhaps has not been written to since; -1 if there is none."},
      {"knows_one_of", knows_one_of, METH_O, "Whether one of these gradients is marked."},
      {"unwritten", unwritten_marks, METH_O,
       "For `renew`: the marks of those gradients that have not been written to since."},
      {"renew", renew_marks, METH_O, "What was written since is no matter to these marks."},
      {"clear", clear_marks, METH_NOARGS, "No gradient is marked."},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(new_marks)},
      {Py_tp_dealloc, reinterpret_cast<void*>(free_marks)},
      {Py_tp_methods, methods},
      {Py_tp_doc, const_cast<char*>("Gradients that were unscaled, and their versions by then.")},
      {0, nullptr}};
  static PyType_Spec spec = {"gradilocks_native.GradientMarks", sizeof(GradientMarks), 0,
                             Py_TPFLAGS_DEFAULT, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) {
    return false;
  }
  const bool added = PyModule_AddObjectRef(module, "GradientMarks", type) == 0;
  Py_DECREF(type);
  return added;
}

}  // namespace gradilocks
