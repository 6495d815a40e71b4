// The kernel arguments of all operators on all devices: raw pointers to checked tensors. Includes no torch header.
// tests/gpu/structures.py parses the structs in this file.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace normops {

// Selects the intermediate results that are rounded to the dtype of the output. A backward rounds where autograd would
// with tensors of that dtype: these results, if it recomputes them, and their gradients.
struct Rounding {
  bool normalized;  // the normalized input, before it is multiplied by the weight
  bool multiplied;  // the product with the weight, before it is gated or rotated; alpha * input, before it is added

  constexpr bool any() const { return normalized || multiplied; }
};

// The activation of the gate of gated_rms_norm, and whether the gate multiplies the normalized values or the input.
enum class Activation : uint8_t { silu, sigmoid };

struct Gating {
  Activation activation;
  bool norm_before_gate;
};

// The dimensions before the normalized ones, outermost first, merged as far as their strides allow. A contiguous tensor
// has one such dimension, a slice of a fused QKV projection has two. Strides count bytes. An expanded dimension has
// stride 0.
struct RowLayout {
  static constexpr int kMaxDims = 8;
  int dims = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};
};

// The tensors of all operators, named as in the schemas. Each operator lists its tensors as kTensors.
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

// The rows of a tensor. A row of square_sum or dot is one number of the compute dtype. weight and the gradients of
// parameters are a single row. cos and sin have equal strides, and several heads may share a row of them.
struct RowsArg {
  void* data;  // read-only for inputs
  DType dtype;
  RowLayout layout;
};

// Placeholder for an absent tensor.
inline constexpr RowsArg kNoRows = {nullptr, DType::float32, {1, {INT64_MAX}, {0}}};

// The weight, with one row for each group: row r of the input belongs to group r % groups.
struct Weight {
  const void* data;  // dtype [groups, cols], or null for ones
  DType dtype;
  double offset;   // -0 instead of 0, as adding 0 would turn -0 into 0
  int64_t groups;  // 1 without data
};

// The role of the sums over each row: computed and used, an input, or the only output.
enum class Sums : uint8_t { compute, input, output };

// The rotation of rows: it rotates the columns [offset, offset + 2 * pairs) in pairs. Columns i and i + pairs are a
// pair, or, if interleaved, 2 * i and 2 * i + 1.
struct Rotation {
  bool interleaved;
  bool angle_of_pair;  // whether cos and sin have a column for each pair, not for each rotated column
  int64_t offset;
  int64_t pairs;
};

// Rows have the dtype of the input, except that
//   residual, residual_out, cos and sin may be float32 if the input has 16 bits
//   grad_output may have 16 bits if the input is float32
//   gate and grad_gate may differ in either of these ways
// Outputs may alias inputs: each element is read before it is written.
struct KernelArgs {
  int64_t rows;
  int64_t cols;
  int64_t size;  // elements of a whole row, of which cols may be a part
  double eps;
  double alpha;  // residual_out = alpha * input + residual
  Weight weight;
  RowLayout rows_of_weight;  // if not empty: locates the weight of each row, instead of r % groups
  Rounding rounding;         // to the dtype of the output, or of grad_output
  Sums sums;
  Gating gating;
  Rotation rotation;
  const RowsArg* tensors[kTensorCount];  // null: not given, or not wanted

  bool has(TensorIndex tensor) const { return tensors[tensor] != nullptr; }
  const RowsArg& operator[](TensorIndex tensor) const { return has(tensor) ? *tensors[tensor] : kNoRows; }
  // The dtype of the normalized rows.
  DType dtype() const { return (*this)[has(kResidual) ? kResidual : kInput].dtype; }
};

}  // namespace normops
