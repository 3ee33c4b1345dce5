// Row kernels on a CPU (routing/rows_args.h).
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/visit_float.h"
#include "routing/rows_args.h"

namespace transformer_plugin::routing {
namespace {

constexpr int64_t kBytesPerTask = 32768;
constexpr int64_t kSumBlock = 512;

template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename Fn>
void visit_real(DType dtype, Fn&& fn) {
  return dtype == DType::kFloat64 ? fn(double{}) : visit_float(dtype, fn);
}

int64_t rows_per_task(int64_t bytes_per_row) {
  return std::max<int64_t>(1, kBytesPerTask / std::max<int64_t>(1, bytes_per_row));
}

template <typename T>
TP_CPU_CLONES void add_row(Sum<T>* sum, const T* row, int64_t width) {
  for (int64_t h = 0; h < width; ++h) sum[h] = sum[h] + static_cast<Sum<T>>(row[h]);
}

template <typename T>
TP_CPU_CLONES void add_scaled_row(Sum<T>* sum, const T* row, Sum<T> weight, int64_t width) {
  for (int64_t h = 0; h < width; ++h) sum[h] = fused(weight, static_cast<Sum<T>>(row[h]), sum[h]);
}

template <typename T>
TP_CPU_CLONES void store_row(T* output, const Sum<T>* sum, int64_t width) {
  for (int64_t h = 0; h < width; ++h) output[h] = static_cast<T>(sum[h]);
}

template <typename T>
TP_CPU_CLONES void scale_row(T* output, const T* row, Sum<T> weight, int64_t width) {
  for (int64_t h = 0; h < width; ++h) output[h] = static_cast<T>(weight * static_cast<Sum<T>>(row[h]));
}

template <typename T>
TP_CPU_CLONES Sum<T> dot_rows(const T* a, const T* b, int64_t width) {
  Sum<T> lanes[kLanes] = {};
  int64_t start = 0;
  for (; start + kLanes <= width; start += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      lanes[l] = fused(static_cast<Sum<T>>(a[start + l]), static_cast<Sum<T>>(b[start + l]), lanes[l]);
    }
  }
  for (int l = 0; start + l < width; ++l) {
    lanes[l] = fused(static_cast<Sum<T>>(a[start + l]), static_cast<Sum<T>>(b[start + l]), lanes[l]);
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
  }
  return lanes[0];
}

// The token's valid slots in ascending order, each with its k.
void order_slots(const int32_t* slots, int64_t topk, int64_t capacity,
                 std::vector<std::pair<int32_t, int32_t>>& out) {
  out.clear();
  for (int64_t k = 0; k < topk; ++k) {
    if (slots[k] >= 0 && slots[k] < capacity) out.emplace_back(slots[k], static_cast<int32_t>(k));
  }
  std::sort(out.begin(), out.end());
}

template <typename T>
void sum_slots(const SumSlotsArgs& args) {
  const T* rows = static_cast<const T*>(args.rows);
  const Sum<T>* weights = static_cast<const Sum<T>*>(args.weights);
  T* output = static_cast<T*>(args.output);
  const int64_t width = args.width;
  const int64_t bytes = (args.topk + 1) * width * static_cast<int64_t>(sizeof(T));
  at::parallel_for(0, args.tokens, rows_per_task(bytes), [&](int64_t begin, int64_t end) {
    std::vector<std::pair<int32_t, int32_t>> slots;
    Sum<T> sum[kSumBlock];
    for (int64_t n = begin; n < end; ++n) {
      order_slots(args.slot + n * args.topk, args.topk, args.capacity, slots);
      for (int64_t start = 0; start < width; start += kSumBlock) {
        const int64_t count = std::min(kSumBlock, width - start);
        std::fill_n(sum, count, Sum<T>(0));
        for (const auto& [s, k] : slots) {
          const T* row = rows + s * width + start;
          if (weights) {
            add_scaled_row<T>(sum, row, weights[n * args.topk + k], count);
          } else {
            add_row<T>(sum, row, count);
          }
        }
        store_row<T>(output + n * width + start, sum, count);
      }
    }
  });
}

template <typename T>
void gather_scaled_rows(const GatherScaledRowsArgs& args) {
  const T* rows = static_cast<const T*>(args.rows);
  const Sum<T>* weights = static_cast<const Sum<T>*>(args.weights);
  T* output = static_cast<T*>(args.output);
  const int64_t width = args.width;
  const int64_t bytes = 2 * width * static_cast<int64_t>(sizeof(T));
  at::parallel_for(0, args.capacity, rows_per_task(bytes), [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const int64_t n = args.source[s];
      const bool found = n >= 0 && n < args.tokens;
      const int64_t k = found ? find_slot(args.slot + n * args.topk, args.topk, s) : -1;
      if (k >= 0) {
        scale_row<T>(output + s * width, rows + n * width, weights[n * args.topk + k], width);
      } else {
        std::fill_n(output + s * width, width, T(0));
      }
    }
  });
}

template <typename T>
void dot_slots(const DotSlotsArgs& args) {
  const T* rows = static_cast<const T*>(args.rows);
  const T* grad = static_cast<const T*>(args.grad);
  const int64_t width = args.width;
  const int64_t bytes = 2 * width * static_cast<int64_t>(sizeof(T));
  at::parallel_for(0, args.tokens * args.topk, rows_per_task(bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t s = args.slot[i];
      const bool found = s >= 0 && s < args.capacity;
      static_cast<Sum<T>*>(args.output)[i] =
          found ? dot_rows<T>(rows + s * width, grad + i / args.topk * width, width) : Sum<T>(0);
    }
  });
}

template <typename T>
void weights_to_slots(const WeightsToSlotsArgs& args) {
  const T* weights = static_cast<const T*>(args.weights);
  T* output = static_cast<T*>(args.output);
  for (int64_t s = 0; s < args.capacity; ++s) {
    const int64_t n = args.source[s];
    const bool found = n >= 0 && n < args.tokens;
    const int64_t k = found ? find_slot(args.slot + n * args.topk, args.topk, s) : -1;
    output[s] = k >= 0 ? weights[n * args.topk + k] : T(0);
  }
}

}  // namespace

void gather_rows_cpu(const GatherRowsArgs& args) {
  const char* rows = static_cast<const char*>(args.rows);
  char* output = static_cast<char*>(args.output);
  const int64_t bytes = args.row_bytes;
  if (bytes == 0) return;
  at::parallel_for(0, args.written_rows(), rows_per_task(2 * bytes), [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const int64_t n = args.source[s];
      if (n >= 0 && n < args.tokens) {
        std::memcpy(output + s * bytes, rows + n * bytes, bytes);
      } else {
        std::memset(output + s * bytes, 0, bytes);
      }
    }
  });
}

void gather_scaled_rows_cpu(const GatherScaledRowsArgs& args) {
  visit_real(args.dtype, [&](auto element) { gather_scaled_rows<decltype(element)>(args); });
}

void sum_slots_cpu(const SumSlotsArgs& args) {
  visit_real(args.dtype, [&](auto element) { sum_slots<decltype(element)>(args); });
}

void dot_slots_cpu(const DotSlotsArgs& args) {
  visit_real(args.dtype, [&](auto element) { dot_slots<decltype(element)>(args); });
}

void weights_to_slots_cpu(const WeightsToSlotsArgs& args) {
  return args.is_float64 ? weights_to_slots<double>(args) : weights_to_slots<float>(args);
}

}  // namespace transformer_plugin::routing
