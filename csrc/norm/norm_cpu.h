// Rows on a CPU, shared by the plain norms and those that quantize.
#pragma once

#include "norm/norm.h"
#include "quantize/cpu/tile.h"

namespace transformer_plugin::norm {

struct RowStats {
  float mean;  // 0 for RMSNorm
  float rstd;
};

// The statistics of one row, also stored in `args.mean` and `args.rstd` unless these are null.
RowStats stats_of_row_cpu(const NormArgs& args, int64_t row);
// Columns `first` .. `first + cols` of `rows` rows, at most the size of a tile. normalise_cpu rounds its
// values to the dtype of the input.
struct Region {
  int64_t row;
  int64_t first;
  int rows;
  int cols;
};
void normalise_cpu(const NormArgs& args, const RowStats* stats, const Region& region,
                   quantize::FloatTile& values);

// The sum of kPartialSums partial sums, of which only the first `cols` are not zero. Overwrites them.
float sum_of_partials_cpu(float* partials, int64_t cols);

}  // namespace transformer_plugin::norm
