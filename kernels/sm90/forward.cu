// The forward megakernel on Hopper: dispatch, FC1 with SwiGLU, FC2 and combine in one persistent launch.
#include "../common/host.h"
#include "../moe/kernel.cuh"

namespace mok::sm90 {
namespace {

struct ForwardMaps {
  CUtensorMap x_rows;  // [C, H]
  CUtensorMap x_ring;  // [C, H]
  CUtensorMap h;       // [C, I]
  CUtensorMap gate_up; // [C, 2, I]
};

template <bool kSystem> struct Forward {
  const ForwardParams& p;
  const ForwardMaps& maps;
  Segments segments;
  int32_t fc1_columns;
  int32_t fc2_columns;
  Ring ring;
  uint32_t* rows_arrived; // [B]
  uint32_t* fc1_done;     // [B]
  uint32_t* fc2_done;     // [B]
  uint32_t epoch;

  static __device__ bool is_fc1(const TileSlot& tile) { return tile.phase() == TilePhase::kFc1; }
  __device__ int32_t depth(const TileSlot& tile) const { return is_fc1(tile) ? p.call.hidden : p.intermediate; }
  __device__ int32_t place(int32_t row_block) const {
    return (rings() ? row_block % ring.blocks : row_block) * kBlockRows;
  }

  __device__ Plan plan() const {
    Plan plan = {segments};
    plan.fc1_columns = fc1_columns;
    plan.fc2_columns = fc2_columns;
    plan.fc2_lag = plan.wgrad_lag = rings() ? ring.lag : p.lag;
    return plan;
  }
  __device__ bool loads(const TileSlot&) const { return true; }

  __device__ bool rings() const { return segments.limit != INT32_MAX; }
  __device__ void wait_for_room(int32_t row_block) const {
    if (!rings() || row_block < ring.blocks) return;
    const int32_t before = row_block - ring.blocks;
    wait_count<false>(p.call, fc2_done + before, fc2_columns, Phase::kRing, -1, row_block);
  }
  __device__ bool replays(int32_t) const { return false; }

  __device__ TileSource source(const TileSlot& tile) const {
    const int32_t block = tile.row_block, row = place(block);
    if (is_fc1(tile)) {
      wait_count<false>(p.call, rows_arrived + block, kBlockRows, Phase::kFc1, -1, block);
      ptx::fence_proxy_async();
      const auto* w1 = static_cast<const CUtensorMap*>(p.w1_maps) + tile.expert;
      acquire_tensor_map(w1);
      return {{block < ring.blocks ? &maps.x_rows : &maps.x_ring, row, 0, Lay::kRows},
              {w1, tile.column * kFc1Columns, 0, Lay::kGateUp},
              p.call.hidden};
    }
    wait_count<false>(p.call, fc1_done + block, fc1_columns, Phase::kFc2, -1, block);
    ptx::fence_proxy_async();
    const auto* w2 = static_cast<const CUtensorMap*>(p.w2_maps) + tile.expert;
    acquire_tensor_map(w2);
    return {{&maps.h, row, 0, Lay::kRows}, {w2, tile.column * kFc2Columns, 0, Lay::kRows}, p.intermediate};
  }

  __device__ bool counted(const TileSlot& tile) const {
    return tile.column < (is_fc1(tile) ? fc1_columns : fc2_columns);
  }

  __device__ void compute(const TileSlot& tile, Consumer& consumer) const {
    const int32_t block = tile.row_block, in_block = consumer.stager.group * kBoxRows;
    SlotRows slots;
    if (!is_fc1(tile)) slots.look_up(sources(), block * kBlockRows + in_block);
    Accumulators acc; // dead between tiles: declared further out, the compiler would keep it through the epilogue
    consumer.multiply<Majors<false, false>>(depth(tile), acc);
    if (!counted(tile)) return;
    if (is_fc1(tile))
      emit_fc1(consumer.stager, acc, {p.clamp, p.linear_offset},
               {p.gate_up != nullptr && block < ring.blocks ? &maps.gate_up : nullptr, &maps.h, p.intermediate,
                tile.column * kFc1Columns, place(block) + in_block});
    else
      emit_slots<kSystem>(consumer.stager, acc, p.call, slots, tile.column * kFc2Columns);
  }

  __device__ void prefetch(const TileSlot&) const {}
  __device__ void count(const TileSlot& tile) const {
    if (is_fc1(tile))
      add_release_gpu(fc1_done + tile.row_block, 1);
    else
      add_release<kSystem>(fc2_done + tile.row_block, 1);
  }

  __device__ void combine() const {
    combine_tokens<kSystem>(
        p.call, {p.weights, p.slot_dst_rank, p.slot_dst_row, p.token_order, p.y, static_cast<uint32_t>(fc2_columns)},
        p.counters, epoch, NoSlotSums{});
  }

  __device__ SourceTable sources() const {
    return {at<const RowSource>(p.call.local, p.call.layout.row_source), nullptr, nullptr};
  }
  __device__ RowDispatch rows() const {
    RowDispatch d;
    d.sources = sources();
    d.out_source_rank = p.row_src_rank;
    d.out_source_slot = p.row_src_slot;
    d.tokens = {static_cast<const uint4*>(p.x), p.call.layout.x};
    d.rows = static_cast<uint4*>(p.x_rows);
    d.later_rows = static_cast<uint4*>(p.x_ring);
    d.rows_arrived = rows_arrived;
    d.tickets = p.counters;
    d.rows_in_use = segments.first_block(segments.experts) * kBlockRows;
    if (rings()) {
      d.ring = ring.blocks * kBlockRows;
      d.window = ring.window;
    }
    return d;
  }
};

template <bool kSystem>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ ForwardMaps maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  SharedStorage& s = *reinterpret_cast<SharedStorage*>(shared);
  const int32_t experts = p.call.experts / p.call.world, blocks = p.call.max_rows / kBlockRows;
  const bool communicates = static_cast<int32_t>(blockIdx.x) < p.comm_sms;
  run_program(s, p.counters, communicates, [&] {
    for (int32_t i = threadIdx.x; i <= experts; i += kThreads) s.table[i] = p.tile_table[i];
    const uint32_t epoch = *p.call.epoch;
    const Ring ring = ring_of(p.call.capacity / kBlockRows, p.lag, p.call.world);
    const bool rings = p.expert_first_row[experts] > p.call.capacity;
    uint32_t* counters = p.counters + kCounterWords;
    const auto counter = [&](BlockCounter array) { return counters + static_cast<int64_t>(array) * blocks; };
    Forward<kSystem> f{p, maps};
    f.segments = {s.table, experts, rings ? ring.segment : INT32_MAX};
    f.fc1_columns = (p.intermediate + kFc1Columns - 1) / kFc1Columns;
    f.fc2_columns = (p.call.hidden + kFc2Columns - 1) / kFc2Columns;
    f.ring = ring;
    f.rows_arrived = counter(kRowsArrived);
    f.fc1_done = counter(kFc1Done);
    f.fc2_done = at<uint32_t>(p.call.local, p.call.layout.fc2_done) + static_cast<int64_t>(epoch & 1) * blocks;
    f.epoch = epoch;
    return f;
  });
}

const char* encode_maps(ForwardMaps& maps, const ForwardParams& p) {
  const auto rows = static_cast<uint64_t>(p.call.capacity), hidden = static_cast<uint64_t>(p.call.hidden);
  const auto intermediate = static_cast<uint64_t>(p.intermediate);
  if (const char* error = encode_matrix(&maps.x_rows, p.x_rows, rows, hidden)) return error;
  if (const char* error = encode_matrix(&maps.x_ring, p.x_ring, rows, hidden)) return error;
  if (const char* error = encode_matrix(&maps.h, p.h, rows, intermediate)) return error;
  return p.gate_up == nullptr ? nullptr : encode_gate_up(&maps.gate_up, p.gate_up, rows, intermediate);
}

} // namespace
} // namespace mok::sm90

extern "C" const char* mok_forward(const mok::ForwardParams* params, void* stream) {
  using namespace mok::sm90;
  ForwardMaps maps = {};
  if (const char* error = encode_maps(maps, *params)) return error;
  const auto kernel = params->call.world > 1 ? forward_kernel<true> : forward_kernel<false>;
  return launch_program("forward kernel", kernel, *params, maps, static_cast<cudaStream_t>(stream));
}

extern "C" const char* mok_load_forward() {
  using namespace mok;
  return load_kernels("forward kernel", sm90::forward_kernel<false>, sm90::forward_kernel<true>);
}
