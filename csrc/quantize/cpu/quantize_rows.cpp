// fp8_row on a CPU.
#include "quantize/args/quantize_rows.h"

#include "common/visit_float.h"
#include "quantize/cpu/abs_max.h"

namespace transformer_plugin::quantize {
namespace {

constexpr int64_t kWorth = 32768;  // elements for which a thread is worthwhile

template <typename T>
TP_CPU_CLONES Bits<T> largest_of(const T* values, int64_t count) {
  return largest_bits(values, count);
}

template <DType element, typename T>
TP_CPU_CLONES void convert_row(const T* __restrict values, int64_t count, float scale,
                               uint8_t* __restrict data) {
  for (int64_t c = 0; c < count; ++c) {
    data[c] = float_to_fp8<element>(static_cast<float>(values[c]) * scale);
  }
}

// The second read of a row hits the cache.
template <DType element, typename T>
void quantize_each_row(const QuantizeRowsArgs& args) {
  const int64_t grain = std::max<int64_t>(1, kWorth / std::max<int64_t>(1, args.cols));
  const int64_t used = args.used_rows();
  at::parallel_for(0, args.written_rows(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (row >= used) {
        std::fill_n(args.data + row * args.cols, args.cols, uint8_t{0});
        args.scale[row] = 0.0f;
        continue;
      }
      const T* values = static_cast<const T*>(args.input) + row * args.cols;
      const float scale = encode_scale(float_of_bits<T>(largest_of(values, args.cols)), args.rule);
      convert_row<element>(values, args.cols, scale, args.data + row * args.cols);
      args.scale[row] = 1.0f / scale;
    }
  });
}

}  // namespace

void quantize_rows_cpu(const QuantizeRowsArgs& args) {
  if (args.is_noop()) return;
  visit_fp8(args.element, [&](auto element) {
    visit_float(args.dtype,
                [&](auto type) { quantize_each_row<decltype(element)::value, decltype(type)>(args); });
  });
}

}  // namespace transformer_plugin::quantize
