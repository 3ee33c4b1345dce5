// The arguments of the amax kernels: largest magnitudes of each matrix or group, or of each of their rows and
// columns. NaN is ignored, infinity is not; the amax of nothing is 0.
#pragma once

#include "common/dtype.h"
#include "common/row_index_args.h"
#include "quantize/args/layout.h"

namespace at {
class Tensor;
}

namespace transformer_plugin::quantize {

struct AmaxArgs {
  const void* input;  // [matrices, rows, cols], contiguous
  float* amax;        // [matrices or groups]; with `row_scaled` [matrices, rows]. Null if not requested
  float* amax_t;  // [matrices or groups]; with `row_scaled` [matrices or groups, cols]. Null if not requested
  Layout layout;
  DType dtype;
  bool row_scaled;
  bool hadamard;  // transform each 16 rows of a column before amax_t

  // Whether each amax comes from a single tile, which then stores it. Otherwise tiles raise it from 0 by an
  // atomic maximum.
  TP_HOST_DEVICE bool one_tile_each() const {
    return !row_scaled && !layout.grouped() && layout.row_tiles() == 1 && layout.col_tiles() == 1;
  }
  TP_HOST_DEVICE int64_t count() const {
    return row_scaled ? layout.matrices * layout.rows : layout.tensor_scales();
  }
  TP_HOST_DEVICE int64_t count_t() const { return layout.tensor_scales() * (row_scaled ? layout.cols : 1); }
};

// The amaxes of groups whose rows are read by an index, from the amaxes of the rows of the input.
struct IndexedAmaxArgs {
  const float* row_amax;  // [index.rows]
  RowIndex index;
  float* amax;  // [groups]
  Layout layout;
};

void amax_cpu(const AmaxArgs& args);
void launch_amax(const AmaxArgs& args, void* stream);
void launch_indexed_amax(const IndexedAmaxArgs& args, void* stream);

// The amax of each matrix or group of a contiguous input, on the input's device.
at::Tensor amax_of(const at::Tensor& input, const Layout& layout);
// The same for the rows that the index names, on a GPU.
at::Tensor amax_of_rows(const at::Tensor& input, const RowIndex& index, const Layout& layout);

}  // namespace transformer_plugin::quantize
