// Weighted sum of a token's expert outputs, pulled from the ranks that computed them.
#pragma once

#include "../common/sync.cuh"

namespace mok {

__device__ __forceinline__ void add_scaled(float (&sum)[8], uint4 packed, float weight) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) { // bf16 -> fp32 is a shift
    sum[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xFFFF0000u), sum[2 * i + 1]);
  }
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// y[t] = sum over k, ascending, of weight[t, k] * row of slot (t, k): fp32, one rounding. A warp takes whole tokens
// from a ticket, those first whose experts come first; kInFlight rows are loaded at once.
template <bool kSystem>
__device__ __forceinline__ void combine_tokens(const ForwardParams& p, uint32_t* tickets, uint32_t epoch) {
  constexpr int32_t kInFlight = 8;
  const CallParams& call = p.call;
  const int32_t lane = threadIdx.x % 32, vectors = call.hidden / 8;
  const int64_t row_blocks = call.capacity / kBlockRows;
  const uint32_t columns = (call.hidden + kFc2Columns - 1) / kFc2Columns;
  for (;;) {
    int32_t ticket = 0;
    if (lane == 0) ticket = static_cast<int32_t>(atomicAdd(tickets + kTokenTicket, 1));
    ticket = __shfl_sync(~0u, ticket, 0);
    if (ticket >= call.tokens) return;
    const int32_t token = p.token_order[ticket];
    const uint4* source = nullptr;
    float weight = 0.0f;
    if (lane < call.top_k) {
      const int64_t slot = static_cast<int64_t>(token) * call.top_k + lane;
      const int32_t rank = p.slot_dst_rank[slot], row = p.slot_dst_row[slot];
      if (rank >= 0) {
        uint8_t* peer = call.peers[rank];
        const uint32_t* done = at<const uint32_t>(peer, call.layout.fc2_done) + (epoch & 1) * row_blocks;
        wait_count<kSystem>(call, done + row / kBlockRows, columns, Phase::kCombine, rank, row / kBlockRows);
        source = at<const uint4>(peer, call.layout.y_rows) + static_cast<int64_t>(row) * vectors;
        weight = p.weights[slot];
      }
    }
    __syncwarp();
    const int32_t routes = __popc(__ballot_sync(~0u, source != nullptr)); // absent slots are last
    for (int32_t first = 0; first < vectors; first += 32) {
      const int32_t index = first + lane;
      float sum[8] = {};
      for (int32_t k0 = 0; k0 < routes; k0 += kInFlight) {
        uint4 v[kInFlight];
#pragma unroll
        for (int32_t i = 0; i < kInFlight; ++i) {
          const auto* from =
              reinterpret_cast<const uint4*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(source), k0 + i));
          v[i] = k0 + i < routes && index < vectors ? load_stream(from + index) : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (int32_t i = 0; i < kInFlight; ++i) {
          const float w = __shfl_sync(~0u, weight, k0 + i);
          if (k0 + i < routes) add_scaled(sum, v[i], w);
        }
      }
      if (index < vectors)
        static_cast<uint4*>(p.y)[static_cast<int64_t>(token) * vectors + index] = {
            pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7])};
    }
  }
}

} // namespace mok
