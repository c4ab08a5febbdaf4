// What a router product is, and how it is cut: plain structs that print themselves.
#pragma once

#include <cstdint>
#include <ostream>

namespace jax_hpc::router_gemm {

// logits[tokens, experts] = sum over terms i of x[tokens, hidden] parts[i][experts, hidden]^T /
// 256^i
struct Problem {
  int tokens;
  int hidden;
  int experts;
  int terms;  // 1 to 3
};

// Whether rows are 16-byte aligned, as the copy engine needs them.
constexpr bool has_aligned_rows(const Problem& p) { return p.hidden % 8 == 0; }

// The stream kernel's lanes each copy what they multiply themselves: up to 8 tokens, and rows that
// are not 16-byte aligned. The tiled kernel's warpgroups share tiles that the copy engine brings.
enum class Kernel { kStream, kTiled };

// Both cut the hidden axis over the CTAs of a cluster, which add their parts through each other's
// shared memory: no workspace, no flags, the same order every time.
struct Config {
  Kernel kernel;
  int token_tile;   // tokens of one CTA
  int expert_tile;  // experts of one CTA
  int cluster;      // CTAs that share the hidden axis
};

inline std::ostream& operator<<(std::ostream& out, const Problem& p) {
  return out << "router_gemm T=" << p.tokens << " H=" << p.hidden << " E=" << p.experts
             << " terms=" << p.terms;
}

inline std::ostream& operator<<(std::ostream& out, const Config& c) {
  return out << (c.kernel == Kernel::kStream ? "stream " : "tiled ") << c.token_tile << "x"
             << c.expert_tile << " cluster " << c.cluster;
}

}  // namespace jax_hpc::router_gemm
