// Hopper main loop: a TMA producer thread feeds two consumer warpgroups (64 x 256 each) through a ring of stages.
// The two CTAs of a cluster share one operand by multicast: weights in tall tiles, rows in wide ones.
#pragma once

#include "../common/sync.cuh"
#include "../moe/tile_order.h"

#include <cooperative_groups.h>
#include <cuda.h>

namespace mok::sm90 {

inline constexpr int kStages = 4;
inline constexpr int kTileK = 64; // one 128-byte swizzled row of bf16
inline constexpr int kTileRows = kBlockRows;
inline constexpr int kTileColumns = 256;
inline constexpr int kBoxRows = 64;      // rows of activations per TMA box
inline constexpr int kWeightRows = 128;  // rows of weights per TMA box
inline constexpr int kConsumers = 2;     // warpgroups
inline constexpr int kSlots = 2;         // tiles known ahead
inline constexpr int kChunkColumns = 64; // columns of output staged at a time, per warpgroup
inline constexpr int kChunkBuffers = 2;
inline constexpr uint32_t kStageBytes = (kTileRows + kTileColumns) * kTileK * sizeof(__nv_bfloat16);

// What a CTA of the cluster is to do with a ticket; one 16-byte word, so that it arrives as a whole.
struct alignas(16) TileSlot {
  int32_t phase_wide; // TilePhase, and 256 for a wide tile
  int32_t expert;
  int32_t row_block;
  int32_t column; // may lie past the last one: loads feed the other CTA, nothing is stored

  __device__ __forceinline__ TilePhase phase() const { return static_cast<TilePhase>(phase_wide & 255); }
  __device__ __forceinline__ bool wide() const { return phase_wide >= 256; }
};

struct SharedStorage {
  alignas(1024) __nv_bfloat16 a[kStages][kTileRows * kTileK];
  alignas(1024) __nv_bfloat16 b[kStages][kTileColumns * kTileK];
  alignas(1024) __nv_bfloat16 staging[kConsumers][kChunkBuffers][kBoxRows * kChunkColumns];
  uint64_t full[kStages];            // TMA bytes of a stage are here
  uint64_t empty[kStages];           // both CTAs' consumers are done with it
  uint64_t tile_full[kSlots];        // slots[] is set
  uint64_t tile_empty[kSlots];       // (CTA 0) every reader of both CTAs has read it
  uint64_t tile_written[kConsumers]; // a consumer's part of a tile is in global memory
  TileSlot slots[kSlots];
  uint32_t table[kMaxLocalExperts + 1]; // tile_order.h
};
inline constexpr int kSharedLimit = 227 * 1024;
static_assert(sizeof(SharedStorage) <= kSharedLimit, "one CTA per SM: all shared memory, no more");

inline constexpr int kSignalReaders = 1, kProducerReaders = 1, kConsumerReaders = kConsumers * 4; // lanes, per warp
// CTA 0's producer writes the slots and does not count as a reader.
inline constexpr int kSlotReaders = 2 * (kConsumerReaders + kSignalReaders) + kProducerReaders;

using Accumulators = float[128];

__device__ __forceinline__ void init_barriers(SharedStorage& s) {
  for (int i = 0; i < kStages; ++i) {
    ptx::mbarrier_init(&s.full[i], 1);
    ptx::mbarrier_init(&s.empty[i], 2 * kConsumers); // one thread per warpgroup of each CTA
  }
  for (int i = 0; i < kSlots; ++i) {
    ptx::mbarrier_init(&s.tile_full[i], 1);
    ptx::mbarrier_init(&s.tile_empty[i], kSlotReaders);
  }
  for (int i = 0; i < kConsumers; ++i) ptx::mbarrier_init(&s.tile_written[i], 1);
  ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
}

// Walks the ring of slots; `release` tells CTA 0 that this reader has what it needs.
struct SlotReader {
  SharedStorage& s;
  uint64_t* tile_empty; // of CTA 0
  RingCursor<kSlots> cursor{};

  __device__ explicit SlotReader(SharedStorage& storage)
      : s(storage), tile_empty(cooperative_groups::this_cluster().map_shared_rank(storage.tile_empty, 0)) {}

  __device__ __forceinline__ bool ready() const { return barrier_passed(&s.tile_full[cursor.slot], cursor.parity); }
  __device__ __forceinline__ TileSlot read() {
    wait_barrier(&s.tile_full[cursor.slot], cursor.parity);
    const int4 word = *reinterpret_cast<const int4*>(&s.slots[cursor.slot]);
    return {word.x, word.y, word.z, word.w};
  }
  // Depends on the tile that was read, so the slot is not given back before the read has returned.
  __device__ __forceinline__ void release(const TileSlot& tile, bool elected) {
    if (elected && tile.phase_wide >= 0) arrive_cluster(tile_empty + cursor.slot);
    cursor.advance();
  }
};

// Each CTA's producer arms its own barrier for the next tile.
__device__ __forceinline__ void expect_tile(SharedStorage& s, RingCursor<kSlots> cursor) {
  const uint32_t bytes = sizeof(TileSlot); // taken by reference
  ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &s.tile_full[cursor.slot], bytes);
}

// CTA 0's producer hands a ticket's tile to the readers of both CTAs.
__device__ __forceinline__ void publish_tile(SharedStorage& s, const ClusterTile& tile, RingCursor<kSlots> cursor) {
  const auto cluster = cooperative_groups::this_cluster();
  wait_barrier(&s.tile_empty[cursor.slot], cursor.parity ^ 1);
  for (int32_t cta = 0; cta < 2; ++cta) {
    const int32_t word[4] = {static_cast<int32_t>(tile.phase) + (tile.wide ? 256 : 0), tile.expert,
                             row_block_of_cta(tile, cta), column_of_cta(tile, cta)};
    ptx::st_async(reinterpret_cast<int32_t*>(cluster.map_shared_rank(&s.slots[cursor.slot], cta)), word,
                  cluster.map_shared_rank(&s.tile_full[cursor.slot], cta));
  }
}

// Where the operands of a tile lie. Weight boxes of FC1 are (column tile, gate or up), of FC2 rows of two halves.
struct TileSource {
  const CUtensorMap* rows; // [C, depth], boxes of kBoxRows
  const CUtensorMap* weights;
  int32_t first_row;
  int32_t column;
  int32_t depth; // H for FC1, I for FC2
  bool fc1;
};

__device__ __forceinline__ void load_weights(SharedStorage& s, int32_t stage, const TileSource& from, int32_t k,
                                             int32_t half, bool multicast) {
  void* to = s.b[stage] + half * kWeightRows * kTileK;
  uint64_t* bar = &s.full[stage];
  constexpr uint16_t kBoth = 3;
  if (from.fc1) {
    const int32_t at[3] = {k, from.column * kFc1Columns, half};
    if (multicast)
      ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, from.weights, at, bar, kBoth);
    else
      ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, from.weights, at, bar);
  } else {
    const int32_t at[2] = {k, from.column * kFc2Columns + half * kWeightRows};
    if (multicast)
      ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, from.weights, at, bar, kBoth);
    else
      ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, from.weights, at, bar);
  }
}

__device__ __forceinline__ void load_rows(SharedStorage& s, int32_t stage, const TileSource& from, int32_t k,
                                          int32_t half, bool multicast) {
  void* to = s.a[stage] + half * kBoxRows * kTileK;
  const int32_t at[2] = {k, from.first_row + half * kBoxRows};
  constexpr uint16_t kBoth = 3;
  if (multicast)
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, from.rows, at, &s.full[stage], kBoth);
  else
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, from.rows, at, &s.full[stage]);
}

// Loads all of a tile's stages; one thread per CTA.
__device__ __forceinline__ void load_tile(SharedStorage& s, const TileSource& from, bool wide, int32_t cta,
                                          RingCursor<kStages>& stage) {
  for (int32_t k = 0; k < from.depth; k += kTileK) {
    wait_barrier(&s.empty[stage.slot], stage.parity ^ 1);
    const uint32_t bytes = kStageBytes; // taken by reference
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &s.full[stage.slot], bytes);
    if (wide) {
      load_rows(s, stage.slot, from, k, cta, true);
      load_weights(s, stage.slot, from, k, 0, false);
      load_weights(s, stage.slot, from, k, 1, false);
    } else {
      load_rows(s, stage.slot, from, k, 0, false);
      load_rows(s, stage.slot, from, k, 1, false);
      load_weights(s, stage.slot, from, k, cta, true);
    }
    stage.advance();
  }
}

// acc (+)= rows[64, 64] weights[256, 64]^T of one stage; asynchronous.
template <bool kFirst>
__device__ __forceinline__ void multiply_stage(SharedStorage& s, int32_t group, RingCursor<kStages> stage,
                                               Accumulators& acc) {
  wait_barrier(&s.full[stage.slot], stage.parity);
  const uint64_t a = wgmma_descriptor(s.a[stage.slot] + group * kBoxRows * kTileK);
  const uint64_t b = wgmma_descriptor(s.b[stage.slot]);
  wgmma_fence();
  wgmma_m64n256k16<!kFirst>(acc, a, b);
#pragma unroll
  for (int32_t step = 1; step < kTileK / 16; ++step) // 16 columns are 32 bytes: 2 units of the descriptor
    wgmma_m64n256k16<true>(acc, a + 2 * step, b + 2 * step);
  wgmma_commit();
}

// acc = rows[64, depth] weights[256, depth]^T of this warpgroup's half of the tile. The first stage is peeled: only
// with a constant "replace" does the compiler see that the accumulators of the last tile are dead. `meanwhile` is
// called at least once: a few stages in, at the end, or before the tile's first data has come, for which it may be needed.
template <class Meanwhile>
__device__ __forceinline__ void multiply_tile(SharedStorage& s, int32_t group, int32_t depth, uint64_t* peer_empty,
                                              RingCursor<kStages>& stage, Accumulators& acc, Meanwhile meanwhile) {
  constexpr int32_t kMeanwhileAt = 4 * kTileK;
  const int32_t thread = threadIdx.x % 128;
  const auto release = [&](int32_t slot) {
    if (thread == 0) arrive_local(&s.empty[slot]);
    if (thread == 32) arrive_cluster(peer_empty + slot);
  };
  if (!barrier_passed(&s.full[stage.slot], stage.parity)) meanwhile();
  multiply_stage<true>(s, group, stage, acc);
  int32_t previous = stage.slot;
  stage.advance();
  for (int32_t k = kTileK; k < depth; k += kTileK) {
    multiply_stage<false>(s, group, stage, acc);
    wgmma_wait<1>();
    release(previous);
    previous = stage.slot;
    stage.advance();
    if (k == kMeanwhileAt) meanwhile();
  }
  if (depth <= kMeanwhileAt) meanwhile();
  wgmma_wait<0>();
  release(previous);
}

} // namespace mok::sm90
