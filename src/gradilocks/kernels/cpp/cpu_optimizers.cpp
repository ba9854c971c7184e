// Adam, AdamW and SGD: unscale, clip and step in one pass that leaves the gradients alone.
//
// The formulas of `triton_optimizers`, in float32, or in float64 for float64 parameters. What is
// kept in another dtype passes through a few kilobytes in which it is wide; a parameter with a
// float32 master is the master rounded.

// What all elements of a tensor have in common (whether there is decay, from which end a moment is
// rounded) is chosen element by element, which costs nothing beside two divisions and a root; loops
// for each of 8 cases would make this unit compile in 14 s and not in 2.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-unswitch-loops")
#endif

#include "cpu_optimizers.h"

#include <algorithm>
#include <cmath>

#include "cpu_elements.h"

namespace gradilocks {

namespace {

// Elements that take some 10 us, as long as waking a thread does.
constexpr int64_t STEP_GRAIN = 1 << 13;
// So many are widened at a time: five columns of them stay in the first cache.
constexpr int64_t BLOCK = 512;
constexpr int RATES = 8;

// What `launch_step` says of a tensor, as `native_backend` packs it.
struct Kind {
  explicit Kind(int64_t code)
      : param(static_cast<int>(code & 7)),
        grad(static_cast<int>(code >> 3 & 7)),
        state(static_cast<int>(code >> 6 & 7)),
        master((code >> 9 & 1) != 0),
        first((code >> 10 & 1) != 0),
        second((code >> 11 & 1) != 0),
        third((code >> 12 & 1) != 0) {}
  int param, grad, state;
  bool master, first, second, third;
};

#define GRADILOCKS_APART __attribute__((noinline))

template <class W>
GRADILOCKS_APART void widen_any(int dtype, int64_t address, int64_t from, W* to, int64_t count) {
  with_type(dtype, [&](auto* type) {
    widen(reinterpret_cast<decltype(type)>(address) + from, to, count);
  });
}

template <class W>
GRADILOCKS_APART void narrow_any(int dtype, int64_t address, int64_t from, const W* values,
                                 int64_t count) {
  with_type(dtype, [&](auto* type) {
    narrow(values, reinterpret_cast<decltype(type)>(address) + from, count);
  });
}

// One column of a tensor, such as its first moments: in place where it is wide already, else by way
// of a buffer.
template <class W>
class Column {
 public:
  Column(int64_t address, int dtype, int64_t start)
      : dtype_(dtype), start_(start), address_(address) {}

  bool is_wide() const { return dtype_ == (std::is_same_v<W, double> ? FLOAT64 : FLOAT32); }

  W* read(int64_t from, int64_t count) {
    if (is_wide()) {
      return reinterpret_cast<W*>(address_) + start_ + from;
    }
    widen_any(dtype_, address_, start_ + from, buffer_, count);
    return buffer_;
  }

  void write(const W* values, int64_t from, int64_t count) {
    if (values == buffer_) {
      write_rounded(values, from, count);
    }
  }

  void write_rounded(const W* values, int64_t from, int64_t count) {
    narrow_any(dtype_, address_, start_ + from, values, count);
  }

 private:
  int dtype_;
  int64_t start_, address_;
  W buffer_[BLOCK];
};

template <class W>
struct AdamNumbers {
  W lr, root, decay, eps, beta1, take1, beta2, take2, divisor, sign;
};

// From whichever end is nearer: rounded once, and exact where `old` has come to rest at `target`.
template <class W>
inline W towards(W old, W target, W take, W keep) {
  return take < W(0.5) ? old + take * (target - old) : target - keep * (target - old);
}

template <bool AMSGRAD, bool DECOUPLED, bool SCALED, class W>
GRADILOCKS_APART void adam(W* __restrict p, W* __restrict m, W* __restrict v, W* __restrict x,
                           const W* __restrict grads, int64_t count, const AdamNumbers<W>& n) {
  const W lr = n.lr, root = n.root, decay = n.decay, eps = n.eps;
  const W divisor = n.divisor, sign = n.sign;
  const W beta1 = n.beta1, take1 = n.take1, beta2 = n.beta2, take2 = n.take2;
  for (int64_t i = 0; i < count; ++i) {
    W g = grads[i];
    if constexpr (SCALED) {
      g = g / divisor;
    }
    g = g * sign;
    if constexpr (!DECOUPLED) {
      g = decay != W(0) ? g + decay * p[i] : g;
    }
    m[i] = towards(m[i], g, take1, beta1);
    v[i] = towards(v[i], g * g, take2, beta2);
    W square = v[i];
    if constexpr (AMSGRAD) {
      square = square > x[i] || square != square ? square : x[i];
      x[i] = square;
    }
    W change = lr * (m[i] / (std::sqrt(square) / root + eps));
    if constexpr (DECOUPLED) {
      change = decay != W(0) ? change + decay * p[i] : change;
    }
    p[i] = p[i] - change;
  }
}

template <class W>
struct SgdNumbers {
  W lr, decay, momentum, keep, take, divisor, sign;
};

template <bool MOMENTUM, bool NESTEROV, bool SCALED, class W>
GRADILOCKS_APART void sgd(W* __restrict p, W* __restrict b, const W* __restrict grads,
                          int64_t count, const SgdNumbers<W>& n) {
  const W lr = n.lr, decay = n.decay, momentum = n.momentum, keep = n.keep, take = n.take;
  const W divisor = n.divisor, sign = n.sign;
  for (int64_t i = 0; i < count; ++i) {
    W g = grads[i];
    if constexpr (SCALED) {
      g = g / divisor;
    }
    g = g * sign;
    g = decay != W(0) ? g + decay * p[i] : g;
    if constexpr (MOMENTUM) {
      const W next = keep * b[i] + take * g;
      b[i] = next;
      g = NESTEROV ? g + momentum * next : next;
    }
    p[i] = p[i] - lr * g;
  }
}

// Calls `work` with std::true_type or std::false_type for each of three.
template <class F>
inline void with_flags(bool first, bool second, bool third, F&& work) {
  const auto with_third = [&](auto one, auto two) {
    third ? work(one, two, std::true_type{}) : work(one, two, std::false_type{});
  };
  const auto with_second = [&](auto one) {
    second ? with_third(one, std::true_type{}) : with_third(one, std::false_type{});
  };
  first ? with_second(std::true_type{}) : with_second(std::false_type{});
}

template <class W>
void adam_piece(const Chunk& piece, const Kind& kind, const int64_t* place, int64_t tensors,
                int64_t gradient, const double* rate, const float* divisor) {
  const bool amsgrad = kind.first, maximize = kind.second, decoupled = kind.third;
  const auto number = [rate](int at) { return static_cast<W>(rate[at]); };
  const AdamNumbers<W> numbers = {number(0),
                                  number(1),
                                  number(2),
                                  number(3),
                                  number(4),
                                  number(5),
                                  number(6),
                                  number(7),
                                  divisor == nullptr ? W(1) : static_cast<W>(*divisor),
                                  maximize ? W(-1) : W(1)};
  const int wide = std::is_same_v<W, double> ? FLOAT64 : FLOAT32;
  Column<W> params(place[0], kind.param, piece.start);
  Column<W> weights(place[kind.master ? 4 * tensors : 0], kind.master ? wide : kind.param,
                    piece.start);
  Column<W> first(place[tensors], kind.state, piece.start);
  Column<W> second(place[2 * tensors], kind.state, piece.start);
  Column<W> largest(place[3 * tensors], kind.state, piece.start);
  Column<W> grads(gradient, kind.grad, piece.start);
  const bool direct = weights.is_wide() && first.is_wide() && grads.is_wide() && !kind.master;
  const int64_t block = direct ? piece.length : BLOCK;
  for (int64_t from = 0; from < piece.length; from += block) {
    const int64_t count = std::min(block, piece.length - from);
    W* p = weights.read(from, count);
    W* m = first.read(from, count);
    W* v = second.read(from, count);
    W* x = amsgrad ? largest.read(from, count) : nullptr;
    const W* g = grads.read(from, count);
    with_flags(amsgrad, decoupled, divisor != nullptr, [&](auto one, auto two, auto three) {
      adam<one.value, two.value, three.value>(p, m, v, x, g, count, numbers);
    });
    weights.write(p, from, count);
    first.write(m, from, count);
    second.write(v, from, count);
    if (amsgrad) {
      largest.write(x, from, count);
    }
    if (kind.master) {
      params.write_rounded(p, from, count);
    }
  }
}

template <class W>
void sgd_piece(const Chunk& piece, const Kind& kind, const int64_t* place, int64_t tensors,
               int64_t gradient, const double* rate, const float* divisor) {
  const bool momentum = kind.first, nesterov = kind.second, maximize = kind.third;
  const auto number = [rate](int at) { return static_cast<W>(rate[at]); };
  const SgdNumbers<W> numbers = {number(0),
                                 number(1),
                                 number(2),
                                 number(3),
                                 number(4),
                                 divisor == nullptr ? W(1) : static_cast<W>(*divisor),
                                 maximize ? W(-1) : W(1)};
  const int wide = std::is_same_v<W, double> ? FLOAT64 : FLOAT32;
  Column<W> params(place[0], kind.param, piece.start);
  Column<W> weights(place[kind.master ? 2 * tensors : 0], kind.master ? wide : kind.param,
                    piece.start);
  Column<W> buffers(place[tensors], kind.state, piece.start);
  Column<W> grads(gradient, kind.grad, piece.start);
  const bool direct = weights.is_wide() && (!momentum || buffers.is_wide()) && grads.is_wide();
  const int64_t block = direct && !kind.master ? piece.length : BLOCK;
  for (int64_t from = 0; from < piece.length; from += block) {
    const int64_t count = std::min(block, piece.length - from);
    W* p = weights.read(from, count);
    W* b = momentum ? buffers.read(from, count) : nullptr;
    const W* g = grads.read(from, count);
    with_flags(momentum, nesterov, divisor != nullptr, [&](auto one, auto two, auto three) {
      sgd<one.value, two.value, three.value>(p, b, g, count, numbers);
    });
    weights.write(p, from, count);
    if (momentum) {
      buffers.write(b, from, count);
    }
    if (kind.master) {
      params.write_rounded(p, from, count);
    }
  }
}

// step += 1, and lr / (1 - beta1^step), sqrt(1 - beta2^step), decay, eps, and what of the moments
// is kept and of the gradient taken.
void adam_rates(const RateTables& tables, int64_t count) {
  int32_t group = -1;
  float before = 0.0f;
  for (int64_t tensor = 0; tensor < count; ++tensor) {
    float* place = reinterpret_cast<float*>(tables.own[tensor]);
    const float step = *place + 1.0f;
    *place = step;
    double* rate = tables.rates + tensor * RATES;
    if (tables.groups[tensor] == group && step == before) {  // Powers take 50 ns each.
      std::copy(rate - RATES, rate, rate);
      continue;
    }
    group = tables.groups[tensor];
    before = step;
    const double* setting = tables.settings + int64_t{group} * RATES;
    const double lr = setting[0], decay = setting[1], beta1 = setting[2], beta2 = setting[3];
    const double left1 = 1.0 - std::pow(beta1, static_cast<double>(step));
    const double left2 = 1.0 - std::pow(beta2, static_cast<double>(step));
    const bool decoupled = setting[5] != 0.0;
    const double numbers[RATES] = {lr / left1,
                                   std::sqrt(left2),
                                   decoupled ? lr * decay : decay,
                                   setting[4],
                                   beta1,
                                   1.0 - beta1,
                                   beta2,
                                   1.0 - beta2};
    std::copy(numbers, numbers + RATES, rate);
  }
}

// lr, decay, momentum, and what of the buffer is kept and of the gradient taken. The first step
// that is taken fills the buffer with the gradient itself, whatever the dampening.
void sgd_rates(const RateTables& tables, int64_t count) {
  for (int64_t tensor = 0; tensor < count; ++tensor) {
    const double* setting = tables.settings + int64_t{tables.groups[tensor]} * RATES;
    int32_t* flag = reinterpret_cast<int32_t*>(tables.own[tensor]);
    const bool fresh = flag != nullptr && *flag != 0;
    double* rate = tables.rates + tensor * RATES;
    rate[0] = setting[0];
    rate[1] = setting[1];
    rate[2] = setting[2];
    rate[3] = fresh ? 0.0 : setting[2];
    rate[4] = fresh ? 1.0 : 1.0 - setting[3];
    if (flag != nullptr) {
      *flag = 0;
    }
  }
}

}  // namespace

void work_out_rates(Optimizer optimizer, const RateTables& tables, int64_t count) {
  (optimizer == ADAM ? adam_rates : sgd_rates)(tables, count);
}

void step(Optimizer optimizer, const Chunks& tensors, const int64_t* places,
          const int64_t* gradients, const double* rates, const float* divisor) {
  const int64_t count = tensors.count();
  tensors.run_pieces(STEP_GRAIN, [&](const Chunk& piece) {
    const int64_t tensor = piece.tensor;
    const Kind kind(tensors.codes[tensor]);
    const bool is_double = kind.param == FLOAT64;
    const auto work = optimizer == ADAM ? (is_double ? adam_piece<double> : adam_piece<float>)
                                        : (is_double ? sgd_piece<double> : sgd_piece<float>);
    work(piece, kind, places + tensor, count, gradients[tensor], rates + tensor * RATES, divisor);
  });
}

}  // namespace gradilocks
