#include "../common/tensor.h"
#include "finalize.h"

namespace kimi::moe {
namespace {

void finalize(py::handle rows_arg, py::handle row_index_arg, py::handle weights_arg, py::handle norm_arg,
              py::handle out_arg, float eps) {
  Call call("moe.finalize");
  const Tensor rows = call.tensor("rows", rows_arg).is({DType::kBF16, DType::kF32}).rank(2).row_strided().aligned(16);
  const int64_t width = rows.shape[1];
  call.require(width > 0 && width % 8 == 0 && width <= kFinalizeMaxWidth,
               "rows must have a multiple of 8 columns up to 8192, got " + std::to_string(width));
  const Tensor row_index = call.tensor("row_index", row_index_arg).is({DType::kI32}).rank(2).contiguous();
  const int64_t tokens = row_index.shape[0], k = row_index.shape[1];
  const Tensor weights = call.tensor("weights", weights_arg).is({DType::kF32}).sizes({tokens, k}).contiguous();
  const Tensor norm = call.optional("norm_weight", norm_arg);
  if (norm) norm.is({DType::kBF16, DType::kF32}).sizes({width}).contiguous().aligned(16);
  const Tensor out = call.tensor("out", out_arg).is({rows.dtype}).sizes({tokens, width}).row_strided().aligned(16);

  FinalizeParams params = {};
  params.rows = rows.data;
  params.rows_f32 = rows.dtype == DType::kF32;
  params.row_index = row_index.as<const int32_t>();
  params.weights = weights.as<const float>();
  params.norm = norm ? norm.data : nullptr;
  params.norm_f32 = norm && norm.dtype == DType::kF32;
  params.out = out.data;
  params.tokens = tokens;
  params.rows_stride = rows.stride[0];
  params.out_stride = out.stride[0];
  params.width = static_cast<int>(width);
  params.k = static_cast<int>(k);
  params.eps = eps;
  if (tokens > 0) launch_finalize(params, call.stream());
}

}  // namespace

void register_moe_finalize(py::module_& m) {
  m.def("moe_finalize", &finalize, py::arg("rows"), py::arg("row_index"), py::arg("weights"), py::arg("norm_weight"),
        py::arg("out"), py::arg("eps"));
}

}  // namespace kimi::moe
