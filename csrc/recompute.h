// The output of a norm, computed again of what the norm keeps for its own backward: who saves it need not keep it.
#pragma once
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <memory>
#include <utility>

#include "check.h"

#pragma GCC visibility push(default)  // for the Python module
namespace normops {

class Recomputation;

class RecomputableNode : public torch::autograd::Node {
 protected:
  bool can_recompute_ = false;
  // What was unpacked for the output serves the node, too: some hooks unpack once in a backward.
  torch::autograd::variable_list unpacked_;
  int graph_task_ = -1;  // for which
  std::atomic<bool> is_released_ = false;
  std::atomic<int> holders_ = 1;  // of what is saved: the node and its Recomputation

  void let_go() {
    if (--holders_ == 0) reset_saved();
  }

 private:
  friend class Recomputation;
  std::weak_ptr<Recomputation> recomputation_;
  virtual Tensor recompute() = 0;
  virtual void reset_saved() = 0;
};

class Recomputation {
  using HeldNode = decltype(torch::autograd::Edge::function);

 public:
  // Whether outputs of norms that this thread calls from now on can be recomputed; returns whether they could before.
  static bool enable(bool enabled);
  static bool is_enabled();

  // That of an output or a view of one; null for another tensor, and for what was written to.
  static std::shared_ptr<Recomputation> of(const Tensor& tensor);
  explicit Recomputation(HeldNode held) : node_(std::move(held)) { node().holders_++; }
  ~Recomputation() { node().let_go(); }
  Tensor output() const { return node().recompute(); }

 private:
  RecomputableNode& node() const { return static_cast<RecomputableNode&>(*node_); }
  HeldNode node_;
};

}  // namespace normops
#pragma GCC visibility pop
