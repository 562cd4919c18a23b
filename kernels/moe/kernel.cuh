// The persistent kernel that both directions share: roles of the warps, tickets, tiles. A Program says what the tiles
// are, what they wait for, how they are computed and written, and what the communication warps do.
//
// Warps of a CTA: 0 loads tiles (and, in CTA 0 of the cluster, takes tickets), 1 counts finished tiles, 2 and 3 move
// rows, 4 to 11 multiply. The latter also bring the first rows, when there is nothing to multiply yet, and combine when
// there is nothing left. A tile waits for rows that communication warps bring in order, or for tiles of earlier
// tickets; a row, in a ring, for tiles of earlier tickets than any that needs the row. So any number of resident CTAs
// finishes, of which at least one has communication warps.
//
// Program (device methods):
//   Plan plan()                                 the tiles in the order of tickets
//   bool loads(tile)                            false: nothing to multiply (a tile of zeros)
//   TileSource source(tile)                     waits until the tile's inputs are in memory; one thread
//   void compute(tile, consumer)                multiplies and writes; both consumer warpgroups
//   void prefetch(tile)                         what its epilogue will need, when it is known; one thread
//   bool counted(tile), void count(tile)        whether somebody waits for the tile, and who is told
//   RowDispatch rows(), void combine()          what is brought, and how tokens are summed
//   bool rings()                                rows exceed the buffers
//   void wait_for_room(row_block)               waits until the block that had its place is done with; one thread
//   bool replays(row_block)                     whether rows().replayed is brought, too
//   p.call, epoch                               the call and its number
#pragma once

#include "dispatch.cuh"
#include "epilogue.cuh"

namespace mok::sm90 {

inline constexpr int kThreads = 384;
// 128 * 88 + 256 * 208 = 384 * 168
inline constexpr int kProducerRegisters = 88, kConsumerRegisters = 208;

// What a consumer warpgroup carries from tile to tile.
struct Consumer {
  StageReader stages;
  Stager stager;

  template <class M, bool kContinue = false>
  __device__ __forceinline__ void multiply(int32_t depth, Accumulators& acc) {
    multiply_tile<M, kContinue>(stages, depth, acc, [this] { stager.report(); });
  }
};

// Warp 0, one thread.
template <class Program>
__device__ __forceinline__ void produce(const Program& program, SharedStorage& s, int32_t cta, uint32_t* tickets) {
  RingCursor<kStages> stage;
  const auto load = [&](const TileSlot& tile) {
    if (program.loads(tile)) load_tile(s, program.source(tile), tile.wide(), cta, stage);
  };
  if (cta != 0) {
    SlotReader reader(s);
    for (;;) {
      expect_tile(s, reader.cursor);
      const TileSlot tile = reader.read();
      reader.release(tile, true);
      if (tile.phase() == TilePhase::kStop) return;
      load(tile);
    }
  }
  RingCursor<kSlots> cursor;
  TileWalk walk = {program.plan()};
  uint32_t ticket = atomicAdd(tickets + kTileTicket, 1);
  for (;;) {
    const ClusterTile whole = walk.tile(static_cast<int32_t>(ticket));
    publish_tile(s, whole, cursor);
    cursor.advance();
    if (whole.phase == TilePhase::kStop) return;
    ticket = atomicAdd(tickets + kTileTicket, 1); // needed only after this tile: its latency is hidden
    load(slot_of(whole, 0));
  }
}

// Warp 1, one thread: counts finished tiles. It keeps a tile's slot until then, so the consumers report at most one
// tile more before it has counted this one.
template <class Program> __device__ __forceinline__ void count_tiles(const Program& program, SharedStorage& s) {
  SlotReader reader(s);
  RingCursor<kSlots> written;
  for (;;) {
    const TileSlot tile = reader.read();
    const bool stop = tile.phase() == TilePhase::kStop;
    if (!stop) program.prefetch(tile);
    if (!stop && program.counted(tile)) {
      for (int32_t group = 0; group < kConsumers; ++group)
        wait_barrier(&s.tile_written[written.slot][group], written.parity);
      written.advance();
      ptx::fence_proxy_async();
      program.count(tile);
    }
    reader.release(tile, true);
    if (stop) return;
  }
}

// Warps 4 to 11.
template <class Program>
__device__ __forceinline__ void consume(const Program& program, SharedStorage& s, int32_t cta) {
  const int32_t group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1; // uniform: the descriptors stay out of registers
  SlotReader reader(s);
  uint64_t* peer_empty = cooperative_groups::this_cluster().map_shared_rank(s.empty, cta ^ 1);
  Consumer consumer = {{s, group, peer_empty}, {s, group}};
  for (;;) {
    // Whoever has to wait first reports its last tile: what it waits for may depend on that.
    if (!reader.ready()) consumer.stager.report();
    const TileSlot tile = reader.read();
    __syncwarp();
    reader.release(tile, threadIdx.x % 32 == 0);
    if (tile.phase() == TilePhase::kStop) break;
    program.compute(tile, consumer);
  }
  consumer.stager.finish();
}

// Body of a kernel of kThreads threads in clusters of two; `begin` makes the Program once the launch's inputs are
// there.
template <class Begin>
__device__ __forceinline__ void run_program(SharedStorage& s, uint32_t* tickets, bool communicates, Begin begin) {
  const auto cluster = cooperative_groups::this_cluster();
  if (threadIdx.x == 0) init_barriers(s);
  cudaGridDependencySynchronize();
  const auto program = begin();
  cluster.sync();
  const auto cta = static_cast<int32_t>(cluster.block_rank());
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < 4) {
    give_registers<kProducerRegisters>();
    if (warp == 0 && lane == 0) produce(program, s, cta, tickets);
    if (warp == 1 && lane == 0) count_tiles(program, s);
    if (warp >= 2 && communicates) {
      wait_for_tables(program.p.call, program.epoch);
      dispatch_rows<kRowsPerClaim>(program, program.rows(), INT32_MAX);
      program.combine();
    }
  } else {
    take_registers<kConsumerRegisters>();
    wait_for_tables(program.p.call, program.epoch);
    // Not where rows wait for tiles, which only these warps compute.
    if (!program.rings()) dispatch_rows<kRowsPerFirstClaim>(program, program.rows(), 1);
    consume(program, s, cta);
    program.combine();
  }
  __syncwarp();
  cluster.sync(); // the peer's copies and arrivals may still be under way into this CTA's shared memory
}

// Tensor map of a bf16 matrix [rows, columns] in boxes of 64 x 64.
inline const char* encode_matrix(CUtensorMap* map, const void* base, uint64_t rows, uint64_t columns) {
  return encode_map(map, {base, 2, {columns, rows, 1}, {2 * columns, 0}, {kTileK, kBoxRows, 1}});
}
// Of [rows, 2, columns] (gate, up) in boxes of 64 x 1 x 64, so that boxes end at the last column of either.
inline const char* encode_gate_up(CUtensorMap* map, const void* base, uint64_t rows, uint64_t columns) {
  return encode_map(map, {base, 3, {columns, 2, rows}, {2 * columns, 4 * columns}, {kTileK, 1, kBoxRows}});
}

template <class Kernel, class Params, class Maps>
const char* launch_program(const char* what, Kernel kernel, const Params& p, const Maps& maps, cudaStream_t stream) {
  // Once per kernel and device would do; the call costs less than a microsecond.
  const cudaError_t configured =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SharedStorage));
  if (const char* error = check_cuda(what, configured)) return error;
  const auto grid = static_cast<unsigned>(p.sms / 2 * 2);
  return launch_after(what, kernel, grid, kThreads, sizeof(SharedStorage), stream, p, maps);
}

} // namespace mok::sm90
