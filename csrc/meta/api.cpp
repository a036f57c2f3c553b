#include "../common/tensor.h"
#include "params.h"

namespace kimi::meta {
namespace {

// packed [words] int32, and the step's buffers as StepParams lists them
void step(py::handle packed_arg, py::handle token_ids_arg, py::handle cu_seqlens_arg, py::handle prefill_cu_seqlens_arg,
          py::handle context_lens_arg, py::handle slots_arg, py::handle fresh_arg, py::handle block_table_arg,
          py::handle slot_mapping_arg, py::handle num_tokens_arg, int64_t block_size) {
  Call call("meta.step");
  const Tensor packed = call.tensor("packed", packed_arg).is({DType::kI32}).rank(1).contiguous();
  const Tensor token_ids = call.tensor("token_ids", token_ids_arg).is({DType::kI64}).rank(1).contiguous();
  const Tensor table = call.tensor("block_table", block_table_arg).is({DType::kI32}).rank(2).contiguous();
  const int64_t max_tokens = token_ids.shape[0], max_seqs = table.shape[0], max_blocks = table.shape[1];
  call.require(max_seqs < INT32_MAX && max_blocks < INT32_MAX && max_tokens < INT32_MAX,
               "buffers must have fewer than 2^31 rows");
  call.require(packed.shape[0] > kHeader, "packed must have a header of 4 words and at least one more");
  call.require(block_size > 0 && block_size < INT32_MAX, "block_size must be at least 1");
  const auto array = [&](const char* name, py::handle argument, DType dtype, int64_t size) {
    return call.tensor(name, argument).is({dtype}).sizes({size}).contiguous();
  };

  StepParams params = {};
  params.packed = packed.as<const int32_t>();
  params.token_ids = token_ids.as<int64_t>();
  params.cu_seqlens = array("cu_seqlens", cu_seqlens_arg, DType::kI32, max_seqs + 1).as<int32_t>();
  params.prefill_cu_seqlens =
      array("prefill_cu_seqlens", prefill_cu_seqlens_arg, DType::kI32, max_seqs + 1).as<int32_t>();
  params.context_lens = array("context_lens", context_lens_arg, DType::kI32, max_seqs).as<int32_t>();
  params.slots = array("slots", slots_arg, DType::kI32, max_seqs).as<int32_t>();
  params.fresh = array("fresh", fresh_arg, DType::kBool, max_seqs).as<bool>();
  params.block_table = table.as<int32_t>();
  params.slot_mapping = array("slot_mapping", slot_mapping_arg, DType::kI64, max_tokens).as<int64_t>();
  params.num_tokens = array("num_tokens", num_tokens_arg, DType::kI32, 1).as<int32_t>();
  params.max_tokens = max_tokens;
  params.max_seqs = static_cast<int>(max_seqs);
  params.max_blocks = static_cast<int>(max_blocks);
  params.block_size = static_cast<int>(block_size);
  launch_step(params, call.stream());
}

}  // namespace

void register_meta(py::module_& m) {
  m.def("meta_step", &step, py::arg("packed"), py::arg("token_ids"), py::arg("cu_seqlens"),
        py::arg("prefill_cu_seqlens"), py::arg("context_lens"), py::arg("slots"), py::arg("fresh"),
        py::arg("block_table"), py::arg("slot_mapping"), py::arg("num_tokens"), py::arg("block_size"));
}

}  // namespace kimi::meta
