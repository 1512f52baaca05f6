/*
 * A GPU that does not exist, for the CUDA build of PyTorch.
 *
 * Stands in for the CUDA runtime, the driver's virtual memory calls and cuBLAS. Device memory is reserved address space
 * that nothing may touch; kernels are launched and do nothing; every size, limit and attribute is that of one card of
 * memc's catalogue. What runs above is the real thing: torch's dispatch, its caching allocator, the host code of every
 * library. So the counters of torch's allocator are those of the real card.
 *
 * The process that is started with it names the card in MEMC_PHANTOM:
 *   count|capacity|context|major|minor|multiprocessors|name      (sizes in bytes, of one card)
 * and may name a file in MEMC_PHANTOM_NOTES, to which the functions are written that were called and are not modelled.
 *
 * What a computation would have written is not known, with one exception: small things that the host copied to the device
 * (sizes, masks, indices) are kept in real memory, and shadow.cpp computes there what torch computes of them, because the
 * host's control flow may depend on it. Small copies from the device give what is known, else zeros. Large ones leave the
 * host's pages alone, so that a model of any size passes through a small machine.
 *
 * Functions that the loaded libraries need and this file lacks are generated beside it: they answer "success", and say
 * so once through phantom_note.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define GRANULE ((size_t)2 << 20) /* what a real driver maps at a time */
#define MAX_CARDS 64
#define MAX_REMEMBERED ((size_t)64 << 10)

/* ---- the card ---------------------------------------------------------------------------------------------------- */

static struct {
    int count, major, minor, multiprocessors;
    size_t capacity, context;
    char name[256];
} card = {1, 8, 0, 108, (size_t)80 << 30, 0, "phantom"};

static size_t used[MAX_CARDS];   /* bytes of each card that are backed, without the context */
static char started[MAX_CARDS];  /* whether the process has a context on it */
static __thread int current;     /* the thread's device */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void read_card(void) {
    const char *text = getenv("MEMC_PHANTOM");
    if (!text) return;
    unsigned long long capacity, context;
    if (sscanf(text, "%d|%llu|%llu|%d|%d|%d|%255[^\n]", &card.count, &capacity, &context, &card.major, &card.minor,
               &card.multiprocessors, card.name) != 7 || card.count < 1 || card.count > MAX_CARDS) {
        fprintf(stderr, "MEMC_PHANTOM=%s does not describe a card\n", text);
        _exit(2);
    }
    card.capacity = capacity;
    card.context = context;
}

static void start_context(int device) { started[device] = 1; }

static int take(int device, size_t size) { /* with the lock held: whether the card has room */
    size_t context = card.context;
    start_context(device);
    if (used[device] + size + context > card.capacity) return 0;
    used[device] += size;
    return 1;
}

/* ---- addresses --------------------------------------------------------------------------------------------------- */

enum kind { DEVICE, PINNED, MANAGED };
struct range { char *start; size_t size; enum kind kind; int device; char *mapped; size_t mapped_size; unsigned char *opened; };
static struct range *ranges; /* sorted by start */
static size_t range_count, range_room;

static size_t first_after(const char *address) { /* index of the first range that starts above it */
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start <= address) low = middle + 1; else high = middle;
    }
    return low;
}

static struct range *find(const void *address) {
    size_t at = first_after(address);
    if (!at) return NULL;
    struct range *range = &ranges[at - 1];
    return (const char *)address < range->start + range->size ? range : NULL;
}

static void *reserve(size_t size, enum kind kind, int device) {
    int access = kind == DEVICE ? PROT_NONE : PROT_READ | PROT_WRITE;
    size_t mapped_size = size + GRANULE;
    char *mapped = mmap(NULL, mapped_size, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return NULL;
    char *start = (char *)(((uintptr_t)mapped + GRANULE - 1) & ~(uintptr_t)(GRANULE - 1));
    if (range_count == range_room) {
        size_t room = range_room ? range_room * 2 : 1024;
        struct range *more = realloc(ranges, room * sizeof *ranges);
        if (!more) { munmap(mapped, mapped_size); return NULL; }
        ranges = more;
        range_room = room;
    }
    size_t at = first_after(start);
    memmove(ranges + at + 1, ranges + at, (range_count - at) * sizeof *ranges);
    ranges[at] = (struct range){start, size, kind, device, mapped, mapped_size, NULL};
    range_count++;
    return start;
}

static void forget(const void *address, size_t size);

static int release(void *address, struct range *out) {
    struct range *range = find(address);
    if (!range || range->start != address) return 0;
    *out = *range;
    forget(range->start, range->size);
    free(range->opened);
    munmap(range->mapped, range->mapped_size);
    size_t at = (size_t)(range - ranges);
    memmove(ranges + at, ranges + at + 1, (range_count - at - 1) * sizeof *ranges);
    range_count--;
    return 1;
}

/* ---- what is known of the device's memory ---------------------------------------------------------------------------- */

/* Bytes that the host copied there, or that shadow.cpp computed. Only they are backed by real memory: their granules are
 * opened, all others may not be touched. Intervals are sorted, and do not touch each other. */
struct interval { const char *start, *end; };
static struct interval *known;
static size_t known_count, known_room;

static size_t first_ending_after(const char *address) { /* index of the first interval that ends above it */
    size_t low = 0, high = known_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (known[middle].end <= address) low = middle + 1; else high = middle;
    }
    return low;
}

static int is_known(const void *address, size_t size) {
    const char *start = address;
    size_t at = first_ending_after(start);
    return size == 0 || (at < known_count && known[at].start <= start && start + size <= known[at].end);
}

static void replace_known(size_t from, size_t to, const struct interval *with, size_t count) {
    size_t after = known_count - (to - from) + count;
    if (after > known_room) {
        known_room = after * 2;
        known = realloc(known, known_room * sizeof *known);
        if (!known) abort();
    }
    memmove(known + from + count, known + to, (known_count - to) * sizeof *known);
    if (count) memcpy(known + from, with, count * sizeof *with);
    known_count = after;
}

static void forget(const void *address, size_t size) {
    const char *start = address, *end = start + size;
    size_t from = first_ending_after(start), to = from, count = 0;
    struct interval rest[2];
    while (to < known_count && known[to].start < end) to++;
    if (from == to) return;
    if (known[from].start < start) rest[count++] = (struct interval){known[from].start, start};
    if (known[to - 1].end > end) rest[count++] = (struct interval){end, known[to - 1].end};
    replace_known(from, to, rest, count);
}

static void learn(const void *address, size_t size) {
    struct interval whole = {address, (const char *)address + size};
    size_t from = first_ending_after(whole.start - 1), to = from;
    if (!size) return;
    while (to < known_count && known[to].start <= whole.end) to++;
    if (from < to) {
        if (known[from].start < whole.start) whole.start = known[from].start;
        if (known[to - 1].end > whole.end) whole.end = known[to - 1].end;
    }
    replace_known(from, to, &whole, 1);
}

static int open_memory(const void *address, size_t size) { /* makes device memory readable and writable */
    struct range *range = find(address);
    if (!range || range->kind != DEVICE || !size) return range && range->kind != DEVICE;
    size_t from = (size_t)((const char *)address - range->start) / GRANULE;
    size_t to = (size_t)((const char *)address + size - 1 - range->start) / GRANULE;
    if (to * GRANULE >= range->size) return 0;
    if (!range->opened && !(range->opened = calloc(range->size / GRANULE + 1, 1))) return 0;
    for (size_t at = from; at <= to; at++) {
        if (range->opened[at]) continue;
        if (mprotect(range->start + at * GRANULE, GRANULE, PROT_READ | PROT_WRITE)) return 0;
        range->opened[at] = 1;
    }
    return 1;
}

static void close_memory(const void *address, size_t size) { /* whole granules: what they held is gone */
    struct range *range = find(address);
    forget(address, size);
    if (!range || !range->opened) return;
    size_t from = (size_t)((const char *)address - range->start) / GRANULE;
    for (size_t at = from; at < from + size / GRANULE; at++) {
        if (!range->opened[at]) continue;
        madvise(range->start + at * GRANULE, GRANULE, MADV_DONTNEED);
        mprotect(range->start + at * GRANULE, GRANULE, PROT_NONE);
        range->opened[at] = 0;
    }
}

/* For shadow.cpp: whether all of this is known; makes it accessible; says that it is known now, or no longer. */
API int phantom_known(const void *address, size_t size) {
    pthread_mutex_lock(&lock);
    int answer = is_known(address, size);
    pthread_mutex_unlock(&lock);
    return answer;
}
API int phantom_open(const void *address, size_t size) {
    pthread_mutex_lock(&lock);
    int answer = open_memory(address, size);
    pthread_mutex_unlock(&lock);
    return answer;
}
API void phantom_mark(const void *address, size_t size, int is_known_now) {
    pthread_mutex_lock(&lock);
    if (is_known_now && open_memory(address, size)) learn(address, size); else forget(address, size);
    pthread_mutex_unlock(&lock);
}

static void copy(void *to, const void *from, size_t size) {
    pthread_mutex_lock(&lock);
    struct range *target = find(to), *source = find(from);
    int to_device = target && target->kind == DEVICE, from_device = source && source->kind == DEVICE;
    int readable = !from_device || is_known(from, size);
    if (to_device) {
        if (readable && (from_device || size <= MAX_REMEMBERED) && open_memory(to, size)) {
            memmove(to, from, size);
            learn(to, size);
        } else {
            forget(to, size);
        }
    } else if (readable) {
        memmove(to, from, size);
    } else if (size <= MAX_REMEMBERED) {
        memset(to, 0, size); /* what is larger nobody decides by: its pages stay untouched */
    }
    pthread_mutex_unlock(&lock);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static size_t pinned_bytes, most_pinned_bytes; /* of the host, in whole pages */

static size_t pages(size_t size) { return (size + 4095) & ~(size_t)4095; }

static void pin(size_t size) { /* with the lock held */
    pinned_bytes += pages(size);
    if (pinned_bytes > most_pinned_bytes) most_pinned_bytes = pinned_bytes;
}

API cudaError_t cudaMalloc(void **out, size_t size) {
    size_t backed = (size + GRANULE - 1) & ~(GRANULE - 1);
    pthread_mutex_lock(&lock);
    cudaError_t error = cudaErrorMemoryAllocation;
    *out = NULL;
    if (take(current, backed)) {
        if ((*out = reserve(backed, DEVICE, current))) error = cudaSuccess; else used[current] -= backed;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

API cudaError_t cudaFree(void *address) {
    struct range range;
    if (!address) { start_context(current); return cudaSuccess; }
    pthread_mutex_lock(&lock);
    cudaError_t error = release(address, &range) ? cudaSuccess : cudaErrorInvalidValue;
    if (!error && range.kind == DEVICE) used[range.device] -= range.size;
    if (!error && range.kind == PINNED) pinned_bytes -= pages(range.size);
    pthread_mutex_unlock(&lock);
    return error;
}

API cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t stream) { return cudaMalloc(out, size); }
API cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }

static cudaError_t host_side(void **out, size_t size, enum kind kind) {
    pthread_mutex_lock(&lock);
    *out = reserve(size ? size : 1, kind, current);
    if (*out && kind == PINNED) pin(size ? size : 1);
    pthread_mutex_unlock(&lock);
    return *out ? cudaSuccess : cudaErrorMemoryAllocation;
}
API size_t phantom_most_pinned(void) { return most_pinned_bytes; }

API cudaError_t cudaHostAlloc(void **out, size_t size, unsigned int flags) { return host_side(out, size, PINNED); }
API cudaError_t cudaMallocHost(void **out, size_t size) { return host_side(out, size, PINNED); }
API cudaError_t cudaMallocManaged(void **out, size_t size, unsigned int flags) { return host_side(out, size, MANAGED); }
API cudaError_t cudaFreeHost(void *address) { return address ? cudaFree(address) : cudaSuccess; }
API cudaError_t cudaHostRegister(void *address, size_t size, unsigned int flags) {
    pthread_mutex_lock(&lock);
    pin(size);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void *address) { return cudaSuccess; }

API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    pthread_mutex_lock(&lock);
    start_context(current);
    *total_bytes = card.capacity;
    *free_bytes = card.capacity - card.context - used[current];
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    copy(to, from, size);
    return cudaSuccess;
}
API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    copy(to, from, size);
    return cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, cudaStream_t stream) {
    copy(to, from, size);
    return cudaSuccess;
}
API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                                  enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++) copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}
API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, enum cudaMemcpyKind kind) {
    return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void *address, int value, size_t size, cudaStream_t stream) {
    pthread_mutex_lock(&lock);
    struct range *range = find(address);
    if (range && range->kind == DEVICE) {
        if (size <= MAX_REMEMBERED && open_memory(address, size)) {
            memset(address, value, size);
            learn(address, size);
        } else {
            forget(address, size);
        }
    } else if (range == NULL || value != 0 || size <= MAX_REMEMBERED) memset(address, value, size);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}
API cudaError_t cudaMemset(void *address, int value, size_t size) { return cudaMemsetAsync(address, value, size, 0); }

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
    static const enum cudaMemoryType types[] = {cudaMemoryTypeDevice, cudaMemoryTypeHost, cudaMemoryTypeManaged};
    pthread_mutex_lock(&lock);
    struct range *range = find(address);
    memset(out, 0, sizeof *out);
    out->type = range ? types[range->kind] : cudaMemoryTypeUnregistered;
    out->device = range ? range->device : 0;
    out->devicePointer = range ? (void *)address : NULL;
    out->hostPointer = range && range->kind == DEVICE ? NULL : (void *)address;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
    static void *place;
    if (!place) cudaMalloc(&place, GRANULE); /* never read: kernels do nothing */
    *out = place;
    return cudaSuccess;
}

/* ---- the driver's virtual memory, on which expandable segments rest -------------------------------------------------- */

API CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *what, CUmemAllocationGranularity_flags which) {
    *out = GRANULE;
    return CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    pthread_mutex_lock(&lock);
    void *start = reserve(size, DEVICE, current);
    pthread_mutex_unlock(&lock);
    *out = (CUdeviceptr)(uintptr_t)start;
    return start ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
    struct range range;
    pthread_mutex_lock(&lock);
    int known = release((void *)(uintptr_t)start, &range);
    pthread_mutex_unlock(&lock);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
/* A handle is the size in granules, and the card in the lowest byte. */
API CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *what, unsigned long long flags) {
    int device = what->location.id;
    pthread_mutex_lock(&lock);
    int room = take(device, size);
    pthread_mutex_unlock(&lock);
    *out = (size / GRANULE) << 8 | (unsigned)device;
    return room ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    pthread_mutex_lock(&lock);
    used[handle & 255] -= (handle >> 8) * GRANULE;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult error, const char **out) {
    *out = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "error";
    return CUDA_SUCCESS;
}
API CUresult cuInit(unsigned int flags) { return CUDA_SUCCESS; }
API CUresult cuMemMap(CUdeviceptr start, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) { return CUDA_SUCCESS; }
API CUresult cuMemUnmap(CUdeviceptr start, size_t size) {
    pthread_mutex_lock(&lock);
    close_memory((const void *)(uintptr_t)start, size);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
API CUresult cuMemSetAccess(CUdeviceptr start, size_t size, const CUmemAccessDesc *who, size_t count) { return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
API CUresult cuGetErrorName(CUresult error, const char **out) { return cuGetErrorString(error, out); }
API CUresult cuDeviceGet(CUdevice *out, int ordinal) { *out = ordinal; return CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext *out) { *out = (CUcontext)&card; return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice *out) { *out = current; return CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = started[device];
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int *out) { *out = card.count; return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int *out) { *out = CUDART_VERSION; return CUDA_SUCCESS; }

/* What the driver offers and this file lacks: an answer that says so. */
static CUresult lacking(void) { return CUDA_ERROR_NOT_SUPPORTED; }

static cudaError_t entry_point(const char *name, void **out, enum cudaDriverEntryPointQueryResult *result) {
    *out = dlsym(RTLD_DEFAULT, name);
    if (!*out) *out = (void *)lacking;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned int version, unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *result) {
    return entry_point(name, out, result);
}
#if CUDART_VERSION < 13000
#undef cudaGetDriverEntryPoint
API cudaError_t cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    return entry_point(name, out, result);
}
#endif

/* ---- devices ----------------------------------------------------------------------------------------------------- */

API cudaError_t cudaGetDeviceCount(int *out) { *out = card.count; return cudaSuccess; }
API cudaError_t cudaGetDevice(int *out) { *out = current; return cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= card.count) return cudaErrorInvalidDevice;
    current = device;
    start_context(device);
    return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int *out) { *out = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *out) { *out = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int *out, int device, int peer) { *out = device != peer; return cudaSuccess; }
API cudaError_t cudaDeviceGetPCIBusId(char *out, int size, int device) {
    snprintf(out, (size_t)size, "00000000:%02X:00.0", device + 1);
    return cudaSuccess;
}

static int shared_memory(int optin) { /* bytes per block / per multiprocessor, CUDA C Programming Guide, compute capabilities */
    int capability = card.major * 10 + card.minor;
    int block = capability >= 90 && capability < 120 ? 227 : capability == 80 || capability == 87 ? 163 : capability >= 86 ? 99 : capability >= 75 ? 64 : 96;
    return (optin ? block : capability >= 90 && capability < 120 ? 228 : capability == 80 || capability == 87 ? 164 : capability >= 86 ? 100 : block) * 1024;
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    if (device < 0 || device >= card.count) return cudaErrorInvalidDevice;
    memset(out, 0, sizeof *out);
    strncpy(out->name, card.name, sizeof out->name - 1);
    out->uuid.bytes[0] = (char)device;
    out->totalGlobalMem = card.capacity;
    out->major = card.major;
    out->minor = card.minor;
    out->multiProcessorCount = card.multiprocessors;
    out->warpSize = 32;
    out->maxThreadsPerBlock = 1024;
    out->maxThreadsPerMultiProcessor = card.major * 10 + card.minor >= 86 && card.major < 9 ? 1536 : card.major * 10 + card.minor == 75 ? 1024 : 2048;
    out->sharedMemPerBlock = 48 << 10;
    out->sharedMemPerBlockOptin = (size_t)shared_memory(1);
    out->sharedMemPerMultiprocessor = (size_t)shared_memory(0);
    out->regsPerBlock = out->regsPerMultiprocessor = 65536;
    out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
    out->maxThreadsDim[2] = 64;
    out->maxGridSize[0] = 2147483647;
    out->maxGridSize[1] = out->maxGridSize[2] = 65535;
    out->maxBlocksPerMultiProcessor = 32;
    out->l2CacheSize = 50 << 20;
    out->textureAlignment = 512;
    out->memoryBusWidth = 5120;
    out->concurrentKernels = out->unifiedAddressing = out->managedMemory = out->canMapHostMemory = 1;
    out->asyncEngineCount = 3;
    out->pciBusID = device + 1;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp card_properties;
    cudaError_t error = cudaGetDeviceProperties(&card_properties, device);
    if (error) return error;
    switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *out = card.multiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *out = card.major; break;
    case cudaDevAttrComputeCapabilityMinor: *out = card.minor; break;
    case cudaDevAttrWarpSize: *out = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *out = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *out = 64; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *out = card_properties.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = shared_memory(1); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *out = shared_memory(0); break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *out = 65536; break;
    case cudaDevAttrMaxGridDimX: *out = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *out = 65535; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *out = 32; break;
    case cudaDevAttrL2CacheSize: *out = card_properties.l2CacheSize; break;
    case cudaDevAttrTextureAlignment: *out = 512; break;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrManagedMemory: case cudaDevAttrConcurrentKernels: case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrCooperativeLaunch: *out = 1; break;
    default: *out = 0;
    }
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
API const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : error == cudaSuccess ? "no error" : "an error of the phantom card";
}
API const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : error == cudaSuccess ? "cudaSuccess" : "cudaErrorUnknown";
}

/* ---- the host's own memory ----------------------------------------------------------------------------------------- */

/* Scripts ask how much memory the host has left. It is the planned one's, MEMC_PHANTOM_HOST bytes, in place of this one's. */
static int stand_in(const char *path) { /* a file of its own with what the planned host would say; -1 for other files */
    const char *bytes = getenv("MEMC_PHANTOM_HOST");
    char text[256] = "";
    if (!bytes || !path) return -1;
    unsigned long long kib = strtoull(bytes, NULL, 10) / 1024;
    if (!strcmp(path, "/proc/meminfo"))
        snprintf(text, sizeof text, "MemTotal:       %llu kB\nMemFree:        %llu kB\nMemAvailable:   %llu kB\nBuffers:        0 kB\n"
                 "Cached:         0 kB\nSwapTotal:      0 kB\nSwapFree:       0 kB\nShmem:          0 kB\nSlab:           0 kB\n", kib, kib, kib);
    else if (!strcmp(path, "/sys/fs/cgroup/memory.max"))
        snprintf(text, sizeof text, "max\n");
    else
        return -1;
    int file = memfd_create("phantom", MFD_CLOEXEC);
    if (file >= 0 && (write(file, text, strlen(text)) < 0 || lseek(file, 0, SEEK_SET) < 0)) { close(file); file = -1; }
    return file;
}
static int open_really(const char *name, const char *path, int flags, int mode) {
    int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, name);
    int file = (flags & O_ACCMODE) == O_RDONLY ? stand_in(path) : -1;
    return file >= 0 ? file : real(path, flags, mode);
}
API int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
    va_end(rest);
    return open_really("open", path, flags, mode);
}
API int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;
    va_end(rest);
    return open_really("open64", path, flags, mode);
}

/* Linux refuses a private mapping that is larger than the machine's memory, unless it is told that it will not be filled.
 * Files of weights are mapped so, and nobody reads them here. */
API void *mmap(void *wish, size_t size, int access, int flags, int file, off_t offset) {
    static void *(*real)(void *, size_t, int, int, int, off_t);
    if (!real) real = (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
    if ((flags & MAP_PRIVATE) && file >= 0) flags |= MAP_NORESERVE;
    return real(wish, size, access, flags, file, offset);
}
API void *mmap64(void *wish, size_t size, int access, int flags, int file, off_t offset) {
    return mmap(wish, size, access, flags, file, offset);
}

/* ---- streams, events, kernels: all is done at once, and nothing happens ---------------------------------------------- */

static void *handle(void) { /* never followed, only compared */
    static uintptr_t next = 0x1000;
    return (void *)__atomic_add_fetch(&next, 64, __ATOMIC_RELAXED);
}
API cudaError_t cudaStreamCreate(cudaStream_t *out) { *out = handle(); return cudaSuccess; }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned int flags) { *out = handle(); return cudaSuccess; }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned int flags, int priority) { *out = handle(); return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *out) { *out = 0; return cudaSuccess; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out) { *out = cudaStreamCaptureStatusNone; return cudaSuccess; }
#if CUDART_VERSION < 13000
#define CAPTURE_INFO "cudaStreamGetCaptureInfo_v2"
#else
#define CAPTURE_INFO "cudaStreamGetCaptureInfo"
#endif
/* Its parameters differ by version; all begin alike, and the further results stay unset. */
API cudaError_t capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *out, unsigned long long *id)
    __asm__(CAPTURE_INFO);
API cudaError_t capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *out, unsigned long long *id) {
    *out = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t *out) { *out = handle(); return cudaSuccess; }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned int flags) { *out = handle(); return cudaSuccess; }
API cudaError_t cudaEventElapsedTime(float *out, cudaEvent_t from, cudaEvent_t to) { *out = 1; return cudaSuccess; }
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }
API cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) { return cudaSuccess; }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *configuration, const void *function, void **arguments) { return cudaSuccess; }
API cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) { return cudaSuccess; }
API cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) { return cudaSuccess; }
API cudaError_t __cudaGetKernel(void **out, const void *function) { *out = (void *)function; return cudaSuccess; }
API void **__cudaRegisterFatBinary(void *code) { static void *place; return &place; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) { function(data); return cudaSuccess; }
API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned int flags) {
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}
/* Kernels are compiled for some capabilities, and a card runs those of the nearest below; cub asks which these are. */
static int compiled_for(void) {
    static const int capabilities[] = {120, 100, 90, 86, 80, 75};
    int capability = card.major * 10 + card.minor;
    for (size_t i = 0; i < sizeof capabilities / sizeof *capabilities; i++)
        if (capability >= capabilities[i]) return capabilities[i];
    return capability;
}
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->binaryVersion = out->ptxVersion = compiled_for();
    out->maxDynamicSharedSizeBytes = shared_memory(1);
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *function, int threads, size_t shared) { *out = 2; return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *function, int threads, size_t shared, unsigned int flags) { *out = 2; return cudaSuccess; }

/* ---- cuBLAS and the others: handles that say success ----------------------------------------------------------------- */

API int cublasCreate_v2(void **out) { *out = handle(); return 0; }
API int cublasGetMathMode(void *blas, int *out) { *out = 0; return 0; }
API int cublasGetPointerMode_v2(void *blas, int *out) { *out = 0; return 0; }
API int cublasGetVersion_v2(void *blas, int *out) { *out = CUDART_VERSION * 10; return 0; }
API size_t cublasLtGetVersion(void) { return CUDART_VERSION * 10; }
API size_t cublasLtGetCudartVersion(void) { return CUDART_VERSION; }
API int cublasLtCreate(void **out) { *out = handle(); return 0; }
API int cublasLtMatmulDescCreate(void **out, int compute, int scale) { *out = handle(); return 0; }
API int cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t columns, int64_t stride) { *out = handle(); return 0; }
API int cublasLtMatmulPreferenceCreate(void **out) { *out = handle(); return 0; }
API int cublasLtMatmulAlgoGetHeuristic(void *blas, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted,
                                       void *results, int *found) { /* cublasLtMatmulHeuristicResult_t: 8 words of algorithm, workspace size, status, waves, 4 reserved */
    memset(results, 0, 64 + sizeof(size_t) + 4 + 4 + 16);
    *found = 1;
    return 0;
}
API int cusparseCreate(void **out) { *out = handle(); return 0; }
API int cusolverDnCreate(void **out) { *out = handle(); return 0; }
API int curandCreateGenerator(void **out, int kind) { *out = handle(); return 0; }
API size_t cudnnGetVersion(void) { return 0; }
API size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
API int ncclGetVersion(int *out) { *out = 22807; return 0; }
API const char *ncclGetErrorString(int error) { return "no error"; }

/* ---- NVML: torch asks it for the words of an out-of-memory error, DeepSpeed and others for the cards ------------------- */

struct nvml_memory { unsigned long long total, free, used; };
struct nvml_memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct nvml_process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };
#define NVML_INSUFFICIENT_SIZE 7

static int device_of(void *device) { return (int)(uintptr_t)device - 1; }
API int nvmlInit_v2(void) { return 0; }
API int nvmlInitWithFlags(unsigned flags) { return 0; }
API int nvmlShutdown(void) { return 0; }
API const char *nvmlErrorString(int error) { return error ? "not supported by the phantom card" : "success"; }
API int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "phantom"); return 0; }
API int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = CUDART_VERSION; return 0; }
API int nvmlDeviceGetCount_v2(unsigned *out) { *out = (unsigned)card.count; return 0; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) { *out = (void *)(uintptr_t)(index + 1); return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **out) {
    unsigned domain, number = 1;
    sscanf(bus, "%x:%x", &domain, &number);
    *out = (void *)(uintptr_t)number;
    return 0;
}
API int nvmlDeviceGetIndex(void *device, unsigned *out) { *out = (unsigned)device_of(device); return 0; }
API int nvmlDeviceGetName(void *device, char *out, unsigned size) { snprintf(out, size, "%s", card.name); return 0; }
API int nvmlDeviceGetUUID(void *device, char *out, unsigned size) { snprintf(out, size, "GPU-phantom-%d", device_of(device)); return 0; }
API int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = card.major; *minor = card.minor; return 0; }
API int nvmlDeviceGetMemoryInfo(void *device, struct nvml_memory *out) {
    unsigned long long taken = used[device_of(device)] + (started[device_of(device)] ? card.context : 0);
    *out = (struct nvml_memory){card.capacity, card.capacity - taken, taken};
    return 0;
}
API int nvmlDeviceGetMemoryInfo_v2(void *device, struct nvml_memory_v2 *out) {
    unsigned long long taken = used[device_of(device)] + (started[device_of(device)] ? card.context : 0);
    *out = (struct nvml_memory_v2){out->version, card.capacity, 0, card.capacity - taken, taken};
    return 0;
}
API int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, struct nvml_process *out) {
    int device_index = device_of(device);
    unsigned room = *count;
    *count = (unsigned)started[device_index];
    if (room < *count) return NVML_INSUFFICIENT_SIZE;
    if (*count) *out = (struct nvml_process){(unsigned)getpid(), used[device_index] + card.context, ~0u, ~0u};
    return 0;
}
API int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct nvml_process *out) {
    return nvmlDeviceGetComputeRunningProcesses(device, count, out);
}
#define NVML_NOT_SUPPORTED 3
/* Version, then 16 bytes of cluster, status, clique and state: zeros say that there is no fabric. */
API int nvmlDeviceGetGpuFabricInfoV(void *device, void *out) { memset((char *)out + 4, 0, 25); return 0; }
API int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *out) { return NVML_NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *out) { return NVML_NOT_SUPPORTED; }

/* ---- notes ------------------------------------------------------------------------------------------------------- */

void phantom_note(const char *name) {
    const char *path = getenv("MEMC_PHANTOM_NOTES");
    if (!path) return;
    FILE *file = fopen(path, "a");
    if (!file) return;
    fprintf(file, "%s\n", name);
    fclose(file);
}
