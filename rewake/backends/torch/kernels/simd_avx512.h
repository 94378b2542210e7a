// AVX-512 (F, BW, VL, DQ, VNNI, BF16): 16 lanes. Included inside a namespace, with the target switched on.

constexpr int W = 16;
constexpr int QK_ROWS = 8, PV_ROWS = 6;  // rows whose sums fit into the registers
constexpr int LINEAR_ROWS = 8;            // the same for products with weights
constexpr int FUSED_ROWS = 6;             // up to so many rows, codes are unpacked into registers, not into a tile
typedef float VF __attribute__((vector_size(64)));
typedef int32_t VI __attribute__((vector_size(64)));

inline VF load(const float* p) { return (VF)_mm512_loadu_ps(p); }
inline void store(float* p, VF x) { _mm512_storeu_ps(p, (__m512)x); }
inline VI load_int(const void* p) { return (VI)_mm512_loadu_si512(p); }
inline void store_int(void* p, VI x) { _mm512_storeu_si512(p, (__m512i)x); }
inline VF splat(float x) { return (VF)_mm512_set1_ps(x); }
inline VI splat_int(int32_t x) { return (VI)_mm512_set1_epi32(x); }
inline VF fma(VF a, VF b, VF c) { return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline VF max(VF a, VF b) { return (VF)_mm512_max_ps((__m512)a, (__m512)b); }
inline VF min(VF a, VF b) { return (VF)_mm512_min_ps((__m512)a, (__m512)b); }
inline VI max_int(VI a, VI b) { return (VI)_mm512_max_epi32((__m512i)a, (__m512i)b); }
inline float max_lane(VF a) { return _mm512_reduce_max_ps((__m512)a); }
inline float min_lane(VF a) { return _mm512_reduce_min_ps((__m512)a); }
// out[i] = the largest lane of v[i]
inline void max_lanes(const VF v[4], float out[4]) {
    const __m512 a = _mm512_max_ps(_mm512_unpacklo_ps((__m512)v[0], (__m512)v[1]), _mm512_unpackhi_ps((__m512)v[0], (__m512)v[1]));
    const __m512 b = _mm512_max_ps(_mm512_unpacklo_ps((__m512)v[2], (__m512)v[3]), _mm512_unpackhi_ps((__m512)v[2], (__m512)v[3]));
    __m512 c = _mm512_max_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
    c = _mm512_max_ps(c, _mm512_shuffle_f32x4(c, c, 0x4E));
    c = _mm512_max_ps(c, _mm512_shuffle_f32x4(c, c, 0xB1));
    _mm_storeu_ps(out, _mm512_castps512_ps128(c));
}
inline float sum_lanes(VF a) { return _mm512_reduce_add_ps((__m512)a); }
inline VI round_int(VF a) { return (VI)_mm512_cvtps_epi32((__m512)a); }
inline VF to_float(VI a) { return (VF)_mm512_cvtepi32_ps((__m512i)a); }

// a + b.low * c.low + b.high * c.high over signed 16-bit halves of each lane
inline VI dot16(VI a, VI b, VI c) { return (VI)_mm512_dpwssd_epi32((__m512i)a, (__m512i)b, (__m512i)c); }
inline VF dot_bf16(VF a, VI b, VI c) { return (VF)_mm512_dpbf16_ps((__m512)a, (__m512bh)b, (__m512bh)c); }

inline VF load_f16(const void* p) { return (VF)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

inline VI bytes(const uint8_t* p) { return (VI)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline VI signed_bytes(const uint8_t* p) { return (VI)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline VI words(const void* p) { return (VI)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
// 32 words, of which i and 16 + i become neighbours
inline VI joined_halves(__m512i x) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2,
                                           17, 1, 16, 0);
    return (VI)_mm512_permutexvar_epi16(order, x);
}
// lane i = word i of `low` and word i of `high`
inline VI word_pairs(const void* low, const void* high) {
    return joined_halves(_mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)low)),
                                            _mm256_loadu_si256((const __m256i*)high), 1));
}
inline void store_words(void* p, VI x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)x)); }
inline void store_bytes(void* p, VI x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x)); }
inline void store_i16(int16_t* p, VI x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16((__m512i)x)); }

// low halves of both, high halves of both
inline VI join(VI low, VI high) { return (low & splat_int(0xFFFF)) | (high << 16); }
inline VI join_high(VI low, VI high) { return ((low >> 16) & splat_int(0xFFFF)) | (high & splat_int(0xFFFF0000)); }

template <int H> inline VF swap_lanes(VF x) {  // lane i takes lane i ^ H
    __m512 v = (__m512)x;
    if constexpr (H == 1) return (VF)_mm512_permute_ps(v, 0xB1);
    if constexpr (H == 2) return (VF)_mm512_permute_ps(v, 0x4E);
    if constexpr (H == 4) return (VF)_mm512_shuffle_f32x4(v, v, 0xB1);
    return (VF)_mm512_shuffle_f32x4(v, v, 0x4E);
}

// out[j] lane t = dword j of row t: 16 rows of 32 bytes. With `regroup`, bytes 2,3 and 4,5 of every 8 change places.
template <bool regroup> inline void columns(const uint8_t* p, size_t stride, VI out[8]) {
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    __m512i r[8], s[8];
    for (int i = 0; i < 8; i++) {
        const int row = (i & 3) + 8 * (i >> 2);
        __m256i low = _mm256_loadu_si256((const __m256i*)(p + row * stride));
        __m256i high = _mm256_loadu_si256((const __m256i*)(p + (row + 4) * stride));
        r[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        if constexpr (regroup) r[i] = _mm512_shuffle_epi8(r[i], order);
    }
    for (int i = 0; i < 8; i += 2) {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int h = 0; h < 8; h += 4) {
        r[h] = _mm512_unpacklo_epi64(s[h], s[h + 2]);
        r[h + 1] = _mm512_unpackhi_epi64(s[h], s[h + 2]);
        r[h + 2] = _mm512_unpacklo_epi64(s[h + 1], s[h + 3]);
        r[h + 3] = _mm512_unpackhi_epi64(s[h + 1], s[h + 3]);
    }
    for (int j = 0; j < 4; j++) {
        out[j] = (VI)_mm512_shuffle_i32x4(r[j], r[j + 4], 0x88);
        out[j + 4] = (VI)_mm512_shuffle_i32x4(r[j], r[j + 4], 0xDD);
    }
}

// For groups of 32, which fill half a tile: both halves of a vector read the same 8 words or dwords, and shift them apart.
inline VI twice_words(const void* p) {
    __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return (VI)_mm512_inserti64x4(_mm512_castsi256_si512(x), x, 1);
}
inline VI twice_dwords(const void* p) { return (VI)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)p)); }
template <int LOW, int HIGH> inline VI shift_halves(VI x) {
    const __m512i by = _mm512_inserti64x4(_mm512_set1_epi32(LOW), _mm256_set1_epi32(HIGH), 1);
    return (VI)_mm512_srlv_epi32((__m512i)x, by);
}

// Two rows of 32 values -> 2 vectors, lanes (value of one row, value of the other).
template <int BITS> inline void unpack_half_pair(const uint8_t* even, const uint8_t* odd, VI* out) {
    if constexpr (BITS == 4) {
        const VI x = twice_words(even) | (twice_words(odd) << 16);
        out[0] = shift_halves<0, 4>(x) & splat_int(0x000F000F);
        out[1] = shift_halves<8, 12>(x) & splat_int(0x000F000F);
    } else {
        const VI a = twice_dwords(even), b = twice_dwords(odd);
        out[0] = shift_halves<0, 8>(join(a, b)) & splat_int(0x00FF00FF);
        out[1] = shift_halves<0, 8>(join_high(a, b)) & splat_int(0x00FF00FF);
    }
}

inline __m512i bf16_words(VF first, VF second) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }
inline void store_bf16(void* p, VF first, VF second) { _mm512_storeu_si512(p, bf16_words(first, second)); }
// lane i = both as bfloat16
inline VI bf16_pairs(VF low, VF high) { return joined_halves(bf16_words(low, high)); }

// 32 words: of every 8, 0 4 1 5 2 6 3 7
inline __m512i paired_words(__m512i x) {
    const __m512i order = _mm512_set_epi16(31, 27, 30, 26, 29, 25, 28, 24, 23, 19, 22, 18, 21, 17, 20, 16, 15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2,
                                           5, 1, 4, 0);
    return _mm512_permutexvar_epi16(order, x);
}
inline void store_paired_bf16(void* p, VF first, VF second) { _mm512_storeu_si512(p, paired_words(bf16_words(first, second))); }

// For tile registers.
inline VF signed_words(const int16_t* p) { return (VF)_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)p))); }
constexpr float CENTRED_NIBBLES[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
// table[lowest nibble of each lane]
inline VF lookup(VI x, const float (&table)[16]) { return (VF)_mm512_permutexvar_ps((__m512i)x, _mm512_loadu_ps(table)); }
// each lane + the sum of x's bytes
inline VI add_bytes(VI sum, VI x) { return (VI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, _mm512_set1_epi8(1)); }
// lane i = the upper halves of both: bfloat16, rounded towards 0
inline VI upper_halves(VF low, VF high) { return (VI)_mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32((__m512i)low, 16), (__m512i)high); }
// EXP2_UP's 2^x, for x up to 127; the smallest normal numbers from -125 down (smaller ones cost a core hundreds of cycles)
inline VF exp2_bounded(VF x) {
    const __m512 y = (__m512)max(x, splat(-125)), f = _mm512_reduce_ps(y, 1);  // what is above the next lower integer
    VF p = fma((VF)f, splat(EXP2_UP[3]), splat(EXP2_UP[2]));
    p = fma((VF)f, p, splat(EXP2_UP[1]));
    return (VF)_mm512_scalef_ps((__m512)fma((VF)f, p, splat(EXP2_UP[0])), y);
}
