// Communication warps: pull routed rows from the ranks that hold the tokens.
#pragma once

#include "../common/sync.cuh"

namespace mok {

// Rows per claim.
inline constexpr int kRowsPerClaim = 8;      // of communication warps: a claim costs about 4 us beside its rows
inline constexpr int kRowsPerFirstClaim = 2; // of consumer warps, at the start: nobody shall wait for a slow one
inline constexpr int kVectorsInFlight = 8;   // 16-byte loads per lane

// Source of each row: where the ranks wrote it, or the copy that forward made of that.
struct SourceTable {
  const RowSource* sources; // [R], or null: rank and slot
  const int32_t* rank;      // [R]
  const int32_t* slot;      // [R]

  __device__ __forceinline__ RowSource operator[](int32_t row) const {
    if (sources == nullptr) return {rank[row], slot[row]};
    const int2 source = __ldcg(reinterpret_cast<const int2*>(sources + row));
    return {source.x, source.y};
  }
};

// A matrix of tokens, bf16 [T, H] on every rank.
struct TokenMatrix {
  const uint4* own;
  int64_t published; // offset of the peers' in their symmetric memory

  __device__ __forceinline__ const uint4* row(const CallParams& call, RowSource source, int32_t vectors) const {
    const uint4* matrix = source.rank == call.rank ? own : at<const uint4>(call.peers[source.rank], published);
    return matrix + static_cast<int64_t>(source.slot / call.top_k) * vectors;
  }
};

// What is brought where.
struct RowDispatch {
  SourceTable sources;
  int32_t* out_source_rank = nullptr; // [R] copies of the table, where wanted
  int32_t* out_source_slot = nullptr; // [R]
  TokenMatrix tokens;
  uint4* rows;                        // bf16 [ring, H] of the first pass through the ring
  uint4* later_rows;                  // bf16 [ring, H] of the others
  TokenMatrix replayed{};             // brought beside the tokens, for row blocks that the program replays
  uint4* replayed_rows = nullptr;     // bf16 [ring, H]
  const float* own_weights = nullptr; // [T, K] router weights of this rank's tokens
  float* row_weights = nullptr;       // [ring] weight of each row's route, 0 for padding, where wanted
  uint32_t* rows_arrived;             // [B]
  uint32_t* tickets;
  int32_t rows_in_use;
  int32_t ring = INT32_MAX; // rows; the default: all fit
  // Row blocks, counted from the first one, inside of which a token is brought to all its rows at once.
  int32_t window = INT32_MAX;

  __device__ __forceinline__ int64_t place(int32_t row) const { return row < ring ? row : row % ring; }
};

__device__ __forceinline__ void wait_for_tables(const CallParams& call, uint32_t epoch) {
  if (call.world == 1) return; // they are older than this launch
  for (int32_t peer = threadIdx.x % 32; peer < call.world; peer += 32)
    wait_epoch(call, at<const uint32_t>(call.local, call.layout.tables_ready) + peer, epoch, Phase::kTables, peer);
  __syncwarp();
}

// Writes one source row to every lane's `target` whose bit of `targets` is set; zeros when `source` is null.
__device__ __forceinline__ void copy_row(int32_t vectors, const uint4* source, uint32_t targets, uint4* target) {
  const int32_t lane = threadIdx.x % 32;
  for (int32_t first = 0; first < vectors; first += 32 * kVectorsInFlight) {
    uint4 v[kVectorsInFlight];
#pragma unroll
    for (int32_t i = 0; i < kVectorsInFlight; ++i) {
      const int32_t index = first + 32 * i + lane;
      v[i] = source != nullptr && index < vectors ? load_stream(source + index) : uint4{0, 0, 0, 0};
    }
    for (uint32_t left = targets; left != 0; left &= left - 1) {
      auto* to =
          reinterpret_cast<uint4*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(target), __ffs(left) - 1));
#pragma unroll
      for (int32_t i = 0; i < kVectorsInFlight; ++i) {
        const int32_t index = first + 32 * i + lane;
        if (index < vectors) to[index] = v[i];
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
#pragma unroll 1 // short code: the warps that multiply share the instruction cache
    for (int32_t i = 0; i < kRows; ++i)
      if (target[i] >= 0) add_release_gpu(rows_arrived + target[i] / kBlockRows, 1);
  }
};

// The row block that a lane has last asked the program about.
struct Room {
  int32_t block = -1;
  bool replayed = false;
};

// One row of this rank; returns the row that this lane's share of the copies went to, or -1. A peer's token is brought
// to all its rows in the window by the first of them, so that it crosses NVLink once. A token of this rank costs
// nothing to read again: each row is copied by itself, and the first expert's rows are complete before any of the last
// one's.
template <class Program>
__device__ __forceinline__ int32_t dispatch_row(const Program& program, const RowDispatch& d, int32_t row,
                                                RowSource source, Room& room) {
  const CallParams& call = program.p.call;
  const int32_t lane = threadIdx.x % 32, vectors = call.hidden / 8;
  const bool padding = source.rank < 0; // zeros
  const float* weights = d.own_weights;
  int64_t slot = source.slot;
  bool mine = lane == 0;
  int32_t target = row;
  if (!padding && source.rank != call.rank) {
    uint8_t* peer = call.peers[source.rank];
    weights = at<const float>(peer, call.layout.weights);
    mine = false;
    if (lane < call.top_k) {
      slot = source.slot / call.top_k * call.top_k + lane;
      target = __ldcg(at<const int32_t>(peer, call.layout.slot_dst_row) + slot);
      mine = __ldcg(at<const int32_t>(peer, call.layout.slot_dst_rank) + slot) == call.rank &&
             target / kBlockRows / d.window == row / kBlockRows / d.window;
    }
  }
  const uint32_t targets = __ballot_sync(~0u, mine);
  if (__shfl_sync(~0u, target, __ffs(targets) - 1) != row) return -1; // an earlier row brings it
  if (mine && target / kBlockRows != room.block) {
    program.wait_for_room(target / kBlockRows);
    room = {target / kBlockRows, program.replays(target / kBlockRows)};
  }
  __syncwarp();
  const int64_t place = d.place(target);
  if (mine && d.row_weights != nullptr) d.row_weights[place] = padding ? 0.0f : __ldcg(weights + slot);
  copy_row(vectors, padding ? nullptr : d.tokens.row(call, source, vectors), targets,
           (target < d.ring ? d.rows : d.later_rows) + place * vectors);
  const uint32_t replayed = __ballot_sync(~0u, mine && room.replayed);
  if (replayed != 0)
    copy_row(vectors, padding ? nullptr : d.replayed.row(call, source, vectors), replayed,
             d.replayed_rows + place * vectors);
  return mine ? target : -1;
}

// Rows in order, a few per claim, so that any number of warps makes progress and early experts come first. Returns when
// no rows are left, or after `claims`.
template <int kRows, class Program>
__device__ __forceinline__ void dispatch_rows(const Program& program, const RowDispatch& d, int32_t claims) {
  const int32_t lane = threadIdx.x % 32;
  Room room;
  for (; claims > 0; --claims) {
    int32_t first = 0;
    if (lane == 0) first = static_cast<int32_t>(atomicAdd(d.tickets + kRowTicket, kRows));
    first = __shfl_sync(~0u, first, 0);
    if (first >= d.rows_in_use) return;
    RowSource source = {-1, -1};
    const int32_t row = first + lane;
    if (lane < kRows && row < d.rows_in_use) {
      source = d.sources[row];
      if (d.out_source_rank != nullptr) {
        d.out_source_rank[row] = source.rank;
        d.out_source_slot[row] = source.slot;
      }
    }
    Arrivals<kRows> arrivals;
#pragma unroll 1
    for (int32_t i = 0; i < kRows; ++i) {
      const RowSource from = {__shfl_sync(~0u, source.rank, i), __shfl_sync(~0u, source.slot, i)};
      arrivals.target[i] = first + i < d.rows_in_use ? dispatch_row(program, d, first + i, from, room) : -1;
    }
    arrivals.publish(d.rows_arrived);
  }
}

} // namespace mok
