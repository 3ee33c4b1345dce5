// Largest magnitudes of more than a block: of each member or group, or of each of their rows and columns. NaN is left
// out, an infinity is not; 0 where there is nothing.
#pragma once

#include "common/dtype.h"
#include "quantize/args/layout.h"

namespace at {
class Tensor;
}

namespace transformer_plugin::quantize {

struct AmaxArgs {
  const void* input;  // [members, rows, cols] contiguous
  float* amax;        // [members or groups]; with `row_scaled` [members, rows]. Null if not asked for
  float* amax_t;      // [members or groups]; with `row_scaled` [members or groups, cols]. Null likewise
  Layout layout;
  DType dtype;
  bool row_scaled;
  bool hadamard;  // of the columns in 16 rows each, before amax_t

  // Whether each number is that of one tile, which then stores it. Others are raised from 0 by their tiles.
  TP_HOST_DEVICE bool one_tile_each() const {
    return !row_scaled && !layout.grouped() && layout.row_tiles() == 1 && layout.col_tiles() == 1;
  }
  TP_HOST_DEVICE int64_t count() const {
    return row_scaled ? layout.members * layout.rows : layout.tensor_scales();
  }
  TP_HOST_DEVICE int64_t count_t() const { return layout.tensor_scales() * (row_scaled ? layout.cols : 1); }
};

void amax_cpu(const AmaxArgs& args);
void launch_amax(const AmaxArgs& args, void* stream);

// Of each member or group of a contiguous input in this layout, on its device.
at::Tensor amax_of(const at::Tensor& input, const Layout& layout);

}  // namespace transformer_plugin::quantize
