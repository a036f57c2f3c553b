// Group sizes with a kernel of their own: a thread holds 8 columns, so a group is 4 to 32 lanes of one warp.
#pragma once

#include <cstdint>

#include "params.h"

namespace kimi::quant {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kWarpColumns = 32 * 8;
constexpr int kMxGroup = 32;

// Lanes of a group in the fast kernel, 0 when the group takes the general one (a warp walks it column by column).
inline int group_lanes(const QuantParams& params) {
  const bool fits = params.group == 32 || params.group == 64 || params.group == 128 || params.group == 256;
  return params.vector && fits ? params.group / 8 : 0;
}

}  // namespace kimi::quant
