#include "../common/tensor.h"
#include "params.h"
#include "rms_config.h"

namespace kimi::norm {
namespace {

// x [T, D] bf16 -> out [T, D] bf16 (or None), q [T, D] E4M3 and scale [T, ceil(D / 128)] (or None, None)
void rms(py::handle x_arg, py::handle weight_arg, py::handle out_arg, py::handle q_arg, py::handle scale_arg,
         float eps) {
  Call call("norm.rms");
  const Tensor x = call.tensor("x", x_arg).is({DType::kBF16}).rank(2).row_strided().aligned(16);
  const int64_t rows = x.shape[0], width = x.shape[1];
  call.require(width % 8 == 0 && width > 0, "x must have a multiple of 8 columns, got " + std::to_string(width));
  const Tensor weight =
      call.tensor("weight", weight_arg).is({DType::kBF16, DType::kF32}).sizes({width}).contiguous().aligned(16);
  const Tensor out = call.optional("out", out_arg);
  const Tensor q = call.optional("q", q_arg), scale = call.optional("scale", scale_arg);
  call.require(out || q, "out or q must be given");
  call.require(static_cast<bool>(q) == static_cast<bool>(scale), "q and scale go together");

  RmsParams params = {};
  params.x = x.as<const __nv_bfloat16>();
  params.weight = weight.data;
  params.weight_f32 = weight.dtype == DType::kF32;
  params.rows = rows;
  params.width = static_cast<int>(width);
  params.x_stride = x.stride[0];
  params.eps = eps;
  if (out) {
    out.is({DType::kBF16}).sizes({rows, width}).row_strided().aligned(16);
    params.out = out.as<__nv_bfloat16>();
    params.out_stride = out.stride[0];
  }
  if (q) {
    q.is({DType::kF8E4M3, DType::kU8}).sizes({rows, width}).row_strided().aligned(8);
    scale.is({DType::kF32}).sizes({rows, (width + 127) / 128}).row_strided();
    params.q = q.as<uint8_t>();
    params.q_stride = q.stride[0];
    params.scale = scale.as<float>();
    params.scale_stride = scale.stride[0];
  }
  if (rows > 0) launch_rms(params, call.stream());
}

void rms_gated(py::handle x_arg, py::handle gate_arg, py::handle weight_arg, py::handle out_arg, float eps) {
  Call call("norm.rms_gated");
  const Tensor x = call.tensor("x", x_arg).is({DType::kBF16}).rank(2).row_strided().aligned(16);
  const int64_t rows = x.shape[0], width = x.shape[1];
  const Tensor gate = call.tensor("gate", gate_arg).is({DType::kBF16}).sizes({rows, width}).row_strided().aligned(16);
  const Tensor weight = call.tensor("weight", weight_arg).is({DType::kBF16, DType::kF32});
  weight.sizes({kGroupWidth}).contiguous().aligned(16);
  call.require(width > 0 && width % kGroupWidth == 0,
               "x must have a multiple of 128 columns, got " + std::to_string(width));
  const Tensor out = call.tensor("out", out_arg).is({DType::kBF16}).sizes({rows, width}).row_strided().aligned(16);

  RmsGatedParams params = {};
  params.x = x.as<const __nv_bfloat16>();
  params.gate = gate.as<const __nv_bfloat16>();
  params.weight = weight.data;
  params.weight_f32 = weight.dtype == DType::kF32;
  params.out = out.as<__nv_bfloat16>();
  params.rows = rows;
  params.x_stride = x.stride[0];
  params.gate_stride = gate.stride[0];
  params.out_stride = out.stride[0];
  params.heads = static_cast<int>(width / kGroupWidth);
  params.eps = eps;
  if (rows > 0) launch_rms_gated(params, call.stream());
}

}  // namespace

void register_norm(py::module_& m) {
  m.def("norm_rms", &rms, py::arg("x"), py::arg("weight"), py::arg("out"), py::arg("q"), py::arg("scale"),
        py::arg("eps"));
  m.def("norm_rms_gated", &rms_gated, py::arg("x"), py::arg("gate"), py::arg("weight"), py::arg("out"), py::arg("eps"));
}

}  // namespace kimi::norm
