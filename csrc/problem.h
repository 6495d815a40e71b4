// The flat problem that every backend computes, of arguments that passed the operator's check.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>

#include <cstdint>
#include <optional>

#include "casting.h"
#include "dispatch.h"
#include "rows.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

struct Norm;  // operator.h

struct Problem {
  int64_t rows;
  int64_t cols;
  int64_t groups;  // rows of the weight, 1 without one: row r of the input has row r % groups
  double eps;
  Casting casting;  // to the dtype of the output
};

Problem make_problem(const at::Tensor& input, const Norm& norm);

// eps, or by default the machine epsilon of the compute type, as in torch.nn.functional.rms_norm.
double resolve_eps(std::optional<double> eps, at::ScalarType input_dtype);

// The element type, if it is one of normops'.
std::optional<DType> find_dtype(at::ScalarType dtype);
DType dtype_of(const at::Tensor& tensor);

// Rows as a kernel reads them. `tensor` holds the memory: it is the given tensor itself, lent, unless its normalized
// dimensions are not contiguous; then it is a copy, in which an expanded batch is still stored once.
struct Rows {
  c10::MaybeOwned<at::Tensor> tensor;
  RowLayout layout;
};

// The layout has at most `max_dims` dimensions; a tensor that needs more is copied, too.
Rows make_rows(const at::Tensor& tensor, size_t normalized_dims, int max_dims = RowLayout::kMaxDims);
Rows make_rows(at::Tensor&& tensor, size_t normalized_dims, int max_dims = RowLayout::kMaxDims);

// Memory that a kernel can write rows to: the target's own, or, where its normalized dimensions are not contiguous,
// that of a copy which finish() moves over.
class Target {
 public:
  Target(const at::Tensor& target, size_t normalized_dims, int max_dims = RowLayout::kMaxDims);

  void* data() const { return rows_.tensor->mutable_data_ptr(); }
  const RowLayout& layout() const { return rows_.layout; }
  const Rows& rows() const { return rows_; }
  void finish() const;

 private:
  const at::Tensor& target_;
  Rows rows_;
};

}  // namespace normops
#pragma GCC visibility pop
