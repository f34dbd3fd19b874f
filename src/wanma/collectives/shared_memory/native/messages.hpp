// Messages from one rank to another: the sender puts one into its own heap and announces it in its channel to
// the receiver, which copies it out when it wants it. A send never waits, unless a channel is full.
#pragma once

#include <mutex>

#include "arena.hpp"

namespace wanma {

class Messages {
 public:
  explicit Messages(Arena& arena) : arena_(arena), me_(arena.rank()) {}

  // Copy `bytes` to `place` of this rank's heap, and announce them to `peer`. kUnderWay: its channel is full.
  Outcome send(int peer, int32_t tag, const void* source, uint64_t bytes, int64_t place, int* cause) {
    if (const Outcome outcome = arena_.usable(peer, cause); outcome != kDone) {
      return arena_.give_up(outcome, *cause);
    }
    std::lock_guard<std::mutex> lock(sending_);
    Channel& channel = arena_.channel(me_, peer);
    const uint32_t posted = channel.posted.load(std::memory_order_relaxed);
    if (posted - channel.taken.load(std::memory_order_acquire) == kChannelMessages) return kUnderWay;
    if (bytes != 0) std::memcpy(arena_.heap(me_) + place, source, bytes);
    Message& message = channel.messages[posted % kChannelMessages];
    message.bytes = bytes;
    message.place = place;
    message.tag = tag;
    message.taken.store(false, std::memory_order_relaxed);
    channel.posted.store(posted + 1, std::memory_order_release);
    arena_.notify(peer);
    return kDone;
  }

  // True if `peer` has received the message of this number, counted from 1; numbers wrap.
  bool taken(int peer, uint32_t number) {
    Channel& channel = arena_.channel(me_, peer);
    if (static_cast<int32_t>(channel.taken.load(std::memory_order_acquire) - number) >= 0) return true;
    return channel.messages[(number - 1) % kChannelMessages].taken.load(std::memory_order_acquire);
  }

  // Copy the first message of `source` (-1: any rank) with this tag to `target`, and set `source` to its
  // sender. kUnderWay: none has come in the given time; kMismatch: it has another size.
  Outcome receive(int* source, int32_t tag, void* target, uint64_t bytes, int64_t nanoseconds, int* cause) {
    const int64_t began = now_nanoseconds();
    while (true) {
      const uint32_t seen = arena_.mail();
      for (int turn = 0; turn < 32; ++turn) {
        if (take(source, tag, target, bytes, cause)) return *cause < 0 ? kDone : kMismatch;
        relax();
      }
      const int64_t left = nanoseconds - (now_nanoseconds() - began);
      if (left > 0 && nanoseconds - left < arena_.spin_nanoseconds()) continue;
      if (left > 0) arena_.sleep_until_mail(seen, left);
      int blamed;
      const Outcome outcome = arena_.usable(*source, &blamed);
      if (outcome == kDone && left > 0) continue;
      // A rank that has left or ended may have sent it before.
      if (take(source, tag, target, bytes, cause)) return *cause < 0 ? kDone : kMismatch;
      if (outcome == kDone) return kUnderWay;
      *cause = blamed;
      return arena_.give_up(outcome, blamed);
    }
  }

 private:
  // Return true if there was one; `cause` gets the sender of one that has another size, -1 otherwise.
  bool take(int* source, int32_t tag, void* target, uint64_t bytes, int* cause) {
    std::lock_guard<std::mutex> lock(taking_);
    // From any rank: start after the last one served, so that none is always the last.
    const int ranks = arena_.ranks(), tried = *source < 0 ? ranks : 1;
    for (int turn = 1; turn <= tried; ++turn) {
      const int peer = *source < 0 ? (last_ + turn) % ranks : *source;
      Channel& channel = arena_.channel(peer, me_);
      uint32_t head = channel.taken.load(std::memory_order_relaxed);
      const uint32_t posted = channel.posted.load(std::memory_order_acquire);
      for (uint32_t at = head; at != posted; ++at) {
        Message& message = channel.messages[at % kChannelMessages];
        if (message.taken.load(std::memory_order_relaxed) || message.tag != tag) continue;
        *source = last_ = peer;
        *cause = message.bytes == bytes ? -1 : peer;
        if (*cause >= 0) return true;
        if (bytes != 0) std::memcpy(target, arena_.heap(peer) + message.place, bytes);
        message.taken.store(true, std::memory_order_release);
        while (head != posted && channel.messages[head % kChannelMessages].taken.load()) ++head;
        channel.taken.store(head, std::memory_order_release);
        arena_.notify(peer);
        return true;
      }
    }
    return false;
  }

  Arena& arena_;
  const int me_;
  std::mutex sending_, taking_;
  int last_ = 0;
};

}  // namespace wanma
