// Proof that this build's code runs on a device, and what the build was made with.
#pragma once

#include <string>

namespace jax_hpc {

// Runs a kernel on the device and checks its answer. Returns an empty string when that worked, else
// why not. Waits for the device; leaves the calling thread's current device as it was.
std::string probe(int ordinal);

// CUDA version of the compiler, for example "13.0".
std::string toolkit_version();

// Architecture that the kernels were compiled for, for example "90a-real".
std::string architecture();

}  // namespace jax_hpc
