// Reductions of several buffers, element by element, always in the order of the buffers.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace wanma {

// Types and operations are numbered as in native_library.py.
enum Type : uint32_t {
  kFloat64, kFloat32, kBfloat16, kFloat16, kInt64, kInt32, kInt8, kUint8, kBytes
};
enum Operation : uint32_t { kSum, kProduct, kMin, kMax, kAverage };

// Types of 16 bits: sums are kept in fp32, and rounded once (to nearest, ties to even) at their end.
struct Bfloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t word = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
  static Bfloat16 rounded(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    uint32_t up = word + 0x7fff + ((word >> 16) & 1);
    bool nan = (word & 0x7fffffff) > 0x7f800000;
    return {static_cast<uint16_t>(nan ? 0x7fc0 : up >> 16)};
  }
};

#if defined(__aarch64__)
// C++ has _Float16 there from g++ 13 on only; this type, which is for storage alone, is in all of its compilers.
#define WANMA_HAS_FLOAT16 1
using Float16 = __fp16;
#elif defined(__FLT16_MANT_DIG__)
#define WANMA_HAS_FLOAT16 1
using Float16 = _Float16;
#else
#define WANMA_HAS_FLOAT16 0
#endif

template <class T> struct Accumulator { using type = T; };
template <> struct Accumulator<Bfloat16> { using type = float; };

template <class T, class A> inline T narrowed(A value) {
  if constexpr (std::is_same_v<T, Bfloat16>) return Bfloat16::rounded(value);
  else return static_cast<T>(value);
}

// Minimum and maximum keep a not-a-number, as in torch.
struct Sum { template <class A> static A of(A a, A b) { return static_cast<A>(a + b); } };
struct Product { template <class A> static A of(A a, A b) { return static_cast<A>(a * b); } };
struct Min { template <class A> static A of(A a, A b) { return (a < b || a != a) ? a : b; } };
struct Max { template <class A> static A of(A a, A b) { return (a > b || a != a) ? a : b; } };

#if WANMA_HAS_FLOAT16
// Conversions of fp16 by instructions that every processor with AVX2 has: compilers vectorize those of _Float16
// only for processors that compute in fp16.
inline void widen(const Float16* from, float* to, uint64_t count) {
  uint64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    const auto halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
#endif
  for (; i < count; ++i) to[i] = static_cast<float>(from[i]);
}
inline void narrow(const float* from, Float16* to, uint64_t count) {
  uint64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    const auto halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_CUR_DIRECTION);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
#endif
  for (; i < count; ++i) to[i] = static_cast<Float16>(from[i]);
}
#endif

constexpr uint64_t kBlock = 2048;  // elements that stay in the first cache

#if WANMA_HAS_FLOAT16
template <class Op, bool average>
void reduce_float16(void* const* outputs, int outputs_count, const void* const* sources, int sources_count,
                    uint64_t count) {
  alignas(64) float sum[kBlock], next[kBlock];
  const float ranks = static_cast<float>(sources_count);
  for (uint64_t from = 0; from < count; from += kBlock) {
    const uint64_t size = count - from < kBlock ? count - from : kBlock;
    widen(static_cast<const Float16*>(sources[0]) + from, sum, size);
    for (int source = 1; source < sources_count; ++source) {
      widen(static_cast<const Float16*>(sources[source]) + from, next, size);
      for (uint64_t i = 0; i < size; ++i) sum[i] = Op::of(sum[i], next[i]);
    }
    if constexpr (average) {
      for (uint64_t i = 0; i < size; ++i) sum[i] /= ranks;
    }
    Float16* out = static_cast<Float16*>(outputs[0]) + from;
    narrow(sum, out, size);
    for (int output = 1; output < outputs_count; ++output) {
      std::memcpy(static_cast<Float16*>(outputs[output]) + from, out, size * sizeof(Float16));
    }
  }
}
#endif

template <class T, class Op, bool average>
void reduce_typed(void* const* outputs, int outputs_count, const void* const* sources, int sources_count,
                  uint64_t count) {
#if WANMA_HAS_FLOAT16
  if constexpr (std::is_same_v<T, Float16>) {
    return reduce_float16<Op, average>(outputs, outputs_count, sources, sources_count, count);
  }
#endif
  using A = typename Accumulator<T>::type;
  alignas(64) A sum[kBlock];
  const A ranks = static_cast<A>(sources_count);
  auto* first = static_cast<const T*>(sources[0]);
  auto* last = static_cast<const T*>(sources[sources_count - 1]);
  for (uint64_t from = 0; from < count; from += kBlock) {
    const uint64_t size = count - from < kBlock ? count - from : kBlock;
    T* out = static_cast<T*>(outputs[0]) + from;
    // An output may be one of the sources: elements do not depend on each other.
    auto finish = [&](auto value) {
      const T* b = last + from;
#pragma GCC ivdep
      for (uint64_t i = 0; i < size; ++i) {
        A total = Op::of(value(i), static_cast<A>(b[i]));
        if constexpr (average) total = static_cast<A>(total / ranks);
        out[i] = narrowed<T>(total);
      }
    };
    if (sources_count == 2) {
      const T* a = first + from;
      finish([a](uint64_t i) { return static_cast<A>(a[i]); });
    } else {
      const T *a = first + from, *b = static_cast<const T*>(sources[1]) + from;
#pragma GCC ivdep
      for (uint64_t i = 0; i < size; ++i) sum[i] = Op::of(static_cast<A>(a[i]), static_cast<A>(b[i]));
      for (int source = 2; source + 1 < sources_count; ++source) {
        const T* c = static_cast<const T*>(sources[source]) + from;
#pragma GCC ivdep
        for (uint64_t i = 0; i < size; ++i) sum[i] = Op::of(sum[i], static_cast<A>(c[i]));
      }
      finish([&sum](uint64_t i) { return sum[i]; });
    }
    for (int output = 1; output < outputs_count; ++output) {
      std::memcpy(static_cast<T*>(outputs[output]) + from, out, size * sizeof(T));
    }
  }
}

template <class T>
void reduce_as(Operation operation, void* const* outputs, int outputs_count, const void* const* sources,
               int sources_count, uint64_t count) {
  switch (operation) {
    case kSum: return reduce_typed<T, Sum, false>(outputs, outputs_count, sources, sources_count, count);
    case kProduct: return reduce_typed<T, Product, false>(outputs, outputs_count, sources, sources_count, count);
    case kMin: return reduce_typed<T, Min, false>(outputs, outputs_count, sources, sources_count, count);
    case kMax: return reduce_typed<T, Max, false>(outputs, outputs_count, sources, sources_count, count);
    case kAverage: return reduce_typed<T, Sum, true>(outputs, outputs_count, sources, sources_count, count);
  }
}

// Write the reduction of two or more sources to every output.
inline void reduce(Type type, Operation operation, void* const* outputs, int outputs_count,
                   const void* const* sources, int sources_count, uint64_t count) {
  auto with = [&](auto zero) {
    reduce_as<decltype(zero)>(operation, outputs, outputs_count, sources, sources_count, count);
  };
  switch (type) {
    case kFloat64: return with(double{});
    case kFloat32: return with(float{});
    case kBfloat16: return with(Bfloat16{});
#if WANMA_HAS_FLOAT16
    case kFloat16: return with(Float16{});
#else
    case kFloat16: return;
#endif
    case kInt64: return with(int64_t{});
    case kInt32: return with(int32_t{});
    case kInt8: return with(int8_t{});
    case kUint8: return with(uint8_t{});
    case kBytes: return;
  }
}

inline uint64_t size_of(Type type) {
  switch (type) {
    case kFloat64: case kInt64: return 8;
    case kFloat32: case kInt32: return 4;
    case kBfloat16: case kFloat16: return 2;
    default: return 1;
  }
}

}  // namespace wanma
