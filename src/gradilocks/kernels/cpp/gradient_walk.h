// Walks over parameters and their gradients (step/table.py): lists of parameters enter, and whether
// their gradients are those of the last step leaves: the same, the same but for their addresses, or
// something else.
//
// `walk_over` is given what Python has found in a first look; `renew` compares all of it with what
// is there now. No Python object is made of a gradient that has none: 2,000 parameters take 0.06 to
// 0.1 ms, and 0.2 with new gradients, where Python takes 0.75 and 1.1 (two AMD cores). `collect` is
// for whoever is given parameters only once. Whatever they do not know by themselves (another class
// or layout, a tensor without memory) they leave to Python, by answering None.
//
// The global lock is held throughout. Letting go of a tensor, or asking a parameter of a foreign
// class for its gradient, may run Python code that calls in here again or changes the lists. So
// nothing is changed before everything has been asked, and lists are measured at every item.
#pragma once
#include <ATen/ops/empty.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "native.h"

namespace gradilocks {
namespace {

// --- tensors without a Python object -------------------------------------------------------------

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

// Whether a tensor's memory is its own and all there, so that sizes, strides and address are those
// of elements. Storage may have been freed or made smaller (`untyped_storage().resize_(0)`).
inline bool has_memory(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!impl->unsafe_storage() || impl->layout() != c10::kStrided || impl->is_python_dispatch()) {
    return false;
  }
  if (tensor.numel() == 0) {
    return true;
  }
  const c10::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  int64_t last = tensor.storage_offset();
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    last += (sizes[dim] - 1) * strides[dim];
  }
  const size_t needed = static_cast<size_t>(last + 1) * tensor.dtype().itemsize();
  return needed <= impl->unsafe_storage().nbytes();
}

inline int64_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<int64_t>(tensor.mutable_data_ptr());
}

// All that a kernel's tables depend on, but for the address.
class Make {
 public:
  Make(const at::Tensor& tensor, const PyTypeObject* type, std::vector<int64_t>& numbers)
      : type_(type),
        dtype_(tensor.dtype()),
        device_(tensor.device()),
        negative_(tensor.is_neg()),
        dim_(tensor.sizes().size()),
        at_(numbers.size()) {
    numbers.insert(numbers.end(), tensor.sizes().begin(), tensor.sizes().end());
    numbers.insert(numbers.end(), tensor.strides().begin(), tensor.strides().end());
  }

  bool is_of(const at::Tensor& tensor, const PyTypeObject* type,
             const std::vector<int64_t>& numbers) const {
    if (type != type_ || !has_memory(tensor)) {
      return false;
    }
    const c10::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
    if (sizes.size() != dim_ || tensor.dtype() != dtype_ || tensor.device() != device_ ||
        tensor.is_neg() != negative_) {
      return false;
    }
    const int64_t* known = numbers.data() + at_;
    for (size_t i = 0; i < dim_; ++i) {
      if (sizes[i] != known[i] || strides[i] != known[dim_ + i]) {
        return false;
      }
    }
    return true;
  }

 private:
  const PyTypeObject* type_;  // Held by the walk, or by torch.
  caffe2::TypeMeta dtype_;
  c10::Device device_;
  bool negative_;
  size_t dim_;
  size_t at_;  // Where sizes and strides begin among the numbers.
};

// Whether two of the addresses are equal; those of tensors without elements are 0.
inline bool coincide(const std::vector<int64_t>& addresses, std::vector<int64_t>& scratch) {
  size_t room = 16;
  while (room < 2 * addresses.size()) {
    room *= 2;
  }
  scratch.assign(room, 0);
  for (const int64_t address : addresses) {
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

inline bool all_aligned(const std::vector<int64_t>& addresses) {
  int64_t any = 0;
  for (const int64_t address : addresses) {
    any |= address;
  }
  return (any & 15) == 0;
}

// Addresses as a tensor on the host: always a new one, as the last may still be on its way.
inline py::object numbers_of(const std::vector<int64_t>& addresses) {
  at::Tensor sent = at::empty({static_cast<int64_t>(addresses.size())}, at::kLong);
  if (!addresses.empty()) {
    std::memcpy(sent.mutable_data_ptr(), addresses.data(), addresses.size() * sizeof(int64_t));
  }
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(sent)));
}

// --- the walk ------------------------------------------------------------------------------------

// What a call of Python has raised while something was asked.
struct PythonRaised {};

// A place in the lists: whose it is, and what is known of it.
struct Place {
  py::object param;
  PyTypeObject* type;  // Null if Python has to be asked for its gradient.
  Py_ssize_t among;    // Its number among those that have a gradient; below 0: see below.
};
constexpr Py_ssize_t kLacking = -1;  // It has no gradient.
constexpr Py_ssize_t kAgain = -2;    // It has come before.
constexpr size_t kAhead = 64;        // Places that are fetched at a time.

struct Walk {
  std::vector<Py_ssize_t> groups;   // How many groups each optimizer has.
  std::vector<Py_ssize_t> lengths;  // How many parameters each group has.
  std::vector<Place> places;
  std::vector<std::pair<py::object, bool>> types;  // Classes, and whether their `grad` is plain.
  std::vector<int64_t> homes, addresses, numbers, scratch;
  std::vector<Make> params, grads;
  bool aligned = false, may_share = false, shared = false;
  // Of DTensors. Empty if there are none.
  std::vector<bool> distributed;           // Whether each parameter that has a gradient is one.
  std::vector<py::object> specs;           // How each lies on its mesh; null for a plain one.
  std::vector<py::object> gradient_specs;  // Those of gradients that lie as their parameters do.
  py::object local_name, spec_name;        // The attributes that have the local tensor, the spec.
  py::object lie_alike;                    // Says of a parameter and a gradient whether they do.

  template <typename Visit>
  int every_object(Visit visit) const {
    for (const Place& place : places) {
      if (const int stop = visit(place.param.ptr())) return stop;
    }
    for (const auto& each : types) {
      if (const int stop = visit(each.first.ptr())) return stop;
    }
    for (const auto* each : {&specs, &gradient_specs}) {
      for (const py::object& spec : *each) {
        if (const int stop = visit(spec.ptr())) return stop;
      }
    }
    return visit(lie_alike.ptr());
  }
};

inline py::object attribute(PyObject* object, const py::object& name) {
  py::object found = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name.ptr()));
  if (!found) {  // Another torch has another name for it: then Python walks.
    PyErr_SetString(PyExc_TypeError, "this torch's DTensors have no such attribute");
    throw PythonRaised();
  }
  return found;
}

// This rank's elements of a DTensor; undefined if only Python can say.
inline at::Tensor local_of(PyObject* tensor, const py::object& name) {
  const py::object local = attribute(tensor, name);
  if (Py_TYPE(local.ptr()) != reinterpret_cast<PyTypeObject*>(THPVariableClass)) {
    return at::Tensor();
  }
  const at::Tensor& found = THPVariable_Unpack(local.ptr());
  return found.requires_grad() ? found.detach() : found;
}

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

// Calls `visit(place, param)` for every parameter in the lists, which may change meanwhile; false
// as soon as it says so, or the lists are not as long as they were. `param` is owned until it
// returns.
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
            PyList_GET_ITEM(group.ptr(), k) != walk.places[place].param.ptr() ||
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

// What a walk has found.
struct Found {
  std::vector<at::Tensor> held;
  std::vector<c10::Storage> memory;
  std::vector<int64_t> addresses;
  std::vector<py::object> gradient_specs;
};

// Replaces a gradient by its local tensor; false if it does not lie as its parameter does.
inline bool localize(const Walk& walk, PyObject* param, size_t i, at::Tensor& grad, Found& found) {
  c10::TensorImpl* impl = grad.unsafeGetTensorImpl();
  py::object object = py::reinterpret_borrow<py::object>(object_in(impl->pyobj_slot(), 0, 0));
  if (!object || Py_TYPE(object.ptr()) != Py_TYPE(param) ||
      attribute(param, walk.spec_name).ptr() != walk.specs[i].ptr()) {
    return false;
  }
  py::object spec = attribute(object.ptr(), walk.spec_name);
  if (spec.ptr() != walk.gradient_specs[i].ptr()) {  // FSDP2 has one for parameter and gradient.
    py::object alike = py::reinterpret_steal<py::object>(
        PyObject_CallFunctionObjArgs(walk.lie_alike.ptr(), param, object.ptr(), nullptr));
    if (!alike) {
      throw PythonRaised();
    }
    if (alike.ptr() != Py_True) {
      return false;
    }
  }
  found.gradient_specs[i] = std::move(spec);
  grad = local_of(object.ptr(), walk.local_name);
  return grad.defined();
}

// Brings `bytes` of memory into the cache, without waiting for it.
inline void fetch_lines(const void* at, size_t bytes) {
  for (size_t offset = 0; offset < bytes; offset += 64) {
    __builtin_prefetch(static_cast<const char*>(at) + offset);
  }
}

// Brings what `look` will read of some places into the cache, step by step along the pointers that
// lead there: a step is asked for of all places before the next step is taken of one. After other
// work has filled the cache, each of the steps is a wait for memory, and one place would wait for
// six of them in a row (2,000 parameters after 32 MB of copies, two busy AMD cores: 3.2 ms, and 1.0
// to 1.6 so).
inline void fetch_ahead(const Walk& walk, size_t begin, size_t end) {
  c10::TensorImpl* impls[kAhead];
  end = std::min(end, walk.places.size());
  if (begin >= end) {
    return;
  }
  const size_t count = end - begin;
  const auto parts = [](c10::TensorImpl* impl) {  // Beside it: its memory.
    if (impl->has_storage()) {
      fetch_lines(impl->unsafe_storage().unsafeGetStorageImpl(), 64);
    }
  };
  for (size_t i = 0; i < count; ++i) {
    fetch_lines(walk.places[begin + i].param.ptr(), 64);
  }
  for (size_t i = 0; i < count; ++i) {
    const Place& place = walk.places[begin + i];
    const bool plain = place.type != nullptr && Py_TYPE(place.param.ptr()) == place.type;
    impls[i] = plain ? THPVariable_Unpack(place.param.ptr()).unsafeGetTensorImpl() : nullptr;
    if (plain) {
      fetch_lines(impls[i], sizeof(c10::TensorImpl));
    }
  }
  for (size_t i = 0; i < count; ++i) {
    if (impls[i] != nullptr) {
      parts(impls[i]);
      fetch_lines(impls[i]->autograd_meta(), 128);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    if (impls[i] != nullptr) {
      const at::Tensor& grad = std::as_const(*impls[i]).grad();
      impls[i] = grad.defined() ? grad.unsafeGetTensorImpl() : nullptr;
      if (impls[i] != nullptr) {
        fetch_lines(impls[i], sizeof(c10::TensorImpl));
      }
    }
  }
  for (size_t i = 0; i < count; ++i) {
    if (impls[i] != nullptr) {
      parts(impls[i]);
    }
  }
}

// The gradients as they are now and where they lie; false if something but the addresses is
// another.
inline bool look(const Walk& walk, PyObject* lists, Found& found) {
  for (const auto& [type, plain] : walk.types) {  // Somebody may have given it a `grad`.
    if (plain && !has_plain_grad(reinterpret_cast<PyTypeObject*>(type.ptr()))) {
      return false;
    }
  }
  found.held.reserve(walk.grads.size());
  found.memory.reserve(2 * walk.grads.size());
  found.addresses.reserve(walk.grads.size());
  found.gradient_specs.resize(walk.specs.size());
  const auto* tensor_class = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  fetch_ahead(walk, 0, kAhead);
  size_t number = 0;
  return every_place(walk, lists, [&](const Place& place) {
    if (number++ % kAhead == 0) {
      fetch_ahead(walk, number - 1 + kAhead, number - 1 + 2 * kAhead);
    }
    if (place.among == kAgain) {
      return true;
    }
    PyObject* param = place.param.ptr();
    const bool plain = place.type != nullptr && Py_TYPE(param) == place.type;
    at::Tensor grad = gradient_of(param, plain);
    if (place.among == kLacking || !grad.defined()) {
      return (place.among == kLacking) == !grad.defined();
    }
    const size_t i = static_cast<size_t>(place.among);
    if (!walk.distributed.empty() && walk.distributed[i]) {
      const at::Tensor home = local_of(param, walk.local_name);
      if (!plain || !home.defined() || !localize(walk, param, i, grad, found) ||
          !walk.params[i].is_of(home, tensor_class, walk.numbers) ||
          !walk.grads[i].is_of(grad, tensor_class, walk.numbers) ||
          address_of(home) != walk.homes[i]) {
        return false;
      }
      found.memory.push_back(home.storage());
    } else {
      const at::Tensor& home = THPVariable_Unpack(param);
      if (!walk.params[i].is_of(home, Py_TYPE(param), walk.numbers) ||
          !walk.grads[i].is_of(grad, class_of(grad), walk.numbers) ||
          address_of(home) != walk.homes[i]) {
        return false;
      }
      found.memory.push_back(home.storage());
    }
    found.addresses.push_back(address_of(grad));
    found.memory.push_back(grad.storage());
    found.held.push_back(std::move(grad));
    return true;
  });
}

// --- the Python types ----------------------------------------------------------------------------

// Tensors that are held, as Python objects only if somebody asks for them. And the memory at their
// addresses: another thread may give a tensor other memory (`tensor.data = ...`) before it is read.
struct HeldTensors {
  PyObject_HEAD std::vector<at::Tensor>* tensors;  // Owned.
  std::vector<c10::Storage>* memory;               // Owned.
};

struct GradientWalk {
  PyObject_HEAD Walk* walk;  // Owned.
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

inline py::object hold(std::vector<at::Tensor>&& tensors, std::vector<c10::Storage>&& memory) {
  PyTypeObject* type = reinterpret_cast<PyTypeObject*>(held_tensors_type);
  py::object made = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
  if (!made) {
    throw PythonRaised();
  }
  auto* own = reinterpret_cast<HeldTensors*>(made.ptr());
  own->tensors = new std::vector<at::Tensor>(std::move(tensors));
  own->memory = new std::vector<c10::Storage>(std::move(memory));
  return made;
}

inline void held_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete std::exchange(reinterpret_cast<HeldTensors*>(self)->tensors, nullptr);
  delete std::exchange(reinterpret_cast<HeldTensors*>(self)->memory, nullptr);
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

// Held tensors as a list is indexed: one as a Python object, or some of them, held as well.
inline PyObject* held_subscript(PyObject* self, PyObject* key) {
  if (!PySlice_Check(key)) {
    const Py_ssize_t place = PyNumber_AsSsize_t(key, PyExc_IndexError);
    if (place == -1 && PyErr_Occurred()) {
      return nullptr;
    }
    return held_item(self, place < 0 ? place + held_length(self) : place);
  }
  Py_ssize_t begin = 0, end = 0, step = 0;
  if (PySlice_Unpack(key, &begin, &end, &step) < 0) {
    return nullptr;
  }
  const Py_ssize_t length = PySlice_AdjustIndices(held_length(self), &begin, &end, step);
  PyObject* made = nullptr;
  guarded([&] {
    std::vector<at::Tensor> some;
    for (Py_ssize_t i = 0; i < length; ++i) {
      const size_t place = static_cast<size_t>(begin + i * step);
      some.push_back((*reinterpret_cast<HeldTensors*>(self)->tensors)[place]);
    }
    std::vector<c10::Storage> memory = *reinterpret_cast<HeldTensors*>(self)->memory;
    made = hold(std::move(some), std::move(memory)).release().ptr();
  });
  return made;
}

inline int walk_traverse(PyObject* self, visitproc visit, void* arg) {
  if (const Walk* walk = reinterpret_cast<GradientWalk*>(self)->walk) {
    const int stop =
        walk->every_object([&](PyObject* each) { return each == nullptr ? 0 : visit(each, arg); });
    if (stop != 0) {
      return stop;
    }
  }
  Py_VISIT(Py_TYPE(self));
  return 0;
}

inline int walk_clear(PyObject* self) {
  delete std::exchange(reinterpret_cast<GradientWalk*>(self)->walk, nullptr);
  return 0;
}

inline void walk_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  walk_clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// None: something has changed, and has to be looked at again. Else the gradients of this moment
// and, on the host, where they lie, if that is not where they lay; else None.
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
    Found found;
    if (walk == nullptr || !look(*walk, args[0], found)) {
      answer = Py_NewRef(Py_None);
      return;
    }
    py::object numbers = py::none();
    bool shared = walk->shared;
    if (found.addresses != walk->addresses || send) {
      shared = coincide(found.addresses, walk->scratch);
      if (!walk->aligned || !all_aligned(found.addresses) || (shared && !walk->may_share)) {
        answer = Py_NewRef(Py_None);
        return;
      }
      numbers = numbers_of(found.addresses);
    }
    answer =
        PyTuple_Pack(2, hold(std::move(found.held), std::move(found.memory)).ptr(), numbers.ptr());
    if (answer == nullptr) {
      throw PythonRaised();
    }
    walk->shared = shared;
    walk->addresses.swap(found.addresses);
    walk->gradient_specs.swap(found.gradient_specs);
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

// Fills a walk by what was found; false if it is none that C++ can walk over. `marks` says which of
// the parameters are DTensors; None if no one is.
inline bool fill(Walk& walk, PyObject* lists, PyObject* params, PyObject* tensors,
                 PyObject* marks) {
  const Py_ssize_t having = PyList_GET_SIZE(params);
  const bool any = marks != Py_None;
  if (!PyList_Check(lists) || PyList_GET_SIZE(tensors) != having ||
      (any && (!PyList_Check(marks) || PyList_GET_SIZE(marks) != having))) {
    return false;
  }
  if (any) {
    walk.distributed.resize(static_cast<size_t>(having));
    walk.specs.resize(static_cast<size_t>(having));
    walk.gradient_specs.resize(static_cast<size_t>(having));
  }
  for (Py_ssize_t i = 0; i < having; ++i) {
    PyObject* param = PyList_GET_ITEM(params, i);
    PyObject* grad = PyList_GET_ITEM(tensors, i);
    if (!THPVariable_Check(param) || !THPVariable_CheckExact(grad)) {
      return false;
    }
    at::Tensor home = THPVariable_Unpack(param);
    PyTypeObject* type = Py_TYPE(param);
    if (any && PyList_GET_ITEM(marks, i) == Py_True) {
      walk.distributed[static_cast<size_t>(i)] = true;
      walk.specs[static_cast<size_t>(i)] = attribute(param, walk.spec_name);
      home = local_of(param, walk.local_name);
      type = reinterpret_cast<PyTypeObject*>(THPVariableClass);
      if (!home.defined()) {
        return false;
      }
    }
    const at::Tensor& found = THPVariable_Unpack(grad);
    if (!has_memory(home) || !has_memory(found)) {
      return false;
    }
    walk.params.emplace_back(home, type, walk.numbers);
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
          PyObject* object = reinterpret_cast<PyObject*>(type);
          if (std::none_of(walk.types.begin(), walk.types.end(),
                           [&](const auto& each) { return each.first.ptr() == object; })) {
            walk.types.emplace_back(py::reinterpret_borrow<py::object>(object), plain);
          }
        }
        Py_ssize_t among = kLacking;
        if (!seen.insert(param).second) {
          among = kAgain;
        } else if (next < having && PyList_GET_ITEM(params, next) == param) {
          among = next++;
        }
        walk.places.push_back(
            Place{py::reinterpret_borrow<py::object>(param), plain ? type : nullptr, among});
      }
    }
  }
  return next == having;
}

// walk_over(lists, params, tensors, aligned, may_share, distributed): a GradientWalk over what was
// found, or None if C++ cannot walk over it. The parameters that have a gradient, each once and in
// order, and these gradients; whether all of them are aligned to 16 bytes, and whether two may be
// one. `distributed`: None, or which of the parameters are DTensors, the names of the attributes
// that have the local tensor and the spec, and what says whether a gradient lies as its parameter.
inline PyObject* walk_over(PyObject*, PyObject* args) {
  PyObject *lists = nullptr, *params = nullptr, *tensors = nullptr, *distributed = nullptr;
  int aligned = 0, may_share = 0;
  if (!PyArg_ParseTuple(args, "OO!O!ppO", &lists, &PyList_Type, &params, &PyList_Type, &tensors,
                        &aligned, &may_share, &distributed)) {
    return nullptr;
  }
  PyObject *marks = Py_None, *local_name = nullptr, *spec_name = nullptr, *lie_alike = nullptr;
  if (distributed != Py_None &&
      !PyArg_ParseTuple(distributed, "OUUO", &marks, &local_name, &spec_name, &lie_alike)) {
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
    walk->local_name = py::reinterpret_borrow<py::object>(local_name);
    walk->spec_name = py::reinterpret_borrow<py::object>(spec_name);
    walk->lie_alike = py::reinterpret_borrow<py::object>(lie_alike);
    walkable = fill(*walk, lists, params, tensors, marks);
    walk->shared = coincide(walk->addresses, walk->scratch);
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

// --- one pass, without a memory ------------------------------------------------------------------

// Whether the elements fill one stretch of memory, each place once (pieces.is_dense).
inline bool is_dense(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return true;
  }
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    dims.emplace_back(tensor.strides()[d], tensor.sizes()[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (size != 1 && stride != expected) {
      return false;
    }
    expected *= size;
  }
  return true;
}

// collect(params, detached): the gradients that there are, if kernels reach all of them by their
// addresses. None if they do not, or Python has to be asked, or one needs a gradient and they are
// to be detached; else the places of those who have one (None: all), their gradients, the addresses
// as a tensor on the host, and as bytes the sizes and kinds: where these are equal, those are.
inline PyObject* collect(PyObject*, PyObject* args) {
  PyObject* params = nullptr;
  int detached = 0;
  if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &params, &detached)) {
    return nullptr;
  }
  PyObject* answer = nullptr;
  const bool done = guarded([&] {
    std::vector<at::Tensor> held;
    std::vector<c10::Storage> memory;
    std::vector<int64_t> addresses, scratch;
    std::vector<Py_ssize_t> having;
    std::string signature;
    PyTypeObject* known = nullptr;  // A class whose `grad` is plain.
    answer = Py_None;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
      const py::object param = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(params, i));
      if (Py_TYPE(param.ptr()) != known) {
        if (!THPVariable_Check(param.ptr()) || !has_plain_grad(Py_TYPE(param.ptr()))) {
          return;
        }
        known = Py_TYPE(param.ptr());
      }
      const at::Tensor& grad = THPVariable_Unpack(param.ptr()).grad();
      if (!grad.defined()) {
        continue;
      }
      const PyTypeObject* type = class_of(grad);
      if (type == nullptr || !THPVariable_CheckTypeExact(const_cast<PyTypeObject*>(type)) ||
          !has_memory(grad) || (!held.empty() && grad.device() != held[0].device()) ||
          (detached && grad.requires_grad())) {
        return;
      }
      const c10::ScalarType dtype = grad.scalar_type();
      if ((dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16 &&
           dtype != at::kDouble) ||
          !is_dense(grad)) {
        return;
      }
      const int64_t address = address_of(grad), size = grad.numel();
      const int code = dtype == at::kFloat      ? 0
                       : dtype == at::kHalf     ? 1
                       : dtype == at::kBFloat16 ? 2
                                                : 3;
      const char kind = static_cast<char>(2 * code + (address % 16 == 0));
      signature.append(reinterpret_cast<const char*>(&size), sizeof(size));
      signature.push_back(kind);
      addresses.push_back(address);
      held.push_back(grad);
      memory.push_back(grad.storage());
      having.push_back(i);
    }
    if (held.empty() || coincide(addresses, scratch)) {
      return;
    }
    py::object places = py::none();
    if (static_cast<Py_ssize_t>(having.size()) != PyList_GET_SIZE(params)) {
      places =
          py::reinterpret_steal<py::object>(PyList_New(static_cast<Py_ssize_t>(having.size())));
      for (size_t k = 0; places && k < having.size(); ++k) {
        PyObject* place = PyLong_FromSsize_t(having[k]);
        if (place == nullptr) {
          throw PythonRaised();
        }
        PyList_SET_ITEM(places.ptr(), static_cast<Py_ssize_t>(k), place);
      }
    }
    py::object numbers = numbers_of(addresses);
    py::object bytes = py::reinterpret_steal<py::object>(
        PyBytes_FromStringAndSize(signature.data(), static_cast<Py_ssize_t>(signature.size())));
    if (!bytes || !places) {
      throw PythonRaised();
    }
    const py::object tensors = hold(std::move(held), std::move(memory));
    answer = PyTuple_Pack(4, places.ptr(), tensors.ptr(), numbers.ptr(), bytes.ptr());
    if (answer == nullptr) {
      throw PythonRaised();
    }
  });
  if (done) {
    if (answer == Py_None) {
      Py_INCREF(answer);
    }
    return answer;
  }
  if (PyErr_ExceptionMatches(PyExc_RuntimeError)) {  // A tensor that has no address.
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  return nullptr;
}

// Fetches a tensor's memory, and what counts the writes to it; both are only pointed at by it.
inline void fetch_parts(const c10::TensorImpl* impl) {
  if (impl->has_storage()) {
    fetch_lines(impl->unsafe_storage().unsafeGetStorageImpl(), 64);
  }
  const void* counter = nullptr;  // Its address alone: nothing is read there.
  static_assert(sizeof(c10::VariableVersion) == sizeof(counter));
  std::memcpy(&counter, static_cast<const void*>(&impl->version_counter()), sizeof(counter));
  fetch_lines(counter, 16);
}

// Calls `visit(tensor)` for all tensors of a list, a tuple or of HeldTensors, of which some are
// fetched at a time as `fetch_ahead` does it. False, with a Python error set, if there is something
// else in it; `visit` runs no Python code.
template <typename Visit>
bool every_tensor(PyObject* tensors, Visit visit) {
  const bool held = Py_TYPE(tensors) == reinterpret_cast<PyTypeObject*>(held_tensors_type);
  return guarded([&] {
    py::object items;
    size_t count = 0;
    if (held) {
      count = reinterpret_cast<HeldTensors*>(tensors)->tensors->size();
    } else {
      items =
          py::reinterpret_steal<py::object>(PySequence_Fast(tensors, "expected a list of tensors"));
      if (!items) {
        throw PythonRaised();
      }
      count = static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr()));
    }
    const at::Tensor* some[kAhead];
    for (size_t begin = 0; begin < count; begin += kAhead) {
      const size_t end = std::min(begin + kAhead, count);
      for (size_t i = begin; !held && i < end; ++i) {
        fetch_lines(PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i)), 64);
      }
      for (size_t i = begin; i < end; ++i) {
        if (held) {
          some[i - begin] = &(*reinterpret_cast<HeldTensors*>(tensors)->tensors)[i];
        } else {
          PyObject* item = PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i));
          if (!THPVariable_Check(item)) {
            PyErr_Format(PyExc_TypeError, "expected tensors, got %s", Py_TYPE(item)->tp_name);
            throw PythonRaised();
          }
          some[i - begin] = &THPVariable_Unpack(item);
        }
        fetch_lines(some[i - begin]->unsafeGetTensorImpl(), sizeof(c10::TensorImpl));
      }
      for (size_t i = begin; i < end; ++i) {
        fetch_parts(some[i - begin]->unsafeGetTensorImpl());
      }
      for (size_t i = begin; i < end; ++i) {
        visit(*some[i - begin]);
      }
    }
  });
}

// count_write(tensors): as torch.autograd.graph.increment_version, which leaves inference tensors
// out.
inline PyObject* count_write(PyObject*, PyObject* tensors) {
  if (!every_tensor(tensors, [](const at::Tensor& tensor) {
        if (!tensor.is_inference()) {
          tensor.unsafeGetTensorImpl()->bump_version();
        }
      })) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

// versions(tensors): how often each was written to, as int64 on the host.
inline PyObject* versions(PyObject*, PyObject* tensors) {
  std::vector<int64_t> found;
  PyObject* answer = nullptr;
  if (every_tensor(tensors, [&](const at::Tensor& tensor) {
        found.push_back(static_cast<int64_t>(tensor._version()));
      })) {
    guarded([&] { answer = numbers_of(found).release().ptr(); });
  }
  return answer;
}

// addresses(tensors): where each lies, as int64 on the host; raises RuntimeError if one has no
// place.
inline PyObject* addresses(PyObject*, PyObject* tensors) {
  std::vector<int64_t> found;
  PyObject* answer = nullptr;
  if (every_tensor(tensors,
                   [&](const at::Tensor& tensor) { found.push_back(address_of(tensor)); })) {
    guarded([&] { answer = numbers_of(found).release().ptr(); });
  }
  return answer;
}

// lie_at(tensors, addresses): whether each of a list of tensors lies where a list of numbers says.
inline PyObject* lie_at(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_CheckExact(args[0]) || !PyList_CheckExact(args[1])) {
    PyErr_SetString(PyExc_TypeError, "lie_at takes a list of tensors and one of addresses");
    return nullptr;
  }
  bool same = PyList_GET_SIZE(args[0]) == PyList_GET_SIZE(args[1]);
  Py_ssize_t place = 0;
  const bool fine = every_tensor(args[0], [&](const at::Tensor& tensor) {
    if (same && place < PyList_GET_SIZE(args[1])) {
      same = PyLong_AsLongLong(PyList_GET_ITEM(args[1], place++)) == address_of(tensor);
    }
  });
  if (!fine || PyErr_Occurred()) {
    return nullptr;
  }
  return PyBool_FromLong(same);
}

PyType_Slot held_tensors_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(held_dealloc)},
                                    {Py_sq_length, reinterpret_cast<void*>(held_length)},
                                    {Py_sq_item, reinterpret_cast<void*>(held_item)},
                                    {Py_mp_length, reinterpret_cast<void*>(held_length)},
                                    {Py_mp_subscript, reinterpret_cast<void*>(held_subscript)},
                                    {0, nullptr}};
PyType_Spec held_tensors_spec = {"gradilocks_native.HeldTensors", sizeof(HeldTensors), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                 held_tensors_slots};

PyMethodDef gradient_walk_methods[] = {
    {"renew", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(walk_renew)),
     METH_FASTCALL,
     "renew(lists, send): the gradients, and where they lie if that is new; None: look again."},
    {nullptr, nullptr, 0, nullptr}};
PyGetSetDef gradient_walk_getset[] = {
    {"shared", walk_shared, nullptr, "Whether two gradients begin at one address.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot gradient_walk_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(walk_traverse)},
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
    {"walk_over", walk_over, METH_VARARGS,
     "A GradientWalk over gradients that were found, or None."},
    {"collect", collect, METH_VARARGS, "The gradients of a list of parameters, or None."},
    {"count_write", count_write, METH_O, "Counts a write to every tensor."},
    {"versions", versions, METH_O, "How often each tensor was written to."},
    {"addresses", addresses, METH_O, "Where each tensor lies."},
    {"lie_at", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(lie_at)), METH_FASTCALL,
     "Whether tensors lie where a list of numbers says."},
    {nullptr, nullptr, 0, nullptr}};

inline bool add_gradient_walk(PyObject* module) {
  held_tensors_type = PyType_FromSpec(&held_tensors_spec);
  gradient_walk_type = PyType_FromSpec(&gradient_walk_spec);
  return held_tensors_type != nullptr && gradient_walk_type != nullptr &&
         PyModule_AddFunctions(module, gradient_walk_functions) == 0;
}

}  // namespace
}  // namespace gradilocks
