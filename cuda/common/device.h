// The CUDA devices of this machine, as the CUDA runtime reports them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace jax_hpc {

struct DeviceInfo {
  int ordinal;
  std::string name;
  int compute_major;
  int compute_minor;
  int multiprocessors;
  std::size_t l2_bytes;
  std::size_t memory_bytes;
};

struct DeviceList {
  std::vector<DeviceInfo> devices;
  std::string problem;  // why there are none; empty when there are some
};

DeviceList list_devices();

}  // namespace jax_hpc
