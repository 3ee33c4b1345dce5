// The tables of group sizes that the ops of one node share.
//
// Each op over groups computes the first rows of the groups, or the row tiles, from `group_sizes` with a small
// kernel. The ops that one forward or one backward of a layer calls get the same sizes, so the first of them
// computes a table and the others read it. The ops are called through the dispatcher, so the tables are not
// arguments: they belong to the thread, as long as a SharedOffsets exists.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace transformer_plugin {

enum class GroupTable {
  kOffsets,                 // group_offsets()
  kRowTiles,                // quantize::group_tables(), each group for itself, and the tail
  kRowTilesOfGroups,        // the same without the tail
  kMergedRowTiles,          // the same, all groups as one, and the tail
  kMergedRowTilesOfGroups,  // the same without the tail
};

// Lives on the stack of a node's forward or backward. Of nested ones the innermost counts. A table is found
// only for the same tensor of sizes with the same memory and version, by the thread that made it, on the
// stream that it was made on; the stream's order then is the order of its writes and reads. The sizes of a
// node do not change while it runs. A tracer's tensors get no tables, because no kernel runs.
class SharedOffsets {
 public:
  // Without sizes it only hides what an outer one shares. `with_tail`: whether some of the ops zero the tail; the others
  // then read the tables of those.
  explicit SharedOffsets(const at::Tensor& group_sizes, bool with_tail = true);
  ~SharedOffsets();
  SharedOffsets(const SharedOffsets&) = delete;
  SharedOffsets& operator=(const SharedOffsets&) = delete;

  // Whether ops that are called now with these sizes share tables.
  static bool are_for(const at::Tensor& group_sizes);
  // Whether they share tables with the tail.
  static bool are_with_tail(const at::Tensor& group_sizes);
  // The table for a buffer of `rows` rows; undefined if there is none.
  static at::Tensor find(GroupTable kind, const at::Tensor& group_sizes, int64_t rows);
  // Keeps a table, which nobody writes any more, if are_for(group_sizes).
  static void keep(GroupTable kind, const at::Tensor& group_sizes, int64_t rows, const at::Tensor& table);

 private:
  // All that a table depends on, besides the tensor of sizes.
  struct Key {
    GroupTable kind;
    int64_t rows;
    const void* sizes;
    int64_t version;
    void* stream;

    bool operator==(const Key& other) const;
  };
  struct Entry {
    Key key;
    at::Tensor table;
  };
  static Key key_of(GroupTable kind, const at::Tensor& group_sizes, int64_t rows);

  const at::Tensor group_sizes_;
  const bool with_tail_;
  SharedOffsets* const outer_;
  c10::SmallVector<Entry, 3> entries_;
};

}  // namespace transformer_plugin
