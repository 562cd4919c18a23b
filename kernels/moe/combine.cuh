// Sum of a token's rows over its routes. The experts' ranks push a route's row into the token's own slot, so no routing
// needs more room than T K rows here, and nobody's progress waits for a sum.
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

// What is summed: rows of this rank's y_slots, complete when fc2_done of the row block at the expert's rank says
// `columns`.
struct TokenSums {
  const float* weights;         // [T, K] factors, or null: 1
  const int32_t* slot_dst_rank; // [T, K]
  const int32_t* slot_dst_row;  // [T, K]
  const int32_t* token_order;   // [T], or null: by number
  void* out;                    // bf16 [T, H], or null: only slot sums are wanted
  uint32_t columns;
};

// No further result per slot.
struct NoSlotSums {
  __device__ __forceinline__ void begin(int32_t /*token*/) const {}
  __device__ __forceinline__ void add(int32_t /*token*/, int64_t /*slot*/) const {}
};

// out[t] = sum over k, ascending, of weight[t, k] * row of slot (t, k): fp32, one rounding. A warp takes whole tokens
// from a ticket, those first whose experts come first; `sums.begin(token)` is called by all lanes, then
// `sums.add(token, slot)` by one lane per route, when its row is complete.
template <bool kSystem, class SlotSums>
__device__ __forceinline__ void combine_tokens(const CallParams& call, const TokenSums& t, uint32_t* tickets,
                                               uint32_t epoch, const SlotSums& sums) {
  constexpr int32_t kInFlight = 8;
  const int32_t lane = threadIdx.x % 32, vectors = call.hidden / 8;
  const int64_t row_blocks = call.max_rows / kBlockRows;
  const uint4* slots = at<const uint4>(call.local, call.layout.y_slots);
  for (;;) {
    int32_t ticket = 0;
    if (lane == 0) ticket = static_cast<int32_t>(atomicAdd(tickets + kTokenTicket, 1));
    ticket = __shfl_sync(~0u, ticket, 0);
    if (ticket >= call.tokens) return;
    const int32_t token = t.token_order == nullptr ? ticket : t.token_order[ticket];
    sums.begin(token);
    __syncwarp();
    const uint4* source = nullptr;
    float weight = 0.0f;
    if (lane < call.top_k) {
      const int64_t slot = static_cast<int64_t>(token) * call.top_k + lane;
      const int32_t rank = t.slot_dst_rank[slot], row = t.slot_dst_row[slot];
      if (rank >= 0) {
        const uint32_t* done = at<const uint32_t>(call.peers[rank], call.layout.fc2_done) + (epoch & 1) * row_blocks;
        wait_count<kSystem>(call, done + row / kBlockRows, t.columns, Phase::kCombine, rank, row / kBlockRows);
        source = slots + slot * vectors;
        weight = t.weights == nullptr ? 1.0f : t.weights[slot];
        sums.add(token, slot);
      }
    }
    __syncwarp();
    if (t.out == nullptr) continue;
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
        static_cast<uint4*>(t.out)[static_cast<int64_t>(token) * vectors + index] = {
            pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7])};
    }
  }
}

} // namespace mok
