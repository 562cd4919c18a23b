// Backward: from accumulators to the gradients of gate, up and router weight, and to weight gradients.
#pragma once

#include "epilogue.cuh"

namespace mok::sm90 {

// What the gradient of the activation needs besides the accumulators, and where its results go.
struct ActivationGrad {
  SwiGlu activation;
  const float* row_weights;     // [64]
  SourceTable sources;          // their slots at the tokens' ranks get parts of the router weights' gradients
  const CUtensorMap* d_gate_up; // [C, 2, I]
  const CUtensorMap* h_rows;    // [C, I]
  int32_t columns;              // I
  int32_t parts;                // column tiles, each makes a part
  int32_t part;
  int32_t first_column;
  int32_t first_row; // of the warpgroup, among the rank's
  int32_t place;     // of that row in d_gate_up and h_rows
};

struct PairGrad {
  uint32_t gate, up, h; // bf16 pairs: d loss / d gate, d loss / d up, weight * h
  float dot;            // sum of dA * h
};

// d/d(gate, up) of weight * silu(min(gate, c)) * (clip(up, c) + offset), given dA = d loss / d(weight * h) for one
// element; h as forward computed it. A clamped value passes no gradient.
__device__ __forceinline__ void activation_grad(const SwiGlu& f, float gate, float up, float d_h, float weight,
                                                float& d_gate, float& d_up, float& h) {
  const float g = limit_above(gate, f.clamp), u = limit_both(up, f.clamp) + f.linear_offset;
  const float s = sigmoid(g), silu = g * s, d = d_h * weight;
  h = silu * u;
  d_gate = gate > f.clamp ? 0.0f : d * u * (s + silu * (1.0f - s)); // NaN stays
  d_up = fabsf(up) > f.clamp ? 0.0f : d * silu;
}

__device__ __forceinline__ PairGrad pair_grad(const SwiGlu& f, uint32_t gate, uint32_t up, float d0, float d1,
                                              float weight) {
  float dg0, dg1, du0, du1, h0, h1;
  activation_grad(f, low_bf16(gate), low_bf16(up), d0, weight, dg0, du0, h0);
  activation_grad(f, high_bf16(gate), high_bf16(up), d1, weight, dg1, du1, h1);
  return {pack_bf16(dg0, dg1), pack_bf16(du0, du1), pack_bf16(weight * h0, weight * h1), fmaf(d0, h0, d1 * h1)};
}

// Works on a tile's EpilogueInput where it lies, and copies from there; a stage is given back when its copies have read
// it.
struct InputStages {
  StageReader& stages;
  Stager& stager;
  int32_t previous = -1;

  // The warpgroup's box 0 or 1 of the next 64 columns, when it is there.
  __device__ __forceinline__ void wait() const { stages.wait(); }
  __device__ __forceinline__ __nv_bfloat16* box(int32_t index) const {
    return stages.s.b[stages.cursor.slot] + (2 * stages.group + index) * kBoxElements;
  }
  // Another one, empty.
  __device__ __forceinline__ __nv_bfloat16* spare_box() const {
    return stages.s.a[stages.cursor.slot] + stages.group * kBoxElements;
  }
  template <class Copy> __device__ __forceinline__ void close(Copy copy) {
    stager.copy_out(copy, [this] {
      if (previous >= 0) release_when_read<1>();
    });
    previous = stages.cursor.slot;
    stages.cursor.advance();
  }
  __device__ __forceinline__ void finish() const {
    if (stager.elected()) release_when_read<0>();
  }

private:
  template <int kLater> __device__ __forceinline__ void release_when_read() const {
    ptx::cp_async_bulk_wait_group_read(ptx::n32_t<kLater>{});
    arrive_local(&stages.s.empty[previous]);
    arrive_cluster(stages.peer_empty + previous);
  }
};

// acc is dA [64, 256], the gradient of the activation before the router weight. Gate and up are the tile's
// EpilogueInput; their gradients take their place.
template <bool kSystem>
__device__ __forceinline__ void emit_activation_grad(StageReader& stages, Stager& stager, Accumulators& acc,
                                                     const CallParams& call, const ActivationGrad& to) {
  const int32_t lane = threadIdx.x % 32, row = 16 * (threadIdx.x / 32 % 4) + lane / 4;
  float weight[2], dot[2] = {0.0f, 0.0f};
  for (int32_t half = 0; half < 2; ++half) weight[half] = __ldcg(to.row_weights + row + 8 * half);
  const RowSource source = to.sources[to.first_row + row + 8 * (lane % 2)]; // lanes 0 and 1 of a row send its dot
  InputStages input = {stages, stager};
#pragma unroll 1 // straight-line code of this length waits for instructions
  for (int32_t chunk = 0; chunk < kInputStages; ++chunk) {
    const int32_t column = to.first_column + kChunkColumns * chunk;
    const bool inside = column < to.columns;
    input.wait();
    __nv_bfloat16 *gates = input.box(0), *ups = input.box(1), *hs = input.spare_box();
#pragma unroll
    for (int32_t c = 0; c < kChunkColumns / 8; c += 2) {
      if (!inside) break;
      uint32_t gate[4], up[4], h[4]; // column group c + i / 2, row half i % 2
      ldmatrix_x4(chunk_matrices(gates, c), gate);
      ldmatrix_x4(chunk_matrices(ups, c), up);
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t a = 4 * c + 2 * i;
        const PairGrad grad = pair_grad(to.activation, gate[i], up[i], acc[a], acc[a + 1], weight[i % 2]);
        gate[i] = grad.gate;
        up[i] = grad.up;
        h[i] = grad.h;
        dot[i % 2] += grad.dot;
      }
      stmatrix_x4(chunk_matrices(gates, c), gate[0], gate[1], gate[2], gate[3]);
      stmatrix_x4(chunk_matrices(ups, c), up[0], up[1], up[2], up[3]);
      stmatrix_x4(chunk_matrices(hs, c), h[0], h[1], h[2], h[3]);
    }
    input.close([&] {
      if (!inside) return;
      const int32_t at_gate[3] = {column, 0, to.place}, at_up[3] = {column, 1, to.place}, at_h[2] = {column, to.place};
      store_box(to.d_gate_up, at_gate, gates);
      store_box(to.d_gate_up, at_up, ups);
      store_box(to.h_rows, at_h, hs);
    });
    move_down<32>(acc);
  }
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    dot[half] += __shfl_xor_sync(~0u, dot[half], 1);
    dot[half] += __shfl_xor_sync(~0u, dot[half], 2);
  }
  if (lane % 4 < 2 && source.rank >= 0) {
    uint8_t* peer = kSystem ? call.peers[source.rank] : call.local;
    float* parts = at<float>(peer, call.layout.d_weight_parts) + static_cast<int64_t>(source.slot) * to.parts;
    parts[to.part] = lane % 2 == 0 ? dot[0] : dot[1];
  }
  sync_threads<128>(kGroupBarrier + stager.group); // the one who reports answers for all
  input.finish();
  stager.unreported = true;
}

// A tile of a weight gradient [lines, columns] in bf16 or fp32. Sizes are multiples of 64, only this tile touches these
// elements, and what is added to them is the whole sum, so the sum has one order.
struct WeightGradTile {
  int32_t lines;
  int32_t columns;
  int32_t first_line; // of the warpgroup
  int32_t first_column;

  __device__ __forceinline__ bool outside() const { return first_line >= lines; }
  template <class T> __device__ __forceinline__ T* line(T* grad, int32_t i) const {
    return grad + static_cast<int64_t>(first_line + i) * columns + first_column;
  }
};

__device__ __forceinline__ void emit_weight_grad(Stager& stager, Accumulators& acc, __nv_bfloat16* grad,
                                                 const WeightGradTile& tile) {
  emit_rows(stager, acc, tile.columns - tile.first_column, [&](int32_t i) {
    return reinterpret_cast<uint4*>(tile.line(grad, 16 * i + static_cast<int32_t>(threadIdx.x % 128 / 8)));
  });
}

// fp32 by the copy engine, which adds in L2; subnormal numbers may then become 0. `map` of the gradient, in boxes of 64
// lines by 128 bytes.
__device__ __forceinline__ void emit_weight_grad(Stager& stager, const Accumulators& acc, const CUtensorMap* map,
                                                 const WeightGradTile& tile, bool adds) {
  constexpr int32_t kColumns = 32;
  const int32_t lane = threadIdx.x % 32, row = 16 * (threadIdx.x / 32 % 4) + lane / 4, odd = row % 2;
  // Swizzled: 16 bytes number u of row r lie at number u ^ r % 8. This lane's pair of column group j (of 8 columns) is
  // in 16 bytes number 2 j + lane % 4 / 2. Odd rows take groups 2 further, so that no two rows meet in a bank.
  const int32_t pair = 128 * row + ((lane % 4 / 2 ^ row % 8 ^ 4 * odd) << 4) + 8 * (lane % 2);
#pragma unroll
  for (int32_t chunk = 0; chunk < kTileColumns / kColumns; ++chunk) {
    if (tile.first_column + kColumns * chunk >= tile.columns) break;
    auto* box = reinterpret_cast<uint8_t*>(stager.open());
#pragma unroll
    for (int32_t j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t a = 16 * chunk + 4 * j + 2 * half, further = 16 * chunk + 4 * (j ^ 2) + 2 * half;
        const float2 values = {odd != 0 ? acc[further] : acc[a], odd != 0 ? acc[further + 1] : acc[a + 1]};
        *reinterpret_cast<float2*>(box + (pair ^ 32 * j) + 8 * 128 * half) = values;
      }
    stager.close([&] {
      const int32_t at[2] = {tile.first_column + kColumns * chunk, tile.first_line};
      if (adds)
        ptx::cp_reduce_async_bulk_tensor(ptx::space_global, ptx::space_shared, ptx::op_add, map, at, box);
      else
        store_box(map, at, box);
    });
  }
}

// Added to bf16: fp32 sum of what is there and the accumulator, one rounding.
__device__ __forceinline__ void add_weight_grad(const Accumulators& acc, __nv_bfloat16* grad,
                                                const WeightGradTile& tile) {
  constexpr int32_t kTogether = 8; // loads in flight; registers bound it
  const int32_t lane = threadIdx.x % 32;
  __nv_bfloat16* upper = tile.line(grad, 16 * (threadIdx.x / 32 % 4) + lane / 4) + lane % 4 * 2;
  __nv_bfloat16* lower = upper + static_cast<int64_t>(8) * tile.columns;
#pragma unroll
  for (int32_t chunk = 0; chunk < kTileColumns / kChunkColumns; ++chunk) {
    if (tile.first_column + kChunkColumns * chunk >= tile.columns) break;
#pragma unroll
    for (int32_t part = 0; part < 8; part += kTogether / 2) {
      const int32_t first = kChunkColumns * chunk + 8 * part;
      uint32_t before[kTogether];
#pragma unroll
      for (int32_t i = 0; i < kTogether; ++i)
        before[i] = *reinterpret_cast<const uint32_t*>((i % 2 == 0 ? upper : lower) + first + 8 * (i / 2));
#pragma unroll
      for (int32_t i = 0; i < kTogether; ++i) {
        const int32_t a = 32 * chunk + 4 * part + 2 * i;
        *reinterpret_cast<uint32_t*>((i % 2 == 0 ? upper : lower) + first + 8 * (i / 2)) =
            pack_bf16(low_bf16(before[i]) + acc[a], high_bf16(before[i]) + acc[a + 1]);
      }
    }
  }
}

// Accumulators of one warpgroup as they are, to go on with another piece of the expert: float4 [32][128 threads].
__device__ __forceinline__ void store_partial(const Accumulators& acc, float4* partial) {
#pragma unroll
  for (int32_t i = 0; i < 32; ++i)
    partial[128 * i + threadIdx.x % 128] = {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
}
__device__ __forceinline__ void load_partial(Accumulators& acc, const float4* partial) {
#pragma unroll
  for (int32_t i = 0; i < 32; ++i) {
    const float4 v = __ldcg(partial + 128 * i + threadIdx.x % 128);
    acc[4 * i] = v.x, acc[4 * i + 1] = v.y, acc[4 * i + 2] = v.z, acc[4 * i + 3] = v.w;
  }
}

} // namespace mok::sm90
