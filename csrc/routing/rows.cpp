// Functions that copy and sum rows between tokens and slots (routing/rows.h).
#include "routing/rows.h"

#include <type_traits>

#include "common/tensor.h"
#include "routing/rows_args.h"

namespace transformer_plugin::routing {
namespace {

using at::Tensor;

const int32_t* map_data(const Tensor& map) { return map.numel() ? map.const_data_ptr<int32_t>() : nullptr; }

at::ScalarType weight_type(const Tensor& rows) {
  return rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Runs the CPU kernel, or the CUDA kernel on the current stream, depending on the device of `like`.
template <typename Args>
using Launch = std::type_identity_t<void (*)(const Args&, void*)>;

template <typename Args>
void run(const Tensor& like, const Args& args, void (*cpu)(const Args&),
         [[maybe_unused]] Launch<Args> launch) {
  if (like.is_cpu()) return cpu(args);
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(like);
  launch(args, scope.stream());
#endif
}

#ifdef TRANSFORMER_PLUGIN_CUDA
#define TP_BOTH(name) name##_cpu, launch_##name
#else
#define TP_BOTH(name) name##_cpu, nullptr
#endif

}  // namespace

Tensor gather_rows(const Tensor& rows, const Tensor& source, const std::optional<Tensor>& slot,
                   const std::optional<Tensor>& offsets) {
  const Tensor output = empty(rows, {source.size(0), rows.size(1)}, rows.scalar_type());
  gather_rows_out(rows, source, slot, output, offsets);
  return output;
}

void gather_rows_out(const Tensor& rows, const Tensor& source, const std::optional<Tensor>& slot,
                     const Tensor& output, const std::optional<Tensor>& offsets) {
  TORCH_INTERNAL_ASSERT(!slot || slot->size(0) == rows.size(0));
  const Tensor r = rows.contiguous();
  const Tensor s = source.contiguous();
  const Tensor m = slot ? slot->contiguous() : Tensor();
  const GatherRowsArgs args{r.const_data_ptr(),
                            map_data(s),
                            slot ? map_data(m) : nullptr,
                            output.mutable_data_ptr(),
                            r.size(0),
                            slot ? m.size(1) : 0,
                            s.size(0),
                            r.size(1) * static_cast<int64_t>(r.element_size()),
                            offsets ? offsets->const_data_ptr<int32_t>() + offsets->size(0) - 1 : nullptr};
  run(r, args, TP_BOTH(gather_rows));
}

Tensor gather_scaled_rows(const Tensor& rows, const Tensor& source, const Tensor& slot,
                          const Tensor& weights) {
  TORCH_INTERNAL_ASSERT(weights.scalar_type() == weight_type(rows));
  TORCH_INTERNAL_ASSERT(weights.sizes() == slot.sizes() && slot.size(0) == rows.size(0));
  const Tensor r = rows.contiguous();
  const Tensor s = source.contiguous();
  const Tensor m = slot.contiguous();
  const Tensor w = weights.contiguous();
  const Tensor output = empty(r, {s.size(0), r.size(1)}, r.scalar_type());
  const GatherScaledRowsArgs args{
      r.const_data_ptr(), map_data(s), map_data(m), w.const_data_ptr(), output.mutable_data_ptr(),
      r.size(0),          m.size(1),   s.size(0),   r.size(1),          to_dtype(r.scalar_type())};
  run(r, args, TP_BOTH(gather_scaled_rows));
  return output;
}

Tensor sum_slots(const Tensor& rows, const Tensor& slot, const std::optional<Tensor>& weights) {
  TORCH_INTERNAL_ASSERT(slot.size(1) <= kMaxTopk);
  TORCH_INTERNAL_ASSERT(!weights || weights->scalar_type() == weight_type(rows));
  TORCH_INTERNAL_ASSERT(!weights || weights->sizes() == slot.sizes());
  const Tensor r = rows.contiguous();
  const Tensor m = slot.contiguous();
  const Tensor w = weights ? weights->contiguous() : Tensor();
  const Tensor output = empty(r, {m.size(0), r.size(1)}, r.scalar_type());
  const SumSlotsArgs args{r.const_data_ptr(),
                          map_data(m),
                          weights ? w.const_data_ptr() : nullptr,
                          output.mutable_data_ptr(),
                          m.size(0),
                          m.size(1),
                          r.size(0),
                          r.size(1),
                          to_dtype(r.scalar_type())};
  run(r, args, TP_BOTH(sum_slots));
  return output;
}

Tensor dot_slots(const Tensor& rows, const Tensor& slot, const Tensor& grad) {
  TORCH_INTERNAL_ASSERT(grad.scalar_type() == rows.scalar_type() && grad.size(1) == rows.size(1));
  TORCH_INTERNAL_ASSERT(grad.size(0) == slot.size(0));
  const Tensor r = rows.contiguous();
  const Tensor m = slot.contiguous();
  const Tensor g = grad.contiguous();
  const Tensor output = empty(r, m.sym_sizes(), weight_type(rows));
  const DotSlotsArgs args{
      r.const_data_ptr(), map_data(m), g.const_data_ptr(), output.mutable_data_ptr(), m.size(0),
      m.size(1),          r.size(0),   r.size(1),          to_dtype(r.scalar_type())};
  run(r, args, TP_BOTH(dot_slots));
  return output;
}

Tensor weights_to_slots(const Tensor& weights, const Tensor& slot, const Tensor& source) {
  const Tensor output = empty(weights, {source.size(0)}, weights.scalar_type());
  weights_to_slots_out(weights, slot, source, output);
  return output;
}

void weights_to_slots_out(const Tensor& weights, const Tensor& slot, const Tensor& source,
                          const Tensor& output) {
  TORCH_INTERNAL_ASSERT(weights.sizes() == slot.sizes());
  const Tensor w = weights.contiguous();
  const Tensor m = slot.contiguous();
  const Tensor s = source.contiguous();
  const WeightsToSlotsArgs args{w.const_data_ptr(), map_data(m), map_data(s), output.mutable_data_ptr(),
                                m.size(0),          m.size(1),   s.size(0),   w.scalar_type() == at::kDouble};
  run(w, args, TP_BOTH(weights_to_slots));
}

Tensor weights_from_slots(const Tensor& values, const Tensor& slot) {
  return gather_rows(values.unsqueeze(1), slot.contiguous().view(-1)).view(slot.sizes());
}

}  // namespace transformer_plugin::routing
