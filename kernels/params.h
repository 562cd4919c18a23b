// Plain structs that cross the C ABI: one per launch, every pointer with its shape beside it.
// mok_megatron/backends/abi.py mirrors them field by field; loading compares sizes and offsets.
//
// T tokens of this rank, K experts per token at most, H hidden, I expert intermediate, E experts in all, W ranks,
// e = E / W local experts, C rows of the ring, R rows of a rank at most (any routing), B = R / kBlockRows row blocks,
// slot = t * K + k.
#pragma once

#include <cstdint>

namespace mok {

inline constexpr int kBlockRows = 128;       // tile height: each expert's rows are padded to a multiple of it
inline constexpr int kFc1Columns = 128;      // columns of h per FC1 tile: as many gate and as many up columns
inline constexpr int kFc2Columns = 256;      // output columns per FC2 tile
inline constexpr int kTokensPerBlock = 64;   // tokens per thread block of the schedule kernels
inline constexpr int kMaxTopK = 16;          // one lane per slot of a token
inline constexpr int kMaxLocalExperts = 512; // the tile table lives in shared memory
inline constexpr int kMaxExperts = 1024;     // one thread per expert in the layout kernel
static_assert(kMaxTopK <= 32);

// Where a routed row comes from; rank -1 marks padding.
struct RowSource {
  int32_t rank;
  int32_t slot;
};

// Why a kernel stopped. Lives in host memory that the device can write; `code` is written last.
struct FailRecord {
  int32_t code;  // FailCode
  int32_t phase; // Phase
  int32_t rank;
  int32_t peer; // rank waited for, or -1
  int32_t layer;
  uint32_t want;
  uint32_t seen;
  int32_t where; // row block, token or expert, by phase
};

enum class FailCode : int32_t { kNone = 0, kTimeout = 1, kPeerFailed = 2, kTooManyRoutes = 3 };

enum class Phase : int32_t {
  kRouting = 0,
  kOpen = 1,
  kTables = 2,
  kFc1 = 3,
  kFc2 = 4,
  kCombine = 5,
  kWgrad = 6,
  kRing = 7,
};

// Byte offsets of the regions that peers read or write, the same on every rank.
struct SymmetricLayout {
  int64_t opened;        // uint32 [W] calls that rank w has opened, with its counts or `replays` (written by w)
  int64_t tables_ready;  // uint32 [W] epoch up to which row_source entries of rank w are here (written by w)
  int64_t abort;         // uint32 rank + 1 of a rank that failed, else 0
  int64_t replays;       // uint32 [W] whether rank w needs x again in this backward (written by w)
  int64_t counts;        // int32 [2][W][E] routes of rank w per expert, by epoch parity (row w written by w)
  int64_t fc2_done;      // uint32 [2][B] finished FC2 column tiles per row block, by epoch parity
  int64_t row_source;    // RowSource [R] (written by the source ranks, padding by this one)
  int64_t slot_dst_rank; // int32 [T_max, K] for peers; unused when W = 1
  int64_t slot_dst_row;  // int32 [T_max, K] likewise
  int64_t weights;       // fp32 [T_max, K] router weights, for backward; unused when W = 1
  int64_t
      d_weight_parts; // fp32 [T_max, K, ceil(I / 256)] parts of each router weight's gradient (by the experts' ranks)
  int64_t y_slots;    // bf16 [T_max, K, H] expert outputs, in backward their dX (written by the experts' ranks)
  int64_t x;          // bf16 [T_max, H] copy of the layer input, in backward of dY; unused when W = 1
  int64_t replay_x;   // bf16 [T_max, H] the layer input again, in backward where a rank replays; unused when W = 1
  int64_t bytes;
};

// What all launches of a call share.
struct CallParams {
  uint8_t* const* peers; // [W] device array: base of each rank's symmetric workspace, own one included
  uint8_t* local;        // base of this rank's symmetric workspace
  SymmetricLayout layout;
  uint32_t* epoch;  // [3] calls opened so far, advanced on the device; 1 once a thread has failed; blocks done opening
  FailRecord* fail; // [1] host memory
  int64_t spin_limit; // nanoseconds a wait may take
  int32_t rank;
  int32_t world;    // W
  int32_t tokens;   // T
  int32_t top_k;    // K
  int32_t experts;  // E
  int32_t capacity; // C, a multiple of kBlockRows
  int32_t max_rows; // R, a multiple of kBlockRows
  int32_t hidden;   // H
  int32_t layer;
  int32_t unused;
};

enum class ProbsType : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat64 = 2 };

// Routing -> tables: three launches (route, layout, assign).
struct ScheduleParams {
  CallParams call;
  const void* probs;          // [T, E] fp32, bf16 or fp64 (probs_type), row stride probs_stride elements
  const uint8_t* routing_map; // [T, E] bool, contiguous
  const void* x;              // bf16 [T, H]; copied to the symmetric workspace when W > 1
  int64_t probs_stride;
  int32_t probs_type; // ProbsType
  int32_t unused;
  int32_t* out_experts;          // [T, K] ascending, -1 absent
  float* out_weights;            // [T, K]
  int32_t* out_slot_dst_rank;    // [T, K]
  int32_t* out_slot_dst_row;     // [T, K]
  int32_t* out_expert_first_row; // [e + 1]
  uint32_t* tile_table;          // [e + 1] packed row blocks before each local expert (tile_order.h)
  int32_t* block_counts;         // [ceil(T / kTokensPerBlock), E] scratch: counts, then their prefix sums
  int32_t* route_base;           // [E] scratch: row of this rank's first route of an expert
  int32_t* token_order;          // [T] tokens by their last local expert: the order of combine
  int32_t* last_counts;          // [e] scratch: tokens by last local expert; zero between calls
  int32_t* last_next;            // [e] scratch: where such tokens go in token_order
  uint32_t* counters;            // [kCounterWords + kForwardCounters * B] zeroed here
};

// Counters of a call: tickets, then arrays of one word per row block; backward has more of these.
enum CounterWord : int { kTileTicket = 0, kRowTicket = 32, kTokenTicket = 64, kAssignDone = 96, kCounterWords = 128 };
enum BlockCounter : int {
  kRowsArrived = 0, // rows of the block
  kFc1Done = 1,     // column tiles
  kForwardCounters = 2,
  kRebuilt = 2,     // column tiles
  kSegmentFc1 = 3,  // FC1 tiles of the segment that begins here
  kSegmentDone = 4, // arrivals of the segment that begins here (Backward::arrivals_of)
  kBackwardCounters = 5,
};

// The forward megakernel. Tensor maps are encoded by the launch function.
struct ForwardParams {
  CallParams call;
  const void* x;                   // bf16 [T, H], read in place; peers pull the copy of mok_build_schedule
  const float* weights;            // [T, K]
  const int32_t* slot_dst_rank;    // [T, K]
  const int32_t* slot_dst_row;     // [T, K]
  const int32_t* expert_first_row; // [e + 1]
  const int32_t* token_order;      // [T]
  const uint32_t* tile_table;      // [e + 1]
  uint32_t* counters;              // [kCounterWords + kForwardCounters * B]
  const void* w1_maps;             // CUtensorMap [e]: weights [2I, H] of each local expert
  const void* w2_maps;             // CUtensorMap [e]: weights [H, I]
  void* x_rows;                    // bf16 [C, H] of the first C rows
  void* x_ring;                    // bf16 [C, H] of the others; may be x_rows where these are not kept
  void* h;                         // bf16 [C, I]
  void* gate_up;                   // bf16 [C, 2I] of the first C rows, or null: not kept
  int32_t* row_src_rank;           // [R] copied from row_source, for backward
  int32_t* row_src_slot;           // [R]
  void* y;                         // bf16 [T, H]
  int32_t intermediate;            // I
  int32_t lag;                     // experts between FC1 and FC2 (tile_order.h)
  int32_t sms;                     // SMs this launch may use
  int32_t comm_sms;                // SMs whose communication warps move rows
  float clamp;                     // SwiGLU limit, +inf when there is none
  float linear_offset;             // added to up
};

// Opens a backward call: one launch before the megakernel.
struct ReopenParams {
  CallParams call;
  const void* dy;                  // bf16 [T, H] that peers will pull, copied when W > 1
  const void* x;                   // bf16 [T, H] likewise, when a rank replays
  const float* weights;            // [T, K] published when W > 1
  const int32_t* slot_dst_rank;    // [T, K] published when W > 1
  const int32_t* slot_dst_row;     // [T, K]
  const int32_t* expert_first_row; // [e + 1]
  uint32_t* tile_table;            // [e + 1] rebuilt here
  uint32_t* counters;              // [kCounterWords + kBackwardCounters * B] zeroed here
  int32_t sms;                     // SMs this launch may use
  int32_t kept;                    // forward kept gate, up and x of the first C rows
};

// Element type of a call's weight gradients.
enum class GradType : int32_t { kFloat32 = 0, kBfloat16 = 1 };

// The backward megakernel; mok_reopen has opened its call. Where all rows were kept, the scratch holds all of them.
// Otherwise rows are replayed: they go through rings of max(1, C / kBlockRows / 2) row blocks in the same scratch, x
// beside dY in dy_rows, and gate and up, rebuilt, in the place of their gradients.
struct BackwardParams {
  CallParams call;
  const void* dy;                  // bf16 [T, H], read in place; peers pull the copy of mok_reopen
  const void* x;                   // bf16 [T, H] likewise
  const float* weights;            // [T, K]
  const int32_t* slot_dst_rank;    // [T, K]
  const int32_t* slot_dst_row;     // [T, K]
  const int32_t* row_src_rank;     // [R]
  const int32_t* row_src_slot;     // [R]
  const int32_t* expert_first_row; // [e + 1]
  const uint32_t* tile_table;      // [e + 1]
  uint32_t* counters;              // [kCounterWords + kBackwardCounters * B]
  const void* w1_maps;             // CUtensorMap [e]: weights [2I, H], boxes of 64 x 64
  const void* w2_maps;             // CUtensorMap [e]: weights [H, I]
  const void* w1_forward_maps;     // CUtensorMap [e] as in ForwardParams, to rebuild gate and up
  const void* x_rows;              // bf16 [C, H] as forward kept them, or null; not without gate_up
  const void* gate_up;             // bf16 [C, 2I] likewise
  void* dy_rows;                   // bf16 [max(C, 2 kBlockRows), H] scratch
  void* d_gate_up;                 // bf16 [C, 2I] scratch
  void* h_rows;                    // bf16 [C, I] scratch: activation times router weight
  float* row_weights;              // [C] scratch
  float* partials;                 // [wgrad tiles of an expert, 2 * kBlockRows, 256] scratch: sums over pieces of it
  void* const* w1_grads;           // [e] addresses of [2I, H] in grad_type, null where frozen; null: all are
  void* const* w2_grads;           // [e] addresses of [H, I]
  const void* w1_grad_maps;        // CUtensorMap [e] of the same in boxes of 64 x 32; only where fp32
  const void* w2_grad_maps;        // CUtensorMap [e]
  void* dx;                        // bf16 [T, H], where wanted
  const int32_t* experts;          // [T, K]
  void* d_probs;                   // [T, E] in probs_type, 0 off-route, or null: not wanted
  int32_t intermediate;            // I
  int32_t lag;
  int32_t sms;
  int32_t comm_sms;
  float clamp;
  float linear_offset;
  int32_t grad_type;  // GradType of every weight gradient of the call
  int32_t accumulate; // add to what is there
  int32_t wants_dx;   // the same on every rank, also where T is 0
  int32_t probs_type; // ProbsType
};

} // namespace mok
