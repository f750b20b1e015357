// The memory of a pretended GPU's tensor, as a tensor of the host.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

namespace {

constexpr int64_t MEMORY_OF_A_GPU = int64_t(8) << 30;  // as pynvml.py says too

void free_alias(void* held) {
  delete static_cast<c10::Storage*>(held);
}

at::Tensor geometry_of(at::Tensor made, const at::Tensor& like) {
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

at::Tensor with_storage(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made = geometry_of(made, like);
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto* keep = new c10::Storage(tensor.storage());
  c10::DataPtr data(keep->mutable_data(), keep, &free_alias, c10::kCPU);
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), keep->nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true);
  auto made = with_storage(std::move(storage), tensor, c10::DispatchKey::CPU);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

}  // namespace
