// What the kernels of the operators take, on every device: raw pointers, to arguments that have been checked. No torch
// header. tests/structures.py reads the structs from this text.
#pragma once
#include <cstdint>

#include "casting.h"
#include "dispatch.h"
#include "gating.h"
#include "rows.h"

namespace normops {

// One row of the weight for each group: row r of the input is of group r % groups.
struct Weight {
  const void* data;  // dtype [groups, cols], or null for ones
  DType dtype;
  double offset;
  int64_t groups;  // 1 without data
};

// Rows of the outputs may be rows of the inputs: each element is read before it is written.
struct RmsNormArgs {
  DType dtype;
  int64_t rows;
  int64_t cols;
  double eps;
  Weight weight;
  Casting casting;    // to dtype
  const void* input;  // dtype [rows, cols]
  RowLayout input_rows;
  void* output;  // dtype [rows, cols]
  RowLayout output_rows;
};

struct RmsNormBackwardArgs {
  DType dtype;
  DType grad_output_dtype;  // dtype, or beside float32 one of 16 bits
  int64_t rows;
  int64_t cols;
  double eps;
  Weight weight;
  Casting casting;          // to grad_output_dtype
  const void* grad_output;  // grad_output_dtype [rows, cols]
  RowLayout grad_output_rows;
  const void* input;  // dtype [rows, cols]
  RowLayout input_rows;
  const void* grad_residual;  // dtype [rows, cols], or null for 0; only with grad_input
  RowLayout grad_residual_rows;
  void* grad_input;  // dtype [rows, cols], or null if not wanted
  RowLayout grad_input_rows;
  void* grad_weight_partials;  // of the compute dtype, as many as the device's kernels make; null if not wanted
};

// RmsNormArgs::dtype is the dtype of input and output.
struct AddRmsNormArgs : RmsNormArgs {
  DType residual_dtype;  // dtype, or float32 beside one of 16 bits
  const void* residual;  // residual_dtype [rows, cols]
  RowLayout residual_rows;
  void* residual_out;  // residual_dtype [rows, cols]: alpha * input + residual
  RowLayout residual_out_rows;
  double alpha;
};

struct GatedRmsNormArgs : RmsNormArgs {
  Gating gating;
  DType gate_dtype;  // dtype, or float32 if that has 16 bits, or one of 16 bits if that is float32
  const void* gate;  // gate_dtype [rows, cols]
  RowLayout gate_rows;
};

// In these RmsNormBackwardArgs, grad_output_dtype is dtype, and there is no grad_residual.
struct GatedRmsNormBackwardArgs : RmsNormBackwardArgs {
  Gating gating;
  DType gate_dtype;
  const void* gate;  // gate_dtype [rows, cols]
  RowLayout gate_rows;
  void* grad_gate;  // gate_dtype [rows, cols], or null if not wanted
  RowLayout grad_gate_rows;
};

// How rows are rotated: the columns [offset, offset + 2 * pairs), of which i and i + pairs belong together, or, if they
// are interleaved, 2 * i and 2 * i + 1.
struct Rotation {
  bool interleaved;
  bool angle_of_pair;  // whether cos and sin have a column for each pair, or one for each column that is rotated
  DType dtype;         // of cos and sin: that of the input, or float32 beside one of 16 bits
  int64_t offset;
  int64_t pairs;
  const void* cos;  // dtype [rows, columns], as sin; rows of several heads may be the same
  const void* sin;
  RowLayout rows;  // of both
};

struct RmsNormRopeArgs : RmsNormArgs {
  Rotation rotation;
};

// In these RmsNormBackwardArgs, grad_output_dtype is dtype, and there is no grad_residual.
struct RmsNormRopeBackwardArgs : RmsNormBackwardArgs {
  Rotation rotation;
};

// Sums over rows are numbers of the compute dtype, of which square_sum_rows and dot_rows tell where that of each row
// is.
struct RmsNormStatsArgs {
  DType dtype;
  int64_t rows;
  int64_t cols;
  const void* input;  // dtype [rows, cols]
  RowLayout input_rows;
  void* square_sum;  // [rows]
  RowLayout square_sum_rows;
};

struct RmsNormFromStatsArgs : RmsNormArgs {
  int64_t size;            // of a whole row, of which cols may be a part
  const void* square_sum;  // [rows], of whole rows
  RowLayout square_sum_rows;
};

// In these RmsNormBackwardArgs there is no grad_residual, and nothing else that is written.
struct RmsNormBackwardStatsArgs : RmsNormBackwardArgs {
  void* square_sum;  // [rows]
  RowLayout square_sum_rows;
  void* dot;  // [rows], of grad_output * (weight + offset) * input
  RowLayout dot_rows;
};

struct RmsNormBackwardFromStatsArgs : RmsNormBackwardArgs {
  int64_t size;
  const void* square_sum;
  RowLayout square_sum_rows;
  const void* dot;
  RowLayout dot_rows;
};

}  // namespace normops
