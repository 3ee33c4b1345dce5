// Tables and checks of group sizes, and layouts (quantize/ops/group_tables.h).
#include "quantize/ops/group_tables.h"

#include "common/autograd.h"
#include "common/group_offsets.h"
#include "common/shared_offsets.h"
#include "common/tensor.h"

namespace transformer_plugin::quantize {
namespace {

void check_multiples(const int32_t* offsets, int64_t groups, int64_t multiple, const char* op) {
  for (int64_t g = 0; g < groups; ++g) {
    const int32_t size = offsets[g + 1] - offsets[g];
    TP_CHECK_VALUE(size % multiple == 0, op, "group_sizes",
                   "sizes that are multiples of " << multiple << ", the block of nvfp4 in transposed data",
                   size << " for group " << g, "Pad the rows of each group with zeros");
  }
}

GroupTable table_kind(bool merged, bool with_tail) {
  if (merged) return with_tail ? GroupTable::kMergedRowTiles : GroupTable::kMergedRowTilesOfGroups;
  return with_tail ? GroupTable::kRowTiles : GroupTable::kRowTilesOfGroups;
}

}  // namespace

at::Tensor GroupTables::offset_tensor() const {
  const BelowAutograd guard;
  return storage.narrow(0, offsets - storage.const_data_ptr<int32_t>(), groups + 1);
}

int64_t group_multiple(const Format& format, bool transposed) {
  return format.is_nv() && transposed ? kNvBlock : 1;
}

void check_group_values(const Argument& data, const at::Tensor& group_sizes, int64_t multiple) {
  if (has_memory(data.tensor)) check_group_values_of(data, data.tensor.size(0), group_sizes, multiple);
}

void check_group_values_of(const Argument& data, int64_t rows, const at::Tensor& group_sizes,
                           int64_t multiple) {
  if (!has_memory(data.tensor) || !has_memory(group_sizes)) return;
  if (data.tensor.is_cuda()) check_earlier_sizes(data.op);
  if (!data.tensor.is_cpu()) return;
  const HostOffsets offsets = host_offsets({data.op, "group_sizes", group_sizes}, data, rows);
  check_multiples(offsets.data(), group_sizes.numel(), multiple, data.op);
}

GroupUse group_use(const Format& format, bool transposed) {
  const bool scale_per_group =
      format.family == FormatFamily::kFp8Tensor || (format.is_nv() && !format.row_scaled);
  return transposed || scale_per_group ? GroupUse::kEach : GroupUse::kAll;
}

GroupTables group_tables(const Argument& data, const at::Tensor* group_sizes, int64_t rows, int64_t multiple,
                         GroupUse use, bool zero_tail) {
  if (!group_sizes) return {};
  const Argument sizes{data.op, "group_sizes", *group_sizes};
  const bool merged = use == GroupUse::kAll;
  const bool with_tail = zero_tail || SharedOffsets::are_with_tail(*group_sizes);
  const int64_t given_groups = group_sizes->numel(), groups = merged ? 1 : given_groups;
  const bool row_strips = !merged && data.tensor.is_cuda();
  const int64_t words = Layout::row_tiles(rows, groups) * (sizeof(RowTile) / sizeof(int32_t));
  const int64_t strip_words =
      row_strips ? Layout::row_strip_count(rows) * static_cast<int64_t>(sizeof(RowStrip) / sizeof(int32_t))
                 : 0;
  const GroupTable kind = table_kind(merged, with_tail);
  at::Tensor storage = SharedOffsets::find(kind, *group_sizes, rows);
  const bool is_filled = storage.defined();
  if (!is_filled) storage = empty(data.tensor, {words + strip_words + 2 * (groups + 1)}, at::kInt);
  int32_t* begin = storage.mutable_data_ptr<int32_t>();
  const RowTables tables{groups,
                         rows,
                         reinterpret_cast<RowTile*>(begin),
                         begin + words + strip_words,
                         merged,
                         row_strips ? reinterpret_cast<RowStrip*>(begin + words) : nullptr,
                         with_tail};
  if (data.tensor.is_cpu()) {
    const HostOffsets offsets = host_offsets(sizes, data, rows);
    check_multiples(offsets.data(), given_groups, multiple, data.op);
    if (!is_filled) row_tiles_cpu(offsets.data(), given_groups, tables);
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  if (data.tensor.is_cuda()) {
    const DeviceSizes device = device_sizes(sizes, data, rows);
    const CudaScope scope(data.tensor);
    if (!is_filled) {
      launch_row_tiles(device.sizes, device.is_int64, given_groups, tables, device.word, scope.stream());
    }
  }
#endif
  GroupTables result{storage, groups, tables.offsets, tables.row_strips, with_tail};
  if (!is_filled && SharedOffsets::are_for(*group_sizes)) {
    SharedOffsets::keep(kind, *group_sizes, rows, storage);
    // Those of the groups are what group_offsets() computes.
    if (!merged) SharedOffsets::keep(GroupTable::kOffsets, *group_sizes, rows, result.offset_tensor());
  }
  return result;
}

Layout make_layout(const MatrixShape& shape, const Format& format, const GroupTables& tables) {
  const bool grouped = tables.storage.defined();
  return {shape.matrices ? shape.matrices->expect_int() : 1,
          shape.rows.expect_int(),
          shape.cols.expect_int(),
          tables.groups,
          grouped ? reinterpret_cast<const RowTile*>(tables.storage.const_data_ptr<int32_t>()) : nullptr,
          scale_granularity(format),
          format.square_blocks,
          format.tiled_scales,
          format.aligned_groups ? nullptr : tables.row_strips,
          grouped && format.aligned_groups,
          tables.with_tail};
}

}  // namespace transformer_plugin::quantize
