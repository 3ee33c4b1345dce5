// Launches the norm kernel (norm/norm_kernel.cuh) with a sink that quantizes to FP8: 1x128 blocks or per-
// tensor scales.
#include "norm/norm_sinks.cuh"

namespace transformer_plugin::norm {
namespace {

constexpr int kLanesPerBlock = quantize::kTile / kUnit;  // 1x128
constexpr int kBlocksPerUnit = kThreads / kLanesPerBlock;

// Sink for FP8 with 1x128 blocks or per-tensor scales. The scales of one block column are contiguous over
// rows: those of the 4 rows of this block are collected in shared memory and stored 16 bytes at once,
// including the zeros that pad them.
template <int kUnits>
struct Fp8Sink {
  static_assert(kRowsPerBlock == 4, "scale rows are padded to a multiple of 4");
  struct Shared {
    float4 scales[kMostUnits * kBlocksPerUnit];
  };

  uint8_t* data;  // [rows, cols]
  float* scale;   // [ceil(cols / 128), up4(rows)]
  int64_t scale_width;
  int64_t blocks;  // of a row, with a scale each; 0 for a per-tensor scale
  quantize::ScaleRule rule;
  const float* tensor_amax;  // or null

  // The barrier of the first row's sum separates these stores from those of scales.
  __device__ __forceinline__ void begin(Shared& shared) const {
    for (int i = threadIdx.x; i < kMostUnits * kBlocksPerUnit; i += kThreads) shared.scales[i] = {};
  }

  template <typename Reload>
  __device__ __forceinline__ void write(Shared& shared, const Units<kUnits>& x,
                                        const RowFragment<kUnits>& part, int64_t row, int index,
                                        Reload&& reload) const {
    const int lane = threadIdx.x % kWarpSize;
    using Maxima = UnitMaxima<kMostUnits>;
    const Maxima maxima(x, lane);
    const float amax = fmaxf(maxima.at[0], __shfl_xor_sync(0xffffffffu, maxima.at[0], kLanesPerBlock / 2));
    const float own = quantize::encode_scale(tensor_amax ? *tensor_amax : amax, rule);
    if (lane % kLanesPerBlock < kMostUnits) {
      const int block = Maxima::first_of(lane) * kBlocksPerUnit + threadIdx.x / kLanesPerBlock;
      reinterpret_cast<float*>(&shared.scales[block])[index] = 1.0f / own;
    }
    const int group = lane & kLanesPerBlock;
    store_encoded(
        data, x, part, row, [&](int k) { return __shfl_sync(0xffffffffu, own, group + Maxima::lane_of(k)); },
        reload);
  }

  __device__ __forceinline__ void finish(Shared& shared, int64_t first, int) const {
    __syncthreads();
    for (int64_t block = threadIdx.x; block < blocks; block += kThreads) {
      *reinterpret_cast<float4*>(scale + block * scale_width + first) = shared.scales[block];
    }
  }
};

}  // namespace

void launch_norm_quantize(const NormArgs& args, const QuantizeArgs& output, void* stream) {
  launch_tensor_scales(output, stream);
  if (args.rows == 0) return;
  if (!fits_registers(args, output)) return launch_norm_loop(args, nullptr, output, stream);
  const quantize::Layout& layout = output.layout;
  visit_units(args.cols, [&](auto units) {
    constexpr int kUnits = decltype(units)::value;
    const bool per_tensor = layout.granularity == quantize::ScaleGranularity::kPerTensor;
    const Fp8Sink<kUnits> sink{output.data,
                               output.scale,
                               layout.scale_width(false),
                               per_tensor ? 0 : layout.scale_height(false),
                               output.rule,
                               per_tensor ? output.amax : nullptr};
    launch_rows<kUnits>(args, sink, stream);
  });
}

}  // namespace transformer_plugin::norm
