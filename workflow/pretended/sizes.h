// Memory only: operators allocate what they would, and compute nothing. See lockstep/script/pretended.py.
//
// An operator runs on tensors of the device "meta", which have sizes and no memory, and its results are then given
// memory on the GPU. That memory is never touched, so the host needs none for it. Small tensors are computed all the
// same, so that a program that reads a mask, a loss scale or a length goes the way that it would go.
#pragma once

#include "memory.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <cstdlib>
#include <unordered_map>

namespace sizes {

using torch::jit::Stack;

constexpr int64_t SMALL = 1 << 14;     // numbers, of all the tensors of an operator
constexpr int64_t WHOLE = 1 << 22;     // of an operator on whole numbers and truth values, such as tokens and masks

inline bool only() {
  static const bool asked = std::getenv("LOCKSTEP_PRETENDED_SIZES") != nullptr;
  return asked;
}

// Bytes that read as zero and take no memory until they are written.
constexpr size_t PAGE = 1 << 16;

inline void give_back_pages(void* held) {
  auto* bytes = static_cast<std::pair<void*, size_t>*>(held);
  munmap(bytes->first, bytes->second);
  delete bytes;
}

inline void give_back_bytes(void* data) { std::free(data); }

inline c10::DataPtr untouched(size_t bytes) {
  if (bytes < PAGE) {
    void* data = std::calloc(1, std::max<size_t>(bytes, 1));
    return {data, data, &give_back_bytes, c10::kCPU};
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(data != MAP_FAILED, "the host gives no address space for ", bytes, " bytes");
  return {data, new std::pair<void*, size_t>(data, bytes), &give_back_pages, c10::kCPU};
}

// Whether an operator's results are parts of what it was given (a view), and so cost nothing.
inline bool is_view(const c10::FunctionSchema& schema) {
  bool any = false;
  for (const auto& result : schema.returns()) {
    if (!result.alias_info() || result.alias_info()->isWrite()) return false;
    any = true;
  }
  return any;
}

// The bytes that cuBLAS takes for each thread that calls it, and keeps; 32 MiB on Hopper (CUDABlas.cpp).
inline size_t workspace() {
  static const char* given = std::getenv("LOCKSTEP_PRETENDED_WORKSPACE");
  static const size_t bytes = given ? std::strtoull(given, nullptr, 10) : size_t(32) << 20;
  return bytes;
}

// Whether an operator is cuBLAS's.
inline bool multiplies(const std::string& name) {
  for (const char* one : {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation",
                          "aten::linear", "aten::addmv", "aten::mv"})
    if (name == one) return true;
  return false;
}

// The bytes that a kernel takes while it runs, beside its results, where they are many: attention's backward pass sums
// the gradient of the queries in fp32 (flash_api.cpp: dq_accum, softmax_d, and expanded gradients of grouped keys and
// values; mem_eff_attention/kernel_backward.h: workspace_gq, for half precision).
inline size_t scratch(const std::string& name, const Stack& given) {
  const bool flash = name == "aten::_scaled_dot_product_flash_attention_backward";
  if (!flash && name != "aten::_scaled_dot_product_efficient_attention_backward") return 0;
  const auto up = [](int64_t number, int64_t unit) { return (number + unit - 1) / unit * unit; };
  const at::Tensor query = given[1].toTensor(), key = given[2].toTensor();
  const int64_t rows = query.size(0) * query.size(1) * up(query.size(2), 128), width = up(query.size(3), 32);
  if (!flash) return query.scalar_type() == at::kFloat ? 0 : 4 * rows * width;
  const bool grouped = key.size(1) != query.size(1);
  const int64_t expanded = 2 * query.size(0) * query.size(1) * key.size(2) * query.size(3);
  return 4 * rows * (width + 1) + (grouped ? expanded * query.dtype().itemsize() : 0);
}

}  // namespace sizes
