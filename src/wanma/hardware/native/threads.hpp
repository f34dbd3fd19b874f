// Division of a loop over threads, for the libraries of wanma.

#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace wanma {

// Call `work(first, last)` for parts of [0, count), each on a thread: as many as there are parts `worth` one, and
// at most `threads`.
template <class Work> void for_parts(int64_t count, int64_t worth, int threads, Work work) {
  int64_t used = std::clamp<int64_t>(worth, 1, std::max(threads, 1));
  auto part = [&](int64_t which) { work(count * which / used, count * (which + 1) / used); };
  std::vector<std::thread> others;
  for (int64_t which = 1; which < used; ++which) {
    try {
      others.emplace_back(part, which);
    } catch (const std::system_error&) {  // no more threads are available
      part(which);
    }
  }
  part(0);
  for (auto& other : others) other.join();
}

}  // namespace wanma
