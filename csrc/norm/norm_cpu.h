// Rows on a CPU: what the plain ops and those that quantize share.
#pragma once

#include "norm/norm.h"
#include "quantize/cpu/tile.h"

namespace transformer_plugin::norm {

struct RowStats {
  float mean;  // 0 unless centered
  float rstd;
};

// Of one row; also kept in `args.mean` and `args.rstd` where these are asked for.
RowStats stats_of_row_cpu(const NormArgs& args, int64_t row);
// Columns `first` .. `first + cols` of `rows` rows, rounded to the dtype of the input. At most as many as a tile has.
struct Part {
  int64_t row;
  int64_t first;
  int rows;
  int cols;
};
void normalise_cpu(const NormArgs& args, const RowStats* stats, const Part& part, quantize::Values& values);

// The sum of the first `cols` of kPartialSums partial sums, of which the others are zero. Overwrites them.
float sum_of_partials_cpu(float* partials, int64_t cols);

}  // namespace transformer_plugin::norm
