// The ops "trimmed_mean" and "mean_around_median", tensors checked: a Device is what
// `device(problem, a tensor there)` runs on.
#pragma once
#include "common.h"

namespace pflcore {

// The problem `q` of an op on the columns of rows [N, P].
template <class Device, class Problem>
Tensor mean_of_columns(const char* op, const Tensor& rows_in, Problem q) {
  const Device device(rows_in, op);
  const Tensor rows = pflcore::rows(rows_in);
  q.dtype = dtype_of(rows, op);
  q.n = rows.size(0), q.p = rows.size(1);
  q.rows = rows.const_data_ptr(), q.row = row_stride(rows);
  const Tensor out = make(rows, {q.p});
  q.out = out.mutable_data_ptr();
  device(q, rows);
  return out;
}

template <class Device>
Tensor trimmed_mean(const Tensor& rows, int64_t removed) {
  constexpr const char* op = "trimmed_mean";
  PFL_CHECK(rows.dim() == 2, op, ": expected rows [N, P]");
  const int64_t n = rows.size(0);
  PFL_CHECK(removed >= 0 && n <= INT32_MAX && removed < (n + 1) / 2, op,
            ": expected less than half of the rows for removed, got ", removed, " of ", n);
  TrimmedMean q{};
  q.removed = removed;
  return mean_of_columns<Device>(op, rows, q);
}

template <class Device>
Tensor mean_around_median(const Tensor& rows, int64_t kept) {
  constexpr const char* op = "mean_around_median";
  PFL_CHECK(rows.dim() == 2, op, ": expected rows [N, P]");
  const int64_t n = rows.size(0);
  PFL_CHECK(kept > 0 && n <= INT32_MAX && kept <= n, op,
            ": expected one of the rows or more for kept, got ", kept, " of ", n);
  MeanAroundMedian q{};
  q.kept = kept;
  return mean_of_columns<Device>(op, rows, q);
}

}  // namespace pflcore
