// Coding of K, V and q rows. Included once per instruction set, after its simd_*.h.

// 2^x to 1e-4, for x from -2^22 to 127 and anything below. The integer part is added to the exponent; from -127 down the
// result is exactly 0.
inline VF exp2(VF x) {  // 0 below 2^-126: what lies there must neither wrap around nor count
    const VF least = splat(-126), bounded = max(x, least);
    const VF rounded = bounded + splat(ROUNDING), f = bounded - (rounded - splat(ROUNDING));
    VF p = fma(f, splat(EXP2[3]), splat(EXP2[2]));
    p = fma(f, p, splat(EXP2[1]));
    p = fma(f, p, splat(EXP2[0]));
    return (VF)(((VI)p + ((VI)rounded << 23)) & (VI)(x >= least));
}

template <int H> inline void butterfly_lanes(float* x, int n) {
    // lane i becomes x[i] + x[i ^ H] where bit H of i is 0, and x[i ^ H] - x[i] where it is 1
    float sign[W];
    for (int i = 0; i < W; i++) sign[i] = i & H ? -1.f : 1.f;
    const VF s = load(sign);
    for (int i = 0; i < n; i += W) {
        VF v = load(x + i);
        store(x + i, fma(v, s, swap_lanes<H>(v)));
    }
}

inline void butterfly(float* x, int n, int h) {
    for (int i = 0; i < n; i += 2 * h)
        for (int j = i; j < i + h; j += W) {
            VF a = load(x + j), b = load(x + j + h);
            store(x + j, a + b);
            store(x + j + h, a - b);
        }
}

// Fast Walsh-Hadamard transform of a power of two.
inline void walsh_hadamard(float* x, int n) {
    int h = 1;
    if (n >= W) {
        butterfly_lanes<1>(x, n);
        butterfly_lanes<2>(x, n);
        if constexpr (W > 4) butterfly_lanes<4 % W>(x, n);
        if constexpr (W > 8) butterfly_lanes<8 % W>(x, n);
        for (h = W; h < n; h *= 2) butterfly(x, n, h);
    } else {
        for (; h < n; h *= 2)
            for (int i = 0; i < n; i += 2 * h)
                for (int j = i; j < i + h; j++) {
                    float a = x[j], b = x[j + h];
                    x[j] = a + b;
                    x[j + h] = a - b;
                }
    }
    const float norm = (float)(1 / sqrt((double)n));
    for (int i = 0; i < n; i++) x[i] *= norm;
}

// quant.hadamard(dim): blocks, largest power of two first. Symmetric, so its own inverse.
inline void rotate(float* x, int dim) {
    for (int start = 0; start < dim;) {
        int size = 1;
        while (2 * size <= dim - start) size *= 2;
        walsh_hadamard(x + start, size);
        start += size;
    }
}

inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
inline uint16_t to_bf16(float f) {  // half to even; finite values
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
inline VF load_bf16(const uint16_t* p) { return (VF)(words(p) << 16); }
inline VI to_bf16(VF f) {  // in the low half of each lane
    VI bits = (VI)f;
    return ((bits + splat_int(0x7FFF) + ((bits >> 16) & splat_int(1))) >> 16) & splat_int(0xFFFF);
}

inline void read_row(const RwRows& rows, int64_t token, int64_t head, int dim, float* out) {
    const int64_t at = token * rows.token_stride + head * rows.head_stride;
    if (!rows.bf16) {
        memcpy(out, (const float*)rows.data + at, dim * sizeof(float));
        return;
    }
    const uint16_t* p = (const uint16_t*)rows.data + at;
    int i = 0;
    for (; i + W <= dim; i += W) store(out + i, load_bf16(p + i));
    for (; i < dim; i++) out[i] = from_bf16(p[i]);
}

// One group: the arithmetic of quant.encode and quant.encode_residual, division for division. `residuals` may be null.
inline void encode_group(const float* x, int group, float levels, uint8_t* codes, uint8_t* residuals, uint16_t* scale, uint16_t* bias) {
    VF low = load(x), high = low;
    for (int i = W; i < group; i += W) {
        low = min(low, load(x + i));
        high = max(high, load(x + i));
    }
    *bias = to_bf16(min_lane(low));
    const float base = from_bf16(*bias);
    const float range = (max_lane(high) - base) / levels;
    *scale = to_bf16(range > 0 ? range : 0);
    const float step = from_bf16(*scale);
    const VF by = splat(step > 0 ? step : INFINITY), from = splat(base);
    for (int i = 0; i < group; i += W) {
        VF steps = (load(x + i) - from) / by;
        const VI code = round_int(min(max(steps, splat(0)), splat(levels)));
        store_bytes(codes + i, code);
        if (!residuals) continue;
        const VF over = ((steps - to_float(code)) + splat(0.5f)) * splat(16);
        store_bytes(residuals + i, __builtin_convertvector(min(max(over, splat(0)), splat(15)), VI));
    }
}

inline void pack_nibbles(const uint8_t* bytes, int count, uint8_t* out) {
    for (int i = 0; i < count / 2; i++) out[i] = (uint8_t)(bytes[2 * i] | bytes[2 * i + 1] << 4);
}

// A row of `dim` values, already rotated if it must be, to its place: codes, scales, biases. `x` has room for the padding.
inline void encode_row(float* x, int dim, int bits, int group, uint8_t* codes, uint8_t* residuals, uint16_t* scales, uint16_t* biases) {
    const int groups = (dim + group - 1) / group;
    alignas(64) uint8_t bytes[MAX_DIM + 64], over[MAX_DIM + 64];
    for (int i = dim; i < groups * group; i++) x[i] = x[dim - 1];  // its range is that of the real values
    for (int g = 0; g < groups; g++)
        encode_group(x + g * group, group, (float)((1 << bits) - 1), bytes + g * group, residuals ? over + g * group : nullptr, scales + g, biases + g);
    memset(bytes + dim, 0, groups * group - dim);
    if (bits == 8)
        memcpy(codes, bytes, groups * group);
    else
        pack_nibbles(bytes, groups * group, codes);
    if (!residuals) return;
    memset(over + dim, 0, groups * group - dim);
    pack_nibbles(over, groups * group, residuals);
}

inline void place_raw(const float* x, int dim, uint8_t* to) {
    for (int i = 0; i < dim; i++) {
        uint16_t v = to_bf16(x[i]);
        memcpy(to + 2 * i, &v, 2);
    }
}

// Where one side (K or V) of a layer keeps a head's rows.
struct Side {
    const uint8_t* codes;
    const uint16_t *scales, *biases;
    int bits, width, groups;
    size_t row_bytes;
};
inline Side side_of(const uint8_t* layer, const RwLayout& l, int head, bool v) {
    const int dim = v ? l.v_dim : l.k_dim, bits = v ? l.v_bits : l.k_bits;
    const int groups = (dim + l.group - 1) / l.group;
    const int width = bits == 16 ? dim : groups * l.group;
    const size_t row_bytes = (size_t)width * bits / 8;
    const uint8_t* codes = layer + (v ? l.v_codes : 0) + head * PAGE * row_bytes;
    const int64_t at = (int64_t)head * PAGE * groups;
    return {codes, (const uint16_t*)(layer + (v ? l.v_scales : l.k_scales)) + at,
            (const uint16_t*)(layer + (v ? l.v_biases : l.k_biases)) + at, bits, width, groups, row_bytes};
}

// Where a head's residuals begin; rows of them are as long as rows of 4-bit codes. Null if there are none.
inline uint8_t* residuals_of(uint8_t* arena, const int64_t* places, int64_t entry, const RwLayout& l, int layer, const Side& side, int head, bool v) {
    if (!l.residual_layer_bytes) return nullptr;
    return arena + places[entry] + layer * l.residual_layer_bytes + (v ? l.v_residuals : 0) + head * PAGE * side.row_bytes;
}

inline void append_side(const Side& side, uint8_t* residuals, int row, float* x, int dim, int group) {
    uint8_t* codes = const_cast<uint8_t*>(side.codes) + row * side.row_bytes;
    if (side.bits == 16) return place_raw(x, dim, codes);
    const size_t at = (size_t)row * side.groups;
    if (residuals) residuals += row * side.row_bytes;
    encode_row(x, dim, side.bits, group, codes, residuals, const_cast<uint16_t*>(side.scales) + at, const_cast<uint16_t*>(side.biases) + at);
}

// Rows [first, last) of tokens x heads.
void append(const AppendJob& job, int64_t first, int64_t last, float* x) {
    const RwBatch& batch = *job.batch;
    for (int64_t i = first; i < last; i++) {
        const int64_t token = i / job.kv_heads, head = i % job.kv_heads;
        if (batch.append_pages[token] < 0) continue;
        const RwLayout& l = job.layouts[batch.append_codecs[token]];
        const uint8_t* layer = job.arena + batch.append_pages[token] + job.layer->layer * l.layer_bytes;
        const int row = batch.append_rows[token];
        read_row(job.k, token, head, l.k_dim, x);
        if (l.k_bits < 16) {
            if (const float* mean = job.layer->k_mean)
                for (int d = 0; d < l.k_dim; d++) x[d] -= mean[head * l.k_dim + d];
            rotate(x, l.k_dim);
        }
        const Side k = side_of(layer, l, head, false);
        append_side(k, residuals_of(job.arena, batch.append_residuals, token, l, job.layer->layer, k, head, false), row, x, l.k_dim, l.group);
        if (!l.v_dim) continue;
        read_row(job.v, token, head, l.v_dim, x);
        const Side v = side_of(layer, l, head, true);
        append_side(v, residuals_of(job.arena, batch.append_residuals, token, l, job.layer->layer, v, head, true), row, x, l.v_dim, l.group);
    }
}

inline float dot(const float* a, const float* b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)a[i] * b[i];
    return (float)sum;
}

// A query row for coded K: rotated, in 16-bit fixed point, in the order of the K panels: of every 8 values (0,4) (1,5) (2,6) (3,7).
inline void prepare_coded(const AttendJob& job, float* x, int16_t* codes, float* terms) {
    rotate(x, job.k_dim);
    for (int i = job.k_dim; i < job.k_padded; i++) x[i] = 0;
    VI top = splat_int(0);
    for (int i = 0; i < job.k_padded; i += W) top = max_int(top, (VI)load(x + i) & splat_int(0x7FFFFFFF));
    // 64 products with 8-bit codes stay inside 31 bits
    const float step = fmaxf(max_lane((VF)top), 1e-25f) / 32767;
    terms[0] = step;
    const VF per = splat(1 / step);
    alignas(64) int16_t whole[MAX_DIM + 64];
    for (int g = 0; g < job.k_groups; g++) {
        VI sum = splat_int(0);
        for (int i = g * job.group; i < (g + 1) * job.group; i += W) {
            const VI q = round_int(load(x + i) * per);
            store_i16(whole + i, q);
            sum = sum + q;
        }
        terms[2 + g] = sum_lanes(to_float(sum));
    }
    for (int i = 0; i < job.k_padded; i += 8)
        for (int j = 0; j < 4; j++) {
            codes[i + 2 * j] = whole[i + j];
            codes[i + 2 * j + 1] = whole[i + 4 + j];
        }
}

// A query row for plain K: bf16 and what bf16 leaves over.
inline void prepare_raw(const AttendJob& job, const float* x, uint16_t* parts) {
    for (int i = 0; i < job.k_padded; i++) {
        const float value = i < job.k_dim ? x[i] : 0;
        parts[i] = to_bf16(value);
        parts[job.k_padded + i] = to_bf16(value - from_bf16(parts[i]));
    }
}

// Query rows [first, last) of tokens x query heads.
void prepare(const AttendJob& job, int64_t first, int64_t last, float* x) {
    const int64_t rows = (int64_t)job.batch->tokens * job.share;
    for (int64_t i = first; i < last; i++) {
        const int64_t token = i / job.q_heads, q_head = i % job.q_heads, head = q_head / job.share;
        const int64_t at = head * rows + token * job.share + q_head % job.share;
        read_row(job.q, token, q_head, job.k_dim, x);
        float* terms = job.q_terms + at * (job.k_groups + 2);
        if (job.raw) {
            prepare_raw(job, x, (uint16_t*)job.q_codes + at * job.q_stride);
            continue;
        }
        const float* mean = job.layer->k_mean;
        terms[1] = mean ? dot(x, mean + head * job.k_dim, job.k_dim) : 0;
        prepare_coded(job, x, job.q_codes + at * job.q_stride, terms);
    }
}
