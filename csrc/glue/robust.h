// The op "trimmed_mean", tensors checked: a Device is what `device(problem, a
// tensor there)` runs on.
#pragma once
#include "common.h"

namespace pflcore {

template <class Device>
Tensor trimmed_mean(const Tensor& rows_in, int64_t removed) {
  constexpr const char* op = "trimmed_mean";
  PFL_CHECK(rows_in.dim() == 2, op, ": expected rows [N, P]");
  const Device device(rows_in, op);
  const Tensor rows = pflcore::rows(rows_in);
  TrimmedMean q{};
  q.dtype = dtype_of(rows, op);
  q.n = rows.size(0), q.p = rows.size(1), q.removed = removed;
  PFL_CHECK(removed >= 0 && q.n <= INT32_MAX && removed < (q.n + 1) / 2, op,
            ": expected less than half of the rows for removed, got ", removed, " of ", q.n);
  q.rows = rows.const_data_ptr(), q.row = row_stride(rows);
  const Tensor out = make(rows, {q.p});
  q.out = out.mutable_data_ptr();
  device(q, rows);
  return out;
}

}  // namespace pflcore
