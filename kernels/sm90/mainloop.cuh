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
inline constexpr int kReports = 2;       // of a written tile, in turn
inline constexpr int kChunkColumns = 64; // columns of output staged at a time, per warpgroup
inline constexpr int kChunkBuffers = 2;
inline constexpr uint32_t kStageBytes = (kTileRows + kTileColumns) * kTileK * sizeof(__nv_bfloat16);

// What a CTA of the cluster is to do with a ticket; one 16-byte word, so that it arrives as a whole.
struct alignas(16) TileSlot {
  int32_t kind; // TilePhase, 256 for a wide tile, 512 times the piece
  int32_t expert;
  int32_t row_block;
  int32_t column; // may lie past the last one: loads feed the other CTA, nothing is stored

  __device__ __forceinline__ TilePhase phase() const { return static_cast<TilePhase>(kind & 255); }
  __device__ __forceinline__ bool wide() const { return (kind & 256) != 0; }
  __device__ __forceinline__ int32_t piece() const { return kind >> 9; }
};

struct SharedStorage {
  alignas(1024) __nv_bfloat16 a[kStages][kTileRows * kTileK];
  alignas(1024) __nv_bfloat16 b[kStages][kTileColumns * kTileK];
  alignas(1024) __nv_bfloat16 staging[kConsumers][kChunkBuffers][kBoxRows * kChunkColumns];
  uint64_t full[kStages];      // TMA bytes of a stage are here
  uint64_t empty[kStages];     // both CTAs' consumers are done with it
  uint64_t tile_full[kSlots];  // slots[] is set
  uint64_t tile_empty[kSlots]; // (CTA 0) every reader of both CTAs has read it
  // A consumer's part of a counted tile is in global memory. Two barriers in turn: a consumer may report the next tile
  // before the counting warp has looked at this one, and a parity tells one phase from the next but not from the one
  // after.
  uint64_t tile_written[kReports][kConsumers];
  TileSlot slots[kSlots];
  uint32_t table[kMaxLocalExperts + 1]; // tile_order.h
};
inline constexpr int kSharedLimit = 227 * 1024;
static_assert(sizeof(SharedStorage) <= kSharedLimit, "one CTA per SM: all shared memory, no more");

inline constexpr int kCountReaders = 1, kProducerReaders = 1, kConsumerReaders = kConsumers * 4; // lanes, per warp
// CTA 0's producer writes the slots and does not count as a reader.
inline constexpr int kSlotReaders = 2 * (kConsumerReaders + kCountReaders) + kProducerReaders;

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
  for (auto& of_turn : s.tile_written)
    for (uint64_t& barrier : of_turn) ptx::mbarrier_init(&barrier, 1);
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
    if (elected && tile.kind >= 0) arrive_cluster(tile_empty + cursor.slot);
    cursor.advance();
  }
};

// Each CTA's producer arms its own barrier for the next tile, when the slot's last tile is known to have landed.
__device__ __forceinline__ void expect_tile(SharedStorage& s, RingCursor<kSlots> cursor) {
  const uint32_t bytes = sizeof(TileSlot); // taken by reference
  ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &s.tile_full[cursor.slot], bytes);
}

// What a CTA of the cluster gets to do of a tile.
__device__ __forceinline__ TileSlot slot_of(const ClusterTile& tile, int32_t cta) {
  return {static_cast<int32_t>(tile.phase) + (tile.wide ? 256 : 0) + 512 * tile.piece, tile.expert,
          row_block_of_cta(tile, cta), column_of_cta(tile, cta)};
}

// CTA 0's producer hands a ticket's tile to the readers of both CTAs.
__device__ __forceinline__ void publish_tile(SharedStorage& s, const ClusterTile& tile, RingCursor<kSlots> cursor) {
  const auto cluster = cooperative_groups::this_cluster();
  wait_barrier(&s.tile_empty[cursor.slot], cursor.parity ^ 1);
  expect_tile(s, cursor);
  for (int32_t cta = 0; cta < 2; ++cta) {
    const TileSlot slot = slot_of(tile, cta);
    const int32_t word[4] = {slot.kind, slot.expert, slot.row_block, slot.column};
    ptx::st_async(reinterpret_cast<int32_t*>(cluster.map_shared_rank(&s.slots[cursor.slot], cta)), word,
                  cluster.map_shared_rank(&s.tile_full[cursor.slot], cta));
  }
}

// How an operand lies in memory, as boxes of its tensor map.
enum class Lay : int32_t {
  kRows,    // [line, k]: boxes of 64 k by kBoxRows (A) or kWeightRows (B) lines
  kGateUp,  // [gate or up, line, k]: FC1's weights; half 0 of B is gate, half 1 up
  kColumns, // [k, line]: boxes of 64 lines by 64 k
};

struct Operand {
  const CUtensorMap* map;
  int32_t line; // first line of the tile
  int32_t k;    // first k
  Lay lay;
  int32_t ring = INT32_MAX; // k begins again at 0 from here on

  __device__ __forceinline__ int32_t depth(int32_t step) const {
    const int32_t at = k + step;
    return at < ring ? at : at - ring;
  }
};

// What a tile's epilogue works on. It comes through the stages behind those of the product: in each, in the place of B,
// 64 columns of the tile's 128 lines, as one box of gate and one of up, 64 by 64, for each warpgroup.
struct EpilogueInput {
  const CUtensorMap* map = nullptr; // of gate and up, bf16 [line, gate or up, column]; null: no input
  int32_t line = 0;
  int32_t column = 0;
};
inline constexpr int kInputStages = kTileColumns / kChunkColumns;
inline constexpr int kBoxElements = kBoxRows * kTileK;

struct TileSource {
  Operand a; // 128 lines
  Operand b; // 256 lines
  int32_t depth;
  EpilogueInput input{};
};

template <int kRank>
__device__ __forceinline__ void load_box(void* to, const CUtensorMap* map, const int32_t (&at)[kRank], uint64_t* bar,
                                         bool to_both) {
  constexpr uint16_t kBoth = 3;
  if (to_both)
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, map, at, bar, kBoth);
  else
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, to, map, at, bar);
}

// 64 lines of A.
__device__ __forceinline__ void load_a(SharedStorage& s, int32_t stage, const Operand& a, int32_t k, int32_t half,
                                       bool to_both) {
  const int32_t line = a.line + half * kBoxRows, depth = a.depth(k);
  const int32_t at[2] = {a.lay == Lay::kColumns ? line : depth, a.lay == Lay::kColumns ? depth : line};
  load_box(s.a[stage] + half * kBoxElements, a.map, at, &s.full[stage], to_both);
}

// 128 lines of B.
__device__ __forceinline__ void load_b(SharedStorage& s, int32_t stage, const Operand& b, int32_t k, int32_t half,
                                       bool to_both) {
  __nv_bfloat16* to = s.b[stage] + half * kWeightRows * kTileK;
  uint64_t* bar = &s.full[stage];
  if (b.lay == Lay::kGateUp) {
    const int32_t at[3] = {b.k + k, b.line, half};
    load_box(to, b.map, at, bar, to_both);
  } else if (b.lay == Lay::kRows) {
    const int32_t at[2] = {b.k + k, b.line + half * kWeightRows};
    load_box(to, b.map, at, bar, to_both);
  } else {
    for (int32_t block = 0; block < kWeightRows / kBoxRows; ++block) {
      const int32_t at[2] = {b.line + half * kWeightRows + block * kBoxRows, b.depth(k)};
      load_box(to + block * kBoxRows * kTileK, b.map, at, bar, to_both);
    }
  }
}

__device__ __forceinline__ void load_epilogue_input(SharedStorage& s, const EpilogueInput& input,
                                                    RingCursor<kStages>& stage) {
  for (int32_t chunk = 0; chunk < kInputStages; ++chunk) {
    wait_barrier(&s.empty[stage.slot], stage.parity ^ 1);
    const uint32_t bytes = sizeof(s.b[0]); // taken by reference
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &s.full[stage.slot], bytes);
    for (int32_t box = 0; box < 2 * kConsumers; ++box) {
      const int32_t at[3] = {input.column + kChunkColumns * chunk, box % 2, input.line + box / 2 * kBoxRows};
      load_box(s.b[stage.slot] + box * kBoxElements, input.map, at, &s.full[stage.slot], false);
    }
    stage.advance();
  }
}

// Loads all of a tile's stages; one thread per CTA.
__device__ __forceinline__ void load_tile(SharedStorage& s, const TileSource& from, bool wide, int32_t cta,
                                          RingCursor<kStages>& stage) {
  for (int32_t k = 0; k < from.depth; k += kTileK) {
    wait_barrier(&s.empty[stage.slot], stage.parity ^ 1);
    const uint32_t bytes = kStageBytes; // taken by reference
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &s.full[stage.slot], bytes);
    if (wide) {
      load_a(s, stage.slot, from.a, k, cta, true);
      load_b(s, stage.slot, from.b, k, 0, false);
      load_b(s, stage.slot, from.b, k, 1, false);
    } else {
      load_a(s, stage.slot, from.a, k, 0, false);
      load_a(s, stage.slot, from.a, k, 1, false);
      load_b(s, stage.slot, from.b, k, cta, true);
    }
    stage.advance();
  }
  if (from.input.map != nullptr) load_epilogue_input(s, from.input, stage);
}

// Which operands are not K-major (Lay::kColumns).
template <bool kTransposedA_, bool kTransposedB_> struct Majors {
  static constexpr bool kTransposedA = kTransposedA_, kTransposedB = kTransposedB_;
};

// Named barriers; 0 is __syncthreads.
enum BarrierId : int32_t { kGroupBarrier = 1 }; // + warpgroup

// A consumer warpgroup's way through the stages.
struct StageReader {
  SharedStorage& s;
  int32_t group;
  uint64_t* peer_empty;
  RingCursor<kStages> cursor{};

  __device__ __forceinline__ bool ready() const { return barrier_passed(&s.full[cursor.slot], cursor.parity); }
  __device__ __forceinline__ void wait() const { wait_barrier(&s.full[cursor.slot], cursor.parity); }
  // The loads of either CTA may write into the other one's stage.
  __device__ __forceinline__ void release(int32_t slot) const {
    const int32_t thread = threadIdx.x % 128;
    if (thread == 0) arrive_local(&s.empty[slot]);
    if (thread == 32) arrive_cluster(peer_empty + slot);
  }
  // All threads have waited for every stage before one is given back: used again, a stage may come to an end of a phase
  // that looks to a late warp as if the one that it waits for had not come.
  __device__ __forceinline__ void skip_epilogue_input() {
    static_assert(kInputStages == kStages);
    for (int32_t chunk = 0; chunk < kInputStages; ++chunk) {
      wait();
      cursor.advance();
    }
    sync_threads<128>(kGroupBarrier + group);
    for (int32_t slot = 0; slot < kStages; ++slot) release(slot);
  }
};

// acc (+)= A[64, 64] B[256, 64]^T of one stage; asynchronous.
template <class M, bool kFirst>
__device__ __forceinline__ void multiply_stage(const StageReader& stages, Accumulators& acc) {
  constexpr int kBlockBytes = kBoxElements * sizeof(__nv_bfloat16);
  // 16 k in units of 16 bytes: part of a row where K-major, else 16 rows.
  constexpr int kStepA = M::kTransposedA ? 128 : 2, kStepB = M::kTransposedB ? 128 : 2;
  stages.wait();
  const int32_t slot = stages.cursor.slot;
  const uint64_t a = wgmma_descriptor<kBlockBytes>(stages.s.a[slot] + stages.group * kBoxElements);
  const uint64_t b = wgmma_descriptor<kBlockBytes>(stages.s.b[slot]);
  wgmma_fence();
  wgmma_m64n256k16<!kFirst, M::kTransposedA, M::kTransposedB>(acc, a, b);
#pragma unroll
  for (int32_t step = 1; step < kTileK / 16; ++step)
    wgmma_m64n256k16<true, M::kTransposedA, M::kTransposedB>(acc, a + kStepA * step, b + kStepB * step);
  wgmma_commit();
}

// acc (with kContinue: +)= A[64, depth] B[256, depth]^T of this warpgroup's half of the tile; depth > 0. The first
// stage is peeled: only with a constant "replace" does the compiler see that the accumulators of the last tile are
// dead. `meanwhile` is called at least once: a few stages in, at the end, or before the tile's first data has come, for
// which it may be needed.
template <class M, bool kContinue, class Meanwhile>
__device__ __forceinline__ void multiply_tile(StageReader& stages, int32_t depth, Accumulators& acc,
                                              Meanwhile meanwhile) {
  constexpr int32_t kMeanwhileAt = 4 * kTileK;
  if (!stages.ready()) meanwhile();
  multiply_stage<M, !kContinue>(stages, acc);
  int32_t previous = stages.cursor.slot;
  stages.cursor.advance();
  for (int32_t k = kTileK; k < depth; k += kTileK) {
    multiply_stage<M, false>(stages, acc);
    wgmma_wait<1>();
    stages.release(previous);
    previous = stages.cursor.slot;
    stages.cursor.advance();
    if (k == kMeanwhileAt) meanwhile();
  }
  if (depth <= kMeanwhileAt) meanwhile();
  wgmma_wait<0>();
  stages.release(previous);
}

} // namespace mok::sm90
