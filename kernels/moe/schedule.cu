// Routing -> tables on the GPU, in three small launches without a host sync; equal to mok_megatron/schedule.py bit for
// bit. Counting is by integer atomics and bit masks, so the order of threads leaves no trace.
#include "../common/host.h"
#include "../common/sync.cuh"
#include "tile_order.h"

#include <cuda_bf16.h>

namespace mok {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kMaskWords = kTokensPerBlock / 32; // a bit for every token of a block
static_assert(kMaxExperts <= kThreads && kMaxLocalExperts < kThreads, "the layout has a thread for each expert");
static_assert(kMaxLocalExperts <= kOddMask);

__device__ __forceinline__ float load_weight(const ScheduleParams& p, int64_t index) {
  switch (static_cast<ProbsType>(p.probs_type)) {
  case ProbsType::kBfloat16:
    return __bfloat162float(__ldg(static_cast<const __nv_bfloat16*>(p.probs) + index));
  case ProbsType::kFloat64:
    return static_cast<float>(__ldg(static_cast<const double*>(p.probs) + index));
  default:
    return __ldg(static_cast<const float*>(p.probs) + index);
  }
}

// One warp compacts a row of the routing map into out_experts and out_weights, ascending, and counts its experts.
// Returns, to every lane, the highest local number of an expert in the row.
__device__ int32_t compact_token(const ScheduleParams& p, int32_t token, int32_t* counts) {
  constexpr int32_t kTogether = 8; // loads in flight, of 32 experts each
  const int32_t lane = threadIdx.x % 32, experts = p.call.experts, top_k = p.call.top_k;
  const int64_t slots = static_cast<int64_t>(token) * top_k;
  const uint8_t* map = p.routing_map + static_cast<int64_t>(token) * experts;
  int32_t found = 0, last = 0;
  for (int32_t first = 0; first < experts; first += 32 * kTogether) {
    uint32_t routed = 0; // bit i: expert first + 32 i + lane
#pragma unroll
    for (int32_t i = 0; i < kTogether; ++i) {
      const int32_t expert = first + 32 * i + lane;
      if (expert < experts && __ldg(map + expert) != 0) routed |= 1u << i;
    }
    float weights[kTogether];
#pragma unroll
    for (int32_t i = 0; i < kTogether; ++i)
      if (routed >> i & 1) weights[i] = load_weight(p, token * p.probs_stride + first + 32 * i + lane);
#pragma unroll
    for (int32_t i = 0; i < kTogether; ++i) {
      const uint32_t mask = __ballot_sync(~0u, routed >> i & 1);
      const int32_t expert = first + 32 * i + lane, k = found + __popc(mask & ((1u << lane) - 1));
      if ((routed >> i & 1) != 0 && k < top_k) {
        p.out_experts[slots + k] = expert;
        p.out_weights[slots + k] = weights[i];
        atomicAdd(counts + expert, 1);
        last = max(last, expert % (experts / p.call.world));
      }
      found += __popc(mask);
    }
  }
  if (found > top_k && lane == 0) fail(p.call, FailCode::kTooManyRoutes, Phase::kRouting, -1, token, top_k, found);
  for (int32_t k = found + lane; k < top_k; k += 32) {
    p.out_experts[slots + k] = -1;
    p.out_weights[slots + k] = 0.0f;
  }
  return __reduce_max_sync(~0u, last);
}

// Grid: one block per kTokensPerBlock tokens, at least one.
__global__ void __launch_bounds__(kThreads) route_kernel(const __grid_constant__ ScheduleParams p) {
  extern __shared__ int32_t counts[]; // [E], then tokens by last local expert [e]
  const CallParams& call = p.call;
  cudaTriggerProgrammaticLaunchCompletion();
  const int32_t local = call.experts / call.world;
  for (int32_t e = threadIdx.x; e < call.experts + local; e += kThreads) counts[e] = 0;
  __syncthreads();
  const int32_t first = blockIdx.x * kTokensPerBlock, last = min(first + kTokensPerBlock, call.tokens);
  for (int32_t token = first + threadIdx.x / 32; token < last; token += kWarps) {
    const int32_t last_expert = compact_token(p, token, counts);
    if (threadIdx.x % 32 == 0) atomicAdd(counts + call.experts + last_expert, 1);
  }
  __syncthreads();
  for (int32_t e = threadIdx.x; e < local; e += kThreads)
    if (counts[call.experts + e] != 0) atomicAdd(p.last_counts + e, counts[call.experts + e]);
  for (int32_t e = threadIdx.x; e < call.experts; e += kThreads)
    p.block_counts[static_cast<int64_t>(blockIdx.x) * call.experts + e] = counts[e];

  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  if (call.world > 1) {
    const int64_t vectors = static_cast<int64_t>(call.tokens) * call.hidden / 8;
    uint4* copy = at<uint4>(call.local, call.layout.x);
    for (int64_t v = thread; v < vectors; v += threads) copy[v] = static_cast<const uint4*>(p.x)[v];
  }
}

// Sum of `value` over the threads before this one; every thread of the block calls it.
__device__ int32_t exclusive_scan(int32_t value, int32_t* warp_sums) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t inclusive = value;
  for (int32_t d = 1; d < 32; d *= 2) {
    const int32_t other = __shfl_up_sync(~0u, inclusive, d);
    if (lane >= d) inclusive += other;
  }
  __syncthreads();
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  if (warp == 0) {
    int32_t sum = warp_sums[lane];
    for (int32_t d = 1; d < 32; d *= 2) {
      const int32_t other = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += other;
    }
    warp_sums[lane] = sum;
  }
  __syncthreads();
  return inclusive - value + (warp > 0 ? warp_sums[warp - 1] : 0);
}

// Per-block counts of one expert -> their exclusive prefix sums, in place; returns the total.
__device__ int32_t scan_blocks(int32_t* counts, int32_t blocks, int32_t experts) {
  constexpr int32_t kAhead = 16; // loads in flight
  int32_t total = 0;
  for (int32_t first = 0; first < blocks; first += kAhead) {
    int32_t value[kAhead];
#pragma unroll
    for (int32_t i = 0; i < kAhead; ++i)
      value[i] = first + i < blocks ? counts[static_cast<int64_t>(first + i) * experts] : 0;
#pragma unroll
    for (int32_t i = 0; i < kAhead; ++i) {
      if (first + i < blocks) counts[static_cast<int64_t>(first + i) * experts] = total;
      total += value[i];
    }
  }
  return total;
}

// Tickets, `arrays` counters per row block, and those of them that peers poll; one block.
__device__ void clear_counters(const CallParams& call, uint32_t epoch, uint32_t* counters, int32_t arrays) {
  const int32_t blocks = call.max_rows / kBlockRows;
  uint32_t* polled = at<uint32_t>(call.local, call.layout.fc2_done) + static_cast<int64_t>(epoch & 1) * blocks;
  for (int32_t i = threadIdx.x; i < blocks; i += kThreads) polled[i] = 0;
  for (int32_t i = threadIdx.x; i < kCounterWords + arrays * blocks; i += kThreads) counters[i] = 0;
}

// This rank's counts go to every rank; returns when those of all ranks are here.
__device__ void exchange_counts(const CallParams& call, uint32_t epoch, int32_t count) {
  const int64_t matrix = static_cast<int64_t>(epoch & 1) * call.world * call.experts;
  const int32_t expert = threadIdx.x;
  if (call.world == 1) { // nobody to wait for: spare the system-wide fences
    if (expert < call.experts) at<int32_t>(call.local, call.layout.counts)[matrix + expert] = count;
    return; // each thread reads back what it wrote
  }
  for (int32_t peer = 0; peer < call.world; ++peer)
    if (expert < call.experts)
      at<int32_t>(call.peers[peer], call.layout.counts)[matrix + call.rank * call.experts + expert] = count;
  __threadfence_system();
  __syncthreads();
  for (int32_t peer = threadIdx.x; peer < call.world; peer += kThreads)
    store_release_system(at<uint32_t>(call.peers[peer], call.layout.opened) + call.rank, epoch);
  for (int32_t peer = threadIdx.x; peer < call.world; peer += kThreads)
    wait_epoch(call, at<const uint32_t>(call.local, call.layout.opened) + peer, epoch, Phase::kOpen, peer);
  __syncthreads();
}

// One block, thread = expert (of all ranks): row layout of every rank from the counts of all ranks.
__global__ void __launch_bounds__(kThreads) layout_kernel(const __grid_constant__ ScheduleParams p, int32_t blocks) {
  __shared__ int32_t warp_sums[kWarps];
  const CallParams& call = p.call;
  const int32_t expert = threadIdx.x, experts = call.experts, local = experts / call.world;
  cudaGridDependencySynchronize();
  const uint32_t epoch = *call.epoch + 1;
  clear_counters(call, epoch, p.counters, kForwardCounters);

  const int32_t count = expert < experts ? scan_blocks(p.block_counts + expert, blocks, experts) : 0;
  exchange_counts(call, epoch, count);
  cudaTriggerProgrammaticLaunchCompletion(); // not earlier: nothing of this rank shall wait on SMs that peers may need

  // Tokens in the order in which combine can take them: by their last expert. last_counts becomes where each begins.
  const int32_t tokens_here = expert < local ? p.last_counts[expert] : 0;
  const int32_t tokens_before = exclusive_scan(tokens_here, warp_sums);
  if (expert < local) {
    p.last_next[expert] = tokens_before;
    p.last_counts[expert] = 0;
  }

  int32_t total = 0, before = 0; // routes of this expert: of all ranks, of ranks below this one
  const int32_t* counts = at<const int32_t>(call.local, call.layout.counts) +
                          static_cast<int64_t>(epoch & 1) * call.world * experts + expert;
  for (int32_t rank = 0; rank < call.world && expert < experts; ++rank) {
    const int32_t n = __ldcg(counts + static_cast<int64_t>(rank) * experts);
    total += n;
    before += rank < call.rank ? n : 0;
  }
  const int32_t expert_blocks = (total + kBlockRows - 1) / kBlockRows;
  const int32_t blocks_before_expert = exclusive_scan(expert_blocks, warp_sums);
  const int32_t odds_before_expert = exclusive_scan(expert_blocks & 1, warp_sums);

  // Rows count from the first expert of the expert's own rank.
  __shared__ int32_t first_of_expert[kMaxExperts];
  first_of_expert[expert] = blocks_before_expert;
  __shared__ int32_t odds_of_mine;
  __shared__ int2 padding[kMaxLocalExperts]; // rows without a route, first and behind the last
  if (expert == call.rank * local) odds_of_mine = odds_before_expert;
  __syncthreads();
  if (expert < experts) {
    const int32_t first = blocks_before_expert - first_of_expert[expert / local * local];
    p.route_base[expert] = first * kBlockRows + before;
    const int32_t mine = expert - call.rank * local;
    if (mine >= 0 && mine < local) {
      const int32_t odds = odds_before_expert - odds_of_mine;
      p.out_expert_first_row[mine] = first * kBlockRows;
      p.tile_table[mine] = pack_blocks((first - odds) / 2, odds);
      if (mine == local - 1) {
        const int32_t end = first + expert_blocks, odd_end = odds + (expert_blocks & 1);
        p.out_expert_first_row[local] = end * kBlockRows;
        p.tile_table[local] = pack_blocks((end - odd_end) / 2, odd_end);
      }
      padding[mine] = make_int2(first * kBlockRows + total, (first + expert_blocks) * kBlockRows);
    }
  }
  __syncthreads();
  for (int32_t e = threadIdx.x / 32; e < local; e += kWarps)
    for (int32_t row = padding[e].x + threadIdx.x % 32; row < padding[e].y; row += 32)
      at<RowSource>(call.local, call.layout.row_source)[row] = {-1, -1};
  if (threadIdx.x == 0) *call.epoch = epoch;
}

// Puts this block's tokens into token_order, by their last local expert; any order among equals gives the same results.
__device__ void order_tokens(const ScheduleParams& p, int32_t first, int32_t tokens) {
  __shared__ int32_t place[kMaxLocalExperts]; // tokens of this block by last expert, then where they begin
  const int32_t local = p.call.experts / p.call.world, top_k = p.call.top_k;
  static_assert(kTokensPerBlock <= kThreads, "a thread per token");
  for (int32_t e = threadIdx.x; e < local; e += kThreads) place[e] = 0;
  __syncthreads();
  const int32_t token = threadIdx.x;
  int32_t last = 0, rank = 0;
  if (token < tokens) {
    for (int32_t k = 0; k < top_k; ++k) {
      const int32_t expert = p.out_experts[static_cast<int64_t>(first + token) * top_k + k];
      if (expert >= 0) last = max(last, expert % local);
    }
    rank = atomicAdd(place + last, 1);
  }
  __syncthreads();
  for (int32_t e = threadIdx.x; e < local; e += kThreads)
    if (place[e] != 0) place[e] = atomicAdd(p.last_next + e, place[e]);
  __syncthreads();
  if (token < tokens) p.token_order[place[last] + rank] = first + token;
}

// Grid as route_kernel. Rank of a slot among its block's slots with the same expert = bits below its token's bit.
__global__ void __launch_bounds__(kThreads) assign_kernel(const __grid_constant__ ScheduleParams p) {
  extern __shared__ uint32_t masks[]; // [E][kMaskWords]
  const CallParams& call = p.call;
  const int32_t experts = call.experts, top_k = call.top_k, local = experts / call.world;
  for (int32_t i = threadIdx.x; i < experts * kMaskWords; i += kThreads) masks[i] = 0;
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
  __syncthreads();
  const int32_t first = blockIdx.x * kTokensPerBlock, tokens = min(kTokensPerBlock, call.tokens - first);
  for (int32_t i = threadIdx.x; i < tokens * top_k; i += kThreads) {
    const int32_t expert = p.out_experts[static_cast<int64_t>(first) * top_k + i], token = i / top_k;
    if (expert >= 0) atomicOr(masks + expert * kMaskWords + token / 32, 1u << token % 32);
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < tokens * top_k; i += kThreads) {
    const int64_t slot = static_cast<int64_t>(first) * top_k + i;
    const int32_t expert = p.out_experts[slot], token = i / top_k;
    int32_t rank = -1, row = -1;
    if (expert >= 0) {
      const uint32_t* mask = masks + expert * kMaskWords;
      int32_t earlier = __popc(mask[token / 32] & ((1u << token % 32) - 1));
      for (int32_t word = 0; word < token / 32; ++word) earlier += __popc(mask[word]);
      rank = expert / local;
      row = p.route_base[expert] + p.block_counts[static_cast<int64_t>(blockIdx.x) * experts + expert] + earlier;
      at<RowSource>(call.peers[rank], call.layout.row_source)[row] = {call.rank, static_cast<int32_t>(slot)};
    }
    p.out_slot_dst_rank[slot] = rank;
    p.out_slot_dst_row[slot] = row;
    if (call.world == 1) continue;
    at<int32_t>(call.local, call.layout.slot_dst_rank)[slot] = rank;
    at<int32_t>(call.local, call.layout.slot_dst_row)[slot] = row;
  }
  order_tokens(p, first, tokens);

  // The last block tells every rank that this rank's entries are in place.
  if (call.world == 1) return;
  __threadfence_system();
  __syncthreads();
  __shared__ bool last;
  uint32_t* done = p.counters + kAssignDone;
  if (threadIdx.x == 0) last = atomicAdd(done, 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence_system();
  for (int32_t peer = threadIdx.x; peer < call.world; peer += kThreads)
    store_release_system(at<uint32_t>(call.peers[peer], call.layout.tables_ready) + call.rank, *call.epoch);
}

// Tile table of this rank from its experts' first rows; one block of kThreads >= e threads.
__device__ void rebuild_tile_table(const ReopenParams& p, int32_t* warp_sums) {
  const int32_t expert = threadIdx.x, local = p.call.experts / p.call.world;
  const int32_t first = expert <= local ? p.expert_first_row[expert] / kBlockRows : 0;
  const int32_t next = expert < local ? p.expert_first_row[expert + 1] / kBlockRows : first;
  const int32_t odds = exclusive_scan((next - first) & 1, warp_sums);
  if (expert <= local) p.tile_table[expert] = pack_blocks(static_cast<uint32_t>(first - odds) / 2, odds);
}

__global__ void __launch_bounds__(kThreads) reopen_kernel(const __grid_constant__ ReopenParams p) {
  __shared__ int32_t warp_sums[kWarps];
  const CallParams& call = p.call;
  const uint32_t epoch = *call.epoch + 1;
  if (blockIdx.x == 0) {
    clear_counters(call, epoch, p.counters, kBackwardCounters);
    rebuild_tile_table(p, warp_sums);
  }
  if (call.world > 1) {
    // Peers may still pull what an earlier call published; they have come here when they are done with it.
    const bool replays = p.kept == 0 || p.expert_first_row[call.experts / call.world] > call.capacity;
    for (int32_t peer = threadIdx.x; peer < call.world && blockIdx.x == 0; peer += kThreads) {
      at<uint32_t>(call.peers[peer], call.layout.replays)[call.rank] = replays ? 1 : 0;
      store_release_system(at<uint32_t>(call.peers[peer], call.layout.opened) + call.rank, epoch);
    }
    bool x_wanted = false;
    for (int32_t peer = threadIdx.x; peer < call.world; peer += kThreads) {
      wait_epoch(call, at<const uint32_t>(call.local, call.layout.opened) + peer, epoch, Phase::kOpen, peer);
      x_wanted |= __ldcg(at<const uint32_t>(call.local, call.layout.replays) + peer) != 0;
    }
    x_wanted = __syncthreads_or(x_wanted);
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
    const int64_t vectors = static_cast<int64_t>(call.tokens) * call.hidden / 8;
    uint4* copy = at<uint4>(call.local, call.layout.x);
    for (int64_t v = thread; v < vectors; v += threads) copy[v] = static_cast<const uint4*>(p.dy)[v];
    uint4* replayed = at<uint4>(call.local, call.layout.replay_x);
    for (int64_t v = thread; v < vectors && x_wanted; v += threads) replayed[v] = static_cast<const uint4*>(p.x)[v];
    for (int64_t slot = thread; slot < static_cast<int64_t>(call.tokens) * call.top_k; slot += threads) {
      at<int32_t>(call.local, call.layout.slot_dst_rank)[slot] = p.slot_dst_rank[slot];
      at<int32_t>(call.local, call.layout.slot_dst_row)[slot] = p.slot_dst_row[slot];
      at<float>(call.local, call.layout.weights)[slot] = p.weights[slot];
    }
    __threadfence_system();
  }
  cudaTriggerProgrammaticLaunchCompletion(); // not earlier: nothing of this rank shall hold SMs that peers may need
  // The last block ends the opening.
  __syncthreads();
  __shared__ bool last;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(call.epoch + 2, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence_system();
  for (int32_t peer = threadIdx.x; peer < call.world && call.world > 1; peer += kThreads)
    store_release_system(at<uint32_t>(call.peers[peer], call.layout.tables_ready) + call.rank, epoch);
  if (threadIdx.x == 0) {
    call.epoch[0] = epoch;
    call.epoch[2] = 0;
  }
}

} // namespace
} // namespace mok

extern "C" const char* mok_build_schedule(const mok::ScheduleParams* params, void* stream_handle) {
  using namespace mok;
  const ScheduleParams& p = *params;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const int32_t blocks = (p.call.tokens + kTokensPerBlock - 1) / kTokensPerBlock;
  const unsigned grid = blocks > 0 ? static_cast<unsigned>(blocks) : 1;
  const size_t experts = static_cast<size_t>(p.call.experts), local = experts / static_cast<size_t>(p.call.world);
  route_kernel<<<grid, kThreads, (experts + local) * sizeof(int32_t), stream>>>(p);
  if (const char* error = check_launch("route kernel")) return error;
  if (const char* error = launch_after("layout kernel", layout_kernel, 1, kThreads, 0, stream, p, blocks)) return error;
  return launch_after("assign kernel", assign_kernel, grid, kThreads, experts * kMaskWords * sizeof(uint32_t), stream,
                      p);
}

extern "C" const char* mok_reopen(const mok::ReopenParams* params, void* stream_handle) {
  using namespace mok;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  // Blocks wait for peers, so all must be resident at once; 64 copy at memory speed.
  const int32_t blocks = params->sms < 64 ? params->sms : 64;
  const unsigned grid = params->call.world == 1 ? 1 : static_cast<unsigned>(blocks);
  reopen_kernel<<<grid, kThreads, 0, stream>>>(*params);
  return check_launch("reopen kernel");
}

extern "C" const char* mok_load_schedule() {
  using namespace mok;
  if (const char* error = load_kernels("route kernel", route_kernel)) return error;
  if (const char* error = load_kernels("layout kernel", layout_kernel)) return error;
  if (const char* error = load_kernels("reopen kernel", reopen_kernel)) return error;
  return load_kernels("assign kernel", assign_kernel);
}
