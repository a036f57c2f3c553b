#include "../common/tensor.h"
#include "params.h"

namespace kimi::attn_res {
namespace {

void mix(py::handle blocks_arg, py::handle partial_arg, py::handle delta_arg, py::handle norm_arg, py::handle proj_arg,
         py::handle out_norm_arg, py::handle partial_out_arg, py::handle x_arg, float eps) {
  Call call("attn_res.mix");
  const Tensor partial = call.tensor("partial", partial_arg).is({DType::kBF16}).rank(2).row_strided().aligned(16);
  const int64_t tokens = partial.shape[0], width = partial.shape[1];
  call.require(width > 0 && width % 8 == 0 && width <= 32768,
               "partial must have a multiple of 8 columns up to 32768, got " + std::to_string(width));
  const Tensor blocks = call.tensor("blocks", blocks_arg).is({DType::kBF16}).sizes({kAny, tokens, width});
  call.require(blocks.shape[0] <= kMaxBlocks,
               "blocks must hold at most 15 blocks, got " + std::to_string(blocks.shape[0]));
  blocks.row_strided().aligned(16);
  const auto weight = [&](const char* name, py::handle arg) {
    return call.tensor(name, arg).is({DType::kBF16, DType::kF32}).sizes({width}).contiguous().aligned(16);
  };
  const Tensor norm = weight("norm_weight", norm_arg), proj = weight("proj_weight", proj_arg);
  const Tensor out_norm = weight("out_norm_weight", out_norm_arg);
  const auto row_tensor = [&](const Tensor& tensor) {
    if (tensor) tensor.is({DType::kBF16}).sizes({tokens, width}).row_strided().aligned(16);
    return tensor;
  };
  const Tensor delta = row_tensor(call.optional("delta", delta_arg));
  const Tensor partial_out = row_tensor(call.optional("partial_out", partial_out_arg));
  const Tensor x = row_tensor(call.tensor("x_out", x_arg));

  MixParams params = {};
  params.blocks = blocks.as<const __nv_bfloat16>();
  params.partial = partial.as<const __nv_bfloat16>();
  params.delta = delta ? delta.as<const __nv_bfloat16>() : nullptr;
  params.norm = norm.data;
  params.proj = proj.data;
  params.out_norm = out_norm.data;
  params.partial_out = partial_out ? partial_out.as<__nv_bfloat16>() : nullptr;
  params.x = x.as<__nv_bfloat16>();
  params.tokens = tokens;
  params.block_stride = blocks.stride[0];
  params.block_row_stride = blocks.stride[1];
  params.partial_stride = partial.stride[0];
  params.delta_stride = delta ? delta.stride[0] : 0;
  params.partial_out_stride = partial_out ? partial_out.stride[0] : 0;
  params.x_stride = x.stride[0];
  params.num_blocks = static_cast<int>(blocks.shape[0]);
  params.width = static_cast<int>(width);
  params.eps = eps;
  params.norm_f32 = norm.dtype == DType::kF32;
  params.proj_f32 = proj.dtype == DType::kF32;
  params.out_norm_f32 = out_norm.dtype == DType::kF32;
  if (tokens > 0) launch_mix(params, call.stream());
}

}  // namespace

void register_attn_res(py::module_& m) {
  m.def("attn_res_mix", &mix, py::arg("blocks"), py::arg("partial"), py::arg("delta"), py::arg("norm_weight"),
        py::arg("proj_weight"), py::arg("out_norm_weight"), py::arg("partial_out"), py::arg("x_out"), py::arg("eps"));
}

}  // namespace kimi::attn_res
