// The tensors of pretended GPUs: see lockstep/script/pretended.py.
//
// PyTorch's CPU build leaves the dispatch key of CUDA empty: no allocator, no device guard, no kernel. They are filled
// in here. Memory of cuda:k is the host's, counted under k; an operator on it is the CPU's, on tensors that share that
// memory; and it is refused, in PyTorch's own words, where its tensors lie on more than one device.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/SDPBackend.h>
#include <ATen/TensorUtils.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include "cache.h"
#include "memory.h"
#include "sizes.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <iostream>

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
// Never destroyed, as tensors may be freed after everything else.
auto& devices = *new std::array<cache::Device, MOST>;

// The memory of each GPU; only counting has no end unless one is given.
int64_t capacity() {
  static const char* given = std::getenv("LOCKSTEP_PRETENDED_MEMORY");
  static const int64_t bytes = given ? std::atoll(given) : sizes::only() ? int64_t(1) << 60 : MEMORY_OF_A_GPU;
  return bytes;
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
  cache::Block* block;
  DeviceIndex device;
};

void release(void* held) {
  auto* mine = static_cast<Held*>(held);
  devices[mine->device].release(mine->block);
  delete mine;
}

cache::Block* take(size_t bytes, DeviceIndex device) {
  return devices[device].allocate(static_cast<int64_t>(bytes), device, capacity());
}

c10::DataPtr held(c10::Storage storage, cache::Block* block, DeviceIndex device) {
  void* data = storage.mutable_data();
  return {data, new Held{std::move(storage), block, device}, &release, Device(c10::kCUDA, device)};
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* cpu = c10::GetAllocator(c10::kCPU);
    auto* block = take(bytes, current);  // before the host is asked for the memory
    auto data = sizes::only() ? sizes::untouched(bytes) : cpu->allocate(bytes);
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), cpu, false);
    return held(std::move(storage), block, current);
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
  // DistributedDataParallel makes sure that it got the pinned memory that it has asked for; Python is told otherwise.
  bool isPinnedPtr(const void*) const override { return true; }
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
  const size_t bytes = host.storage().nbytes();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes, held(host.storage(), take(bytes, device), device), &memory, true);
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

void compute(const c10::OperatorHandle& op, Stack* stack) {
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

// ---- memory only: what sizes.h describes ----

// Whether an operator is computed although only memory is asked for: a view, or all of its tensors are small. Of whole
// numbers many are small enough, since a program reads tokens and masks to decide what to do.
bool computes(const c10::OperatorHandle& op, const Stack& stack) {
  if (sizes::is_view(op.schema()) || op.schema().name() == "aten::resize_") return true;
  int64_t numbers = 0, tensors = 0, made = 1;
  bool whole = true;
  for (size_t at = stack.size() - op.schema().arguments().size(); at < stack.size(); ++at) {
    visit_tensors(stack[at], [&](const at::Tensor& tensor) {
      tensors += tensor.defined();
      numbers += tensor.defined() ? tensor.numel() : 0;
      whole &= !tensor.defined() || at::isIntegralType(tensor.scalar_type(), true);
    });
    if (stack[at].isIntList())
      for (int64_t size : stack[at].toIntVector()) made *= std::max<int64_t>(size, 1);
  }
  return (tensors ? numbers : made) <= (tensors && whole ? sizes::WHOLE : sizes::SMALL);
}

// What a call by size has: the tensors it was given, and what stands for each on the device "meta".
struct Sized {
  Call& call;
  std::vector<std::pair<at::Tensor, at::Tensor>> both;

  at::Tensor meta(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_meta() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
    for (auto& [real, same] : both)
      if (real.is_same(tensor)) return same;
    both.emplace_back(
        tensor, at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta)));
    return both.back().second;
  }

  at::Tensor back(const at::Tensor& result) {
    if (!result.defined() || !result.is_meta()) return result;
    for (auto& [real, same] : both)
      if (same.is_same(result)) return real;
    for (auto& [real, same] : both)
      if (real.is_cuda() && same.storage().is_alias_of(result.storage())) {
        auto part = with_storage(real.storage(), result, c10::DispatchKey::CUDA);
        part.unsafeGetTensorImpl()->set_storage_offset(real.storage_offset() + result.storage_offset());
        return part;
      }
    return with_storage(memory_for(result.storage().nbytes()), result, c10::DispatchKey::CUDA);
  }

  c10::Storage memory_for(size_t bytes) {
    c10::DeviceGuard guard(Device(c10::kCUDA, call.device));
    return {c10::Storage::use_byte_size_t(), bytes, memory.allocate(bytes), &memory, true};
  }

  // Results that are written into a given tensor may have changed its size.
  void write_back() {
    for (auto& [real, same] : both) {
      if (!real.is_cuda() || (same.sizes() == real.sizes() && same.strides() == real.strides())) continue;
      if (same.storage().nbytes() > real.storage().nbytes())
        real.unsafeGetTensorImpl()->set_storage_keep_dtype(memory_for(same.storage().nbytes()));
      real.unsafeGetTensorImpl()->set_sizes_and_strides(same.sizes(), same.strides(), real.storage_offset());
    }
  }
};

void take_workspace(const std::string& name, DeviceIndex device) {
  thread_local c10::DataPtr workspace[MOST];
  if (workspace[device] || !sizes::workspace() || !sizes::multiplies(name)) return;
  c10::DeviceGuard guard(Device(c10::kCUDA, device));
  workspace[device] = memory.allocate(sizes::workspace());
}

void allocate_only(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op);
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  const Stack given(stack->begin() + first, stack->end());
  for (const auto& value : given) visit_tensors(value, [&](const at::Tensor& tensor) { call.look(tensor); });
  for (const auto& value : given)
    if (call.device < 0 && value.isDevice() && value.toDevice().is_cuda()) call.place(value.toDevice());
  if (call.device < 0) call.device = current;

  // What writes into its first argument, such as add_, or into lists, such as _foreach_add_, takes no memory.
  if (schema.returns().empty() || (schema.name().back() == '_' && !schema.arguments().empty() &&
                                   schema.arguments()[0].alias_info() && given[0].isTensor())) {
    stack->erase(stack->begin() + first, stack->end());
    if (!schema.returns().empty()) stack->push_back(given[0]);
    return;
  }

  Sized sized{call};
  for (size_t at = first; at < stack->size(); ++at) {
    auto& value = (*stack)[at];
    if (value.isDevice()) value = Device(c10::kMeta);
    value = change_tensors(value, [&](const at::Tensor& tensor) { return sized.meta(tensor); });
  }
  try {
    op.callBoxed(stack);
  } catch (const std::exception& error) {
    if (std::getenv("LOCKSTEP_PRETENDED_DEBUG")) std::cerr << "computed: " << schema.name() << ": " << error.what() << "\n";
    stack->resize(first);
    stack->insert(stack->end(), given.begin(), given.end());
    return compute(op, stack);
  }
  c10::DataPtr scratch;
  if (const size_t bytes = sizes::scratch(schema.name(), given)) {
    c10::DeviceGuard guard(Device(c10::kCUDA, call.device));
    scratch = memory.allocate(bytes);
  }
  sized.write_back();
  for (size_t at = stack->size() - schema.returns().size(); at < stack->size(); ++at)
    (*stack)[at] = change_tensors((*stack)[at], [&](const at::Tensor& tensor) { return sized.back(tensor); });
}

void by_the_cpu(const c10::OperatorHandle& op, Stack* stack) {
  if (sizes::only()) take_workspace(op.schema().name(), current);
  if (sizes::only() && !computes(op, *stack)) return allocate_only(op, stack);
  compute(op, stack);
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
  const bool whole = at::isIntegralType(self.scalar_type(), true) && source.scalar_type() == self.scalar_type();
  if (!sizes::only() || self.numel() <= (whole ? sizes::WHOLE : sizes::SMALL)) on_host(self).copy_(on_host(source));
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

// Attention is computed by its mathematical form, as the kernels of a GPU have no counterpart on a CPU. Where only memory
// is asked for, it has that of the kernel which a GPU would take (sdp_utils.cpp).
at::SDPBackend kernel_of_attention(const at::Tensor& query, bool masked, bool grouped) {
  const auto& allowed = at::globalContext();
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  const bool aligned = query.size(-1) * query.dtype().itemsize() % 16 == 0;
  if (half && !masked && query.size(-1) <= 256 && allowed.userEnabledFlashSDP())
    return at::SDPBackend::flash_attention;
  if ((half || query.scalar_type() == at::kFloat) && aligned && !grouped && allowed.userEnabledMemEfficientSDP())
    return at::SDPBackend::efficient_attention;
  return at::SDPBackend::math;
}

at::Tensor attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout, bool causal, std::optional<double> scale, bool grouped) {
  const auto kernel = kernel_of_attention(query, mask.has_value(), grouped);
  TORCH_CHECK(
      !sizes::only() || kernel != at::SDPBackend::math || at::globalContext().userEnabledMathSDP(),
      "No available kernel. Aborting execution.");
  if (!sizes::only() || kernel == at::SDPBackend::math)
    return at::native::scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale, grouped);
  if (kernel == at::SDPBackend::flash_attention)
    return std::get<0>(at::_scaled_dot_product_flash_attention(query, key, value, dropout, causal, false, scale));
  std::optional<at::Tensor> bias = mask;
  if (bias && bias->scalar_type() == at::kBool)
    bias = at::where(*bias, 0.0, at::scalar_tensor(-INFINITY, query.options()));
  if (bias && bias->size(-1) % 8) {  // its rows must begin at multiples of 16 bytes
    const int64_t keys = bias->size(-1);
    bias = at::pad(*bias, {0, 8 - keys % 8}).narrow(-1, 0, keys);
  }
  if (bias) bias = bias->expand({query.size(0), query.size(1), query.size(2), key.size(2)});
  const bool differentiated =
      at::GradMode::is_enabled() && (query.requires_grad() || key.requires_grad() || value.requires_grad());
  return std::get<0>(at::_scaled_dot_product_efficient_attention(
      query, key, value, bias, differentiated, dropout, causal, scale));
}

// A GPU's kernel converts half precision on its way, as autocast asks of it, which a CPU's can't.
template <at::Tensor (*apply)(const at::Tensor&, int64_t, bool)>
at::Tensor of_any(const at::Tensor& self, int64_t dim, std::optional<at::ScalarType> dtype) {
  const bool within = sizes::only() && self.scalar_type() == at::kHalf && dtype == at::kFloat;
  return apply(within || !dtype ? self : self.to(*dtype), dim, within);
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
  library.impl("scaled_dot_product_attention", &attention);
  library.impl("softmax.int", &of_any<&at::_softmax>);
  library.impl("log_softmax.int", &of_any<&at::_log_softmax>);
  library.impl("record_stream", &record_stream);
  // As one operator, which a GPU's library has, and not by the parts that a CPU has for tensors of no library.
  library.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
  library.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

// Their parts have gradients of their own.
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) {
  library.impl("scaled_dot_product_attention", &attention);
  library.impl("softmax.int", &of_any<&at::_softmax>);
  library.impl("log_softmax.int", &of_any<&at::_log_softmax>);
}

}  // namespace

void pretended_see(int count) { visible = count; }
int64_t pretended_capacity() { return capacity(); }
void pretended_empty_cache() {
  for (auto& device : devices) device.empty();
}
// Bytes: allocated now and at most, and reserved now and at most.
std::array<int64_t, 4> pretended_memory(int number) {
  const auto& device = devices[number];
  return {device.allocated.now, device.allocated.peak, device.reserved.now, device.reserved.peak};
}
void pretended_reset_peak(int number) {
  for (auto* amount : {&devices[number].allocated, &devices[number].reserved}) amount->peak = amount->now;
}
