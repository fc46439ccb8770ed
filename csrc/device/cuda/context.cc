#include "csrc/device/cuda/context.h"

#include <utility>

namespace hoccl::cuda {
namespace {

std::string Hexadecimal(const CUuuid& uuid) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : uuid.bytes) {
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

}  // namespace

Result<std::unique_ptr<CudaDevice>> CudaDevice::Attach(const Driver& driver, int ordinal) {
  std::unique_ptr<CudaDevice> device(new CudaDevice(driver, ordinal));
  HOCCL_RETURN_IF_ERROR(driver.DeviceGet(&device->handle_, ordinal));
  HOCCL_RETURN_IF_ERROR(driver.DevicePrimaryCtxRetain(&device->context_, device->handle_));
  HOCCL_RETURN_IF_ERROR(device->ReadProperties());
  Result<Capabilities> capabilities = ProbeCapabilities(driver, device->handle_, device->context_);
  if (!capabilities.ok()) return capabilities.status();
  device->capabilities_ = *std::move(capabilities);
  return device;
}

Result<std::unique_ptr<CudaDevice>> CudaDevice::CreateContext(const CudaDevice& device) {
  const Driver& driver = device.driver();
  std::unique_ptr<CudaDevice> created(new CudaDevice(driver, device.ordinal()));
  created->handle_ = device.handle_;
  created->properties_ = device.properties_;
  created->capabilities_ = device.capabilities_;
  created->primary_ = false;
  CUcontext current = nullptr;
  HOCCL_RETURN_IF_ERROR(driver.CtxCreate(&created->context_, CU_CTX_SCHED_AUTO, device.handle_));
  HOCCL_RETURN_IF_ERROR(driver.CtxPopCurrent(&current));  // the driver made it the thread's
  return created;
}

CudaDevice::~CudaDevice() {
  if (context_ == nullptr) return;
  // Fails when the driver has shut down before static destructors ran, and then there is nothing to release.
  (void)(primary_ ? driver_.DevicePrimaryCtxRelease(handle_) : driver_.CtxDestroy(context_));
}

Status CudaDevice::ReadProperties() {
  char text[256] = {};
  HOCCL_RETURN_IF_ERROR(driver_.DeviceGetName(text, sizeof(text), handle_));
  properties_.name = text;
  HOCCL_RETURN_IF_ERROR(driver_.DeviceGetPCIBusId(text, sizeof(text), handle_));
  properties_.pci_bus_id = text;
  CUuuid uuid = {};
  HOCCL_RETURN_IF_ERROR(driver_.DeviceGetUuid(&uuid, handle_));
  properties_.uuid = Hexadecimal(uuid);
  HOCCL_RETURN_IF_ERROR(driver_.DeviceTotalMem(&properties_.memory_bytes, handle_));
  HOCCL_RETURN_IF_ERROR(driver_.DeviceGetAttribute(&properties_.compute_major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle_));
  return driver_.DeviceGetAttribute(&properties_.compute_minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle_);
}

ScopedContext::ScopedContext(const Driver& driver, CUcontext context) : driver_(driver) {
  CUcontext current = nullptr;
  status_ = driver_.CtxGetCurrent(&current);
  if (!status_.ok() || current == context) return;
  status_ = driver_.CtxPushCurrent(context);
  pushed_ = status_.ok();
}

ScopedContext::~ScopedContext() {
  CUcontext popped = nullptr;
  if (pushed_) (void)driver_.CtxPopCurrent(&popped);
}

}  // namespace hoccl::cuda
