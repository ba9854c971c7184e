// Whether a step can be taken again as the last one was (step/engine.py): what it depended on
// enters; whether all of that is as it was leaves, and the gradients of this moment.
//
// `Guards` compares attributes by identity. `StepWatch` compares the groups, the parameters, the
// gradients and the state of an optimizer, and writes the gradients' new addresses into the table
// that kernels read. Both do in one call each what Python does in some forty: after a forward and a
// backward pass none of their code is in the cache, and each took the host 1 to 3 us (H200's).
//
// The global lock is held throughout. Looking up an attribute or a gradient of a foreign class may
// run Python code; what it may change is held or read before.
#pragma once
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <utility>
#include <vector>

#include "gradient_walk.h"
#include "native.h"

namespace gradilocks {
namespace {

// --- guards --------------------------------------------------------------------------------------

// What must hold. `expected` is compared by identity.
enum class Demand : long {
  kAttribute = 0,  // owner.name is expected
  kItem = 1,       // owner[name] is expected, of a dictionary; None if it is missing
  kEmpty = 2,      // not owner
  kPlace = 3,      // id(owner[name]) == expected, of a dictionary: nothing of it is held
};

struct Guard {
  Demand demand;
  py::object owner, name, expected;
  const void* place = nullptr;  // Of what is expected, where it is not held.

  // 1 if it holds, 0 if not, -1 with a Python error set.
  int holds() const {
    if (demand == Demand::kEmpty) {
      const int full = PyObject_IsTrue(owner.ptr());
      return full < 0 ? -1 : full == 0;
    }
    if (demand == Demand::kItem || demand == Demand::kPlace) {
      PyObject* item = PyDict_GetItemWithError(owner.ptr(), name.ptr());
      if (item == nullptr && PyErr_Occurred()) {
        return -1;
      }
      if (demand == Demand::kPlace) {
        return item == place;
      }
      return (item == nullptr ? Py_None : item) == expected.ptr();
    }
    PyObject* value = PyObject_GetAttr(owner.ptr(), name.ptr());
    if (value == nullptr) {
      if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
      }
      PyErr_Clear();
      return 0;
    }
    const bool same = value == expected.ptr();
    Py_DECREF(value);
    return same;
  }
};

struct Guards {
  PyObject_HEAD std::vector<Guard>* guards;  // Owned.
};

PyObject* guards_type = nullptr;

inline int guards_traverse(PyObject* self, visitproc visit, void* arg) {
  if (const auto* guards = reinterpret_cast<Guards*>(self)->guards) {
    for (const Guard& guard : *guards) {
      Py_VISIT(guard.owner.ptr());
      Py_VISIT(guard.name.ptr());
      Py_VISIT(guard.expected.ptr());
    }
  }
  Py_VISIT(Py_TYPE(self));
  return 0;
}

inline int guards_clear(PyObject* self) {
  delete std::exchange(reinterpret_cast<Guards*>(self)->guards, nullptr);
  return 0;
}

inline void guards_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  guards_clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// guards(): whether all of them hold.
inline PyObject* guards_hold(PyObject* self, PyObject* args, PyObject* names) {
  if (PyTuple_GET_SIZE(args) != 0 || names != nullptr) {
    PyErr_SetString(PyExc_TypeError, "guards are called without arguments");
    return nullptr;
  }
  const py::object alive = py::reinterpret_borrow<py::object>(self);
  const auto* guards = reinterpret_cast<Guards*>(self)->guards;
  for (size_t i = 0; guards != nullptr && i < guards->size(); ++i) {
    const int holds = (*guards)[i].holds();
    if (holds < 0) {
      return nullptr;
    }
    if (holds == 0) {
      Py_RETURN_FALSE;
    }
    guards = reinterpret_cast<Guards*>(self)->guards;
  }
  return PyBool_FromLong(guards != nullptr);
}

// guards([(demand, owner, name, expected), ...]): see Demand.
inline PyObject* make_guards(PyObject*, PyObject* given) {
  if (!PyList_Check(given)) {
    PyErr_SetString(PyExc_TypeError, "guards takes a list of tuples");
    return nullptr;
  }
  py::object made;
  const bool done = guarded([&] {
    auto guards = std::make_unique<std::vector<Guard>>();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
      long demand = 0;
      PyObject *owner = nullptr, *name = nullptr, *expected = nullptr;
      PyObject* each = PyList_GET_ITEM(given, i);
      if (!PyTuple_Check(each)) {
        PyErr_SetString(PyExc_TypeError, "guards takes a list of tuples");
        throw PythonRaised();
      }
      if (!PyArg_ParseTuple(each, "lOOO", &demand, &owner, &name, &expected)) {
        throw PythonRaised();
      }
      const bool of_item = demand == 1 || demand == 3;
      if (demand < 0 || demand > 3 || (of_item && !PyDict_Check(owner))) {
        PyErr_SetString(PyExc_ValueError, "a guard is of no kind that there is");
        throw PythonRaised();
      }
      const void* place = demand == 3 ? PyLong_AsVoidPtr(expected) : nullptr;
      if (PyErr_Occurred()) {
        throw PythonRaised();
      }
      guards->push_back({static_cast<Demand>(demand), py::reinterpret_borrow<py::object>(owner),
                         py::reinterpret_borrow<py::object>(name),
                         py::reinterpret_borrow<py::object>(expected), place});
    }
    auto* type = reinterpret_cast<PyTypeObject*>(guards_type);
    made = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
    if (!made) {
      throw PythonRaised();
    }
    reinterpret_cast<Guards*>(made.ptr())->guards = guards.release();
  });
  return done ? made.release().ptr() : nullptr;
}

// --- an optimizer and its gradients --------------------------------------------------------------

struct Watch {
  py::object walker;  // A GradientWalk.
  std::vector<Py_ssize_t> lengths;  // How many entries each group has; without any: none is known.
  std::vector<py::object> entries;  // Keys and what stands under them, group by group.
  bool known = false;
  std::vector<py::object> state;  // Tensors, and where each lies.
  std::vector<int64_t> homes;
  size_t at_a_time = 0, turn = 0;
  py::object table;  // int64: where the kernels read the addresses; null if nobody may write there.
  int device = -1;   // Of the table: the number of a GPU, -1 for the CPU.
};

struct StepWatch {
  PyObject_HEAD Watch* watch;  // Owned.
};

PyObject* step_watch_type = nullptr;

inline int watch_traverse(PyObject* self, visitproc visit, void* arg) {
  if (const Watch* watch = reinterpret_cast<StepWatch*>(self)->watch) {
    Py_VISIT(watch->walker.ptr());
    Py_VISIT(watch->table.ptr());
    for (const auto* each : {&watch->entries, &watch->state}) {
      for (const py::object& object : *each) {
        Py_VISIT(object.ptr());
      }
    }
  }
  Py_VISIT(Py_TYPE(self));
  return 0;
}

inline int watch_clear(PyObject* self) {
  delete std::exchange(reinterpret_cast<StepWatch*>(self)->watch, nullptr);
  return 0;
}

inline void watch_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  watch_clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Takes down what is in the groups.
inline void know_entries(Watch& watch, PyObject* groups) {
  std::vector<Py_ssize_t> lengths;
  std::vector<py::object> entries;
  for (Py_ssize_t g = 0; g < PyList_GET_SIZE(groups); ++g) {
    PyObject* group = PyList_GET_ITEM(groups, g);
    if (!PyDict_Check(group)) {
      PyErr_SetString(PyExc_TypeError, "a parameter group is no dictionary");
      throw PythonRaised();
    }
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(group, &position, &key, &value)) {
      entries.push_back(py::reinterpret_borrow<py::object>(key));
      entries.push_back(py::reinterpret_borrow<py::object>(value));
    }
    lengths.push_back(PyDict_GET_SIZE(group));
  }
  watch.lengths.swap(lengths);
  watch.entries.swap(entries);  // What goes, goes when nothing is looked at any more.
  watch.known = true;
}

// Whether the groups have the very objects that they had.
inline bool same_entries(const Watch& watch, PyObject* groups) {
  if (!watch.known || PyList_GET_SIZE(groups) != static_cast<Py_ssize_t>(watch.lengths.size())) {
    return false;
  }
  size_t place = 0;
  for (Py_ssize_t g = 0; g < PyList_GET_SIZE(groups); ++g) {
    PyObject* group = PyList_GET_ITEM(groups, g);
    if (!PyDict_Check(group) || PyDict_GET_SIZE(group) != watch.lengths[static_cast<size_t>(g)]) {
      return false;
    }
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(group, &position, &key, &value)) {
      if (place + 2 > watch.entries.size() || watch.entries[place].ptr() != key ||
          watch.entries[place + 1].ptr() != value) {
        return false;
      }
      place += 2;
    }
  }
  return place == watch.entries.size();
}

// Whether some of the state lies where it lay: all of it, or the next so many.
inline bool state_lies_there(Watch& watch) {
  const size_t begin = watch.turn < watch.state.size() ? watch.turn : 0;
  const size_t end = std::min(begin + watch.at_a_time, watch.state.size());
  for (size_t i = begin; i < end; ++i) {
    if (address_of(THPVariable_Unpack(watch.state[i].ptr())) != watch.homes[i]) {
      return false;
    }
  }
  watch.turn = end;
  return true;
}

// The parameters of each group as a walk takes them: [[params, params, ...]]; null if it has none.
inline py::object lists_in(PyObject* groups) {
  static PyObject* const key = PyUnicode_InternFromString("params");
  py::object lists = py::reinterpret_steal<py::object>(PyList_New(0));
  for (Py_ssize_t g = 0; lists && g < PyList_GET_SIZE(groups); ++g) {
    PyObject* group = PyList_GET_ITEM(groups, g);
    PyObject* params = PyDict_Check(group) ? PyDict_GetItemWithError(group, key) : nullptr;
    if (params == nullptr) {
      return py::object();
    }
    if (PyList_Append(lists.ptr(), params) < 0) {
      throw PythonRaised();
    }
  }
  py::object outer = py::reinterpret_steal<py::object>(PyList_New(1));
  if (!lists || !outer) {
    throw PythonRaised();
  }
  PyList_SET_ITEM(outer.ptr(), 0, lists.release().ptr());
  return outer;
}

// look(groups, stream): None if something is another, and nothing has been done. Else the gradients
// of this moment, held; where they lie, on the host, if that is not where they lay, else None; and
// whether the groups have the very objects that they had. The table of addresses is up to date
// then, in the order of the stream (of a CPU: None).
inline PyObject* watch_look(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyList_CheckExact(args[0])) {
    PyErr_SetString(PyExc_TypeError, "look takes the list of parameter groups and a stream");
    return nullptr;
  }
  const py::object alive = py::reinterpret_borrow<py::object>(self);
  PyObject* answer = nullptr;
  const bool done = guarded([&] {
    const py::object groups = py::reinterpret_borrow<py::object>(args[0]);
    const py::object lists = lists_in(groups.ptr());  // Making a list may run Python code (GC).
    Watch* watch = reinterpret_cast<StepWatch*>(self)->watch;
    const py::object walker = watch == nullptr ? py::object() : watch->walker;  // `forget` drops it.
    Walk* walk = walker ? reinterpret_cast<GradientWalk*>(walker.ptr())->walk : nullptr;
    Found found;
    if (!lists || walk == nullptr || !state_lies_there(*watch) ||
        !look(*walk, lists.ptr(), found, false)) {
      answer = Py_NewRef(Py_None);
      return;
    }
    // Python code may have run: of a parameter of a foreign class, asked for its gradient.
    watch = reinterpret_cast<StepWatch*>(self)->watch;
    walk = watch == nullptr ? nullptr : reinterpret_cast<GradientWalk*>(watch->walker.ptr())->walk;
    if (walk == nullptr) {
      answer = Py_NewRef(Py_None);
      return;
    }
    py::object numbers = py::none();
    if (found.addresses != walk->addresses) {
      if (!watch->table || !walk->aligned || !all_aligned(found.addresses) ||
          coincide(found.addresses, walk->scratch)) {
        answer = Py_NewRef(Py_None);
        return;
      }
      numbers = numbers_of(found.addresses);
      const int sent =
          send_numbers(watch->table.ptr(), found.addresses.data(),
                       found.addresses.size() * sizeof(int64_t), watch->device, args[1]);
      if (sent < 0) {
        throw PythonRaised();
      }
      if (sent == 0) {
        answer = Py_NewRef(Py_None);
        return;
      }
      walk->shared = false;
      walk->addresses.swap(found.addresses);
    } else if (walk->shared) {
      answer = Py_NewRef(Py_None);
      return;
    }
    const py::object held = hold(std::move(found.held), std::move(found.memory));
    answer = PyTuple_Pack(3, held.ptr(), numbers.ptr(),
                          same_entries(*watch, groups.ptr()) ? Py_True : Py_False);
    if (answer == nullptr) {
      throw PythonRaised();
    }
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

// took(): kernels have written to the parameters that have a gradient. As count_write.
inline PyObject* watch_took(PyObject* self, PyObject*) {
  const Watch* watch = reinterpret_cast<StepWatch*>(self)->watch;
  const Walk* walk =
      watch == nullptr ? nullptr : reinterpret_cast<GradientWalk*>(watch->walker.ptr())->walk;
  if (walk != nullptr) {
    for (const Place& place : walk->places) {
      if (place.among >= 0) {
        const at::Tensor& param = THPVariable_Unpack(place.param.ptr());
        if (!param.is_inference()) {
          param.unsafeGetTensorImpl()->bump_version();
        }
      }
    }
  }
  Py_RETURN_NONE;
}

// forget(): holds nothing any more; `look` finds everything changed from here on.
inline PyObject* watch_forget(PyObject* self, PyObject*) {
  watch_clear(self);
  Py_RETURN_NONE;
}

// know(groups): the entries that the groups have from here on; None if they may change and stay
// the same objects.
inline PyObject* watch_know(PyObject* self, PyObject* groups) {
  Watch* watch = reinterpret_cast<StepWatch*>(self)->watch;
  if (watch == nullptr || groups == Py_None) {
    if (watch != nullptr) {
      watch->known = false;
    }
    Py_RETURN_NONE;
  }
  if (!PyList_CheckExact(groups)) {
    PyErr_SetString(PyExc_TypeError, "know takes the list of parameter groups, or None");
    return nullptr;
  }
  if (!guarded([&] { know_entries(*watch, groups); })) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

// step_watch(walker, state, at_a_time, table, device): a StepWatch. `state`: a list of plain tensors
// whose addresses are looked at, so many at a time. `table`: where addresses that are new are
// written to, or None if nobody may; on GPU `device`, or on the CPU (-1).
inline PyObject* make_step_watch(PyObject*, PyObject* args) {
  PyObject *walker = nullptr, *state = nullptr, *table = nullptr;
  Py_ssize_t at_a_time = 0;
  int device = -1;
  if (!PyArg_ParseTuple(args, "OO!nOi", &walker, &PyList_Type, &state, &at_a_time, &table,
                        &device)) {
    return nullptr;
  }
  if (Py_TYPE(walker) != reinterpret_cast<PyTypeObject*>(gradient_walk_type)) {
    PyErr_SetString(PyExc_TypeError, "step_watch takes a GradientWalk");
    return nullptr;
  }
  py::object made;
  const bool done = guarded([&] {
    auto watch = std::make_unique<Watch>();
    watch->walker = py::reinterpret_borrow<py::object>(walker);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(state); ++i) {
      PyObject* tensor = PyList_GET_ITEM(state, i);
      if (!THPVariable_CheckExact(tensor)) {
        PyErr_SetString(PyExc_TypeError, "step_watch takes state of plain tensors");
        throw PythonRaised();
      }
      watch->homes.push_back(address_of(THPVariable_Unpack(tensor)));
      watch->state.push_back(py::reinterpret_borrow<py::object>(tensor));
    }
    watch->at_a_time = static_cast<size_t>(std::max<Py_ssize_t>(at_a_time, 1));
    if (table != Py_None) {
      watch->table = py::reinterpret_borrow<py::object>(table);
    }
    watch->device = device;
    auto* type = reinterpret_cast<PyTypeObject*>(step_watch_type);
    made = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
    if (!made) {
      throw PythonRaised();
    }
    reinterpret_cast<StepWatch*>(made.ptr())->watch = watch.release();
  });
  return done ? made.release().ptr() : nullptr;
}

PyType_Slot guards_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(guards_traverse)},
                              {Py_tp_clear, reinterpret_cast<void*>(guards_clear)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(guards_dealloc)},
                              {Py_tp_call, reinterpret_cast<void*>(guards_hold)},
                              {0, nullptr}};
PyType_Spec guards_spec = {
    "gradilocks_native.Guards", sizeof(Guards), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, guards_slots};
PyMethodDef step_watch_methods[] = {
    {"look", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(watch_look)), METH_FASTCALL,
     "look(groups, stream): the gradients, where they lie if that is new, and whether the groups "
     "have the same entries; None: something else is another."},
    {"took", watch_took, METH_NOARGS, "Counts a write to every parameter that has a gradient."},
    {"forget", watch_forget, METH_NOARGS, "Holds nothing any more."},
    {"know", watch_know, METH_O, "know(groups): what the groups have from here on."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot step_watch_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(watch_traverse)},
                                  {Py_tp_clear, reinterpret_cast<void*>(watch_clear)},
                                  {Py_tp_dealloc, reinterpret_cast<void*>(watch_dealloc)},
                                  {Py_tp_methods, step_watch_methods},
                                  {0, nullptr}};
PyType_Spec step_watch_spec = {
    "gradilocks_native.StepWatch", sizeof(StepWatch), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, step_watch_slots};
PyMethodDef step_watch_functions[] = {
    {"guards", make_guards, METH_O,
     "guards([(demand, owner, name, expected), ...]): what tells whether all of them hold."},
    {"step_watch", make_step_watch, METH_VARARGS,
     "step_watch(walker, state, at_a_time, table, device): a StepWatch."},
    {nullptr, nullptr, 0, nullptr}};

inline bool add_step_watch(PyObject* module) {
  guards_type = PyType_FromSpec(&guards_spec);
  step_watch_type = PyType_FromSpec(&step_watch_spec);
  return guards_type != nullptr && step_watch_type != nullptr &&
         PyModule_AddFunctions(module, step_watch_functions) == 0;
}

}  // namespace
}  // namespace gradilocks
