// Patches of pictures.

#include <stdint.h>

// out = (pixel - mean) / std of each channel: a row [channel][frame][y][x] from the pixels [y][x] of a patch, which are
// 3 bytes each. Both operations are rounded, and neither becomes one with another. One block for each row.
extern "C" __global__ void patches(const uint8_t *pixels, int area, int frames, float red_mean, float green_mean,
                                   float blue_mean, float red_std, float green_std, float blue_std, float *out,
                                   int64_t out_stride) {
    const uint8_t *from = pixels + static_cast<int64_t>(blockIdx.x) * 3 * area;
    float *to = out + blockIdx.x * out_stride;
    for (int i = threadIdx.x; i < 3 * area; i += blockDim.x) {
        int channel = i / area, at = i % area;
        float mean = channel == 0 ? red_mean : channel == 1 ? green_mean : blue_mean;
        float std = channel == 0 ? red_std : channel == 1 ? green_std : blue_std;
        float value = __fdiv_rn(__fsub_rn(static_cast<float>(from[3 * at + channel]), mean), std);
        for (int frame = 0; frame < frames; ++frame) to[(channel * frames + frame) * area + at] = value;
    }
}
