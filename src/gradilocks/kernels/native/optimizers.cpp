// Adam, AdamW and SGD: unscale, clip and step in one pass that leaves the gradients unchanged.
//
// Properties of a whole tensor (weight decay or none, the form of `lerp`) are selected element by element, which costs
// nothing next to two divisions and a root; a loop for each of 8 cases (-funswitch-loops) compiles in 14 s instead of 2.
#include <cmath>
#include <stdlib.h>

#include "parallel.h"

namespace gradilocks {
namespace {

constexpr int64_t STEP_CHUNK = 1 << 12;
constexpr int64_t STEP_GRAIN = 1 << 13;  // Elements that take about 10 us, as long as waking a thread.
constexpr int NUMBERS = 8;               // Per group of settings, and per tensor of coefficients.

// Rows of the pointer table.
enum Row { GRAD, PARAM, STEP, STATE1, STATE2 };

struct Table {
  const int64_t* addresses;
  int64_t count;
  float* operator()(Row row, int64_t tensor) const {
    return reinterpret_cast<float*>(addresses[row * count + tensor]);
  }
};

// old + weight * (target - old), computed from the nearer end: rounded once, and exact where `old` equals `target`.
inline float lerp(float old, float target, float weight, float rest) {
  return weight < 0.5f ? old + weight * (target - old) : target - rest * (target - old);
}

// coefficients: as `count_steps` computes them.
template <bool DECOUPLED>
VECTORIZED void adam(float* __restrict p, float* __restrict m, float* __restrict v, const float* __restrict grads,
                     int64_t count, const float* c, float divisor) {
  const float lr = c[0], root = c[1], decay = c[2], eps = c[3], beta1 = c[4], beta2 = c[6];
  const float weight1 = c[5], weight2 = c[7];
  for (int64_t i = 0; i < count; ++i) {
    float g = grads[i] / divisor;
    if constexpr (!DECOUPLED) {
      g = decay != 0.0f ? g + decay * p[i] : g;
    }
    m[i] = lerp(m[i], g, weight1, beta1);
    v[i] = lerp(v[i], g * g, weight2, beta2);
    float change = lr * (m[i] / (std::sqrt(v[i]) / root + eps));
    if constexpr (DECOUPLED) {
      change = decay != 0.0f ? change + decay * p[i] : change;
    }
    p[i] = p[i] - change;
  }
}

// settings: lr, weight decay, momentum.
template <bool MOMENTUM, bool NESTEROV>
VECTORIZED void sgd(float* __restrict p, float* __restrict b, const float* __restrict grads, int64_t count,
                    const double* settings, float divisor) {
  const float lr = static_cast<float>(settings[0]), decay = static_cast<float>(settings[1]);
  const float momentum = static_cast<float>(settings[2]);
  for (int64_t i = 0; i < count; ++i) {
    float g = grads[i] / divisor;
    g = decay != 0.0f ? g + decay * p[i] : g;
    if constexpr (MOMENTUM) {
      const float next = momentum * b[i] + g;
      b[i] = next;
      g = NESTEROV ? g + momentum * next : next;
    }
    p[i] = p[i] - lr * g;
  }
}

// Adam: counts the step of each tensor and computes lr / (1 - beta1^step), sqrt(1 - beta2^step), weight decay, eps, and the
// shares of old moment and gradient in each moment.
void count_steps(const Table& table, const int32_t* groups, const double* settings, float* coefficients) {
  const float* previous = nullptr;
  int32_t previous_group = -1;
  float previous_step = 0.0f;
  for (int64_t i = 0; i < table.count; ++i) {
    if (table(GRAD, i) == nullptr || table(STEP, i) == nullptr) {
      continue;
    }
    const float step = *table(STEP, i) += 1.0f;
    float* numbers = coefficients + i * NUMBERS;
    if (groups[i] == previous_group && step == previous_step) {  // Powers take 50 ns each.
      memcpy(numbers, previous, NUMBERS * sizeof(float));
      continue;
    }
    const double* setting = settings + int64_t{groups[i]} * NUMBERS;
    const double lr = setting[0], decay = setting[1], beta1 = setting[2], beta2 = setting[3];
    const double left1 = 1.0 - std::pow(beta1, static_cast<double>(step));
    const double left2 = 1.0 - std::pow(beta2, static_cast<double>(step));
    const double exact[NUMBERS] = {lr / left1, std::sqrt(left2), setting[5] != 0.0 ? lr * decay : decay, setting[4],
                                   beta1,      1.0 - beta1,      beta2,                                  1.0 - beta2};
    for (int k = 0; k < NUMBERS; ++k) {
      numbers[k] = static_cast<float>(exact[k]);
    }
    previous = numbers;
    previous_group = groups[i];
    previous_step = step;
  }
}

}  // namespace
}  // namespace gradilocks

using namespace gradilocks;

// addresses: [6][n], the rows of Row and one that is not used; 0 is absent, and a tensor without gradient is left out.
// A tensor with a step count takes Adam, one without SGD. settings: per group NUMBERS: lr, weight decay, then beta1,
// beta2, eps, decoupled, or momentum, nesterov. Returns -1 if memory is exhausted, else 0.
EXPORT int gl_update(const int64_t* addresses, int64_t n, const int64_t* sizes, const int32_t* groups,
                     const double* settings, double divisor, int threads) {
  const Table table{addresses, n};
  auto* coefficients = static_cast<float*>(malloc(static_cast<size_t>(n + 1) * NUMBERS * sizeof(float)));
  if (coefficients == nullptr) {
    return -1;
  }
  count_steps(table, groups, settings, coefficients);
  for_each_piece<STEP_CHUNK>({addresses + GRAD * n, sizes, n, threads}, STEP_GRAIN, [&](const Piece& piece) {
    const int64_t i = piece.tensor, begin = piece.begin, count = piece.end - begin;
    const double* setting = settings + int64_t{groups[i]} * NUMBERS;
    const auto column = [&](Row row) { return table(row, i) == nullptr ? nullptr : table(row, i) + begin; };
    float *p = column(PARAM), *g = column(GRAD), *m = column(STATE1), d = static_cast<float>(divisor);
    if (table(STEP, i) != nullptr) {
      const auto loop = setting[5] != 0.0 ? adam<true> : adam<false>;
      loop(p, m, column(STATE2), g, count, coefficients + i * NUMBERS, d);
    } else {
      const auto momentum_loop = setting[3] != 0.0 ? sgd<true, true> : sgd<true, false>;
      (setting[2] != 0.0 ? momentum_loop : sgd<false, false>)(p, m, g, count, setting, d);
    }
  });
  free(coefficients);
  return 0;
}
