// AVX2 with FMA and F16C: 8 lanes. Included inside a namespace, with the target switched on.

constexpr int W = 8;
constexpr int QK_ROWS = 4, PV_ROWS = 2, FUSED_ROWS = 3, LINEAR_ROWS = 4;
typedef float VF __attribute__((vector_size(32)));
typedef int32_t VI __attribute__((vector_size(32)));

inline VF load(const float* p) { return (VF)_mm256_loadu_ps(p); }
inline void store(float* p, VF x) { _mm256_storeu_ps(p, (__m256)x); }
inline VI load_int(const void* p) { return (VI)_mm256_loadu_si256((const __m256i*)p); }
inline void store_int(void* p, VI x) { _mm256_storeu_si256((__m256i*)p, (__m256i)x); }
inline VF splat(float x) { return (VF)_mm256_set1_ps(x); }
inline VI splat_int(int32_t x) { return (VI)_mm256_set1_epi32(x); }
inline VF fma(VF a, VF b, VF c) { return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline VF max(VF a, VF b) { return (VF)_mm256_max_ps((__m256)a, (__m256)b); }
inline VF min(VF a, VF b) { return (VF)_mm256_min_ps((__m256)a, (__m256)b); }
inline VI max_int(VI a, VI b) { return (VI)_mm256_max_epi32((__m256i)a, (__m256i)b); }
inline float max_lane(VF a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128((__m256)a), _mm256_extractf128_ps((__m256)a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline float min_lane(VF a) { return -max_lane(-a); }
inline void max_lanes(const VF v[4], float out[4]) {
    for (int i = 0; i < 4; i++) out[i] = max_lane(v[i]);
}
inline float sum_lanes(VF a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128((__m256)a), _mm256_extractf128_ps((__m256)a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline VI round_int(VF a) { return (VI)_mm256_cvtps_epi32((__m256)a); }
inline VF to_float(VI a) { return (VF)_mm256_cvtepi32_ps((__m256i)a); }

// Left to itself, gcc adds the products of an unrolled loop as a tree, for which it puts them all on the stack first: half the speed.
inline VI dot16(VI a, VI b, VI c) {
    a = (VI)_mm256_add_epi32((__m256i)a, _mm256_madd_epi16((__m256i)b, (__m256i)c));
    __asm__("" : "+x"(a));
    return a;
}
inline VF dot_bf16(VF a, VI b, VI c) {
    const __m256i high = _mm256_set1_epi32(0xFFFF0000);
    a = fma((VF)_mm256_slli_epi32((__m256i)b, 16), (VF)_mm256_slli_epi32((__m256i)c, 16), a);
    return fma((VF)_mm256_and_si256((__m256i)b, high), (VF)_mm256_and_si256((__m256i)c, high), a);
}

inline VF load_f16(const void* p) { return (VF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

inline VI bytes(const uint8_t* p) { return (VI)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline VI signed_bytes(const uint8_t* p) { return (VI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline VI words(const void* p) { return (VI)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline VI word_pairs(const void* low, const void* high) {
    const __m128i a = _mm_loadu_si128((const __m128i*)low), b = _mm_loadu_si128((const __m128i*)high);
    return (VI)_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi16(a, b)), _mm_unpackhi_epi16(a, b), 1);
}
inline __m128i low_words(VI x) {
    const __m256i pick = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                          0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)x, pick), 0x08));
}
inline void store_words(void* p, VI x) { _mm_storeu_si128((__m128i*)p, low_words(x)); }
inline void store_bytes(void* p, VI x) {
    __m128i w = low_words(x);
    _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(w, w));
}
inline void store_i16(int16_t* p, VI x) {
    __m128i low = _mm256_castsi256_si128((__m256i)x), high = _mm256_extracti128_si256((__m256i)x, 1);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(low, high));
}

// low halves of both, high halves of both
inline VI join(VI low, VI high) { return (low & splat_int(0xFFFF)) | (high << 16); }
inline VI join_high(VI low, VI high) { return ((low >> 16) & splat_int(0xFFFF)) | (high & splat_int(0xFFFF0000)); }

template <int H> inline VF swap_lanes(VF x) {
    __m256 v = (__m256)x;
    if constexpr (H == 1) return (VF)_mm256_permute_ps(v, 0xB1);
    if constexpr (H == 2) return (VF)_mm256_permute_ps(v, 0x4E);
    return (VF)_mm256_permute2f128_ps(v, v, 1);
}

// out[j] lane t = dword j of row t: 8 rows of 32 bytes. With `regroup`, bytes 2,3 and 4,5 of every 8 change places.
template <bool regroup> inline void columns(const uint8_t* p, size_t stride, VI out[8]) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    __m256i r[8], s[8];
    for (int i = 0; i < 8; i++) {
        r[i] = _mm256_loadu_si256((const __m256i*)(p + i * stride));
        if constexpr (regroup) r[i] = _mm256_shuffle_epi8(r[i], order);
    }
    for (int i = 0; i < 8; i += 2) {
        s[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int h = 0; h < 8; h += 4) {
        r[h] = _mm256_unpacklo_epi64(s[h], s[h + 2]);
        r[h + 1] = _mm256_unpackhi_epi64(s[h], s[h + 2]);
        r[h + 2] = _mm256_unpacklo_epi64(s[h + 1], s[h + 3]);
        r[h + 3] = _mm256_unpackhi_epi64(s[h + 1], s[h + 3]);
    }
    for (int j = 0; j < 4; j++) {
        out[j] = (VI)_mm256_permute2x128_si256(r[j], r[j + 4], 0x20);
        out[j + 4] = (VI)_mm256_permute2x128_si256(r[j], r[j + 4], 0x31);
    }
}

template <int BITS> inline void unpack_half_pair(const uint8_t*, const uint8_t*, VI*) {}  // every group fills whole tiles here
