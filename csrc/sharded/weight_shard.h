// A weight whose first dimension is sharded over the ranks of a group, as the ops of layers take it: `weight` is then this rank's
// shard, and a key says how it is sharded:
//
//   rows=<n>           rows of the unsharded weight [n, K]; of a stack [n, N, K] its matrices
//   ranks=<n>          size of the group
//   list               of every matrix [n, K] of a grouped weight the rows are sharded, and the shards are a list
//   mean               the gradient is the mean over the ranks; otherwise their sum
//   reduce_dtype=bf16  gradients travel in bfloat16 also where they are added to float32; the sums are in float32
//   async              gradients are in `weight.grad` or in `main_grad` at the end of the backward, and not before
//   timeout_ms=<n>     for waits on other ranks; default: the timeout of the group
//   param_group=<n>    the weights that are used together, as those of a model; of weights without one, none is gathered early
//   handle=<n>         another runtime gathers the weight and takes its gradient (sharded/external_weight.h); not in a c10d group
//   name=<name>        of the parameter, for errors; without a comma
//   group=<name>       name of the c10d group; it is last, because it may have any characters
//
// in this order, with commas between: "rows=28672,ranks=4,mean,group=0". "" is a weight that is not sharded. Every rank has
// ceil(rows / ranks) rows or more; those past the last row of the unsharded weight are zeros.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "distributed/collective_label.h"

namespace transformer_plugin::sharded {

// A key, parsed. An op parses its key once, where it is called; what it calls takes the result.
struct WeightShard {
  std::string key = {};  // for ops that take the key
  int64_t rows = 0;
  int64_t ranks = 0;  // 0: the weight is not sharded
  bool is_list = false;
  bool mean = false;
  bool reduce_in_bfloat16 = false;
  bool asynchronous = false;
  int64_t timeout_ms = -1;
  int64_t param_group = 0;  // 0: none
  int64_t handle = 0;       // 0: none
  std::string name = {};
  std::string group = {};

  bool is_sharded() const { return ranks > 0; }
  bool is_external() const { return handle > 0; }
  // Runs `exchange`, whose errors then say which weight they are about.
  template <typename Exchange>
  void run(Exchange&& exchange) const {
    const std::string about = name.empty() ? "" : "The weight is '" + name + "'.";
    const distributed::CollectiveLabel label(about);
    try {
      std::forward<Exchange>(exchange)();
    } catch (c10::Error& error) {
      if (!about.empty()) error.add_context(about);
      throw;
    }
  }
};

// A weight that is not sharded.
inline const WeightShard kUnsharded;

// Raises a four-part ValueError if `key` is not one.
WeightShard parse_weight_shard(const char* op, std::string_view key);

}  // namespace transformer_plugin::sharded
