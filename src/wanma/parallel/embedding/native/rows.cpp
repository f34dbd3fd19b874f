// Lookup of ids, and products of the vectors of embedding tables, in one pass through memory each. The terms of a
// sum are added in their order, and no product and sum become one operation: numbers depend on no processor.

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "../../../hardware/native/threads.hpp"

namespace {

constexpr int64_t kLanes = 16;               // floats of a cache line, which are added up side by side
constexpr int64_t kFloatsOfThread = 1 << 18;  // least floats worth a thread: about 0.1 ms

int64_t round_up(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Values of consecutive floats; the compiler takes as many registers as it needs.
using Lanes = float __attribute__((vector_size(kLanes * sizeof(float))));

void add_product(Lanes& sums, float factor, const float* from) {
  Lanes values;
  std::memcpy(&values, from, sizeof values);
  sums += factor * values;
}

void store(const Lanes& values, int64_t lanes, float* to) {
  if (lanes >= kLanes) std::memcpy(to, &values, sizeof values);
  else std::memcpy(to, &values, lanes * sizeof(float));
}

using Entry = std::pair<uint64_t, int64_t>;  // key and position

}  // namespace

// Group `keys` (count): their positions group by group in ascending order, whether each is the first of its
// group, and the index of these. Return the number of groups.
extern "C" int64_t wanma_group(const int64_t* keys, int64_t count, int64_t* positions, bool* is_first,
                               int64_t* starts) {
  std::vector<Entry> entries(count), sorted(count);
  uint64_t differences = 0;
  for (int64_t i = 0; i < count; ++i) {
    // With the other sign bit, negative keys come first.
    entries[i] = {static_cast<uint64_t>(keys[i]) ^ uint64_t{1} << 63, i};
    differences |= entries[i].first ^ entries[0].first;
  }
  // By bytes from the last one, without those in which all keys agree.
  for (int shift = 0; shift < 64; shift += 8) {
    if ((differences >> shift & 255) == 0) continue;
    std::array<int64_t, 256> places{};
    for (const Entry& entry : entries) ++places[entry.first >> shift & 255];
    int64_t before = 0;
    for (int64_t& place : places) before += std::exchange(place, before);
    for (const Entry& entry : entries) sorted[places[entry.first >> shift & 255]++] = entry;
    entries.swap(sorted);
  }
  int64_t groups = 0;
  for (int64_t i = 0; i < count; ++i) {
    positions[i] = entries[i].second;
    is_first[i] = i == 0 || entries[i].first != entries[i - 1].first;
    if (is_first[i]) starts[groups++] = i;
  }
  return groups;
}

// Find the rank that holds the row of each id and the row there, by the parts of each table as TableLayout has
// them; `sizes`: ids of each table, one table after the other; `heights`: rows of each table. Return the
// position of the first id that is outside its table, or -1.
extern "C" int64_t wanma_locate(const int64_t* ids, const int64_t* sizes, const int64_t* heights, int64_t tables,
                                int64_t ranks, const int64_t* part_sizes, const int64_t* part_ranks,
                                const int64_t* part_shifts, int64_t* holders, int64_t* rows) {
  int64_t at = 0;
  for (int64_t table = 0; table < tables; ++table) {
    uint64_t height = heights[table], part_size = part_sizes[table];
    for (int64_t end = at + sizes[table]; at < end; ++at) {
      uint64_t id = ids[at];  // negative ones become large
      if (id >= height) return at;
      uint64_t part = table * ranks + (ranks > 1 ? id / part_size : 0);
      holders[at] = part_ranks[part];
      rows[at] = static_cast<int64_t>(id) + part_shifts[part];
    }
  }
  return -1;
}

// Write the products of all pairs of `count` vectors, each (rows x width), behind the first one if it is kept;
// `output` has `columns` of them, of which the last ones may be too many and become zero.
extern "C" void wanma_interact(const float* const* vectors, int64_t count, int64_t width, int64_t rows,
                               int64_t columns, int keeps_first, float* output, int threads) {
  int64_t padded = round_up(count);
  int64_t worth = rows * (columns + count * width) / kFloatsOfThread;
  wanma::for_parts(rows, worth, threads, [=](int64_t first, int64_t last) {
    std::vector<float> transposed(width * padded);
    for (int64_t row = first; row < last; ++row) {
      for (int64_t i = 0; i < count; ++i) {
        const float* vector = vectors[i] + row * width;
        for (int64_t k = 0; k < width; ++k) transposed[k * padded + i] = vector[k];
      }
      float *to = output + row * columns, *end = to + columns;
      if (keeps_first) to = std::copy_n(vectors[0] + row * width, width, to);
      for (int64_t i = 1; i < count; to += i++) {
        const float* vector = vectors[i] + row * width;
        for (int64_t j = 0; j < i; j += kLanes) {
          Lanes sums{};
          for (int64_t k = 0; k < width; ++k) add_product(sums, vector[k], &transposed[k * padded + j]);
          store(sums, to + j + kLanes <= end ? kLanes : i - j, to + j);  // the next vector overwrites the rest
        }
      }
      std::fill(to, end, 0.0f);
    }
  });
}

// Write the gradients of the vectors (count x rows x width) from that of the output.
extern "C" void wanma_interact_backward(const float* const* vectors, int64_t count, int64_t width, int64_t rows,
                                        int64_t columns, int keeps_first, const float* gradient, float* gradients,
                                        int threads) {
  int64_t padded = round_up(width);
  int64_t worth = rows * (columns + 2 * count * width) / kFloatsOfThread;
  wanma::for_parts(rows, worth, threads, [=](int64_t first, int64_t last) {
    std::vector<float> copies(count * padded), factors(count * count), start(padded);
    for (int64_t row = first; row < last; ++row) {
      const float* from = gradient + row * columns;
      if (keeps_first) std::copy_n(std::exchange(from, from + width), width, start.data());
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(vectors[i] + row * width, width, &copies[i * padded]);
        for (int64_t j = 0; j < i; ++j) factors[i * count + j] = factors[j * count + i] = *from++;
      }
      for (int64_t k = 0; k < width; k += kLanes) {
        for (int64_t i = 0; i < count; ++i) {
          Lanes sums{};
          if (i == 0) std::memcpy(&sums, &start[k], sizeof sums);
          const float *factor = &factors[i * count], *copy = &copies[k];
          for (int64_t j = 0; j < i; ++j) add_product(sums, factor[j], copy + j * padded);
          for (int64_t j = i + 1; j < count; ++j) add_product(sums, factor[j], copy + j * padded);
          store(sums, std::min(kLanes, width - k), gradients + (i * rows + row) * width + k);
        }
      }
    }
  });
}
