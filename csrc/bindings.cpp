// The compiled module: what it was built for, and one registration a family.
#include <pybind11/pybind11.h>

#include <string>

#include "common/tensor.h"

namespace kimi {
namespace attn_res {
void register_attn_res(py::module_& m);
}
namespace kda {
void register_kda(py::module_& m);
}
namespace moe {
void register_moe(py::module_& m);
void register_moe_finalize(py::module_& m);
}  // namespace moe
namespace meta {
void register_meta(py::module_& m);
}
namespace norm {
void register_norm(py::module_& m);
}
namespace quant {
void register_quant(py::module_& m);
}
namespace routing {
void register_routing(py::module_& m);
}
}  // namespace kimi

PYBIND11_MODULE(_C, m) {
  m.doc() = "CUDA kernels for Kimi K3. Arguments are checked here, by name; see kimi_kernels for the public functions.";
  m.def("build_info", [] {
    pybind11::dict info;
    info["archs"] = std::string(KIMI_ARCHS);
    info["cuda"] = CUDART_VERSION;
    info["built"] = std::string(KIMI_BUILT);
    return info;
  });
  m.def("describe", &kimi::describe, pybind11::arg("tensor"));

  kimi::attn_res::register_attn_res(m);
  kimi::kda::register_kda(m);
  kimi::meta::register_meta(m);
  kimi::moe::register_moe(m);
  kimi::moe::register_moe_finalize(m);
  kimi::norm::register_norm(m);
  kimi::quant::register_quant(m);
  kimi::routing::register_routing(m);
}
