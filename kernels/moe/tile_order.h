// Ticket -> tile: host and device arithmetic, tested on the CPU against mok_megatron/tile_order.py.
//
// A ticket is the work of one 2-CTA cluster: a tall tile covers two row blocks at one column (the CTAs share the
// weights), a wide one the odd last row block of a segment at two columns (they share the rows). A segment is an expert
// or, where the rows exceed the ring, a piece of one. Ticket order is, for step = 0, 1, ..: the phases of a Plan in
// order, each for segment step - lag of the phase. So every tile waits only for rows or for earlier tickets, and the
// rows of at most lag + 1 segments are in use at once.
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

// Forward: FC1 and FC2. Backward: FC1 again (kRebuild) where gate and up were not kept, the data gradients in the same
// order (of FC2 first), and the weight gradients.
enum class TilePhase : int32_t { kFc1 = 0, kFc2 = 1, kStop = 2, kWgrad2 = 3, kWgrad1 = 4, kRebuild = 5 };

struct ClusterTile {
  TilePhase phase;
  int32_t expert;
  int32_t row_block; // of the whole rank; of a weight gradient: of its matrix
  int32_t column;
  bool wide;
  int32_t piece; // of the expert
};

// Table entry of expert i: pairs and odd blocks of experts before i.
MOK_HD uint32_t pack_blocks(uint32_t pairs, uint32_t odds) { return pairs << kOddBits | odds; }
MOK_HD int32_t blocks_before(uint32_t entry) {
  return static_cast<int32_t>(2 * (entry >> kOddBits) + (entry & kOddMask));
}

// Tickets of a phase over some row blocks.
MOK_HD int32_t tickets_of(int32_t blocks, int32_t columns) {
  return blocks / 2 * columns + blocks % 2 * ((columns + 1) / 2);
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

// Row blocks of a rank: those of an expert, or a piece of them.
struct Segment {
  int32_t expert;
  int32_t piece;
  int32_t first;
  int32_t blocks;
  bool last; // piece of its expert
};

// How the row blocks of a rank are cut into segments, in order.
struct Segments {
  const uint32_t* table; // [experts + 1]
  int32_t experts;
  int32_t limit; // blocks of a segment at most

  MOK_HD int32_t first_block(int32_t expert) const { return blocks_before(table[expert]); }
  MOK_HD int32_t blocks_of(int32_t expert) const { return first_block(expert + 1) - first_block(expert); }

  // Blocks of all pieces of an expert but the last, which may have fewer: about equal, and whole pairs where the limit
  // allows.
  MOK_HD int32_t piece_blocks(int32_t blocks) const {
    if (blocks <= limit) return blocks;
    const int32_t pieces = (blocks + limit - 1) / limit, size = (blocks + pieces - 1) / pieces;
    return size + size % 2 < limit ? size + size % 2 : limit;
  }

  MOK_HD Segment segment(int32_t expert, int32_t piece) const {
    const int32_t blocks = blocks_of(expert), size = piece_blocks(blocks), before = piece * size;
    const bool last = before + size >= blocks;
    return {expert, piece, first_block(expert) + before, last ? blocks - before : size, last};
  }

  // Segment of a row block of an expert.
  MOK_HD Segment holding(int32_t expert, int32_t block) const {
    return segment(expert, (block - first_block(expert)) / piece_blocks(blocks_of(expert)));
  }
  // Segment of any row block in use.
  MOK_HD Segment holding(int32_t block) const {
    int32_t low = 0, high = experts; // first_block(low) <= block < first_block(high)
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      if (first_block(middle) <= block)
        low = middle;
      else
        high = middle;
    }
    return holding(low, block);
  }
};

// Position in the order of segments; an expert without rows is an empty segment.
struct SegmentCursor {
  int32_t expert = 0;
  int32_t piece = 0;

  MOK_HD bool done(const Segments& segments) const { return expert >= segments.experts; }
  MOK_HD void advance(const Segments& segments) {
    const bool last = segments.segment(expert, piece).last;
    expert += last ? 1 : 0;
    piece = last ? 0 : piece + 1;
  }
};

// Weight gradients of an expert: dW2 [H, I], then dW1 [2I, H], in cluster tiles of two row blocks (128 lines of the
// matrix) and one column of 256. A matrix with no pairs is not wanted.
struct WgradTiles {
  int32_t pairs2, columns2;
  int32_t pairs1, columns1;

  MOK_HD int32_t of_w2() const { return pairs2 * columns2; }
  MOK_HD int32_t count() const { return of_w2() + pairs1 * columns1; }
  MOK_HD ClusterTile tile(const Segment& segment, int32_t index) const {
    const bool w2 = index < of_w2();
    const BandedTile at = w2 ? banded_tile(pairs2, columns2, index) : banded_tile(pairs1, columns1, index - of_w2());
    return {w2 ? TilePhase::kWgrad2 : TilePhase::kWgrad1, segment.expert, 2 * at.pair, at.column, false, segment.piece};
  }
  // Number of a tile among its expert's, in any order.
  MOK_HD int32_t number(bool w2, int32_t row_block, int32_t column) const {
    return w2 ? row_block / 2 * columns2 + column : of_w2() + row_block / 2 * columns1 + column;
  }
};

inline constexpr int32_t kAfterAll = INT32_MAX; // lag of weight gradients that come behind everything else

// Phases of a launch, in the order of a step: rebuild, FC1, FC2, weight gradients. Zero columns: no such phase.
struct Plan {
  Segments segments;
  int32_t rebuild_columns = 0;
  int32_t kept_blocks = 0; // segments that end before need no rebuild
  int32_t fc1_columns = 0, fc1_lag = 0;
  int32_t fc2_columns = 0, fc2_lag = 0; // fc1_lag <= fc2_lag <= wgrad_lag
  WgradTiles wgrad{};
  int32_t wgrad_lag = 0;
};

// Walks through the tickets of a plan, forwards only.
struct TileWalk {
  Plan plan;
  SegmentCursor rebuild{}, fc1{}, fc2{}, wgrad{};
  int32_t step = 0;
  int32_t start = 0; // first ticket of the step

  MOK_HD bool wgrad_runs() const {
    return plan.wgrad_lag == kAfterAll ? fc2.done(plan.segments) : step >= plan.wgrad_lag;
  }

  // The tile of a ticket, not below the one of the last call; phase kStop past the last one.
  MOK_HD ClusterTile tile(int32_t ticket) {
    const Segments& segments = plan.segments;
    for (; !wgrad.done(segments); ++step) {
      int32_t index = ticket - start;
      if (!rebuild.done(segments)) {
        const Segment at = segments.segment(rebuild.expert, rebuild.piece);
        const int32_t columns = at.first + at.blocks <= plan.kept_blocks ? 0 : plan.rebuild_columns;
        if (index < tickets_of(at.blocks, columns)) return of_rows(TilePhase::kRebuild, at, index, columns);
        index -= tickets_of(at.blocks, columns);
      }
      if (step >= plan.fc1_lag && !fc1.done(segments)) {
        const Segment at = segments.segment(fc1.expert, fc1.piece);
        if (index < tickets_of(at.blocks, plan.fc1_columns))
          return of_rows(TilePhase::kFc1, at, index, plan.fc1_columns);
        index -= tickets_of(at.blocks, plan.fc1_columns);
      }
      if (step >= plan.fc2_lag && !fc2.done(segments)) {
        const Segment at = segments.segment(fc2.expert, fc2.piece);
        if (index < tickets_of(at.blocks, plan.fc2_columns))
          return of_rows(TilePhase::kFc2, at, index, plan.fc2_columns);
        index -= tickets_of(at.blocks, plan.fc2_columns);
      }
      const bool with_wgrad = wgrad_runs();
      if (with_wgrad) {
        if (index < plan.wgrad.count()) return plan.wgrad.tile(segments.segment(wgrad.expert, wgrad.piece), index);
        index -= plan.wgrad.count();
      }
      start = ticket - index;
      if (!rebuild.done(segments)) rebuild.advance(segments);
      if (step >= plan.fc1_lag && !fc1.done(segments)) fc1.advance(segments);
      if (step >= plan.fc2_lag && !fc2.done(segments)) fc2.advance(segments);
      if (with_wgrad) wgrad.advance(segments);
    }
    return {TilePhase::kStop, 0, 0, 0, false, 0};
  }

  MOK_HD static ClusterTile of_rows(TilePhase phase, const Segment& at, int32_t index, int32_t columns) {
    const int32_t pairs = at.blocks / 2;
    if (index >= pairs * columns)
      return {phase, at.expert, at.first + 2 * pairs, 2 * (index - pairs * columns), true, at.piece};
    const BandedTile tile = banded_tile(pairs, columns, index);
    return {phase, at.expert, at.first + 2 * tile.pair, tile.column, false, at.piece};
  }
};

// (row block, column) of CTA 0 or 1 of the cluster; the column of CTA 1 may lie past the last one.
MOK_HD int32_t row_block_of_cta(const ClusterTile& tile, int32_t cta) { return tile.row_block + (tile.wide ? 0 : cta); }
MOK_HD int32_t column_of_cta(const ClusterTile& tile, int32_t cta) { return tile.column + (tile.wide ? cta : 0); }

// How rows that exceed the capacity go through a ring of `blocks` row blocks: block b takes the place of b - blocks,
// and may come when that one's segment is done with. So what waits for block b must come behind all tickets that the
// one in its place needs: segments of `segment` blocks at most, `lag` of them from the first phase to the last, and
// `window` blocks, inside of which a peer's token is brought to all its rows at once, fit into the ring together.
struct Ring {
  int32_t blocks;
  int32_t segment;
  int32_t lag;
  int32_t window;
};

// `lag`: as many segments between first and last phase as would be good. A rank alone needs no window.
MOK_HD Ring ring_of(int32_t blocks, int32_t lag, int32_t world) {
  const int32_t window = world == 1 || blocks < 8 ? 1 : blocks / 8, room = blocks + 1 - window;
  const int32_t fitting = lag < room ? lag : room - 1;
  return {blocks, room / (fitting + 1), fitting, window};
}
inline constexpr int32_t kMostLag = 6; // of backward

// dY and x share the place that x rows have in forward. Half of `lag` lies between rebuild and FC1, half between FC1
// and the other phases. Less lag is better than cutting an expert of `usual_blocks`, whose partial sums would have to
// be kept.
MOK_HD Ring backward_ring(int32_t capacity_blocks, int32_t lag, int32_t usual_blocks, int32_t world) {
  const int32_t blocks = capacity_blocks < 2 ? 1 : capacity_blocks / 2;
  int32_t fitting = lag < kMostLag ? lag : kMostLag;
  while (fitting > 0 && ring_of(blocks, fitting, world).segment < usual_blocks) --fitting;
  return ring_of(blocks, fitting, world);
}

} // namespace mok
