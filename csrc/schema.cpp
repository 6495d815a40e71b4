// The schema is the contract: this file declares all operators of normops, and nothing else.
#include <torch/library.h>

// weight and bias have shape [..., *normalized_shape]. Their leading dimensions broadcast to those of input. Their
// gradients have the same shapes.
TORCH_LIBRARY(normops, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};

  // No tensor is keyword-only, as vmap and DTensor do not support that.
  m.def(
      "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, "
      "float weight_offset=0.0, str rounding=\"once\", Tensor? bias=None) -> Tensor",
      tags);
  m.def(
      "rms_norm.out(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, "
      "float weight_offset=0.0, str rounding=\"once\", Tensor? bias=None, *, Tensor(a!) out) -> Tensor(a!)",
      tags);
  m.def(
      "rms_norm_(Tensor(a!) input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, "
      "float weight_offset=0.0, str rounding=\"once\", Tensor? bias=None) -> Tensor(a!)",
      tags);

  m.def(
      "rms_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, float weight_offset=0.0, str rounding=\"once\", Tensor? grad_residual=None, "
      "Tensor? bias=None, bool[3] output_mask=[True, True, True]) "
      "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
      tags);
  m.def(
      "rms_norm_backward.out(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, float weight_offset=0.0, str rounding=\"once\", Tensor? grad_residual=None, "
      "Tensor? bias=None, bool[3] output_mask=[True, True, True], "
      "*, Tensor(a!)? grad_input=None, Tensor(b!)? grad_weight=None, Tensor(c!)? grad_bias=None) "
      "-> (Tensor(a!)?, Tensor(b!)?, Tensor(c!)?)",
      tags);

  m.def(
      "add_rms_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, *, "
      "float weight_offset=0.0, str rounding=\"once\", float alpha=1.0) -> (Tensor output, Tensor residual_out)",
      tags);
  m.def(
      "add_rms_norm.out(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, *, float weight_offset=0.0, str rounding=\"once\", float alpha=1.0, Tensor(a!) out, "
      "Tensor(b!) residual_out) "
      "-> (Tensor(a!), Tensor(b!))",
      tags);
  // Returns nothing: the dispatcher cannot box a call that returns several of its first arguments.
  m.def(
      "add_rms_norm_(Tensor(a!) input, Tensor(b!) residual, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, *, float weight_offset=0.0, str rounding=\"once\", float alpha=1.0) -> ()",
      tags);

  // activation is "silu", also called "swish", or "sigmoid".
  m.def(
      "gated_rms_norm(Tensor input, Tensor gate, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, *, "
      "float weight_offset=0.0, str rounding=\"once\", str activation=\"silu\", bool norm_before_gate=True) -> "
      "Tensor",
      tags);
  m.def(
      "gated_rms_norm.out(Tensor input, Tensor gate, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, "
      "*, float weight_offset=0.0, str rounding=\"once\", str activation=\"silu\", bool norm_before_gate=True, "
      "Tensor(a!) out) -> Tensor(a!)",
      tags);

  m.def(
      "gated_rms_norm_backward(Tensor grad_output, Tensor input, Tensor gate, SymInt[] normalized_shape, "
      "Tensor? weight=None, float? eps=None, float weight_offset=0.0, str rounding=\"once\", str "
      "activation=\"silu\", "
      "bool norm_before_gate=True, bool[3] output_mask=[True, True, True]) "
      "-> (Tensor grad_input, Tensor grad_gate, Tensor grad_weight)",
      tags);
  m.def(
      "gated_rms_norm_backward.out(Tensor grad_output, Tensor input, Tensor gate, SymInt[] normalized_shape, "
      "Tensor? weight=None, float? eps=None, float weight_offset=0.0, str rounding=\"once\", str "
      "activation=\"silu\", "
      "bool norm_before_gate=True, bool[3] output_mask=[True, True, True], *, Tensor(a!)? grad_input=None, "
      "Tensor(b!)? grad_gate=None, Tensor(c!)? grad_weight=None) -> (Tensor(a!)?, Tensor(b!)?, Tensor(c!)?)",
      tags);

  // cos and sin broadcast over the leading dimensions of input. They have rotary_dim columns (its default), or half as
  // many. The columns [rotary_offset, rotary_offset + rotary_dim) are rotated.
  m.def(
      "rms_norm_rope(Tensor input, Tensor cos, Tensor sin, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, *, float weight_offset=0.0, str rounding=\"once\", bool interleaved=False, int? "
      "rotary_dim=None, "
      "int rotary_offset=0) -> Tensor",
      tags);
  m.def(
      "rms_norm_rope.out(Tensor input, Tensor cos, Tensor sin, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, *, float weight_offset=0.0, str rounding=\"once\", bool interleaved=False, int? "
      "rotary_dim=None, "
      "int rotary_offset=0, Tensor(a!) out) -> Tensor(a!)",
      tags);
  m.def(
      "rms_norm_rope_(Tensor(a!) input, Tensor cos, Tensor sin, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, *, float weight_offset=0.0, str rounding=\"once\", bool interleaved=False, int? "
      "rotary_dim=None, "
      "int rotary_offset=0) -> Tensor(a!)",
      tags);

  m.def(
      "rms_norm_rope_backward(Tensor grad_output, Tensor input, Tensor cos, Tensor sin, SymInt[] normalized_shape, "
      "Tensor? weight=None, float? eps=None, float weight_offset=0.0, str rounding=\"once\", bool "
      "interleaved=False, int? rotary_dim=None, "
      "int rotary_offset=0, bool[2] output_mask=[True, True]) -> (Tensor grad_input, Tensor grad_weight)",
      tags);
  m.def(
      "rms_norm_rope_backward.out(Tensor grad_output, Tensor input, Tensor cos, Tensor sin, "
      "SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, float weight_offset=0.0, str "
      "rounding=\"once\", "
      "bool interleaved=False, int? rotary_dim=None, int rotary_offset=0, bool[2] output_mask=[True, True], *, "
      "Tensor(a!)? grad_input=None, Tensor(b!)? grad_weight=None) -> (Tensor(a!)?, Tensor(b!)?)",
      tags);

  // dim is negative. weight and bias have shape [..., channels]. Their leading dimensions broadcast to those of input
  // with dim moved to the end. activation may also be "identity".
  m.def(
      "channel_rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, "
      "float weight_offset=0.0, str rounding=\"once\", Tensor? bias=None, *, int dim, "
      "str activation=\"identity\") -> Tensor",
      tags);
  m.def(
      "channel_rms_norm.out(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, "
      "float weight_offset=0.0, str rounding=\"once\", Tensor? bias=None, *, int dim, "
      "str activation=\"identity\", Tensor(a!) out) -> Tensor(a!)",
      tags);
  m.def(
      "channel_rms_norm_(Tensor(a!) input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, "
      "float weight_offset=0.0, str rounding=\"once\", Tensor? bias=None, *, int dim, "
      "str activation=\"identity\") -> Tensor(a!)",
      tags);

  m.def(
      "channel_rms_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, float weight_offset=0.0, str rounding=\"once\", Tensor? bias=None, "
      "bool[3] output_mask=[True, True, True], *, int dim, str activation=\"identity\") "
      "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
      tags);
  m.def(
      "channel_rms_norm_backward.out(Tensor grad_output, Tensor input, SymInt[] normalized_shape, "
      "Tensor? weight=None, float? eps=None, float weight_offset=0.0, str rounding=\"once\", Tensor? bias=None, "
      "bool[3] output_mask=[True, True, True], *, int dim, str activation=\"identity\", Tensor(a!)? grad_input=None, "
      "Tensor(b!)? grad_weight=None, Tensor(c!)? grad_bias=None) -> (Tensor(a!)?, Tensor(b!)?, Tensor(c!)?)",
      tags);

  // square_sum and dot have one number for each row, in the compute dtype of input. row_size is the number of elements
  // of a whole row, of which normalized_shape may be a part.
  m.def("rms_norm_stats(Tensor input, SymInt[] normalized_shape) -> (Tensor square_sum)", tags);
  m.def("rms_norm_stats.out(Tensor input, SymInt[] normalized_shape, *, Tensor(a!) square_sum) -> Tensor(a!)", tags);

  m.def(
      "rms_norm_from_stats(Tensor input, Tensor square_sum, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, *, float weight_offset=0.0, str rounding=\"once\", SymInt row_size) -> Tensor",
      tags);
  m.def(
      "rms_norm_from_stats.out(Tensor input, Tensor square_sum, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, *, float weight_offset=0.0, str rounding=\"once\", SymInt row_size, Tensor(a!) out) "
      "-> Tensor(a!)",
      tags);

  m.def(
      "rms_norm_backward_stats(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, float weight_offset=0.0, str rounding=\"once\") -> (Tensor square_sum, Tensor dot)",
      tags);
  m.def(
      "rms_norm_backward_stats.out(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? weight=None, "
      "float? eps=None, float weight_offset=0.0, str rounding=\"once\", *, Tensor(a!) square_sum, "
      "Tensor(b!) dot) -> (Tensor(a!), Tensor(b!))",
      tags);

  m.def(
      "rms_norm_backward_from_stats(Tensor grad_output, Tensor input, Tensor square_sum, Tensor dot, "
      "SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, float weight_offset=0.0, "
      "str rounding=\"once\", Tensor? grad_residual=None, bool[2] output_mask=[True, True], *, SymInt row_size) "
      "-> (Tensor grad_input, Tensor grad_weight)",
      tags);
  m.def(
      "rms_norm_backward_from_stats.out(Tensor grad_output, Tensor input, Tensor square_sum, Tensor dot, "
      "SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, float weight_offset=0.0, "
      "str rounding=\"once\", Tensor? grad_residual=None, bool[2] output_mask=[True, True], *, SymInt row_size, "
      "Tensor(a!)? grad_input=None, Tensor(b!)? grad_weight=None) -> (Tensor(a!)?, Tensor(b!)?)",
      tags);
}
