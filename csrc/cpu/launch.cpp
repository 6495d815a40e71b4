// The operators on CPU tensors: allocates outputs, and runs the kernels on PyTorch's threads.
#include "../tensor_args.h"

#include <ATen/ops/empty_native.h>

#include "../backend.h"
#include "../operators.h"
#include "huge_pages.h"
#include "isa.h"
#include "parameters.h"
#include "sharing.h"

namespace normops::cpu {
namespace {

// Returns whether `elements` of a dtype exceed the caches, so that an output would be evicted before it is read.
bool exceeds_cache(int64_t elements, DType dtype) {
  // A constant, as sysconf(_SC_LEVEL3_CACHE_SIZE) may report ten times the actual size in virtual machines.
  constexpr int64_t kCacheBytes = int64_t{32} << 20;
  return elements * size_of(dtype) > kCacheBytes;
}

bool exceeds_cache(const KernelArgs& args, int64_t tensors) {
  return exceeds_cache(args.rows * args.cols * tensors, args[kInput].dtype);
}

void run(ForwardKernel kernel, const KernelArgs& args) {
  run_forward(kernel, {args, exceeds_cache(args, 2)}, Scale(args, args.weight.groups));
}

void run(BackwardKernel kernel, const KernelArgs& args) {
  run_backward(kernel, {args, exceeds_cache(args, args.has(kGate) ? 5 : 3)});
}

ForwardKernel kernel_of(const RmsNorm&) { return rms_norm_kernels().forward; }
ForwardKernel kernel_of(const RmsNormStats&) { return rms_norm_kernels().forward; }
ForwardKernel kernel_of(const RmsNormFromStats&) { return rms_norm_kernels().forward; }
ForwardKernel kernel_of(const AddRmsNorm&) { return add_rms_norm_kernel(); }
ForwardKernel kernel_of(const GatedRmsNorm&) { return gated_rms_norm_kernel(); }
ForwardKernel kernel_of(const RmsNormRope&) { return rms_norm_rope_kernel(); }
BackwardKernel kernel_of(const RmsNormBackward&) { return rms_norm_backward_kernels().backward; }
BackwardKernel kernel_of(const RmsNormBackwardStats&) { return rms_norm_backward_kernels().backward; }
BackwardKernel kernel_of(const RmsNormBackwardFromStats&) { return rms_norm_backward_kernels().backward; }
BackwardKernel kernel_of(const GatedRmsNormBackward&) { return gated_rms_norm_backward_kernel(); }
BackwardKernel kernel_of(const RmsNormRopeBackward&) { return rms_norm_rope_backward_kernel(); }

// Returns whether the kernels of channels support these arguments. Contiguous channels, or channels with few positions,
// are normalized as rows instead.
template <class Operator>
bool has_channel_kernels(const Operator& arguments) {
  constexpr int64_t kLeastPositions = 8;
  const auto& [input, norm, dim] = std::tie(arguments.input, arguments.norm, arguments.dim);
  const auto is_of_channels = [](const OptionalTensor& parameter) {
    return !is_given(parameter) || (parameter->dim() == 1 && parameter->scalar_type() != at::kDouble);
  };
  const bool has_dtype =
      input.scalar_type() == at::kFloat || (input.scalar_type() == at::kBFloat16 && norm.rounding == kRoundOnce);
  return has_dtype && is_of_channels(norm.weight) && is_of_channels(arguments.bias) &&
         c10::multiply_integers(input.sizes().slice(input.dim() + dim + 1)) >= kLeastPositions &&
         input.stride(dim) != 1;
}

// The arguments of the kernels of channels, with the bias in float32.
class ChannelArgs : public CpuArgs {
 public:
  // `tensors` are as large as the input.
  ChannelArgs(const TensorArgs& args, int64_t tensors)
      : CpuArgs{args, exceeds_cache(args.rows * args.cols * tensors, args.channels.dtype), &args.channels},
        bias_(DType::float32, args.has(kBias) ? args.cols : 0) {
    if (!args.has(kBias)) return;
    rms_norm_kernels().scale(DType::float32, args[kBias].dtype, args[kBias].data, -0.0, bias_.data(), args.cols);
    channel_bias = static_cast<const float*>(bias_.data());
  }

 private:
  OwnScratch bias_;
};

// The backend of the operator templates, see backend.h.
struct CpuBackend {
  static bool supports(const RmsNorm&) { return true; }
  // Kernels sum over rows per group of the weight.
  static bool supports(const RmsNormBackward& arguments) {
    const auto& [grad_output, input, norm, grad_residual, bias, wanted] = arguments;
    if (!arguments.uses_bias()) return true;
    if (bias->numel() == input.numel() && bias->dim() > static_cast<int64_t>(norm.dims())) return false;
    return !is_given(norm.weight) || norm.weight->sizes() == bias->sizes();
  }
  static bool supports(const ChannelRmsNorm& arguments) { return has_channel_kernels(arguments); }
  static bool supports(const ChannelRmsNormBackward& arguments) { return has_channel_kernels(arguments); }
  struct Guard {
    explicit Guard(c10::Device) {}
  };

  static Tensor empty_contiguous(const OutputSpec& like) {
    Tensor tensor = at::native::empty_cpu(like.sizes(), like.scalar_type());
    advise_huge_pages(tensor.mutable_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
    return tensor;
  }

  template <class Operator>
  static void launch(const Operator& arguments, const OutputPtrs<Operator>& outputs) {
    constexpr bool kIsBackward = Operator::kTensors[0] == kGradOutput;
    const TensorArgs args(arguments, outputs, {.by_groups = kIsBackward});
    run(kernel_of(arguments), args);
    args.finish();
  }
  static void launch(const ChannelRmsNorm& arguments, const OutputPtrs<ChannelRmsNorm>& outputs) {
    const TensorArgs args(arguments, outputs);
    run_forward(channel_rms_norm_kernels().forward, ChannelArgs(args, 2), Scale(args, 1));
    args.finish();
  }
  static void launch(const ChannelRmsNormBackward& arguments, const OutputPtrs<ChannelRmsNormBackward>& outputs) {
    const TensorArgs args(arguments, outputs);
    run_backward(channel_rms_norm_kernels().backward, ChannelArgs(args, 3));
    args.finish();
  }
};

}  // namespace

// Registers nothing without kernels: CPU tensors then use the composite, as other devices do.
TORCH_LIBRARY_IMPL(normops, CPU, m) {
  if (has_kernels()) register_all<BackendKernels<CpuBackend>>(m, Operators());
}

}  // namespace normops::cpu
