// What an attention prologue is, and how it is cut: plain structs that print themselves.
#pragma once

#include <cstdint>
#include <ostream>

namespace jax_hpc::qk_norm_rope_append {

enum class Norm : int32_t { kBeforeRope, kAfterRope, kNone };
enum class Style : int32_t { kHalf, kInterleaved };
enum class Weight : int32_t { kNone, kBf16, kFloat };
enum class Scale : int32_t { kNone, kTensor, kHead };

// The options of the operator, whose meaning jax_hpc/ops/qk_norm_rope_append/reference.py defines.
struct Options {
  float eps;
  Norm norm;
  Style style;
};

struct Problem {
  int tokens;
  int q_heads;
  int kv_heads;
  int head_dim;
  int rotary;
  int positions;  // rows of the table
  int pages;
  int page_size;
  Options options;
  Weight q_weight;
  Weight k_weight;
  bool fp8_q;
  bool fp8_k;
  bool fp8_v;
  Scale k_scale;  // of an fp8 cache
  Scale v_scale;
  bool k_scale_per_token;  // computed, and written beside the pages

  __host__ __device__ int heads() const { return q_heads + 2 * kv_heads; }
};

// A lane holds 16 values of a head, so that a warp takes this many heads at once.
__host__ __device__ constexpr int lanes_of_head(int head_dim) { return head_dim / 16; }
__host__ __device__ constexpr int heads_of_warp(int head_dim) {
  return 32 / lanes_of_head(head_dim);
}

constexpr int kMostWarps = 4;
constexpr int kStages = 2;  // turns of a warp whose values are under way or in use; a power of two
constexpr int kCtasOfSm = 7;

// Turns follow each other through the heads of all tokens, as many at a time as a warp has room
// for.
struct Config {
  int warps;  // of a CTA
  int turns;  // of a warp
};

inline int64_t turns_of(const Problem& p) {
  const int heads = heads_of_warp(p.head_dim);
  return (int64_t{p.tokens} * p.heads() + heads - 1) / heads;
}

// A warp keeps one position and one slot a lane: its turns may touch 32 tokens.
inline int most_turns(const Problem& p) { return (31 * p.heads() + 1) / heads_of_warp(p.head_dim); }

inline std::ostream& operator<<(std::ostream& out, const Problem& p) {
  constexpr const char* kNorms[] = {"before", "after", "none"};
  out << "qk_norm_rope_append T=" << p.tokens << " Hq=" << p.q_heads << " Hkv=" << p.kv_heads
      << " D=" << p.head_dim << " R=" << p.rotary << " N=" << p.page_size
      << (p.options.style == Style::kHalf ? " half" : " interleaved")
      << " norm=" << kNorms[static_cast<int>(p.options.norm)];
  if (p.fp8_q) out << " fp8-q";
  if (p.fp8_k) out << (p.k_scale_per_token ? " fp8-k-token" : " fp8-k");
  if (p.fp8_v) out << " fp8-v";
  return out;
}

inline std::ostream& operator<<(std::ostream& out, const Config& c) {
  return out << c.warps << " warps a CTA, " << c.turns << (c.turns == 1 ? " turn" : " turns");
}

}  // namespace jax_hpc::qk_norm_rope_append
