// Hashes of the results of wanma's compiled code, one line each, for comparison between processors.
//
// Inputs are made here, and give no not-a-numbers, whose sign differs between processors.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "collectives/shared_memory/native/reduce.hpp"

extern "C" void wanma_int8_encode(const float*, int64_t, int64_t, uint8_t*, float*, int);
extern "C" void wanma_int8_decode(const uint8_t*, int64_t, int64_t, float*, int);

namespace {

uint64_t state = 88172645463325252ull;

uint64_t draw() {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

float number(int span) {
  const auto mantissa = static_cast<float>(static_cast<int64_t>(draw() >> 40) - 8388608) / 8388608.0f;
  return std::ldexp(mantissa, static_cast<int>(draw() % (2 * span + 1)) - span);
}

uint64_t hash(const void* data, uint64_t bytes) {
  uint64_t value = 1469598103934665603ull;
  for (uint64_t i = 0; i < bytes; ++i) value = (value ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211ull;
  return value;
}

template <class T> void put(std::vector<uint8_t>& bytes, uint64_t at, T value) {
  std::memcpy(bytes.data() + at * sizeof value, &value, sizeof value);
}

std::vector<uint8_t> numbers(wanma::Type type, uint64_t count) {
  std::vector<uint8_t> bytes(count * wanma::size_of(type));
  for (uint64_t i = 0; i < count; ++i) {
    const int64_t small = static_cast<int64_t>(draw() % 100);
    switch (type) {
      case wanma::kFloat64: put(bytes, i, static_cast<double>(number(20))); break;
      case wanma::kFloat32: put(bytes, i, number(20)); break;
      case wanma::kBfloat16: put(bytes, i, wanma::Bfloat16::rounded(number(20)).bits); break;
      // Finite, subnormal numbers among them.
      case wanma::kFloat16: put(bytes, i, static_cast<uint16_t>((draw() % 0x7c00) | (draw() & 0x8000))); break;
      case wanma::kInt64: put(bytes, i, small - 50); break;
      case wanma::kInt32: put(bytes, i, static_cast<int32_t>(small - 50)); break;
      default: put(bytes, i, static_cast<int8_t>(small)); break;
    }
  }
  return bytes;
}

void print_reductions() {
  constexpr uint64_t count = 4099;  // two blocks and a few elements, which no width of vectors divides
  for (int ranks = 2; ranks <= 3; ++ranks) {
    for (uint32_t type = wanma::kFloat64; type <= wanma::kUint8; ++type) {
      std::vector<std::vector<uint8_t>> inputs;
      for (int rank = 0; rank < ranks; ++rank) inputs.push_back(numbers(static_cast<wanma::Type>(type), count));
      const void* sources[3] = {inputs[0].data(), inputs[1].data(), inputs.back().data()};
      for (uint32_t operation = wanma::kSum; operation <= wanma::kAverage; ++operation) {
        std::vector<uint8_t> result(inputs[0].size());
        void* outputs[1] = {result.data()};
        wanma::reduce(static_cast<wanma::Type>(type), static_cast<wanma::Operation>(operation), outputs, 1, sources,
                      ranks, count);
        std::printf("type %u operation %u ranks %d: %016llx\n", type, operation, ranks,
                    static_cast<unsigned long long>(hash(result.data(), result.size())));
      }
    }
  }
}

void print_codec() {
  constexpr int64_t rows = 3, blocks = 9;
  std::vector<float> values(rows * blocks * 256), lost(values.size()), decoded(values.size());
  for (auto& value : values) value = draw() % 97 ? number(60) : 0.0f;
  for (uint64_t i = 0; i < 256; ++i) values[i] = std::copysign(static_cast<float>(i % 128) + 0.5f, values[i]);
  std::vector<uint8_t> encoded(rows * blocks * 260);
  wanma_int8_encode(values.data(), rows, blocks, encoded.data(), lost.data(), 2);
  wanma_int8_decode(encoded.data(), rows, blocks, decoded.data(), 2);
  std::printf("encoded: %016llx\n", static_cast<unsigned long long>(hash(encoded.data(), encoded.size())));
  std::printf("residual: %016llx\n", static_cast<unsigned long long>(hash(lost.data(), lost.size() * sizeof(float))));
  std::printf("decoded: %016llx\n", static_cast<unsigned long long>(hash(decoded.data(), decoded.size() * sizeof(float))));
}

}  // namespace

int main() {
  std::printf("float16: %d\n", WANMA_HAS_FLOAT16);
  print_reductions();
  print_codec();
}
