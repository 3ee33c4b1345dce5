// grouped_gemm_plan: which kernel would compute a grouped product of contiguous tensors, and how it would be
// launched.
#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "common/check.h"
#include "common/ops/gemm.h"
#include "common/register.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/dispatch/quantized_operands.h"
#include "gemm/dispatch/select.h"
#include "quantize/ops/checks.h"

namespace transformer_plugin::gemm {
namespace {

constexpr const char* kOp = "grouped_gemm_plan";
constexpr std::array<std::string_view, 3> kProducts = {"forward", "data_grad",
                                                       "weight_grad"};  // as GemmDirection

GemmDirection direction_of(std::string_view product) {
  const auto found = std::find(kProducts.begin(), kProducts.end(), product);
  TP_CHECK_VALUE(found != kProducts.end(), kOp, "product", "one of forward, data_grad, weight_grad",
                 "'" << product << "'", "Name the product that is meant");
  return static_cast<GemmDirection>(found - kProducts.begin());
}

DType checked_dtype(const char* name, at::ScalarType dtype) {
  const bool known = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  TP_CHECK_TYPE(known, kOp, name, "one of float32, bfloat16, float16", dtype_name(dtype),
                "Pass the dtype of the values, and formats for quantized operands");
  return to_dtype(dtype);
}

void check_count(const char* name, int64_t count, int64_t least) {
  TP_CHECK_VALUE(count >= least && count <= std::numeric_limits<int32_t>::max(), kOp, name,
                 "from " << least << " to 2^31 - 1", count, "Pass what the call has");
}

using Plan = std::tuple<std::string, std::string, std::vector<int64_t>>;

// Those of quantized operands, checked. Their data gradient reads the transposed data of the weight, so that
// both are K-major: it is a kFprop of [G, k, n].
void set_formats(GemmDesc& desc, std::string_view a_key, std::string_view b_key) {
  const bool wgrad = desc.is_wgrad(), ragged = desc.groups > 1;
  desc.a_format = quantize::quantized_format(kOp, "a_format", a_key, !ragged);
  desc.b_format = quantize::quantized_format(kOp, "b_format", b_key, !ragged || !wgrad);
  const Quantized a{{}, {}, {}, desc.a_format, a_key}, b{{}, {}, {}, desc.b_format, b_key};
  const OperandNames a_names = names_of_a(kOp), b_names = names_of_b(kOp);
  wgrad ? check_wgrad_formats(a_names, a, b_names, b) : check_formats(a_names, a, b_names, b, true);
  desc.dtype = desc.a_format.element;
  desc.b_dtype = desc.b_format.element;
  if (!wgrad) desc.direction = GemmDirection::kFprop;
}

// Of a weight [G, n, k].
Plan grouped_gemm_plan(std::string_view product, std::string_view a_key, std::string_view b_key,
                       at::ScalarType dtype, at::ScalarType out_dtype, int64_t rows, int64_t groups,
                       int64_t n, int64_t k, int64_t multiprocessors, int64_t capability, bool accumulate,
                       int64_t max_sms, int64_t expected_rows) {
  const bool quantized = a_key != "none" || b_key != "none";
  const GemmDirection asked = direction_of(product);
  GemmDesc desc{.direction = asked};
  desc.dtype = desc.b_dtype = checked_dtype("dtype", dtype);
  desc.out_dtype = checked_dtype("out_dtype", out_dtype);
  check_count("rows", rows, 0);
  check_count("groups", groups, 0);
  check_count("n", n, 0);
  check_count("k", k, 0);
  check_count("multiprocessors", multiprocessors, 1);
  check_count("capability", capability, 0);
  desc.options = {max_sms, expected_rows};
  check_launch_options(kOp, desc.options);
  desc.rows = rows;
  desc.groups = groups;
  desc.m = n;
  desc.n = asked == GemmDirection::kFprop ? n : k;
  desc.k = asked == GemmDirection::kFprop ? k : n;
  desc.out_row_stride = desc.n;
  desc.out_group_stride = desc.m * desc.n;
  desc.accumulate = accumulate;
  desc.torch_computes_it = !accumulate;
  if (quantized) set_formats(desc, a_key, b_key);
  const GpuDesc gpu{static_cast<int>(capability), static_cast<int>(multiprocessors), true};
  const Selection selection = select_gemm(desc, gpu);
  const Sm90Config& config = selection.config;
  return {backend_name(selection.backend),
          selection.reason,
          {config.clusters, static_cast<int64_t>(config.boxes_added_by_threads), config.overlaps_dequantize}};
}

}  // namespace

TP_IMPL_FOR(CompositeExplicitAutograd, grouped_gemm_plan, grouped_gemm_plan);

}  // namespace transformer_plugin::gemm
