// Gathers of weights that are sharded over ranks, begun before they are needed.
//
// The weights of a model are used in the same order in each step. So each group remembers which weight was used after which
// two, and while the product of one weight runs, the next one is gathered on a side stream. What was gathered early is used
// only if it is what an own gather would give now: the same weight and direction, unchanged since, on the same stream. If not,
// it is dropped and the weight is gathered again. So the order of use decides about time and never about values.
//
// Every rank must decide alike, because a gather needs all of them. Decisions depend only on the calls a program makes, on the
// versions that torch counts, and on announced changes (invalidate_prefetched): never on time, addresses or values. Whether a
// weight still exists is not among them, as ranks collect garbage at different times. So a weight is gathered early only after
// one of its own param group, and the weights of a param group exist together.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "common/format.h"
#include "distributed/pending_collectives.h"
#include "distributed/rank_group.h"
#include "sharded/buffer_layout.h"
#include "sharded/weight_shard.h"

namespace transformer_plugin::sharded {

using distributed::PendingCollectives;
using distributed::SideStream;
using distributed::StreamContext;

// What is gathered: the tensors of one direction of a weight.
struct Gather {
  std::vector<at::Tensor> shards;  // of this rank: data, scales, amaxes
  Format format;
  bool columnwise;
  bool backward;  // what for
  WeightShard shard;
  bool is_list = false;  // the shards are those of several matrices, of values without a format
};

// The unsharded tensors; memory that is freed only after the work that writes it.
struct Gathered {
  std::vector<at::Tensor> unsharded;  // of a list one stack of its matrices
  std::vector<at::Tensor> received;   // undefined where a tensor is not gathered
  at::Tensor stack = {};              // of a list: in which `received` lie
};

struct GatherCounts {
  int64_t gathers = 0;  // collectives
  int64_t early = 0;    // of them begun early
  int64_t hits = 0;     // uses of those
  int64_t dropped = 0;  // early gathers that were not used
  int64_t bytes_sent = 0;
};

// A change of weights that versions do not show, such as a step of a fused optimizer: nothing gathered before it is used.
void invalidate_prefetched();

class GatherCache {
 public:
  explicit GatherCache(PendingCollectives& pending) : pending_(pending) {}
  // `distance`: how many weights ahead; 0: none. `in_graphs`: also while a CUDA graph is captured, which must then contain the
  // use of every weight that is gathered early, as it does if it holds a whole step.
  void configure(int64_t distance, bool in_graphs);
  // The unsharded tensors of a weight, which the caller owns.
  std::vector<at::Tensor> take(Gather gather);
  // The boundaries of what is captured in graphs of its own. In a capture weights are gathered early between the two only, and
  // none that was used after the second one before. What is left there is waited for, because a capture must join its streams.
  void enter_region(const StreamContext& context);
  void leave_region(const StreamContext& context);
  // Frees what was gathered early, and forgets the order.
  void clear();
  GatherCounts counts() const;

 private:
  // A tensor without a reference to its memory.
  struct ShardRef {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    c10::VariableVersion version;
    std::vector<int64_t> sizes;
    int64_t offset;
    at::ScalarType dtype;

    explicit ShardRef(const at::Tensor& local);
    bool refers_to(const at::Tensor& local) const;
    at::Tensor lock(c10::Device device) const;  // undefined if the memory is gone
  };
  struct Source {
    std::vector<ShardRef> shards;
    Format format;
    bool columnwise, backward;
    WeightShard shard;
    bool is_list;
    std::vector<BufferLayout> layouts = {};  // once they were needed
  };
  struct Early {
    int64_t number;  // in `pending_`
    int64_t stamp;
    StreamContext context;
    int64_t due;  // the number of the use for which it was gathered
  };
  using Pair = std::pair<int64_t, int64_t>;

  int64_t identify(const Gather& gather);
  int64_t stamp_of(const Source& source) const;
  Gathered prepare(const Gather& gather, std::vector<BufferLayout>& layouts) const;
  void collect(const Gather& gather, const std::vector<BufferLayout>& layouts, Gathered& into);
  void drop(int64_t id);
  void forget(int64_t id);
  void note_use(int64_t id);
  int64_t after(const Pair& pair) const;  // what was used after the two; -1: nothing is known
  void gather_ahead(int64_t id, c10::Device device, const StreamContext& context);
  void forget_dead_sources();

  mutable std::mutex mutex_;
  PendingCollectives& pending_;
  int64_t distance_ = 1;
  bool in_graphs_ = false;
  std::map<std::pair<const void*, bool>, int64_t> ids_;  // of the data of a shard, and of its direction
  std::map<int64_t, Source> sources_;
  // By param group, name, direction and sizes, where there is a name.
  std::map<std::tuple<int64_t, std::string, bool, std::vector<int64_t>>, int64_t> named_;
  std::map<int64_t, Early> early_;
  std::map<Pair, int64_t> next_;  // what was used after the two, and after the second of them
  int64_t last_ = -1, last_but_one_ = -1;
  uint64_t region_ = 0;  // the capture in which a region was entered and not left; 0: none
  int64_t sources_made_ = 0, uses_ = 0;
  SideStream stream_;
  GatherCounts counts_;
};

}  // namespace transformer_plugin::sharded
