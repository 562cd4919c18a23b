// Communication warps: pull routed rows from the ranks that hold the tokens.
#pragma once

#include "../common/sync.cuh"

namespace mok {

// Rows per claim.
inline constexpr int kRowsPerClaim = 8;      // of communication warps: a claim costs about 4 us beside its rows
inline constexpr int kRowsPerFirstClaim = 2; // of consumer warps, at the start: nobody shall wait for a slow one
inline constexpr int kVectorsInFlight = 8;   // 16-byte loads per lane

// What is brought where. Peers' tokens lie in their symmetric x, this rank's own in own_tokens.
struct RowDispatch {
  const RowSource* sources;   // [C], or null: source_rank and source_slot [C]
  const int32_t* source_rank; // [C]
  const int32_t* source_slot; // [C]
  int32_t* out_source_rank;   // [C] copies of the tables, -1 behind the rows in use, or null
  int32_t* out_source_slot;   // [C]
  const uint4* own_tokens;    // bf16 [T, H]
  uint4* rows;                // bf16 [C, H]
  const float* own_weights;   // [T, K] router weights of this rank's tokens
  float* row_weights;         // [C] weight of each row's route, 0 for padding; null: not wanted
  uint32_t* rows_arrived;     // [B]
  uint32_t* tickets;
  int32_t rows_in_use;
};

__device__ __forceinline__ void wait_for_tables(const CallParams& call, uint32_t epoch) {
  if (call.world == 1) return; // they are older than this launch
  for (int32_t peer = threadIdx.x % 32; peer < call.world; peer += 32)
    wait_epoch(call, at<const uint32_t>(call.local, call.layout.tables_ready) + peer, epoch, Phase::kTables, peer);
  __syncwarp();
}

// Writes one source row to every row in `rows` (a lane's destination, valid where its bit of `targets` is set), or
// zeros when `source` is null.
__device__ __forceinline__ void copy_row(uint4* matrix, int32_t vectors, const uint4* source, uint32_t targets,
                                         int32_t rows) {
  const int32_t lane = threadIdx.x % 32;
  for (int32_t first = 0; first < vectors; first += 32 * kVectorsInFlight) {
    uint4 v[kVectorsInFlight];
#pragma unroll
    for (int32_t i = 0; i < kVectorsInFlight; ++i) {
      const int32_t index = first + 32 * i + lane;
      v[i] = source != nullptr && index < vectors ? load_stream(source + index) : uint4{0, 0, 0, 0};
    }
    for (uint32_t left = targets; left != 0; left &= left - 1) {
      uint4* target = matrix + static_cast<int64_t>(__shfl_sync(~0u, rows, __ffs(left) - 1)) * vectors;
#pragma unroll
      for (int32_t i = 0; i < kVectorsInFlight; ++i) {
        const int32_t index = first + 32 * i + lane;
        if (index < vectors) target[index] = v[i];
      }
    }
  }
}

// The rows that a warp has brought since it last said so; a lane holds up to one target per row of a claim.
template <int kRows> struct Arrivals {
  int32_t target[kRows];
  __device__ __forceinline__ void publish(uint32_t* rows_arrived) {
    ptx::fence_proxy_async(); // the rows are read by the copy engine
    __syncwarp();
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i)
      if (target[i] >= 0) add_release_gpu(rows_arrived + target[i] / kBlockRows, 1);
  }
};

// One row of this rank; returns the row that this lane's share of the copies went to, or -1. A peer's token is brought
// to all its rows here by the first of them, so that it crosses NVLink once. A token of this rank costs nothing to read
// again: each row is copied by itself, and the first expert's rows are complete before any of the last one's.
__device__ __forceinline__ int32_t dispatch_row(const CallParams& call, const RowDispatch& d, int32_t row,
                                                RowSource source) {
  const int32_t lane = threadIdx.x % 32, vectors = call.hidden / 8;
  const int64_t token = source.slot / call.top_k;
  const uint4* from = nullptr; // padding: zeros
  const float* weights = d.own_weights;
  int64_t slot = source.slot;
  bool mine = lane == 0;
  int32_t target = row;
  if (source.rank == call.rank) {
    from = d.own_tokens + token * vectors;
  } else if (source.rank >= 0) {
    uint8_t* peer = call.peers[source.rank];
    weights = at<const float>(peer, call.layout.weights);
    mine = false;
    if (lane < call.top_k) {
      slot = token * call.top_k + lane;
      mine = __ldcg(at<const int32_t>(peer, call.layout.slot_dst_rank) + slot) == call.rank;
      target = __ldcg(at<const int32_t>(peer, call.layout.slot_dst_row) + slot);
    }
    from = at<const uint4>(peer, call.layout.x) + token * vectors;
  }
  const uint32_t targets = __ballot_sync(~0u, mine);
  if (__shfl_sync(~0u, target, __ffs(targets) - 1) != row) return -1; // an earlier row brings it
  if (mine && d.row_weights != nullptr) d.row_weights[target] = source.rank >= 0 ? __ldcg(weights + slot) : 0.0f;
  copy_row(d.rows, vectors, from, targets, target);
  return mine ? target : -1;
}

// Rows in order, a few per claim, so that any number of warps makes progress and early experts come first. Returns when
// no rows are left, or after `claims`.
template <int kRows>
__device__ __forceinline__ void dispatch_rows(const CallParams& call, const RowDispatch& d, int32_t claims) {
  const int32_t lane = threadIdx.x % 32;
  for (; claims > 0; --claims) {
    int32_t first = 0;
    if (lane == 0) first = static_cast<int32_t>(atomicAdd(d.tickets + kRowTicket, kRows));
    first = __shfl_sync(~0u, first, 0);
    if (first >= call.capacity) return;
    RowSource source = {-1, -1};
    const int32_t row = first + lane;
    if (lane < kRows && row < call.capacity) {
      if (row < d.rows_in_use && d.sources != nullptr) {
        const int2 loaded = __ldcg(reinterpret_cast<const int2*>(d.sources + row));
        source = {loaded.x, loaded.y};
      } else if (row < d.rows_in_use) {
        source = {d.source_rank[row], d.source_slot[row]};
      }
      if (d.out_source_rank != nullptr) {
        d.out_source_rank[row] = source.rank;
        d.out_source_slot[row] = source.slot;
      }
    }
    if (first >= d.rows_in_use) continue;
    Arrivals<kRows> arrivals;
#pragma unroll
    for (int32_t i = 0; i < kRows; ++i) {
      const RowSource from = {__shfl_sync(~0u, source.rank, i), __shfl_sync(~0u, source.slot, i)};
      arrivals.target[i] = first + i < d.rows_in_use ? dispatch_row(call, d, first + i, from) : -1;
    }
    arrivals.publish(d.rows_arrived);
  }
}

} // namespace mok
