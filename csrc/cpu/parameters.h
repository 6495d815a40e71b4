// The parameters of a call: the scale, and memory for the sums over rows that become their gradients.
#pragma once
#include <algorithm>
#include <vector>

#include "sharing.h"

namespace normops::cpu {

inline ScaleLayout layout_of(const KernelArgs& args) {
  return {args.dtype(), args.cols, paired_columns(args.rotation)};
}

// Returns a group's packed numbers in the scale or in a sum over rows.
inline char* of_group(const KernelArgs& args, const ScaleLayout& layout, void* packed, int64_t group) {
  return static_cast<char*>(packed) + group * layout.packed_cols() * size_of(compute_dtype(args.dtype()));
}

// Returns whether kernels can read the weight itself.
inline bool is_scale(const KernelArgs& args, const ScaleLayout& layout) {
  const Weight& weight = args.weight;
  return weight.data != nullptr && weight.offset == 0 && weight.dtype == args.dtype() &&
         compute_dtype(weight.dtype) == weight.dtype && layout.is_natural();
}

// Computes packed numbers [begin, end) of a group's scale.
inline void convert_scale(const KernelArgs& args, const ScaleLayout& layout, int64_t group, int64_t begin, int64_t end,
                          char* scale) noexcept {
  const DType dtype = args.dtype();
  const Weight& weight = args.weight;
  if (weight.data != nullptr) {
    const char* const data = static_cast<const char*>(weight.data) + group * args.cols * size_of(weight.dtype);
    layout.each(begin, end, [&](int64_t column, int64_t packed, int64_t count) {
      rms_norm_kernels().scale(dtype, weight.dtype, data + column * size_of(weight.dtype), weight.offset,
                               scale + packed * size_of(compute_dtype(dtype)), count);
    });
  } else if (compute_dtype(dtype) == DType::float64) {
    std::fill_n(reinterpret_cast<double*>(scale) + begin, end - begin, 1.0);
  } else {
    std::fill_n(reinterpret_cast<float*>(scale) + begin, end - begin, 1.0f);
  }
}

// The scale, weight + weight_offset, or ones without a weight. Kernels read the weight itself if it needs no
// conversion. Threads convert a long weight together. Each thread converts a short one for itself. Fetching
// lines that another core has just written is slower (8 x 4096 bfloat16: 9.5 us instead of 5.5) [Xeon, 2 threads].
class Scale {
 public:
  // `most_groups`: the number of groups whose scale a part needs at a time.
  Scale(const KernelArgs& args, int64_t most_groups)
      : args_(args),
        layout_(layout_of(args)),
        most_groups_(most_groups),
        conversion_(conversion()),
        shared_(args.dtype(), conversion_ == Conversion::together ? args.weight.groups * layout_.packed_cols() : 0) {
    if (conversion_ != Conversion::together) return;
    parallel_for_columns(args.weight.groups, layout_.packed_cols(), kGrainElements,
                         [&](int64_t group, int64_t begin, int64_t end) noexcept {
                           convert_scale(args_, layout_, group, begin, end,
                                         of_group(args_, layout_, shared_.data(), group));
                         });
  }

  // own_count() is the size of a part's scratch. converted() returns the scale of some groups, which may be in that
  // scratch.
  int64_t own_count() const { return conversion_ == Conversion::each ? most_groups_ * layout_.packed_cols() : 0; }
  const void* converted(Scratch& own, int64_t group, int64_t groups) const noexcept {
    if (conversion_ == Conversion::none) return of_group(args_, layout_, const_cast<void*>(args_.weight.data), group);
    if (conversion_ == Conversion::together) return of_group(args_, layout_, const_cast<void*>(shared_.data()), group);
    for (int64_t i = 0; i < groups; i++) {
      convert_scale(args_, layout_, group + i, 0, layout_.packed_cols(), of_group(args_, layout_, own.data(), i));
    }
    return own.data();
  }

 private:
  enum class Conversion { none, together, each };

  Conversion conversion() const {
    if (args_.sums == Sums::output && !args_.has(kGradOutput)) return Conversion::none;  // never read
    if (is_scale(args_, layout_)) return Conversion::none;
    const int64_t groups = args_.weight.groups;
    return groups == most_groups_ && groups * args_.cols > kGrainElements ? Conversion::together : Conversion::each;
  }

  const KernelArgs& args_;
  ScaleLayout layout_;
  int64_t most_groups_;
  Conversion conversion_;
  OwnScratch shared_;
};

// Sums over rows for grad_weight or grad_bias, if requested. Allocates before any gradient overwrites an input, so that
// a failed allocation leaves the inputs unchanged.
class Gradient {
 public:
  Gradient(const KernelArgs& args, TensorIndex index, const Division& division, int64_t parts)
      : args_(args),
        index_(index),
        division_(division),
        parts_(parts),
        layout_(layout_of(args)),
        most_sums_(most_sums(std::min(division.units_per_strip(), divide_up(division.units(), parts)))),
        sums_(args.dtype(), args.has(index) ? parts * strips_of_part() * most_sums_ * stride() : 0) {}

  // Returns the distance between two sums, in numbers.
  int64_t stride() const { return division_.groups_per_strip() * layout_.packed_cols(); }

  // Returns the sums of a region. A part has memory for two strips: one that another part begins, and the last one that
  // it begins itself. Its previous strips are complete by then.
  void* sums_of(int64_t part, const Region& region) noexcept {
    if (!args_.has(index_)) return nullptr;
    const int64_t strip = part * strips_of_part() + (region.row == 0 ? strips_of_part() - 1 : 0);
    return static_cast<char*>(sums_.data()) + strip * most_sums_ * stride_bytes();
  }

  // Computes the gradient, if the region is a whole strip.
  void end(int64_t part, const Region& region) noexcept {
    if (!args_.has(index_) || !division_.is_whole_strip(region)) return;
    ParameterSum sums[kMostSums];
    const int64_t count = list(part, region, sums);
    close(sums, count);
    parallel_for_columns(
        region.groups, layout_.packed_cols(), grain(count),
        [&](int64_t group, int64_t begin, int64_t end) noexcept { add_up(region, group, begin, end, sums, count); });
  }

  // Computes the gradient of the strips that several parts share.
  void finish() {
    if (!args_.has(index_) || parts_ == 1) return;
    struct Strip {
      Region region;
      int64_t first, count;  // of the strip in `sums`
    };
    std::vector<Strip> strips;
    std::vector<ParameterSum> sums;
    for (int64_t part = 0; part < parts_; part++) {
      division_.each_region_of_part(part, parts_, [&](const Region& region) {
        if (division_.is_whole_strip(region)) return;
        if (region.row == 0) strips.push_back({region, static_cast<int64_t>(sums.size()), 0});
        ParameterSum of_region[kMostSums];
        const int64_t count = list(part, region, of_region);
        sums.insert(sums.end(), of_region, of_region + count);
        Strip& strip = strips.back();
        strip.count += count;
        if (division_.ends_strip(region)) close(sums.data() + strip.first, strip.count);
      });
    }
    if (strips.empty()) return;
    const int64_t groups = division_.groups_per_strip(), strip_count = static_cast<int64_t>(strips.size());
    parallel_for_columns(strip_count * groups, layout_.packed_cols(),
                         grain(static_cast<int64_t>(sums.size()) / strip_count),
                         [&](int64_t i, int64_t begin, int64_t end) noexcept {
                           const auto& [region, first, count] = strips[i / groups];
                           if (i % groups >= region.groups) return;
                           add_up(region, i % groups, begin, end, sums.data() + first, count);
                         });
  }

 private:
  int64_t strips_of_part() const { return std::min<int64_t>(2, division_.strips()); }
  int64_t stride_bytes() const { return stride() * size_of(compute_dtype(args_.dtype())); }

  // Lists the sums of a region, and returns how many there are.
  int64_t list(int64_t part, const Region& region, ParameterSum* sums) noexcept {
    const char* sum = static_cast<const char*>(sums_of(part, region));
    const int64_t rows = division_.rows_per_leaf();
    int64_t count = 0;
    each_sum(region.row / rows, divide_up(region.row + region.rows, rows), [&](int64_t end, int64_t leaves) {
      sums[count++] = {sum, merges_after(0, end, leaves)};
      sum += stride_bytes();
    });
    return count;
  }

  // Schedules the merges of a strip's remaining sums after the last one.
  static void close(ParameterSum* sums, int64_t count) noexcept {
    int left = 0;
    for (int64_t i = 0; i < count; i++) left += 1 - sums[i].merges;
    sums[count - 1].merges += left - 1;
  }

  // Computes packed columns [begin, end) of the gradient, for one group of a strip.
  void add_up(const Region& strip, int64_t group, int64_t begin, int64_t end, const ParameterSum* sums,
              int64_t count) const noexcept {
    const auto& [data, dtype, layout] = args_[index_];
    char* const gradient = static_cast<char*>(data) + (strip.group + group) * args_.cols * size_of(dtype);
    layout_.each(begin, end, [&](int64_t column, int64_t packed, int64_t columns) {
      rms_norm_backward_kernels().grad_weight(args_.dtype(), dtype, sums, count, group * layout_.packed_cols() + packed,
                                              gradient + column * size_of(dtype), columns);
    });
  }

  const KernelArgs& args_;
  TensorIndex index_;
  const Division& division_;
  int64_t parts_;
  ScaleLayout layout_;
  int64_t most_sums_;
  OwnScratch sums_;
};

// The parameters of a backward: their gradients, and the scale of one strip at a time, as the scale of all groups may
// be as large as the input.
class Parameters {
 public:
  Parameters(const KernelArgs& args, const Division& division, int64_t parts)
      : scale_(args, division.groups_per_strip()),
        weight_(args, kGradWeight, division, parts),
        bias_(args, kGradBias, division, parts) {}

  int64_t own_count() const { return scale_.own_count(); }

  // Sets the arguments for a region; end() is called after it.
  void begin(CpuArgs& args, Scratch& own, int64_t part, const Region& region) noexcept {
    args.first_group = region.group;
    args.scale = scale_.converted(own, region.group, region.groups);
    args.sum_stride = weight_.stride();
    args.grad_weight_sums = weight_.sums_of(part, region);
    args.grad_bias_sums = bias_.sums_of(part, region);
  }
  void end(int64_t part, const Region& region) noexcept {
    weight_.end(part, region);
    bias_.end(part, region);
  }
  void finish() {
    weight_.finish();
    bias_.finish();
  }

 private:
  Scale scale_;
  Gradient weight_, bias_;
};

// Runs the kernel of a backward.
inline void run_backward(BackwardKernel kernel, CpuArgs args) {
  const Division division(args.rows, args.cols, args.weight.groups, args.has(kGradWeight) || args.has(kGradBias));
  args.rows_per_leaf = division.rows_per_leaf();
  Parameters parameters(args, division, part_count(division.units(), division.grain()));
  parallel_over_rows(args, parameters.own_count(), division.units(), division.grain(),
                     [&](int64_t part, CpuArgs& args, Scratch& own, int64_t begin, int64_t end) noexcept {
                       args.part_rows = (end - begin) * division.rows_per_unit() * division.groups_per_strip();
                       division.each_region(begin, end, [&](const Region& region) {
                         parameters.begin(args, own, part, region);
                         kernel(args, region);
                         parameters.end(part, region);
                       });
                     });
  parameters.finish();
}

}  // namespace normops::cpu
