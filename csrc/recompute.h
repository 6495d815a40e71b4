// Recomputes the output of a norm from the tensors that the norm saves for its own backward, so that operators that
// save the output need not keep it.
#pragma once
#include <c10/core/Storage.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <variant>
#include <vector>

#include "check.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

class Recomputation;
class RecomputedOutput;

// Whether a tensor is described by its storage, sizes and strides alone: no subclass, nested or lazily negated tensor.
bool is_plain(const Tensor& tensor);

// The values that a tensor has when this is made, without keeping its memory.
class WeakTensor {
 public:
  WeakTensor() = default;
  explicit WeakTensor(const Tensor& tensor);

  bool is_defined() const { return is_defined_; }
  // A copy of the values; undefined if the memory was freed or may have been written to since.
  Tensor copy() const;
  // Shares the memory of the tensor; undefined if that was freed.
  Tensor values() const;

 private:
  struct Layout {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    at::TensorOptions options;
  };
  using Impl = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  // A tensor that was saved through hooks may live on as another one with the same storage.
  std::variant<std::monostate, Layout, Impl> reference_;
  c10::VariableVersion version_counter_;
  uint32_t version_ = 0;
  bool is_defined_ = false;
};

// A block is a `with recompute_norms()` that was entered; later ones have larger numbers, and 0 is none.
class RecomputableNode : public torch::autograd::Node {
 public:
  // Whether consumers of the output recompute it, where they save it in `block`. A checkpoint that runs its body again
  // must save the same tensors again, with other blocks around it: so this depends on the arguments of the norm, and on
  // whether the norm was called inside of `block`, but not on what has happened to its arguments since.
  bool is_recomputed_in(int64_t block, const Tensor& output) const;

 protected:
  int64_t block_ = 0;          // in which the norm was called, if its output can be recomputed
  int64_t bytes_to_copy_ = 0;  // of weight and bias

  std::atomic<bool> is_released_ = false;

  // Frees the saved tensors once neither the node nor a Recomputation needs them.
  void release();
  torch::autograd::variable_list take_unpacked();

  // Guards the members below, and the copies of a node. Never held while Python code runs: another thread may wait for
  // it with the GIL.
  std::mutex recompute_mutex_;

 private:
  friend class Recomputation;
  friend class RecomputedOutput;

  virtual bool copy_sources() = 0;
  virtual torch::autograd::variable_list unpack_saved() = 0;
  virtual Tensor recompute(torch::autograd::variable_list unpacked) = 0;
  virtual void reset_saved() = 0;

  std::weak_ptr<Recomputation> recomputation_;
  int references_ = 1;  // to the saved tensors
  // Tensors that a recomputation has unpacked, for the node's own backward: some hooks unpack once in a backward.
  torch::autograd::variable_list unpacked_;
  int unpacked_in_ = -1;  // graph task
};

// Shared by everything that saves the output of one norm, or views of it: a backward computes the output once.
class Recomputation : public std::enable_shared_from_this<Recomputation> {
  using HeldNode = decltype(torch::autograd::Edge::function);

 public:
  // Enters a block on this thread; returns its number and that of the block around it.
  static std::pair<int64_t, int64_t> enter_block();
  static void leave_block(int64_t outer);
  static int64_t current_block();

  explicit Recomputation(HeldNode held) : node_(std::move(held)) {}
  ~Recomputation() { node().release(); }

 private:
  friend class RecomputedOutput;

  RecomputableNode& node() const { return static_cast<RecomputableNode&>(*node_); }
  Tensor compute();
  void release(int graph_task);

  HeldNode node_;
  std::mutex mutex_;  // guards the members below; never held while Python code runs
  int users_ = 0, served_ = 0;
  int64_t generation_ = 0;  // counts values
  Tensor value_;
  int graph_task_ = -1;  // which computed it
};

// Saved in the place of an output of a norm, or of a view of it.
class RecomputedOutput {
 public:
  // Whether a tensor that is saved in a block is recomputed: see RecomputableNode::is_recomputed_in.
  static bool is_recomputed(const Tensor& tensor, int64_t block);
  // For a tensor that is recomputed; null if weight or bias are gone.
  static std::unique_ptr<RecomputedOutput> of(const Tensor& tensor);

  RecomputedOutput(std::shared_ptr<Recomputation> recomputation, const Tensor& tensor);
  ~RecomputedOutput();
  RecomputedOutput(const RecomputedOutput&) = delete;

  Tensor tensor();

 private:
  const std::shared_ptr<Recomputation> recomputation_;
  bool is_view_;
  std::vector<int64_t> sizes_, strides_;  // of a view
  int64_t offset_ = 0;
  int64_t generation_ = -1;  // of the value that this one took
};

}  // namespace normops
#pragma GCC visibility pop
