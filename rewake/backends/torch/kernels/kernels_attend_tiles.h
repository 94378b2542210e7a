// Attention of a prompt's rows in tile registers (AMX-BF16). Included behind kernels_tiles.h, for AVX-512 only.
//
// Queries, attention weights, keys less the mean of their codes and values less the middle of theirs are bfloat16; products are added up in
// float32 over a page. Means and middles are float32 (as two bfloat16 numbers where weights meet them). These are other bits than few rows
// have; a row's do not depend on the rows beside it, either.
//
// A page is decoded once for all rows of an item. Then TILED_ROWS rows at a time go from products with K to weights, which take their place,
// and on to sums, all in the first-level cache, which what is decoded passes by.

constexpr int DEPTH = 64;                            // values of a group
constexpr int TOKENS = 2 * OUTPUT_TILE;              // of V in a tile register
static_assert(COLUMNS == DEPTH / 2 && BLOCK % TOKENS == 0, "a group of K fills two tile registers, and V's tokens whole ones");

// Where the weight of a token of a page lies in its row: of TOKENS tokens, the first half and the second are interleaved.
inline int weight_at(int t) { return t / TOKENS * TOKENS + t % OUTPUT_TILE * 2 + t % TOKENS / OUTPUT_TILE; }

// Nibble or byte `i` of each lane, less the middle of such codes.
template <int BITS> inline VF centred(VI x, int i) {
    if constexpr (BITS == 4) return lookup(x >> (4 * i), CENTRED_NIBBLES);
    return to_float(((x >> (8 * i)) & splat_int(0xFF)) - splat_int(128));
}

// 16 tokens and a group of K -> [two halves of the group][pair of columns][token], in the order of the prepared queries; less the mean of each
// token's codes, which joins its bias. Where one value of a group lies far off, the others are close together at the edge of the codes: from
// the middle, they would be rounded as coarsely as they are coded.
template <int BITS> inline void decode_keys(const uint8_t* rows, size_t stride, VF scale, float* biases, uint8_t* out) {
    constexpr int PARTS = BITS / 4, PER = PAIRS<BITS>;
    VI in[PARTS][8], sum = splat_int(0);
    for (int part = 0; part < PARTS; part++) {
        columns<BITS == 8>(rows + 32 * part, stride, in[part]);
        UNROLL
        for (int j = 0; j < 8; j++) {
            const VI x = in[part][j], nibbles = splat_int(0x0F0F0F0F);
            sum = add_bytes(sum, BITS == 4 ? (x & nibbles) + ((x >> 4) & nibbles) : x);
        }
    }
    const VF mean = to_float(sum) * splat(1.f / DEPTH);
    store(biases, fma(mean, scale, load(biases)));
    const VF less = (splat((float)(1 << (BITS - 1))) - mean) * scale;
    UNROLL
    for (int part = 0; part < PARTS; part++) {
        UNROLL
        for (int j = 0; j < 8; j++) {
            UNROLL
            for (int i = 0; i < PER; i++, out += 64)
                store_int(out, bf16_pairs(fma(centred<BITS>(in[part][j], i), scale, less), fma(centred<BITS>(in[part][j], i + 16 / BITS), scale, less)));
        }
    }
}

// TOKENS tokens of a group of V -> [vector][token of the first half and of the second][16 values].
template <int BITS> inline void decode_values(const uint8_t* rows, size_t stride, const float* scales, uint8_t* out) {
    for (int t = 0; t < OUTPUT_TILE; t++, rows += stride, out += 64) {
        const uint8_t* later = rows + OUTPUT_TILE * stride;
        const VI a = BITS == 4 ? words(rows) : load_int(rows), b = BITS == 4 ? words(later) : load_int(later);
        const VF scale = splat(scales[t]), scale2 = splat(scales[t + OUTPUT_TILE]);
        UNROLL
        for (int v = 0; v < TILE; v++) store_int(out + v * TILE_BYTES, bf16_pairs(centred<BITS>(a, v) * scale, centred<BITS>(b, v) * scale2));
    }
}

inline void clear_four() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Registers 0 to 3 += rows, which stay in register 4, x four tiles `step` bytes apart, which pass by the first-level cache.
inline void add_four(const void* rows, size_t stride, const uint8_t* tiles, size_t step) {
    _tile_loadd(4, rows, stride);
    _tile_stream_loadd(6, tiles, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stream_loadd(7, tiles + step, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_stream_loadd(6, tiles + 2 * step, 64);
    _tile_dpbf16ps(2, 4, 6);
    _tile_stream_loadd(7, tiles + 3 * step, 64);
    _tile_dpbf16ps(3, 4, 7);
}

inline void store_four(float* to, size_t stride) {
    _tile_stored(0, to, stride);
    _tile_stored(1, to + W, stride);
    _tile_stored(2, to + 2 * W, stride);
    _tile_stored(3, to + 3 * W, stride);
}

// The products of an item's rows.
class HeadTiles {
  public:
    HeadTiles(const AttendJob& job, const Scratch& s, const AttendItem& item)
        : job_(job), s_(s), item_(item), halves_(job.k_padded / COLUMNS), half_bytes_((job.prompt_block + TILED_ROWS) * 2 * COLUMNS) {
        const int64_t first = first_query(job, item) + item.first_row;
        for (int r = 0; r < item.last_row - item.first_row; r++) {
            const int16_t* codes = job.q_codes + (first + r) * job.q_stride;
            const float* terms = job.q_terms + (first + r) * (job.k_groups + 2);
            const float factor = terms[0] * job.layer->scale * LOG2E;
            for (int i = 0; i < halves_; i++, codes += COLUMNS)
                store_bf16(s.queries + i * half_bytes_ + r * 2 * COLUMNS, signed_words(codes) * splat(factor), signed_words(codes + W) * splat(factor));
            s.query_offsets[r] = terms[1] * job.layer->scale * LOG2E;
            for (int g = 0; g < job.k_groups; g++) s.query_sums[r * job.k_groups + g] = terms[2 + g] * factor;
        }
    }

    void attend(const Page& page, const Page* next, const Rows& rows, int begin, float* sums) const {
        spread_page(job_, s_, page);
        decode(page, extent(page, rows, rows.begin).begin, extent(page, rows, rows.end - 1).end);
        if (next) {
            prefetch_terms(next->k, 0, PAGE), prefetch_terms(next->v, 0, PAGE);
            prefetch(next->k.codes, PAGE * next->k.row_bytes);
            prefetch(next->v.codes, PAGE * next->v.row_bytes);
        }
        for (int first = rows.begin; first < rows.end; first += TILED_ROWS) {
            const Few few = few_of(page, rows, first);
            find_products(few);
            for (int row = 0; row < few.count; row += ROWS) weigh(few, row);
            sum_values(few);
            merge(few, sums + (size_t)(first - begin) * job_.accum_stride);
        }
    }

  private:
    static constexpr int ROWS = 4;  // weighed at a time

    // Rows that fill a tile register, and the tokens of a page that one of them sees, whole blocks.
    struct Few {
        int first, count, begin, end;
        bool whole;  // all of them see all of these
        const Page& page;
        const Rows& rows;
    };

    const AttendJob& job_;
    const Scratch& s_;
    const AttendItem& item_;
    const int halves_;         // of groups of K
    const size_t half_bytes_;  // of the queries' halves
    const TileRegisters registers_;

    void decode(const Page& page, int begin, int end) const {
        const Side &k = page.k, &v = page.v;
        for (int t = begin; t < end; t += TOKENS) {
            for (int g = 0; g < job_.v_groups; g++) {
                const uint8_t* from = v.codes + t * v.row_bytes + g * DEPTH * v.bits / 8;
                const float* scales = s_.v_scales + g * PAGE + t;
                uint8_t* to = values(t, g);
                v.bits == 4 ? decode_values<4>(from, v.row_bytes, scales, to) : decode_values<8>(from, v.row_bytes, scales, to);
            }
            put_extras(t, (float)(1 << (v.bits - 1)));
        }
        for (int t = begin; t < end; t += OUTPUT_TILE)  // behind V: a latent K is V, too, and biases change
            for (int g = 0; g < job_.k_groups; g++) {
                const uint8_t* from = k.codes + t * k.row_bytes + g * DEPTH * k.bits / 8;
                const VF scale = load(s_.k_scales + g * PAGE + t);
                float* biases = s_.k_biases + g * PAGE + t;
                uint8_t* to = keys(t, 2 * g);
                k.bits == 4 ? decode_keys<4>(from, k.row_bytes, scale, biases, to) : decode_keys<8>(from, k.row_bytes, scale, biases, to);
            }
    }

    uint8_t* keys(int t, int half) const { return s_.keys + (t / OUTPUT_TILE * halves_ + half) * TILE_BYTES; }
    uint8_t* values(int t, int group) const { return s_.values + (t / TOKENS * job_.v_groups + group) * TILE * TILE_BYTES; }
    uint8_t* extras(int t, int tile) const { return s_.extras + (t / TOKENS * extra_tiles(job_) + tile) * TILE_BYTES; }

    // What weights are multiplied with beside values: 1, and what is in the middle of each group's codes, as two numbers.
    void put_extras(int t, float middle) const {
        for (int i = 0; i < OUTPUT_TILE; i++) {
            const auto put = [&](int column, uint16_t a, uint16_t b) {
                const uint32_t both = a | (uint32_t)b << 16;
                memcpy(extras(t, column / OUTPUT_TILE) + i * 64 + column % OUTPUT_TILE * 4, &both, 4);
            };
            put(0, 0x3F80, 0x3F80);
            for (int g = 0; g < job_.v_groups; g++) {
                const float *scales = s_.v_scales + g * PAGE + t + i, *biases = s_.v_biases + g * PAGE + t + i;
                const float a = biases[0] + scales[0] * middle, b = biases[OUTPUT_TILE] + scales[OUTPUT_TILE] * middle;
                const uint16_t high_a = to_bf16(a), high_b = to_bf16(b);
                put(1 + 2 * g, high_a, high_b);
                put(2 + 2 * g, to_bf16(a - from_bf16(high_a)), to_bf16(b - from_bf16(high_b)));
            }
        }
    }

    // The rows from `first` on, at most TILED_ROWS.
    static Few few_of(const Page& page, const Rows& rows, int first) {
        const int count = std::min(TILED_ROWS, rows.end - first);
        const Extent oldest = extent(page, rows, first), newest = extent(page, rows, first + count - 1);
        return {first, count, oldest.begin, newest.end, oldest.high == newest.end && newest.low == oldest.begin, page, rows};
    }

    // Queries x K, [TILED_ROWS, S_STRIDE].
    void find_products(const Few& few) const {
        settle();
        for (int t = few.begin; t < few.end; t += BLOCK) {
            const uint8_t* q = s_.queries + (few.first - item_.first_row) * 2 * COLUMNS;
            clear_four();
            for (int half = 0; half < halves_; half++, q += half_bytes_) add_four(q, 64, keys(t, half), halves_ * TILE_BYTES);
            store_four(s_.scores + t, S_STRIDE * sizeof(float));
        }
        settle();
    }

    // Weights x values, and x what is beside values.
    void sum_values(const Few& few) const {
        settle();
        for (int group = 0; group < job_.v_groups; group++) {
            const bool has_extra = group < extra_tiles(job_);
            clear_four();
            _tile_zero(5);
            for (int t = few.begin; t < few.end; t += TOKENS) {
                add_four((const int16_t*)s_.scores + t, S_STRIDE * sizeof(float), values(t, group), TILE_BYTES);
                if (!has_extra) continue;
                _tile_stream_loadd(6, extras(t, group), 64);
                _tile_dpbf16ps(5, 4, 6);
            }
            store_four(s_.page_sums + ACCUM_HEAD + group * DEPTH, job_.accum_stride * sizeof(float));
            if (has_extra) _tile_stored(5, s_.extra_sums + group * OUTPUT_TILE, extra_tiles(job_) * OUTPUT_TILE * sizeof(float));
        }
        settle();
    }

    // The page's sums join those of the pages before.
    void merge(const Few& few, float* sums) const {
        for (int r = 0; r < few.count; r++) {
            const float* extra = s_.extra_sums + r * extra_tiles(job_) * OUTPUT_TILE;
            float* of = s_.page_sums + r * job_.accum_stride;
            of[0] = s_.tops[r], of[1] = extra[0];
            for (int g = 0; g < job_.v_groups; g++) {
                const VF middle = splat(extra[1 + 2 * g] + extra[2 + 2 * g]);
                float* to = of + ACCUM_HEAD + g * DEPTH;
                for (int d = 0; d < DEPTH; d += W) store(to + d, load(to + d) + middle);
            }
        }
        merge_rows(job_, sums, s_.page_sums, few.count);
    }

    // Products of ROWS rows from `first` on -> p as bfloat16, in their place.
    void weigh(const Few& few, int first) const {
        const int count = std::min(ROWS, few.count - first);
        VF largest[ROWS];
        float tops[ROWS];
        for (int i = 0; i < ROWS; i++) largest[i] = i < count ? find_logits(few, first + i) : largest[i - 1];
        max_lanes(largest, tops);
        for (int i = 0; i < count; i++) {
            const int row = first + i;
            float* scores = s_.scores + row * S_STRIDE;
            int16_t* weights = (int16_t*)scores;
            const VF top = splat(tops[i]);
            for (int t = few.begin; t < few.end; t += BLOCK) {
                UNROLL
                for (int n = 0; n < BLOCK; n += TOKENS)
                    store_int(weights + t + n, upper_halves(exp2_bounded(load(scores + t + n) - top), exp2_bounded(load(scores + t + n + W) - top)));
            }
            s_.tops[row] = tops[i] + (job_.layer->soft_cap > 0 ? 0 : s_.query_offsets[few.first + row - item_.first_row]);
            if (few.whole) continue;
            const Extent e = extent(few.page, few.rows, few.first + row);
            for (int t = few.begin; t < e.low; t++) weights[weight_at(t)] = 0;
            for (int t = e.high; t < few.end; t++) weights[weight_at(t)] = 0;
        }
    }

    // Products of a row -> logits to base 2 (less what they have in common, if they are not capped). Returns their largest, in lanes.
    VF find_logits(const Few& few, int row) const {
        float* x = s_.scores + row * S_STRIDE;
        const int of_item = few.first + row - item_.first_row;
        const float* query_sums = s_.query_sums + of_item * job_.k_groups;
        VF largest[BLOCK / W];
        for (VF& of : largest) of = splat(MASKED);
        for (int t = few.begin; t < few.end; t += BLOCK) {
            VF y[BLOCK / W];
            UNROLL
            for (int n = 0; n < BLOCK / W; n++) y[n] = load(x + t + n * W);
            for (int g = 0; g < job_.k_groups; g++) {
                const VF sum = splat(query_sums[g]);
                UNROLL
                for (int n = 0; n < BLOCK / W; n++) y[n] = fma(sum, load(s_.k_biases + g * PAGE + t + n * W), y[n]);
            }
            UNROLL
            for (int n = 0; n < BLOCK / W; n++) {
                store(x + t + n * W, y[n]);
                largest[n] = max(largest[n], y[n]);
            }
        }
        const bool capped = job_.layer->soft_cap > 0;
        if (few.whole && !capped) return max(max(largest[0], largest[1]), max(largest[2], largest[3]));
        if (capped) soft_cap(x + few.begin, few.end - few.begin, job_.layer->soft_cap, {1, s_.query_offsets[of_item]});
        const Extent e = extent(few.page, few.rows, few.first + row);
        mask(x, {e.low, e.high, few.begin, few.end});
        VF top = splat(MASKED);
        for (int t = few.begin; t < few.end; t += W) top = max(top, load(x + t));
        return top;
    }
};

// Prompts take tile registers, where pages are coded in groups that fill them.
void attend_tiled(const AttendJob& job, const AttendItem& item, float* scratch) {
    in_tiles(job, item.seq) ? attend<HeadTiles>(job, item, scratch) : attend<Words>(job, item, scratch);
}
