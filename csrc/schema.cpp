// The schema is the contract: this file declares all operators of normops, and nothing else.
#include <torch/library.h>

namespace {

std::string joined(const std::vector<std::string>& parts) {
  std::string result;
  for (const std::string& part : parts) result += (result.empty() ? "" : ", ") + part;
  return result;
}

// Declares an operator, and the overloads that write: .out, with a target for each output, and an operator whose name
// ends with _, if it has in-place kernels: it overwrites its first `overwritten` arguments.
void define(torch::Library& m, const std::string& schema, size_t overwritten = 0) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  const size_t begin = schema.find('('), end = schema.find(") -> ");
  const std::string name = schema.substr(0, begin), arguments = schema.substr(begin + 1, end - begin - 1);
  const bool is_masked = arguments.find("output_mask") != std::string::npos;  // then targets may be omitted
  std::vector<std::string> targets, types;
  const c10::FunctionSchema parsed = torch::schema(schema.c_str());
  for (const c10::Argument& result : parsed.returns()) {
    types.push_back(std::string("Tensor(") + static_cast<char>('a' + types.size()) + (is_masked ? "!)?" : "!)"));
    const bool is_output = result.name().empty() || result.name() == "output";
    targets.push_back(types.back() + " " + (is_output ? "out" : result.name()) + (is_masked ? "=None" : ""));
  }
  const bool is_single = types.size() == 1;
  const std::string separator = arguments.find("*, ") == std::string::npos ? ", *, " : ", ";
  const std::string returned = is_single ? types[0] : "(" + joined(types) + ")";
  m.def(schema.c_str(), tags);
  m.def((name + ".out(" + arguments + separator + joined(targets) + ") -> " + returned).c_str(), tags);
  if (overwritten == 0) return;
  std::string written = arguments;
  for (size_t i = 0, at = 0; i < overwritten; i++) {
    at = written.find("Tensor ", at);
    written.replace(at, std::string("Tensor").size(), types[i]);
    at += types[i].size();
  }
  // Several results: the dispatcher cannot box a call that returns several of its first arguments.
  m.def((name + "_(" + written + ") -> " + (is_single ? returned : "()")).c_str(), tags);
}

}  // namespace

// weight and bias have shape [..., *normalized_shape]. Their leading dimensions broadcast to those of input. Their
// gradients have the same shapes. No tensor is keyword-only, as vmap and DTensor do not support that.
TORCH_LIBRARY(normops, m) {
  define(m,
         "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, "
         "float weight_offset=0.0, str rounding=\"once\", Tensor? bias=None) -> Tensor",
         1);

  define(m,
         "rms_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, Tensor? weight=None, "
         "float? eps=None, float weight_offset=0.0, str rounding=\"once\", Tensor? grad_residual=None, "
         "Tensor? bias=None, bool[3] output_mask=[True, True, True]) -> (Tensor grad_input, Tensor grad_weight, "
         "Tensor grad_bias)");

  define(m,
         "add_rms_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight=None, "
         "float? eps=None, *, float weight_offset=0.0, str rounding=\"once\", float alpha=1.0) -> (Tensor output, "
         "Tensor residual_out)",
         2);

  // activation is "silu", also called "swish", or "sigmoid".
  define(m,
         "gated_rms_norm(Tensor input, Tensor gate, SymInt[] normalized_shape, Tensor? weight=None, "
         "float? eps=None, *, float weight_offset=0.0, str rounding=\"once\", str activation=\"silu\", "
         "bool norm_before_gate=True) -> Tensor");

  define(m,
         "gated_rms_norm_backward(Tensor grad_output, Tensor input, Tensor gate, SymInt[] normalized_shape, "
         "Tensor? weight=None, float? eps=None, float weight_offset=0.0, str rounding=\"once\", "
         "str activation=\"silu\", bool norm_before_gate=True, bool[3] output_mask=[True, True, True]) "
         "-> (Tensor grad_input, Tensor grad_gate, Tensor grad_weight)");

  // cos and sin broadcast over the leading dimensions of input. They have rotary_dim columns, by default those of
  // input, or half as many. The columns [rotary_offset, rotary_offset + rotary_dim) are rotated.
  define(m,
         "rms_norm_rope(Tensor input, Tensor cos, Tensor sin, SymInt[] normalized_shape, Tensor? weight=None, "
         "float? eps=None, *, float weight_offset=0.0, str rounding=\"once\", bool interleaved=False, "
         "int? rotary_dim=None, int rotary_offset=0) -> Tensor",
         1);

  define(m,
         "rms_norm_rope_backward(Tensor grad_output, Tensor input, Tensor cos, Tensor sin, "
         "SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, float weight_offset=0.0, "
         "str rounding=\"once\", bool interleaved=False, int? rotary_dim=None, int rotary_offset=0, "
         "bool[2] output_mask=[True, True]) -> (Tensor grad_input, Tensor grad_weight)");

  // dim is negative. weight and bias have shape [..., channels]. Their leading dimensions broadcast to those of input
  // with dim moved to the end. activation may also be "identity".
  define(m,
         "channel_rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, "
         "float weight_offset=0.0, str rounding=\"once\", Tensor? bias=None, *, int dim, "
         "str activation=\"identity\") -> Tensor",
         1);

  define(m,
         "channel_rms_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, "
         "Tensor? weight=None, float? eps=None, float weight_offset=0.0, str rounding=\"once\", "
         "Tensor? bias=None, bool[3] output_mask=[True, True, True], *, int dim, str activation=\"identity\") "
         "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)");

  // square_sum and dot have one number for each row, in the compute dtype of input. row_size is the number of elements
  // of a whole row, of which normalized_shape may be a part.
  define(m, "rms_norm_stats(Tensor input, SymInt[] normalized_shape) -> (Tensor square_sum)");

  define(m,
         "rms_norm_from_stats(Tensor input, Tensor square_sum, SymInt[] normalized_shape, Tensor? weight=None, "
         "float? eps=None, *, float weight_offset=0.0, str rounding=\"once\", SymInt row_size) -> Tensor");

  define(m,
         "rms_norm_backward_stats(Tensor grad_output, Tensor input, SymInt[] normalized_shape, "
         "Tensor? weight=None, float? eps=None, float weight_offset=0.0, str rounding=\"once\") "
         "-> (Tensor square_sum, Tensor dot)");

  define(m,
         "rms_norm_backward_from_stats(Tensor grad_output, Tensor input, Tensor square_sum, Tensor dot, "
         "SymInt[] normalized_shape, Tensor? weight=None, float? eps=None, float weight_offset=0.0, "
         "str rounding=\"once\", Tensor? grad_residual=None, bool[2] output_mask=[True, True], *, "
         "SymInt row_size) -> (Tensor grad_input, Tensor grad_weight)");
}
