// Walking the work list of routing.dispatch.
#pragma once

#include "../common/math.h"
#include "params.h"

namespace kimi::moe {

struct Piece {
  int expert;      // index into the weights
  int row;         // first sorted row
  int count;       // rows
  int padded_row;  // first row in the padded numbering, a multiple of 8

  // Rows `first` .. of it, at most `most`. `first` and `most` are multiples of 8.
  __device__ __forceinline__ Piece part(int first, int most) const {
    return Piece{expert, row + first, min(most, count - first), padded_row + first};
  }
};

// Tiles of one expert but the last are multiples of 8 rows, so rounding `row` up keeps their distances; 8 more rows for
// every expert keep two neighbours apart whatever their counts.
// kFromL2: for a look before the wait for the predecessor, when L1 may still have an older list.
template <bool kFromL2 = false>
__device__ __forceinline__ Piece load_tile(const WorkList& work, int index) {
  const int32_t* tile = work.tiles + int64_t(index) * 3;
  const int expert = kFromL2 ? __ldcg(tile) : tile[0], row = kFromL2 ? __ldcg(tile + 1) : tile[1],
            count = kFromL2 ? __ldcg(tile + 2) : tile[2];
  return Piece{expert + work.weight_offset, row, count, round_up(row, 8) + 8 * expert};
}

}  // namespace kimi::moe
