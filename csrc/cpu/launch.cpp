// The operators on CPU tensors: new memory, the scale, the sums of grad_weight, and which kernels the threads share.
#include "../launch.h"

#include <ATen/ops/empty_native.h>

#include <algorithm>
#include <cmath>

#include "../backend.h"
#include "../operators.h"
#include "huge_pages.h"
#include "isa.h"
#include "sharing.h"

namespace normops::cpu {
namespace {

HeldOrder order_of(const KernelArgs& args) { return {args.dtype(), args.cols, paired_columns(args.rotation)}; }

// What is held of a group in scale or partials.
char* of_group(const KernelArgs& args, const HeldOrder& order, void* held, int64_t group) {
  return static_cast<char*>(held) + group * order.held_cols() * size_of(compute_dtype(args.dtype()));
}

// Whether kernels can read the weight itself.
bool is_scale(const KernelArgs& args, const HeldOrder& order) {
  const Weight& weight = args.weight;
  return weight.data != nullptr && weight.offset == 0 && weight.dtype == args.dtype() &&
         compute_dtype(weight.dtype) == weight.dtype && order.is_natural();
}

// Computes the scale of a group, from `begin` to `end`.
void convert_scale(const KernelArgs& args, const HeldOrder& order, int64_t group, int64_t begin, int64_t end,
                   char* scale) noexcept {
  const DType dtype = args.dtype();
  const Weight& weight = args.weight;
  if (weight.data != nullptr) {
    const char* const data = static_cast<const char*>(weight.data) + group * args.cols * size_of(weight.dtype);
    order.each(begin, end, [&](int64_t column, int64_t held, int64_t count) {
      rms_norm_kernels().scale(dtype, weight.dtype, data + column * size_of(weight.dtype), weight.offset,
                               scale + held * size_of(compute_dtype(dtype)), count);
    });
  } else if (compute_dtype(dtype) == DType::float64) {
    std::fill_n(reinterpret_cast<double*>(scale) + begin, end - begin, 1.0);
  } else {
    std::fill_n(reinterpret_cast<float*>(scale) + begin, end - begin, 1.0f);
  }
}

// Computes grad_weight or grad_bias of a group, from `begin` to `end`: the sum of its partials of all chunks, which are
// so many groups apart.
void add_partials(const KernelArgs& args, const HeldOrder& order, TensorIndex gradient, int64_t group, int64_t begin,
                  int64_t end, const char* partials, int64_t chunks, int64_t groups) noexcept {
  const auto& [data, dtype, layout] = args[gradient];
  char* const sum = static_cast<char*>(data) + group * args.cols * size_of(dtype);
  order.each(begin, end, [&](int64_t column, int64_t held, int64_t count) {
    rms_norm_backward_kernels().grad_weight(args.dtype(), dtype, partials + held * size_of(compute_dtype(args.dtype())),
                                            chunks, groups * order.held_cols(), sum + column * size_of(dtype), count);
  });
}

// weight + weight_offset as the kernels read it, or ones without a weight: the weight itself, where it is just that, or
// converted: by the threads together where it is long, and otherwise by each for itself, which is quicker than to fetch
// lines that another core has just written (8 x 4096 bfloat16, 2 threads of a Xeon: 5.5 us instead of 9.5).
class Scale {
 public:
  explicit Scale(const KernelArgs& args)
      : args_(args),
        order_(order_of(args)),
        conversion_(conversion()),
        shared_(args.dtype(), conversion_ == Conversion::together ? count() : 0) {
    if (conversion_ != Conversion::together) return;
    parallel_for_columns(
        args.weight.groups, order_.held_cols(), kGrainElements,
        [&](int64_t group, int64_t begin, int64_t end) noexcept { convert(shared_.data(), group, begin, end); });
  }

  // The numbers that a thread needs for itself, and the scale, which may be in its memory for them.
  int64_t own_count() const { return conversion_ == Conversion::each ? count() : 0; }
  const void* in(Scratch& own) const noexcept {
    if (conversion_ == Conversion::none) return args_.weight.data;
    if (conversion_ == Conversion::together) return shared_.data();
    for (int64_t group = 0; group < args_.weight.groups; group++) convert(own.data(), group, 0, order_.held_cols());
    return own.data();
  }

 private:
  enum class Conversion { none, together, each };

  Conversion conversion() const {
    if (args_.sums == Sums::wanted && !args_.has(kGradOutput)) return Conversion::none;  // nobody reads it
    if (is_scale(args_, order_)) return Conversion::none;
    return args_.weight.groups * args_.cols > kGrainElements ? Conversion::together : Conversion::each;
  }

  int64_t count() const { return args_.weight.groups * order_.held_cols(); }

  void convert(void* scale, int64_t group, int64_t begin, int64_t end) const noexcept {
    convert_scale(args_, order_, group, begin, end, of_group(args_, order_, scale, group));
  }

  const KernelArgs& args_;
  HeldOrder order_;
  Conversion conversion_;
  OwnScratch shared_;
};

// grad_weight is summed, for each group of the weight, within chunks of rows and then over the chunks. Chunks of about
// sqrt(rows) keep both sums, hence the bound on their rounding error, shortest; and as they depend on the number of
// rows alone, so do the bits of the result.
int64_t grad_weight_chunk_rows(int64_t rows) {
  constexpr int64_t kMultiple = 4;  // the kernel's row group
  const auto root = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(rows))));
  return (root + kMultiple - 1) / kMultiple * kMultiple;
}

// The partials of grad_weight or grad_bias, if that is wanted, and their sum over the chunks. What has no memory has
// none here, before a gradient is written over an input.
class PartialSums {
 public:
  PartialSums(const KernelArgs& args, TensorIndex gradient, int64_t rows_per_chunk)
      : args_(args),
        gradient_(gradient),
        order_(order_of(args)),
        chunks_(chunk_count(args.rows / args.weight.groups, rows_per_chunk)),
        partials_(args.dtype(), args.has(gradient) ? chunks_ * args.weight.groups * order_.held_cols() : 0) {}

  void* data() { return args_.has(gradient_) ? partials_.data() : nullptr; }

  void finish() {
    if (!args_.has(gradient_)) return;
    const int64_t groups = args_.weight.groups;
    parallel_for_columns(groups, order_.held_cols(), grain(chunks_),
                         [&](int64_t group, int64_t begin, int64_t end) noexcept {
                           const char* const partials = of_group(args_, order_, partials_.data(), group);
                           add_partials(args_, order_, gradient_, group, begin, end, partials, chunks_, groups);
                         });
  }

 private:
  const KernelArgs& args_;
  TensorIndex gradient_;
  HeldOrder order_;
  int64_t chunks_;
  OwnScratch partials_;
};

// Whether so many tensors of the input's size fill the caches, so that nobody would find an output there.
bool fill_caches(const KernelArgs& args, int64_t tensors) {
  // Not sysconf(_SC_LEVEL3_CACHE_SIZE): in virtual machines it may name ten times what there is.
  constexpr int64_t kCacheBytes = int64_t{32} << 20;
  return args.rows * args.cols * size_of(args[kInput].dtype) * tensors > kCacheBytes;
}

void run(const ForwardKernels& kernels, const KernelArgs& args) {
  run_forward(kernels, {args, fill_caches(args, 2)}, Scale(args));
}

// What a thread holds of a backward whose weight has many groups of few rows: the scales and sums of a few at a time,
// as those of all are as large as the input.
class FewGroups {
 public:
  explicit FewGroups(const KernelArgs& args)
      : order_(order_of(args)), most_(std::max<int64_t>(1, kNumbers / order_.held_cols())) {}

  bool serve(const KernelArgs& args, int64_t rows_per_chunk) const {
    return args.weight.groups > most_ && args.rows / args.weight.groups <= rows_per_chunk &&
           !shares_rows(args.rows, args.cols);
  }

  int64_t own_count() const { return 3 * most_ * order_.held_cols(); }
  const void* in(Scratch& own) const noexcept { return own.data(); }

  // Of groups [begin, end), with args.scale in the thread's memory.
  void run(const BackwardKernels& kernels, CpuArgs args, int64_t begin, int64_t end) const noexcept {
    void* const scale = const_cast<void*>(args.scale);
    char* const partials[] = {of_group(args, order_, scale, most_), of_group(args, order_, scale, 2 * most_)};
    if (args.has(kGradWeight)) args.grad_weight_partials = partials[0];
    if (args.has(kGradBias)) args.grad_bias_partials = partials[1];
    for (; begin < end; begin = args.first_group + most_) {
      args.first_group = begin;
      const int64_t count = std::min(most_, end - begin), cols = order_.held_cols();
      if (is_scale(args, order_)) {
        args.scale = of_group(args, order_, const_cast<void*>(args.weight.data), begin);
      } else {
        for (int64_t i = 0; i < count; i++) {
          convert_scale(args, order_, begin + i, 0, cols, of_group(args, order_, scale, i));
        }
      }
      kernels.rows(args, begin, begin + count);
      for (const TensorIndex gradient : {kGradWeight, kGradBias}) {
        if (!args.has(gradient)) continue;
        for (int64_t i = 0; i < count; i++) {
          add_partials(args, order_, gradient, begin + i, 0, cols,
                       of_group(args, order_, partials[gradient == kGradBias], i), 1, 1);
        }
      }
    }
  }

 private:
  static constexpr int64_t kNumbers = 32768;  // of each, fewer than a second-level cache has room for

  HeldOrder order_;
  int64_t most_;
};

void run(const BackwardKernels& kernels, KernelArgs& args) {
  const int64_t groups = args.weight.groups, rows_per_chunk = grad_weight_chunk_rows(args.rows / groups);
  const bool stream = fill_caches(args, args.has(kGate) ? 5 : 3);
  if (const FewGroups few(args); few.serve(args, rows_per_chunk)) {
    share_out({args, stream, rows_per_chunk}, few, groups, grain(args.rows / groups * args.cols),
              [&](const CpuArgs& args, int64_t begin, int64_t end) noexcept { few.run(kernels, args, begin, end); });
    return;
  }
  const Scale scale(args);
  PartialSums of_weight(args, kGradWeight, rows_per_chunk), of_bias(args, kGradBias, rows_per_chunk);
  args.grad_weight_partials = of_weight.data();
  args.grad_bias_partials = of_bias.data();
  run_backward(kernels, {args, stream, rows_per_chunk}, scale);
  of_weight.finish();
  of_bias.finish();
}

const ForwardKernels& kernels_of(const RmsNorm&) { return rms_norm_kernels().forward; }
const ForwardKernels& kernels_of(const RmsNormStats&) { return rms_norm_kernels().forward; }
const ForwardKernels& kernels_of(const RmsNormFromStats&) { return rms_norm_kernels().forward; }
const ForwardKernels& kernels_of(const AddRmsNorm&) { return add_rms_norm_kernels(); }
const ForwardKernels& kernels_of(const GatedRmsNorm&) { return gated_rms_norm_kernels(); }
const ForwardKernels& kernels_of(const RmsNormRope&) { return rms_norm_rope_kernels(); }
const BackwardKernels& kernels_of(const RmsNormBackward&) { return rms_norm_backward_kernels().backward; }
const BackwardKernels& kernels_of(const RmsNormBackwardStats&) { return rms_norm_backward_kernels().backward; }
const BackwardKernels& kernels_of(const RmsNormBackwardFromStats&) { return rms_norm_backward_kernels().backward; }
const BackwardKernels& kernels_of(const GatedRmsNormBackward&) { return gated_rms_norm_backward_kernels(); }
const BackwardKernels& kernels_of(const RmsNormRopeBackward&) { return rms_norm_rope_backward_kernels(); }

// What the operator templates need of a backend.
struct CpuBackend {
  static bool serves(const RmsNorm&) { return true; }
  // Sums over rows go by the groups of the weight.
  static bool serves(const RmsNormBackward& arguments) {
    const auto& [grad_output, input, norm, grad_residual, bias, wanted] = arguments;
    if (!arguments.uses_bias()) return true;
    if (bias->numel() == input.numel() && bias->dim() > static_cast<int64_t>(norm.dims())) return false;
    return !is_given(norm.weight) || norm.weight->sizes() == bias->sizes();
  }
  struct Guard {
    explicit Guard(c10::Device) {}
  };

  static Tensor empty_contiguous(const OutputLike& like) {
    Tensor tensor = at::native::empty_cpu(like.sizes(), like.scalar_type());
    advise_huge_pages(tensor.mutable_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
    return tensor;
  }

  template <class Operator>
  static void launch(const Operator& arguments, const Written<Operator>& outputs) {
    constexpr bool kIsBackward = Operator::kTensors[0] == kGradOutput;
    Call call(arguments, outputs, RowLayout::kMaxDims, /*by_groups=*/kIsBackward);
    run(kernels_of(arguments), call);
    call.finish();
  }
};

}  // namespace

// If there are kernels to launch: without, CPU tensors get the composite as other devices do.
TORCH_LIBRARY_IMPL(normops, CPU, m) {
  if (has_kernels()) register_all<BackendKernels<CpuBackend>>(m, Operators());
}

}  // namespace normops::cpu
