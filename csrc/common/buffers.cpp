// Checks of buffers that ops write into (common/buffers.h).
#include "common/buffers.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <vector>

#include "common/autograd.h"

namespace transformer_plugin {

std::string entry(const char* name, size_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

void check_no_gradient(const Argument& argument, const char* advice) {
  const bool has_one = has_tangent(argument.tensor);
  TP_CHECK_VALUE(!has_one && !(at::GradMode::is_enabled() && argument.tensor.requires_grad()), argument.op,
                 argument.name,
                 (has_one ? "a tensor without a forward-mode tangent" : "a tensor with requires_grad=False"),
                 describe(argument.tensor)
                     << (has_one ? " with a forward-mode tangent" : " with requires_grad=True"),
                 advice);
}

void check_written(const Argument& buffer) {
  check_no_gradient(buffer,
                    "What is written into a buffer has none: detach it, or call under torch.no_grad()");
  const at::Tensor& tensor = buffer.tensor;
  TP_CHECK_VALUE(
      !tensor.is_neg() && !tensor.is_conj(), buffer.op, buffer.name,
      "a buffer whose numbers are those in its memory",
      describe(tensor) << ", a view that stands for their " << (tensor.is_neg() ? "negative" : "conjugate"),
      "Pass a separate buffer");
}

void check_written(const char* op, const char* name, at::TensorList out) {
  const auto is_plain = [](const at::Tensor& tensor) { return !tensor.is_neg() && !tensor.is_conj(); };
  if (!requires_grad(out) && !has_tangent(out) && std::all_of(out.begin(), out.end(), is_plain)) return;
  for (size_t i = 0; i < out.size(); ++i) check_written({op, entry(name, i).c_str(), out[i]});
}

namespace {

// From the first to the last element; empty for a tensor without elements.
struct Bytes {
  uintptr_t begin, end;
};

Bytes bytes_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  int64_t elements = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) elements += (tensor.size(d) - 1) * tensor.stride(d);
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return {begin, begin + static_cast<uintptr_t>(elements) * tensor.element_size()};
}

// Whether two matrices are different columns of one buffer.
bool side_by_side(const at::Tensor& x, const at::Tensor& y) {
  if (x.dim() != 2 || y.dim() != 2 || x.stride(1) != 1 || y.stride(1) != 1) return false;
  const uintptr_t x_size = x.element_size(), y_size = y.element_size();
  const uintptr_t stride = static_cast<uintptr_t>(x.stride(0)) * x_size;
  if (stride == 0 || stride != static_cast<uintptr_t>(y.stride(0)) * y_size) return false;
  const uintptr_t x_begin = bytes_of(x).begin, y_begin = bytes_of(y).begin;
  const uintptr_t later =
      y_begin >= x_begin ? (y_begin - x_begin) % stride : (stride - (x_begin - y_begin) % stride) % stride;
  return later >= x.size(1) * x_size && later + y.size(1) * y_size <= stride;
}

bool have_none_in_common(const Bytes& x, const Bytes& y) { return x.end <= y.begin || y.end <= x.begin; }

constexpr const char *kRead = "', which is read while it is written",
                     *kWritten = "', which is written at the same time";

[[noreturn]] void refuse(const char* op, const std::string& name, const at::Tensor& buffer,
                         const std::string& other, const char* what_becomes_of_it) {
  TP_CHECK_VALUE(false, op, name, "a buffer apart from '" << other << what_becomes_of_it,
                 describe(buffer) << " in the same memory", "Pass a separate buffer");
}

using Ranges = c10::SmallVector<Bytes, 8>;

Ranges ranges_of(std::initializer_list<Named> tensors) {
  Ranges ranges;
  for (const Named& own : tensors) ranges.push_back(own.tensor ? bytes_of(*own.tensor) : Bytes{0, 0});
  return ranges;
}

}  // namespace

void check_apart(const char* op, std::initializer_list<Named> written, std::initializer_list<Named> read) {
  const Ranges buffers = ranges_of(written), others = ranges_of(read);
  const auto check = [&](size_t i, const Bytes& bytes, const Named& other, const char* what_becomes_of_it) {
    if (have_none_in_common(buffers[i], bytes)) return;
    const Named& own = written.begin()[i];
    if (!side_by_side(*own.tensor, *other.tensor)) {
      refuse(op, own.name, *own.tensor, other.name, what_becomes_of_it);
    }
  };
  for (size_t i = 0; i < buffers.size(); ++i) {
    for (size_t j = 0; j < others.size(); ++j) check(i, others[j], read.begin()[j], kRead);
    for (size_t j = 0; j < i; ++j) check(i, buffers[j], written.begin()[j], kWritten);
  }
}

void check_apart(const char* op, const char* name, at::TensorList out, std::initializer_list<Named> read) {
  CallMemory memory(op);
  for (const Named& other : read) {
    if (other.tensor) memory.read(other.name, *other.tensor);
  }
  memory.written_entries(name, out);
  memory.check();
}

void CallMemory::add(const char* name, const at::Tensor& tensor, bool is_written, int64_t index) {
  if (tensor.defined()) uses_.push_back({name, index, &tensor, is_written});
}

void CallMemory::add(const char* name, const std::optional<at::TensorList>& tensors, bool is_written) {
  if (!tensors) return;
  if (tensors->size() == 1) return add(name, (*tensors)[0], is_written);
  for (size_t i = 0; i < tensors->size(); ++i) {
    add(name, (*tensors)[i], is_written, static_cast<int64_t>(i));
  }
}

void CallMemory::written_entries(const char* name, at::TensorList tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) add(name, tensors[i], true, static_cast<int64_t>(i));
}

void mark_written(const at::Tensor& out) {
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
}

void CallMemory::check() const {
  struct Place {
    Bytes bytes;
    const Use* use;
  };
  std::vector<Place> places;
  places.reserve(uses_.size());
  for (const Use& use : uses_) {
    if (!has_memory(*use.tensor)) return;
    places.push_back({bytes_of(*use.tensor), &use});
  }
  std::sort(places.begin(), places.end(),
            [](const Place& x, const Place& y) { return x.bytes.begin < y.bytes.begin; });
  // Only tensors that begin before another's end can overlap it.
  for (auto own = places.begin(); own != places.end(); ++own) {
    for (auto next = own + 1; next != places.end() && next->bytes.begin < own->bytes.end; ++next) {
      const Use *one = own->use, *other = next->use;
      if (!one->is_written && !other->is_written) continue;
      if (side_by_side(*one->tensor, *other->tensor)) continue;
      // The later of two buffers is named first, and a buffer before what is read.
      const bool both = one->is_written && other->is_written;
      if (both ? one < other : !one->is_written) std::swap(one, other);
      refuse(op_, one->text(), *one->tensor, other->text(), both ? kWritten : kRead);
    }
  }
}

}  // namespace transformer_plugin
