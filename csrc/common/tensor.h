// Tensors of any framework, seen through DLPack, checked by argument name. Host code of api.cpp files only.
//
// torch offers the DLPack C exchange interface (a function table on the type: no Python call per tensor, and it names
// the current stream). Everything else comes through __dlpack__(stream=-1), i.e. without a synchronisation.
// The structs below restate the DLPack 1.x ABI, which is frozen per major version.
#pragma once

#include <cuda_runtime.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

namespace kimi {

namespace py = pybind11;

namespace dlpack {

constexpr int32_t kCuda = 2;

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct Managed {
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct ManagedVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedVersioned*);
  uint64_t flags;
  Tensor tensor;
};

struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  int (*allocate)(Tensor*, ManagedVersioned**, void*, void (*)(void*, const char*, const char*));
  int (*to_managed)(void*, ManagedVersioned**);
  int (*from_managed)(ManagedVersioned*, void**);
  int (*view)(void*, Tensor*);  // may be null
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};

}  // namespace dlpack

enum class DType : uint8_t { kF32, kBF16, kF16, kI32, kI64, kU8, kBool, kF8E4M3, kF8E8M0, kF4E2M1x2, kOther };

const char* dtype_name(DType dtype);
int64_t dtype_size(DType dtype);

constexpr int kMaxDims = 6;
constexpr int64_t kAny = -1;  // in a shape check: every size passes

// A view: the caller's object keeps the memory alive during the call. Strides are in elements.
// The checks return the tensor itself, so they chain; a failed one raises ValueError "op: name: expected ..., got
// ...", worded as the CPU path's (kimi_kernels/_check.py).
struct Tensor {
  const char* op = "";
  const char* name = "";
  void* data = nullptr;
  DType dtype = DType::kOther;
  int device = -1;
  int ndim = 0;
  int64_t shape[kMaxDims] = {};
  int64_t stride[kMaxDims] = {};
  bool present = false;  // false: the caller passed None

  explicit operator bool() const { return present; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
  int64_t numel() const;

  const Tensor& is(std::initializer_list<DType> dtypes) const;
  const Tensor& rank(int expected) const;
  const Tensor& sizes(std::initializer_list<int64_t> expected) const;
  const Tensor& contiguous() const;
  const Tensor& row_strided() const;               // last dimension contiguous, the others free
  const Tensor& inner_contiguous(int dims) const;  // the last `dims` dimensions are one dense piece
  const Tensor& aligned(int bytes) const;          // data and the strides of all outer dimensions
  [[noreturn]] void fail(const std::string& expected, const std::string& got) const;
};

// One call of an operation: reads the tensors, keeps what has to live until the launch, sets the device and finds the
// stream. All tensors have to be on one CUDA device; the first one says whose current stream is used.
class Call {
 public:
  explicit Call(const char* op) : op_(op) {}
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Tensor tensor(const char* name, py::handle object);
  Tensor optional(const char* name, py::handle object);  // None gives an absent tensor
  cudaStream_t stream();                                 // makes the tensors' device current until the call ends
  int device() const { return device_; }
  void require(bool condition, const std::string& message) const;  // ValueError "<op>: <message>"

 private:
  const char* op_;
  int device_ = -1;
  int previous_device_ = -1;
  py::handle first_;
  const dlpack::ExchangeApi* api_ = nullptr;
  std::vector<py::object> capsules_;
};

// dtype, device, shape and strides of any DLPack tensor, CPU ones too: for tests and error reports.
py::dict describe(py::handle object);

}  // namespace kimi
