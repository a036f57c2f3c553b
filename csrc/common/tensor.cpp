#include "tensor.h"

#include <sstream>
#include <unordered_map>

#include "check.h"

namespace kimi {
namespace {

using dlpack::ExchangeApi;

DType dtype_of(const dlpack::DataType& type) {
  enum : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6, kE4M3 = 10, kE8M0 = 14, kE2M1 = 17 };
  if (type.code == kE2M1 && type.bits == 4 && type.lanes == 2) return DType::kF4E2M1x2;
  if (type.lanes != 1) return DType::kOther;
  if (type.code == kFloat && type.bits == 32) return DType::kF32;
  if (type.code == kFloat && type.bits == 16) return DType::kF16;
  if (type.code == kBfloat && type.bits == 16) return DType::kBF16;
  if (type.code == kInt && type.bits == 32) return DType::kI32;
  if (type.code == kInt && type.bits == 64) return DType::kI64;
  if (type.code == kUInt && type.bits == 8) return DType::kU8;
  if (type.code == kBool && type.bits == 8) return DType::kBool;
  if (type.code == kE4M3 && type.bits == 8) return DType::kF8E4M3;
  if (type.code == kE8M0 && type.bits == 8) return DType::kF8E8M0;
  return DType::kOther;
}

std::string type_name(py::handle object) { return py::str(py::type::of(object).attr("__name__")); }

// The function table of a type, or null. Types live as long as their framework, so the table is looked up once.
const ExchangeApi* exchange_api(py::handle object) {
  static std::unordered_map<PyTypeObject*, const ExchangeApi*> known;
  PyTypeObject* type = Py_TYPE(object.ptr());
  auto found = known.find(type);
  if (found != known.end()) return found->second;
  const ExchangeApi* api = nullptr;
  py::object capsule = py::getattr(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__", py::none());
  if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
    api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (api != nullptr && api->version.major != 1) api = api->previous;
    if (api != nullptr && api->view == nullptr) api = nullptr;
  }
  known.emplace(type, api);
  return api;
}

// The slow way for other frameworks. The capsule owns the shape and stride arrays, so the caller keeps it.
const dlpack::Tensor& from_capsule(const py::object& capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    return static_cast<dlpack::ManagedVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"))->tensor;
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    return static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"))->tensor;
  }
  throw py::type_error("__dlpack__ did not return a DLPack capsule");
}

// cupy arrays hold bf16 either by that name or as its bits in uint16.
constexpr uint8_t kUIntCode = 1;

void fill(Tensor& view, const dlpack::Tensor& source, bool bits_are_bf16 = false) {
  if (source.ndim > kMaxDims) view.fail("at most 6 dimensions", std::to_string(source.ndim));
  view.data = static_cast<char*>(source.data) + source.byte_offset;
  const bool bits = bits_are_bf16 && source.dtype.code == kUIntCode && source.dtype.bits == 16;
  view.dtype = bits ? DType::kBF16 : dtype_of(source.dtype);
  view.ndim = source.ndim;
  view.present = true;
  int64_t dense = 1;
  for (int i = source.ndim - 1; i >= 0; --i) {
    view.shape[i] = source.shape[i];
    view.stride[i] = source.strides != nullptr ? source.strides[i] : dense;
    dense *= source.shape[i];
  }
}

std::string shape_text(const int64_t* values, int count) {
  std::ostringstream text;
  text << "[";
  for (int i = 0; i < count; ++i) {
    if (i > 0) text << ", ";
    if (values[i] == kAny) {
      text << "any";
    } else {
      text << values[i];
    }
  }
  text << "]";
  return text.str();
}

const char* device_name(int32_t type) { return type == 1 ? "the CPU" : "a device of another kind"; }

}  // namespace

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kU8:
      return "uint8";
    case DType::kBool:
      return "bool";
    case DType::kF8E4M3:
      return "float8_e4m3fn";
    case DType::kF8E8M0:
      return "float8_e8m0fnu";
    case DType::kF4E2M1x2:
      return "float4_e2m1fn_x2";
    case DType::kOther:
      break;
  }
  return "an unsupported dtype";
}

int64_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kI64:
      return 8;
    default:
      return 1;
  }
}

int64_t Tensor::numel() const {
  int64_t count = 1;
  for (int i = 0; i < ndim; ++i) count *= shape[i];
  return count;
}

void Tensor::fail(const std::string& expected, const std::string& got) const {
  throw py::value_error(std::string(op) + ": " + name + ": expected " + expected + ", got " + got);
}

const Tensor& Tensor::is(std::initializer_list<DType> dtypes) const {
  for (DType allowed : dtypes) {
    if (dtype == allowed) return *this;
  }
  std::string expected;
  for (DType allowed : dtypes) expected += (expected.empty() ? "" : " or ") + std::string(dtype_name(allowed));
  fail("dtype " + expected, dtype_name(dtype));
}

const Tensor& Tensor::rank(int expected) const {
  if (ndim != expected) fail(std::to_string(expected) + " dimensions", "shape " + shape_text(shape, ndim));
  return *this;
}

const Tensor& Tensor::sizes(std::initializer_list<int64_t> expected) const {
  bool same = static_cast<int>(expected.size()) == ndim;
  for (int i = 0; same && i < ndim; ++i) same = expected.begin()[i] == kAny || expected.begin()[i] == shape[i];
  if (!same) {
    fail("shape " + shape_text(expected.begin(), static_cast<int>(expected.size())), shape_text(shape, ndim));
  }
  return *this;
}

const Tensor& Tensor::contiguous() const { return inner_contiguous(ndim); }

const Tensor& Tensor::row_strided() const { return ndim == 0 || shape[ndim - 1] <= 1 ? *this : inner_contiguous(1); }

const Tensor& Tensor::inner_contiguous(int dims) const {
  if (numel() == 0) return *this;
  int64_t dense = 1;
  for (int i = ndim - 1; i >= ndim - dims; --i) {
    if (shape[i] != 1 && stride[i] != dense) {
      fail(dims == ndim ? "contiguous memory" : "its last " + std::to_string(dims) + " dimension(s) contiguous",
           "shape " + shape_text(shape, ndim) + " with strides " + shape_text(stride, ndim));
    }
    dense *= shape[i];
  }
  return *this;
}

const Tensor& Tensor::aligned(int bytes) const {
  if (numel() == 0) return *this;
  const int64_t size = dtype_size(dtype);
  bool ok = reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0;
  for (int i = 0; ok && i + 1 < ndim; ++i) ok = shape[i] == 1 || stride[i] * size % bytes == 0;
  if (!ok) {
    fail("its data pointer and outer strides at multiples of " + std::to_string(bytes) + " bytes",
         "strides " + shape_text(stride, ndim) + " of " + std::to_string(size) + "-byte elements");
  }
  return *this;
}

Call::~Call() {
  if (previous_device_ >= 0) cudaSetDevice(previous_device_);
}

Tensor Call::tensor(const char* name, py::handle object) {
  Tensor view;
  view.op = op_;
  view.name = name;
  const ExchangeApi* api = exchange_api(object);
  dlpack::Device device;
  if (api != nullptr) {
    dlpack::Tensor source;
    if (api->view(object.ptr(), &source) != 0) throw py::error_already_set();
    fill(view, source);
    device = source.device;
  } else {
    if (!py::hasattr(object, "__dlpack__")) {
      throw py::type_error(std::string(op_) + ": " + name + ": expected a torch tensor or a cupy array, got " +
                           type_name(object));
    }
    auto where = object.attr("__dlpack_device__")().cast<std::pair<int32_t, int32_t>>();
    device = {where.first, where.second};
    if (device.type == dlpack::kCuda) {
      capsules_.push_back(object.attr("__dlpack__")(py::arg("stream") = -1));
      fill(view, from_capsule(capsules_.back()), /*bits_are_bf16=*/true);
    }
  }
  if (device.type != dlpack::kCuda) {
    throw py::value_error(std::string(op_) + ": " + name + ": expected a CUDA device, got " + device_name(device.type));
  }
  view.device = device.id;
  if (device_ < 0) {
    device_ = device.id;
    first_ = object;
    api_ = api;
  } else if (device.id != device_) {
    throw py::value_error(std::string(op_) + ": " + name + ": expected device cuda:" + std::to_string(device_) +
                          ", where the other tensors are, got cuda:" + std::to_string(device.id));
  }
  return view;
}

Tensor Call::optional(const char* name, py::handle object) {
  return object.is_none() ? Tensor{} : tensor(name, object);
}

cudaStream_t Call::stream() {
  if (device_ < 0) throw py::value_error(std::string(op_) + ": no tensor given");
  int current = 0;
  CUDA_CHECK(cudaGetDevice(&current));
  if (current != device_) {
    CUDA_CHECK(cudaSetDevice(device_));
    previous_device_ = current;
  }
  if (api_ != nullptr) {
    void* stream = nullptr;
    if (api_->current_stream(dlpack::kCuda, device_, &stream) != 0) throw py::error_already_set();
    return static_cast<cudaStream_t>(stream);
  }
  const std::string module = py::str(py::type::of(first_).attr("__module__"));
  if (module.rfind("cupy", 0) == 0) {
    py::object stream = py::module_::import("cupy").attr("cuda").attr("get_current_stream")(device_);
    return reinterpret_cast<cudaStream_t>(stream.attr("ptr").cast<uintptr_t>());
  }
  throw py::type_error(std::string(op_) + ": the current stream of '" + module + "' arrays is not known; pass torch " +
                       "tensors or cupy arrays");
}

void Call::require(bool condition, const std::string& message) const {
  if (!condition) throw py::value_error(std::string(op_) + ": " + message);
}

py::dict describe(py::handle object) {
  Tensor view;
  view.op = "describe";
  view.name = "object";
  dlpack::Device device;
  py::object capsule;
  const ExchangeApi* api = exchange_api(object);
  if (api != nullptr) {
    dlpack::Tensor source;
    if (api->view(object.ptr(), &source) != 0) throw py::error_already_set();
    fill(view, source);
    device = source.device;
  } else {
    capsule = object.attr("__dlpack__")();
    const dlpack::Tensor& source = from_capsule(capsule);
    fill(view, source);
    device = source.device;
  }
  py::list shape, stride;
  for (int i = 0; i < view.ndim; ++i) {
    shape.append(view.shape[i]);
    stride.append(view.stride[i]);
  }
  py::dict result;
  result["dtype"] = dtype_name(view.dtype);
  result["device"] = py::make_tuple(device.type, device.id);
  result["shape"] = shape;
  result["strides"] = stride;
  result["c_exchange"] = api != nullptr;
  result["data"] = reinterpret_cast<uintptr_t>(view.data);
  return result;
}

}  // namespace kimi
