// Prints what kernels/moe/tile_order.h hands out, one line per ticket, for tests/test_tile_order.py.
// Arguments: fc1_columns fc2_columns lag, then the row blocks of each expert.
#include "../../kernels/moe/tile_order.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char** argv) {
  std::vector<uint32_t> table = {0};
  uint32_t pairs = 0, odds = 0;
  for (int i = 4; i < argc; ++i) {
    const auto blocks = static_cast<uint32_t>(std::atoi(argv[i]));
    pairs += blocks / 2;
    odds += blocks % 2;
    table.push_back(mok::pack_blocks(pairs, odds));
  }
  const mok::TileOrder order = {table.data(), argc - 4, std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3])};
  std::printf("%d\n", order.num_tickets());
  for (int32_t ticket = 0; ticket <= order.num_tickets(); ++ticket) { // one past the end: the stop tile
    const mok::ClusterTile tile = order.tile(ticket);
    std::printf("%d %d %d %d %d\n", static_cast<int>(tile.phase), tile.expert, tile.row_block, tile.column, tile.wide);
  }
}
