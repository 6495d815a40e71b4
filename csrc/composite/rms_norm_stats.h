// rms_norm_stats, rms_norm_from_stats and their backwards written in ATen operators, which differentiate, see
// rms_norm.h.
#pragma once
#include "../rms_norm_stats.h"

namespace normops {

Tensor composite(const RmsNormStats& arguments);
Tensor composite(const RmsNormFromStats& arguments);
std::tuple<Tensor, Tensor> composite(const RmsNormBackwardStats& arguments);
std::tuple<Tensor, Tensor> composite(const RmsNormBackwardFromStats& arguments);

// Numbers of rows with the dimensions of a row, of size 1.
Tensor beside_rows(Tensor numbers, size_t normalized_dims);

// 1 / sqrt(mean of squares + eps)
Tensor rstd_of_sums(const Tensor& square_sum, const c10::SymInt& size, const Norm& norm);

}  // namespace normops
