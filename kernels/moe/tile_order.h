// Ticket -> tile: host and device arithmetic, tested on the CPU against mok_megatron/tile_order.py.
//
// A ticket is the work of one 2-CTA cluster: a tall tile covers two row blocks at one column (the CTAs share the
// weights), a wide one the odd last row block of an expert at two columns (they share the rows). Ticket order is
// FC1(s), FC2(s - lag) for s = 0 .. e + lag - 1, so every tile waits only for rows or for earlier tickets.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MOK_HD __host__ __device__ inline
#else
#define MOK_HD inline
#endif

namespace mok {

inline constexpr int kBandPairs = 8; // row-block pairs walked together down a column
inline constexpr int kOddBits = 10;  // low bits of a table entry: experts with an odd number of row blocks
inline constexpr uint32_t kOddMask = (1u << kOddBits) - 1;

// Forward: FC1 and FC2. Backward: their data gradients in the same order (of FC2 first), then the weight gradients.
enum class TilePhase : int32_t { kFc1 = 0, kFc2 = 1, kStop = 2, kWgrad2 = 3, kWgrad1 = 4 };

struct ClusterTile {
  TilePhase phase;
  int32_t expert;
  int32_t row_block; // of the whole rank
  int32_t column;
  bool wide;
};

// Table entry of expert i: pairs and odd blocks of experts before i.
MOK_HD uint32_t pack_blocks(uint32_t pairs, uint32_t odds) { return pairs << kOddBits | odds; }
MOK_HD int32_t pairs_before(uint32_t entry) { return static_cast<int32_t>(entry >> kOddBits); }
MOK_HD int32_t odds_before(uint32_t entry) { return static_cast<int32_t>(entry & kOddMask); }
MOK_HD int32_t blocks_before(uint32_t entry) { return 2 * pairs_before(entry) + odds_before(entry); }

// Tickets of one phase of all experts before a table entry.
MOK_HD int32_t tickets_before(uint32_t entry, int32_t columns) {
  return pairs_before(entry) * columns + odds_before(entry) * ((columns + 1) / 2);
}

struct BandedTile {
  int32_t pair;
  int32_t column;
};

// Tile `index` of a matrix of row-block pairs and columns: bands of kBandPairs, column by column inside a band.
MOK_HD BandedTile banded_tile(int32_t pairs, int32_t columns, int32_t index) {
  const int32_t band = index / (kBandPairs * columns), within = index - band * kBandPairs * columns;
  const int32_t left = pairs - band * kBandPairs, height = left < kBandPairs ? left : kBandPairs;
  const int32_t column = within / height;
  return {band * kBandPairs + within - column * height, column};
}

struct TileOrder {
  const uint32_t* table; // [experts + 1]
  int32_t experts;
  int32_t fc1_columns;
  int32_t fc2_columns;
  int32_t lag;

  MOK_HD int32_t step_start(int32_t step) const {
    const int32_t fc1 = step < experts ? step : experts;
    const int32_t fc2 = step > lag ? step - lag : 0;
    return tickets_before(table[fc1], fc1_columns) + tickets_before(table[fc2], fc2_columns);
  }

  MOK_HD int32_t num_tickets() const { return step_start(experts + lag); }

  // The tile of a ticket; phase kStop past the last one.
  MOK_HD ClusterTile tile(int32_t ticket) const {
    if (ticket >= num_tickets()) return {TilePhase::kStop, 0, 0, 0, false};
    int32_t low = 0, high = experts + lag; // step_start(low) <= ticket < step_start(high)
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      if (step_start(middle) <= ticket)
        low = middle;
      else
        high = middle;
    }
    const int32_t index = ticket - step_start(low);
    const int32_t fc1 =
        low < experts ? tickets_before(table[low + 1], fc1_columns) - tickets_before(table[low], fc1_columns) : 0;
    if (index < fc1) return of_expert(TilePhase::kFc1, low, index, fc1_columns);
    return of_expert(TilePhase::kFc2, low - lag, index - fc1, fc2_columns);
  }

  MOK_HD ClusterTile of_expert(TilePhase phase, int32_t expert, int32_t index, int32_t columns) const {
    const int32_t pairs = pairs_before(table[expert + 1]) - pairs_before(table[expert]);
    const int32_t first = blocks_before(table[expert]);
    if (index >= pairs * columns) return {phase, expert, first + 2 * pairs, 2 * (index - pairs * columns), true};
    const BandedTile at = banded_tile(pairs, columns, index);
    return {phase, expert, first + 2 * at.pair, at.column, false};
  }
};

// Tickets of the weight gradients, behind those of a TileOrder: of every expert dW2 [H, I], then dW1 [2I, H], in
// cluster tiles of two row blocks and one column of 256. A matrix with no pairs is not wanted.
struct WgradOrder {
  int32_t experts;
  int32_t pairs2, columns2;
  int32_t pairs1, columns1;

  MOK_HD int32_t of_w2() const { return pairs2 * columns2; }
  MOK_HD int32_t per_expert() const { return of_w2() + pairs1 * columns1; }

  // row_block counts blocks of 128 lines of the matrix; phase kStop past the last ticket.
  MOK_HD ClusterTile tile(int32_t index) const {
    const int32_t expert = per_expert() > 0 ? index / per_expert() : experts;
    if (expert >= experts) return {TilePhase::kStop, 0, 0, 0, false};
    const int32_t within = index - expert * per_expert();
    const bool w2 = within < of_w2();
    const BandedTile at = w2 ? banded_tile(pairs2, columns2, within) : banded_tile(pairs1, columns1, within - of_w2());
    return {w2 ? TilePhase::kWgrad2 : TilePhase::kWgrad1, expert, 2 * at.pair, at.column, false};
  }
};

// (row block, column) of CTA 0 or 1 of the cluster; the column of CTA 1 may lie past the last one.
MOK_HD int32_t row_block_of_cta(const ClusterTile& tile, int32_t cta) { return tile.row_block + (tile.wide ? 0 : cta); }
MOK_HD int32_t column_of_cta(const ClusterTile& tile, int32_t cta) { return tile.column + (tile.wide ? cta : 0); }

} // namespace mok
