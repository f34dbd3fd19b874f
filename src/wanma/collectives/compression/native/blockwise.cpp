// Codec of int8 with a scale for each block of 256, in one pass through memory each way.
//
// It makes the same bytes of finite numbers, bit for bit, as int8_codec.py with torch's operators: it is
// compiled so that no product and sum become one operation. A row of n blocks has its levels first, 256 n
// bytes, and then n scales.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../../../hardware/native/threads.hpp"

namespace {

constexpr int64_t kBlock = 256;
constexpr int64_t kBlockBytes = kBlock + sizeof(float);
constexpr float kLargest = 127.0f;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr int64_t kBlocksOfThread = 1024;  // least blocks worth a thread: about 0.1 ms

// Scale of a block; not-a-number if it has a value that is not finite.
float scale_of(const float* values) {
  // Without their signs, floats sort as their bits; infinities and not-a-numbers come last.
  uint32_t most = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    most = std::max(most, bits & 0x7fffffff);
  }
  if (most >= kInfinity) return std::numeric_limits<float>::quiet_NaN();
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  // The scale of a block of zeros is the smallest normal number: its inverse is finite.
  return std::max(largest / kLargest, std::numeric_limits<float>::min());
}

void encode_block(const float* values, int8_t* levels, float scale, float* lost) {
  if (std::isnan(scale)) {
    std::memset(levels, 0, kBlock);
    if (lost) std::fill_n(lost, kBlock, scale);
    return;
  }
  float inverse = 1.0f / scale;
  for (int64_t i = 0; i < kBlock; ++i) {
    levels[i] = static_cast<int8_t>(static_cast<int32_t>(std::nearbyint(values[i] * inverse)));
  }
  if (!lost) return;
  for (int64_t i = 0; i < kBlock; ++i) lost[i] = values[i] - static_cast<float>(levels[i]) * scale;
}

// Call `work(row, block)` for all blocks of all rows, on at most `threads` threads.
template <class Work> void for_blocks(int64_t rows, int64_t blocks, int threads, Work work) {
  int64_t all = rows * blocks;
  wanma::for_parts(all, all / kBlocksOfThread, threads, [&](int64_t first, int64_t last) {
    for (int64_t one = first; one < last; ++one) work(one / blocks, one % blocks);
  });
}

}  // namespace

// Encode `values`, rows x (256 blocks) floats, to `encoded`, rows x (260 blocks) bytes; `lost`: null, or a
// buffer like `values`, perhaps the same, for the encoding errors.
extern "C" void wanma_int8_encode(const float* values, int64_t rows, int64_t blocks, uint8_t* encoded, float* lost,
                                  int threads) {
  for_blocks(rows, blocks, threads, [=](int64_t row, int64_t block) {
    uint8_t* levels = encoded + row * blocks * kBlockBytes;
    int64_t at = (row * blocks + block) * kBlock;
    float scale = scale_of(values + at);
    std::memcpy(levels + blocks * kBlock + block * sizeof scale, &scale, sizeof scale);
    encode_block(values + at, reinterpret_cast<int8_t*>(levels) + block * kBlock, scale, lost ? lost + at : nullptr);
  });
}

// Decode `encoded` to floats.
extern "C" void wanma_int8_decode(const uint8_t* encoded, int64_t rows, int64_t blocks, float* values, int threads) {
  for_blocks(rows, blocks, threads, [=](int64_t row, int64_t block) {
    const uint8_t* levels = encoded + row * blocks * kBlockBytes;
    const int8_t* mine = reinterpret_cast<const int8_t*>(levels) + block * kBlock;
    float scale;
    std::memcpy(&scale, levels + blocks * kBlock + block * sizeof scale, sizeof scale);
    float* out = values + (row * blocks + block) * kBlock;
    for (int64_t i = 0; i < kBlock; ++i) out[i] = static_cast<float>(mine[i]) * scale;
  });
}
