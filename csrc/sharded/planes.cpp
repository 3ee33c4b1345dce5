// Planes of a weight that is sharded over ranks (sharded/planes.h).
#include "sharded/planes.h"

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

Plane plane_of(const Format& format, bool columnwise, Kind kind, const MatrixShape& whole,
               const MatrixShape& part) {
  Plane plane{sizes_of(whole, format, columnwise, kind), sizes_of(part, format, columnwise, kind)};
  if (whole.matrices) {  // ranks have whole matrices
    plane.used = plane.part[0];
    plane.valid = plane.whole[0];
    return plane;
  }
  // The dimension that follows the rows, and how many rows it counts as one.
  MatrixShape many = part;
  many.rows = kManyRows;
  const Sizes sizes = sizes_of(many, format, columnwise, kind);
  const auto longest = std::max_element(sizes.begin(), sizes.end());
  plane.axis = longest - sizes.begin();
  if (*longest < kManyRows / kMostRowsOfAnEntry) plane.axis = -1;
  if (!plane.is_gathered()) return plane;
  plane.rows = kManyRows / *longest;
  plane.used = part.rows.guard_int(__FILE__, __LINE__) / plane.rows;
  plane.valid = (whole.rows.guard_int(__FILE__, __LINE__) + plane.rows - 1) / plane.rows;
  return plane;
}

// A tensor whose dtype every kernel of torch copies.
Tensor plain(const Tensor& tensor) { return tensor.element_size() == 1 ? tensor.view(at::kByte) : tensor; }

// Whether rows may be copied eight bytes at a time, eight times as fast as single ones.
bool has_words(const Plane& plane, const Tensor& gathered, int64_t rest) {
  constexpr int64_t kWord = 8;
  const int64_t lengths[] = {plane.part.back(), plane.whole.back(), plane.used, plane.valid, rest};
  return plane.axis == 1 && plane.part.size() == 2 && gathered.element_size() == 1 &&
         std::all_of(std::begin(lengths), std::end(lengths), [](int64_t n) { return n % kWord == 0; });
}

Plane in_words(Plane plane) {
  plane.part.back() /= 8;
  plane.whole.back() /= 8;
  plane.used /= 8;
  plane.valid /= 8;
  return plane;
}

}  // namespace

std::vector<Plane> planes_of(const Tensor& data, size_t count, const Format& format, bool columnwise,
                             int64_t rows, int64_t ranks) {
  const MatrixShape part = format.is_quantized() ? quantize::shape_of_data(data, format, columnwise, nullptr)
                                                 : quantize::matrix_shape(data, columnwise, nullptr);
  MatrixShape whole = part;
  (whole.matrices ? *whole.matrices : whole.rows) = rows;
  std::vector<Plane> planes;
  for (size_t i = 0; i < count; ++i) {
    planes.push_back(plane_of(format, columnwise, static_cast<Kind>(i), whole, part));
  }
  return planes;
}

void assemble(const Plane& plane, const Tensor& gathered, int64_t ranks, const Tensor& out) {
  if (has_words(plane, gathered, std::min(plane.valid, ranks * plane.used))) {
    return assemble(in_words(plane), gathered.view(at::kByte).view(at::kLong), ranks,
                    out.view(at::kByte).view(at::kLong));
  }
  const int64_t axis = plane.axis, length = plane.whole[static_cast<size_t>(axis)];
  Sizes sizes{ranks};
  sizes.insert(sizes.end(), plane.part.begin(), plane.part.end());
  const Tensor parts = plain(gathered).view(sizes).narrow(1 + axis, 0, plane.used), to = plain(out);
  const int64_t held = std::min(plane.valid, ranks * plane.used);
  if (held < length) to.narrow(axis, held, length - held).zero_();
  // Whole parts by one copy, then what is left of the next.
  const int64_t full = plane.used == 0 ? 0 : held / plane.used, rest = held - full * plane.used;
  if (full > 0) {
    const Tensor source = parts.narrow(0, 0, full);
    to.narrow(axis, 0, full * plane.used)
        .unflatten(axis, at::IntArrayRef{full, plane.used})
        .copy_(axis == 0 ? source : source.transpose(0, 1));
  }
  if (rest > 0) to.narrow(axis, full * plane.used, rest).copy_(parts[full].narrow(axis, 0, rest));
}

}  // namespace transformer_plugin::sharded
