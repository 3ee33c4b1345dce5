// A GEMM as far as the choice of its kernel depends on it: values only, no pointer and no tensor, so that the
// choice can be tested and printed where there is no GPU.
#pragma once

#include "activation/description.h"
#include "common/format.h"
#include "gemm/args/kernel_args.h"

namespace transformer_plugin::gemm {

enum class Epilogue : int32_t { kStore, kActivation };

// Sizes, strides and dtypes are those of GroupedGemmArgs. Alignment is that of the operands once they are
// contiguous: a copy begins at a multiple of 16 bytes.
struct GemmDesc {
  GemmDirection direction;
  DType dtype = {}, b_dtype = {}, out_dtype = {};
  Format a_format = {}, b_format = {};  // of quantized operands; else no format
  int64_t rows = 0, groups = 0, m = 0, n = 0, k = 0;
  int64_t out_row_stride = 0, out_group_stride = 0;
  LaunchOptions options = {};
  bool accumulate = false;
  bool rows_aligned = true;      // every row of a and b begins at a multiple of 16 bytes
  bool pointers_aligned = true;  // so do the output and the scales
  // The matrices of b (kWgrad: of the output) are a list; whether each begins at a multiple of 16 bytes.
  bool is_list = false, list_aligned = true;
  // Quantized: two matrices, without offsets. Their product is a kFprop of one group or, without a bias, a
  // kWgrad of one.
  bool is_dense = false, has_bias = false;
  Epilogue epilogue = Epilogue::kStore;
  activation::Activation activation = {};  // kActivation
  bool index = false;                      // rows of `a` (kWgrad: of the gradient) are named by an index
  bool can_gather = false;                 // the rows of the matrix that it names have inner stride 1
  bool index_fits_wgrad = false;      // it is int32, and the matrix's rows are less than 2^31 bytes apart
  bool index_matrix_aligned = false;  // the rows of the matrix that it names begin at multiples of 16 bytes
  // No bias, factor, list or given output: at::_grouped_mm has the same meaning.
  bool torch_computes_it = false;

  bool is_quantized() const { return a_format.is_quantized(); }
  bool is_wgrad() const { return direction == GemmDirection::kWgrad; }
};

}  // namespace transformer_plugin::gemm
