// Recomputes the output of a norm from the tensors that the norm saves for its backward. So operators that save the
// output need not keep it.
#pragma once
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "check.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

class Recomputation;
class RecomputedOutput;

// Returns whether storage, sizes and strides describe a tensor: not a subclass, nested or lazily negated one.
bool is_described_by_storage(const Tensor& tensor);

// Returns the bytes of a tensor's elements; nullopt for symbolic sizes.
std::optional<int64_t> bytes_of(const Tensor& tensor);

// A block is an entered `with recompute_norms()`. Later blocks have larger numbers; 0 is no block.
class RecomputableNode : public torch::autograd::Node {
 public:
  // Returns whether consumers that save the output in `block` recompute it. A checkpoint that reruns its body must save
  // the same tensors, with other blocks around it. So the result depends on the norm's arguments, and on whether it was
  // called inside of `block`, but not on later changes of the arguments.
  bool is_recomputed_in(int64_t block, const Tensor& output) const;

 protected:
  int64_t block_ = 0;          // in which the norm was called, if its output can be recomputed
  int64_t bytes_to_copy_ = 0;  // of the copies of weight and bias

  std::atomic<bool> is_released_ = false;

  // Frees the saved tensors once neither the node nor a Recomputation needs them.
  void release();
  torch::autograd::variable_list take_unpacked();

  // Guards the members below. Never held while Python code runs: another thread may hold the
  // GIL while it waits.
  std::mutex recompute_mutex_;

 private:
  friend class Recomputation;
  friend class RecomputedOutput;

  virtual torch::autograd::variable_list unpack_saved() = 0;
  virtual Tensor recompute(torch::autograd::variable_list unpacked) = 0;
  virtual void reset_saved() = 0;

  std::weak_ptr<Recomputation> recomputation_;
  int references_ = 1;  // to the saved tensors
  // Tensors that a recomputation unpacked, for the node's own backward: some hooks unpack only once in a backward.
  torch::autograd::variable_list unpacked_;
  int unpacked_in_ = -1;  // graph task
};

// Shared by all consumers that save the output of one norm, or views of it: a backward computes the output once.
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
  int graph_task_ = -1;  // that computed value_
};

// Replaces a norm's output, or a view of it, among saved tensors.
class RecomputedOutput {
 public:
  // Returns whether a tensor that is saved in `block` is recomputed, see RecomputableNode::is_recomputed_in.
  static bool is_recomputed(const Tensor& tensor, int64_t block);
  // Requires is_recomputed(tensor, block). Returns null if another thread has released the node.
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
  int64_t generation_ = -1;  // of the value that was last taken
};

}  // namespace normops
#pragma GCC visibility pop
