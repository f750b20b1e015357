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

constexpr int64_t SMALL = 1 << 14;  // numbers, of all the tensors of an operator

bool only() {
  static const bool asked = std::getenv("LOCKSTEP_PRETENDED_SIZES") != nullptr;
  return asked;
}

// Bytes that read as zero and take no memory until they are written.
constexpr size_t PAGE = 1 << 16;

void give_back_pages(void* held) {
  auto* bytes = static_cast<std::pair<void*, size_t>*>(held);
  munmap(bytes->first, bytes->second);
  delete bytes;
}

void give_back_bytes(void* data) { std::free(data); }

c10::DataPtr untouched(size_t bytes) {
  if (bytes < PAGE) {
    void* data = std::calloc(1, std::max<size_t>(bytes, 1));
    return {data, data, &give_back_bytes, c10::kCPU};
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(data != MAP_FAILED, "the host gives no address space for ", bytes, " bytes");
  return {data, new std::pair<void*, size_t>(data, bytes), &give_back_pages, c10::kCPU};
}

// Whether an operator's results are parts of what it was given (a view), and so cost nothing.
bool is_view(const c10::FunctionSchema& schema) {
  bool any = false;
  for (const auto& result : schema.returns()) {
    if (!result.alias_info() || result.alias_info()->isWrite()) return false;
    any = true;
  }
  return any;
}

// The bytes that cuBLAS takes for each thread that calls it, and keeps; 32 MiB on Hopper (CUDABlas.cpp).
size_t workspace() {
  static const char* given = std::getenv("LOCKSTEP_PRETENDED_WORKSPACE");
  static const size_t bytes = given ? std::strtoull(given, nullptr, 10) : size_t(32) << 20;
  return bytes;
}

// Whether an operator is cuBLAS's.
bool multiplies(const std::string& name) {
  for (const char* one : {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation",
                          "aten::linear", "aten::addmv", "aten::mv"})
    if (name == one) return true;
  return false;
}

}  // namespace sizes
