// The Python module jax_hpc._ext: hands out the FFI handlers and says what this build is.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "common/device.h"
#include "common/probe.h"
#include "xla/ffi/api/api.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

// One line per operator: TARGET(name, version) registers the handler `name`, which cuda/ffi/name.cc
// defines, as "jax_hpc.<name>.v<version>". New operands, results or attributes are a new version.
#define JAX_HPC_TARGETS(TARGET)  \
  TARGET(router_gemm, 1)         \
  TARGET(route_topk, 1)          \
  TARGET(router_topk, 1)         \
  TARGET(decode_schedule, 1)     \
  TARGET(decode_attention, 1)    \
  TARGET(qk_norm_rope_append, 1) \
  TARGET(fused_moe, 1)           \
  TARGET(prefill_attention, 1)   \
  TARGET(rms_norm, 1)

#define DECLARE_TARGET(name, version) XLA_FFI_DECLARE_HANDLER_SYMBOL(name);
JAX_HPC_TARGETS(DECLARE_TARGET)
#undef DECLARE_TARGET

namespace {

nb::dict registrations() {
  nb::dict targets;
#define ADD_TARGET(name, version) \
  targets["jax_hpc." #name ".v" #version] = nb::capsule(reinterpret_cast<void*>(name));
  JAX_HPC_TARGETS(ADD_TARGET)
#undef ADD_TARGET
  return targets;
}

nb::dict build_info() {
  nb::dict info;
  info["version"] = JAX_HPC_VERSION;
  info["cuda"] = jax_hpc::toolkit_version();
  info["architecture"] = jax_hpc::architecture();
  info["xla_ffi_major"] = XLA_FFI_API_MAJOR;
  info["xla_ffi_minor"] = XLA_FFI_API_MINOR;
  info["compiler"] = JAX_HPC_COMPILER;
  return info;
}

nb::dict to_dict(const jax_hpc::DeviceInfo& device) {
  nb::dict info;
  info["ordinal"] = device.ordinal;
  info["name"] = device.name;
  info["compute_capability"] =
      std::to_string(device.compute_major) + "." + std::to_string(device.compute_minor);
  info["multiprocessors"] = device.multiprocessors;
  info["l2_bytes"] = device.l2_bytes;
  info["memory_bytes"] = device.memory_bytes;
  return info;
}

nb::list device_info() {
  nb::list devices;
  for (const jax_hpc::DeviceInfo& device : jax_hpc::list_devices().devices) {
    devices.append(to_dict(device));
  }
  return devices;
}

}  // namespace

NB_MODULE(_ext, module) {
  module.doc() = "FFI handlers of jax_hpc and facts about this build.";
  module.def("registrations", &registrations, "FFI target name -> handler capsule.");
  module.def("build_info", &build_info, "What this extension was built with.");
  module.def("device_info", &device_info, "One dict per CUDA device; empty without a driver.");
  module.def(
      "no_device_reason", [] { return jax_hpc::list_devices().problem; },
      "Why device_info() is empty; '' when it is not.");
  module.def(
      "probe", &jax_hpc::probe, nb::arg("ordinal"),
      "Runs a small kernel on a device: '' when this build's code runs there, else why not.");
}
