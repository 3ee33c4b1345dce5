#include "norm/norm_kernel.cuh"
#include "norm/norm_quantize.h"

namespace transformer_plugin::norm {
namespace {

// The values as they are.
struct PlainSink {
  struct Shared {};

  void* output;  // [rows, cols]

  __device__ __forceinline__ void begin(Shared&) const {}

  template <typename Reload>
  __device__ __forceinline__ void write(Shared&, const uint4 (&x)[kUnits], const Part& part, int64_t row, int,
                                        Reload&& reload) const {
    uint4* target = static_cast<uint4*>(output) + row * part.units + threadIdx.x;
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (k >= part.used) break;
      if (part.has(k)) target[k * kThreads] = x[k];
      reload(k);
    }
  }

  __device__ __forceinline__ void finish(Shared&, int64_t, int) const {}
};

}  // namespace

void launch_norm(const NormArgs& args, void* output, void* stream) {
  if (args.rows == 0) return;
  if (!fits_registers(args)) return launch_norm_loop(args, output, {}, stream);
  const PlainSink sink{output};
  args.dtype == DType::kBFloat16 ? launch_rows<__nv_bfloat16>(args, sink, stream)
                                 : launch_rows<__half>(args, sink, stream);
}

}  // namespace transformer_plugin::norm
