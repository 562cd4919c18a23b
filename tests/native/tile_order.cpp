// What kernels/moe/tile_order.h computes, for tests/test_tile_order.py: a line of integers in, lines of integers out.
//   0 limit rebuild_columns kept_blocks fc1_columns fc1_lag fc2_columns fc2_lag
//     pairs2 columns2 pairs1 columns1 wgrad_lag stride blocks..   tiles of tickets 0, stride, .. as far as the stop
//     tile
//   1 limit blocks..          segments in order, then the segment that holds each block
//   2 capacity_blocks lag world                 ring of forward
//   3 capacity_blocks lag usual_blocks world    ring of backward
// A limit or wgrad_lag below 0 stands for none and for "behind everything else". An empty line ends each answer.
#include "../../kernels/moe/tile_order.h"

#include <cstdio>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Numbers = std::vector<int32_t>;

std::vector<uint32_t> table_of(const Numbers& line, size_t first) {
  std::vector<uint32_t> table = {0};
  uint32_t pairs = 0, odds = 0;
  for (size_t i = first; i < line.size(); ++i) {
    const auto blocks = static_cast<uint32_t>(line[i]);
    pairs += blocks / 2;
    odds += blocks % 2;
    table.push_back(mok::pack_blocks(pairs, odds));
  }
  return table;
}

mok::Segments segments_of(const std::vector<uint32_t>& table, int32_t limit) {
  return {table.data(), static_cast<int32_t>(table.size()) - 1, limit < 0 ? INT32_MAX : limit};
}

void print_tiles(const Numbers& n) {
  const auto table = table_of(n, 14);
  const mok::Plan plan = {
      segments_of(table, n[1]),          n[2], n[3], n[4], n[5], n[6], n[7], {n[8], n[9], n[10], n[11]},
      n[12] < 0 ? mok::kAfterAll : n[12]};
  mok::TileWalk walk = {plan};
  for (int32_t ticket = 0;; ticket += n[13]) {
    const mok::ClusterTile tile = walk.tile(ticket);
    std::printf("%d %d %d %d %d %d\n", static_cast<int>(tile.phase), tile.expert, tile.row_block, tile.column,
                tile.wide, tile.piece);
    if (tile.phase == mok::TilePhase::kStop) return;
  }
}

void print(const mok::Segment& s) { std::printf("%d %d %d %d %d\n", s.expert, s.piece, s.first, s.blocks, s.last); }

void print_segments(const Numbers& n) {
  const auto table = table_of(n, 2);
  const mok::Segments segments = segments_of(table, n[1]);
  for (mok::SegmentCursor at; !at.done(segments); at.advance(segments)) print(segments.segment(at.expert, at.piece));
  for (int32_t block = 0; block < segments.first_block(segments.experts); ++block) print(segments.holding(block));
}

void print(const mok::Ring& r) { std::printf("%d %d %d %d\n", r.blocks, r.segment, r.lag, r.window); }

} // namespace

int main() {
  for (std::string text; std::getline(std::cin, text);) {
    std::istringstream words(text);
    const Numbers line{std::istream_iterator<int32_t>(words), {}};
    switch (line[0]) {
    case 0:
      print_tiles(line);
      break;
    case 1:
      print_segments(line);
      break;
    case 2:
      print(mok::ring_of(line[1], line[2], line[3]));
      break;
    default:
      print(mok::backward_ring(line[1], line[2], line[3], line[4]));
    }
    std::printf("\n");
  }
}
