// Layouts of a weight that is sharded over ranks (sharded/buffer_layout.h).
#include "sharded/buffer_layout.h"

#include <algorithm>

#include "quantize/ops/matrix_shape.h"

namespace transformer_plugin::sharded {
namespace {

using at::Tensor;
using quantize::MatrixShape;
using quantize::SymSizes;
using Sizes = std::vector<int64_t>;

// So many rows that sizes which follow them are theirs without rounding to blocks and tiles.
constexpr int64_t kManyRows = int64_t{1} << 50, kMostRowsOfAnEntry = 128;

Sizes as_ints(const SymSizes& sizes) {
  Sizes result;
  for (const c10::SymInt& size : sizes) result.push_back(size.guard_int(__FILE__, __LINE__));
  return result;
}

enum class Kind { kData, kScale, kAmax };

Sizes sizes_of(const MatrixShape& shape, const Format& format, bool columnwise, Kind kind) {
  if (!format.is_quantized()) return as_ints(shape.value_sizes());
  if (kind == Kind::kData) return as_ints(shape.data_sizes(format, columnwise));
  if (kind == Kind::kScale) return as_ints(shape.scale_sizes(format, columnwise));
  return as_ints(shape.amax_sizes(format, columnwise));
}

BufferLayout layout_of(const Format& format, bool columnwise, Kind kind, const MatrixShape& unsharded,
                       const MatrixShape& shard) {
  BufferLayout layout{sizes_of(unsharded, format, columnwise, kind),
                      sizes_of(shard, format, columnwise, kind)};
  if (unsharded.matrices) {  // the stack is sharded, and ranks have whole matrices
    layout.used = layout.shard[0];
    layout.valid = layout.unsharded[0];
    return layout;
  }
  // The dimension that follows the rows, and how many rows it counts as one.
  MatrixShape many = shard;
  many.rows = kManyRows;
  const Sizes sizes = sizes_of(many, format, columnwise, kind);
  const auto longest = std::max_element(sizes.begin(), sizes.end());
  layout.axis = longest - sizes.begin();
  if (*longest < kManyRows / kMostRowsOfAnEntry) layout.axis = -1;
  if (!layout.is_gathered()) return layout;
  layout.rows = kManyRows / *longest;
  layout.used = shard.rows.guard_int(__FILE__, __LINE__) / layout.rows;
  layout.valid = (unsharded.rows.guard_int(__FILE__, __LINE__) + layout.rows - 1) / layout.rows;
  return layout;
}

// A tensor whose dtype every kernel of torch copies.
Tensor plain(const Tensor& tensor) { return tensor.element_size() == 1 ? tensor.view(at::kByte) : tensor; }

// Whether rows may be copied eight bytes at a time, eight times as fast as single ones.
bool has_words(const BufferLayout& layout, const Tensor& gathered, int64_t rest) {
  constexpr int64_t kWord = 8;
  const int64_t lengths[] = {layout.shard.back(), layout.unsharded.back(), layout.used, layout.valid, rest};
  return layout.axis == 1 && layout.shard.size() == 2 && gathered.element_size() == 1 &&
         std::all_of(std::begin(lengths), std::end(lengths), [](int64_t n) { return n % kWord == 0; });
}

BufferLayout in_words(BufferLayout layout) {
  layout.shard.back() /= 8;
  layout.unsharded.back() /= 8;
  layout.used /= 8;
  layout.valid /= 8;
  return layout;
}

}  // namespace

std::vector<BufferLayout> buffer_layouts(const Tensor& data, size_t count, const Format& format,
                                         bool columnwise, int64_t rows, int64_t ranks) {
  const MatrixShape shard = format.is_quantized() ? quantize::shape_of_data(data, format, columnwise, nullptr)
                                                  : quantize::matrix_shape(data, columnwise, nullptr);
  MatrixShape unsharded = shard;
  (unsharded.matrices ? *unsharded.matrices : unsharded.rows) = rows;
  std::vector<BufferLayout> layouts;
  for (size_t i = 0; i < count; ++i) {
    layouts.push_back(layout_of(format, columnwise, static_cast<Kind>(i), unsharded, shard));
  }
  return layouts;
}

void assemble(const BufferLayout& layout, const Tensor& gathered, int64_t ranks, const Tensor& out) {
  if (has_words(layout, gathered, std::min(layout.valid, ranks * layout.used))) {
    return assemble(in_words(layout), gathered.view(at::kByte).view(at::kLong), ranks,
                    out.view(at::kByte).view(at::kLong));
  }
  const int64_t axis = layout.axis, length = layout.unsharded[static_cast<size_t>(axis)];
  Sizes sizes{ranks};
  sizes.insert(sizes.end(), layout.shard.begin(), layout.shard.end());
  const Tensor shards = plain(gathered).view(sizes).narrow(1 + axis, 0, layout.used), to = plain(out);
  const int64_t held = std::min(layout.valid, ranks * layout.used);
  if (held < length) to.narrow(axis, held, length - held).zero_();
  // Whole shards by one copy, then what is left of the next.
  const int64_t full = layout.used == 0 ? 0 : held / layout.used, rest = held - full * layout.used;
  if (full > 0) {
    const Tensor source = shards.narrow(0, 0, full);
    to.narrow(axis, 0, full * layout.used)
        .unflatten(axis, at::IntArrayRef{full, layout.used})
        .copy_(axis == 0 ? source : source.transpose(0, 1));
  }
  if (rest > 0) to.narrow(axis, full * layout.used, rest).copy_(shards[full].narrow(axis, 0, rest));
}

}  // namespace transformer_plugin::sharded
