// The tensors of pretended GPUs: see lockstep/script/pretended.py.
//
// PyTorch's CPU build leaves the dispatch key of CUDA empty: no allocator, no device guard, no kernel. They are filled
// in here. Memory of cuda:k is the host's, counted under k; an operator on it is the CPU's, on tensors that share that
// memory; and it is refused, in PyTorch's own words, where its tensors lie on more than one device.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include "memory.h"

#include <atomic>
#include <cstdlib>

namespace {

using c10::Device;
using c10::DeviceIndex;
using torch::jit::Stack;

constexpr int MOST = 16;
std::atomic<int> visible{-1};  // how many this process sees, once torch_cuda.py has said it
int count_of_devices() {
  if (int count = visible.load(); count >= 0) return count;
  const char* given = std::getenv("LOCKSTEP_PRETENDED_GPUS");
  return given ? std::atoi(given) : 0;
}

thread_local DeviceIndex current = 0;
std::atomic<int64_t> allocated[MOST], peak[MOST];

std::string binary_size(int64_t bytes) {
  const bool large = bytes >= 1 << 30;
  char text[32];
  std::snprintf(text, sizeof text, "%.2f %s", bytes / (large ? 1073741824.0 : 1048576.0), large ? "GiB" : "MiB");
  return text;
}

// What this process asks for beyond a GPU's memory is refused, in the words of CUDACachingAllocator.cpp.
void refuse_more(DeviceIndex device, int64_t bytes) {
  const int64_t room = MEMORY_OF_A_GPU - allocated[device];
  TORCH_CHECK_WITH(
      OutOfMemoryError, bytes <= room, "CUDA out of memory. Tried to allocate ", binary_size(bytes), ". GPU ",
      int(device), " has a total capacity of ", binary_size(MEMORY_OF_A_GPU), " of which ", binary_size(room),
      " is free.");
}

void count_bytes(DeviceIndex device, int64_t bytes) {
  refuse_more(device, bytes);
  int64_t now = allocated[device] += bytes;
  int64_t before = peak[device].load();
  while (now > before && !peak[device].compare_exchange_weak(before, now)) {
  }
}

// ---- devices ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {c10::kCUDA, current}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < count_of_devices(), "CUDA error: invalid device ordinal");
    if (device.index() >= 0) current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(count_of_devices()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// What holds the memory of a tensor on a GPU: the host's tensor or bytes, until the last one that uses it goes.
struct Held {
  c10::Storage storage;
  int64_t bytes;
  DeviceIndex device;
};

void release(void* held) {
  auto* mine = static_cast<Held*>(held);
  allocated[mine->device] -= mine->bytes;
  delete mine;
}

c10::DataPtr on_device(c10::Storage storage, DeviceIndex device) {
  auto bytes = static_cast<int64_t>(storage.nbytes());
  count_bytes(device, bytes);
  void* data = storage.mutable_data();
  return {data, new Held{std::move(storage), bytes, device}, &release, Device(c10::kCUDA, device)};
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* cpu = c10::GetAllocator(c10::kCPU);
    refuse_more(current, static_cast<int64_t>(bytes));  // before the host is asked for it
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, cpu->allocate(bytes), cpu, false);
    return on_device(std::move(storage), current);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(c10::kCUDA, &memory)

// What PyTorch's own C++ asks about CUDA; it knows the class by this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(count_of_devices()); }
  int getNumGPUs() const override { return count_of_devices(); }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current : std::exchange(current, device);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::globalContext().defaultGenerator(c10::kCPU);
  }
};

}  // namespace

namespace at {
using ::CUDAHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks)
}  // namespace at

// DistributedDataParallel times its buckets.
class HostTimer final : public c10d::Timer {
 public:
  explicit HostTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    return getTimeRef(end) - getTimeRef(start);
  }
};
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, HostTimer)
}  // namespace c10d

namespace {

at::Tensor to_gpu(const at::Tensor& host, DeviceIndex device) {
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), host.storage().nbytes(), on_device(host.storage(), device), &memory, true);
  return with_storage(std::move(storage), host, c10::DispatchKey::CUDA);
}

// ---- operators ----

struct Call {
  const c10::OperatorHandle& op;
  DeviceIndex device = -1;
  std::vector<std::pair<at::Tensor, at::Tensor>> both;  // on the GPU, and the same memory on the host

  explicit Call(const c10::OperatorHandle& op) : op(op) {}

  void place(Device asked) {
    DeviceIndex wanted = asked.has_index() ? asked.index() : current;
    TORCH_CHECK(
        device < 0 || device == wanted,
        "Expected all tensors to be on the same device, but found at least two devices, cuda:", int(device),
        " and cuda:", int(wanted), "! (", op.operator_name(), ")");
    device = wanted;
  }

  void look(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_cuda()) place(tensor.device());
  }

  void look_for_host(const at::Tensor& tensor, bool index) {
    if (!tensor.defined() || !tensor.is_cpu() || tensor.dim() == 0 || index) return;
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, cuda:", int(device),
        " and cpu! (", op.operator_name(), ")");
  }

  at::Tensor host(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (auto& [gpu, same] : both)
      if (gpu.is_same(tensor)) return same;
    both.emplace_back(tensor, on_host(tensor));
    return both.back().second;
  }

  at::Tensor back(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    for (auto& [gpu, same] : both)
      if (same.is_same(tensor)) return gpu;
    for (auto& [gpu, same] : both)
      if (same.storage().is_alias_of(tensor.storage()))
        return with_storage(gpu.storage(), tensor, c10::DispatchKey::CUDA);
    return to_gpu(tensor, device);
  }

  // An operator may have given what it writes to another size, and so other memory.
  void write_back() {
    for (auto& [gpu, same] : both) {
      if (same.storage().data() != gpu.storage().data() || same.storage().nbytes() != gpu.storage().nbytes())
        gpu.unsafeGetTensorImpl()->set_storage_keep_dtype(to_gpu(same, gpu.device().index()).storage());
      if (same.sizes() != gpu.sizes() || same.strides() != gpu.strides() ||
          same.storage_offset() != gpu.storage_offset())
        geometry_of(gpu, same);
    }
  }
};

template <typename Visit>
void visit_tensors(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor.has_value()) visit(*tensor);
  }
}

template <typename Change>
c10::IValue change_tensors(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const auto& tensor : value.toOptionalTensorVector())
      changed.push_back(tensor.has_value() ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    return changed;
  }
  return value;
}

void by_the_cpu(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op);
  const auto& schema = op.schema();
  const size_t taken = schema.arguments().size();
  const size_t first = stack->size() - taken;
  const std::string& name = schema.name();
  // Indices on the host are moved by the real ones too.
  const bool indexes = name.find("index") != std::string::npos || name.find("foreach") != std::string::npos;
  for (size_t at = first; at < stack->size(); ++at)
    visit_tensors((*stack)[at], [&](const at::Tensor& tensor) { call.look(tensor); });
  for (size_t at = first; at < stack->size(); ++at) {
    const auto& value = (*stack)[at];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (call.device < 0) call.place(value.toDevice());
      (*stack)[at] = Device(c10::kCPU);
    }
  }
  if (call.device < 0) call.device = current;
  for (size_t at = first; at < stack->size(); ++at) {
    visit_tensors((*stack)[at], [&](const at::Tensor& tensor) { call.look_for_host(tensor, indexes); });
    (*stack)[at] = change_tensors((*stack)[at], [&](const at::Tensor& tensor) { return call.host(tensor); });
  }
  op.callBoxed(stack);
  call.write_back();
  const size_t given = schema.returns().size();
  for (size_t at = stack->size() - given; at < stack->size(); ++at)
    (*stack)[at] = change_tensors((*stack)[at], [&](const at::Tensor& tensor) { return call.back(tensor); });
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(c10::kCUDA)));
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(c10::kCUDA)));
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  on_host(self).copy_(on_host(source));
  return self;
}

at::Tensor strided(
    const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return made;
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return strided(self, size, stride, self.storage_offset());
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  auto wanted = at::infer_size_dv(size, self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), wanted);
  TORCH_CHECK(stride.has_value(), "view size is not compatible with input tensor's size and stride");
  return strided(self, wanted, *stride, self.storage_offset());
}

at::Tensor& set_storage(
    at::Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  std::vector<int64_t> contiguous(size.size(), 1);
  for (int at = int(size.size()) - 2; at >= 0; --at)
    contiguous[at] = contiguous[at + 1] * std::max<int64_t>(size[at + 1], 1);
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      size, stride.size() == size.size() ? stride : at::IntArrayRef(contiguous), offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  auto length = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {length}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  auto made = empty({0}, self.scalar_type(), std::nullopt, self.device(), std::nullopt, std::nullopt);
  return set_tensor(self, made);
}

// The mathematical form of attention, as the kernels of a GPU have no counterpart of that name on a CPU.
int64_t attention_by_formula(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}

void record_stream(at::Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("as_strided", &strided);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("view", &view);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("_fused_sdp_choice", &attention_by_formula);
  library.impl("record_stream", &record_stream);
}

}  // namespace

void pretended_see(int count) { visible = count; }
int64_t pretended_allocated(int device) { return allocated[device].load(); }
int64_t pretended_peak(int device) { return peak[device].load(); }
void pretended_reset_peak(int device) { peak[device] = allocated[device].load(); }
