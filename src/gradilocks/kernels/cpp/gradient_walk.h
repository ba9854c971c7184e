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
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "native.h"
#include "tensor_classes.h"

namespace gradilocks {
namespace {

// --- tensors without a Python object -------------------------------------------------------------

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
    if (tensor.numel() != 0) {
      span_ = 1;
      for (size_t i = 0; i < dim_; ++i) {
        span_ += (tensor.sizes()[i] - 1) * tensor.strides()[i];
      }
    }
  }

  bool is_of(const at::Tensor& tensor, const PyTypeObject* type,
             const std::vector<int64_t>& numbers) const {
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (type != type_ || !impl->unsafe_storage() || impl->layout() != c10::kStrided ||
        impl->is_python_dispatch()) {
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
    // As `has_memory` works it out, of sizes and strides that are known.
    const int64_t end = span_ == 0 ? 0 : tensor.storage_offset() + span_;
    return static_cast<size_t>(end) * dtype_.itemsize() <= impl->unsafe_storage().nbytes();
  }

 private:
  const PyTypeObject* type_;  // Held by the walk, or by torch.
  caffe2::TypeMeta dtype_;
  c10::Device device_;
  bool negative_;
  size_t dim_;
  size_t at_;         // Where sizes and strides begin among the numbers.
  int64_t span_ = 0;  // Elements from the first to the last in memory.
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

// A list of as many Python objects, each made by `make(number)`.
template <typename Make>
py::object list_of(size_t count, Make make) {
  py::object list = py::reinterpret_steal<py::object>(PyList_New(static_cast<Py_ssize_t>(count)));
  for (size_t number = 0; list && number < count; ++number) {
    PyObject* made = make(number);
    if (made == nullptr) {
      throw PythonRaised();
    }
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(number), made);
  }
  if (!list) {
    throw PythonRaised();
  }
  return list;
}

inline py::object as_bytes(const void* begin, size_t size) {
  py::object bytes = py::reinterpret_steal<py::object>(PyBytes_FromStringAndSize(
      static_cast<const char*>(begin), static_cast<Py_ssize_t>(size)));
  if (!bytes) {
    throw PythonRaised();
  }
  return bytes;
}

// --- the walk ------------------------------------------------------------------------------------

// A place in the lists: whose it is, and what is known of it.
struct Place {
  py::object param;
  const Kind* kind;  // Its class, when it was met.
  Py_ssize_t among;  // Its number among those that have a gradient; below 0: see below.

  // Whether Python need not be asked for its gradient.
  bool is_plain() const { return kind->plain && kind->is_of(param.ptr()); }
};
constexpr Py_ssize_t kLacking = -1;  // It has no gradient.
constexpr Py_ssize_t kAgain = -2;    // It has come before.

struct Walk {
  explicit Walk(PyObject* distributed) : kinds(distributed) {}

  std::vector<Py_ssize_t> groups;   // How many groups each optimizer has.
  std::vector<Py_ssize_t> lengths;  // How many parameters each group has.
  std::vector<Place> places;
  Kinds kinds;
  std::vector<int64_t> homes, addresses, numbers, scratch;
  std::vector<Make> params, grads;
  bool aligned = false, may_share = false, shared = false;
  std::vector<std::pair<py::object, Lie>> specs;  // Of DTensors, and what they say; else null.

  template <typename Visit>
  int every_object(Visit visit) const {
    for (const Place& place : places) {
      if (const int stop = visit(place.param.ptr())) return stop;
    }
    for (const auto& [spec, lie] : specs) {
      for (const py::object* each : {&spec, &lie.mesh, &lie.placements}) {
        if (const int stop = visit(each->ptr())) return stop;
      }
    }
    return kinds.every_object(visit);
  }
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
};

// Replaces the gradient of a DTensor by its local tensor; false if it does not lie as its parameter
// does.
inline bool localize(const Walk& walk, size_t i, at::Tensor& grad) {
  PyObject* object = object_of(grad.unsafeGetTensorImpl());
  const Kind* kind = object == nullptr ? nullptr : walk.kinds.known(object);
  if (kind == nullptr || !kind->is_distributed()) {
    return false;
  }
  const py::object spec = py::reinterpret_borrow<py::object>(part_of(object, kind->spec));
  const auto& [own, lie] = walk.specs[i];
  if (spec.ptr() != own.ptr()) {  // FSDP2 has one for parameter and gradient.
    if (!spec || !walk.kinds.lie(spec.ptr()).is_like(lie)) {
      return false;
    }
  }
  at::Tensor local = local_of(object, *kind);
  grad = std::move(local);
  return grad.defined();
}

// The gradients as they are now and where they lie; false if something but the addresses is
// another. Without `tensors` only their memory is held: whoever reads it by its address needs no
// more, and each reference that is counted up and down takes 10 ns.
inline bool look(const Walk& walk, PyObject* lists, Found& found, bool tensors = true) {
  if (!walk.kinds.hold()) {
    return false;
  }
  found.held.reserve(tensors ? walk.grads.size() : 0);
  found.memory.reserve(2 * walk.grads.size());
  found.addresses.reserve(walk.grads.size());
  const auto fetch_ahead = [&](size_t begin) {
    Ahead ahead;
    const size_t end = std::min(begin + Ahead::kMost, walk.places.size());
    for (size_t number = begin; number < end; ++number) {
      if (walk.places[number].is_plain()) {
        ahead.add(walk.places[number].param.ptr(), *walk.places[number].kind);
      }
    }
    ahead.fetch();
  };
  fetch_ahead(0);
  size_t number = 0;
  return every_place(walk, lists, [&](const Place& place) {
    if (number++ % Ahead::kMost == 0) {
      fetch_ahead(number - 1 + Ahead::kMost);
    }
    if (place.among == kAgain) {
      return true;
    }
    PyObject* param = place.param.ptr();
    at::Tensor owned;  // Where it is not the gradient as the parameter holds it.
    const bool plain = place.is_plain();
    if (!plain) {
      owned = gradient_of(param, false);
    }
    const at::Tensor* grad =
        plain ? &std::as_const(*THPVariable_Unpack(param).unsafeGetTensorImpl()).grad() : &owned;
    if (place.among == kLacking || !grad->defined()) {
      return (place.among == kLacking) == !grad->defined();
    }
    const size_t i = static_cast<size_t>(place.among);
    const bool distributed = !walk.specs.empty() && walk.specs[i].first;
    if (distributed &&
        (!plain || part_of(param, place.kind->spec) != walk.specs[i].first.ptr())) {
      return false;
    }
    {
      const at::Tensor local = distributed ? local_of(param, *place.kind) : at::Tensor();
      const at::Tensor& home = distributed ? local : THPVariable_Unpack(param);
      if (!home.defined() ||
          !walk.params[i].is_of(home, distributed ? tensor_class() : Py_TYPE(param),
                                walk.numbers) ||
          address_of(home) != walk.homes[i]) {
        return false;
      }
      found.memory.push_back(home.storage());
    }
    if (distributed) {
      owned = *grad;
      grad = &owned;
      if (!localize(walk, i, owned)) {
        return false;
      }
    }
    if (!walk.grads[i].is_of(*grad, class_of(*grad), walk.numbers)) {
      return false;
    }
    found.addresses.push_back(address_of(*grad));
    found.memory.push_back(grad->storage());
    if (tensors) {
      found.held.push_back(*grad);
    }
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

// The counts of owners are asked for before the first is changed: after an optimizer's step none is
// in the cache, and a change waits for its own (148 tensors on a CPU: 28 us, and 10 so).
inline void held_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  for (const at::Tensor& tensor : *reinterpret_cast<HeldTensors*>(self)->tensors) {
    fetch_lines(tensor.unsafeGetTensorImpl(), 16);
  }
  for (const c10::Storage& memory : *reinterpret_cast<HeldTensors*>(self)->memory) {
    fetch_lines(memory.unsafeGetStorageImpl(), 16);
  }
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
// fetched at a time as Ahead does it. False, with a Python error set, if there is something
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
      const auto item = [&](size_t i) {
        return PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i));
      };
      count = static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr()));
      for (size_t i = 0; i < count; ++i) {
        fetch_lines(item(i), 64);
      }
      size_t plain = 0;
      while (plain < count && THPVariable_CheckTypeExact(Py_TYPE(item(plain)))) {
        ++plain;
      }
      if (plain < count) {  // Of another class Python is asked, which may change the list.
        items = py::reinterpret_steal<py::object>(PySequence_Tuple(items.ptr()));
        if (!items) {
          throw PythonRaised();
        }
        count = static_cast<size_t>(PyTuple_GET_SIZE(items.ptr()));
        const PyTypeObject* known = nullptr;  // To ask takes 0.15 us.
        for (size_t i = 0; i < count; ++i) {
          if (Py_TYPE(item(i)) != known && !THPVariable_Check(item(i))) {
            PyErr_Format(PyExc_TypeError, "expected tensors, got %s", Py_TYPE(item(i))->tp_name);
            throw PythonRaised();
          }
          known = Py_TYPE(item(i));
        }
      }
    }
    const at::Tensor* some[Ahead::kMost];
    for (size_t begin = 0; begin < count; begin += Ahead::kMost) {
      const size_t end = std::min(begin + Ahead::kMost, count);
      for (size_t i = begin; i < end; ++i) {
        if (held) {
          some[i - begin] = &(*reinterpret_cast<HeldTensors*>(tensors)->tensors)[i];
        } else {
          some[i - begin] = &THPVariable_Unpack(
              PySequence_Fast_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i)));
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

// Fills a walk by what was found; false if it is none that C++ can walk over.
inline bool fill(Walk& walk, PyObject* lists, PyObject* params, PyObject* tensors) {
  const Py_ssize_t having = PyList_GET_SIZE(params);
  std::vector<at::Tensor> grads;
  if (!every_tensor(tensors, [&](const at::Tensor& grad) { grads.push_back(grad); })) {
    throw PythonRaised();
  }
  if (!PyList_Check(lists) || static_cast<Py_ssize_t>(grads.size()) != having) {
    return false;
  }
  for (Py_ssize_t i = 0; i < having; ++i) {
    PyObject* param = PyList_GET_ITEM(params, i);
    const at::Tensor& grad = grads[static_cast<size_t>(i)];
    PyTypeObject* grad_class = class_of(grad);
    const Kind& kind = walk.kinds.of(param);
    if (!(kind.plain || THPVariable_Check(param)) || grad_class == nullptr ||
        !THPVariable_CheckTypeExact(grad_class)) {
      return false;
    }
    at::Tensor home = THPVariable_Unpack(param);
    if (kind.is_distributed()) {
      py::object spec = py::reinterpret_borrow<py::object>(part_of(param, kind.spec));
      home = local_of(param, kind);
      if (!spec || !home.defined()) {
        return false;
      }
      Lie lie = walk.kinds.lie(spec.ptr());
      const at::Tensor own = THPVariable_Unpack(param).grad();
      if (PyObject* object = own.defined() ? object_of(own.unsafeGetTensorImpl()) : nullptr) {
        walk.kinds.of(object);
      }
      walk.specs.resize(static_cast<size_t>(having));
      walk.specs[static_cast<size_t>(i)] = {std::move(spec), std::move(lie)};
    }
    if (!has_memory(home) || !has_memory(grad)) {
      return false;
    }
    PyTypeObject* type = kind.is_distributed() ? tensor_class() : Py_TYPE(param);
    walk.params.emplace_back(home, type, walk.numbers);
    walk.grads.emplace_back(grad, grad_class, walk.numbers);
    walk.homes.push_back(address_of(home));
    walk.addresses.push_back(address_of(grad));
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
        py::object param = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(group, k));
        const Kind& kind = walk.kinds.of(param.ptr());
        if (!kind.plain && !THPVariable_Check(param.ptr())) {
          return false;
        }
        Py_ssize_t among = kLacking;
        if (!seen.insert(param.ptr()).second) {
          among = kAgain;
        } else if (next < having && PyList_GET_ITEM(params, next) == param.ptr()) {
          among = next++;
        }
        walk.places.push_back(Place{std::move(param), &kind, among});
      }
    }
  }
  return next == having;
}

// walk_over(lists, params, tensors, aligned, may_share, distributed): a GradientWalk over what was
// found, or None if C++ cannot walk over it. The parameters that have a gradient, each once and in
// order, and these gradients, of DTensors the local ones, which lie as their parameters do; whether
// all of them are aligned to 16 bytes, and whether two may be one. `distributed`: see Kinds.
inline PyObject* walk_over(PyObject*, PyObject* args) {
  PyObject *lists = nullptr, *params = nullptr, *tensors = nullptr, *distributed = nullptr;
  int aligned = 0, may_share = 0;
  if (!PyArg_ParseTuple(args, "OO!OppO", &lists, &PyList_Type, &params, &tensors, &aligned,
                        &may_share, &distributed)) {
    return nullptr;
  }
  PyTypeObject* type = reinterpret_cast<PyTypeObject*>(gradient_walk_type);
  PyObject* made = type->tp_alloc(type, 0);
  if (made == nullptr) {
    return nullptr;
  }
  bool walkable = false;
  const bool done = guarded([&] {
    Walk* walk = new Walk(distributed);
    reinterpret_cast<GradientWalk*>(made)->walk = walk;
    walk->aligned = aligned != 0;
    walk->may_share = may_share != 0;
    walkable = fill(*walk, lists, params, tensors);
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

// How DTensors lie, each way once.
class Layouts {
 public:
  // The number of one. Two meshes that are equal are two: they may have other process groups.
  size_t number(const Lie& lie) {
    for (size_t tried = 0; tried < each_.size(); ++tried) {  // The last one first.
      const size_t at = (last_ + tried) % each_.size();
      if (each_[at].mesh.ptr() == lie.mesh.ptr() &&
          Lie::are_equal(each_[at].placements, lie.placements)) {
        return last_ = at;
      }
    }
    each_.push_back(lie);
    return last_ = each_.size() - 1;
  }

  bool empty() const { return each_.empty(); }

  // As a list of mesh and placements.
  py::object listed() const {
    return list_of(each_.size(), [&](size_t at) {
      return PyTuple_Pack(2, each_[at].mesh.ptr(), each_[at].placements.ptr());
    });
  }

 private:
  std::vector<Lie> each_;
  size_t last_ = 0;
};

// What `collect` brings together.
struct Collection {
  explicit Collection(PyObject* distributed) : kinds(distributed) {}

  Kinds kinds;
  std::vector<at::Tensor> held;
  std::vector<c10::Storage> memory;
  std::vector<int64_t> addresses;
  std::vector<Py_ssize_t> having;
  std::vector<py::object> elements;  // Of the parameters that have a gradient.
  std::string signature;             // The size and kind of each gradient.
  Layouts layouts;
  std::vector<int32_t> laid;  // Which of them each gradient has; -1 for a plain one.

  // Takes the gradient of a parameter, if it has one; false if Python has to look at it.
  bool take(PyObject* param, Py_ssize_t place, bool detached, bool beside) {
    const Kind& kind = kinds.of(param);
    if (!kind.plain) {
      return false;
    }
    at::Tensor grad = THPVariable_Unpack(param).grad();
    if (!grad.defined()) {
      return true;
    }
    if (kind.is_distributed()) {
      PyObject* object = object_of(grad.unsafeGetTensorImpl());
      if (object == nullptr || !kinds.of(object).is_distributed()) {
        return false;
      }
      const Kind& grad_kind = kinds.of(object);
      const py::object own = py::reinterpret_borrow<py::object>(part_of(param, kind.spec));
      const py::object spec = py::reinterpret_borrow<py::object>(part_of(object, grad_kind.spec));
      if (!own || !spec) {
        return false;
      }
      const Lie lie = kinds.lie(spec.ptr());
      if (own.ptr() != spec.ptr() && !lie.is_like(kinds.lie(own.ptr()))) {
        return false;
      }
      laid.resize(held.size(), -1);
      laid.push_back(static_cast<int32_t>(layouts.number(lie)));
      at::Tensor local = local_of(object, grad_kind);
      grad = std::move(local);
      if (!grad.defined()) {
        return false;
      }
    }
    PyTypeObject* type = class_of(grad);
    if (type == nullptr || !THPVariable_CheckTypeExact(type) || !has_memory(grad) ||
        (!held.empty() && grad.device() != held[0].device()) ||
        (detached && grad.requires_grad())) {
      return false;
    }
    const c10::ScalarType dtype = grad.scalar_type();
    if ((dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16 &&
         dtype != at::kDouble) ||
        !is_dense(grad)) {
      return false;
    }
    if (beside) {  // Else no optimizer can step, or memory holds the opposite of a gradient.
      const at::Tensor home =
          kind.is_distributed() ? local_of(param, kind) : THPVariable_Unpack(param);
      if (!home.defined() || !has_memory(home) || home.device() != grad.device() ||
          home.sizes() != grad.sizes() || grad.is_neg()) {
        return false;
      }
      PyObject* element = kind.is_distributed() ? part_of(param, kind.local) : param;
      const bool detach = element != param && THPVariable_Unpack(element).requires_grad();
      elements.push_back(py::reinterpret_steal<py::object>(detach ? THPVariable_Wrap(home)
                                                                  : Py_NewRef(element)));
    }
    const int64_t address = address_of(grad), size = grad.numel();
    const int code = dtype == at::kFloat      ? 0
                     : dtype == at::kHalf     ? 1
                     : dtype == at::kBFloat16 ? 2
                                              : 3;
    const char kind_of_grad = static_cast<char>(2 * code + (address % 16 == 0));
    signature.append(reinterpret_cast<const char*>(&size), sizeof(size));
    signature.push_back(kind_of_grad);
    addresses.push_back(address);
    memory.push_back(grad.storage());
    held.push_back(std::move(grad));
    having.push_back(place);
    return true;
  }
};

// collect(params, distributed, detached, beside, may_share): the gradients that there are, if
// kernels reach all of them by their addresses. None if they do not, or Python has to be asked, or
// something is not as it is wanted to be:
//   detached: no gradient needs a gradient itself;
//   beside: each lies on the device of its parameter and has its shape;
//   may_share: two of them may be one.
// Else the places of those who have one (None: all), their gradients, the addresses as a tensor on
// the host, as bytes the sizes and kinds (where these are equal, those are), `beside` the
// parameters' own elements as a list, and how DTensors lie, each as its parameter: None if there
// are none, else as bytes the number of each one's mesh and placements (int32, -1: a plain tensor)
// and a list of those. `distributed`: see Kinds.
inline PyObject* collect(PyObject*, PyObject* args) {
  PyObject *params = nullptr, *distributed = nullptr;
  int detached = 0, beside = 0, may_share = 0;
  if (!PyArg_ParseTuple(args, "O!Oppp", &PyList_Type, &params, &distributed, &detached, &beside,
                        &may_share)) {
    return nullptr;
  }
  py::object answer = py::none();
  const bool done = guarded([&] {
    Collection found(distributed);
    std::vector<int64_t> scratch;
    const auto fetch_ahead = [&](Py_ssize_t begin) {
      Ahead ahead;
      const Py_ssize_t end = begin + static_cast<Py_ssize_t>(Ahead::kMost);
      for (Py_ssize_t i = begin; i < std::min(end, PyList_GET_SIZE(params)); ++i) {
        const Kind* kind = found.kinds.known(PyList_GET_ITEM(params, i));
        if (kind != nullptr && kind->plain) {
          ahead.add(PyList_GET_ITEM(params, i), *kind);
        }
      }
      ahead.fetch();
    };
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
      const py::object param = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(params, i));
      if (i == 0) {
        found.kinds.of(param.ptr());
        fetch_ahead(0);
      }
      if (i % static_cast<Py_ssize_t>(Ahead::kMost) == 0) {
        fetch_ahead(i + static_cast<Py_ssize_t>(Ahead::kMost));
      }
      if (!found.take(param.ptr(), i, detached != 0, beside != 0)) {
        return;
      }
    }
    if (found.held.empty() || (!may_share && coincide(found.addresses, scratch))) {
      return;
    }
    const size_t count = found.held.size();
    py::object places = py::none(), elements = py::none(), layouts = py::none();
    if (static_cast<Py_ssize_t>(count) != PyList_GET_SIZE(params)) {
      places = list_of(count, [&](size_t k) { return PyLong_FromSsize_t(found.having[k]); });
    }
    if (beside) {
      elements = list_of(count, [&](size_t k) { return Py_NewRef(found.elements[k].ptr()); });
    }
    if (!found.layouts.empty()) {
      found.laid.resize(count, -1);
      const py::object numbers = as_bytes(found.laid.data(), count * sizeof(found.laid[0]));
      const py::object listed = found.layouts.listed();
      layouts = py::reinterpret_steal<py::object>(PyTuple_Pack(2, numbers.ptr(), listed.ptr()));
    }
    const py::object numbers = numbers_of(found.addresses);
    const py::object signature = as_bytes(found.signature.data(), found.signature.size());
    const py::object tensors = hold(std::move(found.held), std::move(found.memory));
    answer = py::reinterpret_steal<py::object>(
        PyTuple_Pack(6, places.ptr(), tensors.ptr(), numbers.ptr(), signature.ptr(), elements.ptr(),
                     layouts.ptr()));
    if (!answer) {
      throw PythonRaised();
    }
  });
  if (done) {
    return answer.release().ptr();
  }
  // A tensor that has no address, or a torch that names the parts of DTensors otherwise.
  if (PyErr_ExceptionMatches(PyExc_RuntimeError) || PyErr_ExceptionMatches(PyExc_TypeError)) {
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  return nullptr;
}

// meshes(tensors, distributed): a list of the meshes of the DTensors among them, each once, and of
// the place of the first one on it; None if Python has to be asked. `distributed`: see Kinds.
inline PyObject* meshes(PyObject*, PyObject* args) {
  PyObject *tensors = nullptr, *distributed = nullptr;
  if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &tensors, &distributed)) {
    return nullptr;
  }
  py::object answer = py::none();
  const bool done = guarded([&] {
    Kinds kinds(distributed);
    std::vector<std::pair<py::object, Py_ssize_t>> found;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
      const py::object item = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(tensors, i));
      const Kind& kind = kinds.of(item.ptr());
      if (!kind.plain) {
        return;
      }
      if (!kind.is_distributed()) {
        continue;
      }
      const py::object spec = py::reinterpret_borrow<py::object>(part_of(item.ptr(), kind.spec));
      if (!spec) {
        return;
      }
      py::object mesh = kinds.mesh(spec.ptr());
      if (std::none_of(found.begin(), found.end(),
                       [&](const auto& each) { return each.first.ptr() == mesh.ptr(); })) {
        found.emplace_back(std::move(mesh), i);
      }
    }
    answer = list_of(found.size(), [&](size_t k) {
      return Py_BuildValue("On", found[k].first.ptr(), found[k].second);
    });
  });
  if (done) {
    return answer.release().ptr();
  }
  if (PyErr_ExceptionMatches(PyExc_TypeError)) {  // A torch that names their parts otherwise.
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  return nullptr;
}

// localized(lists, distributed): the local tensors of DTensors, and how these lie. The first list
// has parameters, the others what belongs to each: to a DTensor others that lie as it does, or
// numbers of their own (0-d), which stay; to a plain tensor plain ones. Empty ones stay empty. None
// if it is not so, or Python has to be asked. Else the lists, and a list of mesh and placements,
// each once. `distributed`: see Kinds.
inline PyObject* localized(PyObject*, PyObject* args) {
  PyObject *lists = nullptr, *distributed = nullptr;
  if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &lists, &distributed)) {
    return nullptr;
  }
  py::object answer = py::none();
  const bool done = guarded([&] {
    Kinds kinds(distributed);
    Layouts layouts;
    std::vector<std::pair<py::object, Lie>> specs;  // Of the first list.
    std::vector<std::vector<py::object>> found;
    for (Py_ssize_t l = 0; l < PyList_GET_SIZE(lists); ++l) {
      const py::object list = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(lists, l));
      found.emplace_back();
      if (!PyList_Check(list.ptr())) {
        return;
      }
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.ptr()); ++i) {
        py::object item = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(list.ptr(), i));
        if (l == 0) {
          specs.emplace_back();
        } else if (static_cast<size_t>(i) >= specs.size()) {
          return;
        }
        auto& [own, own_lie] = specs[static_cast<size_t>(i)];  // Null of a plain one.
        const Kind& kind = kinds.of(item.ptr());
        if (!kind.is_distributed()) {
          if (!THPVariable_CheckExact(item.ptr()) ||
              (own && THPVariable_Unpack(item.ptr()).dim() != 0)) {
            return;
          }
          found.back().push_back(std::move(item));
          continue;
        }
        py::object spec = py::reinterpret_borrow<py::object>(part_of(item.ptr(), kind.spec));
        py::object local = py::reinterpret_borrow<py::object>(part_of(item.ptr(), kind.local));
        if (!spec || !local || Py_TYPE(local.ptr()) != tensor_class() ||
            THPVariable_Unpack(local.ptr()).requires_grad()) {
          return;
        }
        if (l == 0) {
          own_lie = kinds.lie(spec.ptr());
          layouts.number(own_lie);
          own = std::move(spec);
        } else if (!own || (spec.ptr() != own.ptr() && !kinds.lie(spec.ptr()).is_like(own_lie))) {
          return;
        }
        found.back().push_back(std::move(local));
      }
      if (!found.back().empty() && found.back().size() != specs.size()) {
        return;
      }
    }
    const py::object made = list_of(found.size(), [&](size_t l) {
      return list_of(found[l].size(), [&](size_t i) { return Py_NewRef(found[l][i].ptr()); })
          .release()
          .ptr();
    });
    answer = py::reinterpret_steal<py::object>(
        PyTuple_Pack(2, made.ptr(), layouts.listed().ptr()));
    if (!answer) {
      throw PythonRaised();
    }
  });
  if (done) {
    return answer.release().ptr();
  }
  if (PyErr_ExceptionMatches(PyExc_TypeError)) {  // A torch that names their parts otherwise.
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  return nullptr;
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

// requiring(params): which of a list of parameters require a gradient, a byte each; None if there
// is one that Python has to be asked.
inline PyObject* requiring(PyObject*, PyObject* params) {
  py::object marks = py::none();
  const bool done = guarded([&] {
    std::string found;
    std::vector<py::object> classes;  // Asked when the list has been gone through.
    bool known = true;
    if (!every_tensor(params, [&](const at::Tensor& tensor) {
          PyObject* type = reinterpret_cast<PyObject*>(class_of(tensor));
          known = known && type != nullptr;
          if (classes.empty() || classes.back().ptr() != type) {
            classes.push_back(py::reinterpret_borrow<py::object>(type));
          }
          found.push_back(tensor.requires_grad());
        })) {
      throw PythonRaised();
    }
    const auto is_plain = [](const py::object& type) {
      return has_plain("requires_grad", reinterpret_cast<PyTypeObject*>(type.ptr()));
    };
    if (known && std::all_of(classes.begin(), classes.end(), is_plain)) {
      marks = as_bytes(found.data(), found.size());
    }
  });
  return done ? marks.release().ptr() : nullptr;
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
    {"meshes", meshes, METH_VARARGS, "The meshes of DTensors and the first place on each, or None."},
    {"localized", localized, METH_VARARGS, "The local tensors of lists of DTensors, or None."},
    {"count_write", count_write, METH_O, "Counts a write to every tensor."},
    {"versions", versions, METH_O, "How often each tensor was written to."},
    {"addresses", addresses, METH_O, "Where each tensor lies."},
    {"requiring", requiring, METH_O, "Which parameters require a gradient, a byte each, or None."},
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
