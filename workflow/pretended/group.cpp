// What Python calls of pretended GPUs, and a process group for their tensors by gloo. See lockstep/script/pretended.py.

#include "memory.h"
#include "sizes.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/extension.h>

#include <set>

void pretended_see(int count);
int64_t pretended_capacity();
void pretended_empty_cache();
std::array<int64_t, 4> pretended_memory(int device);
void pretended_reset_peak(int device);

namespace {

using c10::Device;
using c10::DeviceIndex;

const c10::impl::DeviceGuardImplInterface* guard() { return c10::impl::getDeviceGuardImpl(c10::kCUDA); }

void resize_storage(const at::Tensor& holder, int64_t bytes) {
  auto* storage = holder.storage().unsafeGetStorageImpl();
  DeviceIndex device = holder.device().index();
  c10::DeviceGuard guard(Device(c10::kCUDA, device));
  auto data = c10::GetAllocator(c10::kCUDA)->allocate(bytes);
  const size_t kept = std::min<size_t>(bytes, storage->nbytes());
  if (!sizes::only() || kept < sizes::PAGE) std::memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

// ---- collectives: gloo's, on the same memory, one after the other ----

class Done final : public c10d::Work {
 public:
  explicit Done(std::vector<at::Tensor> tensors)
      : c10d::Work(-1, c10d::OpType::UNKNOWN), tensors_(std::move(tensors)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future_->markCompleted(c10::IValue(tensors_));
    finish();
  }
  bool wait(std::chrono::milliseconds) override { return true; }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  void synchronize() override {}
  std::vector<at::Tensor> result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

using Lists = std::vector<std::vector<at::Tensor>>;

// What both groups below have in common. DistributedDataParallel takes every group named gloo for a ProcessGroupGloo and
// reads the number of threads in its options, the second member of that class; so they are the second member here, too.
class Common : public c10d::Backend {
 public:
  Common(int rank, int size, std::string name, c10::intrusive_ptr<Options> options = {})
      : c10d::Backend(rank, size), options_(std::move(options)), name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }
  bool supportsCoalescing() const override { return false; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override {
    for (size_t at = 0; at < inputs.size(); ++at) _allgather_base(outputs[at], inputs[at], options);
    return done(outputs);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    for (size_t at = 0; at < inputs.size(); ++at) _reduce_scatter_base(outputs[at], inputs[at], options);
    return done(outputs);
  }

 protected:
  c10::intrusive_ptr<c10d::Work> done(std::vector<at::Tensor> tensors) {
    return c10::make_intrusive<Done>(std::move(tensors));
  }
  std::shared_ptr<void> first_;  // in the place of ProcessGroupGloo's store
  c10::intrusive_ptr<Options> options_;
  const std::string name_;
};

class Group final : public Common {
 public:
  Group(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> gloo, std::string name)
      : Common(gloo->getRank(), gloo->getSize(), std::move(name), gloo->getBackendOptions()),
        store_(std::move(store)),
        gloo_(std::move(gloo)) {}

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& asked) override {
    auto hosts = host(tensors);
    reduce_all(hosts, asked);
    return done(tensors);
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    for (auto& tensor : tensors) {
      std::vector<at::Tensor> alone{tensor};
      allreduce(alone, options);
    }
    return done(tensors);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    auto hosts = host(tensors);
    gloo_->broadcast(hosts, options)->wait();
    return done(tensors);
  }
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) override {
    auto hosts = host(tensors);
    gloo_->reduce(hosts, options)->wait();
    return done(tensors);
  }
  // What goes on while the caller does, as in NCCL: two ranks may both send first, and receive then.
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    auto hosts = host(tensors);
    return gloo_->send(hosts, to, tag);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    auto hosts = host(tensors);
    return gloo_->recv(hosts, from, tag);
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      Lists& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) override {
    auto from = host(inputs);
    Lists to = host(outputs);
    gloo_->allgather(to, from, options)->wait();
    return done(outputs.empty() ? inputs : outputs[0]);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    std::vector<at::Tensor> inputs{input.reshape({-1})};
    Lists outputs{output.view({getSize(), -1}).unbind(0)};
    allgather(outputs, inputs, options);
    return done({output});
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    std::vector<at::Tensor> inputs{input};
    std::vector<at::Tensor> whole{host(inputs)[0].clone()};  // on the host: NCCL's buffers are no tensors either
    c10d::AllreduceOptions all;
    all.reduceOp = options.reduceOp;
    reduce_all(whole, all);
    on_host(output.detach()).copy_(whole[0].view({getSize(), -1})[getRank()].view_as(output));
    return done({output});
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    auto whole = at::stack(inputs[0]);
    return _reduce_scatter_base(outputs[0], whole, options);
  }
  c10::intrusive_ptr<c10d::Work> gather(
      Lists& outputs, std::vector<at::Tensor>& inputs, const c10d::GatherOptions& options) override {
    auto from = host(inputs);
    Lists to = host(outputs);
    gloo_->gather(to, from, options)->wait();
    return done(inputs);
  }
  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    auto to = host(outputs);
    Lists from = host(inputs);
    gloo_->scatter(to, from, options)->wait();
    return done(outputs);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    if (name_ == "nccl") {
      std::vector<at::Tensor> one{at::zeros({1}, Device(c10::kCUDA, device_of_barrier(options)))};
      return allreduce(one, {});
    }
    c10d::BarrierOptions plain;
    gloo_->barrier(plain)->wait();
    return done({});
  }

 private:
  // The same memory on the host. NCCL refuses what lies there already; gloo takes both.
  std::vector<at::Tensor> host(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> hosts;
    for (const auto& tensor : tensors) {
      if (name_ == "nccl") {
        TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu");
        meet(tensor.device().index());
      }
      hosts.push_back(tensor.is_cuda() ? on_host(tensor.detach()) : tensor);
    }
    return hosts;
  }
  Lists host(const Lists& lists) {
    Lists hosts;
    for (const auto& tensors : lists) hosts.push_back(host(tensors));
    return hosts;
  }
  // Gloo has no mean.
  void reduce_all(std::vector<at::Tensor>& hosts, c10d::AllreduceOptions options) {
    const bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    if (mean) options.reduceOp = c10d::ReduceOp::SUM;
    gloo_->allreduce(hosts, options)->wait();
    if (mean)
      for (auto& tensor : hosts) tensor.div_(getSize());
  }
  // NCCL's barrier is a sum over one number, on the device that ProcessGroupNCCL chooses: the one that is named, or
  // that the group was made for, or the first in use, or else the rank's number. The current device does not matter.
  DeviceIndex device_of_barrier(const c10d::BarrierOptions& options) {
    if (!options.device_ids.empty()) return DeviceIndex(options.device_ids[0]);
    if (getBoundDeviceId()) return getBoundDeviceId()->index();
    if (!met_.empty()) return *met_.begin();
    return DeviceIndex(getRank() % guard()->deviceCount());
  }
  // For each device that a rank uses NCCL makes a communicator, and refuses two ranks on one device.
  void meet(DeviceIndex device) {
    if (met_.count(device)) return;
    const std::string mine = std::to_string(int(device));
    if (met_.empty()) {  // all ranks come here at their first collective, so each can say what is wrong
      store_->set("pretended device of " + std::to_string(getRank()), mine);
      for (int rank = 0; rank < getSize(); ++rank)
        if (rank != getRank() && store_->get_to_str("pretended device of " + std::to_string(rank)) == mine)
          refuse(device, rank);
    }
    // A later device is new to some of them only: real ranks wait there for each other in vain. Here a device stays
    // with the rank that came first.
    const std::string me = std::to_string(getRank());
    const std::string holder = store_->compareSet("pretended holder of " + mine, std::string(), me);
    if (holder != me) refuse(device, std::stoi(holder));
    met_.insert(device);
  }
  void refuse(DeviceIndex device, int rank) {
    TORCH_CHECK(
        false, "ncclInvalidUsage: Duplicate GPU detected : rank ", getRank(), " and rank ", rank,
        " both on CUDA device ", int(device));
  }
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::set<DeviceIndex> met_;  // the devices that this rank has used, in order
};

// ---- one rank alone, for memory only (sizes.h): it is taken that all ranks do and have the same ----

class Alone final : public Common {
 public:
  using Common::Common;

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& own, const c10d::AllreduceOptions&) override {
    return done(own);
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& own, const c10d::AllreduceCoalescedOptions&) override {
    return done(own);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& own, const c10d::BroadcastOptions&) override {
    return done(own);
  }
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& own, const c10d::ReduceOptions&) override {
    return done(own);
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      Lists& all, std::vector<at::Tensor>& own, const c10d::AllgatherOptions&) override {
    return copied(all, own);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& all, at::Tensor& own, const c10d::AllgatherOptions&) override {
    for (auto& part : all.view({getSize(), -1}).unbind(0)) part.copy_(own.reshape({-1}));
    return done({all});
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& part, at::Tensor& whole, const c10d::ReduceScatterOptions&) override {
    part.copy_(whole.view({getSize(), -1})[getRank()].view_as(part));
    return done({part});
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& parts, Lists& wholes, const c10d::ReduceScatterOptions&) override {
    for (size_t at = 0; at < parts.size(); ++at) parts[at].copy_(wholes[at][getRank()]);
    return done(parts);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& received, at::Tensor& sent, std::vector<int64_t>&, std::vector<int64_t>&,
      const c10d::AllToAllOptions&) override {
    return done({received});
  }
  c10::intrusive_ptr<c10d::Work> gather(
      Lists& all, std::vector<at::Tensor>& own, const c10d::GatherOptions&) override {
    return copied(all, own);
  }
  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& parts, Lists& wholes, const c10d::ScatterOptions&) override {
    for (size_t at = 0; at < wholes.size(); ++at) parts[at].copy_(wholes[at][getRank()]);
    return done(parts);
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& sent, int, int) override { return done(sent); }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& received, int, int) override { return done(received); }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override { return done({}); }

 private:
  c10::intrusive_ptr<c10d::Work> copied(Lists& all, std::vector<at::Tensor>& own) {
    for (size_t at = 0; at < all.size(); ++at)
      for (auto& part : all[at]) part.copy_(own[at]);
    return done(own);
  }
};

c10::intrusive_ptr<c10d::Backend> make_alone(int rank, int size, const std::string& name) {
  return c10::make_intrusive<Alone>(rank, size, name);
}

c10::intrusive_ptr<c10d::Backend> make_group(
    const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<c10d::Backend>& gloo,
    const std::string& name) {
  return c10::make_intrusive<Group>(store, gloo, name);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("current_device", [] { return int(guard()->getDevice().index()); });
  module.def("set_device", [](int device) { guard()->setDevice(Device(c10::kCUDA, DeviceIndex(device))); });
  module.attr("memory_of_a_gpu") = pretended_capacity();
  module.def("see", &pretended_see);
  module.def("ask_for_initialisation", [] { torch::utils::set_requires_device_init(c10::kCUDA, true); });
  module.def("memory", &pretended_memory);
  module.def("empty_cache", &pretended_empty_cache);
  module.def("reset_peak", &pretended_reset_peak);
  module.def("on_host", &on_host);
  module.def("resize_storage", &resize_storage);
  module.def("make_alone", &make_alone);
  module.def("make_group", &make_group, py::call_guard<py::gil_scoped_release>());
}
