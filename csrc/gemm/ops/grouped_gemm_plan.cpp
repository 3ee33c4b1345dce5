// grouped_gemm_plan: which kernel would compute a grouped product of contiguous tensors, and how it would be launched.
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
#include "gemm/dispatch/quantized_gemm.h"
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

Plan plan_of(const GemmDesc& desc, const GpuDesc& gpu) {
  const Selection selection = select_gemm(desc, gpu);
  const Sm90Config& config = selection.config;
  return {backend_name(selection.backend),
          selection.reason,
          {config.clusters, static_cast<int64_t>(config.boxes_added_by_threads),
           overlaps_dequantize(desc.args, config)}};
}

// Of a weight [G, n, k]. The data gradient of quantized operands reads the transposed data of the weight, so that both are
// K-major: it is a kFprop of [G, k, n].
Plan grouped_gemm_plan(std::string_view product, std::string_view a_key, std::string_view b_key,
                       at::ScalarType dtype, at::ScalarType out_dtype, int64_t rows, int64_t groups,
                       int64_t n, int64_t k, int64_t multiprocessors, int64_t capability, bool accumulate,
                       int64_t max_sms, int64_t expected_rows) {
  const bool quantized = a_key != "none" || b_key != "none";
  const GemmDirection asked = direction_of(product);
  GroupedGemmArgs args{};
  args.dtype = args.b_dtype = checked_dtype("dtype", dtype);
  args.out_dtype = checked_dtype("out_dtype", out_dtype);
  check_count("rows", rows, 0);
  check_count("groups", groups, 0);
  check_count("n", n, 0);
  check_count("k", k, 0);
  check_count("multiprocessors", multiprocessors, 1);
  check_count("capability", capability, 0);
  args.options = {max_sms, expected_rows};
  check_launch_options(kOp, args.options);
  args.rows = rows;
  args.groups = groups;
  args.m = n;
  args.n = asked == GemmDirection::kFprop ? n : k;
  args.k = asked == GemmDirection::kFprop ? k : n;
  args.out_row_stride = args.n;
  args.out_group_stride = args.m * args.n;
  args.accumulate = accumulate;
  args.rows_16_byte_aligned = true;
  const GpuDesc gpu{static_cast<int>(capability), static_cast<int>(multiprocessors), true};
  if (!quantized) {
    GemmDesc desc{asked, args, true};
    desc.torch_computes_it = !accumulate;
    return plan_of(desc, gpu);
  }
  const bool wgrad = asked == GemmDirection::kWgrad, ragged = groups > 1;
  const Format a = quantize::quantized_format(kOp, "a_format", a_key, !ragged);
  const Format b = quantize::quantized_format(kOp, "b_format", b_key, !ragged || !wgrad);
  const Quantized a_operand{{}, {}, {}, a, a_key}, b_operand{{}, {}, {}, b, b_key};
  const OperandNames a_names = names_of_a(kOp), b_names = names_of_b(kOp);
  wgrad ? check_wgrad_formats(a_names, a_operand, b_names, b_operand)
        : check_formats(a_names, a_operand, b_names, b_operand, true);
  const auto scales = wgrad ? quantized_wgrad_scales(a, b) : quantized_gemm_scales(a, b);
  if (!scales) return {backend_name(Backend::kSteps), "no kernel multiplies these two formats", {0, 0, 0}};
  args.dtype = a.element;
  args.b_dtype = b.element;
  args.scaling = *scales;
  return plan_of({wgrad ? asked : GemmDirection::kFprop, args, true}, gpu);
}

}  // namespace

TP_IMPL_FOR(CompositeExplicitAutograd, grouped_gemm_plan, grouped_gemm_plan);

}  // namespace transformer_plugin::gemm
