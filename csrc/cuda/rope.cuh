// The rotation of rows: the columns of a thread, and cos and sin for these.
#pragma once
#include "operator_kernels.cuh"

namespace normops::cuda {

// Returns the number of slots, of two packs each, of a segment with `columns` columns.
template <class T, class Index>
__host__ __device__ constexpr Index slots_of(Index columns) {
  return static_cast<std::make_unsigned_t<Index>>(columns + 2 * kPack<T> - 1) / (2 * kPack<T>);
}

// cos and sin, of T or, if T has 16 bits, of float32, and the columns that they rotate, see Rotation.
template <class T>
struct RotationOf {
  AnyRowsOf<const T> cos;
  intptr_t sin;  // address of sin minus address of cos, as integers: they are in different allocations
  int64_t offset;
  int64_t pairs;
  bool interleaved;
  bool angle_of_pair;

  bool is_plain() const { return cos.bytes.aligned; }

  // Returns cos of a row.
  __device__ const char* row(int64_t first, int64_t offset = 0) const {
    const char* row = cos.row(first, offset);
    make_opaque(row);
    return row;
  }

  // Returns the row of sin for a row of cos.
  __device__ const char* sin_of(const char* cos_row) const {
    const char* row = reinterpret_cast<const char*>(reinterpret_cast<intptr_t>(cos_row) + sin);
    __builtin_assume(__isGlobal(row));
    return row;
  }

  // Rotates the two packs of a slot, or rotates them back.
  template <class Access, bool kBack = false, class Columns, class Index>
  __device__ void rotate(Numbers<T> (&packs)[2], const char* row, bool is_row, const Columns& columns,
                         Index first_pack) const {
    if (!columns.is_rotated(first_pack)) return;
    Numbers<T> cos[2], sin[2];
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const bool is_shared = angle_of_pair && !interleaved;  // both packs use the first pack's angles
      const Index begin = is_shared ? columns.column(first_pack) : columns.column(first_pack + t);
      const Index column = begin - static_cast<Index>(offset);
      const Index count = is_row ? columns.count(first_pack + t) : 0;
      cos[t] = angles<Access>(row, column, count);
      sin[t] = angles<Access>(sin_of(row), column, count);
    }
    if (interleaved) {
#pragma unroll
      for (int t = 0; t < 2; t++) {
#pragma unroll
        for (int i = 0; i < kPack<T>; i += 2) {
          turn<kBack>(packs[t].element[i], packs[t].element[i + 1], cos[t].element[i], sin[t].element[i],
                      cos[t].element[i + 1], sin[t].element[i + 1]);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPack<T>; i++) {
        turn<kBack>(packs[0].element[i], packs[1].element[i], cos[0].element[i], sin[0].element[i], cos[1].element[i],
                    sin[1].element[i]);
      }
    }
  }

 private:
  using Compute = compute_t<T>;

  template <bool kBack>
  static __device__ void turn(Compute& first, Compute& second, Compute cos_first, Compute sin_first, Compute cos_second,
                              Compute sin_second) {
    const Compute x = first, y = second;
    first = fma_rn(y, kBack ? sin_second : -sin_first, x * cos_first);
    second = fma_rn(x, kBack ? -sin_first : sin_second, y * cos_second);
  }

  // Returns the angles of a pack that begins at `column`, counted among the rotated columns.
  template <class Access, class Index>
  __device__ Numbers<T> angles(const char* row, Index column, Index count) const {
    if constexpr (sizeof(T) == 2) {
      if (cos.dtype == DType::float32) return angles_of<float, Access>(row, column, count);
    }
    return angles_of<T, Access>(row, column, count);
  }

  template <class W, class Access, class Index>
  __device__ Numbers<T> angles_of(const char* row, Index column, Index count) const {
    const bool aligned = kIsPlain<Access> || cos.bytes.aligned;
    const W* const table = reinterpret_cast<const W*>(row);
    if (!angle_of_pair || !interleaved) {
      return to_compute<T>(load_elements<W, kPack<T>>(table + column, count, aligned));
    }
    const auto of_pairs = load_elements<W, kPack<T> / 2>(table + (column >> 1), count >> 1, aligned);
    Numbers<T> numbers;
#pragma unroll
    for (int i = 0; i < kPack<T>; i++) numbers.element[i] = of_pairs.number(i / 2);
    return numbers;
  }
};

// The columns of a thread's packs, as for rms_norm, but in slots of two packs that are rotated together. A slot has
// both columns of a pair, see Rotation. The rotated columns, those before and those after them are three segments with
// separate slots. The first packs of a segment's slots have its first half.
template <class T, class Index>
class RotatedColumns {
 public:
  static constexpr int kTogether = 2;

  __device__ RotatedColumns(int64_t cols, const RotationOf<T>& rotation)
      : cols_(static_cast<Index>(cols)),
        offset_(static_cast<Index>(rotation.offset)),
        rotated_(static_cast<Index>(2 * rotation.pairs)),
        is_halved_(!rotation.interleaved) {}

  __device__ Index column(Index pack) const {
    const Segment segment = segment_of(pack);
    return segment.begin + segment.slot * kPack<T> + (pack % 2 == 0 ? 0 : segment.half);
  }
  // Returns the number of elements of the pack: 0 or less if it is beyond the end of a row, or of half a segment.
  __device__ Index count(Index pack) const {
    const Segment segment = segment_of(pack);
    const Index half_end = segment.begin + segment.half;
    const Index end = pack % 2 == 0 && half_end < segment.end ? half_end : segment.end;
    return end - column(pack);
  }
  __device__ bool is_rotated(Index pack) const { return segment_of(pack).is_rotated; }
  __device__ bool reaches(Index pack) const {
    return slot(pack) < slots_of<T>(offset_) + slots_of<T>(rotated_) + slots_of<T>(cols_ - offset_ - rotated_);
  }

 private:
  struct Segment {
    Index begin, half, end;
    Index slot;  // within the segment
    bool is_rotated;
  };

  __device__ Index slot(Index pack) const {
    const Index first = static_cast<Index>(cluster_rank() * blockDim.x + threadIdx.x);
    const Index step = static_cast<Index>(cluster_blocks() * blockDim.x);
    return first + pack / 2 * step;
  }

  __device__ Segment segment_of(Index pack) const {
    const Index before = slots_of<T>(offset_), rotated = before + slots_of<T>(rotated_);
    const Index end = offset_ + rotated_, slot = this->slot(pack);
    Segment segment;
    if (slot < before) {
      segment = {0, 0, offset_, slot, false};
    } else if (slot < rotated) {
      segment = {offset_, 0, end, slot - before, true};
    } else {
      segment = {end, 0, cols_, slot - rotated, false};
    }
    segment.half =
        segment.is_rotated && is_halved_ ? rotated_ / 2 : slots_of<T>(segment.end - segment.begin) * kPack<T>;
    return segment;
  }

  Index cols_, offset_, rotated_;
  bool is_halved_;
};

// The same for kPacks packs, computed only once.
template <class T, int kPacks>
class HeldRotatedColumns {
 public:
  static constexpr int kTogether = 2;
  int cols;

  __device__ HeldRotatedColumns(int64_t cols, const RotationOf<T>& rotation) : cols(static_cast<int>(cols)) {
    const RotatedColumns<T, int> columns(cols, rotation);
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
      columns_[p] = columns.column(p);
      counts_[p] = columns.count(p);
      is_rotated_[p] = columns.is_rotated(p);
      make_opaque(columns_[p]);
      make_opaque(counts_[p]);
    }
  }

  __device__ int column(int pack) const { return columns_[pack]; }
  __device__ int offset(int pack) const { return columns_[pack]; }
  __device__ int count(int pack) const { return takes_none_ ? 0 : counts_[pack]; }
  __device__ bool is_rotated(int pack) const { return is_rotated_[pack]; }
  __device__ bool owns(int pack, int i) const { return i < counts_[pack]; }
  __device__ void take_none() { takes_none_ = true; }

  template <class W>
  __device__ W* of_row(W* row) const {
    return row;
  }

 private:
  int columns_[kPacks], counts_[kPacks];
  bool is_rotated_[kPacks];
  bool takes_none_ = false;
};

// Returns a multiple of a pack if all segments, and both halves of each, begin at multiples of a pack: see
// RotatedColumns.
inline int64_t begins_of(const Rotation& rotation, int64_t cols) {
  return cols | rotation.offset | (rotation.interleaved ? 2 * rotation.pairs : rotation.pairs);
}

template <class T>
RotationOf<T> rotation_of(const KernelArgs& args) {
  const Rotation& rotation = args.rotation;
  const int64_t or_of_starts = begins_of(rotation, args.cols);
  AnyRowsOf<const T> cos = any_rows_of<const T>(args[kCos], or_of_starts);
  const AnyRowsOf<const T> sin = any_rows_of<const T>(args[kSin], or_of_starts);
  cos.bytes.aligned = cos.bytes.aligned && sin.bytes.aligned;
  return {cos,
          reinterpret_cast<intptr_t>(sin.bytes.data) - reinterpret_cast<intptr_t>(cos.bytes.data),
          rotation.offset,
          rotation.pairs,
          rotation.interleaved,
          rotation.angle_of_pair};
}

struct RopeKernels : OperatorKernels {
  template <class T, class>
  static auto extra_args(const KernelArgs& args) {
    return std::tuple(rotation_of<T>(args));
  }
  static int64_t or_of_starts(const KernelArgs& args) { return begins_of(args.rotation, args.cols); }
  template <class T>
  static RowConfig config(const KernelArgs& args, const Device& device) {
    if (!kIsHeld<T>) return kAnyWidth;
    const auto& [interleaved, angle_of_pair, offset, pairs] = args.rotation;
    const int64_t rotated = 2 * pairs, behind = args.cols - offset - rotated;
    return rope_config(slots_of<T>(offset) + slots_of<T>(rotated) + slots_of<T>(behind), device);
  }
  static constexpr bool holds(int packs) { return is_rope_packs(packs); }
  using OneGroup = PlainOfGroups;  // heads have groups or none: one kernel is enough
};

}  // namespace normops::cuda
