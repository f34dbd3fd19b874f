// Collectives: copies and sums that a rank makes between its arrivals.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "arena.hpp"
#include "reduce.hpp"

namespace wanma {

enum Kind : uint32_t { kBarrier, kAllReduce, kAllGather, kReduceScatter, kBroadcast, kAllToAll };

// Bytes on all ranks together below which every rank reduces everything itself: one wait instead of two.
constexpr uint64_t kSmallBytes = 1 << 16;

// One rank's part of a collective. Lists have an entry for each rank.
struct Call {
  Kind kind;
  Type type;
  Operation operation;
  int32_t root;
  uint64_t count;  // elements: of the tensor, or of one rank's part of it; bytes for what is only copied
  uint8_t* input;  // if it is contiguous
  uint8_t* output;
  std::vector<uint8_t*> inputs, outputs;         // if it comes in parts
  std::vector<uint64_t> input_bytes, output_bytes;  // all-to-all: of each part
  int64_t timeout_nanoseconds;
};

class Collectives {
 public:
  explicit Collectives(Arena& arena) : arena_(arena), me_(arena.rank()), ranks_(arena.ranks()) {}

  Outcome run(const Call& call) {
    deadline_ = now_nanoseconds() + call.timeout_nanoseconds;
    if (const Outcome outcome = arena_.broken(); outcome != kDone) return outcome;
    switch (call.kind) {
      case kBarrier: announce(call, -1); return first_meeting(call);
      case kAllReduce: return all_reduce(call);
      case kAllGather: return all_gather(call);
      case kReduceScatter: return reduce_scatter(call);
      case kBroadcast: return broadcast(call);
      case kAllToAll: return all_to_all(call);
    }
    return kMismatch;
  }

 private:
  struct Range { uint64_t from, count; };

  void announce(const Call& call, int64_t place) {
    arena_.announce({call.kind, call.type, call.operation, call.root, call.count, place});
  }

  // Arrive, wait, and check that all ranks are in the same collective.
  Outcome first_meeting(const Call& call) {
    Outcome outcome = arena_.meet(deadline_);
    return outcome == kDone ? agree(call) : outcome;
  }

  Outcome agree(const Call& call) {
    const Header ours = {call.kind, call.type, call.operation, call.root, call.count, 0};
    for (int peer = 0; peer < ranks_; ++peer) {
      if (!arena_.published(peer).agrees(ours)) return arena_.fail(kMismatch, peer);
    }
    return kDone;
  }

  bool all_in_heaps() {
    for (int peer = 0; peer < ranks_; ++peer) {
      if (arena_.published(peer).place < 0) return false;
    }
    return true;
  }
  uint8_t* in_heap(int peer) { return arena_.heap(peer) + arena_.published(peer).place; }

  static void copy(void* target, const void* source, uint64_t bytes) {
    if (bytes != 0 && target != source) std::memcpy(target, source, bytes);
  }

  // Elements from `step * whole` on, of `count`, at most `whole`.
  static Range piece(uint64_t step, uint64_t whole, uint64_t count) {
    uint64_t from = std::min(step * whole, count);
    return {from, std::min(whole, count - from)};
  }
  // Share of one rank, cut at cache lines.
  Range share(Range range, int rank, uint64_t size) const {
    uint64_t line = 64 / size, each = (range.count + ranks_ - 1) / ranks_;
    each = (each + line - 1) / line * line;
    Range part = piece(rank, each, range.count);
    return {range.from + part.from, part.count};
  }
  // Bytes of one rank's staging buffer for each rank.
  uint64_t slot_bytes() const { return arena_.chunk_bytes() / ranks_ / 64 * 64; }

  Outcome all_reduce(const Call& call) {
    const uint64_t size = size_of(call.type), bytes = call.count * size;
    if (bytes * ranks_ <= kSmallBytes && bytes <= arena_.chunk_bytes()) return all_reduce_small(call, bytes);
    announce(call, call.input == call.output ? arena_.place(call.output, bytes) : -1);
    Outcome outcome = first_meeting(call);
    if (outcome != kDone) return outcome;
    return all_in_heaps() ? all_reduce_in_place(call, size) : all_reduce_staged(call, size);
  }

  Outcome all_reduce_small(const Call& call, uint64_t bytes) {
    announce(call, -1);
    copy(arena_.next_stage(), call.input, bytes);
    Outcome outcome = first_meeting(call);
    if (outcome != kDone) return outcome;
    const void* sources[kMostRanks];
    for (int peer = 0; peer < ranks_; ++peer) sources[peer] = arena_.published_stage(peer);
    void* output = call.output;
    reduce(call.type, call.operation, &output, 1, sources, ranks_, call.count);
    return kDone;
  }

  // All-reduce in the heaps: each rank reduces its share of all heaps, into all heaps.
  Outcome all_reduce_in_place(const Call& call, uint64_t size) {
    const Range own = share({0, call.count}, me_, size);
    const void* sources[kMostRanks];
    void* outputs[kMostRanks];
    for (int peer = 0; peer < ranks_; ++peer) {
      sources[peer] = in_heap(peer) + own.from * size;
      outputs[(peer - me_ + ranks_) % ranks_] = in_heap(peer) + own.from * size;
    }
    reduce(call.type, call.operation, outputs, ranks_, sources, ranks_, own.count);
    return arena_.meet(deadline_);
  }

  // All-reduce through staging buffers: each rank reduces its share of every piece. Others' summands come
  // from their staging buffers, its own is read in place, and the result goes to its own tensor and, through
  // its staging buffer, to the others. While one piece is reduced the next one comes in and the one before
  // goes out.
  Outcome all_reduce_staged(const Call& call, uint64_t size) {
    const uint64_t slot = slot_bytes(), whole = slot / size * ranks_;
    const uint64_t steps = (call.count + whole - 1) / whole;
    auto stage_in = [&](uint64_t step) {
      const Range range = piece(step, whole, call.count);
      for (int peer = 0; peer < ranks_; ++peer) {
        if (peer == me_) continue;
        const Range part = share(range, peer, size);
        copy(arena_.next_stage() + peer * slot, call.input + part.from * size, part.count * size);
      }
    };
    stage_in(0);
    Outcome outcome = arena_.meet(deadline_);
    for (uint64_t step = 0; outcome == kDone; ++step) {
      if (step < steps) {
        const Range own = share(piece(step, whole, call.count), me_, size);
        const void* sources[kMostRanks];
        for (int peer = 0; peer < ranks_; ++peer) sources[peer] = arena_.published_stage(peer) + me_ * slot;
        sources[me_] = call.input + own.from * size;
        void* outputs[] = {call.output + own.from * size, arena_.next_stage() + me_ * slot};
        if (own.count != 0) reduce(call.type, call.operation, outputs, 2, sources, ranks_, own.count);
      }
      if (step > 0) {
        const Range range = piece(step - 1, whole, call.count);
        for (int turn = 1; turn < ranks_; ++turn) {
          const int peer = (me_ + turn) % ranks_;
          const Range part = share(range, peer, size);
          const uint8_t* result = arena_.published_stage(peer) + peer * slot;
          copy(call.output + part.from * size, result, part.count * size);
        }
      }
      if (step == steps) break;
      if (step + 1 < steps) stage_in(step + 1);
      outcome = arena_.meet(deadline_);
    }
    return outcome;
  }

  Outcome all_gather(const Call& call) {
    const uint64_t bytes = call.count, chunk = arena_.chunk_bytes();
    bool here = false;
    if (bytes * ranks_ > kSmallBytes || bytes > chunk) {
      announce(call, arena_.place(call.input, bytes));
      Outcome outcome = first_meeting(call);
      if (outcome != kDone) return outcome;
      if (all_in_heaps()) {
        for (int turn = 1; turn < ranks_; ++turn) {
          const int peer = (me_ + turn) % ranks_;
          copy(call.outputs[peer], in_heap(peer), bytes);
        }
        arena_.arrive();
        copy(call.outputs[me_], call.input, bytes);
        return arena_.wait(deadline_);
      }
    } else {
      here = true;  // the single piece carries the check of the collective
      announce(call, -1);
    }
    const uint64_t steps = std::max<uint64_t>(1, (bytes + chunk - 1) / chunk);
    auto stage_in = [&](uint64_t step) {
      const Range range = piece(step, chunk, bytes);
      copy(arena_.next_stage(), call.input + range.from, range.count);
    };
    stage_in(0);
    arena_.arrive();
    for (uint64_t step = 0; step < steps; ++step) {
      const Range range = piece(step, chunk, bytes);
      copy(call.outputs[me_] + range.from, call.input + range.from, range.count);
      Outcome outcome = arena_.wait(deadline_);
      if (outcome == kDone && here) outcome = agree(call);
      if (outcome != kDone) return outcome;
      for (int turn = 1; turn < ranks_; ++turn) {
        const int peer = (me_ + turn) % ranks_;
        copy(call.outputs[peer] + range.from, arena_.published_stage(peer), range.count);
      }
      if (step + 1 < steps) {
        stage_in(step + 1);
        arena_.arrive();
      }
    }
    return kDone;
  }

  // `inputs` has this rank's summand for each rank; `input` is all of them if they are contiguous in the
  // heap.
  Outcome reduce_scatter(const Call& call) {
    const uint64_t size = size_of(call.type), bytes = call.count * size;
    const int64_t place = call.input == nullptr ? -1 : arena_.place(call.input, bytes * ranks_);
    announce(call, place);
    Outcome outcome = first_meeting(call);
    if (outcome != kDone) return outcome;
    const void* sources[kMostRanks];
    if (all_in_heaps()) {
      for (int peer = 0; peer < ranks_; ++peer) sources[peer] = in_heap(peer) + me_ * bytes;
      void* output = call.output;
      reduce(call.type, call.operation, &output, 1, sources, ranks_, call.count);
      return arena_.meet(deadline_);
    }
    const uint64_t slot = slot_bytes(), whole = slot / size;
    const uint64_t steps = (call.count + whole - 1) / whole;
    auto stage_in = [&](uint64_t step) {
      const Range range = piece(step, whole, call.count);
      for (int peer = 0; peer < ranks_; ++peer) {
        if (peer == me_) continue;
        copy(arena_.next_stage() + peer * slot, call.inputs[peer] + range.from * size, range.count * size);
      }
    };
    if (steps != 0) {
      stage_in(0);
      outcome = arena_.meet(deadline_);
    }
    for (uint64_t step = 0; step < steps && outcome == kDone; ++step) {
      const Range range = piece(step, whole, call.count);
      for (int peer = 0; peer < ranks_; ++peer) sources[peer] = arena_.published_stage(peer) + me_ * slot;
      sources[me_] = call.inputs[me_] + range.from * size;
      void* output = call.output + range.from * size;
      reduce(call.type, call.operation, &output, 1, sources, ranks_, range.count);
      if (step + 1 < steps) {
        stage_in(step + 1);
        outcome = arena_.meet(deadline_);
      }
    }
    return outcome;
  }

  Outcome broadcast(const Call& call) {
    const uint64_t bytes = call.count, chunk = arena_.chunk_bytes();
    const uint64_t steps = std::max<uint64_t>(1, (bytes + chunk - 1) / chunk);
    announce(call, -1);
    for (uint64_t step = 0; step < steps; ++step) {
      const Range range = piece(step, chunk, bytes);
      if (me_ == call.root) copy(arena_.next_stage(), call.input + range.from, range.count);
      Outcome outcome = step == 0 ? first_meeting(call) : arena_.meet(deadline_);
      if (outcome != kDone) return outcome;
      if (me_ != call.root) {
        copy(call.output + range.from, arena_.published_stage(call.root), range.count);
      }
    }
    return kDone;
  }

  // Only the two ends know the size of a transfer: all publish theirs, and take as many steps as the largest
  // needs.
  Outcome all_to_all(const Call& call) {
    announce(call, -1);
    std::copy(call.input_bytes.begin(), call.input_bytes.end(), arena_.next_splits());
    Outcome outcome = first_meeting(call);
    if (outcome != kDone) return outcome;
    uint64_t most = 0;
    for (int peer = 0; peer < ranks_; ++peer) {
      const uint64_t* theirs = arena_.published_splits(peer);
      if (theirs[me_] != call.output_bytes[peer]) return arena_.fail(kMismatch, peer);
      for (int target = 0; target < ranks_; ++target) {
        if (target != peer) most = std::max(most, theirs[target]);
      }
    }
    const uint64_t slot = slot_bytes(), steps = (most + slot - 1) / slot;
    copy(call.outputs[me_], call.inputs[me_], call.input_bytes[me_]);
    auto stage_in = [&](uint64_t step) {
      for (int peer = 0; peer < ranks_; ++peer) {
        if (peer == me_) continue;
        const Range range = piece(step, slot, call.input_bytes[peer]);
        copy(arena_.next_stage() + peer * slot, call.inputs[peer] + range.from, range.count);
      }
    };
    for (uint64_t step = 0; step < steps; ++step) {
      stage_in(step);
      outcome = arena_.meet(deadline_);
      if (outcome != kDone) return outcome;
      for (int turn = 1; turn < ranks_; ++turn) {
        const int peer = (me_ + turn) % ranks_;
        const Range range = piece(step, slot, call.output_bytes[peer]);
        copy(call.outputs[peer] + range.from, arena_.published_stage(peer) + me_ * slot, range.count);
      }
    }
    return kDone;
  }

  Arena& arena_;
  const int me_, ranks_;
  int64_t deadline_ = 0;
};

}  // namespace wanma
