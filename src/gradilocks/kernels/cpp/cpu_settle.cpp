// The formulas of `triton_settle`, with the host's own numbers.
#include "cpu_settle.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace gradilocks {

namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();
constexpr double LARGEST = std::numeric_limits<double>::max();
constexpr double LARGEST_SINGLE = std::numeric_limits<float>::max();
constexpr double SMALLEST_SINGLE = std::numeric_limits<float>::min();

}  // namespace

double total_norm(const FoundAll& found, int order, bool is_double) {
  double largest = 0.0;
  bool nan = false;
  for (const Found& each : found) {
    nan = nan || each.nan > 0;
    largest = each.norm > largest ? each.norm : largest;
  }
  if (nan) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  double norm = largest;
  if (order != 0 && largest > 0.0 && largest < INFINITE) {
    double sum = 0.0;
    for (const Found& each : found) {
      const double size = each.norm / largest;
      sum += order == 2 ? size * size : size;
    }
    norm = (order == 2 ? std::sqrt(sum) : sum) * largest;
  }
  if (!is_double && norm >= SMALLEST_SINGLE && norm <= LARGEST_SINGLE) {
    norm = static_cast<float>(norm);
  }
  return norm;
}

double coefficient_for(double norm, double bound, bool broken) {
  const double coefficient = bound / (std::min(norm, LARGEST) + 1e-6);
  return !broken && coefficient < 1.0 ? coefficient : 1.0;
}

bool settle(const FoundAll& found, const Rules& rules, const Standing& standing, bool loss_broken,
            double* row) {
  double nan = 0.0, inf = 0.0;
  for (const Found& each : found) {
    nan += static_cast<double>(each.nan);
    inf += static_cast<double>(each.inf);
  }
  const double norm = total_norm(found, rules.order, rules.is_double);
  const bool broken = nan + inf > 0.0 || rules.overflowed;
  const double scale = *standing.scale, carried = rules.unscaled ? 1.0 : scale;
  const double true_norm = norm / carried, bound = standing.numbers[0], roof = standing.numbers[1];
  const double coefficient = rules.clips ? coefficient_for(true_norm, bound, broken) : 1.0;
  double multiplier = coefficient / carried;
  const bool too_large = multiplier > 1.0 && norm * multiplier > roof;
  const bool skipped = broken || too_large || !(multiplier < INFINITE);
  const bool clipped = coefficient < 1.0 && !skipped;
  multiplier = skipped ? 1.0 : multiplier;
  // As the fused optimizers take it: float32, and infinite only for a multiplier of 0.
  const double divisor = multiplier > 0.0 ? std::min(1.0 / multiplier, LARGEST_SINGLE) : INFINITE;
  *standing.skip = skipped ? 1.0f : 0.0f;
  *standing.divisor = static_cast<float>(divisor);
  *standing.multiplier = multiplier;
  const int64_t step = *standing.steps + 1;
  const double numbers[12] = {
      skipped ? 1.0 : 0.0,
      scale,
      true_norm,
      bound,
      clipped ? 1.0 : 0.0,
      static_cast<double>(step),
      loss_broken ? 1.0 : 0.0,
      nan,
      inf,
      static_cast<double>(*standing.tracker),
      static_cast<double>(*standing.hysteresis),
      static_cast<double>(*standing.streak),
  };
  std::copy(numbers, numbers + 12, row);
  *standing.streak = skipped ? *standing.streak + 1 : 0;
  *standing.steps = step;
  if (rules.moves) {
    advance(standing.numbers + 2, standing.scale, standing.tracker, standing.hysteresis, skipped);
  }
  return skipped;
}

void advance(const double* numbers, float* scale, int32_t* tracker, int32_t* hysteresis,
             bool skipped) {
  const double growth = numbers[0], backoff = numbers[1], interval = numbers[2];
  const double lowest = numbers[3], highest = numbers[4];
  const double now = *scale;
  const int32_t remaining = skipped ? *hysteresis - 1 : *hysteresis;
  const int32_t counted = skipped ? 0 : *tracker + 1;
  const bool full = static_cast<double>(counted) >= interval;
  const double grown = now * growth <= highest ? now * growth : now;
  double moved = skipped && remaining <= 0 ? now * backoff : now;
  moved = full ? grown : moved;
  moved = moved < lowest ? lowest : moved > highest ? highest : moved;
  *scale = static_cast<float>(moved);
  *tracker = full ? 0 : counted;
  *hysteresis = full ? static_cast<int32_t>(numbers[5]) : remaining;
}

}  // namespace gradilocks
