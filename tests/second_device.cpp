// A device of PyTorch's (PrivateUse1) whose memory is the host's: tests place tensors on it as
// on a GPU. An operation copies its arguments to the CPU, runs there, and copies what it gives.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    return {data, data, &c10::free_cpu, c10::Device(KIND, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* dest, const void* src, std::size_t bytes) const override {
    std::memcpy(dest, src, bytes);
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(KIND, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return {KIND, 0}; }
  c10::Device getDevice() const override { return {KIND, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return getStream(s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  bool isAvailable() const override { return true; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  bool isPinnedPtr(const void*) const override { return false; }
};

Hooks hooks;
const bool known = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

at::Tensor host(const at::Tensor& t) {  // the same memory, as a tensor of the CPU
  auto data = const_cast<void*>(t.storage().data());
  return at::from_blob(data, t.sizes(), t.strides(), t.storage_offset(), [](void*) {},
                       t.options().device(at::kCPU).requires_grad(false))
      .set_requires_grad(false);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool) {
  auto from = self.is_cpu() ? self : host(self);
  auto to = dst.is_cpu() ? dst : host(dst);
  to.copy_(from);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size,
                         std::optional<at::MemoryFormat>) {
  return at::cpu::resize_(self, C10_AS_INTARRAYREF_SLOW(size), std::nullopt);
}

at::Scalar item(const at::Tensor& self) { return host(self).item(); }

at::Tensor& set_storage(at::Tensor& self, at::Storage s, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  return at::cpu::set_(self, s, offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage s) {
  const auto count = static_cast<int64_t>(s.nbytes() / self.dtype().itemsize());
  return at::cpu::set_(self, s, 0, {count}, {});
}

// As CUDA does, refuses a tensor of the CPU beside those of the device, unless it is one number
// or an index.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  const bool indexes = name.find("index_put") != std::string::npos || name == "aten::index" ||
                       name == "aten::_unsafe_index";
  const auto check = [&](const at::Tensor& t) {
    TORCH_CHECK(!t.defined() || !t.is_cpu() || t.dim() == 0,
                "Expected all tensors to be on the same device, but found at least two devices, "
                "spare:0 and cpu, in ", name);
  };
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) {
      check(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorList()) check(t);
    } else if (value.isList() && !indexes) {
      for (const c10::IValue& one : value.toListRef()) {
        if (one.isTensor()) check(one.toTensor());
      }
    }
  }
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize);
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("as_strided", at::cpu::as_strided);
  m.impl("view", at::cpu::view);
  m.impl("_reshape_alias", at::cpu::_reshape_alias);
  m.impl("unfold", at::cpu::unfold);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
