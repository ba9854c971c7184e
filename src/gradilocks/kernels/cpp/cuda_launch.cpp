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

struct Driver {
  LaunchKernel launch = nullptr;
  ParamInfo param_info = nullptr;
  ErrorString error_string = nullptr;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) {
      launch = reinterpret_cast<LaunchKernel>(dlsym(library, "cuLaunchKernel"));
      param_info = reinterpret_cast<ParamInfo>(dlsym(library, "cuFuncGetParamInfo"));
      error_string = reinterpret_cast<ErrorString>(dlsym(library, "cuGetErrorString"));
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
  const long long programs = PyLong_AsLongLong(args[0]);
  void* stream = PyLong_AsVoidPtr(args[1]);
  if (PyErr_Occurred()) {
    return nullptr;
  }
  if (programs < 0 || programs > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "a launch takes 0 to 2147483647 programs, got %lld", programs);
    return nullptr;
  }
  uint64_t values[kMost] = {};
  void* pointers[kMost];
  for (Py_ssize_t place = 0; place < launch->count; ++place) {
    pointers[place] = &values[place];
    if (place >= launch->given) {
      continue;
    }
    PyObject* given = args[place + 2];
    const bool fine =
        PyLong_CheckExact(given)
            ? as_number(given, launch->sizes[place], &values[place])
            : launch->sizes[place] == 8 && cuda_address(given, launch->device, &values[place]);
    if (!fine) {
      if (!PyErr_Occurred()) {
        PyErr_Format(PyExc_TypeError,
                     "argument %zd of a launch is a tensor where the kernel takes a number", place);
      }
      return nullptr;
    }
  }
  if (programs == 0) {
    Py_RETURN_TRUE;
  }
  int status = 0;
  Py_BEGIN_ALLOW_THREADS status =
      driver().launch(launch->function, static_cast<unsigned>(programs), 1, 1, launch->threads, 1,
                      1, launch->shared, stream, pointers, nullptr);
  Py_END_ALLOW_THREADS if (status == kInvalidContext) { Py_RETURN_FALSE; }
  if (status != 0) {
    const char* text = nullptr;
    if (driver().error_string != nullptr) {
      driver().error_string(status, &text);
    }
    // As Triton's launcher words it.
    PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s", text == nullptr ? "unknown" : text);
    return nullptr;
  }
  Py_RETURN_TRUE;
}

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

PyMethodDef functions[] = {
    {"cuda_launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(make)),
     METH_FASTCALL,
     "cuda_launch(function, threads, shared, device, args): what launches the kernel on arguments "
     "such as `args`, "
     "called with programs, stream and arguments; None if its parameters are not what these are."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_cuda_launch(PyObject* module) {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Launch, call), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                                {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_members, members},
                                {0, nullptr}};
  static PyType_Spec spec = {
      "gradilocks_native.CudaLaunch", sizeof(Launch), 0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  launch_type = PyType_FromSpec(&spec);
  return launch_type != nullptr && PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace gradilocks
