// Attention of a prompt's rows in tile registers. Included behind kernels_tiles.h, for AVX-512 only.
//
// Scores are the exact integers of the other kernels: 16 bits of a query are a signed byte times 256 and an unsigned one, and two products
// of bytes are found (AMX-INT8). Attention weights, and values less what is in the middle of their codes, are rounded to bfloat16 and added up in
// float32 over a page (AMX-BF16): other bits than few rows have, and a row's do not depend on the rows beside it, either.

constexpr int DEPTH = 64;                            // values of a group of K: bytes of a row of a tile register
constexpr int STRIPS = BLOCK / OUTPUT_TILE;          // of tokens in a block
constexpr int PRODUCT_SUMS = 2 * TILED_ROWS * OUTPUT_TILE;
constexpr int VALUE_TOKENS = 32;                     // whose values a tile register holds
static_assert(TILE_BYTES == TILED_ROWS * DEPTH, "rows of a group fill a tile register");

// 16 tokens and a group of K -> [4 columns][token]; columns are in the order of split_words.
template <int BITS> inline void unpack_keys(const uint8_t* rows, size_t stride, uint8_t* out) {
    for (int part = 0; part < BITS / 4; part++, rows += 32) {
        VI in[8];
        columns<BITS == 8>(rows, stride, in);
        UNROLL
        for (int j = 0; j < 8; j += BITS / 4) {
            UNROLL
            for (int i = 0; i < 2; i++, out += 64)
                store_int(out, BITS == 4 ? (in[j] >> (4 * i)) & splat_int(0x0F0F0F0F) : pair_of<8>(in[j], i) | (pair_of<8>(in[j + 1], i) << 8));
        }
    }
}

// Tokens of a group of V, less their middle, -> [VALUE_TOKENS of them][vector][pair of tokens][16 values].
template <int BITS> inline void decode_values(const uint8_t* codes, size_t stride, const float* scales, int tokens, uint8_t* out) {
    const VI middle = splat_int(1 << (BITS - 1));
    for (int t = 0; t < tokens; t += 2, codes += 2 * stride) {
        VI pairs[TILE];
        unpack_pair<BITS, TILE>(codes, codes + stride, pairs);
        const VF scale = splat(scales[t]), scale2 = splat(scales[t + 1]);
        uint8_t* to = out + t / VALUE_TOKENS * TILE * TILE_BYTES + t % VALUE_TOKENS * 32;
        UNROLL
        for (int v = 0; v < TILE; v++) {
            const VF a = to_float((pairs[v] & splat_int(0xFFFF)) - middle), b = to_float((pairs[v] >> 16) - middle);
            store_int(to + v * TILE_BYTES, bf16_pairs(a * scale, b * scale2));
        }
    }
}

// To 8 significant bits (Dekker's splitting): what bfloat16 holds.
inline VF rounded(VF x) {
    const VF t = x * splat(65537.f);
    return t - (t - x);
}

// The two sums of bytes of 16 rows and a tile of codes, [2][row][lane].
inline void multiply_bytes(const uint8_t* high, const uint8_t* low, const uint8_t* codes, int32_t* sums) {
    _tile_loadd(4, high, DEPTH);
    _tile_loadd(5, low, DEPTH);
    _tile_loadd(6, codes, 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbuud(1, 5, 6);
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + PRODUCT_SUMS / 2, 64);
}

// The products of an item's rows.
class HeadTiles {
  public:
    HeadTiles(const AttendJob& job, const Scratch& s, const AttendItem& item)
        : job_(job), s_(s), item_(item), low_((job.row_block + TILED_ROWS) * DEPTH) {
        const int16_t* codes = job.q_codes + (first_query(job, item) + item.first_row) * job.q_stride;
        for (int r = 0; r < item.last_row - item.first_row; r++, codes += job.q_stride)
            for (int at = 0; at < job.k_padded; at += DEPTH / 2) {
                uint8_t* to = queries(at / DEPTH) + r * DEPTH + at % DEPTH;
                split_words(codes + at, to, to + low_);
            }
    }

    void score(const Page& page, const Rows& rows) const {
        for (int t = 0; t < page.valid; t += BLOCK) {
            prefetch(page.v.codes + t * page.v.row_bytes, BLOCK * page.v.row_bytes);
            const Rows seeing = rows.seeing(page.base + t, page.base + std::min(t + BLOCK, page.valid));
            if (seeing.count() <= 0) continue;
            const QueryTile tile = query_tile(job_, s_, item_, rows, seeing.begin, t);
            for (int g = 0; g < job_.k_groups; g++) {
                uint8_t* keys = (uint8_t*)s_.panel;
                for (int i = 0; i < STRIPS; i++) {
                    const uint8_t* from = page.k.codes + (t + i * OUTPUT_TILE) * page.k.row_bytes + g * DEPTH * page.k.bits / 8;
                    uint8_t* to = keys + i * TILE_BYTES;
                    page.k.bits == 4 ? unpack_keys<4>(from, page.k.row_bytes, to) : unpack_keys<8>(from, page.k.row_bytes, to);
                }
                score_group(tile, queries(g) + (seeing.begin - item_.first_row) * DEPTH, g, seeing.count());
            }
        }
    }

    void sum(const Page& page, const Page* next, const Rows& rows, const float* terms) const {
        const Side& v = page.v;
        for (int i = 0; i < job_.v_groups * PAGE; i += W)
            store(s_.v_biases + i, fma(load(s_.v_scales + i), splat((float)(1 << (v.bits - 1))), load(s_.v_biases + i)));
        for (int first = 0; first < rows.count(); first += RUN) {
            Run& run = s_.runs[first / RUN];
            run.first = first, run.count = std::min(RUN, rows.count() - first);
            find_tops(job_, s_, page, rows, terms, run);
            for (int i = 0; i < run.count; i++) weigh(run, i);
        }
        if (next) prefetch(next->k.codes, PAGE * next->k.row_bytes);
        const int tokens = (page.valid + BLOCK - 1) / BLOCK * BLOCK;
        for (int at = 0; at < job_.v_width; at += DEPTH) {
            const uint8_t* codes = v.codes + (size_t)at * v.bits / 8;
            const float* scales = s_.v_scales + at / DEPTH * PAGE;
            v.bits == 4 ? decode_values<4>(codes, v.row_bytes, scales, tokens, s_.values) : decode_values<8>(codes, v.row_bytes, scales, tokens, s_.values);
            settle();
            for (int row = 0; row < rows.count(); row += TILED_ROWS) sum_rows(row, rows.count(), at);
            settle();
        }
    }

  private:
    const AttendJob& job_;
    const Scratch& s_;
    const AttendItem& item_;
    const size_t low_;  // from the upper bytes of rows to the lower ones
    const TileRegisters registers_;

    uint8_t* queries(int group) const { return s_.query_bytes + 2 * low_ * group; }

    // Rows x a block of tokens, as add_scores.
    void score_group(const QueryTile& q, const uint8_t* bytes, int group, int rows) const {
        const int count = (rows + TILED_ROWS - 1) / TILED_ROWS * STRIPS;
        alignas(64) int32_t sums[2][PRODUCT_SUMS];
        const auto find = [&](int i) {
            const uint8_t* high = bytes + i / STRIPS * TILE_BYTES;
            multiply_bytes(high, high + low_, (const uint8_t*)s_.panel + i % STRIPS * TILE_BYTES, sums[i & 1]);
        };
        settle();
        find(0);
        for (int i = 0; i < count; i++) {
            if (i + 1 < count) find(i + 1);  // one ahead: what tiles store is not to be had at once
            settle();
            const int row = i / STRIPS * TILED_ROWS, t = i % STRIPS * OUTPUT_TILE;
            const QueryTile tile = {nullptr, q.terms + row * (job_.k_groups + 2) + 2 + group, q.scores + row * S_STRIDE + t,
                                    q.k_scales + group * PAGE + t, q.k_biases + group * PAGE + t};
            group ? add<false>(tile, std::min(TILED_ROWS, rows - row), sums[i & 1]) : add<true>(tile, std::min(TILED_ROWS, rows - row), sums[i & 1]);
        }
    }

    template <bool FIRST> void add(QueryTile q, int rows, const int32_t* sums) const {
        const VF scale = load(q.k_scales), bias = load(q.k_biases);
        for (int r = 0; r < rows; r++, sums += OUTPUT_TILE, q.scores += S_STRIDE, q.terms += job_.k_groups + 2) {
            const VF x = to_float((load_int(sums) << 8) + load_int(sums + PRODUCT_SUMS / 2));
            store(q.scores, fma(splat(*q.terms), bias, FIRST ? x * scale : fma(x, scale, load(q.scores))));
        }
    }

    // Scores of row `i` of a run -> p as bfloat16, relative to the page's largest. The values' sums begin with what their middles come to.
    void weigh(const Run& run, int i) const {
        const size_t r = run.first + i;
        float *scores = s_.scores + r * S_STRIDE, *sums = s_.page_sums + r * job_.accum_stride;
        int16_t* weights = s_.weights + r * PAGE;
        const Extent e = run.extents[i];
        const float* tops = run.tops + i * BLOCKS;
        const VF top = splat(-std::max(std::max(tops[0], tops[1]), std::max(tops[2], tops[3]))), factor = splat(run.factors[i]);
        const bool more = job_.v_groups > 1;  // groups that need p again
        VF total = splat(0), bias = splat(0);
        for (int t = e.begin; t < e.end; t += 2 * W) {
            const VF a = rounded(exp2(fma(load(scores + t), factor, top))), b = rounded(exp2(fma(load(scores + t + W), factor, top)));
            total = total + (a + b);
            bias = fma(b, load(s_.v_biases + t + W), fma(a, load(s_.v_biases + t), bias));
            store_bf16(weights + t, a, b);
            if (more) store(scores + t, a), store(scores + t + W, b);
        }
        memset(weights, 0, e.begin * sizeof(*weights));
        memset(weights + e.end, 0, (PAGE - e.end) * sizeof(*weights));
        sums[1] = sum_lanes(total);
        begin_values(job_, sums, 0, sum_lanes(bias));
        for (int g = 1; g < job_.v_groups; g++) {
            bias = splat(0);
            for (int t = e.begin; t < e.end; t += W) bias = fma(load(scores + t), load(s_.v_biases + g * PAGE + t), bias);
            begin_values(job_, sums, g, sum_lanes(bias));
        }
    }

    // Values of 16 rows and a group: over the blocks that one of them sees.
    void sum_rows(int row, int rows, int at) const {
        int begin = PAGE, end = 0;
        for (int r = row; r < std::min(rows, row + TILED_ROWS); r++) {
            const Extent& e = s_.runs[r / RUN].extents[r % RUN];
            begin = std::min(begin, e.begin), end = std::max(end, e.end);
        }
        float* sums = s_.page_sums + row * job_.accum_stride + ACCUM_HEAD + at;
        const size_t stride = job_.accum_stride * sizeof(float);
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + W, stride);
        _tile_loadd(2, sums + 2 * W, stride);
        _tile_loadd(3, sums + 3 * W, stride);
        for (int t = begin; t < end; t += VALUE_TOKENS) {
            const uint8_t* values = s_.values + t / VALUE_TOKENS * TILE * TILE_BYTES;
            _tile_loadd(4, s_.weights + row * PAGE + t, PAGE * sizeof(int16_t));
            _tile_loadd(5, values, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, values + TILE_BYTES, 64);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(7, values + 2 * TILE_BYTES, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_loadd(5, values + 3 * TILE_BYTES, 64);
            _tile_dpbf16ps(3, 4, 5);
        }
        _tile_stored(0, sums, stride);
        _tile_stored(1, sums + W, stride);
        _tile_stored(2, sums + 2 * W, stride);
        _tile_stored(3, sums + 3 * W, stride);
    }
};

// Prompts take tile registers, where pages are coded in groups that fill them.
void attend_tiled(const AttendJob& job, const AttendItem& item, float* scratch) {
    const bool tiled = !job.raw && job.group == DEPTH && is_prompt(*job.batch, item.seq);
    tiled ? attend<HeadTiles>(job, item, scratch) : attend<Words>(job, item, scratch);
}
