// Kernels of scripts/bench_nvlink.py: what the layer does over NVLink, without what it does beside that. Compiled by
// the script; not part of the package.
#include "moe/dispatch.cuh"

#include <cuda_runtime.h>

namespace {

using namespace mok;

constexpr uint64_t kLimitNs = 2'000'000'000;
constexpr int32_t kTileVectors = 32, kTileRows = kBlockRows; // of the layer's second GEMM: 128 rows, 256 columns

__device__ void wait_at_least(const uint32_t* flag, uint32_t want, bool system) {
  const uint64_t start = global_nanoseconds();
  for (uint32_t spins = 0;; ++spins) {
    if ((system ? load_acquire_system(flag) : load_acquire_gpu(flag)) >= want) return;
    if (spins % 256 == 255 && global_nanoseconds() - start > kLimitNs) __trap();
    if (spins > 16) __nanosleep(40);
  }
}

// Row rows[i] of the peer's matrix becomes row i: claims, loads, stores and signals of the communication warps.
__global__ void pull(const uint4* from, const int32_t* rows, int32_t count, int32_t vectors, uint4* to,
                     uint32_t* ticket, uint32_t* arrived) {
  const int32_t lane = threadIdx.x % 32;
  for (;;) {
    int32_t first = 0;
    if (lane == 0) first = static_cast<int32_t>(atomicAdd(ticket, kRowsPerClaim));
    first = __shfl_sync(~0u, first, 0);
    if (first >= count) return;
    for (int32_t row = first; row < min(first + kRowsPerClaim, count); ++row)
      copy_row(vectors, from + static_cast<int64_t>(rows[row]) * vectors, 1, to + static_cast<int64_t>(row) * vectors);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) add_release_gpu(arrived + first / kBlockRows, kRowsPerClaim);
  }
}

// Row i goes to row slots[i] of the peer's matrix: stores and signals of the epilogue of the second GEMM, 8 warps.
__global__ void __launch_bounds__(256)
    push(uint4* to, const int32_t* slots, int32_t count, int32_t vectors, uint32_t* ticket, uint32_t* done) {
  __shared__ int32_t taken;
  const int32_t columns = (vectors + kTileVectors - 1) / kTileVectors;
  const int32_t group = threadIdx.x / 128, thread = threadIdx.x % 128;
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) taken = static_cast<int32_t>(atomicAdd(ticket, 1));
    __syncthreads();
    const int32_t block = taken / columns, column = taken % columns * kTileVectors;
    if (block * kTileRows >= count) return;
    uint4* target[4];
    for (int32_t i = 0; i < 4; ++i) {
      const int32_t row = block * kTileRows + 64 * group + 16 * i + thread / 8;
      target[i] = row < count ? to + static_cast<int64_t>(slots[row]) * vectors + column + thread % 8 : nullptr;
    }
    for (int32_t chunk = 0; chunk < kTileVectors; chunk += 8)
      for (int32_t i = 0; i < 4; ++i)
        if (target[i] != nullptr && column + chunk + thread % 8 < vectors)
          target[i][chunk] = make_uint4(block, column, chunk, thread);
    __syncthreads();
    if (threadIdx.x == 0) add_release_system(done + block, 1);
  }
}

// Two parties of one warp each answer each other `rounds` times; with a row, each first brings it from the peer.
struct Party {
  const uint32_t* waits_on;
  uint32_t* raises;
  bool begins;
};
__device__ void answer(const Party& party, bool system, int32_t rounds, const uint4* row, int32_t vectors, uint4* to,
                       uint64_t* nanoseconds) {
  const int32_t lane = threadIdx.x;
  const uint64_t start = global_nanoseconds();
  for (int32_t round = 1; round <= rounds; ++round) {
    if (!party.begins && lane == 0) wait_at_least(party.waits_on, round, system);
    __syncwarp();
    if (row != nullptr) copy_row(vectors, row, 1, to);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      if (system)
        add_release_system(party.raises, 1);
      else
        add_release_gpu(party.raises, 1);
      if (party.begins) wait_at_least(party.waits_on, round, system);
    }
    __syncwarp();
  }
  if (party.begins && lane == 0) *nanoseconds = global_nanoseconds() - start;
}

__global__ void __launch_bounds__(32) answer_on_gpu(uint32_t* flags, int32_t rounds, const uint4* row, int32_t vectors,
                                                    uint4* to, uint64_t* nanoseconds) {
  const int32_t me = blockIdx.x;
  answer({flags + 32 * me, flags + 32 * (1 - me), me == 0}, false, rounds, row, vectors, to + me * vectors,
         nanoseconds);
}

__global__ void __launch_bounds__(32)
    answer_peer(const uint32_t* waits_on, uint32_t* raises, bool begins, int32_t rounds, uint64_t* nanoseconds) {
  answer({waits_on, raises, begins}, true, rounds, nullptr, 0, nullptr, nanoseconds);
}

// One warp brings the same row again and again, each time to the end.
__global__ void __launch_bounds__(32)
    bring(const uint4* row, int32_t vectors, uint4* to, int32_t rounds, uint64_t* nanoseconds) {
  const uint64_t start = global_nanoseconds();
  for (int32_t round = 0; round < rounds; ++round) {
    copy_row(vectors, row, 1, to);
    __syncwarp();
  }
  if (threadIdx.x == 0) *nanoseconds = global_nanoseconds() - start;
}

__device__ uint32_t sum(const uint32_t* counters, int32_t count) {
  uint32_t total = 0;
  for (int32_t i = threadIdx.x; i < count; i += 32) total += *reinterpret_cast<const volatile uint32_t*>(counters + i);
  return __reduce_add_sync(~0u, total);
}

// Watches a forward from outside. The layer's CTAs take all shared memory of an SM, so this one keeps a cluster away.
// stamps: [0] all rows are here, [1] the first output tile is done, [2] all are.
__global__ void __launch_bounds__(32)
    observe(const uint32_t* rows_arrived, const uint32_t* fc2_done, const uint32_t* epoch, int64_t parity_stride,
            int32_t blocks, uint32_t rows, uint32_t tiles, uint64_t* stamps) {
  const uint64_t start = global_nanoseconds();
  fc2_done += (*epoch & 1) * parity_stride;
  uint64_t seen[3] = {0, 0, 0};
  while (seen[2] == 0) {
    const uint32_t arrived = seen[0] != 0 ? rows : sum(rows_arrived, blocks), done = sum(fc2_done, blocks);
    const uint64_t now = global_nanoseconds();
    if (seen[0] == 0 && arrived >= rows) seen[0] = now;
    if (seen[1] == 0 && done > 0) seen[1] = now;
    if (done >= tiles) seen[2] = now;
    if (now - start > kLimitNs) __trap();
  }
  if (threadIdx.x != 0) return;
  for (int32_t i = 0; i < 3; ++i) stamps[i] = seen[i];
}

__global__ void stamp(uint64_t* nanoseconds) { *nanoseconds = global_nanoseconds(); }

int error() { return static_cast<int>(cudaGetLastError()); }
cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

} // namespace

// Addresses of device memory, and a stream; each returns a cudaError_t.
extern "C" int nvlink_pull(const void* from, const int32_t* rows, int32_t count, int32_t vectors, void* to,
                           uint32_t* ticket, uint32_t* arrived, int32_t ctas, int32_t warps, void* stream) {
  pull<<<ctas, 32 * warps, 0, as_stream(stream)>>>(static_cast<const uint4*>(from), rows, count, vectors,
                                                   static_cast<uint4*>(to), ticket, arrived);
  return error();
}

extern "C" int nvlink_push(void* to, const int32_t* slots, int32_t count, int32_t vectors, uint32_t* ticket,
                           uint32_t* done, int32_t ctas, void* stream) {
  push<<<ctas, 256, 0, as_stream(stream)>>>(static_cast<uint4*>(to), slots, count, vectors, ticket, done);
  return error();
}

extern "C" int nvlink_answer_on_gpu(uint32_t* flags, int32_t rounds, const void* row, int32_t vectors, void* to,
                                    uint64_t* nanoseconds, void* stream) {
  answer_on_gpu<<<2, 32, 0, as_stream(stream)>>>(flags, rounds, static_cast<const uint4*>(row), vectors,
                                                 static_cast<uint4*>(to), nanoseconds);
  return error();
}

extern "C" int nvlink_answer_peer(const uint32_t* waits_on, uint32_t* raises, int32_t begins, int32_t rounds,
                                  uint64_t* nanoseconds, void* stream) {
  answer_peer<<<1, 32, 0, as_stream(stream)>>>(waits_on, raises, begins != 0, rounds, nanoseconds);
  return error();
}

extern "C" int nvlink_bring(const void* row, int32_t vectors, void* to, int32_t rounds, uint64_t* nanoseconds,
                            void* stream) {
  bring<<<1, 32, 0, as_stream(stream)>>>(static_cast<const uint4*>(row), vectors, static_cast<uint4*>(to), rounds,
                                         nanoseconds);
  return error();
}

extern "C" int nvlink_observe(const uint32_t* rows_arrived, const uint32_t* fc2_done, const uint32_t* epoch,
                              int64_t parity_stride, int32_t blocks, uint32_t rows, uint32_t tiles, uint64_t* stamps,
                              void* stream) {
  observe<<<1, 32, 0, as_stream(stream)>>>(rows_arrived, fc2_done, epoch, parity_stride, blocks, rows, tiles, stamps);
  return error();
}

extern "C" int nvlink_stamp(uint64_t* nanoseconds, void* stream) {
  stamp<<<1, 1, 0, as_stream(stream)>>>(nanoseconds);
  return error();
}
