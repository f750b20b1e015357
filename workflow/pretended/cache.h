// The memory of one pretended GPU, shared out as PyTorch does (c10/cuda/CUDACachingAllocator.cpp).
//
// Memory is taken from the device in segments, which are divided into blocks. A block that is freed is kept for later
// ones of its pool. So `allocated` are the sizes of blocks, and `reserved` those of segments. Only one stream is known.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace cache {

constexpr int64_t MIB = 1 << 20;
constexpr int64_t UNIT = 512;            // of the size of a block
constexpr int64_t SMALL = MIB;           // the largest size of a block of the small pool
constexpr int64_t SMALL_SEGMENT = 2 * MIB;
constexpr int64_t LARGE = 10 * MIB;      // from this size on, a block gets a segment of its own
constexpr int64_t LARGE_SEGMENT = 20 * MIB;
constexpr int64_t SEGMENT_UNIT = 2 * MIB;

struct Block {
  int64_t size;
  bool small, used = false;
  Block *before = nullptr, *after = nullptr;  // its neighbours in the segment
};

struct Amount {
  int64_t now = 0, peak = 0;
  void add(int64_t bytes) { peak = std::max(peak, now += bytes); }
};

inline std::string binary_size(int64_t bytes) {
  const bool large = bytes >= 1 << 30;
  char text[32];
  std::snprintf(text, sizeof text, "%.2f %s", bytes / (large ? 1073741824.0 : 1048576.0), large ? "GiB" : "MiB");
  return text;
}

class Device {
 public:
  Amount allocated, reserved;

  // Raises OutOfMemoryError in the words of the real allocator if more than `capacity` bytes would be reserved.
  Block* allocate(int64_t bytes, int number, int64_t capacity) {
    const std::lock_guard<std::mutex> guard(lock_);
    const int64_t size = std::max<int64_t>((bytes + UNIT - 1) / UNIT, 1) * UNIT;
    Block wanted{size, size <= SMALL};
    auto& free = free_[wanted.small];
    auto found = free.lower_bound({size, nullptr});
    Block* block;
    if (found != free.end()) {
      block = found->second;
      free.erase(found);
    } else {
      block = new_segment(wanted, number, capacity);
    }
    const int64_t rest = block->size - size;
    if (wanted.small ? rest >= UNIT : rest > SMALL) {
      auto* remaining = new Block{rest, wanted.small, false, block, block->after};
      if (block->after) block->after->before = remaining;
      block->after = remaining;
      block->size = size;
      free.insert({rest, remaining});
    }
    block->used = true;
    allocated.add(block->size);
    return block;
  }

  void release(Block* block) {
    const std::lock_guard<std::mutex> guard(lock_);
    allocated.add(-block->size);
    block->used = false;
    for (Block* other : {block->before, block->after}) {
      if (!other || other->used) continue;
      free_[block->small].erase({other->size, other});
      block->size += other->size;
      if (other == block->before) {
        block->before = other->before;
        if (block->before) block->before->after = block;
      } else {
        block->after = other->after;
        if (block->after) block->after->before = block;
      }
      delete other;
    }
    free_[block->small].insert({block->size, block});
  }

  // Give segments without a used block back to the device, as torch.cuda.empty_cache does.
  void empty() {
    const std::lock_guard<std::mutex> guard(lock_);
    give_back();
  }

 private:
  Block* new_segment(const Block& wanted, int number, int64_t capacity) {
    int64_t size = wanted.small ? SMALL_SEGMENT : LARGE_SEGMENT;
    if (wanted.size >= LARGE) size = (wanted.size + SEGMENT_UNIT - 1) / SEGMENT_UNIT * SEGMENT_UNIT;
    if (reserved.now + size > capacity) give_back();
    TORCH_CHECK_WITH(
        OutOfMemoryError, reserved.now + size <= capacity, "CUDA out of memory. Tried to allocate ",
        binary_size(wanted.size), ". GPU ", number, " has a total capacity of ", binary_size(capacity), " of which ",
        binary_size(capacity - reserved.now), " is free.");
    reserved.add(size);
    return new Block{size, wanted.small};
  }

  void give_back() {
    for (auto& free : free_)
      for (auto at = free.begin(); at != free.end();) {
        Block* block = at->second;
        if (block->before || block->after) {
          ++at;
          continue;
        }
        reserved.add(-block->size);
        at = free.erase(at);
        delete block;
      }
  }

  std::mutex lock_;
  std::set<std::pair<int64_t, Block*>> free_[2];  // by size, of the large pool and of the small one
};

}  // namespace cache
