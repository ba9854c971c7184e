// The CPU kernels as Python sees them: the type CpuChunks, and two functions. Tensors come as their
// addresses; what Python hands over with them it keeps alive until the call is over.
#include <cmath>
#include <exception>
#include <initializer_list>
#include <new>
#include <stdexcept>

#include "cpu_elements.h"
#include "cpu_measure.h"
#include "cpu_optimizers.h"
#include "cpu_settle.h"
#include "native.h"

namespace gradilocks {

namespace {

// The arguments of one call, taken in their order. A Python error is set and remembered if one is
// not a number, or there are not as many as taken; then nothing may be done.
class Arguments {
 public:
  Arguments(PyObject* const* given, Py_ssize_t count) : given_(given), count_(count) {}

  int64_t integer() {
    PyObject* next = take();
    const long long number = next == nullptr ? 0 : PyLong_AsLongLong(next);
    failed_ = failed_ || (number == -1 && PyErr_Occurred() != nullptr);
    return number;
  }

  double real() {
    PyObject* next = take();
    const double number = next == nullptr ? 0.0 : PyFloat_AsDouble(next);
    failed_ = failed_ || (number == -1.0 && PyErr_Occurred() != nullptr);
    return number;
  }

  template <class T>
  T* address() {
    return reinterpret_cast<T*>(integer());
  }

  bool complete() {
    if (!failed_ && at_ != count_) {
      PyErr_Format(PyExc_TypeError, "%zd arguments were given, expected %zd", count_, at_);
      failed_ = true;
    }
    return !failed_;
  }

 private:
  PyObject* take() {
    if (failed_) {
      return nullptr;
    }
    if (at_ == count_) {
      PyErr_Format(PyExc_TypeError, "%zd arguments were given, expected more", count_);
      failed_ = true;
      return nullptr;
    }
    return given_[at_++];
  }

  PyObject* const* given_;
  Py_ssize_t count_, at_ = 0;
  bool failed_ = false;
};

// Lets other Python threads run while it lives.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Runs `work` without the GIL; what it throws becomes a Python error, and false is returned.
template <class F>
bool computed(F&& work) {
  try {
    const WithoutGil without;
    work();
    return true;
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "a CPU kernel failed");
  }
  return false;
}

template <class F>
PyObject* none_if_computed(F&& work) {
  if (!computed(work)) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

struct CpuChunks {
  PyObject_HEAD Chunks* chunks;
};

const Chunks& chunks_of(PyObject* self) { return *reinterpret_cast<CpuChunks*>(self)->chunks; }

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  long long sizes = 0, codes = 0, count = 0, chunk = 0;
  int is_double = 0;
  static const char* names[] = {"sizes", "codes", "count", "chunk", "is_double", nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "LLLLp", const_cast<char**>(names), &sizes,
                                   &codes, &count, &chunk, &is_double)) {
    return nullptr;
  }
  if (count < 0 || chunk < 1) {
    PyErr_SetString(PyExc_ValueError, "count must not be negative, and chunk at least 1");
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) {
    return nullptr;
  }
  try {
    reinterpret_cast<CpuChunks*>(self)->chunks =
        new Chunks(reinterpret_cast<const int64_t*>(sizes), reinterpret_cast<const int64_t*>(codes),
                   count, chunk, is_double != 0);
  } catch (const std::exception&) {
    Py_DECREF(self);
    return PyErr_NoMemory();
  }
  return self;
}

void release(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<CpuChunks*>(self)->chunks;
  type->tp_free(self);
  Py_DECREF(type);
}

// Row by row: norm, largest magnitude, and how many are 0, NaN and Inf.
void fill(const FoundAll& found, double* rows) {
  const size_t count = found.size();
  for (size_t i = 0; i < count; ++i) {
    rows[i] = found[i].norm;
    rows[count + i] = found[i].largest;
    rows[2 * count + i] = static_cast<double>(found[i].zeros);
    rows[3 * count + i] = static_cast<double>(found[i].nan);
    rows[4 * count + i] = static_cast<double>(found[i].inf);
  }
}

bool is_broken(const FoundAll& found) {
  for (const Found& each : found) {
    if (each.nan > 0 || each.inf > 0) {
      return true;
    }
  }
  return false;
}

PyObject* measure_all(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  Arguments arguments(given, count);
  const int64_t* pointers = arguments.address<int64_t>();
  const int order = static_cast<int>(arguments.integer());
  double* rows = arguments.address<double>();
  if (!arguments.complete()) {
    return nullptr;
  }
  return none_if_computed([&] { fill(measure(chunks_of(self), pointers, order), rows); });
}

PyObject* look(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  Arguments arguments(given, count);
  const int64_t* pointers = arguments.address<int64_t>();
  const double factor = arguments.real();
  double* rows = arguments.address<double>();
  if (!arguments.complete()) {
    return nullptr;
  }
  bool broken = false;
  const bool done = computed([&] {
    const FoundAll found = measure(chunks_of(self), pointers, 0, factor);
    fill(found, rows);
    broken = is_broken(found);
  });
  return done ? PyBool_FromLong(broken) : nullptr;
}

PyObject* multiply_all(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  Arguments arguments(given, count);
  const int64_t* pointers = arguments.address<int64_t>();
  const double factor = arguments.real();
  if (!arguments.complete()) {
    return nullptr;
  }
  return none_if_computed([&] { multiply(chunks_of(self), pointers, &factor, false); });
}

PyObject* multiply_each(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  Arguments arguments(given, count);
  const int64_t* pointers = arguments.address<int64_t>();
  const double* factors = arguments.address<double>();
  if (!arguments.complete()) {
    return nullptr;
  }
  return none_if_computed([&] { multiply(chunks_of(self), pointers, factors, true); });
}

PyObject* clamp_all(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  Arguments arguments(given, count);
  const int64_t* pointers = arguments.address<int64_t>();
  const double bound = arguments.real();
  if (!arguments.complete()) {
    return nullptr;
  }
  return none_if_computed([&] { clamp(chunks_of(self), pointers, bound); });
}

PyObject* limit(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  Arguments arguments(given, count);
  const int64_t* pointers = arguments.address<int64_t>();
  const int order = static_cast<int>(arguments.integer());
  const double bound = arguments.real();
  double* out = arguments.address<double>();
  if (!arguments.complete()) {
    return nullptr;
  }
  return none_if_computed([&] {
    const Chunks& tensors = chunks_of(self);
    const FoundAll found = measure(tensors, pointers, order);
    out[0] = total_norm(found, order, tensors.is_double);
    out[1] = coefficient_for(out[0], bound, is_broken(found));
  });
}

RateTables rate_tables(Arguments& arguments) {
  RateTables tables{};
  tables.own = arguments.address<int64_t>();
  tables.groups = arguments.address<int32_t>();
  tables.settings = arguments.address<double>();
  tables.rates = arguments.address<double>();
  return tables;
}

// Whether a loss of this dtype is NaN or Inf.
bool is_broken(int64_t address, int dtype) {
  bool broken = false;
  if (address != 0) {
    with_type(dtype, [&](auto* type) {
      broken = !std::isfinite(widened(*reinterpret_cast<decltype(type)>(address)));
    });
  }
  return broken;
}

PyObject* settle_all(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  Arguments arguments(given, count);
  const Chunks& tensors = chunks_of(self);
  const int64_t* pointers = arguments.address<int64_t>();
  Rules rules{};
  rules.order = static_cast<int>(arguments.integer());
  rules.clips = arguments.integer() != 0;
  rules.moves = arguments.integer() != 0;
  rules.unscaled = arguments.integer() != 0;
  rules.overflowed = arguments.integer() != 0;
  rules.is_double = tensors.is_double;
  const int64_t loss = arguments.integer();
  const int loss_dtype = static_cast<int>(arguments.integer());
  double* rows = arguments.address<double>();
  double* row = arguments.address<double>();
  Standing standing{};
  standing.numbers = arguments.address<double>();
  standing.scale = arguments.address<float>();
  standing.tracker = arguments.address<int32_t>();
  standing.hysteresis = arguments.address<int32_t>();
  standing.streak = arguments.address<int32_t>();
  standing.steps = arguments.address<int64_t>();
  standing.skip = arguments.address<float>();
  standing.divisor = arguments.address<float>();
  standing.multiplier = arguments.address<double>();
  const int64_t optimizer = arguments.integer();
  RateTables tables{};
  if (optimizer != 0) {
    tables = rate_tables(arguments);
  }
  if (!arguments.complete()) {
    return nullptr;
  }
  return none_if_computed([&] {
    const FoundAll found = measure(tensors, pointers, rules.order);
    fill(found, rows);
    const bool skipped = settle(found, rules, standing, is_broken(loss, loss_dtype), row);
    if (!skipped && optimizer != 0) {
      work_out_rates(static_cast<Optimizer>(optimizer), tables, tensors.count());
    }
  });
}

PyObject* step_all(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  Arguments arguments(given, count);
  const int64_t optimizer = arguments.integer();
  const int64_t* places = arguments.address<int64_t>();
  const int64_t* gradients = arguments.address<int64_t>();
  const double* rates = arguments.address<double>();
  const float* skip = arguments.address<float>();
  const float* divisor = arguments.address<float>();
  if (!arguments.complete()) {
    return nullptr;
  }
  if (skip != nullptr && *skip != 0.0f) {
    Py_RETURN_NONE;
  }
  return none_if_computed([&] {
    step(static_cast<Optimizer>(optimizer), chunks_of(self), places, gradients, rates, divisor);
  });
}

PyObject* rates(PyObject*, PyObject* const* given, Py_ssize_t count) {
  Arguments arguments(given, count);
  const int64_t optimizer = arguments.integer();
  const RateTables tables = rate_tables(arguments);
  const int64_t tensors = arguments.integer();
  const float* skip = arguments.address<float>();
  if (!arguments.complete()) {
    return nullptr;
  }
  if (skip == nullptr || *skip == 0.0f) {
    work_out_rates(static_cast<Optimizer>(optimizer), tables, tensors);
  }
  Py_RETURN_NONE;
}

PyObject* advance_scale(PyObject*, PyObject* const* given, Py_ssize_t count) {
  Arguments arguments(given, count);
  double numbers[6];
  for (double& number : numbers) {
    number = arguments.real();
  }
  float* scale = arguments.address<float>();
  int32_t* tracker = arguments.address<int32_t>();
  int32_t* hysteresis = arguments.address<int32_t>();
  const bool skipped = arguments.integer() != 0;
  if (!arguments.complete()) {
    return nullptr;
  }
  advance(numbers, scale, tracker, hysteresis, skipped);
  Py_RETURN_NONE;
}

PyObject* one_thread(PyObject*, PyObject*) {
  stay_on_one_thread();
  Py_RETURN_NONE;
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyTypeObject* chunks_type = nullptr;

}  // namespace

const Chunks* chunks_in(PyObject* object) {
  if (Py_TYPE(object) != chunks_type) {
    PyErr_Format(PyExc_TypeError, "expected CpuChunks, got %s", Py_TYPE(object)->tp_name);
    return nullptr;
  }
  return &chunks_of(object);
}

int64_t count_of(const Chunks& tensors) { return tensors.count(); }

bool measure_into(const Chunks& tensors, const int64_t* pointers, double* rows, Sums* sums) {
  return computed([&] {
    const FoundAll found = measure(tensors, pointers, 2);
    fill(found, rows);
    sums->norm = total_norm(found, 2, tensors.is_double);
    for (const Found& each : found) {
      sums->nan += static_cast<double>(each.nan);
      sums->inf += static_cast<double>(each.inf);
    }
  });
}

bool add_cpu_kernels(PyObject* module) {
  static PyMethodDef methods[] = {
      {"measure", fast(measure_all), METH_FASTCALL, "pointers, order, found"},
      {"look", fast(look), METH_FASTCALL, "pointers, factor, found -> whether one is NaN or Inf"},
      {"multiply", fast(multiply_all), METH_FASTCALL, "pointers, factor"},
      {"multiply_each", fast(multiply_each), METH_FASTCALL, "pointers, factors"},
      {"clamp", fast(clamp_all), METH_FASTCALL, "pointers, bound"},
      {"limit", fast(limit), METH_FASTCALL, "pointers, order, bound, norm and coefficient"},
      {"settle", fast(settle_all), METH_FASTCALL, "as native_backend.Settler calls it"},
      {"step", fast(step_all), METH_FASTCALL, "optimizer, places, gradients, rates, skip, divisor"},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_doc, const_cast<char*>("The chunks of tensors of given sizes and codes.")},
      {Py_tp_new, reinterpret_cast<void*>(make)},
      {Py_tp_dealloc, reinterpret_cast<void*>(release)},
      {Py_tp_methods, methods},
      {0, nullptr}};
  static PyType_Spec spec = {"gradilocks_native.CpuChunks", sizeof(CpuChunks), 0,
                             Py_TPFLAGS_DEFAULT, slots};
  static PyMethodDef functions[] = {{"cpu_rates", fast(rates), METH_FASTCALL,
                                     "optimizer, own, groups, settings, rates, count, skip"},
                                    {"cpu_advance", fast(advance_scale), METH_FASTCALL,
                                     "six numbers, scale, tracker, hysteresis, skipped"},
                                    {"cpu_one_thread", one_thread, METH_NOARGS,
                                     "from here on the caller's thread computes alone"},
                                    {nullptr, nullptr, 0, nullptr}};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObject(module, "CpuChunks", type) < 0) {
    Py_XDECREF(type);
    return false;
  }
  chunks_type = reinterpret_cast<PyTypeObject*>(type);
  return PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace gradilocks
