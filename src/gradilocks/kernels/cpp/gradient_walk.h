// The walk of GradientTable (step/table.py): lists of parameters enter, and whether their gradients
// are those of the last step leaves: the same, the same but for their addresses, or something else.
//
// `walk_over` is given what Python has found in a first look; `renew` compares everything of it
// with what is there now. It makes no Python object of a gradient: 2,000 of them take 0.05 ms, where
// asking each in Python takes 1.2 ms, and 2 with new ones. Whatever it does not know by itself
// (another class, another layout, a tensor without memory) it leaves to Python, by saying that
// something else is there.
//
// The global lock is held throughout. Releasing a tensor, or asking a parameter of a foreign class
// for its gradient, may run Python code that calls in here again or changes the lists. So nothing is
// changed while something is asked, and what is let go is let go last.
#pragma once
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <ATen/ops/empty.h>
#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>
#include <vector>

#include "native.h"

namespace gradilocks {
namespace {

// --- tensors without a Python object ---------------------------------------------------------------

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

// The class that a tensor has, or would have, in Python. Null if that is not known without asking.
inline PyTypeObject* class_of(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (PyObject* object = object_in(impl->pyobj_slot(), 0, 0)) {
    return Py_TYPE(object);
  }
  // Other kinds of devices may have registered a class of their own.
  const bool known = impl->is_cpu() || impl->is_cuda();
  return known ? reinterpret_cast<PyTypeObject*>(THPVariableClass) : nullptr;
}

// Whether tensors of a class have the gradient that C++ sees: no `grad` of their own, and nobody
// who is asked first.
inline bool has_plain_grad(PyTypeObject* type) {
  if (THPVariable_CheckTypeExact(type)) {
    return true;
  }
  PyTypeObject* base = reinterpret_cast<PyTypeObject*>(THPVariableClass)->tp_base;
  if (type->tp_getattro != PyObject_GenericGetAttr || base == nullptr) {
    return false;
  }
  for (const char* name : {"grad", "__torch_function__"}) {
    PyObject* from = name[0] == 'g' ? reinterpret_cast<PyObject*>(base) : ParameterClass;
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

// Whether a tensor's memory is its own, so that sizes, strides and address are those of elements.
inline bool has_memory(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->has_storage() && impl->layout() == c10::kStrided && !impl->is_python_dispatch();
}

inline int64_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.mutable_data_ptr());
}

// All that a kernel's tables depend on, but for the address.
class Make {
 public:
  Make(const at::Tensor& tensor, PyTypeObject* type, std::vector<int64_t>& numbers)
      : type_(type),
        dtype_(tensor.dtype()),
        device_(tensor.device()),
        negative_(tensor.is_neg()),
        dim_(tensor.sizes().size()),
        at_(numbers.size()) {
    numbers.insert(numbers.end(), tensor.sizes().begin(), tensor.sizes().end());
    numbers.insert(numbers.end(), tensor.strides().begin(), tensor.strides().end());
  }

  bool is_of(const at::Tensor& tensor, PyTypeObject* type,
             const std::vector<int64_t>& numbers) const {
    if (type != type_ || !has_memory(tensor)) {
      return false;
    }
    const c10::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
    const int64_t* known = numbers.data() + at_;
    return sizes.size() == dim_ && std::equal(sizes.begin(), sizes.end(), known) &&
           std::equal(strides.begin(), strides.end(), known + dim_) && tensor.dtype() == dtype_ &&
           tensor.device() == device_ && tensor.is_neg() == negative_;
  }

 private:
  PyTypeObject* type_;  // Held by the walk, or by torch.
  caffe2::TypeMeta dtype_;
  c10::Device device_;
  bool negative_;
  size_t dim_;
  size_t at_;  // Where sizes and strides begin among the numbers.
};

// Whether two of the addresses are equal; those of tensors without elements are 0.
inline bool coincide(const int64_t* addresses, size_t count, std::vector<int64_t>& scratch) {
  size_t room = 16;
  while (room < 2 * count) {
    room *= 2;
  }
  scratch.assign(room, 0);
  for (size_t i = 0; i < count; ++i) {
    const int64_t address = addresses[i];
    if (address == 0) {
      continue;
    }
    size_t at = (static_cast<uint64_t>(address) * 0x9E3779B97F4A7C15u >> 20) & (room - 1);
    while (scratch[at] != 0) {
      if (scratch[at] == address) {
        return true;
      }
      at = (at + 1) & (room - 1);
    }
    scratch[at] = address;
  }
  return false;
}

// --- the walk --------------------------------------------------------------------------------------

// What a call of Python has raised while something was asked.
struct PythonRaised {};

// A place in the lists: whose it is, and what is known of it.
struct Place {
  PyObject* param;       // Owned.
  PyTypeObject* type;    // Null if Python has to be asked for its gradient.
  Py_ssize_t among;      // Its number among those that have a gradient; below 0: see below.
};
constexpr Py_ssize_t kLacking = -1;  // It has no gradient.
constexpr Py_ssize_t kAgain = -2;    // It has come before.

struct Walk {
  std::vector<Py_ssize_t> groups;   // How many groups each optimizer has.
  std::vector<Py_ssize_t> lengths;  // How many parameters each group has.
  std::vector<Place> places;
  std::vector<std::pair<PyObject*, bool>> types;  // Classes (owned), and whose `grad` is plain.
  std::vector<int64_t> homes, addresses, numbers, scratch;
  std::vector<Make> params, grads;
  bool aligned = false, may_share = false, shared = false;
};

// A parameter's gradient, undefined if it has none. Throws PythonRaised if asking Python fails.
inline at::Tensor gradient_of(PyObject* param, bool plain) {
  if (plain) {
    return THPVariable_Unpack(param).grad();
  }
  py::object grad = py::reinterpret_steal<py::object>(PyObject_GetAttrString(param, "grad"));
  if (!grad) {
    throw PythonRaised();
  }
  if (grad.is_none()) {
    return at::Tensor();
  }
  if (!THPVariable_Check(grad.ptr())) {
    PyErr_SetString(PyExc_TypeError, "a gradient is no tensor");
    throw PythonRaised();
  }
  return THPVariable_Unpack(grad.ptr());
}

// Calls `visit(place, param)` for every parameter in the lists, which may change meanwhile; false as
// soon as it says so, or the lists are not as long as they were. `param` is owned until it returns.
template <typename Visit>
bool every_place(const Walk& walk, PyObject* lists, Visit visit) {
  if (!PyList_Check(lists)) {
    return false;
  }
  size_t place = 0, group_number = 0;
  for (size_t o = 0; o < walk.groups.size(); ++o) {
    if (PyList_GET_SIZE(lists) != static_cast<Py_ssize_t>(walk.groups.size())) {
      return false;
    }
    py::object groups = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(lists, o));
    if (!PyList_Check(groups.ptr())) {
      return false;
    }
    for (Py_ssize_t g = 0; g < walk.groups[o]; ++g, ++group_number) {
      if (PyList_GET_SIZE(groups.ptr()) != walk.groups[o]) {
        return false;
      }
      py::object group = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(groups.ptr(), g));
      if (!PyList_Check(group.ptr())) {
        return false;
      }
      const Py_ssize_t length = walk.lengths[group_number];
      for (Py_ssize_t k = 0; k < length; ++k, ++place) {
        // Held by the walk itself, if it is the one that is expected.
        if (PyList_GET_SIZE(group.ptr()) != length ||
            PyList_GET_ITEM(group.ptr(), k) != walk.places[place].param ||
            !visit(walk.places[place])) {
          return false;
        }
      }
      if (PyList_GET_SIZE(group.ptr()) != length) {
        return false;
      }
    }
    if (PyList_GET_SIZE(groups.ptr()) != walk.groups[o]) {
      return false;
    }
  }
  return PyList_GET_SIZE(lists) == static_cast<Py_ssize_t>(walk.groups.size());
}

// The gradients as they are now and where they lie; false if something but the addresses is another.
inline bool look(const Walk& walk, PyObject* lists, std::vector<at::Tensor>& held,
                 std::vector<int64_t>& addresses) {
  for (const auto& [type, plain] : walk.types) {  // Somebody may have given it one.
    if (plain && !has_plain_grad(reinterpret_cast<PyTypeObject*>(type))) {
      return false;
    }
  }
  held.reserve(walk.grads.size());
  addresses.reserve(walk.grads.size());
  return every_place(walk, lists, [&](const Place& place) {
    if (place.among == kAgain) {
      return true;
    }
    const bool plain = place.type != nullptr && Py_TYPE(place.param) == place.type;
    at::Tensor grad = gradient_of(place.param, plain);
    if (place.among == kLacking) {
      return !grad.defined();
    }
    const at::Tensor& param = THPVariable_Unpack(place.param);
    const size_t i = static_cast<size_t>(place.among);
    if (!grad.defined() || !walk.params[i].is_of(param, Py_TYPE(place.param), walk.numbers) ||
        !walk.grads[i].is_of(grad, class_of(grad), walk.numbers) ||
        address_of(param) != walk.homes[i]) {
      return false;
    }
    addresses.push_back(address_of(grad));
    held.push_back(std::move(grad));
    return true;
  });
}

// --- the Python types ------------------------------------------------------------------------------

// Tensors that are held, as Python objects only if somebody asks for them.
struct HeldTensors {
  PyObject_HEAD
  std::vector<at::Tensor>* tensors;  // Owned.
};

struct GradientWalk {
  PyObject_HEAD
  Walk* walk;  // Owned.
};

PyObject* held_tensors_type = nullptr;
PyObject* gradient_walk_type = nullptr;

// Runs what may throw. False with a Python error set if it did.
template <typename Action>
bool guarded(Action action) {
  try {
    action();
    return true;
  } catch (const PythonRaised&) {
  } catch (python_error& error) {
    error.restore();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return false;
}

inline py::object hold(std::vector<at::Tensor>&& tensors) {
  PyTypeObject* type = reinterpret_cast<PyTypeObject*>(held_tensors_type);
  py::object made = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
  if (!made) {
    throw PythonRaised();
  }
  auto* own = reinterpret_cast<HeldTensors*>(made.ptr());
  own->tensors = new std::vector<at::Tensor>(std::move(tensors));
  return made;
}

inline void held_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete std::exchange(reinterpret_cast<HeldTensors*>(self)->tensors, nullptr);
  type->tp_free(self);
  Py_DECREF(type);
}

inline Py_ssize_t held_length(PyObject* self) {
  return static_cast<Py_ssize_t>(reinterpret_cast<HeldTensors*>(self)->tensors->size());
}

inline PyObject* held_item(PyObject* self, Py_ssize_t place) {
  const std::vector<at::Tensor>& tensors = *reinterpret_cast<HeldTensors*>(self)->tensors;
  if (place < 0 || static_cast<size_t>(place) >= tensors.size()) {
    PyErr_SetString(PyExc_IndexError, "there are not so many tensors");
    return nullptr;
  }
  PyObject* tensor = nullptr;
  guarded([&] { tensor = THPVariable_Wrap(tensors[static_cast<size_t>(place)]); });
  return tensor;
}

inline int walk_traverse(PyObject* self, visitproc visit, void* arg) {
  if (const Walk* walk = reinterpret_cast<GradientWalk*>(self)->walk) {
    for (const Place& place : walk->places) {
      Py_VISIT(place.param);
    }
    for (const auto& each : walk->types) {
      Py_VISIT(each.first);
    }
  }
  Py_VISIT(Py_TYPE(self));
  return 0;
}

inline int walk_clear(PyObject* self) {
  Walk* walk = std::exchange(reinterpret_cast<GradientWalk*>(self)->walk, nullptr);
  if (walk != nullptr) {
    for (const Place& place : walk->places) {
      Py_DECREF(place.param);
    }
    for (const auto& each : walk->types) {
      Py_DECREF(each.first);
    }
    delete walk;
  }
  return 0;
}

inline void walk_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  walk_clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// None: something has changed, and has to be looked at again. Else the gradients of this moment and,
// on the host, where they lie, if that is not where they lay; else None.
inline PyObject* walk_renew(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  Walk* walk = reinterpret_cast<GradientWalk*>(self)->walk;
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "renew takes the lists and whether to send in any case");
    return nullptr;
  }
  const int send = PyObject_IsTrue(args[1]);
  if (send < 0) {
    return nullptr;
  }
  PyObject* answer = nullptr;
  const bool done = guarded([&] {
    std::vector<at::Tensor> held;
    std::vector<int64_t> addresses;
    if (walk == nullptr || !look(*walk, args[0], held, addresses)) {
      answer = Py_NewRef(Py_None);
      return;
    }
    py::object numbers = py::none();
    bool shared = walk->shared;
    if (addresses != walk->addresses || send) {
      int64_t low = 0;
      for (const int64_t address : addresses) {
        low |= address;
      }
      shared = coincide(addresses.data(), addresses.size(), walk->scratch);
      if (!walk->aligned || (low & 15) != 0 || (shared && !walk->may_share)) {
        answer = Py_NewRef(Py_None);
        return;
      }
      // Always a new one: the last may still be on its way to a device.
      at::Tensor sent = at::empty({static_cast<int64_t>(addresses.size())}, at::kLong);
      std::memcpy(sent.mutable_data_ptr(), addresses.data(), addresses.size() * sizeof(int64_t));
      numbers = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(sent)));
    }
    py::object tensors = hold(std::move(held));
    answer = PyTuple_Pack(2, tensors.ptr(), numbers.ptr());
    if (answer == nullptr) {
      throw PythonRaised();
    }
    walk->shared = shared;
    walk->addresses.swap(addresses);
  });
  if (done) {
    return answer;
  }
  // As in Python: a gradient that has no address, or of which something cannot be said.
  if (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_RuntimeError)) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  return nullptr;
}

inline PyObject* walk_shared(PyObject* self, void*) {
  const Walk* walk = reinterpret_cast<GradientWalk*>(self)->walk;
  return PyBool_FromLong(walk != nullptr && walk->shared);
}

// Fills a walk by what was found; false if it is none that C++ can walk over.
inline bool fill(Walk& walk, PyObject* lists, PyObject* params, PyObject* tensors) {
  const Py_ssize_t having = PyList_GET_SIZE(params);
  if (!PyList_Check(lists) || PyList_GET_SIZE(tensors) != having) {
    return false;
  }
  for (Py_ssize_t i = 0; i < having; ++i) {
    PyObject* param = PyList_GET_ITEM(params, i);
    PyObject* grad = PyList_GET_ITEM(tensors, i);
    if (!THPVariable_Check(param) || !THPVariable_CheckExact(grad)) {
      return false;
    }
    const at::Tensor &home = THPVariable_Unpack(param), &found = THPVariable_Unpack(grad);
    if (!has_memory(home) || !has_memory(found)) {
      return false;
    }
    walk.params.emplace_back(home, Py_TYPE(param), walk.numbers);
    walk.grads.emplace_back(found, Py_TYPE(grad), walk.numbers);
    walk.homes.push_back(address_of(home));
    walk.addresses.push_back(address_of(found));
  }
  std::unordered_set<PyObject*> seen;
  Py_ssize_t next = 0;
  for (Py_ssize_t o = 0; o < PyList_GET_SIZE(lists); ++o) {
    PyObject* groups = PyList_GET_ITEM(lists, o);
    if (!PyList_Check(groups)) {
      return false;
    }
    walk.groups.push_back(PyList_GET_SIZE(groups));
    for (Py_ssize_t g = 0; g < PyList_GET_SIZE(groups); ++g) {
      PyObject* group = PyList_GET_ITEM(groups, g);
      if (!PyList_Check(group)) {
        return false;
      }
      walk.lengths.push_back(PyList_GET_SIZE(group));
      for (Py_ssize_t k = 0; k < PyList_GET_SIZE(group); ++k) {
        PyObject* param = PyList_GET_ITEM(group, k);
        if (!THPVariable_Check(param)) {
          return false;
        }
        PyTypeObject* type = Py_TYPE(param);
        const bool plain = has_plain_grad(type);
        if (!THPVariable_CheckTypeExact(type)) {
          const std::pair<PyObject*, bool> each(reinterpret_cast<PyObject*>(type), plain);
          if (std::find(walk.types.begin(), walk.types.end(), each) == walk.types.end()) {
            walk.types.push_back(each);
            Py_INCREF(each.first);
          }
        }
        Py_ssize_t among = kLacking;
        if (!seen.insert(param).second) {
          among = kAgain;
        } else if (next < having && PyList_GET_ITEM(params, next) == param) {
          among = next++;
        }
        walk.places.push_back(Place{Py_NewRef(param), plain ? type : nullptr, among});
      }
    }
  }
  return next == having;
}

// walk_over(lists, params, tensors, aligned, may_share): a GradientWalk over what was found, or None
// if C++ cannot walk over it. The parameters that have a gradient, each once and in order, and these
// gradients; whether all of them are aligned to 16 bytes, and whether two may be one.
inline PyObject* walk_over(PyObject*, PyObject* args) {
  PyObject *lists = nullptr, *params = nullptr, *tensors = nullptr;
  int aligned = 0, may_share = 0;
  if (!PyArg_ParseTuple(args, "OO!O!pp", &lists, &PyList_Type, &params, &PyList_Type, &tensors,
                        &aligned, &may_share)) {
    return nullptr;
  }
  PyTypeObject* type = reinterpret_cast<PyTypeObject*>(gradient_walk_type);
  PyObject* made = type->tp_alloc(type, 0);
  if (made == nullptr) {
    return nullptr;
  }
  bool walkable = false;
  const bool done = guarded([&] {
    Walk* walk = new Walk();
    reinterpret_cast<GradientWalk*>(made)->walk = walk;
    walk->aligned = aligned != 0;
    walk->may_share = may_share != 0;
    walkable = fill(*walk, lists, params, tensors);
    walk->shared = coincide(walk->addresses.data(), walk->addresses.size(), walk->scratch);
  });
  if (done && walkable) {
    return made;
  }
  Py_DECREF(made);
  if (!done) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_RuntimeError)) {
      return nullptr;
    }
    PyErr_Clear();
  }
  Py_RETURN_NONE;
}

PyType_Slot held_tensors_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(held_dealloc)},
                                    {Py_sq_length, reinterpret_cast<void*>(held_length)},
                                    {Py_sq_item, reinterpret_cast<void*>(held_item)},
                                    {0, nullptr}};
PyType_Spec held_tensors_spec = {"gradilocks_native.HeldTensors", sizeof(HeldTensors), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                 held_tensors_slots};

PyMethodDef gradient_walk_methods[] = {
    {"renew", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(walk_renew)), METH_FASTCALL,
     "renew(lists, send): the gradients, and where they lie if that is new; None: look again."},
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef gradient_walk_getset[] = {
    {"shared", walk_shared, nullptr, "Whether two gradients begin at one address.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot gradient_walk_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(walk_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(walk_clear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(walk_dealloc)},
    {Py_tp_methods, gradient_walk_methods},
    {Py_tp_getset, gradient_walk_getset},
    {0, nullptr}};
PyType_Spec gradient_walk_spec = {
    "gradilocks_native.GradientWalk", sizeof(GradientWalk), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    gradient_walk_slots};
PyMethodDef gradient_walk_functions[] = {
    {"walk_over", walk_over, METH_VARARGS, "A GradientWalk over gradients that were found, or None."},
    {nullptr, nullptr, 0, nullptr}};

inline bool add_gradient_walk(PyObject* module) {
  held_tensors_type = PyType_FromSpec(&held_tensors_spec);
  gradient_walk_type = PyType_FromSpec(&gradient_walk_spec);
  return held_tensors_type != nullptr && gradient_walk_type != nullptr &&
         PyModule_AddFunctions(module, gradient_walk_functions) == 0;
}

}  // namespace
}  // namespace gradilocks
