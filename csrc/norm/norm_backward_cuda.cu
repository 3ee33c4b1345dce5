// The backward of RMSNorm and LayerNorm (norm/norm.h): grad and input [rows, cols], any width, dtype and
// alignment.
//
// norm_backward_kernel computes the input's gradients: one block of 128 threads per row, 8 columns per thread
// and step; shared memory for the sums of 4 warps. sum_columns_kernel computes column sums for the gradients
// of weight and bias: one block of 256 threads per tile of 128x128, in which warp w holds rows 16w .. 16w +
// 15 and lane l columns 4l .. 4l + 3; shared memory for the sums of 8 warps. launch_add_tile_sums then adds
// the sums of tiles (common/column_sums.h).
#include "common/column_sums.cuh"
#include "norm/norm_row.cuh"
#include "quantize/cuda/tile/tile_fragment.cuh"

namespace transformer_plugin::norm {
namespace {

// The mean and the reciprocal standard deviation of a row.
struct Row {
  float mean;
  float rstd;

  __device__ __forceinline__ Row(const NormBackwardArgs& args, int64_t row)
      : mean(args.mean ? args.mean[row] : 0.0f), rstd(args.rstd[row]) {}
  __device__ __forceinline__ float normalised(float x) const { return (x - mean) * rstd; }
};

// One block per row: the sums over the row, then the gradients of its input.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    norm_backward_kernel(const __grid_constant__ NormBackwardArgs args) {
  __shared__ SumBuffers buffers;
  const int64_t index = blockIdx.x;
  const Row row(args, index);
  const Columns<T> grad(args.grad, index, args.cols), input(args.input, index, args.cols),
      weight(args.weight, 0, args.cols);
  const auto read = [&](int64_t first, int count, float(&scaled)[kUnit], float(&x)[kUnit]) {
    grad.read(first, count, scaled);
    input.read(first, count, x);
    if (!weight.begin) return;
    float w[kUnit];
    weight.read(first, count, w);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) scaled[i] = scaled[i] * gamma_of(w[i], args.zero_centered);
  };
  float grads[kUnit] = {}, products[kUnit] = {};
  for_each_unit(args.cols, [&](int64_t first, int count) {
    float scaled[kUnit], x[kUnit];
    read(first, count, scaled, x);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (i >= count) continue;
      grads[i] = grads[i] + scaled[i];
      products[i] = products[i] + scaled[i] * row.normalised(x[i]);
    }
  });
  int parity = 0;
  const float n = static_cast<float>(args.cols);
  const float mean_grad = args.mean ? sum_of_partials(grads, buffers, parity) / n : 0.0f;
  const float mean_product = sum_of_partials(products, buffers, parity) / n;
  for_each_unit(args.cols, [&](int64_t first, int count) {
    float scaled[kUnit], x[kUnit], of_input[kUnit];
    read(first, count, scaled, x);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      of_input[i] = input_gradient(scaled[i], row.normalised(x[i]), row.rstd, mean_grad, mean_product);
    }
    store_unit(static_cast<T*>(args.grad_input) + index * args.cols + first, count, args.cols % kUnit == 0,
               of_input);
  });
}

static_assert(quantize::kTile == kSumRows, "a tile is a whole branch of the sums' tree");

// One block per tile of 128x128: column sums of the gradients times the normalised values, and of the
// gradients.
template <typename T>
__global__ void __launch_bounds__(quantize::kThreads, 2)
    sum_columns_kernel(const __grid_constant__ NormBackwardArgs args, int64_t column_tiles) {
  using quantize::kColsPerThread;
  __shared__ TileSums products, grads;
  quantize::Tile tile = {};
  tile.row_tile = static_cast<int32_t>(blockIdx.x / column_tiles);
  tile.row = static_cast<int64_t>(tile.row_tile) * kSumRows;
  tile.rows = static_cast<int>(min(args.rows - tile.row, static_cast<int64_t>(kSumRows)));
  tile.col = (blockIdx.x - tile.row_tile * column_tiles) * quantize::kTile;
  tile.cols = static_cast<int>(min(args.cols - tile.col, static_cast<int64_t>(quantize::kTile)));
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const quantize::FragmentReader<T> grad(args.grad, args.cols, tile, warp, lane);
  const quantize::FragmentReader<T> input(args.input, args.cols, tile, warp, lane);
  // Lane r holds the statistics of row r of the warp. Rows outside of the matrix have gradients of 0.
  const float own_mean = args.mean ? quantize::load_row_scalar(args.mean, tile, warp, lane) : 0.0f;
  const float own_rstd = quantize::load_row_scalar(args.rstd, tile, warp, lane);
  constexpr int kBatch = quantize::kRowsInFlight<T>;
  constexpr int kBatches = quantize::kRowsPerThread / kBatch;
  float of_weight[kBatches][kColsPerThread], of_bias[kBatches][kColsPerThread];
#pragma unroll
  for (int b = 0; b < kBatches; ++b) {
    quantize::Vector4<T> g[kBatch], x[kBatch];
    grad.read(b * kBatch, 0, g);
    input.read(b * kBatch, 0, x);
    float product[kBatch][kColsPerThread], plain[kBatch][kColsPerThread];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float mean = __shfl_sync(0xffffffffu, own_mean, b * kBatch + i);
      const float rstd = __shfl_sync(0xffffffffu, own_rstd, b * kBatch + i);
      const quantize::Floats4<T> grads4(g[i]), inputs4(x[i]);
#pragma unroll
      for (int c = 0; c < kColsPerThread; ++c) {
        plain[i][c] = grads4.at[c];
        product[i][c] = grads4.at[c] * ((inputs4.at[c] - mean) * rstd);
      }
    }
#pragma unroll
    for (int c = 0; c < kColsPerThread; ++c) {
      of_weight[b][c] = sum_as_tree<kBatch>([&](int i) { return product[i][c]; });
      of_bias[b][c] = sum_as_tree<kBatch>([&](int i) { return plain[i][c]; });
    }
  }
  if (args.of_weight.sums) {
    sum_tile<kBatches>([&](int b, int c) { return of_weight[b][c]; }, tile.cols, products,
                       args.of_weight.of_tile(0, tile.row) + tile.col);
  }
  if (args.of_bias.sums) {
    sum_tile<kBatches>([&](int b, int c) { return of_bias[b][c]; }, tile.cols, grads,
                       args.of_bias.of_tile(0, tile.row) + tile.col);
  }
}

template <typename T>
void launch_sums(const NormBackwardArgs& args, void* stream) {
  const ColumnSums *of_weight = &args.of_weight, *of_bias = &args.of_bias;
  if (!of_weight->sums && !of_bias->sums) return;
  if (args.rows > 0) {
    const int64_t column_tiles = (args.cols + quantize::kTile - 1) / quantize::kTile;
    const int64_t row_tiles = (args.rows + kSumRows - 1) / kSumRows;
    sum_columns_kernel<T><<<grid_size(row_tiles * column_tiles, 1), quantize::kThreads, 0,
                            static_cast<cudaStream_t>(stream)>>>(args, column_tiles);
    check_launch("sum_columns_kernel");
  }
  for (const ColumnSums* sums : {of_weight, of_bias}) {
    if (sums->sums) launch_add_tile_sums(*sums, stream);
  }
}

}  // namespace

void launch_norm_backward(const NormBackwardArgs& args, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  visit_device_float(args.dtype, [&](auto element) {
    using T = decltype(element);
    if (args.rows > 0) {
      norm_backward_kernel<T><<<static_cast<unsigned>(args.rows), kThreads, 0, cuda_stream>>>(args);
      check_launch("norm_backward_kernel");
    }
    launch_sums<T>(args, stream);
  });
}

}  // namespace transformer_plugin::norm
