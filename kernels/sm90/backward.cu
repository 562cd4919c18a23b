// The backward megakernel on Hopper: dispatch of dY, data gradients of FC2 and FC1 with the activation's gradient in
// between, combine of dX, and the weight gradients, which cover that combine, in one persistent launch.
#include "../common/host.h"
#include "../moe/epilogue_backward.cuh"
#include "../moe/kernel.cuh"

namespace mok::sm90 {
namespace {

struct BackwardMaps {
  CUtensorMap dy_rows;          // [C, H]
  CUtensorMap x_rows;           // [C, H] as kept
  CUtensorMap x_ring;           // [C, H] replayed
  CUtensorMap h_rows;           // [C, I]
  CUtensorMap gate_up;          // [C, 2, I] as kept
  CUtensorMap d_gate_up;        // [C, 2I], to read
  CUtensorMap d_gate_up_halves; // [C, 2, I], to write, and to read what was rebuilt
};

// Rows of the gradient of the router's probabilities, from the parts that column tiles have left in the tokens' slots.
struct ProbsGrad {
  const BackwardParams& p;
  int32_t parts;

  __device__ __forceinline__ void store(int32_t token, int32_t expert, float value) const {
    const int64_t index = static_cast<int64_t>(token) * p.call.experts + expert;
    switch (static_cast<ProbsType>(p.probs_type)) {
    case ProbsType::kBfloat16:
      static_cast<__nv_bfloat16*>(p.d_probs)[index] = __float2bfloat16(value);
      break;
    case ProbsType::kFloat64:
      static_cast<double*>(p.d_probs)[index] = value;
      break;
    default:
      static_cast<float*>(p.d_probs)[index] = value;
    }
  }
  __device__ __forceinline__ void begin(int32_t token) const {
    if (p.d_probs == nullptr) return;
    for (int32_t expert = threadIdx.x % 32; expert < p.call.experts; expert += 32) store(token, expert, 0.0f);
  }
  __device__ __forceinline__ void add(int32_t token, int64_t slot) const {
    if (p.d_probs == nullptr) return;
    float sum = 0.0f;
    const float* of_slot = at<float>(p.call.local, p.call.layout.d_weight_parts) + slot * parts;
    for (int32_t part = 0; part < parts; ++part) sum += __ldcg(of_slot + part);
    store(token, p.experts[slot], sum);
  }
};

template <bool kSystem> struct Backward {
  const BackwardParams& p;
  const BackwardMaps& maps;
  Segments segments;
  int32_t fc1_columns; // of the data gradient of FC2
  int32_t fc2_columns; // of the data gradient of FC1, 0 where dX is not wanted
  WgradTiles wgrad;
  Ring ring;
  bool replaying;
  uint32_t* rows_arrived; // [B]
  uint32_t* fc1_done;     // [B] column tiles of d_gate_up and h_rows
  uint32_t* rebuilt;      // [B] column tiles of gate_up
  uint32_t* segment_fc1;  // [B] at the segment's first block: the same as fc1_done
  uint32_t* segment_done; // [B] at the segment's first block: tiles of all phases but rebuild, see arrivals_of
  uint32_t* fc2_done;     // [B] what combine waits for: column tiles of dX, or of d_gate_up where dX is not wanted
  uint32_t epoch;

  static __device__ bool is_wgrad(TilePhase phase) {
    return phase == TilePhase::kWgrad2 || phase == TilePhase::kWgrad1;
  }
  __device__ int32_t rebuild_columns() const { return (p.intermediate + kFc1Columns - 1) / kFc1Columns; }
  __device__ Segment segment_of(const TileSlot& tile) const {
    return is_wgrad(tile.phase()) ? segments.segment(tile.expert, tile.piece())
                                  : segments.holding(tile.expert, tile.row_block);
  }
  __device__ void* grad_of(const TileSlot& tile) const {
    return (tile.phase() == TilePhase::kWgrad2 ? p.w2_grads : p.w1_grads)[tile.expert];
  }
  __device__ bool grads_fp32() const { return static_cast<GradType>(p.grad_type) == GradType::kFloat32; }
  __device__ const CUtensorMap* grad_map_of(const TileSlot& tile) const {
    const void* maps = tile.phase() == TilePhase::kWgrad2 ? p.w2_grad_maps : p.w1_grad_maps;
    return static_cast<const CUtensorMap*>(maps) + tile.expert;
  }
  // First row of a row block in the scratch.
  __device__ int32_t place(int32_t row_block) const {
    return (replaying ? row_block % ring.blocks : row_block) * kBlockRows;
  }

  // Rows of these segments are as forward kept them.
  __device__ bool kept(const void* rows, const Segment& segment) const {
    return rows != nullptr && segment.first + segment.blocks <= p.call.capacity / kBlockRows;
  }
  // Of segment_done: a tile of a weight gradient is counted by each consumer of each CTA.
  __device__ uint32_t arrivals_of(const Segment& segment) const {
    return static_cast<uint32_t>(segment.blocks * (fc1_columns + fc2_columns) + 2 * kConsumers * wgrad.count());
  }
  __device__ void wait_for_segment(const Segment& segment, Phase phase, int32_t where) const {
    wait_count<false>(p.call, segment_done + segment.first, arrivals_of(segment), phase, -1, where);
  }

  __device__ Plan plan() const {
    Plan plan = {segments};
    plan.fc1_columns = fc1_columns;
    plan.fc2_columns = fc2_columns;
    plan.wgrad = wgrad;
    plan.rebuild_columns = replaying ? rebuild_columns() : 0;
    plan.kept_blocks = replaying && p.gate_up != nullptr ? p.call.capacity / kBlockRows : 0;
    plan.fc1_lag = replaying ? ring.lag / 2 : 0;
    plan.fc2_lag = replaying ? ring.lag : p.lag;
    plan.wgrad_lag = replaying || wgrad.count() == 0 ? plan.fc2_lag : kAfterAll;
    return plan;
  }

  __device__ bool rings() const { return replaying; }
  __device__ void wait_for_room(int32_t row_block) const {
    if (replaying && row_block >= ring.blocks)
      wait_for_segment(segments.holding(row_block - ring.blocks), Phase::kRing, row_block);
  }
  __device__ bool replays(int32_t row_block) const { return replaying && !kept(p.x_rows, segments.holding(row_block)); }

  __device__ bool loads(const TileSlot& tile) const {
    return !is_wgrad(tile.phase()) || (segments.blocks_of(tile.expert) > 0 && grad_of(tile) != nullptr);
  }

  __device__ TileSource source(const TileSlot& tile) const {
    if (is_wgrad(tile.phase())) return wgrad_source(tile);
    const int32_t block = tile.row_block, line = place(block), column = tile.column * kTileColumns;
    const bool rebuild = tile.phase() == TilePhase::kRebuild, fc1 = tile.phase() == TilePhase::kFc1;
    if (rebuild || fc1)
      wait_count<false>(p.call, rows_arrived + block, kBlockRows, Phase::kFc1, -1, block);
    else
      wait_count<false>(p.call, fc1_done + block, fc1_columns, Phase::kFc2, -1, block);
    const bool gate_up_kept = !replaying || kept(p.gate_up, segment_of(tile));
    if (fc1 && !gate_up_kept) wait_count<false>(p.call, rebuilt + block, rebuild_columns(), Phase::kFc1, -1, block);
    ptx::fence_proxy_async();
    const auto* weights = static_cast<const CUtensorMap*>(rebuild ? p.w1_forward_maps
                                                          : fc1   ? p.w2_maps
                                                                  : p.w1_maps) +
                          tile.expert;
    acquire_tensor_map(weights);
    if (rebuild)
      return {
          {&maps.x_ring, line, 0, Lay::kRows}, {weights, tile.column * kFc1Columns, 0, Lay::kGateUp}, p.call.hidden};
    if (fc1)
      return {
          {&maps.dy_rows, line, 0, Lay::kRows},
          {weights, column, 0, Lay::kColumns},
          p.call.hidden,
          {gate_up_kept ? &maps.gate_up : &maps.d_gate_up_halves, gate_up_kept ? block * kBlockRows : line, column}};
    return {{&maps.d_gate_up, line, 0, Lay::kRows}, {weights, column, 0, Lay::kColumns}, 2 * p.intermediate};
  }

  // A piece goes on from the partial sums of the one before. The first piece writes over those of the last expert that
  // was cut and has a gradient of this matrix.
  __device__ void wait_for_partials(const Segment& segment, void* const* grads) const {
    if (segment.piece > 0) {
      wait_for_segment(segments.segment(segment.expert, segment.piece - 1), Phase::kWgrad, segment.expert);
    } else if (!segment.last) {
      int32_t expert = segment.expert - 1;
      while (expert >= 0 && (segments.blocks_of(expert) <= segments.limit || grads[expert] == nullptr)) --expert;
      if (expert >= 0)
        wait_for_segment(segments.holding(expert, segments.first_block(expert + 1) - 1), Phase::kWgrad, expert);
    }
  }

  __device__ TileSource wgrad_source(const TileSlot& tile) const {
    const Segment segment = segment_of(tile);
    wait_count<false>(p.call, segment_fc1 + segment.first, static_cast<uint32_t>(segment.blocks * fc1_columns),
                      Phase::kWgrad, -1, tile.expert);
    const bool w2 = tile.phase() == TilePhase::kWgrad2;
    wait_for_partials(segment, w2 ? p.w2_grads : p.w1_grads);
    ptx::fence_proxy_async();
    const bool x_kept = kept(p.x_rows, segment);
    const int32_t line = tile.row_block * kBlockRows, column = tile.column * kTileColumns;
    const int32_t first = place(segment.first), wrap = replaying ? ring.blocks * kBlockRows : INT32_MAX;
    const Operand lines = {w2 ? &maps.dy_rows : &maps.d_gate_up, line, first, Lay::kColumns, wrap};
    const int32_t depth = segment.blocks * kBlockRows;
    if (w2) return {lines, {&maps.h_rows, column, first, Lay::kColumns, wrap}, depth};
    if (x_kept) return {lines, {&maps.x_rows, column, segment.first * kBlockRows, Lay::kColumns}, depth};
    return {lines, {&maps.x_ring, column, first, Lay::kColumns, wrap}, depth};
  }

  __device__ bool counted(const TileSlot& tile) const {
    if (is_wgrad(tile.phase())) return false; // its consumers count it themselves
    if (tile.phase() == TilePhase::kRebuild) return tile.column < rebuild_columns();
    return tile.column < (tile.phase() == TilePhase::kFc1 ? fc1_columns : fc2_columns);
  }

  __device__ void compute(const TileSlot& tile, Consumer& consumer) const {
    Accumulators acc;
    if (is_wgrad(tile.phase())) {
      compute_wgrad(tile, consumer, acc);
      return;
    }
    const int32_t block = tile.row_block, in_block = consumer.stager.group * kBoxRows,
                  row = block * kBlockRows + in_block;
    if (tile.phase() == TilePhase::kRebuild) {
      consumer.multiply<Majors<false, false>>(p.call.hidden, acc);
      if (counted(tile))
        emit_fc1(consumer.stager, acc, {p.clamp, p.linear_offset},
                 {&maps.d_gate_up_halves, nullptr, p.intermediate, tile.column * kFc1Columns, place(block) + in_block});
      return;
    }
    const bool fc1 = tile.phase() == TilePhase::kFc1;
    SlotRows slots;
    if (!fc1) slots.look_up(sources(), row);
    consumer.multiply<Majors<false, true>>(fc1 ? p.call.hidden : 2 * p.intermediate, acc);
    const int32_t column = tile.column * kTileColumns;
    if (!counted(tile)) {
      if (fc1) consumer.stages.skip_epilogue_input();
    } else if (fc1) {
      emit_activation_grad<kSystem>(consumer.stages, consumer.stager, acc, p.call,
                                    activation_grad_of(tile, row, place(block) + in_block, column));
    } else {
      emit_slots<kSystem>(consumer.stager, acc, p.call, slots, column);
    }
  }

  __device__ ActivationGrad activation_grad_of(const TileSlot& tile, int32_t row, int32_t place, int32_t column) const {
    ActivationGrad to;
    to.activation = {p.clamp, p.linear_offset};
    to.row_weights = p.row_weights + place;
    to.sources = sources();
    to.d_gate_up = &maps.d_gate_up_halves;
    to.h_rows = &maps.h_rows;
    to.columns = p.intermediate;
    to.parts = fc1_columns;
    to.part = tile.column;
    to.first_column = column;
    to.first_row = row;
    to.place = place;
    return to;
  }

  __device__ void compute_wgrad(const TileSlot& tile, Consumer& consumer, Accumulators& acc) const {
    void* grad = grad_of(tile);
    const Segment segment = segment_of(tile);
    const bool w2 = tile.phase() == TilePhase::kWgrad2, idle = grad == nullptr || segment.blocks == 0;
    const int32_t part = 2 * (tile.row_block % 2) + consumer.stager.group; // of the cluster tile's 256 lines
    float4* partial = reinterpret_cast<float4*>(p.partials) +
                      (static_cast<int64_t>(wgrad.number(w2, tile.row_block, tile.column)) * 4 + part) * 32 * 128;
    if (grads_fp32() && grad != nullptr && consumer.stager.elected())
      acquire_tensor_map(grad_map_of(tile)); // takes a while
    if (idle) {
      consumer.stager.report(); // else the main loop does
      for (float& value : acc) value = 0.0f;
    } else if (segment.piece > 0) {
      consumer.stager.report(); // before waiting
      consumer.stages.wait();   // and with it for all that its source waited for
      load_partial(acc, partial);
      consumer.multiply<Majors<true, true>, true>(segment.blocks * kBlockRows, acc);
    } else {
      consumer.multiply<Majors<true, true>>(segment.blocks * kBlockRows, acc);
    }
    if (!segment.last && !idle) {
      store_partial(acc, partial);
      sync_threads<128>(kGroupBarrier + consumer.stager.group);
      if (consumer.stager.elected()) add_release_gpu(segment_done + segment.first, 1);
      return;
    }
    // The rows have been read, for a warpgroup multiplies as one; nobody waits for the gradient itself. The other
    // threads' partial sums have been read, too, but that is for the barrier to say.
    if (segment.piece > 0) sync_threads<128>(kGroupBarrier + consumer.stager.group);
    if (replaying && segment.blocks > 0 && consumer.stager.elected()) {
      if (segment.piece > 0)
        add_release_gpu(segment_done + segment.first, 1);
      else
        add_relaxed(segment_done + segment.first, 1);
    }
    if (grad != nullptr && (segment.blocks > 0 || p.accumulate == 0)) emit_wgrad(tile, consumer, acc, grad);
  }

  // The part of the gradient that begins `line` lines into the tile.
  __device__ WeightGradTile grad_tile(const TileSlot& tile, int32_t line) const {
    const bool w2 = tile.phase() == TilePhase::kWgrad2;
    return {w2 ? p.call.hidden : 2 * p.intermediate, w2 ? p.intermediate : p.call.hidden,
            tile.row_block * kBlockRows + line, tile.column * kTileColumns};
  }

  __device__ void emit_wgrad(const TileSlot& tile, Consumer& consumer, Accumulators& acc, void* grad) const {
    const WeightGradTile to = grad_tile(tile, consumer.stager.group * kBoxRows);
    if (to.outside()) return;
    if (grads_fp32())
      emit_weight_grad(consumer.stager, acc, grad_map_of(tile), to, p.accumulate != 0);
    else if (p.accumulate != 0)
      add_weight_grad(acc, static_cast<__nv_bfloat16*>(grad), to);
    else
      emit_weight_grad(consumer.stager, acc, static_cast<__nv_bfloat16*>(grad), to);
  }

  // Lines of an fp32 gradient that is added to are brought into L2 while the tile is multiplied.
  __device__ void prefetch(const TileSlot& tile) const {
    if (!is_wgrad(tile.phase()) || !grads_fp32() || p.accumulate == 0 || !loads(tile) || !segment_of(tile).last) return;
    const WeightGradTile of = grad_tile(tile, 0);
    const int32_t left = of.columns - of.first_column, width = left < kTileColumns ? left : kTileColumns;
    const auto* grad = static_cast<const float*>(grad_of(tile));
    for (int32_t i = 0; i < kBlockRows && of.first_line + i < of.lines; ++i) prefetch_l2(of.line(grad, i), 4 * width);
  }

  __device__ void count(const TileSlot& tile) const {
    if (tile.phase() == TilePhase::kRebuild) {
      add_release_gpu(rebuilt + tile.row_block, 1);
      return;
    }
    const bool fc1 = tile.phase() == TilePhase::kFc1;
    const int32_t first = segment_of(tile).first;
    // For all counters. Parts of router weights' gradients that went to peers are theirs when dX is.
    if (fc1 && p.wants_dx != 0)
      fence_release<false>();
    else
      fence_release<kSystem>();
    if (fc1) {
      add_relaxed(fc1_done + tile.row_block, 1);
      add_relaxed(segment_fc1 + first, 1);
    }
    if (fc1 == (p.wants_dx == 0)) add_relaxed(fc2_done + tile.row_block, 1);
    if (replaying) add_relaxed(segment_done + first, 1);
  }

  __device__ void combine() const {
    const auto columns = static_cast<uint32_t>(p.wants_dx != 0 ? fc2_columns : fc1_columns);
    combine_tokens<kSystem>(
        p.call, {nullptr, p.slot_dst_rank, p.slot_dst_row, nullptr, p.wants_dx != 0 ? p.dx : nullptr, columns},
        p.counters, epoch, ProbsGrad{p, fc1_columns});
  }

  __device__ SourceTable sources() const { return {nullptr, p.row_src_rank, p.row_src_slot}; }
  __device__ RowDispatch rows() const {
    RowDispatch d;
    d.sources = sources();
    d.tokens = {static_cast<const uint4*>(p.dy), p.call.layout.x};
    d.rows = d.later_rows = static_cast<uint4*>(p.dy_rows);
    d.replayed = {static_cast<const uint4*>(p.x), p.call.layout.replay_x};
    d.replayed_rows = d.rows + static_cast<int64_t>(ring.blocks) * kBlockRows * p.call.hidden / 8;
    d.own_weights = p.weights;
    d.row_weights = p.row_weights;
    d.rows_arrived = rows_arrived;
    d.tickets = p.counters;
    d.rows_in_use = segments.first_block(segments.experts) * kBlockRows;
    if (replaying) {
      d.ring = ring.blocks * kBlockRows;
      d.window = ring.window;
    }
    return d;
  }
};

template <bool kSystem>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardMaps maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  SharedStorage& s = *reinterpret_cast<SharedStorage*>(shared);
  const int32_t experts = p.call.experts / p.call.world, blocks = p.call.max_rows / kBlockRows;
  const bool communicates = static_cast<int32_t>(blockIdx.x) < p.comm_sms;
  run_program(s, p.counters, communicates, [&] {
    for (int32_t i = threadIdx.x; i <= experts; i += kThreads) s.table[i] = p.tile_table[i];
    const uint32_t epoch = *p.call.epoch;
    const int32_t hidden = p.call.hidden, inner = p.intermediate;
    const auto tiles = [](int32_t size) { return (size + kTileColumns - 1) / kTileColumns; };
    const int32_t fc1_columns = tiles(inner), fc2_columns = p.wants_dx == 0 ? 0 : tiles(hidden);
    const WgradTiles wgrad = {p.w2_grads == nullptr ? 0 : tiles(hidden), tiles(inner),
                              p.w1_grads == nullptr ? 0 : tiles(2 * inner), tiles(hidden)};
    // In the ring, each lag shall be two waves of tickets or more.
    const int32_t usual_blocks = (p.expert_first_row[experts] / kBlockRows + experts - 1) / experts;
    const int32_t tickets = wgrad.count() + tickets_of(usual_blocks, 3 * fc1_columns + fc2_columns) + 1;
    const Ring ring =
        backward_ring(p.call.capacity / kBlockRows, 2 * (1 + p.sms / tickets), usual_blocks, p.call.world);
    const bool replaying = p.x_rows == nullptr || p.expert_first_row[experts] > p.call.capacity;
    uint32_t* counters = p.counters + kCounterWords;
    const auto counter = [&](BlockCounter array) { return counters + static_cast<int64_t>(array) * blocks; };
    Backward<kSystem> b{p, maps};
    b.segments = {s.table, experts, replaying ? ring.segment : INT32_MAX};
    b.fc1_columns = fc1_columns;
    b.fc2_columns = fc2_columns;
    b.wgrad = wgrad;
    b.ring = ring;
    b.replaying = replaying;
    b.rows_arrived = counter(kRowsArrived);
    b.fc1_done = counter(kFc1Done);
    b.rebuilt = counter(kRebuilt);
    b.segment_fc1 = counter(kSegmentFc1);
    b.segment_done = counter(kSegmentDone);
    b.fc2_done = at<uint32_t>(p.call.local, p.call.layout.fc2_done) + static_cast<int64_t>(epoch & 1) * blocks;
    b.epoch = epoch;
    return b;
  });
}

const char* encode_maps(BackwardMaps& maps, const BackwardParams& p) {
  const auto rows = static_cast<uint64_t>(p.call.capacity), hidden = static_cast<uint64_t>(p.call.hidden);
  const auto inner = static_cast<uint64_t>(p.intermediate);
  const auto ring_rows =
      static_cast<uint64_t>(backward_ring(p.call.capacity / kBlockRows, 0, 0, 1).blocks) * kBlockRows;
  if (const char* error = encode_matrix(&maps.dy_rows, p.dy_rows, rows, hidden)) return error;
  const void* x_ring = static_cast<const uint8_t*>(p.dy_rows) + ring_rows * hidden * 2;
  if (const char* error = encode_matrix(&maps.x_ring, x_ring, ring_rows, hidden)) return error;
  if (const char* error = encode_matrix(&maps.h_rows, p.h_rows, rows, inner)) return error;
  if (const char* error = encode_matrix(&maps.d_gate_up, p.d_gate_up, rows, 2 * inner)) return error;
  if (const char* error = encode_gate_up(&maps.d_gate_up_halves, p.d_gate_up, rows, inner)) return error;
  if (p.x_rows != nullptr)
    if (const char* error = encode_matrix(&maps.x_rows, p.x_rows, rows, hidden)) return error;
  return p.gate_up == nullptr ? nullptr : encode_gate_up(&maps.gate_up, p.gate_up, rows, inner);
}

} // namespace
} // namespace mok::sm90

extern "C" const char* mok_backward(const mok::BackwardParams* params, void* stream) {
  using namespace mok::sm90;
  if (params->x_rows != nullptr && params->gate_up == nullptr) return "backward: x_rows without gate_up";
  BackwardMaps maps = {};
  if (const char* error = encode_maps(maps, *params)) return error;
  const auto kernel = params->call.world > 1 ? backward_kernel<true> : backward_kernel<false>;
  return launch_program("backward kernel", kernel, *params, maps, static_cast<cudaStream_t>(stream));
}

extern "C" const char* mok_load_backward() {
  using namespace mok;
  return load_kernels("backward kernel", sm90::backward_kernel<false>, sm90::backward_kernel<true>);
}
