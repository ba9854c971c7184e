// Launches compiled CUDA kernels through the driver.
//
// Triton's own launcher is called with every argument as a Python object, and with some twenty more
// that ours never need. Here tensors and numbers are turned into the kernel's parameters, and
// nothing else is done. No header of CUDA's is needed: three functions of the driver are looked up
// when the first launch is made.

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "native.h"

#include <structmember.h>  // After Python.h, which native.h brings.

namespace gradilocks {
namespace {

constexpr Py_ssize_t kMost = 48;  // Parameters of a kernel; ours have some twenty.
constexpr int kInvalidContext = 201;

using LaunchKernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned, void*, void**, void**);
using ParamInfo = int (*)(void*, size_t, size_t*, size_t*);
using ErrorString = int (*)(int, const char**);
using CopyToDevice = int (*)(uint64_t, const void*, size_t, void*);

struct Driver {
  LaunchKernel launch = nullptr;
  ParamInfo param_info = nullptr;
  ErrorString error_string = nullptr;
  CopyToDevice copy = nullptr;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) {
      launch = reinterpret_cast<LaunchKernel>(dlsym(library, "cuLaunchKernel"));
      param_info = reinterpret_cast<ParamInfo>(dlsym(library, "cuFuncGetParamInfo"));
      error_string = reinterpret_cast<ErrorString>(dlsym(library, "cuGetErrorString"));
      copy = reinterpret_cast<CopyToDevice>(dlsym(library, "cuMemcpyHtoDAsync_v2"));
    }
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

struct Launch {
  PyObject_HEAD vectorcallfunc call;
  void* function;
  unsigned threads, shared;
  int device;
  Py_ssize_t given;  // Parameters that a call brings; those behind them are null pointers.
  Py_ssize_t count;
  uint8_t sizes[kMost];
};

// The number as a parameter of 4 or 8 bytes; false with an error set if it does not fit.
bool as_number(PyObject* given, uint8_t size, uint64_t* out) {
  const long long number = PyLong_AsLongLong(given);
  if (number == -1 && PyErr_Occurred()) {
    return false;
  }
  if (size == 4) {
    const auto narrow = static_cast<int32_t>(number);
    if (narrow != number) {
      PyErr_Format(PyExc_OverflowError, "%lld does not fit into the 4 bytes that the kernel takes",
                   number);
      return false;
    }
    std::memcpy(out, &narrow, sizeof(narrow));
  } else {
    std::memcpy(out, &number, sizeof(number));
  }
  return true;
}

// The value of a parameter: a number, or where a tensor lies; false with an error set if `given` is
// neither or does not fit.
bool as_parameter(const Launch* launch, Py_ssize_t place, PyObject* given, uint64_t* out) {
  if (PyLong_CheckExact(given)) {
    return as_number(given, launch->sizes[place], out);
  }
  if (launch->sizes[place] != 8) {
    PyErr_Format(PyExc_TypeError,
                 "argument %zd of a launch is a tensor where the kernel takes a number", place);
    return false;
  }
  return cuda_address(given, launch->device, out);
}

bool as_programs(PyObject* given, long long* out) {
  *out = PyLong_AsLongLong(given);
  if (PyErr_Occurred()) {
    return false;
  }
  if (*out < 0 || *out > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "a launch takes 0 to 2147483647 programs, got %lld", *out);
    return false;
  }
  return true;
}

PyObject* failed(int status) {
  const char* text = nullptr;
  if (driver().error_string != nullptr) {
    driver().error_string(status, &text);
  }
  // As Triton's launcher words it.
  PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s", text == nullptr ? "unknown" : text);
  return nullptr;
}

// True if it was launched, False if this thread has no context yet; null with an error set.
PyObject* launch_on(const Launch* launch, long long programs, void* stream, uint64_t* values) {
  if (programs == 0) {
    Py_RETURN_TRUE;
  }
  void* pointers[kMost];
  for (Py_ssize_t place = 0; place < launch->count; ++place) {
    pointers[place] = &values[place];
  }
  int status = 0;
  Py_BEGIN_ALLOW_THREADS status =
      driver().launch(launch->function, static_cast<unsigned>(programs), 1, 1, launch->threads, 1,
                      1, launch->shared, stream, pointers, nullptr);
  Py_END_ALLOW_THREADS if (status == kInvalidContext) { Py_RETURN_FALSE; }
  if (status != 0) {
    return failed(status);
  }
  Py_RETURN_TRUE;
}

// launch(programs, stream, *args): True if it was launched, False if this thread has no context
// yet.
PyObject* run(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  auto* launch = reinterpret_cast<Launch*>(self);
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (names != nullptr || count != launch->given + 2) {
    PyErr_Format(PyExc_TypeError,
                 "a launch takes programs, a stream and %zd arguments, got %zd in all",
                 launch->given, count);
    return nullptr;
  }
  long long programs = 0;
  void* stream = PyLong_AsVoidPtr(args[1]);
  if (PyErr_Occurred() || !as_programs(args[0], &programs)) {
    return nullptr;
  }
  uint64_t values[kMost] = {};
  for (Py_ssize_t place = 0; place < launch->given; ++place) {
    if (!as_parameter(launch, place, args[place + 2], &values[place])) {
      return nullptr;
    }
  }
  return launch_on(launch, programs, stream, values);
}

// A launch on arguments of which only some change from call to call. The others are not looked at
// again: of twenty tensors, after other work has filled the cache, that would be sixty waits for
// memory.
struct BoundLaunch {
  PyObject_HEAD vectorcallfunc call;
  Launch* launch;   // Owned.
  PyObject* args;   // Owned: it keeps the tensors whose addresses are in `values`.
  long long programs;
  Py_ssize_t changing;  // How many change, and where they stand among the arguments.
  uint8_t places[kMost];
  uint64_t values[kMost];
};

PyObject* bound_launch_type = nullptr;

// bound(stream, *changing): as a launch.
PyObject* run_bound(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
  auto* bound = reinterpret_cast<BoundLaunch*>(self);
  const Py_ssize_t count = PyVectorcall_NARGS(flags);
  if (names != nullptr || count != bound->changing + 1) {
    PyErr_Format(PyExc_TypeError,
                 "a bound launch takes a stream and %zd arguments, got %zd in all", bound->changing,
                 count);
    return nullptr;
  }
  void* stream = PyLong_AsVoidPtr(args[0]);
  if (PyErr_Occurred()) {
    return nullptr;
  }
  // A copy: another thread may be here while the driver reads it.
  uint64_t values[kMost];
  std::memcpy(values, bound->values, sizeof(values));
  for (Py_ssize_t k = 0; k < bound->changing; ++k) {
    const uint8_t place = bound->places[k];
    if (!as_parameter(bound->launch, place, args[k + 1], &values[place])) {
      return nullptr;
    }
  }
  return launch_on(bound->launch, bound->programs, stream, values);
}

void destroy_bound(PyObject* self) {
  auto* bound = reinterpret_cast<BoundLaunch*>(self);
  Py_XDECREF(reinterpret_cast<PyObject*>(bound->launch));
  Py_XDECREF(bound->args);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// launch.bind(programs, args, changing): a launch on a tuple of arguments, of which those at the
// places in the tuple `changing` are given at each call.
PyObject* bind(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  auto* launch = reinterpret_cast<Launch*>(self);
  if (count != 3 || !PyTuple_Check(args[1]) || !PyTuple_Check(args[2]) ||
      PyTuple_GET_SIZE(args[1]) != launch->given || PyTuple_GET_SIZE(args[2]) > launch->given) {
    PyErr_Format(PyExc_TypeError,
                 "bind takes programs, a tuple of %zd arguments and one of places among them",
                 launch->given);
    return nullptr;
  }
  long long programs = 0;
  if (!as_programs(args[0], &programs)) {
    return nullptr;
  }
  auto* type = reinterpret_cast<PyTypeObject*>(bound_launch_type);
  auto* made = reinterpret_cast<BoundLaunch*>(type->tp_alloc(type, 0));
  if (made == nullptr) {
    return nullptr;
  }
  made->call = run_bound;
  made->launch = reinterpret_cast<Launch*>(Py_NewRef(self));
  made->args = Py_NewRef(args[1]);
  made->programs = programs;
  made->changing = PyTuple_GET_SIZE(args[2]);
  bool fine = true;
  for (Py_ssize_t place = 0; fine && place < launch->given; ++place) {
    fine = as_parameter(launch, place, PyTuple_GET_ITEM(args[1], place), &made->values[place]);
  }
  for (Py_ssize_t k = 0; fine && k < made->changing; ++k) {
    const Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(args[2], k));
    if (!PyErr_Occurred() && (place < 0 || place >= launch->given)) {
      PyErr_Format(PyExc_IndexError, "a launch of %zd arguments has none at %zd", launch->given,
                   place);
    }
    fine = !PyErr_Occurred();
    made->places[k] = static_cast<uint8_t>(place);
  }
  if (!fine) {
    Py_DECREF(reinterpret_cast<PyObject*>(made));
    return nullptr;
  }
  return reinterpret_cast<PyObject*>(made);
}

PyMethodDef launch_methods[] = {
    {"bind", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(bind)), METH_FASTCALL,
     "bind(programs, args, changing): a launch on these arguments, called with a stream and what "
     "has changed."},
    {nullptr, nullptr, 0, nullptr}};

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* launch_type = nullptr;

// cuda_launch(function, threads, shared, device, args): None if the kernel does not take what
// `args` are.
PyObject* make(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  if (count != 5 || !PyTuple_Check(args[4])) {
    PyErr_SetString(PyExc_TypeError,
                    "cuda_launch takes function, threads, shared, device and a tuple of arguments");
    return nullptr;
  }
  void* function = PyLong_AsVoidPtr(args[0]);
  const long threads = PyLong_AsLong(args[1]), shared = PyLong_AsLong(args[2]),
             device = PyLong_AsLong(args[3]);
  if (PyErr_Occurred()) {
    return nullptr;
  }
  const Driver& cuda = driver();
  const Py_ssize_t given = PyTuple_GET_SIZE(args[4]);
  if (cuda.launch == nullptr || cuda.param_info == nullptr || given + 2 > kMost) {
    Py_RETURN_NONE;
  }
  uint8_t sizes[kMost];
  Py_ssize_t taken = 0;
  size_t offset = 0, size = 0;
  while (taken < kMost &&
         cuda.param_info(function, static_cast<size_t>(taken), &offset, &size) == 0) {
    if (size != 4 && size != 8) {
      Py_RETURN_NONE;
    }
    sizes[taken++] = static_cast<uint8_t>(size);
  }
  // Triton appends up to two pointers to scratch memory, null where none is needed.
  if (taken < given || taken > given + 2) {
    Py_RETURN_NONE;
  }
  for (Py_ssize_t place = 0; place < taken; ++place) {
    const bool number = place < given && PyLong_CheckExact(PyTuple_GET_ITEM(args[4], place));
    if (!number && sizes[place] != 8) {
      Py_RETURN_NONE;
    }
  }
  auto* type = reinterpret_cast<PyTypeObject*>(launch_type);
  auto* made = reinterpret_cast<Launch*>(type->tp_alloc(type, 0));
  if (made == nullptr) {
    return nullptr;
  }
  made->call = run;
  made->function = function;
  made->threads = static_cast<unsigned>(threads);
  made->shared = static_cast<unsigned>(shared);
  made->device = static_cast<int>(device);
  made->given = given;
  made->count = taken;
  std::memcpy(made->sizes, sizes, sizeof(sizes));
  return reinterpret_cast<PyObject*>(made);
}

constexpr size_t kStaged = 1 << 16;  // So many bytes the driver takes over before it returns.

// cuda_upload(to, numbers, device, stream): copies int64 of the host to a tensor on a GPU, in the
// order of the stream; so few that the driver takes them over before it returns. False, and nothing
// is done, if there is no such function or this thread has no context yet.
PyObject* upload(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  if (count != 4) {
    PyErr_SetString(PyExc_TypeError, "cuda_upload takes to, numbers, device and stream");
    return nullptr;
  }
  const long device = PyLong_AsLong(args[2]);
  const void* from = nullptr;
  size_t size = 0;
  if (PyErr_Occurred() || !cpu_memory(args[1], &from, &size)) {
    return nullptr;
  }
  const int sent = send_numbers(args[0], from, size, static_cast<int>(device), args[3]);
  return sent < 0 ? nullptr : PyBool_FromLong(sent);
}

PyMethodDef functions[] = {
    {"cuda_upload", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(upload)),
     METH_FASTCALL,
     "cuda_upload(to, numbers, device, stream): copies numbers of the host to a tensor on a GPU; "
     "False if that cannot be done from here."},
    {"cuda_launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(make)),
     METH_FASTCALL,
     "cuda_launch(function, threads, shared, device, args): what launches the kernel on arguments "
     "such as `args`, "
     "called with programs, stream and arguments; None if its parameters are not what these are."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

int send_numbers(PyObject* table, const void* numbers, size_t bytes, int device, PyObject* stream) {
  size_t room = 0;
  if (!memory_size(table, &room)) {
    return -1;
  }
  if (room != bytes) {
    PyErr_Format(PyExc_ValueError, "%zu bytes were given for a table of %zu", bytes, room);
    return -1;
  }
  if (device < 0) {
    const void* to = nullptr;
    if (!cpu_memory(table, &to, &room)) {
      return -1;
    }
    std::memcpy(const_cast<void*>(to), numbers, bytes);
    return 1;
  }
  uint64_t to = 0;
  void* on = PyLong_AsVoidPtr(stream);
  if (PyErr_Occurred() || !cuda_address(table, device, &to)) {
    return -1;
  }
  if (driver().copy == nullptr || bytes > kStaged) {
    return 0;
  }
  int status = 0;
  Py_BEGIN_ALLOW_THREADS status = driver().copy(to, numbers, bytes, on);
  Py_END_ALLOW_THREADS if (status == kInvalidContext) { return 0; }
  if (status != 0) {
    failed(status);
    return -1;
  }
  return 1;
}

bool add_cuda_launch(PyObject* module) {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Launch, call), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                                {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_members, members},
                                {Py_tp_methods, launch_methods},
                                {0, nullptr}};
  static PyType_Spec spec = {
      "gradilocks_native.CudaLaunch", sizeof(Launch), 0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static PyMemberDef bound_members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(BoundLaunch, call), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot bound_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(destroy_bound)},
                                      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                      {Py_tp_members, bound_members},
                                      {0, nullptr}};
  static PyType_Spec bound_spec = {
      "gradilocks_native.CudaBoundLaunch", sizeof(BoundLaunch), 0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
      bound_slots};
  launch_type = PyType_FromSpec(&spec);
  bound_launch_type = PyType_FromSpec(&bound_spec);
  return launch_type != nullptr && bound_launch_type != nullptr &&
         PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace gradilocks
