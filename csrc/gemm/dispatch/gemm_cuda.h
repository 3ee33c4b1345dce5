// GEMMs by the kernels of this library, and by torch's grouped GEMM, on CUDA.
#pragma once

#include "common/row_index.h"
#include "gemm/dispatch/cuda_args.h"
#include "gemm/dispatch/describe_gemm.h"
#include "gemm/dispatch/select.h"

namespace transformer_plugin::gemm {

// A product whose kernel is selected.
struct SelectedGemm {
  const GemmProblem& problem;
  const GemmDesc& desc;
  const Selection& selection;
  void* stream;

  bool gathers() const { return selection.backend == Backend::kSm90Gather; }
  GatheredRows gathered_rows() const {
    return rows_by_index(problem.a.data, problem.a.row_index, problem.offsets);
  }
  // Without the pointers of operands and output.
  GroupedGemmArgs args() const;
  // Of a kernel that does not gather rows.
  Launcher launcher(const GroupedGemmArgs& args) const {
    const bool generic = selection.backend == Backend::kGeneric;
    return generic ? generic_launcher(desc.direction) : sm90_launcher(desc.direction, args);
  }
};

// kFprop and kDgrad.
void multiply_rows(const SelectedGemm& gemm, const at::Tensor& out);
// kWgrad; `out` as run_gemm takes it.
void multiply_columns(const SelectedGemm& gemm, at::TensorList out);
// By at::_grouped_mm, whose ends of groups are the offsets from the second on.
at::Tensor torch_product(const SelectedGemm& gemm);

}  // namespace transformer_plugin::gemm
