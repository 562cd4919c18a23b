// Prints the weight-gradient tickets of kernels/moe/tile_order.h, one line each, for tests/test_tile_order.py.
// Arguments: experts, pairs and columns of dW2, pairs and columns of dW1.
#include "../../kernels/moe/tile_order.h"

#include <cstdio>
#include <cstdlib>

int main(int, char** argv) {
  const mok::WgradOrder order = {std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]),
                                 std::atoi(argv[5])};
  for (int32_t ticket = 0;; ++ticket) {
    const mok::ClusterTile tile = order.tile(ticket);
    std::printf("%d %d %d %d %d\n", static_cast<int>(tile.phase), tile.expert, tile.row_block, tile.column, tile.wide);
    if (tile.phase == mok::TilePhase::kStop) return 0;
  }
}
