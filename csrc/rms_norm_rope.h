// The operators rms_norm_rope and rms_norm_rope_backward.
#pragma once
#include "operator.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

// Selects the rotated columns and their pairs: i and i + half, or, if interleaved, 2 * i and 2 * i + 1.
struct Rope {
  bool interleaved;
  std::optional<int64_t> rotary_dim;  // by default, all columns, as many as cos has
  int64_t rotary_offset;

  auto members() const { return std::tie(interleaved, rotary_dim, rotary_offset); }
};

// Returns the number of rotated columns. cos and sin have as many columns, or one for each pair.
inline c10::SymInt rotary_columns(const Tensor& cos, const Rope& rope) {
  return rope.rotary_dim.has_value() ? c10::SymInt(*rope.rotary_dim) : cos.sym_size(-1);
}

void check_rope(const char* op, const Tensor& input, const Tensor& cos, const Tensor& sin, const Norm& norm,
                const Rope& rope);

struct RmsNormRope {
  static constexpr const char *kName = "rms_norm_rope", *kInplaceName = "rms_norm_rope_";
  static constexpr size_t kOutputs = 1;
  static constexpr TensorIndex kTensors[] = {kInput, kCos, kSin, kWeight, kOutput};

  const Tensor& input;
  const Tensor& cos;
  const Tensor& sin;
  Norm norm;
  Rope rope;

  auto members() const { return std::tie(input, cos, sin, norm, rope); }
  void check(const char* op) const {
    check_norm(op, input, norm);
    check_rope(op, input, cos, sin, norm, rope);
  }
  Like<RmsNormRope> like() const { return {&input}; }
};

struct RmsNormRopeBackward {
  static constexpr const char *kName = "rms_norm_rope_backward", *kInplaceName = nullptr;
  static constexpr size_t kOutputs = 2;
  static constexpr TensorIndex kTensors[] = {kGradOutput, kInput, kCos, kSin, kWeight, kGradInput, kGradWeight};

  const Tensor& grad_output;
  const Tensor& input;
  const Tensor& cos;
  const Tensor& sin;
  Norm norm;
  Rope rope;
  std::array<bool, kOutputs> output_mask;

  auto members() const { return std::tie(grad_output, input, cos, sin, norm, rope, output_mask); }
  void check(const char* op) const {
    check_norm(op, input, norm);
    check_rope(op, input, cos, sin, norm, rope);
    check_like_input(op, "grad_output", grad_output, input);
  }
  Like<RmsNormRopeBackward> like() const {
    return {&defined_if(output_mask[0], input), &defined_if(output_mask[1], value_or_undefined(norm.weight))};
  }
};

Tensor composite(const RmsNormRope& arguments);
std::tuple<Tensor, Tensor> composite(const RmsNormRopeBackward& arguments);

}  // namespace normops
#pragma GCC visibility pop
