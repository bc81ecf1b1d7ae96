// Weights copied to matrices, from others or as they were pushed, and written one by one.

#include "weights.cuh"

// Values that a thread copies.
constexpr int CHUNK = 8;

template <typename T>
struct alignas(16) Chunk {
    T values[CHUNK];
};

__device__ __forceinline__ void convert(Bf16 from, Bf16& to) {
    to = from;
}

__device__ __forceinline__ void convert(Bf16 from, float& to) {
    to = widen(from);
}

__device__ __forceinline__ void convert(F16 from, Bf16& to) {
    to = rounded<Bf16>(widen(from));
}

__device__ __forceinline__ void convert(F16 from, float& to) {
    to = widen(from);
}

__device__ __forceinline__ void convert(float from, Bf16& to) {
    to = rounded<Bf16>(from);
}

__device__ __forceinline__ void convert(float from, float& to) {
    to = from;
}

// Whether all chunks of rows lie together at multiples of 16 bytes.
template <typename T>
__device__ __forceinline__ bool is_in_chunks(const T* rows, int64_t stride, int run, int padded_run) {
    return reinterpret_cast<uintptr_t>(rows) % sizeof(uint4) == 0 && stride % CHUNK == 0 && run % CHUNK == 0 &&
           padded_run % CHUNK == 0;
}

// A block works on one row, a thread on one chunk of its columns.
template <typename From, typename To>
__device__ __forceinline__ void copy(const From* from, int64_t from_stride, int from_run, int from_padded_run, To* to,
                                     int64_t to_stride, int to_run, int to_padded_run, int columns) {
    const int first = (blockIdx.y * blockDim.x + threadIdx.x) * CHUNK;
    if (first >= columns) return;
    const bool in_chunks = is_in_chunks(from, from_stride, from_run, from_padded_run) &&
                           is_in_chunks(to, to_stride, to_run, to_padded_run);
    from += blockIdx.x * from_stride;
    to += blockIdx.x * to_stride;
    if (in_chunks) {
        const auto read = *reinterpret_cast<const Chunk<From>*>(from + place(first, from_run, from_padded_run));
        Chunk<To> written;
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) convert(read.values[i], written.values[i]);
        *reinterpret_cast<Chunk<To>*>(to + place(first, to_run, to_padded_run)) = written;
        return;
    }
    for (int column = first; column < min(first + CHUNK, columns); ++column) {
        convert(from[place(column, from_run, from_padded_run)], to[place(column, to_run, to_padded_run)]);
    }
}

// Elements as they come from the host: the row, the place there, and the bits of the float32 value.
struct Element {
    uint32_t row, place, value;
};

// A thread writes one element.
template <typename T>
__device__ __forceinline__ void write_elements(T* w, int64_t stride, const Element* elements, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const Element element = elements[i];
    w[element.row * stride + element.place] = rounded<T>(__uint_as_float(element.value));
}

#define COPY(name, From, To)                                                                                       \
    extern "C" __global__ void __launch_bounds__(128)                                                              \
        name(const From* from, int64_t from_stride, int from_run, int from_padded_run, To* to, int64_t to_stride, \
             int to_run, int to_padded_run, int columns) {                                                         \
        copy(from, from_stride, from_run, from_padded_run, to, to_stride, to_run, to_padded_run, columns);         \
    }

COPY(copy_bf16_bf16, Bf16, Bf16)
COPY(copy_bf16_f32, Bf16, float)
COPY(copy_f16_bf16, F16, Bf16)
COPY(copy_f16_f32, F16, float)
COPY(copy_f32_bf16, float, Bf16)
COPY(copy_f32_f32, float, float)

extern "C" __global__ void __launch_bounds__(128)
    write_elements_bf16(Bf16* w, int64_t stride, const Element* elements, int count) {
    write_elements(w, stride, elements, count);
}

extern "C" __global__ void __launch_bounds__(128)
    write_elements_f32(float* w, int64_t stride, const Element* elements, int count) {
    write_elements(w, stride, elements, count);
}
