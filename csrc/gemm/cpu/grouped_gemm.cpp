// Grouped GEMM on a CPU: one GEMM of torch for each group.
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "common/autograd.h"
#include "common/tensor.h"
#include "gemm/args/gemm_problem.h"
#include "gemm/generic/dense_gemm.h"
#include "gemm/generic/matmul_cpu.h"
#include "quantize/ops/dequantize.h"

namespace transformer_plugin::gemm {
namespace {

using at::Tensor;

// A matrix that BLAS can read; an expanded gradient (stride 0) is copied once instead of once per group.
Tensor readable_rows(const Tensor& matrix) {
  const bool dense = matrix.stride(1) == 1 && matrix.stride(0) >= matrix.size(1);
  return dense ? matrix : matrix.contiguous();
}

// For bfloat16 oneDNN compiles a kernel for every new size, which takes longer than a GEMM of a few hundred
// rows, and group sizes change in every step. So groups of more rows are padded to multiples of this or, for
// large groups, of a fraction of their size.
constexpr int64_t kRowStep = 64;

bool compiles_for_each_size(const Tensor& operand, int64_t rows) {
  return operand.scalar_type() == at::kBFloat16 && rows > kRowStep;
}

int64_t up_to_steps(int64_t rows) {
  const int64_t step = rows > 32 * kRowStep ? kRowStep : rows > 16 * kRowStep ? kRowStep / 2 : kRowStep / 4;
  return (rows + step - 1) / step * step;
}

// Copying this many elements takes as long as compiling a kernel.
constexpr int64_t kLongCopy = int64_t{1} << 19;

// The group's rows padded with zeros to `more` rows.
Tensor with_zeros(const Tensor& matrix, int64_t begin, int64_t rows, int64_t more) {
  const Tensor group = matrix.narrow(0, begin, rows);
  if (more == rows) return group;
  const Tensor padded = empty(matrix, {more, matrix.size(1)}, matrix.scalar_type());
  padded.narrow(0, 0, rows).copy_(group);
  padded.narrow(0, rows, more - rows).zero_();
  return padded;
}

// The longest row that a matrix unit reads at once: 32 elements with AMX. oneDNN reads past the end of a row
// and multiplies by zeros, which gives NaN if the next row begins with NaN; rows that are multiples of this
// are safe.
constexpr int64_t kLongestStep = 32;

// Calls multiply(rows of the result, rows of `a`) until the group's `rows` from `begin` on are done. If
// `alone`, in one GEMM that may have more rows than the group: the next group overwrites them; after the last
// group, rows before it are used and restored. The size depends on the group alone, because GEMMs of other
// sizes may round sums in another order.
template <typename Multiply>
void multiply_in_steps(const Tensor& a, const Tensor& out, int64_t begin, int64_t rows, bool alone,
                       Multiply&& multiply) {
  const int64_t rest = compiles_for_each_size(a, rows) ? rows % kRowStep : 0;
  if (rest == 0) return multiply(out.narrow(0, begin, rows), a.narrow(0, begin, rows));
  if (!alone) {
    multiply(out.narrow(0, begin, rows - rest), a.narrow(0, begin, rows - rest));
    return multiply(out.narrow(0, begin + rows - rest, rest), a.narrow(0, begin + rows - rest, rest));
  }
  const int64_t more = up_to_steps(rows);
  const int64_t first = begin + rows - more;  // after the last group
  const bool has_room = begin + more <= out.size(0), keeps_apart = a.size(1) % kLongestStep == 0;
  if (!has_room && keeps_apart && first >= 0) {
    Tensor before = out.narrow(0, first, more - rows);
    const Tensor kept = before.clone();
    multiply(out.narrow(0, first, more), a.narrow(0, first, more));
    before.copy_(kept);
    return;
  }
  const Tensor part = has_room && keeps_apart ? a.narrow(0, begin, more) : with_zeros(a, begin, rows, more);
  if (has_room) return multiply(out.narrow(0, begin, more), part);
  const Tensor result = empty(out, {more, out.size(1)}, out.scalar_type());
  multiply(result, part);
  out.narrow(0, begin, rows).copy_(result.narrow(0, 0, rows));
}

// A float32 matrix of more elements than this does not fit the cache of a core, and MKL on one thread is then
// much slower than with blocks that fit. The blocks below were measured on an Intel CPU with AVX-512
// (docs/notes/experiments.md).
constexpr int64_t kLargeMatrix = int64_t{1} << 19;
constexpr int64_t kPart = int64_t{1} << 17, kPartOfColumns = 2 * kPart;

// The number of rows of a block, for rows of this many elements; at least `least`.
int64_t lines_of_part(int64_t part, int64_t line, int64_t least) { return std::max(least, part / line); }

// On one thread with column-major `b`: blocks of its columns, for few rows.
void multiply_columns(const Tensor& out, const std::optional<Tensor>& plus, const Tensor& a,
                      const Tensor& b) {
  constexpr int64_t kMostRows = 32;
  const int64_t columns = b.size(1);
  const int64_t part = a.size(0) <= kMostRows ? lines_of_part(kPartOfColumns, b.size(0), 256) : columns;
  for (int64_t at = 0; at < columns; at += part) {
    const int64_t count = std::min(part, columns - at);
    const auto own = plus ? std::optional<Tensor>(plus->narrow(-1, at, count)) : std::nullopt;
    matmul_cpu_out(out.narrow(1, at, count), own, a, b.narrow(1, at, count));
  }
}
// With row-major `b`: blocks of K, as large as this many rows of 1024, fewer for fewer rows. Rows of up to
// 512 elements, and one or two rows, are faster without blocks.
void multiply_terms(const Tensor& out, const std::optional<Tensor>& plus, const Tensor& a, const Tensor& b) {
  constexpr int64_t kFewRows = 2, kMostRows = 128, kShortLine = 512;
  const int64_t rows = a.size(0), terms = a.size(1), line = b.size(1);
  const bool whole = rows <= kFewRows || rows > kMostRows || line <= kShortLine;
  const int64_t least = rows <= 32 ? 32 : rows <= 48 ? 64 : 128;
  const int64_t part = whole ? terms : lines_of_part(1024 * least, line, least);
  for (int64_t at = 0; at < terms; at += part) {
    const int64_t count = std::min(part, terms - at);
    matmul_cpu_out(out, at == 0 ? plus : std::optional<Tensor>(out), a.narrow(1, at, count),
                   b.narrow(0, at, count));
  }
}
// With column-major `a`, as in weight gradients: blocks of the output's rows.
void multiply_rows(const Tensor& out, bool accumulate, const Tensor& a, const Tensor& b) {
  constexpr int64_t kFewTerms = 40;
  const int64_t rows = out.size(0);
  const int64_t part = a.size(1) > kFewTerms ? lines_of_part(kPart, out.size(1), 128) : rows;
  for (int64_t at = 0; at < rows; at += part) {
    const int64_t count = std::min(part, rows - at);
    const Tensor own = out.narrow(0, at, count);
    matmul_cpu_out(own, accumulate ? std::optional<Tensor>(own) : std::nullopt, a.narrow(0, at, count), b);
  }
}
bool is_large(const Tensor& matrix) {
  return matrix.scalar_type() == at::kFloat && matrix.numel() > kLargeMatrix;
}

// From this many multiplications on, one GEMM of torch keeps all threads busy.
constexpr int64_t kLongProduct = int64_t{1} << 28;
// From this many on, a thread is worthwhile.
constexpr int64_t kLeastWork = int64_t{1} << 19;
// The fixed cost of a group, in rows: reading, writing or dequantizing its matrix.
constexpr int64_t kRowsOfMatrix = 16, kRowsOfCodes = 64;
// With more threads than this, 32 groups are enough.
constexpr int64_t kThreads = 16;

// The state of a thread.
struct Worker {
  bool alone;      // no other thread works, so torch may use all threads for a GEMM
  Tensor scratch;  // undefined at first
};

// Calls multiply(group, worker) for every group: large GEMMs one after the other with all threads, also those
// that would take one thread longer than all the rest; then the others, longest first, each on one thread. A
// row costs `row`; `more` is the fixed cost of a group in rows.
template <typename Multiply>
void for_each_group(const Tensor& offsets, int64_t row, int64_t more, const Multiply& multiply) {
  struct Group {
    int64_t index, cost;
  };
  const int32_t* begins = offsets.const_data_ptr<int32_t>();
  std::vector<Group> order;
  int64_t cost = 0;  // of the groups from `shorter` on
  for (int64_t g = 0; g + 1 < offsets.size(0); ++g) {
    const int64_t rows = begins[g + 1] - begins[g];
    order.push_back({g, rows == 0 ? 0 : (rows + more) * row});
    cost += order.back().cost;
  }
  const auto end = order.end();
  std::stable_sort(order.begin(), end, [](const Group& a, const Group& b) { return a.cost > b.cost; });
  const int64_t threads = at::get_num_threads(), shares = 2 * std::min(threads, kThreads);
  auto shorter = order.begin();
  for (; shorter != end && shorter->cost > std::min(kLongProduct, cost / shares); ++shorter) {
    cost -= shorter->cost;
  }
  std::sort(order.begin(), shorter, [](const Group& a, const Group& b) { return a.index < b.index; });
  {
    Worker worker{true, {}};
    for (auto group = order.begin(); group != shorter; ++group) multiply(group->index, worker);
  }
  std::atomic<int64_t> next = 0;
  const int64_t left = end - shorter;
  const int64_t workers = std::min({threads, left, cost / kLeastWork + 1});
  at::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    const BelowAutograd guard;  // not inherited from the calling thread
    Worker worker{false, {}};
    for (int64_t i = next++; i < left; i = next++) multiply(shorter[i].index, worker);
  });
}

// The values of a group's quantized matrix.
void dequantize_of_group(const GemmProblem& problem, int64_t group, const Tensor& values) {
  const Quantized& b = problem.b;
  if (problem.list.empty()) {
    return quantize::dequantize_matrix(b.data, b.scale, as_optional(b.amax), b.format, group, values);
  }
  const Tensor data = problem.list[group].unsqueeze(0), &scale = problem.list_scales[group];
  const bool one_scale = b.format.family == FormatFamily::kFp8Tensor;
  std::optional<Tensor> amax;
  if (b.format.is_nv()) amax = problem.list_scales[problem.groups() + group];
  if (amax && b.format.row_scaled) amax = amax->unsqueeze(0);
  quantize::dequantize_matrix(data, one_scale ? scale : scale.unsqueeze(0), amax, b.format, 0, values);
}

bool is_converted(const GemmProblem& problem) {
  return problem.b.data.scalar_type() != problem.a.data.scalar_type();
}

// A group's matrix of b, dequantized or converted to the dtype of a where it is not plain.
Tensor matrix_of(const GemmProblem& problem, int64_t group, Worker& worker) {
  const auto stored = [&] {
    return problem.list.empty() ? problem.b.data.select(0, group) : problem.list[group];
  };
  if (!is_converted(problem)) return stored();
  if (!worker.scratch.defined()) {
    worker.scratch =
        empty(problem.a.data, {problem.b.rows(), problem.b.row_length()}, problem.a.data.scalar_type());
  }
  if (problem.b.format.is_quantized()) {
    dequantize_of_group(problem, group, worker.scratch);
  } else {
    worker.scratch.copy_(stored());
  }
  return worker.scratch;
}

}  // namespace

void grouped_gemm_cpu(const GemmProblem& problem, const Tensor& out) {
  const Tensor a = readable_rows(problem.a.data);
  const at::ScalarType wide = sum_dtype(a.scalar_type()), dtype = out.scalar_type();
  // torch's GEMM rounds its FP32 sum once, after a bias of the same dtype.
  const bool same_dtype = dtype == a.scalar_type();
  const bool fused_bias = problem.bias && !problem.bias_scale && problem.bias->scalar_type() == dtype;
  const int32_t* offsets = problem.offsets.const_data_ptr<int32_t>();
  const int64_t groups = problem.groups();
  const bool transpose_b = problem.direction == GemmDirection::kFprop;
  const int64_t more = is_converted(problem) ? kRowsOfCodes : kRowsOfMatrix;
  for_each_group(problem.offsets, a.size(1) * out.size(1), more, [&](int64_t g, Worker& worker) {
    const int64_t begin = offsets[g], rows = offsets[g + 1] - begin;
    if (rows == 0) return;
    Tensor out_g = out.narrow(0, begin, rows);
    const Tensor stored = matrix_of(problem, g, worker);
    const Tensor a_g = a.narrow(0, begin, rows), b_g = transpose_b ? stored.t() : stored;
    const bool direct = same_dtype && !problem.alpha && !multiplies_in_float32(dtype);
    if (direct && (fused_bias || !problem.bias || dtype == wide)) {
      const auto bias = fused_bias ? std::optional<Tensor>(problem.bias->select(0, g)) : std::nullopt;
      multiply_in_steps(a, out, begin, rows, worker.alone, [&](Tensor target, const Tensor& part) {
        const bool in_parts = !worker.alone && is_large(b_g);
        (!in_parts     ? matmul_cpu_out
         : transpose_b ? multiply_columns
                       : multiply_terms)(target, bias, part, b_g);
      });
    }
    const bool done = direct && (fused_bias || !problem.bias);
    if (done) return;
    Tensor sum = direct && dtype == wide ? out_g : wide_matmul_cpu(a_g, b_g);
    if (problem.alpha) sum.mul_(problem.alpha->select(0, g));
    if (problem.bias) {
      Tensor bias = problem.bias->select(0, g).to(wide).expand({rows, out.size(1)});
      if (problem.bias_scale) {
        sum.addcmul_(bias, problem.bias_scale->narrow(0, begin, rows).to(wide).unsqueeze(1));
      } else {
        sum.add_(bias);
      }
    }
    if (!sum.is_same(out_g)) out_g.copy_(sum);
  });
  if (problem.zero_tail) out.narrow(0, offsets[groups], a.size(0) - offsets[groups]).zero_();
}

void grouped_wgrad_cpu(const GemmProblem& problem, at::TensorList out) {
  const Tensor grad = readable_rows(problem.a.data), input = readable_rows(problem.b.data);
  const at::ScalarType wide = sum_dtype(grad.scalar_type());
  const bool accumulate = problem.accumulate;
  const int32_t* offsets = problem.offsets.const_data_ptr<int32_t>();
  const bool is_plain = !problem.alpha && !problem.beta;
  const int64_t row = grad.size(1) * input.size(1);
  for_each_group(problem.offsets, row, kRowsOfMatrix, [&](int64_t g, Worker& worker) {
    const int64_t begin = offsets[g], rows = offsets[g + 1] - begin;
    Tensor out_g = out[g];
    if (rows == 0 && !problem.beta) {
      if (!accumulate) out_g.zero_();
      return;
    }
    const Tensor grad_g = grad.narrow(0, begin, rows).t(), input_g = input.narrow(0, begin, rows);
    const auto multiply = [&](const Tensor& a, const Tensor& b) {
      if (!worker.alone && is_large(out_g)) return multiply_rows(out_g, accumulate, a, b);
      matmul_cpu_out(out_g, accumulate ? std::optional<Tensor>(out_g) : std::nullopt, a, b);
    };
    if (is_plain && out_g.scalar_type() == grad.scalar_type() && !multiplies_in_float32(grad.scalar_type())) {
      const bool copy =
          compiles_for_each_size(grad, rows) && rows * (grad.size(1) + input.size(1)) < kLongCopy;
      const int64_t more = copy ? up_to_steps(rows) : rows;
      multiply(with_zeros(grad, begin, rows, more).t(), with_zeros(input, begin, rows, more));
    } else if (is_plain && out_g.scalar_type() == wide && has_whole_tiles(grad.size(1), input.size(1))) {
      multiply(grad_g.to(wide), input_g.to(wide));
    } else {
      Tensor sum = wide_matmul_cpu(grad_g, input_g);
      if (problem.alpha && rows > 0) sum.mul_(problem.alpha->select(0, g));
      const float beta = problem.beta ? problem.beta->select(0, g).item<float>() : accumulate;
      if (beta != 0) sum.add_(out_g.to(wide), beta);
      out_g.copy_(sum);
    }
  });
}

}  // namespace transformer_plugin::gemm
