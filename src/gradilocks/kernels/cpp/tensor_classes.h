// What is known of a class of tensors without asking Python at every tensor of it: whether C++ sees
// the gradient that Python would tell, and, of DTensors, where in the object their parts lie.
//
// A DTensor keeps this rank's elements and its spec (mesh and placements) in slots. Read through
// Python a slot takes 30 to 60 ns, and it has two objects more to go through than a plain tensor.
// Classes may be changed at any time, so whoever keeps a Kind asks again whether it holds.
#pragma once
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <structmember.h>

#include <deque>
#include <utility>

#include "native.h"

namespace gradilocks {
namespace {

// What a call of Python has raised while something was asked.
struct PythonRaised {};

// How a tensor's Python object is asked for differs between torch 2.6 and 2.13: the first of these
// that compiles is taken.
template <typename Slot>
auto object_in(Slot* slot, int, int) -> decltype(slot->load_pyobj()) {
  return slot->load_pyobj();
}
template <typename Slot>
auto object_in(Slot* slot, int, long) -> decltype(slot->check_pyobj().value_or(nullptr)) {
  return slot->check_pyobj().value_or(nullptr);
}
template <typename Slot>
auto object_in(Slot* slot, long, long)
    -> decltype(slot->check_pyobj(getPyInterpreter()).value_or(nullptr)) {
  return slot->check_pyobj(getPyInterpreter()).value_or(nullptr);
}

// A tensor's Python object, null if it has none; the tensor keeps it alive.
inline PyObject* object_of(c10::TensorImpl* impl) { return object_in(impl->pyobj_slot(), 0, 0); }

inline PyTypeObject* tensor_class() { return reinterpret_cast<PyTypeObject*>(THPVariableClass); }

// The class that a tensor has, or would have, in Python. Null if that is not known without asking.
inline PyTypeObject* class_of(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (PyObject* object = object_of(impl)) {
    return Py_TYPE(object);
  }
  // Other kinds of devices may have registered a class of their own.
  return impl->is_cpu() || impl->is_cuda() ? tensor_class() : nullptr;
}

// Whether C++ sees what Python tells of tensors of a class by an attribute, such as `grad`: they have
// none of that name of their own, and there is nobody who is asked first. False if they are none.
inline bool has_plain(const char* attribute, PyTypeObject* type) {
  if (THPVariable_CheckTypeExact(type)) {
    return true;
  }
  PyTypeObject* base = tensor_class()->tp_base;
  if (type->tp_getattro != PyObject_GenericGetAttr || base == nullptr ||
      !PyType_IsSubtype(type, tensor_class())) {
    return false;
  }
  for (const char* name : {attribute, "__torch_function__"}) {
    PyObject* from = name == attribute ? reinterpret_cast<PyObject*>(base) : ParameterClass;
    py::object own = py::reinterpret_steal<py::object>(
        PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name));
    py::object torchs = py::reinterpret_steal<py::object>(PyObject_GetAttrString(from, name));
    if (!own || !torchs || own.ptr() != torchs.ptr()) {
      PyErr_Clear();
      return false;
    }
  }
  return true;
}

// Where in the objects of a class the slot of this name lies; 0 if it has no such slot.
inline Py_ssize_t slot_of(PyTypeObject* type, const py::object& name) {
  py::object found = py::reinterpret_steal<py::object>(
      PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name.ptr()));
  if (!found) {
    PyErr_Clear();
    return 0;
  }
  if (Py_TYPE(found.ptr()) != &PyMemberDescr_Type) {
    return 0;
  }
  const auto* slot = reinterpret_cast<PyMemberDescrObject*>(found.ptr());
  const bool own = PyType_IsSubtype(type, slot->d_common.d_type);
  return own && slot->d_member->type == T_OBJECT_EX ? slot->d_member->offset : 0;
}

// What the slot at this place of an object holds: borrowed, null if nothing.
inline PyObject* part_of(PyObject* object, Py_ssize_t slot) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + slot);
}

inline py::object attribute(PyObject* object, const py::object& name) {
  py::object found = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name.ptr()));
  if (!found) {  // Another torch has another name for it: then Python walks.
    PyErr_SetString(PyExc_TypeError, "this torch's DTensors have no such attribute");
    throw PythonRaised();
  }
  return found;
}

// A class of parameters.
struct Kind {
  py::object type;
  bool plain = false;              // Whether C++ sees the gradient that Python would tell.
  Py_ssize_t local = 0, spec = 0;  // Of a DTensor: the slots of its parts. Else 0.

  bool is_of(PyObject* object) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.ptr();
  }
  bool is_distributed() const { return local != 0; }
};

// How a DTensor lies: on which mesh, and by which placements.
struct Lie {
  py::object mesh, placements;

  // May ask Python, so the caller holds both.
  bool is_like(const Lie& other) const {
    return are_equal(mesh, other.mesh) && are_equal(placements, other.placements);
  }

  static bool are_equal(const py::object& one, const py::object& other) {
    const int equal = PyObject_RichCompareBool(one.ptr(), other.ptr(), Py_EQ);
    if (equal < 0) {
      throw PythonRaised();
    }
    return equal != 0;
  }
};

// The classes of the parameters of a walk.
class Kinds {
 public:
  Kinds() = default;

  // `distributed`: None, or the class of DTensors, the names of the slots with the local tensor and
  // the spec, and those of a spec's attributes for mesh and placements.
  explicit Kinds(PyObject* distributed) {
    if (distributed == Py_None) {
      return;
    }
    PyObject* parts[5] = {};
    if (!PyArg_ParseTuple(distributed, "O!UUUU", &PyType_Type, &parts[0], &parts[1], &parts[2],
                          &parts[3], &parts[4])) {
      throw PythonRaised();
    }
    py::object* own[5] = {&dtensor_, &local_, &spec_, &mesh_, &placements_};
    for (size_t i = 0; i < 5; ++i) {
      *own[i] = py::reinterpret_borrow<py::object>(parts[i]);
    }
  }

  // The class of an object, null if it was not met; runs no Python code.
  const Kind* known(PyObject* object) const {
    for (const Kind& kind : kinds_) {
      if (kind.is_of(object)) {
        return &kind;
      }
    }
    return nullptr;
  }

  // The same; it is looked at when it is met first.
  const Kind& of(PyObject* object) {
    const Kind* kind = known(object);
    return kind != nullptr ? *kind : kinds_.emplace_back(seen(Py_TYPE(object)));
  }

  // Whether all classes are still as they were seen: somebody may have given one a `grad`.
  bool hold() const {
    for (const Kind& kind : kinds_) {
      const Kind now = seen(reinterpret_cast<PyTypeObject*>(kind.type.ptr()));
      if (now.plain != kind.plain || now.local != kind.local || now.spec != kind.spec) {
        return false;
      }
    }
    return true;
  }

  // How a DTensor with this spec lies, which the caller holds.
  Lie lie(PyObject* spec) const { return Lie{mesh(spec), attribute(spec, placements_)}; }
  py::object mesh(PyObject* spec) const { return attribute(spec, mesh_); }

  template <typename Visit>
  int every_object(Visit visit) const {
    for (const Kind& kind : kinds_) {
      if (const int stop = visit(kind.type.ptr())) return stop;
    }
    return visit(dtensor_.ptr());
  }

 private:
  Kind seen(PyTypeObject* type) const {
    Kind kind;
    kind.type = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
    kind.plain = has_plain("grad", type);
    auto* dtensor = reinterpret_cast<PyTypeObject*>(dtensor_.ptr());
    if (kind.plain && dtensor != nullptr && PyType_IsSubtype(type, dtensor)) {
      const Py_ssize_t local = slot_of(type, local_), spec = slot_of(type, spec_);
      kind.plain = local != 0 && spec != 0;  // Else another torch keeps its parts elsewhere.
      kind.local = kind.plain ? local : 0;
      kind.spec = kind.plain ? spec : 0;
    }
    return kind;
  }

  std::deque<Kind> kinds_;  // They stay where they are.
  py::object dtensor_, local_, spec_, mesh_, placements_;
};

// This rank's elements of a DTensor; undefined if only Python can say, as of elements that a
// collective is still bringing.
inline at::Tensor local_of(PyObject* tensor, const Kind& kind) {
  PyObject* local = part_of(tensor, kind.local);
  if (local == nullptr || Py_TYPE(local) != tensor_class()) {
    return at::Tensor();
  }
  const at::Tensor& found = THPVariable_Unpack(local);
  return found.requires_grad() ? found.detach() : found;
}

// Brings memory into the cache, without waiting for it; nothing is read there.
inline void fetch_lines(const void* at, size_t bytes) {
  for (size_t offset = 0; at != nullptr && offset < bytes; offset += 64) {
    __builtin_prefetch(static_cast<const char*>(at) + offset);
  }
}

// Brings what a walk will read of some parameters into the cache, step by step along the pointers
// that lead there: a step is asked for of all of them before the next step is taken of one. After
// other work has filled the cache, each of the steps is a wait for memory, and one parameter would
// wait for six of them in a row, a DTensor for ten (2,000 parameters after 32 MB of copies, two
// busy AMD cores: 3.2 ms, and 1.0 to 1.6 so).
class Ahead {
 public:
  static constexpr size_t kMost = 64;  // Parameters that are fetched at a time.

  // A parameter that will be read, of a kind that is `plain`; nothing of it is read now.
  void add(PyObject* param, const Kind& kind) {
    if (count_ < kMost) {
      fetch_lines(param, kind.is_distributed() ? 128 : 64);
      each_[count_++] = Steps{param, &kind, nullptr, nullptr, nullptr};
    }
  }

  void fetch() {
    over([](Steps& at) {
      at.param_impl = THPVariable_Unpack(at.param).unsafeGetTensorImpl();
      fetch_lines(at.param_impl, sizeof(c10::TensorImpl));
      if (at.kind->is_distributed()) {
        at.home = part_of(at.param, at.kind->local);
        fetch_lines(at.home, 64);
      }
    });
    over([](Steps& at) {
      fetch_lines(at.param_impl->autograd_meta(), 128);
      if (at.kind->is_distributed()) {
        at.home_impl = impl_in(at.home);
      } else {
        at.home_impl = at.param_impl;
        memory(at.home_impl);
      }
    });
    over([](Steps& at) {
      if (at.kind->is_distributed()) {
        memory(at.home_impl);
      }
      const at::Tensor& grad = std::as_const(*at.param_impl).grad();
      at.grad_impl = grad.defined() ? grad.unsafeGetTensorImpl() : nullptr;
      fetch_lines(at.grad_impl, sizeof(c10::TensorImpl));
    });
    over([](Steps& at) {
      if (!at.kind->is_distributed()) {
        memory(at.grad_impl);
        if (at.grad_impl != nullptr) {  // Which says the gradient's class, if it has one.
          fetch_lines(object_of(at.grad_impl), 16);
        }
        return;
      }
      at.home = at.grad_impl == nullptr ? nullptr : object_of(at.grad_impl);
      fetch_lines(at.home, 128);
    });
    over([](Steps& at) {
      if (at.kind->is_distributed()) {
        const bool known = at.home != nullptr && at.kind->is_of(at.home);  // As a rule.
        fetch_lines(known ? part_of(at.home, at.kind->spec) : nullptr, 64);
        at.home = known ? part_of(at.home, at.kind->local) : nullptr;
        fetch_lines(at.home, 64);
      }
    });
    over([](Steps& at) {
      if (at.kind->is_distributed()) {
        at.home_impl = impl_in(at.home);
      }
    });
    over([](Steps& at) {
      if (at.kind->is_distributed()) {
        memory(at.home_impl);
      }
    });
    count_ = 0;
  }

 private:
  struct Steps {
    PyObject* param;
    const Kind* kind;
    c10::TensorImpl *param_impl, *home_impl, *grad_impl;
    PyObject* home = nullptr;  // Of a DTensor: the object whose elements come next.
  };

  template <typename Step>
  void over(Step step) {
    for (size_t i = 0; i < count_; ++i) {
      step(each_[i]);
    }
  }

  // The tensor in an object that should be one, which is brought; null if it is none.
  static c10::TensorImpl* impl_in(PyObject* object) {
    const bool known = object != nullptr && Py_TYPE(object) == tensor_class();
    c10::TensorImpl* impl = known ? THPVariable_Unpack(object).unsafeGetTensorImpl() : nullptr;
    fetch_lines(impl, sizeof(c10::TensorImpl));
    return impl;
  }

  static void memory(c10::TensorImpl* impl) {
    if (impl != nullptr && impl->has_storage()) {
      fetch_lines(impl->unsafe_storage().unsafeGetStorageImpl(), 64);
    }
  }

  Steps each_[kMost];
  size_t count_ = 0;
};

}  // namespace
}  // namespace gradilocks
