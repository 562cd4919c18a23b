// Backward: from accumulators to the gradients of gate, up and router weight, and to weight gradients.
#pragma once

#include "epilogue.cuh"

namespace mok::sm90 {

// What the gradient of the activation needs besides the accumulators, and where its results go.
struct ActivationGrad {
  SwiGlu activation;
  const uint32_t* gate_up;      // bf16 pairs [C, 2I]
  const float* row_weights;     // [C]
  float* weight_parts;          // [C, parts]: one part per column tile
  const CUtensorMap* d_gate_up; // [C, 2, I]
  const CUtensorMap* h_rows;    // [C, I]
  int32_t columns;              // I
  int32_t parts;
  int32_t part;
  int32_t first_column;
  int32_t first_row; // of the warpgroup
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
  const float sigmoid = __fdividef(1.0f, 1.0f + __expf(-g)), silu = g * sigmoid, d = d_h * weight;
  h = silu * u;
  d_gate = gate <= f.clamp ? d * u * (sigmoid + silu * (1.0f - sigmoid)) : 0.0f;
  d_up = fabsf(up) <= f.clamp ? d * silu : 0.0f;
}

__device__ __forceinline__ PairGrad pair_grad(const SwiGlu& f, uint32_t gate, uint32_t up, float d0, float d1,
                                              float weight) {
  float dg0, dg1, du0, du1, h0, h1;
  activation_grad(f, low_bf16(gate), low_bf16(up), d0, weight, dg0, du0, h0);
  activation_grad(f, high_bf16(gate), high_bf16(up), d1, weight, dg1, du1, h1);
  return {pack_bf16(dg0, dg1), pack_bf16(du0, du1), pack_bf16(weight * h0, weight * h1), fmaf(d0, h0, d1 * h1)};
}

// acc is dA [64, 256], the gradient of the activation before the router weight.
__device__ __forceinline__ void emit_activation_grad(Stager& stager, Accumulators& acc, const ActivationGrad& to) {
  const int32_t lane = threadIdx.x % 32, row = to.first_row + 16 * (threadIdx.x / 32 % 4) + lane / 4;
  float weight[2], dot[2] = {0.0f, 0.0f};
  for (int32_t half = 0; half < 2; ++half) weight[half] = __ldcg(to.row_weights + row + 8 * half);
#pragma unroll
  for (int32_t chunk = 0; chunk < kTileColumns / kChunkColumns; ++chunk) {
    const int32_t column = to.first_column + kChunkColumns * chunk;
    const bool inside = column < to.columns;
    uint32_t gate[16], up[16], h[16];
    if (inside) {
#pragma unroll
      for (int32_t i = 0; i < 16; ++i) { // column pair i / 2, row half i % 2
        const int64_t pair =
            (static_cast<int64_t>(row + 8 * (i % 2)) * 2 * to.columns + column) / 2 + 4 * (i / 2) + lane % 4;
        gate[i] = to.gate_up[pair]; // plain loads: as invariant ones they would be hoisted, and spill
        up[i] = to.gate_up[pair + to.columns / 2];
      }
#pragma unroll
      for (int32_t i = 0; i < 16; ++i) {
        const int32_t a = 32 * chunk + 2 * i;
        const PairGrad grad = pair_grad(to.activation, gate[i], up[i], acc[a], acc[a + 1], weight[i % 2]);
        gate[i] = grad.gate;
        up[i] = grad.up;
        h[i] = grad.h;
        dot[i % 2] += grad.dot;
      }
    }
    if (chunk == kTileColumns / kChunkColumns - 1) {
      // Before the last barrier of the tile, so that whoever is told of the tile sees it.
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        float sum = dot[half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (lane % 4 == 0) to.weight_parts[static_cast<int64_t>(row + 8 * half) * to.parts + to.part] = sum;
      }
    }
    const auto pairs = [](const uint32_t (&values)[16]) {
      return [&values](int32_t c, int32_t half) { return values[2 * c + half]; };
    };
    stager.put({to.d_gate_up, column, 0, to.first_row, inside}, pairs(gate));
    stager.put({to.d_gate_up, column, 1, to.first_row, inside}, pairs(up));
    stager.put({to.h_rows, column, -1, to.first_row, inside}, pairs(h));
  }
}

__device__ __forceinline__ float2 load_pair(const float* p) { return *reinterpret_cast<const float2*>(p); }
__device__ __forceinline__ float2 load_pair(const __nv_bfloat16* p) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p));
}
__device__ __forceinline__ void store_pair(float* p, float2 v) { *reinterpret_cast<float2*>(p) = v; }
__device__ __forceinline__ void store_pair(__nv_bfloat16* p, float2 v) {
  *reinterpret_cast<__nv_bfloat162*>(p) = __floats2bfloat162_rn(v.x, v.y);
}

// A warpgroup's [64, 256] of a weight gradient [rows, columns], added to what is there or in its place. Only this tile
// touches these elements, so the sum has one order. Sizes are multiples of 64.
template <class T>
__device__ __forceinline__ void emit_weight_grad(const Accumulators& acc, T* grad, int32_t rows, int32_t columns,
                                                 int32_t first_row, int32_t first_column, bool accumulate) {
  constexpr int32_t kTogether = 8; // loads in flight; registers bound it
  if (first_row >= rows) return;
  const int32_t lane = threadIdx.x % 32, row = first_row + 16 * (threadIdx.x / 32 % 4) + lane / 4;
#pragma unroll
  for (int32_t chunk = 0; chunk < kTileColumns / kChunkColumns; ++chunk) {
    const int32_t column = first_column + kChunkColumns * chunk;
    if (column >= columns) return;
    T* upper = grad + static_cast<int64_t>(row) * columns + column + lane % 4 * 2;
    T* lower = upper + static_cast<int64_t>(8) * columns;
#pragma unroll
    for (int32_t part = 0; part < 8; part += kTogether / 2) {
      float2 before[kTogether] = {};
#pragma unroll
      for (int32_t i = 0; i < kTogether && accumulate; ++i)
        before[i] = load_pair((i % 2 == 0 ? upper : lower) + 8 * (part + i / 2));
#pragma unroll
      for (int32_t i = 0; i < kTogether; ++i) {
        const int32_t a = 32 * chunk + 4 * part + 2 * i;
        store_pair((i % 2 == 0 ? upper : lower) + 8 * (part + i / 2), {before[i].x + acc[a], before[i].y + acc[a + 1]});
      }
    }
  }
}

} // namespace mok::sm90
