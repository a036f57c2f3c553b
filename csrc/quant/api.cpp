#include "../common/tensor.h"
#include "params.h"

namespace kimi::quant {
namespace {

// Checks x and values, and fills what both formats share.
QuantParams common_params(Call& call, py::handle x_arg, py::handle values_arg, int64_t group) {
  const Tensor x = call.tensor("x", x_arg).is({DType::kBF16, DType::kF32}).rank(2).row_strided();
  const int64_t rows = x.shape[0], width = x.shape[1];
  call.require(width > 0 && width < INT32_MAX, "x must have columns");
  call.require(group > 0 && group % 32 == 0, "group must be a multiple of 32, got " + std::to_string(group));
  const Tensor values = call.tensor("values", values_arg);
  values.is({DType::kF8E4M3, DType::kU8}).sizes({rows, width}).contiguous();
  QuantParams params = {};
  params.x = x.data;
  params.values = values.as<uint8_t>();
  params.rows = rows;
  params.x_stride = x.stride[0];
  params.width = static_cast<int>(width);
  params.group = static_cast<int>(group);
  params.groups = static_cast<int>((width + group - 1) / group);
  params.x_f32 = x.dtype == DType::kF32;
  const int64_t row_bytes = x.stride[0] * dtype_size(x.dtype);
  params.vector = width % 8 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 &&
                  (rows <= 1 || row_bytes % 16 == 0) && reinterpret_cast<uintptr_t>(values.data) % 8 == 0;
  return params;
}

void fp8_per_token_group(py::handle x, py::handle values, py::handle scale_arg, int64_t group) {
  Call call("quant.fp8_per_token_group");
  QuantParams params = common_params(call, x, values, group);
  const Tensor scale = call.tensor("scale", scale_arg);
  params.scale = scale.is({DType::kF32}).sizes({params.rows, params.groups}).contiguous().as<float>();
  if (params.rows > 0) launch_fp8(params, call.stream());
}

void mxfp8(py::handle x, py::handle values, py::handle scale_arg) {
  Call call("quant.mxfp8");
  QuantParams params = common_params(call, x, values, 32);
  call.require(params.width % 32 == 0, "x must have a multiple of 32 columns, got " + std::to_string(params.width));
  const Tensor scale = call.tensor("scale", scale_arg);
  scale.is({DType::kU8, DType::kF8E8M0}).sizes({params.rows, params.groups}).contiguous();
  params.exponent = scale.as<uint8_t>();
  if (params.rows > 0) launch_mxfp8(params, call.stream());
}

}  // namespace

void register_quant(py::module_& m) {
  m.def("quant_fp8_per_token_group", &fp8_per_token_group, py::arg("x"), py::arg("values"), py::arg("scale"),
        py::arg("group"));
  m.def("quant_mxfp8", &mxfp8, py::arg("x"), py::arg("values"), py::arg("scale"));
}

}  // namespace kimi::quant
