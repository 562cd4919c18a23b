// The forward megakernel on Hopper: dispatch, FC1 with SwiGLU, FC2 and combine in one persistent launch.
//
// Warps of a CTA: 0 loads tiles (and, in CTA 0 of the cluster, takes tickets), 1 counts finished tiles, 2 and 3 move
// rows, 4 to 11 multiply. The latter also bring the first rows, when there is nothing to multiply yet, and combine when
// there is nothing left. Every wait is for rows that communication
// warps bring in order or for tiles of earlier tickets, so any number of resident CTAs finishes.
#include "../common/host.h"
#include "../moe/dispatch.cuh"
#include "../moe/epilogue.cuh"

namespace mok::sm90 {
namespace {

constexpr int kThreads = 384;
constexpr int kProducerRegisters = 104, kConsumerRegisters = 200; // 128 * 104 + 256 * 200 = 384 * 168

struct ForwardMaps {
  CUtensorMap x_rows;  // [C, H], boxes of 64 x 64
  CUtensorMap h;       // [C, I]
  CUtensorMap y_rows;  // [C, H]
  CUtensorMap gate_up; // [C, 2, I]
};

struct Context {
  const ForwardParams& p;
  const ForwardMaps& maps;
  SharedStorage& s;
  TileOrder order;
  uint32_t* rows_arrived; // [B]
  uint32_t* fc1_done;     // [B]
  uint32_t* fc2_done;     // [B]
  uint32_t* tickets;
  uint32_t epoch;
  int32_t cta; // rank in the cluster

  __device__ int32_t columns(const TileSlot& tile) const {
    return tile.phase() == TilePhase::kFc1 ? order.fc1_columns : order.fc2_columns;
  }
};

// Waits for the tile's input rows, then feeds the consumers.
__device__ __forceinline__ void produce_tile(const Context& c, const TileSlot& tile, RingCursor<kStages>& stage) {
  const ForwardParams& p = c.p;
  const bool fc1 = tile.phase() == TilePhase::kFc1;
  if (fc1)
    wait_count<false>(p.call, c.rows_arrived + tile.row_block, kBlockRows, Phase::kFc1, -1, tile.row_block);
  else
    wait_count<false>(p.call, c.fc1_done + tile.row_block, c.order.fc1_columns, Phase::kFc2, -1, tile.row_block);
  ptx::fence_proxy_async();
  const auto* weights = static_cast<const CUtensorMap*>(fc1 ? p.w1_maps : p.w2_maps) + tile.expert;
  acquire_tensor_map(weights);
  const TileSource from = {fc1 ? &c.maps.x_rows : &c.maps.h,     weights, tile.row_block * kBlockRows, tile.column,
                           fc1 ? p.call.hidden : p.intermediate, fc1};
  load_tile(c.s, from, tile.wide(), c.cta, stage);
}

// Warp 0, one thread.
__device__ __forceinline__ void produce(const Context& c) {
  RingCursor<kStages> stage;
  if (c.cta != 0) {
    SlotReader reader(c.s);
    for (;;) {
      expect_tile(c.s, reader.cursor);
      const TileSlot tile = reader.read();
      reader.release(tile, true);
      if (tile.phase() == TilePhase::kStop) return;
      produce_tile(c, tile, stage);
    }
  }
  RingCursor<kSlots> cursor;
  uint32_t ticket = atomicAdd(c.tickets + kTileTicket, 1);
  for (;;) {
    const ClusterTile whole = c.order.tile(static_cast<int32_t>(ticket));
    expect_tile(c.s, cursor);
    publish_tile(c.s, whole, cursor);
    cursor.advance();
    const TileSlot tile = {static_cast<int32_t>(whole.phase) + (whole.wide ? 256 : 0), whole.expert, whole.row_block,
                           whole.column};
    if (tile.phase() == TilePhase::kStop) return;
    ticket = atomicAdd(c.tickets + kTileTicket, 1); // needed only after this tile: its latency is hidden
    produce_tile(c, tile, stage);
  }
}

// Warp 1, one thread: counts finished tiles. It keeps a tile's slot until then, so the consumers are never more than
// one tile ahead of its barriers.
template <bool kSystem> __device__ __forceinline__ void signal(const Context& c) {
  SlotReader reader(c.s);
  uint32_t parity = 0;
  for (;;) {
    const TileSlot tile = reader.read();
    if (tile.phase() == TilePhase::kStop) {
      reader.release(tile, true);
      return;
    }
    if (tile.column < c.columns(tile)) {
      for (int32_t group = 0; group < kConsumers; ++group) wait_barrier(&c.s.tile_written[group], parity);
      parity ^= 1;
      ptx::fence_proxy_async();
      if (tile.phase() == TilePhase::kFc1)
        add_release_gpu(c.fc1_done + tile.row_block, 1);
      else if (kSystem)
        add_release_system(c.fc2_done + tile.row_block, 1);
      else
        add_release_gpu(c.fc2_done + tile.row_block, 1);
    }
    reader.release(tile, true);
  }
}

// Warps 4 to 11.
__device__ __forceinline__ void consume(const Context& c) {
  const ForwardParams& p = c.p;
  const int32_t group = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1; // uniform: the descriptors stay out of registers
  SlotReader reader(c.s);
  Stager stager{c.s, group};
  RingCursor<kStages> stage;
  uint64_t* peer_empty = cooperative_groups::this_cluster().map_shared_rank(c.s.empty, c.cta ^ 1);
  const SwiGlu activation{p.clamp, p.linear_offset};
  for (;;) {
    // Whoever has to wait first reports its last tile: what it waits for may depend on that.
    if (!reader.ready()) stager.report();
    const TileSlot tile = reader.read();
    __syncwarp();
    reader.release(tile, threadIdx.x % 32 == 0);
    if (tile.phase() == TilePhase::kStop) {
      stager.report();
      return;
    }
    const bool fc1 = tile.phase() == TilePhase::kFc1;
    Accumulators acc; // dead between tiles: declared outside, the compiler would keep it through the epilogue
    multiply_tile(c.s, group, fc1 ? p.call.hidden : p.intermediate, peer_empty, stage, acc, [&] { stager.report(); });
    if (tile.column >= c.columns(tile)) continue;
    const int32_t row = tile.row_block * kBlockRows + group * kBoxRows;
    if (fc1)
      emit_fc1(stager, acc, activation,
               {p.gate_up == nullptr ? nullptr : &c.maps.gate_up, &c.maps.h, p.intermediate, tile.column * kFc1Columns,
                row});
    else
      emit_fc2(stager, acc, &c.maps.y_rows, p.call.hidden, tile.column * kFc2Columns, row);
  }
}

template <bool kSystem>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ ForwardMaps maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  SharedStorage& s = *reinterpret_cast<SharedStorage*>(shared);
  const auto cluster = cooperative_groups::this_cluster();
  const int32_t experts = p.call.experts / p.call.world, row_blocks = p.call.capacity / kBlockRows;
  if (threadIdx.x == 0) init_barriers(s);
  cudaGridDependencySynchronize();
  for (int32_t i = threadIdx.x; i <= experts; i += kThreads) s.table[i] = p.tile_table[i];
  cluster.sync();

  const uint32_t epoch = *p.call.epoch;
  const Context c = {p,
                     maps,
                     s,
                     {s.table, experts, (p.intermediate + kFc1Columns - 1) / kFc1Columns,
                      (p.call.hidden + kFc2Columns - 1) / kFc2Columns, p.lag},
                     p.counters,
                     p.counters + row_blocks,
                     at<uint32_t>(p.call.local, p.call.layout.fc2_done) + static_cast<int64_t>(epoch & 1) * row_blocks,
                     p.counters + 2 * row_blocks,
                     epoch,
                     static_cast<int32_t>(cluster.block_rank())};
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < 4) {
    give_registers<kProducerRegisters>();
    if (warp == 0 && lane == 0) produce(c);
    if (warp == 1 && lane == 0) signal<kSystem>(c);
    if (warp >= 2 && static_cast<int32_t>(blockIdx.x) < p.comm_sms) {
      wait_for_tables(p.call, epoch);
      dispatch_rows<kRowsPerClaim>(p, c.tickets, INT32_MAX);
      combine_tokens<kSystem>(p, c.tickets, epoch);
    }
  } else {
    take_registers<kConsumerRegisters>();
    wait_for_tables(p.call, epoch);
    dispatch_rows<kRowsPerFirstClaim>(p, c.tickets, 1);
    consume(c);
    combine_tokens<kSystem>(p, c.tickets, epoch);
  }
  __syncwarp();
  cluster.sync(); // the peer's copies and arrivals may still be under way into this CTA's shared memory
}

const char* encode_maps(ForwardMaps& maps, const ForwardParams& p) {
  const uint64_t rows = static_cast<uint64_t>(p.call.capacity);
  const uint64_t hidden = static_cast<uint64_t>(p.call.hidden), intermediate = static_cast<uint64_t>(p.intermediate);
  const void* y_rows = p.call.local + p.call.layout.y_rows;
  const auto matrix = [rows](const void* base, uint64_t columns) {
    return MapSpec{base, 2, {columns, rows, 1}, {2 * columns, 0}, {kTileK, kBoxRows, 1}};
  };
  if (const char* error = encode_map(&maps.x_rows, matrix(p.x_rows, hidden))) return error;
  if (const char* error = encode_map(&maps.h, matrix(p.h, intermediate))) return error;
  if (const char* error = encode_map(&maps.y_rows, matrix(y_rows, hidden))) return error;
  if (p.gate_up == nullptr) return nullptr;
  return encode_map(
      &maps.gate_up,
      {p.gate_up, 3, {intermediate, 2, rows}, {2 * intermediate, 4 * intermediate}, {kTileK, 1, kBoxRows}});
}

template <bool kSystem> const char* launch(const ForwardParams& p, const ForwardMaps& maps, cudaStream_t stream) {
  static const cudaError_t configured =
      cudaFuncSetAttribute(forward_kernel<kSystem>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SharedStorage));
  if (const char* error = check_cuda("forward kernel: shared memory", configured)) return error;
  const auto grid = static_cast<unsigned>(p.sms / 2 * 2);
  return launch_after("forward kernel", forward_kernel<kSystem>, grid, kThreads, sizeof(SharedStorage), stream, p,
                      maps);
}

} // namespace
} // namespace mok::sm90

extern "C" const char* mok_forward(const mok::ForwardParams* params, void* stream) {
  using namespace mok::sm90;
  ForwardMaps maps = {};
  if (const char* error = encode_maps(maps, *params)) return error;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return params->call.world > 1 ? launch<true>(*params, maps, cuda_stream) : launch<false>(*params, maps, cuda_stream);
}

// Loads the kernels for the current device now: loaded lazily, at their first launch, they could wait for a kernel that
// waits for them. Returns null, or why this library cannot run there.
extern "C" const char* mok_load_forward() {
  using namespace mok;
  cudaFuncAttributes attributes;
  if (const char* error = check_cuda("forward kernel", cudaFuncGetAttributes(&attributes, sm90::forward_kernel<false>)))
    return error;
  return check_cuda("forward kernel", cudaFuncGetAttributes(&attributes, sm90::forward_kernel<true>));
}
