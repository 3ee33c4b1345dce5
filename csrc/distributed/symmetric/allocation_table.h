// The addresses of symmetric memory in which callers have tensors, as kernels read them, without torch: [kMostAllocations, ranks], at
// [number - 1][rank] where allocation `number` of a rank is in this process.
#pragma once

namespace transformer_plugin::distributed {

inline constexpr int kMostAllocations = 64;

}  // namespace transformer_plugin::distributed
