// Arena: unnamed file in memory that all ranks of a group on one host map, and their waits for each other.
//
// A rank counts its arrivals in its seat. Other ranks read what it wrote before an arrival (its header, its
// staging buffer of the same parity) between seeing that arrival and making their own next one. So a buffer
// is free again two arrivals later, and one wait per chunk is enough for double buffering.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace wanma {

constexpr int kMostRanks = 256;
constexpr int64_t kSliceNanoseconds = 10'000'000;  // period in which a sleeping rank looks for dead peers
constexpr uint64_t kPage = 4096;

static_assert(std::atomic<uint32_t>::is_always_lock_free, "atomics are shared between processes");

// Result of an operation; `Outcome` in native_library.py.
enum Outcome : int32_t {
  kDone = 0,
  kLate = 1,      // peers did not arrive before the deadline
  kDead = 2,      // a peer's process has ended
  kLeft = 3,      // a peer has closed its group
  kAborted = 4,   // this rank's group was closed, or some rank's aborted
  kMismatch = 5,  // a peer is in another collective
  kUnderWay = 6,  // the time of this wait is over
};

// Header of a rank's next operation, published with its first arrival.
struct Header {
  uint32_t kind, type, operation;
  int32_t root;
  uint64_t count;
  int64_t place;  // offset of the tensor in the rank's own heap, in bytes; -1: not in it

  bool agrees(const Header& other) const {
    return kind == other.kind && type == other.type && operation == other.operation && root == other.root &&
           count == other.count;
  }
};

// Seat of a rank: only the rank itself writes its arrivals, its departure and its headers.
struct alignas(128) Seat {
  std::atomic<uint32_t> arrivals;
  std::atomic<uint32_t> left;
  Header said[2];
  // Counts messages that were sent to this rank, and its own that were received.
  alignas(128) std::atomic<uint32_t> mail;
  std::atomic<uint32_t> mail_sleepers;
};

struct Message {
  uint64_t bytes;
  int64_t place;  // offset in the sender's heap, in bytes
  int32_t tag;
  std::atomic<bool> taken;  // perhaps before earlier messages with other tags
};

constexpr uint32_t kChannelMessages = 1024;

// Channel of messages from one rank to another, in order. Counters wrap.
struct alignas(128) Channel {
  std::atomic<uint32_t> posted;              // messages sent, written by the sender
  alignas(128) std::atomic<uint32_t> taken;  // all messages before it are taken; written by the receiver
  alignas(128) Message messages[kChannelMessages];
};

struct Control {
  // Arrivals of all ranks together. No rank is further than one beyond the last, so the total equals the
  // number of ranks times a count only when each rank has arrived as often. Ranks wait on it; the last to
  // arrive wakes them.
  alignas(128) std::atomic<uint32_t> total;
  std::atomic<uint32_t> sleepers;
  // 0, or the first outcome that a rank noticed << 16 | the rank that caused it + 1.
  alignas(128) std::atomic<uint32_t> broken;
  Seat seats[kMostRanks];
};

inline int64_t now_nanoseconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline long futex(std::atomic<uint32_t>* word, int what, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), what, value, timeout, nullptr, 0);
}

class Arena {
 public:
  // `peers`: a descriptor of each rank's process (pidfd_open(2)), -1 for this one.
  Arena(uint8_t* base, int rank, int ranks, uint64_t chunk_bytes, uint64_t heap_bytes,
        int64_t spin_nanoseconds, const int* peers)
      : rank_(rank), ranks_(ranks), base_(base), chunk_bytes_(chunk_bytes), heap_bytes_(heap_bytes),
        spin_nanoseconds_(spin_nanoseconds) {
    for (int peer = 0; peer < ranks; ++peer) watched_[peer] = {peers[peer], POLLIN, 0};
  }

  static uint64_t control_bytes(int ranks) {
    const uint64_t channels = sizeof(Channel) * static_cast<uint64_t>(ranks) * ranks;
    return (sizeof(Control) + splits_bytes(ranks) + channels + kPage - 1) / kPage * kPage;
  }
  static uint64_t staging_bytes(int ranks, uint64_t chunk_bytes) { return 2 * chunk_bytes * ranks; }

  int64_t spin_nanoseconds() const { return spin_nanoseconds_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  uint32_t arrivals() const { return own().arrivals.load(std::memory_order_relaxed); }

  // Buffer that this rank's next arrival publishes, and the one that a peer's last arrival published.
  uint8_t* next_stage() { return stage(rank_, arrivals() & 1); }
  uint8_t* published_stage(int peer) { return stage(peer, (arrivals() - 1) & 1); }
  const Header& published(int peer) { return seat(peer).said[(arrivals() - 1) & 1]; }
  void announce(const Header& header) { own().said[arrivals() & 1] = header; }
  uint64_t* next_splits() { return splits(rank_, arrivals() & 1); }
  const uint64_t* published_splits(int peer) { return splits(peer, (arrivals() - 1) & 1); }

  uint8_t* heap(int peer) {
    return base_ + control_bytes(ranks_) + staging_bytes(ranks_, chunk_bytes_) + peer * heap_bytes_;
  }
  // Offset of `bytes` at `address` in this rank's heap; -1 if they are not all in it.
  int64_t place(const void* address, uint64_t bytes) {
    auto at = reinterpret_cast<uintptr_t>(address), first = reinterpret_cast<uintptr_t>(heap(rank_));
    bool within = at >= first && bytes <= heap_bytes_ && at - first <= heap_bytes_ - bytes;
    return within ? static_cast<int64_t>(at - first) : -1;
  }

  void arrive() {
    const uint32_t mine = arrivals() + 1;
    own().arrivals.store(mine, std::memory_order_release);
    const uint32_t total = control().total.fetch_add(1, std::memory_order_seq_cst) + 1;
    const bool last = total == mine * static_cast<uint32_t>(ranks_);
    if (last && control().sleepers.load(std::memory_order_seq_cst) != 0) {
      futex(&control().total, FUTEX_WAKE, INT_MAX, nullptr);
    }
  }

  // Wait until all ranks have arrived as often as this rank.
  Outcome wait(int64_t deadline) {
    const uint32_t wanted = arrivals(), total = wanted * static_cast<uint32_t>(ranks_);
    if (reached(total)) return kDone;
    int64_t began = now_nanoseconds(), now = began;
    while (now - began < spin_nanoseconds_) {
      for (int turn = 0; turn < 32; ++turn) {
        if (reached(total)) return kDone;
        relax();
      }
      now = now_nanoseconds();
    }
    while (true) {
      const int64_t left = deadline - now_nanoseconds();
      const timespec slice = {0, static_cast<long>(std::clamp<int64_t>(left, 0, kSliceNanoseconds))};
      control().sleepers.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t seen = control().total.load(std::memory_order_seq_cst);
      bool moved = false;
      if (static_cast<int32_t>(seen - total) < 0) {
        // A signal ends it early, which does no harm.
        moved = futex(&control().total, FUTEX_WAIT, seen, &slice) != 0 && errno == EAGAIN;
      }
      control().sleepers.fetch_sub(1, std::memory_order_seq_cst);
      if (reached(total)) return kDone;
      if (moved) continue;
      const Outcome outcome = look(wanted, deadline);
      if (outcome != kDone) return outcome;
      if (all_here(wanted)) return kDone;
    }
  }

  Outcome meet(int64_t deadline) {
    arrive();
    return wait(deadline);
  }

  // Mark the group as unusable because of `cause`, for all ranks; return the outcome that they get.
  Outcome fail(Outcome outcome, int cause) {
    if (outcome == kLate) note_missing();
    uint32_t nothing = 0, word = static_cast<uint32_t>(outcome) << 16 | static_cast<uint32_t>(cause + 1);
    if (control().broken.compare_exchange_strong(nothing, word)) {
      wake();
    }
    cause_ = cause;
    return outcome;
  }

  // Outcome by which some rank has given the group up; kDone: none has.
  Outcome broken() {
    const uint32_t word = control().broken.load(std::memory_order_seq_cst);
    if (word == 0) return kDone;
    cause_ = static_cast<int>(word & 0xffff) - 1;
    const auto outcome = static_cast<Outcome>(word >> 16);
    if (outcome == kLate) note_missing();
    return outcome;
  }

  Channel& channel(int source, int target) const {
    auto* first = reinterpret_cast<Channel*>(base_ + sizeof(Control) + splits_bytes(ranks_));
    return first[static_cast<uint64_t>(source) * ranks_ + target];
  }
  uint32_t mail() const { return own().mail.load(std::memory_order_acquire); }
  void notify(int peer) {
    Seat& theirs = seat(peer);
    theirs.mail.fetch_add(1, std::memory_order_seq_cst);
    if (theirs.mail_sleepers.load(std::memory_order_seq_cst) != 0) {
      futex(&theirs.mail, FUTEX_WAKE, INT_MAX, nullptr);
    }
  }
  // Sleep until `mail` differs from `seen`, for `nanoseconds`, or until it is time to look for dead peers.
  void sleep_until_mail(uint32_t seen, int64_t nanoseconds) {
    const timespec slice = {0, static_cast<long>(std::clamp<int64_t>(nanoseconds, 0, kSliceNanoseconds))};
    own().mail_sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (own().mail.load(std::memory_order_seq_cst) == seen) futex(&own().mail, FUTEX_WAIT, seen, &slice);
    own().mail_sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }
  // Check from any thread that messages to or from `peer` (-1: any) are possible; else set the cause.
  Outcome usable(int peer, int* cause) {
    const uint32_t word = control().broken.load(std::memory_order_seq_cst);
    if (word != 0) {
      *cause = static_cast<int>(word & 0xffff) - 1;
      return static_cast<Outcome>(word >> 16);
    }
    *cause = rank_;
    if (closed()) return kAborted;
    int others = 0, gone = 0;
    for (int one = 0; one < ranks_; ++one) {
      if (one == rank_ || (peer >= 0 && one != peer)) continue;
      pollfd watched = watched_[one];
      const bool ended = poll(&watched, 1, 0) > 0;
      ++others;
      // In this order: a rank that has left may have ended since.
      if (seat(one).left.load(std::memory_order_seq_cst) != 0) {
        ++gone;
        *cause = one;
      } else if (ended) {
        *cause = one;
        return kDead;
      }
    }
    return others > 0 && gone == others ? kLeft : kDone;
  }
  // Do as `fail` for a message. A group closed by this rank is not marked: others see that it has left.
  Outcome give_up(Outcome outcome, int blamed) {
    if (closed()) return outcome;
    uint32_t nothing = 0;
    const uint32_t word = static_cast<uint32_t>(outcome) << 16 | static_cast<uint32_t>(blamed + 1);
    if (control().broken.compare_exchange_strong(nothing, word)) wake();
    return outcome;
  }

  void leave() {
    own().left.store(1, std::memory_order_seq_cst);
    wake();
  }

  void close() { closed_.store(true, std::memory_order_seq_cst); leave(); }
  bool closed() const { return closed_.load(std::memory_order_relaxed); }

  int cause() const { return cause_; }
  bool missing(int peer) const { return missing_[peer]; }

 private:
  static uint64_t splits_bytes(int ranks) {
    const uint64_t bytes = 2 * sizeof(uint64_t) * static_cast<uint64_t>(ranks) * ranks;
    return (bytes + alignof(Channel) - 1) / alignof(Channel) * alignof(Channel);
  }
  Control& control() const { return *reinterpret_cast<Control*>(base_); }
  Seat& seat(int peer) const { return control().seats[peer]; }
  Seat& own() const { return seat(rank_); }
  uint8_t* stage(int peer, int parity) {
    return base_ + control_bytes(ranks_) + (2 * static_cast<uint64_t>(peer) + parity) * chunk_bytes_;
  }
  uint64_t* splits(int peer, int parity) {
    auto* first = reinterpret_cast<uint64_t*>(base_ + sizeof(Control));
    return first + (2 * static_cast<uint64_t>(peer) + parity) * ranks_;
  }

  void wake() {
    futex(&control().total, FUTEX_WAKE, INT_MAX, nullptr);
    for (int peer = 0; peer < ranks_; ++peer) futex(&seat(peer).mail, FUTEX_WAKE, INT_MAX, nullptr);
  }

  // Counters wrap, so their difference is compared.
  bool reached(uint32_t total) const {
    return static_cast<int32_t>(control().total.load(std::memory_order_acquire) - total) >= 0;
  }
  bool here(int peer, uint32_t wanted) const {
    return static_cast<int32_t>(seat(peer).arrivals.load(std::memory_order_acquire) - wanted) >= 0;
  }

  bool all_here(uint32_t wanted) const {
    for (int peer = 0; peer < ranks_; ++peer) {
      if (!here(peer, wanted)) return false;
    }
    return true;
  }

  // Return the outcome that makes further waiting useless; kDone: none does.
  Outcome look(uint32_t wanted, int64_t deadline) {
    if (Outcome outcome = broken(); outcome != kDone) return outcome;
    if (closed()) return fail(kAborted, rank_);
    poll(watched_, ranks_, 0);
    for (int peer = 0; peer < ranks_; ++peer) {
      // In this order: a rank that has left or ended may have done its part before.
      const bool ended = (watched_[peer].revents & (POLLIN | POLLHUP | POLLERR)) != 0;
      const bool left = seat(peer).left.load(std::memory_order_seq_cst) != 0;
      if (peer == rank_ || (!ended && !left) || (left && here(peer, wanted))) continue;
      return all_here(wanted) ? kDone : fail(left ? kLeft : kDead, peer);
    }
    if (now_nanoseconds() >= deadline) {
      int first = rank_;
      for (int peer = 0; peer < ranks_ && first == rank_; ++peer) {
        if (!here(peer, wanted)) first = peer;
      }
      return first == rank_ ? kDone : fail(kLate, first);
    }
    return kDone;
  }

  void note_missing() {
    uint32_t most = arrivals();
    for (int peer = 0; peer < ranks_; ++peer) missing_[peer] = !here(peer, most);
  }

  int rank_, ranks_;
  uint8_t* base_;
  uint64_t chunk_bytes_, heap_bytes_;
  int64_t spin_nanoseconds_;
  pollfd watched_[kMostRanks];
  std::atomic<bool> closed_{false};
  int cause_ = -1;
  bool missing_[kMostRanks] = {};
};

}  // namespace wanma
