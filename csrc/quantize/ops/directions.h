// The directions that an op quantizes in, and its results: a list of rowwise data, rowwise scale, columnwise
// data, columnwise scale, without those of a direction that is not requested.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace transformer_plugin::quantize {

struct Directions {
  bool rowwise;
  bool columnwise;  // the data is returned transposed
};

struct Outputs {
  at::Tensor data, scale, data_t, scale_t;  // undefined in a direction that is not requested
};

using Tensors = std::vector<at::Tensor>;

// Appends the tensors of the requested directions.
inline void append_outputs(Outputs&& outputs, Tensors& list) {
  if (outputs.data.defined()) {
    list.push_back(std::move(outputs.data));
    list.push_back(std::move(outputs.scale));
  }
  if (outputs.data_t.defined()) {
    list.push_back(std::move(outputs.data_t));
    list.push_back(std::move(outputs.scale_t));
  }
}

inline Tensors as_list(Outputs&& outputs) {
  Tensors list;
  list.reserve(5);  // some ops append one more result
  append_outputs(std::move(outputs), list);
  return list;
}

// The reverse; `list` may hold more.
inline Outputs outputs_of(at::TensorList list, const Directions& directions) {
  Outputs outputs;
  size_t next = 0;
  if (directions.rowwise) {
    outputs.data = list[next++];
    outputs.scale = list[next++];
  }
  if (directions.columnwise) {
    outputs.data_t = list[next++];
    outputs.scale_t = list[next];
  }
  return outputs;
}

}  // namespace transformer_plugin::quantize
