// C ABI besides the launches: what was compiled, and tensor maps of the expert weights and their gradients.
#include "common/host.h"
#include "params.h"

#include <cstddef>
#include <cstring>

namespace mok {
namespace {

struct AbiEntry {
  const char* name;
  int64_t value;
};

#define MOK_SIZE(type) {#type, static_cast<int64_t>(sizeof(type))}
#define MOK_OFFSET(type, field) {#type "." #field, static_cast<int64_t>(offsetof(type, field))}

const AbiEntry kAbi[] = {
    MOK_SIZE(FailRecord),
    MOK_SIZE(SymmetricLayout),
    MOK_SIZE(CallParams),
    MOK_SIZE(ScheduleParams),
    MOK_SIZE(ForwardParams),
    MOK_SIZE(ReopenParams),
    MOK_SIZE(BackwardParams),
    MOK_OFFSET(FailRecord, where),
    MOK_OFFSET(SymmetricLayout, y_slots),
    MOK_OFFSET(CallParams, layout),
    MOK_OFFSET(CallParams, epoch),
    MOK_OFFSET(CallParams, rank),
    MOK_OFFSET(CallParams, layer),
    MOK_OFFSET(CallParams, max_rows),
    MOK_OFFSET(ScheduleParams, probs),
    MOK_OFFSET(ScheduleParams, probs_type),
    MOK_OFFSET(ScheduleParams, counters),
    MOK_OFFSET(ForwardParams, x),
    MOK_OFFSET(ForwardParams, w1_maps),
    MOK_OFFSET(ForwardParams, y),
    MOK_OFFSET(ForwardParams, intermediate),
    MOK_OFFSET(ForwardParams, linear_offset),
    MOK_OFFSET(ReopenParams, counters),
    MOK_OFFSET(BackwardParams, dy),
    MOK_OFFSET(BackwardParams, w1_maps),
    MOK_OFFSET(BackwardParams, partials),
    MOK_OFFSET(BackwardParams, w1_grad_maps),
    MOK_OFFSET(BackwardParams, d_probs),
    MOK_OFFSET(BackwardParams, intermediate),
    MOK_OFFSET(BackwardParams, probs_type),
};

} // namespace
} // namespace mok

// Entry `index` of the table of struct sizes and field offsets: its value, with its name in `*name`; -1 past the end.
extern "C" int64_t mok_abi(int32_t index, const char** name) {
  using namespace mok;
  if (index < 0 || index >= static_cast<int32_t>(sizeof(kAbi) / sizeof(kAbi[0]))) return -1;
  *name = kAbi[index].name;
  return kAbi[index].value;
}

// Tensor maps of `count` row-major matrices [parts * rows, columns] at `matrices` (device addresses; null ones get no
// map), written to `maps` (host, 128 bytes each), in boxes of box_rows x 128 bytes. Elements are of `bytes`: 2 bf16,
// 4 fp32. With parts = 2 the map has a third dimension (gate, up), so that boxes end at `rows`.
extern "C" const char* mok_encode_matrices(void* maps, const void* const* matrices, int32_t count, int32_t bytes,
                                           int32_t parts, int32_t rows, int32_t columns, int32_t box_rows) {
  using namespace mok;
  constexpr uint32_t kBoxBytes = 128;
  const auto c = static_cast<uint64_t>(columns), r = static_cast<uint64_t>(rows),
             element = static_cast<uint64_t>(bytes);
  for (int32_t i = 0; i < count; ++i) {
    if (matrices[i] == nullptr) continue;
    CUtensorMap map;
    const MapSpec spec = {matrices[i],
                          parts == 1 ? 2 : 3,
                          {c, r, static_cast<uint64_t>(parts)},
                          {element * c, element * c * r},
                          {kBoxBytes / static_cast<uint32_t>(bytes), static_cast<uint32_t>(box_rows), 1},
                          bytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16};
    if (const char* error = encode_map(&map, spec)) return error;
    std::memcpy(static_cast<uint8_t*>(maps) + sizeof(map) * i, &map, sizeof(map));
  }
  return nullptr;
}
