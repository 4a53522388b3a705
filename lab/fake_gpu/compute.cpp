// Lets FakeGPU compute: its kernels do nothing, but its memory is the host's. So each operator of CUDA that the CPU has
// too is run by the CPU, on copies. Loaded into a process that has imported torch.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

namespace {

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

// The same memory as a tensor of the CPU.
at::Tensor host(const at::Tensor& tensor)
{
    if (!tensor.is_cuda())
        return tensor;
    const auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool)
{
    TORCH_CHECK(!from.is_conj() && !from.is_neg(), "not simulated: a copy of a lazily changed tensor");
    if (to.numel() && from.numel()) {
        at::Tensor there = host(to);
        at::native::copy_(there, host(from), false);
    }
    return to;
}

at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to)
{
    if (to.sizes() != from.sizes())
        to.resize_(from.sizes());
    at::Tensor there = to;
    return copy(there, from, false);
}

bool is_view(const c10::FunctionSchema& schema)
{
    for (const auto& result : schema.returns())
        if (result.alias_info() && !result.alias_info()->isWrite())
            return true;
    return false;
}

struct Quiet : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

// The variables are never destroyed: kernels may run until the process ends.
__attribute__((constructor)) void install()
{
    const std::set<std::string> of_memory = {
        "aten::_local_scalar_dense", "aten::_pin_memory", "aten::copy_", "aten::empty", "aten::empty_strided",
        "aten::is_pinned", "aten::is_set_to", "aten::record_stream", "aten::resize_", "aten::set_",
    };
    Quiet quiet; // torch warns of each operator that is replaced
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    auto& held = *new std::vector<c10::RegistrationHandleRAII>;
    auto& all = c10::Dispatcher::singleton();
    for (const auto& name : all.getAllOpNames()) {
        const auto op = all.findOp(name);
        if (name.name.rfind("aten::", 0) != 0 || of_memory.count(name.name) || !op || !op->hasSchema())
            continue;
        if (op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && !is_view(op->schema())
            && op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU))
            held.push_back(all.registerImpl(
                name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&on_cpu>(), std::nullopt,
                nullptr, "fake_gpu"));
    }
    auto& own = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    own.impl("copy_", &copy);
    own.impl("_copy_from_and_resize", &copy_and_resize);
}

} // namespace
