// Any machine: 4 lanes in the compiler's own vector types, which become SSE2, NEON or plain code.

constexpr int W = 4;
constexpr int QK_ROWS = 4, PV_ROWS = 2, FUSED_ROWS = 2, LINEAR_ROWS = 4;
typedef float VF __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));

inline VF load(const float* p) { VF x; memcpy(&x, p, sizeof x); return x; }
inline void store(float* p, VF x) { memcpy(p, &x, sizeof x); }
inline VI load_int(const void* p) { VI x; memcpy(&x, p, sizeof x); return x; }
inline void store_int(void* p, VI x) { memcpy(p, &x, sizeof x); }
inline VF splat(float x) { return VF{x, x, x, x}; }
inline VI splat_int(int32_t x) { return VI{x, x, x, x}; }
inline VF fma(VF a, VF b, VF c) { return a * b + c; }
inline VF pick(VI mask, VF a, VF b) { return (VF)((mask & (VI)a) | (~mask & (VI)b)); }
inline VF max(VF a, VF b) { return pick(a > b, a, b); }
inline VF min(VF a, VF b) { return pick(a < b, a, b); }
inline VI max_int(VI a, VI b) { const VI m = a > b; return (m & a) | (~m & b); }
inline float max_lane(VF a) { return fmaxf(fmaxf(a[0], a[2]), fmaxf(a[1], a[3])); }
inline float min_lane(VF a) { return fminf(fminf(a[0], a[2]), fminf(a[1], a[3])); }
inline void max_lanes(const VF v[4], float out[4]) {
    for (int i = 0; i < 4; i++) out[i] = max_lane(v[i]);
}
inline float sum_lanes(VF a) { return (a[0] + a[2]) + (a[1] + a[3]); }
inline VF to_float(VI a) { return __builtin_convertvector(a, VF); }
inline VI round_int(VF a) {  // half to even, for |a| < 2^22
    return (VI)(a + splat(ROUNDING)) - (VI)splat(ROUNDING);
}

inline VI dot16(VI a, VI b, VI c) {
#if defined(__SSE2__)
    return a + (VI)_mm_madd_epi16((__m128i)b, (__m128i)c);
#else
    return a + ((b << 16) >> 16) * ((c << 16) >> 16) + (b >> 16) * (c >> 16);
#endif
}
inline VF dot_bf16(VF a, VI b, VI c) {
    const VI high = splat_int(0xFFFF0000);
    return fma((VF)(b & high), (VF)(c & high), fma((VF)(b << 16), (VF)(c << 16), a));
}

inline VF load_f16(const void* p) {
    uint16_t x[W];
    memcpy(x, p, sizeof x);
    return VF{from_f16(x + 0), from_f16(x + 1), from_f16(x + 2), from_f16(x + 3)};
}

inline VI bytes(const uint8_t* p) { return VI{p[0], p[1], p[2], p[3]}; }
inline VI signed_bytes(const uint8_t* p) { return VI{(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]}; }
inline VI words(const void* p) { uint16_t x[W]; memcpy(x, p, sizeof x); return VI{x[0], x[1], x[2], x[3]}; }
inline VI word_pairs(const void* low, const void* high) { return words(low) | (words(high) << 16); }
inline void store_words(void* p, VI x) { for (int i = 0; i < W; i++) ((uint16_t*)p)[i] = (uint16_t)x[i]; }
inline void store_bytes(void* p, VI x) { for (int i = 0; i < W; i++) ((uint8_t*)p)[i] = (uint8_t)x[i]; }
inline void store_i16(int16_t* p, VI x) {
    for (int i = 0; i < W; i++) p[i] = (int16_t)(x[i] > 32767 ? 32767 : x[i] < -32768 ? -32768 : x[i]);
}

// low halves of both, high halves of both
inline VI join(VI low, VI high) { return (low & splat_int(0xFFFF)) | (high << 16); }
inline VI join_high(VI low, VI high) { return ((low >> 16) & splat_int(0xFFFF)) | (high & splat_int(0xFFFF0000)); }

template <int H> inline VF swap_lanes(VF x) { return VF{x[0 ^ H], x[1 ^ H], x[2 ^ H], x[3 ^ H]}; }

// out[j] lane t = dword j of row t: 4 rows of 32 bytes. With `regroup`, bytes 2,3 and 4,5 of every 8 change places.
template <bool regroup> inline void columns(const uint8_t* p, size_t stride, VI out[8]) {
    for (int j = 0; j < 8; j += 2)
        for (int t = 0; t < W; t++) {
            uint32_t x[2];
            memcpy(x, p + t * stride + 4 * j, sizeof x);
            const uint32_t a = (x[0] & 0xFFFF) | (x[1] << 16), b = (x[0] >> 16) | (x[1] & 0xFFFF0000u);
            out[j][t] = (int32_t)(regroup ? a : x[0]);
            out[j + 1][t] = (int32_t)(regroup ? b : x[1]);
        }
}

template <int BITS> inline void unpack_half_pair(const uint8_t*, const uint8_t*, VI*) {}  // every group fills whole tiles here
