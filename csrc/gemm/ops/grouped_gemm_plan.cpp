// grouped_gemm_plan: how the kernels for Hopper would run a grouped product of contiguous tensors.
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>

#include "common/check.h"
#include "common/tensor.h"
#include "gemm/dispatch/checks.h"
#include "gemm/sm90/config.h"

namespace transformer_plugin::gemm {
namespace {

constexpr const char* kOp = "grouped_gemm_plan";
constexpr std::array<std::string_view, 3> kProducts = {"forward", "data_grad",
                                                       "weight_grad"};  // as GroupedMode

GroupedMode mode_of(std::string_view product) {
  const auto found = std::find(kProducts.begin(), kProducts.end(), product);
  TP_CHECK_VALUE(found != kProducts.end(), kOp, "product", "one of forward, data_grad, weight_grad",
                 "'" << product << "'", "Name the product that is meant");
  return static_cast<GroupedMode>(found - kProducts.begin());
}

DType checked_dtype(const char* name, at::ScalarType dtype) {
  const bool known = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
                     dtype == at::kFloat8_e4m3fn || dtype == at::kFloat4_e2m1fn_x2;
  TP_CHECK_TYPE(known, kOp, name, "one of float32, bfloat16, float16, float8_e4m3fn, float4_e2m1fn_x2",
                dtype_name(dtype), "Pass the dtype that the kernels get");
  return dtype == at::kFloat4_e2m1fn_x2 ? DType::kFloat4E2M1 : to_dtype(dtype);
}

ScaleKind scale_kind_of(DType dtype, bool microscaled) {
  if (dtype == DType::kFloat4E2M1) return ScaleKind::kNv;
  TP_CHECK_VALUE(!microscaled || dtype == DType::kFloat8E4M3, kOp, "microscaled",
                 "False, or a dtype of float8_e4m3fn or float4_e2m1fn_x2", "True with another dtype",
                 "Leave it out, or pass the dtype of the codes");
  return microscaled ? ScaleKind::kMx : ScaleKind::kBlocks;
}

void check_count(const char* name, int64_t count, int64_t least) {
  TP_CHECK_VALUE(count >= least && count <= std::numeric_limits<int32_t>::max(), kOp, name,
                 "from " << least << " to 2^31 - 1", count, "Pass what the call has");
}

// The operands of a weight [G, n, k].
std::vector<int64_t> grouped_gemm_plan(std::string_view product, at::ScalarType dtype,
                                       at::ScalarType out_dtype, int64_t rows, int64_t groups, int64_t n,
                                       int64_t k, int64_t multiprocessors, bool accumulate, int64_t max_sms,
                                       int64_t expected_rows, bool microscaled) {
  const GroupedMode mode = mode_of(product);
  GroupedKernelArgs args{};
  args.dtype = args.b_dtype = checked_dtype("dtype", dtype);
  args.scale_kind = scale_kind_of(args.dtype, microscaled);
  args.out_dtype = checked_dtype("out_dtype", out_dtype);
  check_count("rows", rows, 0);
  check_count("groups", groups, 0);
  check_count("n", n, 0);
  check_count("k", k, 0);
  check_count("multiprocessors", multiprocessors, 1);
  args.options = {max_sms, expected_rows};
  check_launch_options(kOp, args.options);
  args.rows = rows;
  args.groups = groups;
  args.m = n;
  args.n = mode == GroupedMode::kForward ? n : k;
  args.k = mode == GroupedMode::kForward ? k : n;
  args.out_row_stride = args.n;
  args.out_group_stride = args.m * args.n;
  args.accumulate = accumulate;
  const HopperPlan plan = hopper_plan(mode, args, static_cast<int>(multiprocessors));
  return {plan.takes ? 1 : 0, plan.clusters, static_cast<int64_t>(plan.thread_boxes),
          widens_beside(args, plan) ? 1 : 0};
}

}  // namespace

TORCH_LIBRARY_IMPL(transformer_plugin, CompositeExplicitAutograd, m) { m.impl(kOp, grouped_gemm_plan); }

}  // namespace transformer_plugin::gemm
