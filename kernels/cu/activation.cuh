// Activation functions, as every kernel that needs one computes it.

#pragma once

// Its sum is never made one with a product, as that of `silu`.
__device__ inline float sigmoid(float x) {
    return 1.0f / __fadd_rn(1.0f, expf(-x));
}

// x * sigmoid(x). The sum is never made one with a product, so every kernel gets the same bits.
__device__ inline float silu(float x) {
    return x / __fadd_rn(1.0f, expf(-x));
}

// 0.5 * x * (1 + erf(x / sqrt(2))), without cancellation: the arithmetic of `gelu_of` in src/cpu/activation.rs, but for
// the exponential function.
__device__ inline float gelu_of(float x) {
    const float P[] = {-2.7063379e-4f, -9.0903027e-4f, 1.0771205e-3f, 6.9278976e-3f, -1.0479662e-2f,
                       -4.7256905e-2f, 2.3001929e-1f,  -5.0933224e-1f, 7.2908367e-1f};
    if (isnan(x)) return x;
    float a = fminf(fabsf(x), 16.0f);
    float inverse = 1.0f / (a + 3.0f);
    float q = fmaf(inverse, -6.0f, 1.0f);
    float p = P[0];
    for (int i = 1; i < 9; ++i) p = fmaf(p, q, P[i]);
    float square = a * a;
    float lost = fmaf(a, a, -square);  // by rounding the square
    float exp = expf(-0.5f * square);
    exp = fmaf(exp, -0.5f * lost, exp);
    return fmaf(-a, exp * (p * inverse), fmaxf(x, 0.0f));
}
