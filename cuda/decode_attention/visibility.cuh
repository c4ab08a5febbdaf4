// Which keys a query sees. Query token s of S sits at position length - S + s, sees no key behind
// itself and, with a window, only that many up to itself.
#pragma once

#include "decode_attention/arguments.cuh"

namespace jax_hpc::decode_attention {

constexpr int kGroup = 16;  // tokens of one product of the tensor cores

struct Sight {
  int length;
  int q_len;
  int window;  // 0: none

  __device__ __forceinline__ Sight(const Problem& p, int length)
      : length(length), q_len(p.q_len), window(p.window) {}

  __device__ __forceinline__ bool sees(int query_token, int token) const {
    const int distance = length - q_len + query_token - token;
    return distance >= 0 && (window == 0 || distance < window);
  }
  // Of the tokens of a group: whether some query sees one, and whether every query sees all.
  __device__ __forceinline__ bool any(int first) const {
    if (first >= length) return false;
    return window == 0 || length - q_len - (first + kGroup - 1) < window;
  }
  __device__ __forceinline__ bool all(int first) const {
    if (first + kGroup - 1 > length - q_len) return false;
    return window == 0 || length - 1 - first < window;
  }
};

// The rows of a warp: 8 N of a pair's, from `first` on. Row r is head r % G of query token r / G;
// rows beyond the last have its token.
struct RowTokens {
  int first;
  Divisor by_group;
  int last_token;

  __device__ __forceinline__ RowTokens(const Arguments& a, int first)
      : first(first), by_group(a.by_group), last_token(a.problem.q_len - 1) {}

  __device__ __forceinline__ int of(int row) const {
    return min(by_group.divide(first + row), last_token);
  }
};

}  // namespace jax_hpc::decode_attention
