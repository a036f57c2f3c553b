#include "../common/tensor.h"
#include "params.h"

namespace kimi::kda {
namespace {

struct States {
  const Tensor state, conv_state;
  int heads, num_slots;
};

// state [slots, heads, 128, 128] f32 and conv_state [slots, 3, 3 * heads * 128] bf16, one layer's view of the pools.
States read_states(Call& call, py::handle state_arg, py::handle conv_arg) {
  const Tensor state = call.tensor("state", state_arg).is({DType::kF32}).rank(4);
  const int64_t heads = state.shape[1];
  call.require(heads >= 1 && heads <= kMaxHeads,
               "state must have 1 to " + std::to_string(kMaxHeads) + " heads, got " + std::to_string(heads));
  state.sizes({kAny, heads, kHeadDim, kHeadDim}).inner_contiguous(3).aligned(16);
  const Tensor conv = call.tensor("conv_state", conv_arg).is({DType::kBF16});
  conv.rank(3).sizes({state.shape[0], 3, 3 * heads * kHeadDim}).inner_contiguous(2).aligned(16);
  return {state, conv, static_cast<int>(heads), static_cast<int>(state.shape[0])};
}

void put_states(const States& states, DecodeParams& p) {
  p.state = states.state.as<float>();
  p.conv_state = states.conv_state.as<__nv_bfloat16>();
  p.state_slot_stride = states.state.stride[0];
  p.conv_slot_stride = states.conv_state.stride[0];
  p.heads = states.heads;
  p.num_slots = states.num_slots;
}

const int32_t* indices(const Tensor& tensor, int64_t count) {
  return tensor.is({DType::kI32}).sizes({count}).contiguous().as<const int32_t>();
}

struct TokenArgs {
  py::handle q, k, v, f, beta, gate, conv_weight, a_log, dt_bias, o_norm, state, conv_state, slots, fresh, num_tokens,
      out;
  float lower_bound, eps;
};

// Everything but what a run adds. `sequences` is the length of slots.
DecodeParams read_tokens(Call& call, const TokenArgs& a, int64_t& sequences) {
  DecodeParams p = {};
  const Tensor q = call.tensor("q", a.q).is({DType::kBF16}).rank(2);
  const States states = read_states(call, a.state, a.conv_state);
  const int64_t tokens = q.shape[0], width = int64_t{states.heads} * kHeadDim;
  put_states(states, p);
  auto rows = [&](const Tensor& x, int64_t columns, const __nv_bfloat16*& data, int64_t& stride) {
    x.is({DType::kBF16}).sizes({tokens, columns}).row_strided();
    data = x.as<const __nv_bfloat16>();
    stride = x.stride[0];
  };
  rows(q, width, p.q, p.q_stride);
  rows(call.tensor("k", a.k), width, p.k, p.k_stride);
  rows(call.tensor("v", a.v), width, p.v, p.v_stride);
  rows(call.tensor("f", a.f), width, p.f, p.f_stride);
  rows(call.tensor("gate", a.gate), width, p.gate, p.gate_stride);
  rows(call.tensor("beta", a.beta), states.heads, p.beta, p.beta_stride);

  auto weights = [&](const char* name, py::handle arg, std::initializer_list<int64_t> sizes) {
    return call.tensor(name, arg).is({DType::kF32}).sizes(sizes).contiguous().as<const float>();
  };
  const Tensor conv_weight = call.tensor("conv_weight", a.conv_weight).is({DType::kF32});
  p.conv_weight = conv_weight.sizes({3 * width, kConvWidth}).contiguous().aligned(16).as<const float>();
  const Tensor a_log = call.tensor("a_log", a.a_log).is({DType::kF32}).rank(1).contiguous();
  call.require(a_log.shape[0] >= states.heads, "a_log must have at least " + std::to_string(states.heads) +
                                                   " values, got " + std::to_string(a_log.shape[0]));
  p.a_log = a_log.as<const float>();
  p.dt_bias = weights("dt_bias", a.dt_bias, {width});
  p.o_norm = weights("o_norm", a.o_norm, {kHeadDim});

  const Tensor slots = call.tensor("slots", a.slots).rank(1);
  sequences = slots.shape[0];
  p.slots = indices(slots, sequences);
  if (const Tensor fresh = call.optional("fresh", a.fresh)) {
    p.fresh = fresh.is({DType::kBool}).sizes({sequences}).contiguous().as<const bool>();
  }
  if (const Tensor count = call.optional("num_tokens", a.num_tokens)) p.num_tokens = indices(count, 1);
  const Tensor out = call.tensor("out", a.out);
  p.out = out.is({DType::kBF16}).sizes({tokens, width}).contiguous().aligned(16).as<__nv_bfloat16>();
  p.tokens = static_cast<int32_t>(tokens);
  p.lower_bound = a.lower_bound;
  p.eps = a.eps;
  call.require(a.lower_bound < 0.f, "lower_bound must be negative, got " + std::to_string(a.lower_bound));
  return p;
}

// records [slots, heads, 6, run, 128] f32
void read_records(Call& call, py::handle arg, RunParams& r) {
  const Tensor records = call.tensor("records", arg).is({DType::kF32}).rank(5);
  records.sizes({r.token.num_slots, r.token.heads, kRecordRows, kAny, kHeadDim}).inner_contiguous(4).aligned(16);
  call.require(
      records.shape[3] >= 1 && records.shape[3] <= kMaxRun,
      "records must hold runs of 1 to " + std::to_string(kMaxRun) + " tokens, got " + std::to_string(records.shape[3]));
  r.records = records.as<float>();
  r.record_slot_stride = records.stride[0];
  r.run = static_cast<int32_t>(records.shape[3]);
}

void decode(py::handle q, py::handle k, py::handle v, py::handle f, py::handle beta, py::handle gate,
            py::handle conv_weight, py::handle a_log, py::handle dt_bias, py::handle o_norm, py::handle state,
            py::handle conv_state, py::handle slots, py::handle fresh, py::handle num_tokens, py::handle records,
            py::handle accepted, py::handle out, float lower_bound, float eps) {
  Call call("kda.decode_");
  int64_t sequences = 0;
  const DecodeParams p = read_tokens(call,
                                     {q, k, v, f, beta, gate, conv_weight, a_log, dt_bias, o_norm, state, conv_state,
                                      slots, fresh, num_tokens, out, lower_bound, eps},
                                     sequences);
  call.require(sequences == p.tokens,
               "slots must have one entry a token, " + std::to_string(p.tokens) + ", got " + std::to_string(sequences));
  call.require(records.is_none() == accepted.is_none(), "records and accepted go together");
  if (p.tokens == 0) return;
  if (records.is_none()) return launch_decode(p, call.stream());
  RunParams r = {};
  r.token = p;
  read_records(call, records, r);
  r.accepted = indices(call.tensor("accepted", accepted), sequences);
  r.sequences = p.tokens;
  r.keep = true;
  launch_run(r, call.stream());
}

void verify(py::handle q, py::handle k, py::handle v, py::handle f, py::handle beta, py::handle gate,
            py::handle conv_weight, py::handle a_log, py::handle dt_bias, py::handle o_norm, py::handle state,
            py::handle conv_state, py::handle slots, py::handle cu_seqlens, py::handle fresh, py::handle num_tokens,
            py::handle records, py::handle accepted, py::handle out, float lower_bound, float eps) {
  Call call("kda.verify");
  int64_t sequences = 0;
  RunParams r = {};
  r.token = read_tokens(call,
                        {q, k, v, f, beta, gate, conv_weight, a_log, dt_bias, o_norm, state, conv_state, slots, fresh,
                         num_tokens, out, lower_bound, eps},
                        sequences);
  r.cu_seqlens = indices(call.tensor("cu_seqlens", cu_seqlens), sequences + 1);
  read_records(call, records, r);
  if (const Tensor count = call.optional("accepted", accepted)) r.accepted = indices(count, sequences);
  r.sequences = static_cast<int32_t>(sequences);
  call.require(r.token.tokens <= sequences * r.run, "records hold runs of " + std::to_string(r.run) +
                                                        " tokens, too short for " + std::to_string(r.token.tokens) +
                                                        " tokens of " + std::to_string(sequences) + " sequences");
  if (sequences > 0) launch_run(r, call.stream());
}

void commit(py::handle state, py::handle conv_state, py::handle records, py::handle slots, py::handle accepted) {
  Call call("kda.commit_");
  RunParams r = {};
  put_states(read_states(call, state, conv_state), r.token);
  read_records(call, records, r);
  const Tensor slot_list = call.tensor("slots", slots).rank(1);
  r.sequences = static_cast<int32_t>(slot_list.shape[0]);
  r.token.slots = indices(slot_list, r.sequences);
  r.accepted = indices(call.tensor("accepted", accepted), r.sequences);
  if (r.sequences > 0) launch_run(r, call.stream());
}

// One layer's view or the whole pools, [slots, (layers,) ...]: what belongs to a slot is one piece in either.
SlotParams read_pools(Call& call, py::handle state_arg, py::handle conv_arg) {
  const Tensor state = call.tensor("state", state_arg).is({DType::kF32});
  const Tensor conv = call.tensor("conv_state", conv_arg).is({DType::kBF16});
  if (state.ndim != 4 && state.ndim != 5) {
    state.fail("[slots, heads, 128, 128] or the pool of 5 dims", std::to_string(state.ndim) + " dims");
  }
  const int64_t channels = 3 * state.shape[state.ndim - 3] * kHeadDim;
  if (state.ndim == 4) {
    state.sizes({kAny, kAny, kHeadDim, kHeadDim});
    conv.sizes({state.shape[0], 3, channels});
  } else {
    state.sizes({kAny, kAny, kAny, kHeadDim, kHeadDim});
    conv.sizes({state.shape[0], state.shape[1], 3, channels});
  }
  state.inner_contiguous(state.ndim - 1).aligned(16);
  conv.inner_contiguous(conv.ndim - 1).aligned(16);
  auto inner_bytes = [](const Tensor& x, int64_t item) {  // a multiple of 16, by the sizes above
    int64_t count = 1;
    for (int i = 1; i < x.ndim; ++i) count *= x.shape[i];
    return count * item;
  };
  SlotParams p = {};
  p.state = state.as<char>();
  p.conv_state = conv.as<char>();
  p.state_inner = inner_bytes(state, 4);
  p.conv_inner = inner_bytes(conv, 2);
  p.state_slot_stride = state.stride[0] * 4;
  p.conv_slot_stride = conv.stride[0] * 2;
  p.num_slots = static_cast<int32_t>(state.shape[0]);
  return p;
}

void zero(py::handle state, py::handle conv_state, py::handle slots) {
  Call call("kda.zero_");
  SlotParams p = read_pools(call, state, conv_state);
  const Tensor list = call.tensor("slots", slots).rank(1);
  p.count = static_cast<int32_t>(list.shape[0]);
  p.target = indices(list, p.count);
  if (p.count > 0 && p.state_inner > 0) launch_slots(p, call.stream());
}

void copy(py::handle state, py::handle conv_state, py::handle src, py::handle dst) {
  Call call("kda.copy_");
  SlotParams p = read_pools(call, state, conv_state);
  const Tensor source = call.tensor("src", src).rank(1);
  p.count = static_cast<int32_t>(source.shape[0]);
  p.source = indices(source, p.count);
  p.target = indices(call.tensor("dst", dst), p.count);
  if (p.count > 0 && p.state_inner > 0) launch_slots(p, call.stream());
}

}  // namespace

void register_kda(py::module_& m) {
  m.def("kda_decode", &decode, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("f"), py::arg("beta"), py::arg("gate"),
        py::arg("conv_weight"), py::arg("a_log"), py::arg("dt_bias"), py::arg("o_norm"), py::arg("state"),
        py::arg("conv_state"), py::arg("slots"), py::arg("fresh"), py::arg("num_tokens"), py::arg("records"),
        py::arg("accepted"), py::arg("out"), py::arg("lower_bound"), py::arg("eps"));
  m.def("kda_verify", &verify, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("f"), py::arg("beta"), py::arg("gate"),
        py::arg("conv_weight"), py::arg("a_log"), py::arg("dt_bias"), py::arg("o_norm"), py::arg("state"),
        py::arg("conv_state"), py::arg("slots"), py::arg("cu_seqlens"), py::arg("fresh"), py::arg("num_tokens"),
        py::arg("records"), py::arg("accepted"), py::arg("out"), py::arg("lower_bound"), py::arg("eps"));
  m.def("kda_commit", &commit, py::arg("state"), py::arg("conv_state"), py::arg("records"), py::arg("slots"),
        py::arg("accepted"));
  m.def("kda_zero", &zero, py::arg("state"), py::arg("conv_state"), py::arg("slots"));
  m.def("kda_copy", &copy, py::arg("state"), py::arg("conv_state"), py::arg("src"), py::arg("dst"));
}

}  // namespace kimi::kda
