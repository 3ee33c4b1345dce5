// delayed_scale and update_delayed_scale_: the next scales of delayed scaling.
#include "quantize/args/update_delayed_scale.h"

#include <ATen/ops/amax.h>

#include <cmath>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "common/autograd.h"
#include "common/buffers.h"
#include "common/ops/quantize.h"
#include "common/register.h"
#include "common/tensor.h"
#include "distributed/rank_group.h"
#include "quantize/ops/scaled.h"

namespace transformer_plugin::quantize {
namespace {

using at::Tensor;

constexpr int64_t kMaxMargin = 100;  // largest * 2^-margin stays a normal float32

// Where ranks wait for each other's amaxes, and what they compare before.
constexpr distributed::Phase kPhases[] = {{300, "update_delayed_scale_", "amax"}};
const distributed::PhaseRegistration registration(kPhases);
constexpr distributed::Field kFields[] = {{1, "tensors", distributed::FieldKind::kNumber}};

struct DelayedScaleCall {
  const char* op;
  const Tensor& history;
  const Tensor& scale;
  const Tensor& amax;
  at::ArrayRef<std::string> formats;
  int64_t margin;
  c10::string_view algorithm;
  c10::string_view group = {};  // name of the c10d group whose ranks use the same scales; empty for none
};

void check_state(const Argument& argument, int64_t dim, const Argument& history) {
  check_dtype(argument, {at::kFloat});
  check_dim(argument, dim);
  check_same_device(argument, history);
  check_contiguous(argument);
}

void check_arguments(const DelayedScaleCall& call) {
  const Argument history{call.op, "history", call.history};
  const Argument scale{call.op, "scale", call.scale}, amax{call.op, "amax", call.amax};
  check_state(history, 2, history);
  check_state(scale, 1, history);
  check_state(amax, 1, history);
  TP_CHECK_VALUE(call.history.sym_size(0) > 0, call.op, "history", "at least 1 row", describe(call.history),
                 "Make it of zeros, a row for each step to remember");
  check_size(scale, 0, call.history.sym_size(1), "the columns of 'history'");
  check_size(amax, 0, call.history.sym_size(1), "the columns of 'history'");
  const int64_t formats = static_cast<int64_t>(call.formats.size());
  TP_CHECK_VALUE(formats > 0 && formats <= kMaxScaleFormats && call.scale.sym_size(0) % formats == 0, call.op,
                 "formats", "1 to " << kMaxScaleFormats << " keys, each for as many of the tensors in a row",
                 formats << " for " << call.scale.sym_size(0) << " tensors", "Split the call");
  for (const std::string& key : call.formats) delayed_scaling_format(call.op, "formats", key);
  TP_CHECK_VALUE(-kMaxMargin <= call.margin && call.margin <= kMaxMargin, call.op, "margin",
                 "a number from -" << kMaxMargin << " to " << kMaxMargin, call.margin,
                 "It divides the scale by 2^margin; 0 is usual");
  TP_CHECK_VALUE(call.algorithm == "max" || call.algorithm == "most_recent", call.op, "algorithm",
                 "'max' or 'most_recent'", "'" << call.algorithm << "'", "Choose one of them");
}

void check_state_written(const DelayedScaleCall& call) {
  check_arguments(call);
  check_written({call.op, "history", call.history});
  check_written({call.op, "scale", call.scale});
  check_written({call.op, "amax", call.amax});
}

Tensor meta(const DelayedScaleCall& call, bool write) {
  write ? check_state_written(call) : check_arguments(call);
  return empty(call.scale, call.scale.sym_sizes(), at::kFloat);
}

// The maximum over all ranks of a group; a NaN of any rank stays one. Below autograd, because the tensor's version must not
// change.
void reduce_amax(const char* op, const Tensor& amax, const std::string& name) {
  bool exists = true;
  try {
    c10d::resolve_process_group(name);
  } catch (const std::exception&) {
    exists = false;
  }
  TP_CHECK_VALUE(exists, op, "group", "the name of a c10d process group of this process, or \"\"",
                 "'" << name << "'", "Pass group.group_name, and do not use a group after it is destroyed");
  distributed::RankGroup group(op, name, -1, amax);
  if (group.size() == 1) return;
  group.begin_call(distributed::Call(kPhases[0], kFields).set(kFields[0], amax.numel(), "amax"), 1);
  const BelowAutograd guard;
  amax.copy_(group.collectives().all_gather(amax.view({1, amax.numel()}), kPhases[0]).wait().amax(0));
}

Tensor run(const DelayedScaleCall& call, bool write) {
  if (write) {
    check_state_written(call);
    check_apart(call.op, {{"history", call.history}, {"scale", call.scale}, {"amax", call.amax}}, {});
    if (runs_in_backward()) return call.scale.clone();
    if (!call.group.empty()) reduce_amax(call.op, call.amax, std::string(call.group));
  } else {
    check_arguments(call);
  }
  const Tensor next = empty(call.scale, call.scale.sym_sizes(), at::kFloat);
  const int64_t tensors = call.scale.numel();
  if (tensors == 0) return next;
  // Without `write` these tensors are only read.
  DelayedScaleArgs args{const_cast<float*>(call.history.const_data_ptr<float>()),
                        const_cast<float*>(call.scale.const_data_ptr<float>()),
                        const_cast<float*>(call.amax.const_data_ptr<float>()),
                        next.mutable_data_ptr<float>(),
                        call.history.size(0),
                        tensors,
                        tensors / static_cast<int64_t>(call.formats.size()),
                        {},
                        call.algorithm == "most_recent",
                        write};
  for (size_t i = 0; i < call.formats.size(); ++i) {
    const float largest = delayed_scaling_format(call.op, "formats", call.formats[i]).max();
    args.largest[i] = std::ldexp(largest, static_cast<int>(-call.margin));
  }
  if (call.scale.is_cpu()) {
    update_delayed_scale_cpu(args);
    return next;
  }
#ifdef TRANSFORMER_PLUGIN_CUDA
  const CudaScope scope(call.scale);
  launch_update_delayed_scale(args, scope.stream());
#endif
  return next;
}

using Keys = std::vector<std::string>;

template <Tensor (*run_op)(const DelayedScaleCall&, bool)>
Tensor delayed_scale(const Tensor& history, const Tensor& scale, const Tensor& amax, const Keys& formats,
                     int64_t margin, std::string_view algorithm) {
  return run_op({"delayed_scale", history, scale, amax, formats, margin, algorithm}, false);
}

template <Tensor (*run_op)(const DelayedScaleCall&, bool)>
Tensor update_delayed_scale(const Tensor& history, const Tensor& scale, const Tensor& amax,
                            const Keys& formats, int64_t margin, std::string_view algorithm,
                            std::string_view group) {
  return run_op({"update_delayed_scale_", history, scale, amax, formats, margin, algorithm, group}, true);
}

}  // namespace

TP_IMPL_NO_GRADIENT(delayed_scale, delayed_scale<run>, delayed_scale<meta>);
TP_IMPL_NO_GRADIENT(update_delayed_scale_, update_delayed_scale<run>, update_delayed_scale<meta>);

}  // namespace transformer_plugin::quantize
