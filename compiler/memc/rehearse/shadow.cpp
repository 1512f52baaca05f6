/*
 * Keeps what is known of the phantom card's memory true: computes small operations on known data. And keeps this machine's
 * memory free of what only the planned host has room for.
 *
 * Kernels of the phantom card do nothing, but libraries ask the device questions: is a mask full, does a row hold several
 * samples, how many tokens carry loss. Their answers decide which kernels run and how large tensors are. All that such
 * questions read came from the host a moment ago. So this looks at every operation of torch on the card, before autograd
 * and beside it: where all of its inputs are known and small, the same operation is done by torch on the CPU, in the very
 * memory that the card's addresses name, and its results are known in turn. Everything else makes its results unknown.
 *
 * Nothing is changed on the way: the operation runs on the card as always and allocates what it allocates.
 *
 * On the host, large tensors of floating-point numbers (weights, masters, states that are kept there) are reserved address
 * space: nothing computes in them, nothing is drawn, their pages stay untouched; what they would take is counted.
 */
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <sys/mman.h>

#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <vector>

extern "C" {
int phantom_known(const void *address, size_t size);
int phantom_open(const void *address, size_t size);
void phantom_mark(const void *address, size_t size, int is_known_now);
}

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

constexpr auto KEY = DispatchKey::TESTING_ONLY_GenericMode;
constexpr size_t MOST_BYTES = size_t{64} << 20;        /* of whole numbers and truth values: a mask of 8192 x 8192 */
constexpr size_t MOST_FLOAT_BYTES = size_t{256} << 10; /* of other numbers, which decide less and cost more */
constexpr size_t LARGE_BYTES = size_t{1} << 20;        /* from here on the host's memory is reserved and not touched */

thread_local int depth = 0; /* how many operations enclose this one */

/* ---- what kind of operation it is -------------------------------------------------------------------------------- */

struct Kind {
    bool passes = false;     /* computes nothing itself: views, and operations made of others, which are seen in turn */
    bool opaque = false;     /* cannot be done on the CPU, or should not be */
    bool writes = false;     /* changes arguments */
    bool overwrites = false; /* what it writes to need not be known */
    bool shapes = false;     /* reads only the shape of its inputs */
    bool counts = false;     /* the size of its result depends on data */
    bool resizes = false;    /* gives what it writes to another size */
    bool computes = false;   /* one of torch's own that has tensors as results, or changes some */
    std::string name;
    std::vector<bool> written; /* by argument */
};

bool one_of(const std::string &name, std::initializer_list<const char *> names) {
    for (const char *other : names)
        if (name == other) return true;
    return false;
}

Kind classify(const c10::OperatorHandle &op) {
    Kind kind;
    const auto &schema = op.schema();
    const std::string full = schema.name();
    const size_t colons = full.find("::");
    const std::string space = full.substr(0, colons);
    kind.name = full.substr(colons + 2);
    for (const auto &argument : schema.arguments()) {
        const bool written = argument.alias_info() && argument.alias_info()->isWrite();
        kind.written.push_back(written);
        kind.writes |= written;
    }
    bool views = !schema.returns().empty();
    for (const auto &result : schema.returns()) views &= result.alias_info() && !result.alias_info()->isWrite();
    const bool composed = op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
                          !op.hasKernelForDispatchKey(DispatchKey::CUDA);
    kind.passes = (views && !kind.writes) || composed || space == "c10d" || space == "profiler" ||
                  op.hasTag(at::Tag::inplace_view) ||
                  one_of(kind.name, {"set_", "resize_", "resize_as_", "record_stream", "_pin_memory", "_has_compatible_shallow_copy_type"});
    kind.opaque = space != "aten" || op.hasTag(at::Tag::nondeterministic_seeded) || kind.name.find("empty") != std::string::npos;
    kind.overwrites = schema.overload_name() == "out" || one_of(kind.name, {"copy_", "fill_", "zero_"}) ||
                      schema.overload_name().find("_out") != std::string::npos;
    kind.shapes = one_of(kind.name, {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"});
    kind.counts = op.hasTag(at::Tag::dynamic_output_shape);
    kind.resizes = kind.overwrites && kind.name != "copy_" && kind.name != "fill_" && kind.name != "zero_";
    bool tensors = kind.writes;
    for (const auto &result : schema.returns())
        tensors |= result.type()->isSubtypeOf(*c10::TensorType::get()) || result.type()->kind() == c10::TypeKind::ListType;
    kind.computes = space == "aten" && tensors && kind.name.find("empty") == std::string::npos;
    return kind;
}

const Kind &kind_of(const c10::OperatorHandle &op) {
    static std::mutex guard;
    static std::unordered_map<const void *, Kind> kinds;
    const void *key = &op.schema();
    std::lock_guard<std::mutex> held(guard);
    auto found = kinds.find(key);
    if (found == kinds.end()) found = kinds.emplace(key, classify(op)).first;
    return found->second; /* elements of an unordered_map stay where they are */
}

/* ---- tensors on the card ------------------------------------------------------------------------------------------ */

bool on_card(const Tensor &tensor) { /* plain, with memory of its own */
    if (!tensor.defined()) return false;
    const auto keys = tensor.key_set();
    if (!keys.has_backend(c10::BackendComponent::CUDABit) || !keys.has(DispatchKey::Dense)) return false;
    if (keys.has_any(DispatchKeySet({DispatchKey::Python, DispatchKey::Fake, DispatchKey::Functionalize, DispatchKey::FuncTorchBatched,
                                     DispatchKey::FuncTorchGradWrapper, DispatchKey::Conjugate, DispatchKey::Negative})))
        return false;
    return tensor.has_storage() && tensor.layout() == at::kStrided;
}

size_t extent_bytes(const Tensor &tensor) { /* from its first element to the end of its last */
    if (tensor.numel() == 0) return 0;
    size_t last = 0;
    for (int64_t axis = 0; axis < tensor.dim(); axis++) last += static_cast<size_t>((tensor.size(axis) - 1) * tensor.stride(axis));
    return (last + 1) * tensor.itemsize();
}

const void *start_of(const Tensor &tensor) { return tensor.numel() ? tensor.const_data_ptr() : nullptr; }

bool known(const Tensor &tensor) { return phantom_known(start_of(tensor), extent_bytes(tensor)); }

void mark(const Tensor &tensor, bool is_known_now) {
    if (!on_card(tensor) || !tensor.numel()) return;
    /* What lies between the elements of a view was known before, or is not known now. */
    if (is_known_now && !tensor.is_non_overlapping_and_dense() && !known(tensor)) return;
    phantom_mark(start_of(tensor), extent_bytes(tensor), is_known_now);
}

Tensor on_host(const Tensor &tensor) { /* the same memory, as the CPU sees it */
    const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    return at::for_blob(const_cast<void *>(start_of(tensor)), tensor.sizes()).strides(tensor.strides()).options(options).make_tensor();
}

template <typename Visit> void each_tensor(const IValue &value, const Visit &visit) {
    if (value.isTensor()) {
        visit(value.toTensor());
    } else if (value.isTensorList()) {
        for (const Tensor &tensor : value.toTensorVector()) visit(tensor);
    } else if (value.isList()) {
        for (const IValue &element : value.toListRef())
            if (element.isTensor()) visit(element.toTensor());
    }
}

IValue host_value(const IValue &value) {
    const auto moved = [](const Tensor &tensor) { return on_card(tensor) ? on_host(tensor) : tensor; };
    if (value.isTensor()) return moved(value.toTensor());
    if (value.isDevice()) return value.toDevice().is_cuda() ? IValue(at::Device(at::kCPU)) : value;
    if (value.isTensorList()) {
        std::vector<Tensor> tensors;
        for (const Tensor &tensor : value.toTensorVector()) tensors.push_back(moved(tensor));
        return IValue(tensors);
    }
    if (value.isList()) {
        auto copy = value.toList().copy();
        for (size_t at = 0; at < copy.size(); at++) {
            const IValue element = copy.get(at);
            if (element.isTensor()) copy.set(at, IValue(moved(element.toTensor())));
        }
        return copy;
    }
    return value;
}

/* ---- the host's large tensors ---------------------------------------------------------------------------------------- */

struct HostMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        if (size < LARGE_BYTES) return small().allocate(size);
        void *start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start == MAP_FAILED) throw std::bad_alloc();
        std::lock_guard<std::mutex> held(guard());
        sizes()[start] = size;
        bytes() += size;
        most() = std::max(most(), bytes());
        return {start, start, &release, at::Device(at::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void *to, const void *from, size_t size) const override { default_copy_data(to, from, size); }

    static c10::Allocator &small() {
        static c10::Allocator *before = c10::GetDefaultCPUAllocator();
        return *before;
    }
    static std::mutex &guard() {
        static auto *mutex = new std::mutex;
        return *mutex;
    }
    static std::unordered_map<void *, size_t> &sizes() {
        static auto *known = new std::unordered_map<void *, size_t>;
        return *known;
    }
    static size_t &bytes() {
        static size_t now = 0;
        return now;
    }
    static size_t &most() {
        static size_t peak = 0;
        return peak;
    }
    static void release(void *start) {
        {
            std::lock_guard<std::mutex> held(guard());
            const auto found = sizes().find(start);
            if (found != sizes().end()) {
                munmap(start, found->second);
                bytes() -= found->second;
                sizes().erase(found);
                return;
            }
        }
        small().raw_deleter()(start);
    }
};

bool on_host_plain(const Tensor &tensor) {
    return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.has_storage() &&
           !tensor.key_set().has_any(DispatchKeySet({DispatchKey::Python, DispatchKey::Fake, DispatchKey::Functionalize,
                                                     DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper}));
}

/* Whether it only works on the host, with large tensors of floats among others, and autograd need not know. */
bool works_on_large(at::ArrayRef<IValue> arguments) {
    bool large = false, plain = true;
    for (const IValue &argument : arguments) {
        if (argument.isDevice()) plain &= argument.toDevice().is_cpu();
        each_tensor(argument, [&](const Tensor &tensor) {
            if (!tensor.defined()) return;
            plain &= on_host_plain(tensor) && !(tensor.requires_grad() && at::GradMode::is_enabled());
            large |= plain && tensor.is_floating_point() && tensor.numel() * tensor.itemsize() >= LARGE_BYTES;
        });
    }
    return large && plain;
}

Tensor shape_of(const Tensor &tensor) {
    if (!tensor.defined()) return tensor;
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

IValue shape_value(const IValue &value) {
    if (value.isTensor()) return shape_of(value.toTensor());
    if (value.isDevice()) return IValue(at::Device(at::kMeta));
    if (value.isTensorList()) {
        std::vector<Tensor> shapes;
        for (const Tensor &tensor : value.toTensorVector()) shapes.push_back(shape_of(tensor));
        return IValue(shapes);
    }
    if (value.isList()) {
        auto copy = value.toList().copy();
        for (size_t at = 0; at < copy.size(); at++) {
            const IValue element = copy.get(at);
            if (element.isTensor()) copy.set(at, IValue(shape_of(element.toTensor())));
        }
        return copy;
    }
    return value;
}

Tensor blank(const Tensor &shape) { /* fresh memory of the size; what is small is zero, and what is large reads as zero */
    if (!shape.defined()) return shape;
    Tensor made = at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(at::kCPU));
    if (made.numel() * made.itemsize() < LARGE_BYTES) made.zero_();
    return made;
}

/* What changes large tensors in place changes nothing; its results are the tensors themselves. */
bool leave_unchanged(const c10::OperatorHandle &op, const Kind &kind, Stack *stack) {
    const auto &schema = op.schema();
    Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(kind.written.size()), stack->end()), results;
    for (const auto &result : schema.returns()) {
        const auto *alias = result.alias_info();
        if (!alias) return false;
        size_t at = 0;
        while (at < arguments.size() && !(schema.arguments()[at].alias_info() && kind.written[at] &&
                                          schema.arguments()[at].alias_info()->beforeSets() == alias->beforeSets()))
            at++;
        if (at == arguments.size()) return false;
        results.push_back(arguments[at]);
    }
    torch::jit::drop(*stack, arguments.size());
    stack->insert(stack->end(), results.begin(), results.end());
    return true;
}

/* What makes new tensors of large ones makes them of the right size, and fills none. */
bool leave_blank(const c10::OperatorHandle &op, const Kind &kind, Stack *stack) {
    Stack shapes;
    for (const IValue &argument : torch::jit::last(*stack, kind.written.size())) shapes.push_back(shape_value(argument));
    for (const auto &result : op.schema().returns())
        if (result.alias_info()) return false;
    c10::impl::ExcludeDispatchKeyGuard unseen(DispatchKeySet(KEY) | at::autocast_dispatch_keyset);
    at::AutoDispatchBelowADInplaceOrView without_autograd;
    try {
        op.callBoxed(&shapes);
    } catch (const std::exception &) {
        return false;
    }
    torch::jit::drop(*stack, kind.written.size());
    for (const IValue &shape : shapes) {
        if (shape.isTensor()) {
            stack->emplace_back(blank(shape.toTensor()));
        } else if (shape.isTensorList()) {
            std::vector<Tensor> made;
            for (const Tensor &one : shape.toTensorVector()) made.push_back(blank(one));
            stack->emplace_back(made);
        } else {
            stack->push_back(shape);
        }
    }
    return true;
}

bool skip_on_host(const c10::OperatorHandle &op, const Kind &kind, at::ArrayRef<IValue> arguments, Stack *stack) {
    if (!kind.computes || !works_on_large(arguments)) return false;
    if (kind.writes) return !kind.resizes && leave_unchanged(op, kind, stack);
    return !kind.counts && leave_blank(op, kind, stack);
}

/* ---- one operation -------------------------------------------------------------------------------------------------- */

struct Look {
    bool card = false;    /* something of it lies on the card, or will */
    bool foreign = false; /* tensors without plain memory: others ask again with plain ones */
    bool readable = true; /* all that it reads is known and small */
    bool floats = false;
    size_t bytes = 0;
};

Look examine(const Kind &kind, at::ArrayRef<IValue> arguments) {
    Look look;
    for (size_t at = 0; at < arguments.size(); at++) {
        if (arguments[at].isDevice()) look.card |= arguments[at].toDevice().is_cuda();
        each_tensor(arguments[at], [&](const Tensor &tensor) {
            if (!tensor.defined()) return;
            const bool card = on_card(tensor);
            if (!card && !(tensor.is_cpu() && tensor.has_storage() && !tensor.key_set().has(DispatchKey::Python))) {
                look.foreign = true;
                return;
            }
            look.card |= card;
            const bool whole = at::isIntegralType(tensor.scalar_type(), true);
            look.floats |= !whole;
            if (kind.shapes) return;
            const size_t bytes = extent_bytes(tensor);
            look.bytes += bytes;
            if (bytes > (whole ? MOST_BYTES : MOST_FLOAT_BYTES)) look.readable = false;
            else if (card && look.readable && !(kind.written[at] && kind.overwrites) && !known(tensor)) look.readable = false;
        });
        if (look.foreign) break;
    }
    look.readable &= look.bytes <= MOST_BYTES;
    return look;
}

bool host_memory_is_written(const Kind &kind, at::ArrayRef<IValue> arguments) {
    bool found = false;
    for (size_t at = 0; at < arguments.size(); at++)
        if (kind.written[at]) each_tensor(arguments[at], [&](const Tensor &tensor) { found |= tensor.defined() && !on_card(tensor); });
    return found;
}

bool too_large(at::ArrayRef<IValue> results) {
    bool found = false;
    for (const IValue &result : results)
        each_tensor(result, [&](const Tensor &tensor) {
            if (tensor.defined())
                found |= extent_bytes(tensor) > (at::isIntegralType(tensor.scalar_type(), true) ? MOST_BYTES : MOST_FLOAT_BYTES);
        });
    return found;
}

bool compute_on_host(const c10::OperatorHandle &op, const Kind &kind, at::ArrayRef<IValue> arguments, Stack &results) {
    for (size_t at = 0; at < arguments.size(); at++) {
        bool opened = true;
        each_tensor(arguments[at], [&](const Tensor &tensor) {
            if (on_card(tensor) && tensor.numel()) opened &= phantom_open(start_of(tensor), extent_bytes(tensor)) != 0;
        });
        if (!opened && !kind.shapes) return false;
        results.push_back(host_value(arguments[at]));
    }
    c10::impl::ExcludeDispatchKeyGuard unseen(DispatchKeySet(KEY) | at::autocast_dispatch_keyset | DispatchKeySet(DispatchKey::PreDispatch));
    at::AutoDispatchBelowADInplaceOrView without_autograd;
    try {
        op.callBoxed(&results);
    } catch (const std::exception &) { /* the CPU cannot do it, or refuses the values: then nothing is known */
        results.clear();
        return false;
    }
    return true;
}

void store(const Tensor &target, const Tensor &value) {
    if (!on_card(target) || !target.numel()) return;
    if (!value.defined() || value.sizes() != target.sizes() || value.scalar_type() != target.scalar_type() ||
        !phantom_open(start_of(target), extent_bytes(target))) {
        mark(target, false);
        return;
    }
    if (start_of(value) != start_of(target)) {
        c10::impl::ExcludeDispatchKeyGuard unseen(DispatchKeySet{KEY});
        at::AutoDispatchBelowADInplaceOrView without_autograd;
        on_host(target).copy_(value);
    }
    mark(target, true);
}

void store_all(at::ArrayRef<IValue> targets, const Stack &values) {
    std::vector<Tensor> from;
    size_t at = 0;
    for (const IValue &value : values) each_tensor(value, [&](const Tensor &tensor) { from.push_back(tensor); });
    for (const IValue &target : targets)
        each_tensor(target, [&](const Tensor &tensor) { store(tensor, at < from.size() ? from[at] : Tensor()); at++; });
}

void mark_all(const Kind *kind, at::ArrayRef<IValue> values, bool is_known_now) {
    for (size_t at = 0; at < values.size(); at++)
        if (!kind || kind->written[at]) each_tensor(values[at], [&](const Tensor &tensor) { mark(tensor, is_known_now); });
}

void run_on_card(const c10::OperatorHandle &op, DispatchKeySet keys, Stack *stack) {
    struct Deeper {
        Deeper() { depth++; }
        ~Deeper() { depth--; }
    } deeper;
    op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, KEY), stack);
}

/* What a full batch answers where nothing is known: every entry of a mask is set. Returns whether it did. */
bool answer_fully(const Kind &kind, at::ArrayRef<IValue> arguments, Stack *stack) {
    if (kind.name != "nonzero" || kind.writes) return false;
    const Tensor mask = arguments[0].toTensor();
    const Tensor all = at::empty({mask.numel(), mask.dim()}, mask.options().dtype(at::kLong));
    torch::jit::drop(*stack, arguments.size());
    stack->emplace_back(all);
    return true;
}

void set_true(const Tensor &answer) {
    if (!on_card(answer) || answer.scalar_type() != at::kBool || answer.numel() != 1) return;
    mark(answer, true);
    *static_cast<bool *>(const_cast<void *>(start_of(answer))) = true;
}

/* Sizes that depend on data: known data decides them, and the result is brought to the card. */
bool count(const c10::OperatorHandle &op, const Kind &kind, Stack &arguments, Stack *stack) {
    Stack results;
    at::Device card(at::kCUDA);
    for (const IValue &argument : arguments)
        each_tensor(argument, [&](const Tensor &tensor) { if (on_card(tensor)) card = tensor.device(); });
    if (!compute_on_host(op, kind, arguments, results)) return false;
    torch::jit::drop(*stack, arguments.size());
    for (const IValue &result : results) {
        if (!result.isTensor() || !result.toTensor().defined()) {
            stack->push_back(result);
            continue;
        }
        const Tensor value = result.toTensor(), target = at::empty(value.sizes(), value.options().device(card));
        store(target, value.contiguous());
        stack->emplace_back(target);
    }
    return true;
}

void shadowed(const c10::OperatorHandle &op, DispatchKeySet keys, Stack *stack) {
    const Kind &kind = kind_of(op);
    const size_t count_of_arguments = op.schema().arguments().size();
    const auto passed = torch::jit::last(*stack, count_of_arguments);
    if (kind.passes || (depth && kind.writes) || c10::impl::dispatch_mode_enabled())
        return op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, KEY), stack);
    if (skip_on_host(op, kind, passed, stack)) return;
    const Look look = examine(kind, passed);
    if (look.foreign || !look.card || (kind.writes && host_memory_is_written(kind, passed)))
        return op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, KEY), stack);
    const bool computable = look.readable && !kind.opaque;
    if (!computable && answer_fully(kind, passed, stack)) return;
    Stack arguments;
    if (computable || kind.writes) arguments.assign(passed.begin(), passed.end());
    if (computable && kind.counts && !look.floats && !kind.writes && count(op, kind, arguments, stack)) return;
    Stack results;
    /* What is changed in place is changed before the card "changes" it; results are filled once they are there. */
    bool computed = computable && kind.writes && compute_on_host(op, kind, arguments, results);
    run_on_card(op, keys, stack);
    const auto returned = torch::jit::last(*stack, op.schema().returns().size());
    if (kind.writes) {
        mark_all(&kind, arguments, computed);
        return;
    }
    computed = computable && !too_large(returned) && compute_on_host(op, kind, arguments, results);
    if (computed) {
        store_all(returned, results);
    } else {
        mark_all(nullptr, returned, false);
        if (kind.name == "all" && returned.size() == 1 && returned[0].isTensor()) set_true(returned[0].toTensor());
    }
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&shadowed>());
}

} // namespace

/* Looks at what this thread does from now on, and at the backward passes that it starts. */
extern "C" __attribute__((visibility("default"))) void shadow_begin(void) {
    static HostMemory host;
    HostMemory::small();
    c10::SetCPUAllocator(&host, 255);
    c10::impl::tls_set_dispatch_key_included(KEY, true);
}

/* Bytes of the host that large tensors took at most, had they been filled. */
extern "C" __attribute__((visibility("default"))) size_t shadow_most_host(void) { return HostMemory::most(); }
