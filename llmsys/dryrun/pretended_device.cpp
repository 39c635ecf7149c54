// A CUDA device without memory or kernels: autograd and FSDP ask a device for its guard and streams, and torch aborts
// where nothing answers. Built against the headers of the installed torch; works with its CPU and its CUDA wheels.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

Device only_device() { return Device(DeviceType::CUDA, 0); }
Stream only_stream() { return Stream(Stream::DEFAULT, only_device()); }

// One device and one stream on which everything has always finished.
struct PretendedGuard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return only_device(); }
  Device exchangeDevice(Device) const override { return only_device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return only_stream(); }
  Stream getDefaultStream(Device) const override { return only_stream(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return only_stream(); }
  Stream getNewStream(Device, int) const override { return only_stream(); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  // An event is recorded once it is not null.
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<PretendedGuard*>(this);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

struct PretendedHooks final : public at::CUDAHooksInterface {
  explicit PretendedHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

const PretendedGuard guard;

// Runs when the library is loaded, which must be before torch looks its hooks up. Preferred, because the hooks of a CUDA
// wheel refuse device 0 where there is none.
const bool is_registered = [] {
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks",
      [](at::CUDAHooksArgs arguments) { return std::unique_ptr<at::CUDAHooksInterface>(new PretendedHooks(arguments)); },
      "pretended",
      c10::REGISTRY_PREFERRED);
  return true;
}();

}  // namespace

// Called after torch is imported, to replace the guard of a CUDA wheel.
extern "C" void llmsys_install_guard() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
}
