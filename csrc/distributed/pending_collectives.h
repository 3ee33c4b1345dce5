// The collectives of a group that ops have started on a side stream and whose results are not used yet: one registry for all
// families of ops.
//
// It keeps the tensors of each until the current stream has waited for it. They were allocated on that stream: memory that is
// freed earlier could be given to its next kernel while the collective still uses it.
//
// A stream that is captured in a CUDA graph can wait only for what was started in the same capture, another stream only for what
// was started in none. What is discarded where no stream can wait for it is kept until no graph is captured.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "distributed/side_stream.h"

namespace transformer_plugin::distributed {

struct StartedCollective {
  const void* owner;  // the object that started it, which alone finds it by its work tensor
  const char* op;
  std::vector<at::Tensor> operands;  // what it reads, and memory that it uses meanwhile
  std::vector<at::Tensor> outputs;
  StreamEvent done;
  StreamContext context;  // where it was started
};

class PendingCollectives {
 public:
  struct Found {
    int64_t number;
    StartedCollective collective;
  };

  // Returns its number, by which the other functions know it. `work`: a tensor that the op returns, and that the op which uses
  // the result is given; undefined: none. When the work tensor is freed, the collective counts as discarded.
  int64_t add(StartedCollective collective, const at::Tensor& work = {});
  // That with this work tensor, or with another tensor in the same memory.
  std::optional<Found> find(const void* owner, const at::Tensor& work) const;

  // Of a number that is not in the registry any more, these do nothing.
  // The current stream waits. The operands are freed, the outputs stay.
  void wait(int64_t number);
  // The outputs, without a wait.
  std::vector<at::Tensor> take(int64_t number);
  // Both.
  std::vector<at::Tensor> finish(int64_t number);
  // Nobody will use the result. The current stream waits, if it can, and the tensors are freed.
  void discard(int64_t number);
  // The same for what was discarded and could not be freed. `here`: the context of the current stream.
  void free_discarded(const StreamContext& here);

 private:
  struct Entry {
    StartedCollective collective;
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> work;
    bool discarded = false;

    bool is_discarded() const { return discarded || (work && work->expired()); }
    // Whether the tensors can be freed, after a wait if one is needed.
    bool wait_at(const StreamContext& here) const;
  };

  mutable std::mutex mutex_;  // not held while tensors are freed
  std::map<int64_t, Entry> entries_;
  int64_t count_ = 0;
};

}  // namespace transformer_plugin::distributed
