// The backward megakernel on Hopper: dispatch of dY, data gradients of FC2 and FC1 with the activation's gradient in
// between, combine of dX, and the weight gradients, which cover that combine, in one persistent launch.
#include "../common/host.h"
#include "../moe/epilogue_backward.cuh"
#include "../moe/kernel.cuh"

namespace mok::sm90 {
namespace {

struct BackwardMaps {
  CUtensorMap dy_rows;          // [C, H]
  CUtensorMap x_rows;           // [C, H]
  CUtensorMap h_rows;           // [C, I]
  CUtensorMap d_gate_up;        // [C, 2I], to read
  CUtensorMap d_gate_up_halves; // [C, 2, I], to write
  CUtensorMap dx_rows;          // [C, H]
};

template <bool kSystem> struct Backward {
  const BackwardParams& p;
  const BackwardMaps& maps;
  TileOrder order; // "FC1" is the data gradient of FC2, "FC2" that of FC1
  WgradOrder wgrad;
  uint32_t* rows_arrived; // [B]
  uint32_t* hidden_done;  // [B] column tiles of d_gate_up and h_rows
  uint32_t* tickets;
  uint32_t* expert_done; // [e] the same, per expert
  uint32_t* fc2_done;    // [B] what combine waits for: column tiles of dX, or of d_gate_up where dX is not wanted
  uint32_t epoch;

  static __device__ bool is_wgrad(const TileSlot& tile) { return tile.phase() >= TilePhase::kWgrad2; }
  static __device__ bool is_hidden(const TileSlot& tile) { return tile.phase() == TilePhase::kFc1; }
  __device__ int32_t rows_of(int32_t expert) const {
    return p.expert_first_row[expert + 1] - p.expert_first_row[expert];
  }
  __device__ void* grad_of(const TileSlot& tile) const {
    return (tile.phase() == TilePhase::kWgrad2 ? p.w2_grads : p.w1_grads)[tile.expert];
  }

  __device__ ClusterTile tile(int32_t ticket) const {
    const int32_t index = ticket - order.num_tickets();
    return index < 0 ? order.tile(ticket) : wgrad.tile(index);
  }

  __device__ bool loads(const TileSlot& tile) const {
    return !is_wgrad(tile) || (rows_of(tile.expert) > 0 && grad_of(tile) != nullptr);
  }

  __device__ int32_t depth(const TileSlot& tile) const {
    if (is_wgrad(tile)) return rows_of(tile.expert);
    return is_hidden(tile) ? p.call.hidden : 2 * p.intermediate;
  }

  __device__ TileSource source(const TileSlot& tile) const {
    const int32_t block = tile.row_block, line = block * kBlockRows, column = tile.column * kTileColumns;
    if (is_wgrad(tile)) {
      const int32_t first = p.expert_first_row[tile.expert];
      const auto tiles = static_cast<uint32_t>(rows_of(tile.expert) / kBlockRows * order.fc1_columns);
      wait_count<false>(p.call, expert_done + tile.expert, tiles, Phase::kWgrad, -1, tile.expert);
      ptx::fence_proxy_async();
      const bool w2 = tile.phase() == TilePhase::kWgrad2;
      return {{w2 ? &maps.dy_rows : &maps.d_gate_up, line, first, Lay::kColumns},
              {w2 ? &maps.h_rows : &maps.x_rows, column, first, Lay::kColumns},
              rows_of(tile.expert)};
    }
    const bool hidden = is_hidden(tile);
    if (hidden)
      wait_count<false>(p.call, rows_arrived + block, kBlockRows, Phase::kFc1, -1, block);
    else
      wait_count<false>(p.call, hidden_done + block, order.fc1_columns, Phase::kFc2, -1, block);
    ptx::fence_proxy_async();
    const auto* weights = static_cast<const CUtensorMap*>(hidden ? p.w2_maps : p.w1_maps) + tile.expert;
    acquire_tensor_map(weights);
    return {{hidden ? &maps.dy_rows : &maps.d_gate_up, line, 0, Lay::kRows},
            {weights, column, 0, Lay::kColumns},
            depth(tile)};
  }

  __device__ bool counted(const TileSlot& tile) const {
    return !is_wgrad(tile) && tile.column < (is_hidden(tile) ? order.fc1_columns : order.fc2_columns);
  }

  __device__ void compute(const TileSlot& tile, Consumer& consumer) const {
    Accumulators acc;
    if (is_wgrad(tile)) {
      compute_wgrad(tile, consumer, acc);
      return;
    }
    consumer.multiply<Majors<false, true>>(depth(tile), acc);
    if (!counted(tile)) return;
    const int32_t row = tile.row_block * kBlockRows + consumer.group * kBoxRows, column = tile.column * kTileColumns;
    if (is_hidden(tile))
      emit_activation_grad(consumer.stager, acc,
                           {{p.clamp, p.linear_offset},
                            static_cast<const uint32_t*>(p.gate_up),
                            p.row_weights,
                            at<float>(p.call.local, p.call.layout.d_weight_parts),
                            &maps.d_gate_up_halves,
                            &maps.h_rows,
                            p.intermediate,
                            order.fc1_columns,
                            tile.column,
                            column,
                            row});
    else
      emit_rows(consumer.stager, acc, &maps.dx_rows, p.call.hidden, column, row);
  }

  __device__ void compute_wgrad(const TileSlot& tile, Consumer& consumer, Accumulators& acc) const {
    void* grad = grad_of(tile);
    const int32_t rows = rows_of(tile.expert);
    if (grad == nullptr || (rows == 0 && p.accumulate != 0)) return;
    if (rows > 0)
      consumer.multiply<Majors<true, true>>(rows, acc);
    else
      for (float& value : acc) value = 0.0f;
    const bool w2 = tile.phase() == TilePhase::kWgrad2;
    const int32_t lines = w2 ? p.call.hidden : 2 * p.intermediate, columns = w2 ? p.intermediate : p.call.hidden;
    const int32_t line = tile.row_block * kBlockRows + consumer.group * kBoxRows, column = tile.column * kTileColumns;
    if (static_cast<GradType>(p.grad_type) == GradType::kFloat32)
      emit_weight_grad(acc, static_cast<float*>(grad), lines, columns, line, column, p.accumulate != 0);
    else
      emit_weight_grad(acc, static_cast<__nv_bfloat16*>(grad), lines, columns, line, column, p.accumulate != 0);
  }

  __device__ void count(const TileSlot& tile) const {
    if (is_hidden(tile)) {
      add_release_gpu(hidden_done + tile.row_block, 1);
      add_release_gpu(expert_done + tile.expert, 1);
    }
    if (is_hidden(tile) == (p.wants_dx == 0)) add_release<kSystem>(fc2_done + tile.row_block, 1);
  }

  __device__ void combine() const {
    const auto columns = static_cast<uint32_t>(p.wants_dx != 0 ? order.fc2_columns : order.fc1_columns);
    const auto sum_parts = [this](int64_t slot, int32_t rank, int32_t row) {
      float sum = 0.0f;
      if (rank >= 0) {
        const int32_t parts = order.fc1_columns;
        const float* of_row =
            at<const float>(p.call.peers[rank], p.call.layout.d_weight_parts) + static_cast<int64_t>(row) * parts;
        for (int32_t part = 0; part < parts; ++part) sum += __ldcg(of_row + part);
      }
      p.d_weights[slot] = sum;
    };
    combine_tokens<kSystem>(
        p.call, {nullptr, p.slot_dst_rank, p.slot_dst_row, nullptr, p.wants_dx != 0 ? p.dx : nullptr, columns}, tickets,
        epoch, sum_parts);
  }

  __device__ RowDispatch rows() const {
    return {nullptr,
            p.row_src_rank,
            p.row_src_slot,
            nullptr,
            nullptr,
            static_cast<const uint4*>(p.dy),
            static_cast<uint4*>(p.dy_rows),
            p.weights,
            p.row_weights,
            rows_arrived,
            tickets,
            p.expert_first_row[order.experts]};
  }
};

template <bool kSystem>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardMaps maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  SharedStorage& s = *reinterpret_cast<SharedStorage*>(shared);
  const int32_t experts = p.call.experts / p.call.world, row_blocks = p.call.capacity / kBlockRows;
  uint32_t* tickets = p.counters + 2 * row_blocks;
  const bool communicates = static_cast<int32_t>(blockIdx.x) < p.comm_sms;
  run_program(s, tickets, communicates, [&] {
    for (int32_t i = threadIdx.x; i <= experts; i += kThreads) s.table[i] = p.tile_table[i];
    const uint32_t epoch = *p.call.epoch;
    const int32_t hidden = p.call.hidden, inner = p.intermediate;
    const auto tiles = [](int32_t size) { return (size + kTileColumns - 1) / kTileColumns; };
    return Backward<kSystem>{p,
                             maps,
                             {s.table, experts, tiles(inner), p.wants_dx == 0 ? 0 : tiles(hidden), p.lag},
                             {experts, p.w2_grads == nullptr ? 0 : tiles(hidden), tiles(inner),
                              p.w1_grads == nullptr ? 0 : tiles(2 * inner), tiles(hidden)},
                             p.counters,
                             p.counters + row_blocks,
                             tickets,
                             tickets + kCounterWords,
                             at<uint32_t>(p.call.local, p.call.layout.fc2_done) +
                                 static_cast<int64_t>(epoch & 1) * row_blocks,
                             epoch};
  });
}

const char* encode_maps(BackwardMaps& maps, const BackwardParams& p) {
  const auto rows = static_cast<uint64_t>(p.call.capacity), hidden = static_cast<uint64_t>(p.call.hidden);
  const auto inner = static_cast<uint64_t>(p.intermediate);
  if (const char* error = encode_matrix(&maps.dy_rows, p.dy_rows, rows, hidden)) return error;
  if (const char* error = encode_matrix(&maps.x_rows, p.x_rows, rows, hidden)) return error;
  if (const char* error = encode_matrix(&maps.h_rows, p.h_rows, rows, inner)) return error;
  if (const char* error = encode_matrix(&maps.d_gate_up, p.d_gate_up, rows, 2 * inner)) return error;
  if (const char* error = encode_gate_up(&maps.d_gate_up_halves, p.d_gate_up, rows, inner)) return error;
  return encode_matrix(&maps.dx_rows, p.call.local + p.call.layout.y_rows, rows, hidden);
}

} // namespace
} // namespace mok::sm90

extern "C" const char* mok_backward(const mok::BackwardParams* params, void* stream) {
  using namespace mok::sm90;
  BackwardMaps maps = {};
  if (const char* error = encode_maps(maps, *params)) return error;
  const auto kernel = params->call.world > 1 ? backward_kernel<true> : backward_kernel<false>;
  return launch_program("backward kernel", kernel, *params, maps, static_cast<cudaStream_t>(stream));
}

// As mok_load_forward.
extern "C" const char* mok_load_backward() {
  using namespace mok;
  cudaFuncAttributes attributes;
  if (const char* error =
          check_cuda("backward kernel", cudaFuncGetAttributes(&attributes, sm90::backward_kernel<false>)))
    return error;
  return check_cuda("backward kernel", cudaFuncGetAttributes(&attributes, sm90::backward_kernel<true>));
}
