// Solves the problems of a file with all CPU kernels that need no torch. problems.py writes the
// file. The buffers have exactly their size and lie between forbidden pages, so that a sanitizer
// sees a wrong access. 1 and 3 threads must agree to the last bit on each instruction set of this
// machine. The threads are std::thread, since the thread sanitizer does not see OpenMP's barriers.
//
// Usage: kernels PROBLEMS [front | numbers FILE | short | race | overflow]
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#ifndef PFL_SMALL_PIECES
#define PFL_SMALL_PIECES
#endif
#include "cpu/aggregate.h"
#include "chain/chain.h"
#include "cpu/rank1.h"
#include "cpu/robust.h"
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

int failures = 0;
bool front = false;  // true: a buffer begins where its pages begin
int made = 0;

// Pages for `bytes` between two forbidden pages. The buffer ends where the second forbidden page
// begins or, with `front`, begins where the first one ends. The rest of the pages must not change.
// The address sanitizer forbids the rest, and the pages also catch vector stores in assembly.
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

struct Word {
  int64_t kind;   // 0: a number; else an address of floats (4), doubles (8) or others (1). The
                  // address of a result has a negative kind.
  int64_t value;  // the number, or the number of bytes at the address
  std::vector<char> content;
};

struct Problem {
  int64_t kernel;
  std::vector<Word> words;  // fields of 8 bytes as in csrc/inputs.h, then further arguments
};

std::vector<Problem> problems_of(const char* path) {
  std::vector<Problem> out;
  std::ifstream file(path, std::ios::binary);
  const auto read = [&](void* to, int64_t bytes) {
    return static_cast<bool>(file.read(static_cast<char*>(to), bytes));
  };
  for (int64_t head[2]; read(head, sizeof head);) {
    out.push_back({head[0], std::vector<Word>(static_cast<size_t>(head[1]))});
    for (Word& w : out.back().words) {
      read(&w.kind, 8), read(&w.value, 8);
      if (w.kind) w.content.resize(static_cast<size_t>(w.value));
      read(w.content.data(), static_cast<int64_t>(w.content.size()));
    }
  }
  return out;
}

// A problem's buffers, each in its own memory. The first one may be too short.
struct Placed {
  std::vector<std::unique_ptr<char, Pages>> buffers;
  std::vector<int64_t> words;
  explicit Placed(const Problem& problem, size_t missing = 0) {
    for (const Word& w : problem.words) {
      words.push_back(w.value);
      if (w.kind == 0) continue;
      const Pages pages(w.content.size() - missing);
      if (w.kind > 0) std::copy_n(w.content.data(), pages.bytes, pages.start);
      words.back() = reinterpret_cast<int64_t>(pages.start);
      buffers.emplace_back(pages.start, pages);
      missing = 0;
    }
  }
};

template <class T>
T from(const int64_t* word) {
  T out;
  std::memcpy(&out, static_cast<const void*>(word), sizeof out);
  return out;
}

// Calls the kernel in float32 or in float64, by the word behind its fields.
template <template <class> class T, class Run>
void typed(const int64_t* word, const Run& run) {
  word[sizeof(T<float>) / 8] ? run(from<T<double>>(word)) : run(from<T<float>>(word));
}

// The layers, their number, the sizes of an input, of a row and of a row of statistics, and then a
// chain's other fields.
template <class Chain>
Chain chain_of(const int64_t* word) {
  Chain out{};
  const double* line = reinterpret_cast<const double*>(word[0]);
  for (int64_t k = 0; k < word[1]; k++, line += 9) {
    out.program.layers.push_back({static_cast<int64_t>(*line), {}});
    std::copy(line + 1, line + 9, out.program.layers.back().field);
  }
  out.program.c = word[2], out.program.h = word[3], out.program.w = word[4],
  out.program.q = word[5], out.program.b = word[6];
  char* const rest = reinterpret_cast<char*>(&out.loss_kind);
  std::memcpy(rest, word + 7, static_cast<size_t>(reinterpret_cast<char*>(&out + 1) - rest));
  return out;
}

const char* const kKernels[] = {"sqdist", "waffle",     "feddwa",       "aggregate",
                                "rank1",  "sgd",        "trimmed_mean", "mean_around_median",
                                "chain",  "chain grad", "chain eval"};

void solve(int64_t kernel, const int64_t* word, const Threads& t) {
  switch (kernel) {
    case 0:
      return sqdist(from<Sqdist>(word), t);
    case 1:
      return waffle_weights(from<Waffle>(word), t);
    case 2:
      return typed<Feddwa>(word, [&](const auto& q) { feddwa_weights(q, t); });
    case 3:
      return aggregate(from<Aggregate>(word), t);
    case 4:
      return typed<Rank1>(word, [&](const auto& q) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(q.x)>>;
        const int64_t* const to = word + sizeof q / 8 + 1;
        const auto at = [&](int i) { return reinterpret_cast<T*>(to[i]); };
        if (at(0)) return rank1_forward(q, at(0), t);
        rank1_backward(q, static_cast<const T*>(at(1)), Rank1Grads<T>{at(2), at(3), at(4), at(5)},
                       t);
      });
    case 5:
      return typed<Sgd>(word, [&](const auto& q) { sgd_step(q, t); });
    case 6:
      return mean_of_columns(from<TrimmedMean>(word), t);
    case 7:
      return mean_of_columns(from<MeanAroundMedian>(word), t);
  }
  const bool fine = kernel == 8   ? chain_train(chain_of<ChainTrain<float>>(word), t)
                    : kernel == 9 ? chain_grad(chain_of<ChainGrad<float>>(word), t)
                                  : chain_eval(chain_of<ChainEval<float>>(word), t);
  if (!fine) failures++, std::printf("%s: out of range\n", kKernels[kernel]);
}

template <class T>
void print(FILE* file, const char* what, const char* data, int64_t bytes) {
  std::fprintf(file, "%s\t", what);
  const T* const number = reinterpret_cast<const T*>(data);
  for (int64_t i = 0; i < bytes / static_cast<int64_t>(sizeof(T)); i++)
    std::fprintf(file, "%.9g ", static_cast<double>(number[i]));
  std::fprintf(file, "\n");
}

// Checks that the results of 1 and 3 threads are equal. Writes them to `numbers`, so that they can
// be compared with those of another machine.
void check(const Problem& problem, FILE* numbers) {
  const char* const what = kKernels[problem.kernel];
  const Placed one(problem), three(problem);
  solve(problem.kernel, one.words.data(), Threads{1});
  solve(problem.kernel, three.words.data(), Threads{3});
  size_t k = 0;
  for (const Word& w : problem.words) {
    if (w.kind == 0) continue;
    const char *const got = one.buffers[k].get(), *const other = three.buffers[k++].get();
    const auto differs = [&](const char* a) { return std::memcmp(got, a, w.content.size()) != 0; };
    const int64_t bytes = std::abs(w.kind);
    // In a result of few numbers, the largest may be a small difference of larger numbers.
    if (numbers && w.value >= 100 * bytes && (w.kind < 0 || differs(w.content.data()))) {
      if (bytes == 4) print<float>(numbers, what, got, w.value);
      if (bytes == 8) print<double>(numbers, what, got, w.value);
    }
    if (!differs(other)) continue;
    failures++;
    std::printf("%s (%s): 1 and 3 threads differ\n", what, name(isa()));
  }
}

// Makes a fault that a sanitizer must catch: a last row that is one element too short, two threads
// that write one result, or a sum that overflows.
int fault(const Problem& problem, const std::string& how) {
  if (how == "overflow") {
    int sum = std::numeric_limits<int>::max();
    sum += static_cast<int>(problem.words.size());
    return std::printf("%d\n", sum) < 0;
  }
  const Placed placed(problem, how == "short" ? sizeof(float) : 0);
  const auto work = [&] { solve(problem.kernel, placed.words.data(), Threads{1}); };
  std::thread other([&] {
    if (how == "race") work();
  });
  work();
  other.join();
  return 0;
}

}  // namespace

int main(int count, char** words) {
  const std::vector<Problem> problems = problems_of(words[1]);
  const std::string how = count > 2 ? words[2] : "";
  front = how == "front";
  FILE* const numbers = how == "numbers" ? std::fopen(words[3], "w") : nullptr;
  if (count > 2 && !front && !numbers) return fault(problems.at(0), how);
  for (Isa wanted : {Isa::plain, Isa::avx2, Isa::avx512}) {
    if (wanted > (numbers ? Isa::plain : best_isa())) continue;
    isa_slot() = wanted;
    for (const Problem& problem : problems) check(problem, numbers);
    const Pages fresh(9 << 20);
    touch_fresh(fresh.start, 9 << 20, Threads{3});
    fresh(nullptr);
    const Limits most = limits(2, 1 << 16, 100);
    if (!(most.read > 0 && most.write > 0 && most.fma > 0 && most.sub_fma > 0)) failures++;
    std::printf("%s\n", name(wanted));
  }
  return failures != 0;
}
