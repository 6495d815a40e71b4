// What kernels take, on every device, for every operator: raw pointers, to arguments that have been checked. No torch
// header. tests/structures.py reads the structs from this text.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace normops {

// Which results are rounded to the dtype of the output besides the last one. A backward rounds where autograd would,
// with tensors of that dtype: those results, where it forms them again, and their gradients.
struct Rounding {
  bool normalized;  // the normalized input, before it is multiplied by the weight
  bool multiplied;  // the product with the weight, before it is gated or rotated; alpha * input, before it is added

  constexpr bool any() const { return normalized || multiplied; }
};

// How gated_rms_norm gates.
enum class Activation : uint8_t { silu, sigmoid };

struct Gating {
  Activation activation;
  bool norm_before_gate;
};

// The dimensions before the normalized ones, outermost first, merged as far as their strides allow: of a contiguous
// tensor one is left, of a slice of a fused QKV projection two. Strides count bytes; an expanded dimension has stride
// 0.
struct RowLayout {
  static constexpr int kMaxDims = 8;
  int dims = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};
};

// The tensors of all operators, by their names in the schemas. An operator's page lists those that it has.
enum TensorIndex {
  kGradOutput,
  kInput,
  kResidual,
  kGate,
  kCos,
  kSin,
  kSquareSum,
  kDot,
  kWeight,
  kBias,
  kGradResidual,
  kOutput,
  kResidualOut,
  kGradInput,
  kGradGate,
  kGradWeight,
  kGradBias,
  kTensorCount
};
inline constexpr const char* kTensorNames[] = {"grad_output",   "input",      "residual",     "gate",       "cos",
                                               "sin",           "square_sum", "dot",          "weight",     "bias",
                                               "grad_residual", "output",     "residual_out", "grad_input", "grad_gate",
                                               "grad_weight",   "grad_bias"};
static_assert(sizeof kTensorNames / sizeof *kTensorNames == kTensorCount);

// The rows of a tensor. Of square_sum and dot these are numbers of the compute dtype, of weight and grad_weight all
// that they have. Rows of cos and sin, which lie alike, may be those of several heads.
struct RowsArg {
  void* data;  // of an input, only read
  DType dtype;
  RowLayout layout;
};

// Placeholder for an absent tensor.
inline constexpr RowsArg kNoRows = {nullptr, DType::float32, {1, {INT64_MAX}, {0}}};

// One row of the weight for each group: row r of the input is of group r % groups.
struct Weight {
  const void* data;  // dtype [groups, cols], or null for ones
  DType dtype;
  double offset;   // -0 in the place of 0, which would turn a -0 of data into 0
  int64_t groups;  // 1 without data
};

// Whether the sums over rows are computed and used, are an input, or are the only output.
enum class Sums : uint8_t { compute, input, output };

// How rows are rotated: the columns [offset, offset + 2 * pairs), of which i and i + pairs belong together, or, if they
// are interleaved, 2 * i and 2 * i + 1.
struct Rotation {
  bool interleaved;
  bool angle_of_pair;  // whether cos and sin have a column for each pair, or one for each column that is rotated
  int64_t offset;
  int64_t pairs;
};

// The dtypes of rows are that of the input, except that
//   residual and residual_out may be float32 beside one of 16 bits, as may cos and sin
//   grad_output may have 16 bits beside float32
//   gate and grad_gate may have 16 bits beside float32, or the other way round
// Rows of the outputs may be rows of the inputs: each element is read before it is written.
struct KernelArgs {
  int64_t rows;
  int64_t cols;
  int64_t size;  // of a whole row, of which cols may be a part
  double eps;
  double alpha;  // residual_out is alpha * input + residual
  Weight weight;
  RowLayout rows_of_weight;  // if it has dimensions: that of each row, in bytes, in the place of row r % groups
  Rounding rounding;         // to the dtype of the output, or of grad_output
  Sums sums;
  Gating gating;
  Rotation rotation;
  const RowsArg* tensors[kTensorCount];  // null: not given, or not wanted

  bool has(TensorIndex tensor) const { return tensors[tensor] != nullptr; }
  const RowsArg& operator[](TensorIndex tensor) const { return has(tensor) ? *tensors[tensor] : kNoRows; }
  // Of what is summed and normalized.
  DType dtype() const { return (*this)[has(kResidual) ? kResidual : kInput].dtype; }
};

}  // namespace normops
