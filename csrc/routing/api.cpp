#include "../common/tensor.h"
#include "params.h"

namespace kimi::routing {
namespace {

const int32_t* scalar(const Tensor& tensor) {
  if (!tensor) return nullptr;
  tensor.is({DType::kI32}).sizes({1});
  return tensor.as<const int32_t>();
}

void topk(py::handle logits_arg, py::handle bias_arg, py::handle num_tokens_arg, py::handle ids_arg,
          py::handle weights_arg, py::handle counts_arg, int64_t num_groups, int64_t topk_groups, double scale) {
  Call call("routing.topk");
  const Tensor logits = call.tensor("logits", logits_arg).is({DType::kF32}).rank(2).row_strided();
  const int64_t tokens = logits.shape[0], experts = logits.shape[1];
  call.require(experts >= 1 && experts <= kMaxExperts,
               "logits must have 1 to 1024 columns, got " + std::to_string(experts));
  const Tensor bias = call.tensor("bias", bias_arg).is({DType::kF32}).sizes({experts}).contiguous();
  const Tensor num_tokens = call.optional("num_tokens", num_tokens_arg);
  const Tensor ids = call.tensor("ids", ids_arg).is({DType::kI32}).rank(2).contiguous();
  const int64_t k = ids.shape[1], most = experts < kMaxTopK ? experts : kMaxTopK;
  call.require(k >= 1 && k <= most, "k must be 1 to " + std::to_string(most) + ", got " + std::to_string(k));
  ids.sizes({tokens, k});
  const Tensor weights = call.tensor("weights", weights_arg).is({DType::kF32}).sizes({tokens, k}).contiguous();
  const Tensor counts = call.optional("counts", counts_arg);
  if (counts) counts.is({DType::kI32}).sizes({experts + 1}).contiguous();
  call.require(num_groups >= 1 && experts % num_groups == 0,
               "num_groups must divide " + std::to_string(experts) + ", got " + std::to_string(num_groups));
  call.require(topk_groups >= 1 && topk_groups <= num_groups,
               "topk_groups must be 1 to " + std::to_string(num_groups) + ", got " + std::to_string(topk_groups));
  call.require(k <= experts / num_groups * topk_groups, "k must be at most the experts of the chosen groups (" +
                                                            std::to_string(experts / num_groups * topk_groups) +
                                                            "), got " + std::to_string(k));

  TopkParams params = {};
  params.logits = logits.as<const float>();
  params.bias = bias.as<const float>();
  params.num_tokens = scalar(num_tokens);
  params.ids = ids.as<int32_t>();
  params.weights = weights.as<float>();
  params.counts = counts ? counts.as<int32_t>() : nullptr;
  params.tokens = tokens;
  params.logits_stride = logits.stride[0];
  params.experts = static_cast<int>(experts);
  params.k = static_cast<int>(k);
  params.num_groups = static_cast<int>(num_groups);
  params.topk_groups = static_cast<int>(topk_groups);
  params.scale = static_cast<float>(scale);
  if (tokens > 0) launch_topk(params, call.stream());
}

void dispatch(py::handle ids_arg, py::handle num_tokens_arg, py::handle clear_arg, py::handle counts_arg,
              py::handle offsets_arg, py::handle pairs_arg, py::handle tiles_arg, py::handle num_tiles_arg,
              py::handle scratch_arg, int64_t first, int64_t tile_tokens) {
  Call call("routing.dispatch");
  const Tensor ids = call.tensor("ids", ids_arg).is({DType::kI32}).rank(2).contiguous();
  const int64_t slots = ids.numel();
  call.require(slots < kMaxPairs, "ids must have fewer than 2^28 entries, got " + std::to_string(slots));
  const Tensor num_tokens = call.optional("num_tokens", num_tokens_arg);
  const Tensor clear = call.optional("counts", clear_arg);
  if (clear) clear.is({DType::kI32}).rank(1).contiguous();
  const Tensor counts = call.tensor("counts_out", counts_arg).is({DType::kI32}).rank(1).contiguous();
  const int64_t experts = counts.shape[0];
  call.require(experts >= 1 && experts <= kMaxExperts, "1 to 1024 experts take part, got " + std::to_string(experts));
  call.require(first >= 0 && tile_tokens > 0 && tile_tokens % 8 == 0,
               "expert_range starts at 0 or later and tiles hold a multiple of 8 pairs");
  const Tensor offsets = call.tensor("offsets", offsets_arg).is({DType::kI32}).sizes({experts + 1}).contiguous();
  const Tensor pairs = call.tensor("pairs", pairs_arg).is({DType::kI32}).sizes({slots}).contiguous();
  const Tensor tiles = call.tensor("tiles", tiles_arg).is({DType::kI32}).sizes({kAny, 3}).contiguous();
  const int64_t most_tiles = (slots < experts ? slots : experts) + slots / tile_tokens;
  call.require(tiles.shape[0] >= most_tiles,
               "tiles must have " + std::to_string(most_tiles) + " rows, got " + std::to_string(tiles.shape[0]));
  const Tensor num_tiles = call.tensor("num_tiles", num_tiles_arg).is({DType::kI32}).sizes({1});
  const Tensor scratch = call.optional("scratch", scratch_arg);
  const int64_t needed = dispatch_scratch(slots, experts);
  if (needed > 0) {
    call.require(static_cast<bool>(scratch), "scratch of " + std::to_string(needed) + " int32 must be given");
    scratch.is({DType::kI32}).rank(1).contiguous();
    call.require(scratch.shape[0] >= needed,
                 "scratch must have " + std::to_string(needed) + " elements, got " + std::to_string(scratch.shape[0]));
  }

  DispatchParams params = {};
  params.ids = ids.as<const int32_t>();
  params.num_tokens = scalar(num_tokens);
  params.clear = clear ? clear.as<int32_t>() : nullptr;
  params.num_clear = clear ? static_cast<int>(clear.shape[0]) : 0;
  params.counts = counts.as<int32_t>();
  params.offsets = offsets.as<int32_t>();
  params.pairs = pairs.as<int32_t>();
  params.tiles = tiles.as<int32_t>();
  params.num_tiles = num_tiles.as<int32_t>();
  params.tokens = ids.shape[0];
  params.k = static_cast<int>(ids.shape[1]);
  params.first = static_cast<int>(first);
  params.experts = static_cast<int>(experts);
  params.tile_tokens = static_cast<int>(tile_tokens);
  params.max_tiles = static_cast<int>(tiles.shape[0]);
  launch_dispatch(params, scratch ? scratch.as<int32_t>() : nullptr, call.stream());
}

}  // namespace

void register_routing(py::module_& m) {
  m.def("routing_topk", &topk, py::arg("logits"), py::arg("bias"), py::arg("num_tokens"), py::arg("ids"),
        py::arg("weights"), py::arg("counts"), py::arg("num_groups"), py::arg("topk_groups"), py::arg("scale"));
  m.def("routing_dispatch_scratch", &dispatch_scratch, py::arg("pairs"), py::arg("experts"));
  m.def("routing_dispatch", &dispatch, py::arg("ids"), py::arg("num_tokens"), py::arg("clear"), py::arg("counts"),
        py::arg("offsets"), py::arg("pairs"), py::arg("tiles"), py::arg("num_tiles"), py::arg("scratch"),
        py::arg("first"), py::arg("tile_tokens"));
}

}  // namespace kimi::routing
