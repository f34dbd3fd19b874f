// Lookup of ids, products of the vectors of embedding tables, and sums and updates of rows, in one pass through
// memory each. The terms of a sum are added in their order, and no product and sum become one operation: numbers
// depend on no processor.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "../../../hardware/native/threads.hpp"

namespace {

constexpr int64_t kLanes = 16;               // floats of a cache line, which are added up side by side
constexpr int64_t kFloatsOfThread = 1 << 18;  // least floats worth a thread: about 0.1 ms
constexpr int kDigitBits = 11;                // of a pass that sorts: its counts fit a first-level cache
constexpr int64_t kRowsAhead = 8;             // rows that are fetched while others are computed with

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

// Bits of a number without leading zeros.
int bits_of(uint64_t number) { return number == 0 ? 0 : 64 - __builtin_clzll(number); }

uint64_t low_bits(int count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; }

void fetch(const float* row, int64_t width) {
  for (int64_t k = 0; k < width; k += kLanes) __builtin_prefetch(row + k);
}

// Call `update(row, gradient)` for `count` rows of which each comes once, on several threads; `fetch_row` fetches
// what an update reads.
template <class Fetch, class Update>
void for_rows(const int64_t* rows, int64_t count, int64_t width, int threads, Fetch fetch_row, Update update) {
  wanma::for_parts(count, count * width / kFloatsOfThread, threads, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      if (i + kRowsAhead < last) fetch_row(rows[i + kRowsAhead]);
      update(rows[i], i);
    }
  });
}

}  // namespace

// Group `keys` (count): their positions group by group in ascending order, whether each is the first of its
// group, and the index of these. Return the number of groups.
extern "C" int64_t wanma_group(const int64_t* keys, int64_t count, int64_t* positions, bool* is_first,
                               int64_t* starts) {
  uint64_t differences = 0;
  for (int64_t i = 0; i < count; ++i) differences |= static_cast<uint64_t>(keys[i] ^ keys[0]);
  int position_bits = bits_of(count), key_bits = bits_of(differences);
  if (position_bits + key_bits <= 64) {
    // Key and position in one number; the bits in which all keys agree are left out.
    std::vector<uint64_t> entries(count), sorted(count);
    for (int64_t i = 0; i < count; ++i) entries[i] = (keys[i] & low_bits(key_bits)) << position_bits | i;
    for (int shift = position_bits; shift < position_bits + key_bits; shift += kDigitBits) {
      std::array<int64_t, 1 << kDigitBits> places{};
      for (uint64_t entry : entries) ++places[entry >> shift & low_bits(kDigitBits)];
      int64_t before = 0;
      for (int64_t& place : places) before += std::exchange(place, before);
      for (uint64_t entry : entries) sorted[places[entry >> shift & low_bits(kDigitBits)]++] = entry;
      entries.swap(sorted);
    }
    for (int64_t i = 0; i < count; ++i) {
      positions[i] = entries[i] & low_bits(position_bits);
      is_first[i] = i == 0 || (entries[i] ^ entries[i - 1]) >> position_bits != 0;
    }
  } else {
    std::iota(positions, positions + count, 0);
    std::stable_sort(positions, positions + count, [=](int64_t a, int64_t b) { return keys[a] < keys[b]; });
    for (int64_t i = 0; i < count; ++i) is_first[i] = i == 0 || keys[positions[i]] != keys[positions[i - 1]];
  }
  int64_t groups = 0;
  for (int64_t i = 0; i < count; ++i) {
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

// Add up vectors by group: `values` (vectors x width) at the `sources` of the positions of each group, as
// wanma_group has them. Write each sum divided by `divisor`, and whether it has an element other than zero.
extern "C" void wanma_sum_groups(const float* values, int64_t width, const int64_t* sources, const int64_t* positions,
                                 int64_t count, const int64_t* starts, int64_t groups, float divisor, float* sums,
                                 bool* is_used, int threads) {
  wanma::for_parts(groups, count * width / kFloatsOfThread, threads, [=](int64_t first, int64_t last) {
    int64_t end_of_part = last < groups ? starts[last] : count;
    for (int64_t group = first; group < last; ++group) {
      int64_t start = starts[group], end = group + 1 < groups ? starts[group + 1] : count;
      for (int64_t ahead = start + kRowsAhead; ahead < std::min(end + kRowsAhead, end_of_part); ++ahead) {
        fetch(values + sources[positions[ahead]] * width, width);
      }
      float* to = sums + group * width;
      bool any = false;
      for (int64_t k = 0; k < width; k += kLanes) {
        int64_t lanes = std::min(kLanes, width - k);
        Lanes total{};
        for (int64_t at = start; at < end; ++at) {
          const float* from = values + sources[positions[at]] * width + k;
          Lanes terms{};
          if (lanes == kLanes) std::memcpy(&terms, from, sizeof terms);
          else std::memcpy(&terms, from, lanes * sizeof(float));
          total += terms;
        }
        for (int64_t lane = 0; lane < lanes; ++lane) any |= total[lane] != 0.0f;
        total /= divisor;
        store(total, lanes, to + k);
      }
      is_used[group] = any;
    }
  });
}

// Adagrad's update of rows of `matrix` and of the sums of squares beside it, one for each element; `stride` and
// `squares_stride`: floats from one row to the next.
extern "C" void wanma_adagrad(float* matrix, int64_t stride, float* squares, int64_t squares_stride, int64_t width,
                              const int64_t* rows, int64_t count, const float* gradient, float rate,
                              float epsilon, int threads) {
  auto fetch_row = [=](int64_t row) {
    fetch(matrix + row * stride, width);
    fetch(squares + row * squares_stride, width);
  };
  for_rows(rows, count, width, threads, fetch_row, [=](int64_t row, int64_t i) {
    float *__restrict weights = matrix + row * stride, *__restrict sums = squares + row * squares_stride;
    const float* __restrict of_row = gradient + i * width;
    for (int64_t k = 0; k < width; ++k) {
      sums[k] += of_row[k] * of_row[k];
      weights[k] -= rate * (of_row[k] / (std::sqrt(sums[k]) + epsilon));
    }
  });
}

// Row-wise Adagrad's update; `squares` has one sum for each row, of its mean square.
extern "C" void wanma_rowwise_adagrad(float* matrix, int64_t stride, float* squares, int64_t squares_stride,
                                      int64_t width, const int64_t* rows, int64_t count, const float* gradient,
                                      float rate, float epsilon, int threads) {
  auto fetch_row = [=](int64_t row) {
    fetch(matrix + row * stride, width);
    __builtin_prefetch(squares + row * squares_stride);
  };
  for_rows(rows, count, width, threads, fetch_row, [=](int64_t row, int64_t i) {
    float* __restrict weights = matrix + row * stride;
    const float* __restrict of_row = gradient + i * width;
    std::array<float, kLanes> terms{};  // added up side by side
    for (int64_t k = 0; k < width; ++k) terms[k % kLanes] += of_row[k] * of_row[k];
    float square = 0.0f;
    for (float term : terms) square += term;
    float& sum = squares[row * squares_stride];
    sum += square / static_cast<float>(width);
    float root = std::sqrt(sum) + epsilon;
    for (int64_t k = 0; k < width; ++k) weights[k] -= rate * (of_row[k] / root);
  });
}
