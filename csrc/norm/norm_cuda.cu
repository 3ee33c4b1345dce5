// Launches the norm kernel (norm/norm_kernel.cuh) with a sink that stores the normalised values;
// norm_loop_kernel for rows that do not fit registers.
#include "norm/norm_kernel.cuh"
#include "norm/norm_quantize.h"

namespace transformer_plugin::norm {
namespace {

// Stores the normalised values in their dtype.
template <int kUnits>
struct PlainSink {
  struct Shared {};

  void* output;  // [rows, cols]

  __device__ __forceinline__ void begin(Shared&) const {}

  template <typename Reload>
  __device__ __forceinline__ void write(Shared&, const Units<kUnits>& x, const RowFragment<kUnits>& part,
                                        int64_t row, int, Reload&& reload) const {
    uint4* target = static_cast<uint4*>(output) + row * part.units + threadIdx.x;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (part.has(k)) target[k * kThreads] = x.at[k];
      reload(k);
    }
  }

  __device__ __forceinline__ void finish(Shared&, int64_t, int) const {}
};

}  // namespace

void launch_norm(const NormArgs& args, void* output, void* stream) {
  if (args.rows == 0) return;
  if (!fits_registers(args)) return launch_norm_loop(args, output, {}, stream);
  visit_units(args.cols, [&](auto units) {
    constexpr int kUnits = decltype(units)::value;
    launch_rows<kUnits>(args, PlainSink<kUnits>{output}, stream);
  });
}

}  // namespace transformer_plugin::norm
