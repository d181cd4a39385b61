// The whole local training of linear models: each client's row takes all its steps while it and its batch lie in the caches. A step of such a
// model is a microsecond of arithmetic, less than one call from Python costs. Knows nothing of torch.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>

#include "isa.h"
#include "scratch.h"
#include "sgd.h"
#include "simd.h"
#include "small_gemm.h"

namespace pflcore::cpu {

enum class Criterion : int64_t { cross_entropy, squared, half_squared, hinge };

// A row is [weight (classes x features) | bias (classes, where `bias`)]; `sgd` says how it moves (its grad and buffer are made here).
template <class T>
struct LinearSgd {
  Sgd<T> sgd;
  int64_t classes, features;
  bool bias;
  Criterion criterion;
  const T* x; int64_t x_row, pool;                   // [pool, features]
  const int64_t* label;                              // [pool] classes, or
  const T* value;                                    // [pool] numbers
  const int64_t* relabel; int64_t names;             // [s, names]: a label as each client knows it; nullptr: as it is
  const int64_t* order; int64_t passes, longest;     // [s, passes, longest] places in the pool
  const int64_t *size, *steps;                       // [s] samples of each client, steps it takes
  int64_t batch;
  bool drop_last;
  T* grad_sum;                                       // [s, q], added to; nullptr: not asked for
  double* loss;                                      // [s] sum of the batches' mean losses
  std::atomic<bool>* out_of_range;                   // a place or a label is
};

namespace linear_detail {

constexpr int64_t kChunk = 64;  // samples whose scores are held at once
constexpr int64_t kAhead = 16;  // samples between a fetch and its use

// scores [classes, kChunk] -> their slopes, times `share`; gives the sum of the samples' losses.
template <class T>
PFL_INLINE T slopes(Criterion criterion, int64_t classes, int64_t samples, T share, const T* target, T* scores) {
  T sum = 0;
  if (criterion == Criterion::cross_entropy) {
    T top[kChunk], total[kChunk] = {};
    for (int64_t i = 0; i < samples; i++) top[i] = scores[i];
    for (int64_t c = 1; c < classes; c++)
      for (int64_t i = 0; i < samples; i++) top[i] = scores[c * kChunk + i] > top[i] ? scores[c * kChunk + i] : top[i];
    for (int64_t i = 0; i < samples; i++) sum += top[i] - scores[static_cast<int64_t>(target[i]) * kChunk + i];
    for (int64_t c = 0; c < classes; c++)
      for (int64_t i = 0; i < samples; i++) total[i] += scores[c * kChunk + i] = std::exp(scores[c * kChunk + i] - top[i]);
    for (int64_t i = 0; i < samples; i++) {
      sum += std::log(total[i]);
      total[i] = share / total[i];
    }
    for (int64_t c = 0; c < classes; c++)
      for (int64_t i = 0; i < samples; i++) scores[c * kChunk + i] *= total[i];
    for (int64_t i = 0; i < samples; i++) scores[static_cast<int64_t>(target[i]) * kChunk + i] -= share;
  } else if (criterion == Criterion::hinge) {
    for (int64_t i = 0; i < samples; i++) {
      const T sign = target[i] > 0 ? T(1) : T(-1), margin = T(1) - sign * scores[i];
      sum += margin < 0 ? T(0) : margin;
      scores[i] = margin >= 0 ? -sign * share : T(0);
    }
  } else {
    const T factor = criterion == Criterion::squared ? T(1) : T(0.5);
    for (int64_t i = 0; i < samples; i++) {
      const T gap = scores[i] - target[i];
      sum += factor * gap * gap;
      scores[i] = 2 * factor * share * gap;
    }
  }
  return sum;
}

template <int bytes, class T>
struct Client {
  static constexpr int64_t lanes = bytes / sizeof(T);
  const LinearSgd<T>& a;
  const int64_t padded = (a.features + lanes - 1) / lanes * lanes;
  const bool copied = a.features != padded;            // vectors read whole: rows get zeros behind them
  Scratch<T> samples{copied ? kChunk * padded : 0}, weight{copied ? a.classes * padded : 0};
  Scratch<T> scores{a.classes * kChunk}, grad{a.sgd.q}, velocity{a.sgd.momentum != 0 ? a.sgd.q : 0};
  Scratch<const T*> at{kChunk}, weights{a.classes};
  Scratch<T*> grads{a.classes};
  T target[kChunk];

  // One row of features; the last vector overlaps the one before.
  PFL_INLINE_MEMBER void copy(T* to, const T* from) const {
    Vec<T, bytes> v;
    int64_t k = 0;
    for (; k + lanes <= a.features; k += lanes) {
      load(v, from + k);
      store(to + k, v);
    }
    if (k > 0 && k < a.features) {
      load(v, from + a.features - lanes);
      store(to + a.features - lanes, v);
    } else {
      for (; k < a.features; k++) to[k] = from[k];
    }
  }

  // Finds `count` samples of client s, of `left` that it will still see; false where one is not there.
  PFL_INLINE_MEMBER bool gather(int64_t s, const int64_t* place, int64_t count, int64_t left) {
    for (int64_t i = 0; i < count; i++) {
      const int64_t p = place[i];
      if (i + kAhead < left) {   // shuffled: no prefetcher can guess it
        const char* next = reinterpret_cast<const char*>(a.x + place[i + kAhead] * a.x_row);
        for (int64_t byte = 0; byte < std::min<int64_t>(a.features * sizeof(T), 256); byte += 64) __builtin_prefetch(next + byte);
      }
      if (p < 0 || p >= a.pool) return false;
      if (a.label) {
        int64_t y = a.label[p];
        if (a.relabel) {
          if (y < 0 || y >= a.names) return false;
          y = a.relabel[s * a.names + y];
        }
        if (a.criterion == Criterion::cross_entropy && (y < 0 || y >= a.classes)) return false;
        target[i] = static_cast<T>(y);
      } else {
        target[i] = a.value[p];
      }
      const T* from = a.x + p * a.x_row;
      if (copied) {
        copy(samples.data + i * padded, from);
        from = samples.data + i * padded;
      }
      at[i] = from;
    }
    return true;
  }

  // The gradient of one batch at row w of client s, into `grad`; gives its mean loss.
  PFL_INLINE_MEMBER bool batch(int64_t s, const T* w, const int64_t* place, int64_t count, int64_t left, T& loss) {
    const int64_t matrix = a.classes * a.features;
    for (int64_t c = 0; c < a.classes; c++) {
      const T* from = w + c * a.features;
      if (copied) {
        copy(weight.data + c * padded, from);
        from = weight.data + c * padded;
      }
      weights[c] = from;
    }
    const T share = T(1) / static_cast<T>(count);
    loss = 0;
    for (int64_t first = 0; first < count; first += kChunk) {
      const int64_t some = std::min(kChunk, count - first);
      if (!gather(s, place + first, some, left - first)) return false;
      dots<bytes, T>(a.classes, some, padded, weights.data, at.data, scores.data, kChunk);
      if (a.bias)
        for (int64_t c = 0; c < a.classes; c++)
          for (int64_t i = 0; i < some; i++) scores[c * kChunk + i] += w[matrix + c];
      loss += slopes<T>(a.criterion, a.classes, some, share, target, scores.data);
      outer<bytes, T>(a.classes, a.features, some, scores.data, kChunk, 1, at.data, grads.data, first > 0);
      if (a.bias)
        for (int64_t c = 0; c < a.classes; c++) {
          T sum = first > 0 ? grad[matrix + c] : T(0);
          for (int64_t i = 0; i < some; i++) sum += scores[c * kChunk + i];
          grad[matrix + c] = sum;
        }
    }
    loss *= share;
    return true;
  }

  PFL_INLINE_MEMBER bool train(int64_t s) {
    const Sgd<T>& g = a.sgd;
    const int64_t n = a.size[s], size = std::min(a.batch, n);
    if (n < 0 || n > a.longest) return false;
    if (n == 0) return true;
    const int64_t cuts = a.drop_last ? n / size : (n + size - 1) / size;
    if (a.steps[s] > cuts * a.passes) return false;
    for (int64_t c = 0; c < a.classes; c++) grads[c] = grad.data + c * a.features;
    if (copied) {   // the zeros behind the rows: the scratch may hold anything
      std::fill(samples.data, samples.data + kChunk * padded, T(0));
      std::fill(weight.data, weight.data + a.classes * padded, T(0));
    }
    if (g.momentum != 0) std::fill(velocity.data, velocity.data + g.q, T(0));
    const sgd_detail::Row<T> row = sgd_detail::row_of(g, s, grad.data, g.momentum != 0 ? velocity.data : nullptr);
    double sum = 0;
    for (int64_t k = 0; k < a.steps[s]; k++) {
      const int64_t first = k % cuts * size, count = std::min(size, n - first);
      T loss;
      const int64_t* const place = a.order + (s * a.passes + k / cuts) * a.longest + first;
      if (!batch(s, row.w, place, count, n - first, loss)) return false;
      sum += loss;
      if (a.grad_sum) {
        T* to = a.grad_sum + s * g.q;
        for (int64_t i = 0; i < g.q; i++) to[i] += grad[i] + row.decay * row.w[i];
      }
      sgd_detail::row<bytes, T>(row, 0, g.q);
    }
    a.loss[s] = sum;
    return true;
  }
};

template <int bytes, class T>
PFL_INLINE void clients(const LinearSgd<T>& a, int64_t begin, int64_t end) {
  Client<bytes, T> client{a};
  for (int64_t s = begin; s < end; s++)
    if (!client.train(s)) a.out_of_range->store(true);
}

template <class T>
void clients_plain(const LinearSgd<T>& a, int64_t begin, int64_t end) { clients<16, T>(a, begin, end); }
#if PFL_X86
template <class T>
PFL_AVX2 void clients_avx2(const LinearSgd<T>& a, int64_t begin, int64_t end) { clients<32, T>(a, begin, end); }
template <class T>
PFL_AVX512 void clients_avx512(const LinearSgd<T>& a, int64_t begin, int64_t end) { clients<64, T>(a, begin, end); }
#endif

}  // namespace linear_detail

// False where a place or a label is out of range; the rows are then of no use.
template <class T, class Parallel>
bool linear_sgd(LinearSgd<T> a, const Parallel& parallel) {
  std::atomic<bool> out_of_range{false};
  a.out_of_range = &out_of_range;
  parallel(a.sgd.s, [&a](int64_t begin, int64_t end) {
#if PFL_X86
    if (isa() == Isa::avx512) return linear_detail::clients_avx512(a, begin, end);
    if (isa() == Isa::avx2) return linear_detail::clients_avx2(a, begin, end);
#endif
    linear_detail::clients_plain(a, begin, end);
  });
  return !out_of_range;
}

}  // namespace pflcore::cpu
