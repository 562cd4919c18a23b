// From accumulators to chunks in shared memory, and from there to global memory: by the copy engine where the rows lie
// together, by the threads where each goes its own way.
#pragma once

#include "../sm90/mainloop.cuh"
#include "combine.cuh"
#include "dispatch.cuh"

namespace mok::sm90 {

// Limits that keep NaN, which fminf and fmaxf would turn into a number.
__device__ __forceinline__ float limit_above(float value, float limit) { return smaller_or_nan(value, limit); }
__device__ __forceinline__ float limit_both(float value, float limit) {
  return smaller_or_nan(larger_or_nan(value, -limit), limit);
}

__device__ __forceinline__ float sigmoid(float x) {
  constexpr float kLog2E = 1.44269504f;
  return reciprocal_approximately(1.0f + exp2_approximately(-kLog2E * x));
}

// SwiGLU of already rounded gate and up: what backward has, too, whether they were kept or rebuilt.
struct SwiGlu {
  float clamp;
  float linear_offset;
  __device__ __forceinline__ float operator()(float gate, float up) const {
    gate = limit_above(gate, clamp);
    up = limit_both(up, clamp) + linear_offset;
    return gate * sigmoid(gate) * up;
  }
};

// The first kCount registers are done with: the others take their place, so that a loop over them need not be unrolled.
template <int kCount, class T, int kSize> __device__ __forceinline__ void move_down(T (&registers)[kSize]) {
#pragma unroll
  for (int32_t i = 0; i + kCount < kSize; ++i) registers[i] = registers[i + kCount];
}

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// This lane's row address in a warpgroup's swizzled [64, 64] chunk, of the four 8 x 8 matrices that make column groups
// c and c + 1 (c even) of the warp's 16 rows: rows 0..7 of c, 8..15 of c, then the same of c + 1. In each, a thread has
// columns t % 4 * 2 and 1 further of row t / 4.
__device__ __forceinline__ void* chunk_matrices(__nv_bfloat16* chunk, int32_t c) {
  const int32_t lane = threadIdx.x % 32, row = 16 * (threadIdx.x / 32 % 4) + lane % 16;
  return reinterpret_cast<uint8_t*>(chunk) + row * 128 + (((c + lane / 16) ^ row % 8) << 4);
}

// A warpgroup's [64, 64] chunk; pair(c, half) gives columns 8 c + t % 4 * 2 and 1 further of row t / 4 (+ 8 for half
// 1).
template <class Pair> __device__ __forceinline__ void stage_chunk(__nv_bfloat16* chunk, Pair pair) {
#pragma unroll
  for (int32_t c = 0; c < kChunkColumns / 8; c += 2)
    stmatrix_x4(chunk_matrices(chunk, c), pair(c, 0), pair(c, 1), pair(c + 1, 0), pair(c + 1, 1));
}

// A chunk's place: a plain matrix (part -1) or the gate (0) or up (1) half of one.
struct ChunkTarget {
  const CUtensorMap* map;
  int32_t first_column;
  int32_t part;
  int32_t first_row;
  bool inside; // false: past the last column, nothing to store
};

template <int kRank>
__device__ __forceinline__ void store_box(const CUtensorMap* map, const int32_t (&at)[kRank], const void* box) {
  ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, map, at, box);
}

inline constexpr int kScatterRows = 4; // rows per thread and chunk of 64

// Writes one warpgroup's chunks through a ring of buffers. `put`, and `open` and `close`: one thread issues a copy.
// `scatter`: the threads store whole lines, after begin_scatter. That all has arrived is reported a little later, out
// of the next tile's main loop, so that nobody waits for it.
struct Stager {
  SharedStorage& s;
  int32_t group;
  int32_t buffer = 0;
  bool unreported = false;
  int32_t turn = 0; // of tile_written

  __device__ __forceinline__ bool elected() const { return threadIdx.x % 128 == 0; }

  // A buffer that is free again.
  __device__ __forceinline__ __nv_bfloat16* open() const {
    if (elected()) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<kChunkBuffers - 1>{});
    sync_threads<128>(kGroupBarrier + group);
    return s.staging[group][buffer];
  }
  template <class Copy> __device__ __forceinline__ void close(Copy copy) {
    copy_out(copy, [] {});
    buffer = (buffer + 1) % kChunkBuffers;
  }
  // All have written what copy() is to copy; one thread calls it, and `then`.
  template <class Copy, class Then> __device__ __forceinline__ void copy_out(Copy copy, Then then) const {
    ptx::fence_proxy_async(ptx::space_shared);
    sync_threads<128>(kGroupBarrier + group);
    if (elected()) {
      copy();
      ptx::cp_async_bulk_commit_group();
      then();
    }
  }

  template <class Pair> __device__ __forceinline__ void put(const ChunkTarget& to, Pair pair) {
    __nv_bfloat16* chunk = open();
    stage_chunk(chunk, pair);
    close([&] {
      if (!to.inside) return;
      if (to.part >= 0) {
        const int32_t at[3] = {to.first_column, to.part, to.first_row};
        store_box(to.map, at, chunk);
      } else {
        const int32_t at[2] = {to.first_column, to.first_row};
        store_box(to.map, at, chunk);
      }
    });
    unreported = true;
  }

  __device__ __forceinline__ void begin_scatter() const {
    if (elected()) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
    sync_threads<128>(kGroupBarrier + group);
  }

  // stage(buffer) fills it by all threads; then store(i, value) is called for rows 16 i + thread / 8 of the buffer, 128
  // bytes each, with the 16 bytes that are number thread % 8 before and number `unit` after swizzling.
  template <class Stage, class Store> __device__ __forceinline__ void scatter(int32_t unit, Stage stage, Store store) {
    __nv_bfloat16* chunk = s.staging[group][buffer];
    stage(chunk); // the barrier of the other buffer came after everybody's loads from this one
    sync_threads<128>(kGroupBarrier + group);
    const uint4* from = reinterpret_cast<const uint4*>(chunk) + threadIdx.x % 128 / 8 * 8 + unit;
#pragma unroll
    for (int32_t i = 0; i < kScatterRows; ++i) store(i, from[16 * 8 * i]);
    buffer = (buffer + 1) % kChunkBuffers;
  }

  // Only of tiles that the counting warp waits for; `put` is always of such.
  __device__ __forceinline__ void end_scatter() {
    sync_threads<128>(kGroupBarrier + group); // the one who reports answers for all
    unreported = true;
  }

  // Tells the counting warp that the last tile is written.
  __device__ __forceinline__ void report() {
    if (!unreported) return;
    if (elected()) {
      ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{}); // written, not just read
      arrive_local(&s.tile_written[turn][group]);
    }
    static_assert(kReports == 2);
    turn ^= 1;
    unreported = false;
  }

  // Nothing more comes; the shared memory may be given up.
  __device__ __forceinline__ void finish() {
    report();
    if (elected()) ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
  }
};

// Maps and sizes of what a tile writes.
struct Fc1Target {
  const CUtensorMap* gate_up; // null: not kept
  const CUtensorMap* h;       // null: not wanted
  int32_t columns;            // I
  int32_t first_column;
  int32_t first_row;
};

__device__ __forceinline__ void emit_fc1(Stager& stager, Accumulators& acc, const SwiGlu& activation,
                                         const Fc1Target& to) {
  static_assert(kFc1Columns == kTileColumns / 2 && kFc1Columns == kWeightRows, "a tile is as many gate as up columns");
  uint32_t gate[32], up[32]; // rounded; the accumulators are dead from here on
#pragma unroll
  for (int32_t i = 0; i < 32; ++i) {
    gate[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
    up[i] = pack_bf16(acc[64 + 2 * i], acc[64 + 2 * i + 1]);
  }
#pragma unroll 1 // straight-line code of this length waits for instructions
  for (int32_t chunk = 0; chunk < kFc1Columns / kChunkColumns; ++chunk) {
    const int32_t column = to.first_column + kChunkColumns * chunk;
    const bool inside = column < to.columns;
    if (to.gate_up != nullptr) {
      stager.put({to.gate_up, column, 0, to.first_row, inside},
                 [&](int32_t c, int32_t half) { return gate[2 * c + half]; });
      stager.put({to.gate_up, column, 1, to.first_row, inside},
                 [&](int32_t c, int32_t half) { return up[2 * c + half]; });
    }
    if (to.h != nullptr)
      stager.put({to.h, column, -1, to.first_row, inside}, [&](int32_t c, int32_t half) {
        const uint32_t g = gate[2 * c + half], u = up[2 * c + half];
        return pack_bf16(activation(low_bf16(g), low_bf16(u)), activation(high_bf16(g), high_bf16(u)));
      });
    move_down<16>(gate);
    move_down<16>(up);
  }
}

// A warpgroup's [64, 256] as bf16, each row to its own place: `row_start(i)`, for rows 16 i + thread / 8, is the
// address of the row's first column here, or null. `columns` counts those that exist, a multiple of 64.
template <class RowStart>
__device__ __forceinline__ void emit_rows(Stager& stager, Accumulators& acc, int32_t columns, RowStart row_start) {
  uint4* to[kScatterRows];
#pragma unroll
  for (int32_t i = 0; i < kScatterRows; ++i) {
    to[i] = row_start(i);
    if (to[i] != nullptr) to[i] += threadIdx.x % 8;
  }
  stager.begin_scatter();
#pragma unroll
  for (int32_t chunk = 0; chunk < kTileColumns / kChunkColumns; ++chunk) {
    if (kChunkColumns * chunk >= columns) break;
    stager.scatter(
        threadIdx.x % 8 ^ threadIdx.x / 8 % 8, // as stage_chunk swizzles
        [&](__nv_bfloat16* staging) {
          stage_chunk(staging, [&](int32_t c, int32_t half) {
            const int32_t i = 32 * chunk + 4 * c + 2 * half;
            return pack_bf16(acc[i], acc[i + 1]);
          });
        },
        [&](int32_t i, uint4 value) {
          if (to[i] != nullptr) to[i][kChunkColumns / 8 * chunk] = value;
        });
  }
}

// Where a warpgroup's rows go: each to its token's slot at the token's rank. Looked up before the tile is multiplied,
// so that nobody waits for it afterwards.
struct SlotRows {
  RowSource source[kScatterRows]; // of rows 16 i + thread / 8

  __device__ __forceinline__ void look_up(const SourceTable& sources, int32_t first_row) {
#pragma unroll
    for (int32_t i = 0; i < kScatterRows; ++i)
      source[i] = sources[first_row + 16 * i + static_cast<int32_t>(threadIdx.x % 128 / 8)];
  }
};

// Expert outputs, in backward dX.
template <bool kSystem>
__device__ __forceinline__ void emit_slots(Stager& stager, Accumulators& acc, const CallParams& call,
                                           const SlotRows& rows, int32_t first_column) {
  emit_rows(stager, acc, call.hidden - first_column, [&](int32_t i) -> uint4* {
    const RowSource to = rows.source[i];
    if (to.rank < 0) return nullptr;
    uint8_t* peer = kSystem ? call.peers[to.rank] : call.local;
    return at<uint4>(peer, call.layout.y_slots) + (static_cast<int64_t>(to.slot) * call.hidden + first_column) / 8;
  });
  stager.end_scatter();
}

} // namespace mok::sm90
