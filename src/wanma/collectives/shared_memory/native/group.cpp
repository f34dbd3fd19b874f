// Interface for Python (native_library.py): a group's queue of collectives, run in order by a waiting thread
// or, if none waits, by a thread of the group's own.

#include <list>
#include <mutex>
#include <thread>

#include "collectives.hpp"
#include "messages.hpp"

namespace wanma {

// Condition variable of one mutex, whose holders call all its functions. std::condition_variable would bind a
// compiled library to the libstdc++ and glibc of the machine that compiled it.
class Condition {
 public:
  // Wait for a notification; 0 nanoseconds: without a limit. It may end early: callers check again.
  void wait(std::unique_lock<std::mutex>& lock, int64_t nanoseconds = 0) {
    constexpr int64_t second = 1'000'000'000;
    const timespec limit = {nanoseconds / second, static_cast<long>(nanoseconds % second)};
    const uint32_t seen = notified_.load(std::memory_order_relaxed);
    ++sleepers_;
    lock.unlock();
    futex(&notified_, FUTEX_WAIT_PRIVATE, seen, nanoseconds > 0 ? &limit : nullptr);
    lock.lock();
    --sleepers_;
  }
  void notify_all() {
    notified_.fetch_add(1, std::memory_order_relaxed);
    if (sleepers_ != 0) futex(&notified_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr);
  }

 private:
  std::atomic<uint32_t> notified_{0};
  int sleepers_ = 0;
};

class Group {
 public:
  Group(uint8_t* base, int rank, int ranks, uint64_t chunk_bytes, uint64_t heap_bytes, int64_t spin_nanoseconds,
        const int* peers)
      : arena(base, rank, ranks, chunk_bytes, heap_bytes, spin_nanoseconds, peers), messages(arena) {}

  ~Group() { close(); }

  // Put a collective in the queue; returns its number, from 1.
  uint64_t submit(Call call, bool in_background) {
    std::unique_lock<std::mutex> lock(mutex_);
    queue_.push_back(std::move(call));
    const uint64_t number = ++submitted_;
    if (in_background) call_thread();
    return number;
  }

  // Wait until collective `number` has ended. A collective that has not begun runs in this thread, unless the
  // wait is limited: 0 is no limit.
  Outcome wait(uint64_t number, int64_t timeout_nanoseconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t until = now_nanoseconds() + timeout_nanoseconds;
    if (timeout_nanoseconds != 0 && done_ < number) call_thread();
    while (done_ < number) {
      if (timeout_nanoseconds == 0 && !running_) {
        run_first(lock);
      } else if (timeout_nanoseconds == 0) {
        changed_.wait(lock);
      } else if (const int64_t left = until - now_nanoseconds(); left > 0) {
        changed_.wait(lock, left);
      } else {
        return kUnderWay;
      }
    }
    return number >= failed_from_ ? failure_ : kDone;
  }

  uint64_t done() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }

  // End the operations in flight, and the thread; peers notice it.
  void close() {
    arena.close();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      to_do_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

  Arena arena;
  Messages messages;

 private:
  // The caller holds the lock.
  void call_thread() {
    if (!thread_.joinable() && !arena.closed()) thread_ = std::thread([this] { serve(); });
    to_do_.notify_all();
  }

  // Run the first collective of the queue; the caller holds the lock, which is released meanwhile.
  void run_first(std::unique_lock<std::mutex>& lock) {
    running_ = true;
    Call call = std::move(queue_.front());
    queue_.pop_front();
    const bool fails = failed_from_ != UINT64_MAX;  // after a failure the ranks' order is undefined
    lock.unlock();
    const Outcome outcome = fails ? failure_ : arena.closed() ? kAborted : Collectives(arena).run(call);
    lock.lock();
    running_ = false;
    ++done_;
    if (outcome != kDone && !fails) {
      failed_from_ = done_;
      failure_ = outcome;
    }
    changed_.notify_all();
    to_do_.notify_all();  // the thread waits while another one runs
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      while (!arena.closed() && (queue_.empty() || running_)) to_do_.wait(lock);
      if (arena.closed()) return;
      run_first(lock);
    }
  }

  std::mutex mutex_;
  Condition to_do_, changed_;
  std::list<Call> queue_;
  std::thread thread_;
  bool running_ = false;
  uint64_t submitted_ = 0, done_ = 0, failed_from_ = UINT64_MAX;
  Outcome failure_ = kDone;
};

}  // namespace wanma

using namespace wanma;

extern "C" {

// Arguments of a collective; `Call` in native_library.py.
struct WanmaCall {
  uint32_t kind, type, operation;
  int32_t root;
  uint64_t count;
  void *input, *output;
  void* const* inputs;   // null, or one for each rank
  void* const* outputs;
  const uint64_t *input_bytes, *output_bytes;
  int64_t timeout_nanoseconds;
};

uint64_t wanma_arena_bytes(int ranks, uint64_t chunk_bytes, uint64_t heap_bytes) {
  return Arena::control_bytes(ranks) + Arena::staging_bytes(ranks, chunk_bytes) + heap_bytes * ranks;
}

uint64_t wanma_heap_offset(int rank, int ranks, uint64_t chunk_bytes, uint64_t heap_bytes) {
  return Arena::control_bytes(ranks) + Arena::staging_bytes(ranks, chunk_bytes) + heap_bytes * rank;
}

int wanma_has_float16() { return WANMA_HAS_FLOAT16; }

void* wanma_open(void* base, int rank, int ranks, uint64_t chunk_bytes, uint64_t heap_bytes,
                 int64_t spin_nanoseconds, const int* peers) {
  auto* bytes = static_cast<uint8_t*>(base);
  return new Group(bytes, rank, ranks, chunk_bytes, heap_bytes, spin_nanoseconds, peers);
}

uint64_t wanma_submit(void* group, const WanmaCall* call, int in_background) {
  auto* own = static_cast<Group*>(group);
  const int ranks = own->arena.ranks();
  Call copied = {static_cast<Kind>(call->kind), static_cast<Type>(call->type),
                 static_cast<Operation>(call->operation), call->root, call->count,
                 static_cast<uint8_t*>(call->input), static_cast<uint8_t*>(call->output), {}, {}, {}, {},
                 call->timeout_nanoseconds};
  for (int rank = 0; rank < ranks; ++rank) {
    if (call->inputs) copied.inputs.push_back(static_cast<uint8_t*>(call->inputs[rank]));
    if (call->outputs) copied.outputs.push_back(static_cast<uint8_t*>(call->outputs[rank]));
    if (call->input_bytes) copied.input_bytes.push_back(call->input_bytes[rank]);
    if (call->output_bytes) copied.output_bytes.push_back(call->output_bytes[rank]);
  }
  return own->submit(std::move(copied), in_background != 0);
}

int wanma_wait(void* group, uint64_t number, int64_t timeout_nanoseconds) {
  return static_cast<Group*>(group)->wait(number, timeout_nanoseconds);
}

uint64_t wanma_done(void* group) { return static_cast<Group*>(group)->done(); }

// Return the rank that caused the failure; `missing` tells for each rank whether it had not arrived.
int wanma_cause(void* group, uint8_t* missing) {
  Arena& arena = static_cast<Group*>(group)->arena;
  for (int rank = 0; rank < arena.ranks(); ++rank) missing[rank] = arena.missing(rank);
  return arena.cause();
}

// Messages: a failure stores the rank to blame in `cause`.
int wanma_send(void* group, int peer, int32_t tag, const void* source, uint64_t bytes, int64_t place, int* cause) {
  return static_cast<Group*>(group)->messages.send(peer, tag, source, bytes, place, cause);
}

int wanma_taken(void* group, int peer, uint32_t number) {
  return static_cast<Group*>(group)->messages.taken(peer, number);
}

int wanma_receive(void* group, int* source, int32_t tag, void* target, uint64_t bytes, int64_t nanoseconds,
                  int* cause) {
  return static_cast<Group*>(group)->messages.receive(source, tag, target, bytes, nanoseconds, cause);
}

uint32_t wanma_mail(void* group) { return static_cast<Group*>(group)->arena.mail(); }

void wanma_rest(void* group, uint32_t seen, int64_t nanoseconds) {
  static_cast<Group*>(group)->arena.sleep_until_mail(seen, nanoseconds);
}

int wanma_usable(void* group, int peer, int* cause) {
  Arena& arena = static_cast<Group*>(group)->arena;
  const Outcome outcome = arena.usable(peer, cause);
  return outcome == kDone ? kDone : arena.give_up(outcome, *cause);
}

// Give up: the time is over, or `blamed` has sent a message that does not match.
void wanma_give_up(void* group, int outcome, int blamed) {
  static_cast<Group*>(group)->arena.give_up(static_cast<Outcome>(outcome), blamed);
}

void wanma_abort(void* group) {
  Arena& arena = static_cast<Group*>(group)->arena;
  arena.fail(kAborted, arena.rank());
}

void wanma_close(void* group) { static_cast<Group*>(group)->close(); }

void wanma_free(void* group) { delete static_cast<Group*>(group); }

}  // extern "C"
