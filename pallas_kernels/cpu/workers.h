// Work shared out among XLA's own threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace pagedjax {

// How many shares to make of work that can be cut into `most` at most.
inline int64_t num_shares(const xla::ffi::ThreadPool& pool, int64_t most, int64_t per_thread) {
  return std::min(most, std::max<int64_t>(1, pool.num_threads()) * per_thread);
}

// Runs body(i) for each i in [0, count) on the pool's threads and this one; returns when all are
// done. Whoever is free takes the next i. A thread that comes late finds nothing to do, and may
// come after this has returned: what it looks at is kept for it.
template <typename Body>
void share_out(xla::ffi::ThreadPool& pool, int64_t count, const Body& body) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  const int64_t helpers = std::min(pool.num_threads(), count) - 1;
  if (helpers < 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  auto shared = std::make_shared<Shared>();
  auto work = [shared, count, &body] {
    for (int64_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      body(i);  // not touched by who comes late: `next` is past the end then
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(work)(work));
  work();
  // The rest is in other threads' hands: microseconds, unless the machine has given one of them up.
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; ++spins)
    if (spins > 4096) std::this_thread::yield();
}

}  // namespace pagedjax
