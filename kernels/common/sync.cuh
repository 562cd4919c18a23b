// Waits with an end, failure reports, and the shared-memory barriers of the megakernel.
#pragma once

#include "../params.h"
#include "ptx.cuh"

namespace mok {

template <class T> __device__ __forceinline__ T* at(uint8_t* base, int64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

// Reports to the host and to every peer, then ends the kernel: no result of this call is to be used. The trap comes
// when the host has had the time to print the report: NCCL's watchdog ends a process at the first CUDA error it meets.
[[noreturn]] static __device__ __noinline__ void fail(const CallParams& call, FailCode code, Phase phase, int32_t peer,
                                                      int32_t where, uint32_t want, uint32_t seen) {
  volatile FailRecord* record = call.fail;
  if (atomicCAS(call.epoch + 1, 0u, 1u) == 0) { // the first failure is the one to report
    record->phase = static_cast<int32_t>(phase);
    record->rank = call.rank;
    record->peer = peer;
    record->layer = call.layer;
    record->want = want;
    record->seen = seen;
    record->where = where;
    __threadfence_system();
    record->code = static_cast<int32_t>(code);
    for (int32_t p = 0; p < call.world; ++p)
      if (p != call.rank)
        store_release_system(at<uint32_t>(call.peers[p], call.layout.abort), static_cast<uint32_t>(call.rank) + 1);
    __threadfence_system();
  } else { // ending the kernel early would cut the report short
    while (record->code == 0) __nanosleep(1000);
  }
  constexpr uint64_t kReportNanoseconds = 500'000'000;
  const uint64_t reported = global_nanoseconds();
  while (global_nanoseconds() - reported < kReportNanoseconds) __nanosleep(1000);
  __trap();
}

// One thread spins until `*flag`, read with acquire, satisfies `done`. Ends the kernel with a report when a peer has
// failed or the limit is over; the clock is read once per kSpinsPerCheck polls.
template <bool kSystem, class Done>
__device__ __forceinline__ uint32_t wait_flag(const CallParams& call, const uint32_t* flag, Done done, Phase phase,
                                              int32_t peer, int32_t where, uint32_t want) {
  constexpr uint32_t kSpinsPerCheck = 256;
  uint64_t start = 0;
  for (uint32_t spins = 0;; ++spins) {
    const uint32_t seen = kSystem ? load_acquire_system(flag) : load_acquire_gpu(flag);
    if (done(seen)) return seen;
    if (spins % kSpinsPerCheck == 0) {
      const uint64_t now = global_nanoseconds();
      if (start == 0) start = now;
      const uint32_t failed = load_acquire_system(at<const uint32_t>(call.local, call.layout.abort));
      if (failed != 0) fail(call, FailCode::kPeerFailed, phase, static_cast<int32_t>(failed) - 1, where, want, seen);
      if (now - start > static_cast<uint64_t>(call.spin_limit))
        fail(call, FailCode::kTimeout, phase, peer, where, want, seen);
    }
    if (spins > 16) __nanosleep(phase == Phase::kCombine ? 500 : 40);
  }
}

// What this thread has done or seen comes before what it adds to counters from here on.
template <bool kSystem> __device__ __forceinline__ void fence_release() {
  if constexpr (kSystem)
    ptx::fence(ptx::sem_acq_rel, ptx::scope_sys);
  else
    ptx::fence(ptx::sem_acq_rel, ptx::scope_gpu);
}

template <bool kSystem> __device__ __forceinline__ void add_release(uint32_t* counter, uint32_t value) {
  if constexpr (kSystem)
    add_release_system(counter, value);
  else
    add_release_gpu(counter, value);
}

// Epochs are compared so that wrapping around 2^32 does no harm.
__device__ __forceinline__ bool epoch_reached(uint32_t seen, uint32_t want) {
  return static_cast<int32_t>(seen - want) >= 0;
}

template <bool kSystem>
__device__ __forceinline__ void wait_count(const CallParams& call, const uint32_t* counter, uint32_t want, Phase phase,
                                           int32_t peer, int32_t where) {
  wait_flag<kSystem>(call, counter, [want](uint32_t seen) { return seen >= want; }, phase, peer, where, want);
}

__device__ __forceinline__ void wait_epoch(const CallParams& call, const uint32_t* flag, uint32_t epoch, Phase phase,
                                           int32_t peer) {
  wait_flag<true>(call, flag, [epoch](uint32_t seen) { return epoch_reached(seen, epoch); }, phase, peer, 0, epoch);
}

// ---- shared-memory barriers ----

// Phase of a barrier in a ring that is walked in order: the slot, and the parity of its current use.
template <int kSlots> struct RingCursor {
  int32_t slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(ptx::sem_acquire, ptx::scope_cta, barrier, parity)) {
  }
}
__device__ __forceinline__ bool barrier_passed(uint64_t* barrier, uint32_t parity) {
  return ptx::mbarrier_test_wait_parity(ptx::sem_acquire, ptx::scope_cta, barrier, parity);
}
__device__ __forceinline__ void arrive_local(uint64_t* barrier) {
  ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cta, ptx::space_shared, barrier);
}
// `barrier` is an address of the cluster's shared memory (cluster_group::map_shared_rank). Relaxed: a release at
// cluster scope is a fence of the whole GPU, about a microsecond. The caller has finished reading what it gives back,
// and what it hands over goes by asynchronous copies that complete on the barrier itself.
__device__ __forceinline__ void arrive_cluster(uint64_t* barrier) {
  ptx::mbarrier_arrive(ptx::sem_relaxed, ptx::scope_cluster, ptx::space_cluster, barrier);
}

} // namespace mok
