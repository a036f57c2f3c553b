#include <string>

#include "../common/check.h"
#include "../common/math.h"
#include "../common/tensor.h"
#include "finalize.h"
#include "launch.h"

namespace kimi::moe {
namespace {

constexpr int kMaxTopK = kFinalizeMaxTopK;

WeightFormat weight_format(const Call& call, const std::string& name) {
  call.require(name == "mxfp4" || name == "fp8", "format must be mxfp4 or fp8, got " + name);
  return name == "mxfp4" ? WeightFormat::kMxfp4 : WeightFormat::kFp8;
}

Activation activation_form(const Call& call, const std::string& name) {
  call.require(name == "fp8" || name == "bf16", "activation must be fp8 or bf16, got " + name);
  return name == "fp8" ? Activation::kFp8 : Activation::kBf16;
}

Problem problem_of(const Call& call, int64_t tokens, int64_t top_k, int64_t experts, int64_t total_experts,
                   int64_t width, int64_t inner, const std::string& format, const std::string& activation) {
  call.require(top_k >= 1 && top_k <= kMaxTopK, "topk_ids must have 1 to 16 columns, got " + std::to_string(top_k));
  call.require(experts >= 1 && experts <= kMaxExperts, "1 to 1024 experts, got " + std::to_string(experts));
  call.require(total_experts >= experts, "num_experts must be at least the " + std::to_string(experts) +
                                             " that take part, got " + std::to_string(total_experts));
  call.require(width > 0 && width % 32 == 0 && width <= kFinalizeMaxWidth,
               "x must have a multiple of 32 columns up to 8192, got " + std::to_string(width));
  call.require(inner > 0 && inner % 32 == 0, "the expert width must be a multiple of 32, got " + std::to_string(inner));
  call.require(tokens * top_k < INT32_MAX - 8 * kMaxExperts, "too many tokens: " + std::to_string(tokens));
  return Problem{tokens,
                 static_cast<int>(top_k),
                 static_cast<int>(experts),
                 static_cast<int>(total_experts),
                 static_cast<int>(width),
                 static_cast<int>(inner),
                 weight_format(call, format),
                 activation_form(call, activation)};
}

// Row tiles of a weight matrix: 64 gate and 64 up rows a tile for the first, an even number so that h fills its blocks.
int row_tiles(const Problem& problem, int gemm) {
  return gemm == 1 ? 2 * ceil_div(problem.inner, kTileRows) : ceil_div(problem.width, kTileRows);
}

int k_blocks(const Problem& problem, int gemm) {
  return ceil_div(gemm == 1 ? problem.width : problem.inner, kBlockColumns);
}

int64_t expert_bytes(const Problem& problem, int gemm) {
  return row_tiles(problem, gemm) *
         (weight_header_bytes(problem.format) + int64_t(k_blocks(problem, gemm)) * weight_block_bytes(problem.format));
}

py::dict plan(int64_t tokens, int64_t top_k, int64_t experts, int64_t total_experts, int64_t width, int64_t inner,
              const std::string& format, const std::string& activation) {
  const Call call("moe.experts");
  const Problem problem = problem_of(call, tokens, top_k, experts, total_experts, width, inner, format, activation);
  const Choice choice = choose(problem);
  const Workspace space = lay_out(problem);
  py::dict result;
  result["piece_rows"] = choice.piece_rows;
  result["max_tiles"] = choice.max_tiles;
  result["workspace_bytes"] = space.bytes;
  result["blobs"] = space.blobs;
  result["hidden"] = space.hidden;
  result["rows"] = space.rows;
  result["scales"] = space.scales;
  result["text"] = describe(problem);
  return result;
}

void require_sm90(const Call& call) {
  int major = 0, minor = 0;
  CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, call.device()));
  CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, call.device()));
  if (major != 9) {
    throw std::runtime_error("moe.experts: kernels exist for compute capability 9.0 (sm_90a), this device has " +
                             std::to_string(major) + "." + std::to_string(minor));
  }
}

void launch_gemm(const GemmParams& params, const Problem& problem, int gemm, const Choice& choice, int64_t max_tiles,
                 cudaStream_t stream) {
  const int64_t items = max_tiles * params.row_tiles;
  const bool fp8 = problem.activation == Activation::kFp8;
  if (problem.format == WeightFormat::kMxfp4) {
    (fp8 ? launch_gemm_mxfp4_fp8 : launch_gemm_mxfp4_bf16)(params, gemm, choice.tiles, items, stream);
  } else {
    (fp8 ? launch_gemm_fp8_fp8 : launch_gemm_fp8_bf16)(params, gemm, choice.tiles, items, stream);
  }
}

// Gather, first product with SiTU, h to one scale a row, second product, and the weighted sum when `out` is given;
// without it the rows token * top_k + j stay in the workspace.
void experts(py::handle x_arg, py::handle ids_arg, py::handle topk_weights_arg, py::handle w13_arg, py::handle w2_arg,
             py::handle norm_arg, py::handle pairs_arg, py::handle tiles_arg, py::handle num_tiles_arg,
             py::handle first_product_arg, py::handle out_arg, py::handle workspace_arg, const std::string& format,
             const std::string& activation, int64_t inner, int64_t first, int64_t last, int64_t total_experts,
             int64_t weight_offset, double beta, double linear_beta, double eps) {
  Call call("moe.experts");
  const Tensor x = call.tensor("x", x_arg).is({DType::kBF16}).rank(2).row_strided().aligned(16);
  const int64_t tokens = x.shape[0], width = x.shape[1];
  const Tensor pair_list = call.tensor("dispatch.pairs", pairs_arg).is({DType::kI32}).rank(1).contiguous();
  const int64_t pairs = pair_list.shape[0], top_k = tokens > 0 ? pairs / tokens : 1;
  call.require(pairs == tokens * top_k, "dispatch must be one of the tokens of x");
  const Tensor out = call.optional("out", out_arg);
  const Tensor ids = call.optional("topk_ids", ids_arg), topk_weights = call.optional("topk_weights", topk_weights_arg);
  if (out) {
    out.is({DType::kBF16}).sizes({tokens, width}).row_strided().aligned(16);
    call.require(ids && topk_weights, "topk_ids and topk_weights must be given");
    ids.is({DType::kI32}).rank(2).sizes({tokens, tokens > 0 ? top_k : kAny}).contiguous();
    topk_weights.is({DType::kF32}).sizes({tokens, ids.shape[1]}).contiguous();
  }
  call.require(first >= 0 && first < last, "expert_range must be first < last + 1");
  const Problem problem =
      problem_of(call, tokens, top_k, last - first, total_experts, width, inner, format, activation);
  call.require(beta > 0, "beta must be positive");

  const Tensor w13 = call.tensor("w13", w13_arg).is({DType::kU8}).rank(2).contiguous().aligned(128);
  const Tensor w2 = call.tensor("w2", w2_arg).is({DType::kU8}).rank(2).contiguous().aligned(128);
  w13.sizes({kAny, expert_bytes(problem, 1)});
  w2.sizes({w13.shape[0], expert_bytes(problem, 2)});
  call.require(weight_offset >= 0 && weight_offset + problem.experts <= w13.shape[0],
               "w13 must hold the experts of expert_range, got " + std::to_string(w13.shape[0]));
  const Tensor norm = call.optional("norm_weight", norm_arg);
  if (norm) norm.is({DType::kBF16, DType::kF32}).sizes({width}).contiguous().aligned(16);
  const Tensor tiles = call.tensor("dispatch.tiles", tiles_arg).is({DType::kI32}).sizes({kAny, 3}).contiguous();
  const Tensor num_tiles = call.tensor("dispatch.num_tiles", num_tiles_arg).is({DType::kI32}).sizes({1});
  const Tensor first_product = call.optional("first_product", first_product_arg);
  if (first_product) first_product.is({DType::kBF16}).sizes({pairs, 2 * inner}).contiguous();
  const Choice choice = choose(problem);
  const Workspace space = lay_out(problem);
  const Tensor workspace = call.tensor("workspace", workspace_arg).is({DType::kU8}).rank(1).contiguous().aligned(128);
  call.require(workspace.shape[0] >= space.bytes, "workspace must have " + std::to_string(space.bytes) +
                                                      " bytes, got " + std::to_string(workspace.shape[0]));
  if (tokens == 0) return;
  require_sm90(call);
  const cudaStream_t stream = call.stream();
  uint8_t* const base = workspace.as<uint8_t>();

  const WorkList work{tiles.as<const int32_t>(), num_tiles.as<const int32_t>(), static_cast<int32_t>(weight_offset),
                      choice.piece_rows};
  GatherParams gather = {};
  gather.x = x.as<const __nv_bfloat16>();
  gather.x_stride = x.stride[0];
  gather.pairs = pair_list.as<const int32_t>();
  gather.work = work;
  gather.blobs = base + space.blobs;
  gather.scales = reinterpret_cast<float*>(base + space.scales);
  gather.codes = base + space.codes;
  gather.code_scales = reinterpret_cast<float*>(base + space.code_scales);
  gather.tokens = static_cast<int32_t>(tokens);
  gather.width = problem.width;
  gather.k_blocks = k_blocks(problem, 1);
  gather.top_k = problem.top_k;
  launch_gather(gather, problem.activation, tiles.shape[0], stream);

  GemmParams one = {};
  one.weights = w13.as<const uint8_t>();
  one.blobs = gather.blobs;
  one.scales = gather.scales;
  one.work = work;
  one.row_tiles = row_tiles(problem, 1);
  one.k_blocks = gather.k_blocks;
  one.hidden = base + space.hidden;
  one.exponents = base + space.exponents;
  one.hidden_k_blocks = k_blocks(problem, 2);
  one.inner = problem.inner;
  one.beta = static_cast<float>(beta);
  one.linear_beta = static_cast<float>(linear_beta);
  one.raw = first_product ? first_product.as<__nv_bfloat16>() : nullptr;
  launch_gemm(one, problem, 1, choice, tiles.shape[0], stream);

  SettleParams settle = {};
  settle.hidden = one.hidden;
  settle.exponents = one.exponents;
  settle.scales = gather.scales;
  settle.work = work;
  settle.k_blocks = one.hidden_k_blocks;
  if (problem.activation == Activation::kFp8) launch_settle(settle, tiles.shape[0], stream);

  GemmParams two = {};
  two.weights = w2.as<const uint8_t>();
  two.blobs = one.hidden;
  two.scales = settle.scales;
  two.work = work;
  two.row_tiles = row_tiles(problem, 2);
  two.k_blocks = one.hidden_k_blocks;
  two.out = reinterpret_cast<__nv_bfloat16*>(base + space.rows);
  two.out_stride = problem.width;
  two.pairs = gather.pairs;
  two.width = problem.width;
  launch_gemm(two, problem, 2, choice, tiles.shape[0], stream);
  if (!out) return;

  FinalizeParams sum = {};
  sum.rows = two.out;
  sum.row_index = ids.as<const int32_t>();
  sum.own_rows = true;
  sum.first_expert = static_cast<int>(first);
  sum.last_expert = static_cast<int>(last);
  sum.weights = topk_weights.as<const float>();
  sum.norm = norm ? norm.data : nullptr;
  sum.norm_f32 = norm && norm.dtype == DType::kF32;
  sum.out = out.data;
  sum.tokens = tokens;
  sum.rows_stride = width;
  sum.out_stride = out.stride[0];
  sum.width = problem.width;
  sum.k = problem.top_k;
  sum.eps = static_cast<float>(eps);
  launch_finalize(sum, stream);
}

}  // namespace

void register_moe(py::module_& m) {
  m.def("moe_plan", &plan, py::arg("tokens"), py::arg("top_k"), py::arg("experts"), py::arg("total_experts"),
        py::arg("width"), py::arg("inner"), py::arg("format"), py::arg("activation"));
  m.def("moe_experts", &experts, py::arg("x"), py::arg("topk_ids"), py::arg("topk_weights"), py::arg("w13"),
        py::arg("w2"), py::arg("norm_weight"), py::arg("pairs"), py::arg("tiles"), py::arg("num_tiles"),
        py::arg("first_product"), py::arg("out"), py::arg("workspace"), py::arg("format"), py::arg("activation"),
        py::arg("inner"), py::arg("first"), py::arg("last"), py::arg("total_experts"), py::arg("weight_offset"),
        py::arg("beta"), py::arg("linear_beta"), py::arg("eps"));
}

}  // namespace kimi::moe
