/*
 * Keeps what is known of the phantom card's memory true: computes small operations on known data.
 *
 * Kernels of the phantom card do nothing, but libraries ask the device questions: is a mask full, does a row hold several
 * samples, how many tokens carry loss. Their answers decide which kernels run and how large tensors are. All that such
 * questions read came from the host a moment ago. So this looks at every operation of torch on the card, before autograd
 * and beside it: where all of its inputs are known and small, the same operation is done by torch on the CPU, in the very
 * memory that the card's addresses name, and its results are known in turn. Everything else makes its results unknown.
 *
 * Nothing is changed on the way: the operation runs on the card as always and allocates what it allocates.
 */
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <mutex>
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

thread_local int depth = 0; /* how many operations enclose this one */

/* ---- what kind of operation it is -------------------------------------------------------------------------------- */

struct Kind {
    bool passes = false;     /* computes nothing itself: views, and operations made of others, which are seen in turn */
    bool opaque = false;     /* cannot be done on the CPU, or should not be */
    bool writes = false;     /* changes arguments */
    bool overwrites = false; /* what it writes to need not be known */
    bool shapes = false;     /* reads only the shape of its inputs */
    bool counts = false;     /* the size of its result depends on data */
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
    c10::impl::tls_set_dispatch_key_included(KEY, true);
}
