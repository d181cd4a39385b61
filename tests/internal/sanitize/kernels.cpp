// Drives every torch-free CPU kernel with std::thread, on buffers of exactly their size between
// forbidden pages, for a sanitizer to watch: 1 and 3 threads must agree to the last bit on every
// instruction set this machine has. (Not OpenMP: the thread sanitizer does not see its barriers.)
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#ifndef PFL_SMALL_PIECES
#define PFL_SMALL_PIECES
#endif
#include "cpu/aggregate.h"
#include "chain/chain.h"
#include "cpu/rank1.h"
#include "cpu/roofline.h"
#include "cpu/sgd.h"
#include "cpu/sqdist.h"
#include "cpu/weights.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size)
#define ASAN_UNPOISON_MEMORY_REGION(address, size)
#endif

using namespace pflcore;
using namespace pflcore::cpu;

namespace {

struct Threads {
  int64_t count;
  template <class Body>
  void operator()(int64_t n, const Body& body) const {
    std::atomic<int64_t> next{0};
    const auto work = [&] {
      for (int64_t i = next++; i < n; i = next++) body(i, i + 1);
    };
    std::vector<std::thread> others;
    for (int64_t t = 1; t < std::min(n, count); t++) others.emplace_back(work);
    work();
    for (std::thread& t : others) t.join();
  }
};

std::mt19937 dice(1);
int failures = 0;

FILE* numbers =
    nullptr;         // where plain results are written, for another machine's to be compared with
bool front = false;  // where in its pages a buffer lies
int made = 0;

// Pages for `bytes` between two that may not be touched: they end where the second begins or, in
// `front`, begin where the first ends. What is left of the pages must stay as it is; the address
// sanitizer takes it for no memory at all, and vector stores in assembly are seen by the pages.
struct Pages {
  static size_t size() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }
  explicit Pages(size_t bytes)
      : bytes(bytes),
        room((bytes + size() - 1) / size() * size()),
        fill(static_cast<unsigned char>(++made % 251)) {
    whole = static_cast<char*>(
        mmap(nullptr, room + 2 * size(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (whole == MAP_FAILED || (room && mprotect(whole + size(), room, PROT_READ | PROT_WRITE)))
      std::abort();
    std::memset(whole + size(), fill,
                room);  // what a kernel leaves unwritten differs from buffer to buffer
    start = whole + size() + (front ? 0 : room - bytes);
    rest = front ? start + bytes : whole + size();
    ASAN_POISON_MEMORY_REGION(rest, room - bytes);
  }
  void operator()(void*) const {
    ASAN_UNPOISON_MEMORY_REGION(rest, room - bytes);
    if (std::any_of(rest, rest + (room - bytes),
                    [this](char c) { return static_cast<unsigned char>(c) != fill; })) {
      failures++;
      std::printf("a kernel wrote beside a buffer of %zu bytes (%s)\n", bytes, name(isa()));
    }
    munmap(whole, room + 2 * size());
  }
  size_t bytes, room;
  unsigned char fill;
  char *whole, *start, *rest;
};

// n numbers with nothing before or behind them.
template <class T>
struct Numbers {
  explicit Numbers(int64_t n, bool filled = true) : Numbers(n, filled, Pages(sizeof(T) * n)) {}
  Numbers(int64_t n, bool filled, const Pages& pages)
      : size(n), data(reinterpret_cast<T*>(pages.start), pages) {
    for (int64_t i = 0; filled && i < n; i++)
      data[i] = static_cast<T>(static_cast<int>(dice() % 2001) - 1000) / T(1000);
  }
  bool operator==(const Numbers& other) const {
    return std::memcmp(data.get(), other.data.get(), sizeof(T) * size) == 0;
  }
  operator T*() const { return data.get(); }
  int64_t size;
  std::unique_ptr<T[], Pages> data;
};

Numbers<uint16_t> halves(int64_t n) {
  Numbers<uint16_t> out(n, false);
  for (int64_t i = 0; i < n; i++)
    out[i] = static_cast<uint16_t>(0x3000 + dice() % 0x0c00);  // finite in both 16-bit formats
  return out;
}

Numbers<int64_t> whole(int64_t n, int64_t low, int64_t below) {
  Numbers<int64_t> out(n, false);
  for (int64_t i = 0; i < n; i++) out[i] = low + static_cast<int64_t>(dice() % (below - low));
  return out;
}

// The same results for 1 and 3 threads; `run` fills the result it is given.
template <class T>
void same(const char* what, int64_t size, const std::function<void(T*, const Threads&)>& run) {
  Numbers<T> one(size, false), three(size, false);
  run(one, Threads{1});
  run(three, Threads{3});
  if (numbers && sizeof(T) > 2) {
    std::fprintf(numbers, "%s\t", what);
    for (int64_t i = 0; i < size; i++) std::fprintf(numbers, "%.9g ", static_cast<double>(one[i]));
    std::fprintf(numbers, "\n");
  }
  if (!(one == three)) {
    failures++;
    std::printf("%s (%s): 1 and 3 threads differ\n", what, name(isa()));
  }
}

// All pairs of two matrices, or of one where b is nullptr.
Sqdist pairs(Dtype dtype, const void* a, int64_t m, const void* b, int64_t n, int64_t p,
             double* out = nullptr) {
  return {dtype, a, p, m, b == nullptr, b, p, b ? n : m, p, out, nullptr};
}
void same_pairs(const char* what, const Sqdist& q) {
  same<double>(what, q.m * q.across(), [&](double* out, const Threads& t) {
    Sqdist mine = q;
    mine.out = out;
    sqdist(mine, t);
  });
}

// Within a relative 1e-6 of subtracting, squaring and adding one number after the other in float64.
template <class T>
void right(Dtype dtype, const Numbers<T>& a, int64_t m, const Numbers<T>& b, int64_t n, int64_t p) {
  Numbers<double> got(m * n, false);
  sqdist(pairs(dtype, a, m, b, n, p, got), Threads{1});
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      double want = 0;
      for (int64_t k = 0; k < p; k++) {
        const double d = static_cast<double>(a[i * p + k]) - b[j * p + k];
        want += d * d;
      }
      if (std::abs(got[i * n + j] - want) <= 1e-6 * want) continue;
      failures++;
      std::printf("sqdist (%s): %.9g instead of %.9g\n", name(isa()), got[i * n + j], want);
    }
}

// Listed pairs have the bits of all pairs; negative entries are infinitely far.
void listed(Sqdist q) {
  const int64_t many = 7;
  Numbers<double> all(q.m * q.n, false);
  const Numbers<int64_t> index = whole(q.m * many, -1, q.n);
  q.out = all;
  sqdist(q, Threads{1});
  q.index = index, q.listed = many;
  same<double>("sqdist of a list", q.m * many, [&](double* out, const Threads& t) {
    Sqdist mine = q;
    mine.out = out;
    sqdist(mine, t);
    for (int64_t k = 0; k < q.m * many; k++) {
      const int64_t j = index[k];
      if (out[k] == (j < 0 ? INFINITY : all[k / many * q.n + j])) continue;
      failures++;
      std::printf("sqdist of a list (%s): %.17g at %d of %d columns\n", name(isa()), out[k],
                  static_cast<int>(k), static_cast<int>(q.p));
    }
  });
}

void drive_sqdist() {
  for (auto [m, n, p] : {std::array<int64_t, 3>{1, 1, 1},
                         {2, 3, 17},
                         {9, 5, 65},
                         {3, 70, 71},
                         {6, 6, 80},
                         {4, 3, 192},
                         {5, 7, 257},
                         {21, 4, 1031},
                         {7, 9, 20011}}) {
    const Numbers<float> a(m * p), b(n * p);
    const Numbers<double> c(m * p), d(n * p);
    const Numbers<uint16_t> h = halves(m * p);
    const Sqdist two = pairs(Dtype::f32, a, m, b, n, p),
                 one = pairs(Dtype::f32, a, m, nullptr, 0, p);
    right(Dtype::f64, c, m, d, n, p);
    right(Dtype::f32, a, m, b, n, p);
    same_pairs("sqdist 64", pairs(Dtype::f64, c, m, nullptr, 0, p));
    same_pairs("sqdist", two);
    same_pairs("sqdist", one);
    listed(two);
    listed(one);
    listed(pairs(Dtype::bf16, h, m, nullptr, 0, p));
    for (Dtype half : {Dtype::f16, Dtype::bf16})
      same_pairs("sqdist 16", pairs(half, h, m, nullptr, 0, p));
  }
}

// Sums that float32 cannot hold are taken again in float64, all of the row.
void drive_tiny() {
  const int64_t p = 50021;  // past 49,152 columns
  for (int64_t first : {int64_t{0}, p - 300}) {
    Numbers<float> a(3 * p), b(2 * p);
    for (Numbers<float>* rows : {&a, &b})
      for (int64_t k = 0; k < rows->size; k++) (*rows)[k] = k % p < first ? 0 : (*rows)[k] * 1e-22f;
    right(Dtype::f32, a, 3, b, 2, p);
    same_pairs("sqdist again", pairs(Dtype::f32, a, 3, nullptr, 0, p));
  }
}

void drive_weights() {
  for (auto [m, n, k] : {std::array<int64_t, 3>{1, 1, 1},
                         {3, 5, 5},
                         {37, 50, 7},
                         {3, 40, 32},
                         {3, 40, 33},
                         {40, 90, 60},
                         {33, 33, 33},
                         {2, 33, 32}}) {
    Numbers<double> d(m * n);
    for (int64_t i = 0; i < m * n; i++) d[i] = std::abs(d[i]);
    if (n > 2) d[1] = d[2], d[0] = 0;
    std::vector<int64_t> target(m);
    for (int64_t i = 0; i < m; i++) target[i] = i % n;
    for (bool uniform : {false, true})
      same<double>("waffle", m * n, [&](double* out, const Threads& t) {
        waffle_weights({d, m, n, target.data(), 1, 0.5, 0.7, uniform, out}, t);
      });
    const Numbers<float> narrow(m * (n + 3));  // rows with gaps
    const auto nearest = [&](const char* what, auto q) {
      same<double>(what, m * k, [&](double* out, const Threads& t) {
        Numbers<int64_t> index(m * k, false);
        q.weight = out, q.index = index;
        feddwa_weights(q, t);
      });
    };
    nearest("feddwa 32", Feddwa<float>{narrow, n + 3, m, n, k, nullptr, nullptr});
    nearest("feddwa", Feddwa<double>{d, n, m, n, k, nullptr, nullptr});
  }
}

void drive_aggregate() {
  for (auto [n, m, p] : {std::array<int64_t, 3>{1, 1, 1},
                         {3, 2, 63},
                         {7, 13, 1001},
                         {40, 21, 131},
                         {20, 6, 64 * 40 + 3},
                         {2, 5, 5009},
                         {3, 260, 65},
                         {5, 260, 71},
                         {2, 260, 79},
                         {3, 260, 80},
                         {200, 3, 70}}) {
    const Numbers<float> x(n * p), start(m * p);
    const Numbers<double> far(n * p);
    const Numbers<uint16_t> h = halves(n * p);
    const int64_t k = std::min<int64_t>(n, 3);
    const Numbers<double> w(m * n), v(m * k);
    const Numbers<int64_t> index = whole(m * k, 0, n);
    for (int64_t i = 0; i < m * k; i++)
      if (dice() % 4 == 0) v[i] = 0;
    for (int base : {0, 1, 2})
      for (bool sparse : {false, true})
        for (bool wide : {false, true}) {
          Aggregate q{};
          q.in = Dtype::f32, q.out_dtype = Dtype::f32, q.wide = wide;
          q.n = n, q.p = p, q.m = m, q.k = sparse ? k : n;
          q.updates = x, q.updates_row = p;
          q.weight = sparse ? v.data.get() : w.data.get(), q.sparse = sparse,
          q.index = sparse ? index.data.get() : nullptr;
          q.base = base ? start.data.get() : nullptr, q.base_row = base == 1 ? 0 : p;
          q.lr = 0.5, q.out_row = p;
          const auto run = [&q](auto* out, const Threads& t) {
            Aggregate mine = q;
            mine.out = out;
            aggregate(mine, t);
          };
          same<float>("aggregate", m * p, run);
          q.in = Dtype::f64, q.updates = far;
          if (wide) same<float>("aggregate of 64", m * p, run);
          q.in = q.out_dtype = Dtype::f64, q.base = nullptr;
          if (wide) same<double>("aggregate 64", m * p, run);
          q.base = nullptr, q.updates = h;
          for (Dtype half : {Dtype::f16, Dtype::bf16}) {
            q.in = q.out_dtype = half;
            same<uint16_t>("aggregate 16", m * p, run);
          }
        }
  }
  Numbers<char> fresh(9 << 20, false);
  touch_fresh(fresh, 9 << 20, Threads{3});
}

template <class T>
void drive_rank1() {
  for (auto [n, b, i, f, o] : {std::array<int64_t, 5>{1, 1, 1, 1, 1},
                               {0, 4, 9, 5, 3},
                               {1, 5, 17, 9, 4},
                               {3, 4, 33, 21, 10},
                               {1, 13, 70, 40, 37},
                               {2, 13, 70, 40, 37}})
    for (bool shared : {false, true})
      for (bool all : {false, true}) {
        const Numbers<T> x(n * b * i), w_a((shared ? 1 : n) * o * f), w_b((shared ? 1 : n) * f * i),
            grad(n * b * o);
        Numbers<T> lam((shared ? 1 : n) * f);
        for (int64_t k = 0; !all && k < lam.size; k++)
          if (dice() % 2) lam[k] = 0;
        const Rank1<T> q{n,     b, i,      f,   o, x,      b * i, i,     false, w_a,
                         o * f, f, shared, lam, f, shared, w_b,   f * i, i,     shared};
        same<T>("rank1", n * b * o, [&](T* y, const Threads& t) { rank1_forward(q, y, t); });
        for (bool want_lam : {false, true})
          for (bool want_x : {false, true})
            same<T>(want_x ? "rank1 x" : "rank1 w_b", want_x ? x.size : w_b.size,
                    [&](T* out, const Threads& t) {
                      Numbers<T> ga(w_a.size, false), gl(lam.size, false), gb(w_b.size, false);
                      rank1_backward(q, grad.data.get(),
                                     Rank1Grads<T>{want_x ? out : nullptr, ga.data.get(),
                                                   want_lam ? gl.data.get() : nullptr,
                                                   want_x ? gb.data.get() : out},
                                     t);
                    });
      }
}

// Every array's rows may lie further apart than they are long, each by its own.
template <class T>
void drive_sgd() {
  for (auto [s, q] : {std::array<int64_t, 2>{1, 1}, {3, 67}, {2, 20011}})
    for (int64_t gap : {0, 1, 5}) {
      const int64_t row = q + gap, many = (s - 1) * row + q;
      const Numbers<T> start(s * q), grad(many), shift(many), mask(q), anchor(s * q), buffer(many);
      const Numbers<double> mu(s);
      for (int kind = 0; kind < 8; kind++)
        same<T>("sgd", s * q, [&](T* w, const Threads& t) {
          std::copy(start.data.get(), start.data.get() + s * q, w);
          Numbers<T> own(many, false);
          std::copy(buffer.data.get(), buffer.data.get() + many, own.data.get());
          Sgd<T> a{};
          a.s = s, a.q = q, a.w = w, a.w_row = q, a.grad = grad, a.grad_row = row, a.lr = 0.1,
          a.mu = 0.5;
          if (kind & 1) a.shift = shift, a.shift_row = row, a.weight_decay = 0.01;
          if (kind & 2) a.mask = mask, a.anchor = anchor, a.anchor_row = q, a.mu_rows = mu;
          if (kind & 4) a.momentum = 0.9, a.buffer = own, a.buffer_row = row;
          sgd_step(a, t);
          for (int64_t k = 0; k < many; k++)
            if (k % row >= q && own[k] != buffer[k])
              failures++, std::printf("sgd wrote between the rows of its buffer\n");
        });
    }
}

// A chain of layers with everything in it that kernels exist for; row: places in the order of the
// layers.
struct ChainCase {
  ChainProgram program;
  int64_t classes;
  chain::Loss loss;
};
ChainCase chain_case(int which) {
  using L = ChainLayer;
  ChainCase out{};
  int64_t q = 0;
  const auto at = [&](int64_t n) { return static_cast<double>((q += n) - n); };
  const auto add = [&](int64_t kind, std::initializer_list<double> fields) {
    L l{kind, {}};
    std::copy(fields.begin(), fields.end(), l.field);
    out.program.layers.push_back(l);
  };
  const auto conv = [&](int64_t c, double o, double kh, double kw, double stride, double ph,
                        double pw) {
    const double w = at(static_cast<int64_t>(o * kh * kw) * c), b = at(static_cast<int64_t>(o));
    add(L::conv, {o, kh, kw, stride, ph, pw, w, b});
  };
  const auto linear = [&](int64_t in, int64_t o, bool bias) {
    const double w = at(in * o), b = bias ? at(o) : -1;
    add(L::linear, {static_cast<double>(o), w, b});
  };
  const auto given = [&](int64_t c, int64_t h, int64_t w, int64_t classes) {
    out.program.c = c, out.program.h = h, out.program.w = w, out.classes = classes;
  };
  if (which > 3) {  // one number a sample
    out.loss = static_cast<chain::Loss>(which - 3);
    given(9, 1, 1, 1);
    linear(9, 6, true), add(L::act, {1}), add(L::dropout, {0.3}), linear(6, 1, true);
  } else if (which == 0) {
    given(33, 1, 1, 3);
    linear(33, 3, true);
  } else if (which == 1) {
    given(7, 1, 1, 5);
    linear(7, 37, true), add(L::act, {3}), linear(37, 4, false), add(L::scale, {at(4)}),
        linear(4, 5, true);
  } else if (which == 2) {
    given(2, 9, 11, 4);
    conv(2, 7, 3, 3, 1, 1, 1), add(L::act, {1}), add(L::pool, {1, 2, 2, 2, 2}),
        conv(7, 13, 2, 3, 1, 0, 1), add(L::act, {2}), add(L::pool, {2, 2, 2, 2, 2});
    add(L::dropout, {0.5}), add(L::flatten, {}), linear(13 * 1 * 2, 4, true);
  } else {
    given(3, 8, 7, 4);
    add(L::norm, {1, 1, 1e-5, at(168), at(168)}), conv(3, 5, 3, 2, 2, 1, 0), add(L::act, {4}),
        add(L::norm, {5, 12, 1e-5, at(5), at(5)});
    conv(5, 6, 2, 2, 1, 0, 0), add(L::pool, {2, 2, 1, 1, 1}), add(L::pool, {1, 1, 2, 1, 1}),
        add(L::flatten, {}), linear(12, 4, true);
  }
  out.program.q = q;
  return out;
}

void drive_chain() {
  for (int which = 0; which < 8; which++) {
    const ChainCase c = chain_case(which);
    const int64_t s = 3, pool = 60, passes = 2, longest = 45, size[] = {45, 13, 1}, q = c.program.q,
                  f = c.program.c * c.program.h * c.program.w;
    const Numbers<float> start(s * q), x(pool * f), shift(s * q), mask(q), anchor(s * q),
        value(pool);
    const Numbers<double> mu(s);
    const auto label = whole(pool, 0, c.classes), order = whole(s * passes * longest, 0, pool),
               seeds = whole(s * passes, 0, 1 << 30);
    Numbers<int64_t> steps(s, false), names(s * c.classes, false);
    for (int64_t i = 0; i < s * c.classes; i++)
      names[i] = (i + i / c.classes) % c.classes;  // each client calls them otherwise
    const bool classes = c.loss == chain::Loss::cross_entropy;
    const ChainProblem<float> problem{
        c.program,
        c.loss,
        {x.data.get(), f, pool, classes ? label.data.get() : nullptr,
         classes ? nullptr : value.data.get(), classes && which ? names.data.get() : nullptr,
         classes && which ? c.classes : 0}};
    for (int64_t batch : {5, 40})
      for (bool options : {false, true}) {
        const bool drop = options && which % 2;
        same<float>("chain", 2 * s * q, [&](float* w, const Threads& t) {
          std::copy(start.data.get(), start.data.get() + s * q, w);
          std::fill_n(w + s * q, s * q, 0.f);
          Numbers<double> loss(s, false);
          for (int64_t i = 0; i < s; i++)
            steps[i] = passes *
                       (drop && size[i] > batch ? size[i] / batch : (size[i] + batch - 1) / batch);
          Sgd<float> sgd{};
          sgd.s = s, sgd.q = q, sgd.w = w, sgd.w_row = q, sgd.lr = 0.1;
          if (options)
            sgd.momentum = 0.9, sgd.weight_decay = 0.1, sgd.shift = shift, sgd.shift_row = q;
          if (options && which > 1)
            sgd.mask = mask, sgd.anchor = anchor, sgd.anchor_row = q, sgd.mu_rows = mu;
          const ChainSgd<float> a{problem,
                                  sgd,
                                  order,
                                  passes,
                                  longest,
                                  size,
                                  steps,
                                  batch,
                                  drop,
                                  seeds,
                                  options ? 1.0 : INFINITY,
                                  options ? w + s * q : nullptr,
                                  loss};
          if (!chain_sgd(a, t)) std::printf("chain: out of range\n"), failures++;
        });
      }
    same<float>("chain grad", s * q, [&](float* g, const Threads& t) {
      Numbers<double> loss(s, false);
      const ChainGrad<float> a{problem, start, s, q, order, longest, size, nullptr, g, loss};
      if (!chain_grad(a, t)) failures++;
    });
    const int64_t begin[] = {0, 20, 20, 59};
    for (int64_t row : {q, int64_t{0}})
      same<double>("chain eval", 59, [&](double* loss, const Threads& t) {
        Numbers<uint8_t> right(59, false);
        Numbers<float> scores(59 * c.classes, false);
        const ChainEval<float> a{problem, start, s,     row,    order,
                                 begin,   loss,  right, scores, c.classes};
        if (!chain_eval(a, t)) failures++;
      });
  }
}

// What a sanitizer must catch: a last row one element short, or two threads that write one result.
int drive_fault(const std::string& fault) {
  const Numbers<float> x(64 * 3 - (fault == "short"));
  Numbers<float> out(64 * 3, false);
  const double weight[9] = {1, 0, 0, 0, 1, 0, 0, 0, 1};
  Aggregate q{};
  q.n = q.m = q.k = 3, q.p = 64, q.updates = x, q.updates_row = 64, q.weight = weight, q.lr = 1,
  q.out = out, q.out_row = 64;
  std::thread other([&] {
    if (fault == "race") aggregate(q, Threads{1});
  });
  aggregate(q, Threads{1});
  other.join();
  return 0;
}

}  // namespace

int main(int count, char** words) {
  const std::string how = count > 1 ? words[1] : "";
  if (how == "numbers")
    numbers = std::fopen(words[2], "w");
  else if (count > 1 && how != "front")
    return drive_fault(how);
  front = how == "front";
  for (Isa wanted : {Isa::plain, Isa::avx2, Isa::avx512}) {
    if (wanted > (numbers ? Isa::plain : best_isa())) continue;
    isa_slot() = wanted;
    drive_sqdist();
    drive_tiny();
    drive_weights();
    drive_aggregate();
    drive_rank1<float>(), drive_rank1<double>();
    drive_sgd<float>(), drive_sgd<double>();
    drive_chain();
    const Limits most = limits(2, 1 << 16, 100);
    if (!(most.read > 0 && most.write > 0 && most.fma > 0 && most.sub_fma > 0)) failures++;
    std::printf("%s\n", name(wanted));
  }
  return failures != 0;
}
