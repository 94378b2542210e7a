// The plain C structures that Python fills in (native.py mirrors them) and the work derived from them.
// Knows no instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

// One cache group's pages under one codec: rewake.quant.PageLayout in numbers. kv_heads == 0: the codec is not in use.
struct RwLayout {
    int32_t kv_heads, k_dim, v_dim, group, k_bits, v_bits;
    int64_t page_bytes, layer_bytes;
    int64_t k_scales, k_biases, v_codes, v_scales, v_biases;  // offsets in the layer; K codes (or values) are at 0
    // Codes of 4 bits that have 4 more while they are young, elsewhere: a layer of these, and V's offset in it. 0: they have not.
    int64_t residual_layer_bytes, v_residuals;
};

struct RwBatch {
    const int64_t* block_table;
    const uint8_t* page_codecs;
    const int32_t* query_starts;
    const int32_t* kv_lengths;
    const int64_t* append_pages;
    const int32_t* append_rows;
    const uint8_t* append_codecs;
    int32_t seqs, max_pages, tokens;
    const int64_t *residuals, *append_residuals;  // as block_table and append_pages, for residuals; null: there are none
};

struct RwLayer {
    const float* sinks;
    const float* k_mean;
    float scale, soft_cap;  // soft_cap 0: none
    int32_t layer, window;  // window 0: none
    int32_t k_prefix;       // width of V as a prefix of K; 0: V has fields of its own
};

// Rows of K, V or q: [tokens, heads, dim] with unit last stride; strides count elements.
struct RwRows {
    const void* data;
    int64_t token_stride, head_stride;
    int32_t bf16;
};

// A matrix of weights, [outputs, inputs], packed in tiles of 16 outputs (pack.h packs them). A tile has its columns in order:
//   codes  for each 32 columns: [dwords of codes][16 outputs], then [16] scales and [16] minima in float16; x = code * scale + minimum
//   super  for each 256 columns: 8 times [dwords of codes][16 outputs]; then terms of 8 bits; then [16] scales and [16] minima in
//          float16, which those of 8 bits are multiples of. The terms of SUPER4 and SUPER5 are, for each 32 columns, [16] scales and
//          [16] minima, unsigned; of SUPER6, for each 16 columns, [16] scales, signed: x = (code - 32) * scale
//   plain  for each pair of columns: [16 outputs] x 2 bfloat16
// Of every 8 columns, (0,4) (1,5) (2,6) (3,7) are pairs: nibbles i and i + 4 of a dword of 4-bit codes, bytes i and i + 2 of one
// of 8-bit codes. Codes of 5 and 6 bits are 4 dwords of their low nibbles, then one or two of what is above: pair i has its bits
// at i and 16 + i of the one, or at 2 (i % 8) and 16 + 2 (i % 8) of the (i / 8)th of two.
enum RwKind { CODES4, CODES8, PLAIN, CODES5, SUPER4, SUPER5, SUPER6 };
struct RwLinear {
    const uint8_t* data;
    const float* bias;  // null: none
    int32_t outputs, inputs, kind;
};

// Blocks of quantised weights, as GGUF has them.
enum RwBlocks { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

// Weights [outputs, inputs] before they are packed, codes a byte each. Without `scale` they are for `codes` tiles of so many bits, `scales`
// and `minima` float16 [outputs, inputs / 32]; with it for `super` ones, `scale` and `minimum` [outputs, inputs / 256], and `scales` and
// `minima` bytes [outputs, inputs / 32], or of 6 bits `scales` alone, [outputs, inputs / 16]. Of 16 bits they are bfloat16, without terms.
struct RwCodes {
    const uint8_t* codes;
    const void *scales, *minima;
    const uint16_t *scale, *minimum;
    int32_t outputs, inputs, bits;
};

enum RwActivation { SILU, GELU_TANH };

struct RwDenseLayer {
    RwLinear q, k, v, o, gate, up, down;
    const float *attention_norm, *mlp_norm;
    const float *attention_out_norm, *mlp_out_norm;  // of what is added to the stream; null: none
    const float *q_norm, *k_norm;                    // of each head; null: none
    RwLayer attention;
    int32_t slot;  // of a page, in which it lies
    int32_t rotation;  // which of the frequencies
};

// A decoder of the Llama family: everything a step needs that does not change from step to step.
struct RwDense {
    const RwDenseLayer* layers;
    RwLinear embedding, head;
    const float *norm, *frequencies;  // frequencies: [rotations][head_dim / 2], radians a position
    int32_t num_layers, hidden, intermediate, q_heads, kv_heads, head_dim;
    float eps;
    int32_t input_kinds;  // which kinds of inputs the weights take, InputKind
    int32_t rotations, activation;
    float embedding_scale, logit_cap;  // logit_cap 0: none
};

}  // extern "C"

constexpr int PAGE = 256;       // tokens
constexpr int SPAN = 512;       // tokens of one context split; fixed, so that no split depends on the load
constexpr int BLOCK = 64;       // tokens whose attention weights share one fixed-point step
constexpr int CODECS = 5;
constexpr int YOUNG = 64;       // tokens behind a page's end up to which it is read with its residuals; page 0 always is
constexpr int MAX_DIM = 1024;

constexpr int OUTPUT_TILE = 16;  // outputs
constexpr int INPUT_GROUP = 32;  // columns that share a scale
constexpr int SUPER_GROUP = 256;  // columns whose scales share one
constexpr int ROW_PANEL = 128;   // rows whose inputs stay in the second-level cache while all weights of a thread pass by
constexpr int AHEAD = 4096;      // bytes of weights fetched in advance

constexpr int TILED_ROWS = 16;   // rows of a block of tiled inputs
constexpr int FEW_ROWS = 32;     // most rows in a step of a sequence that is not a prompt

enum InputKind { FIXED_INPUTS = 1, PLAIN_INPUTS = 2, TILED_INPUTS = 4 };  // tiled ones are for tile registers, whatever the weights

// Rows of activations as the products take them, in blocks of rows (the last one has what is left): [block][pair of columns][row];
// if they are tiled, in blocks of TILED_ROWS (the last one, too): [block][group][row][pair].
struct Inputs {
    int64_t rows;
    int columns, kinds;
    uint32_t *pairs, *high, *low;  // fixed point; bfloat16, and what that leaves over
    float *steps, *sums;           // [block][group][row]: step of the fixed point, sum of the group's activations
    const int32_t* places;         // which rows of the stream they are; null: all of them
};

// Heads to be normalised and turned to their positions: row `token` of head h at x + token * stride + h * dim.
struct HeadsJob {
    float* x;
    const float *norm, *turns;  // turns: [tokens][cosines, sines]
    int64_t stride;
    int heads, dim;
    float eps;
};

// activation(gate x inputs) * (up x inputs), as inputs of what follows.
struct GatedJob {
    const RwLinear &gate, &up;
    const Inputs &in, &out;
    int activation;
};

struct LinearKernels {
    int64_t (*groups)(const Inputs&);  // of columns, of each block of rows
    void (*prepare)(const Inputs&, const float* x, const float* norm, float eps, int64_t first, int64_t last);  // of these
    void (*multiply)(const RwLinear&, const Inputs&, float* out, int64_t stride, bool add, int64_t first, int64_t last);  // of tiles
    void (*multiply_gated)(const GatedJob&, int64_t first, int64_t last);                                              // of groups
    void (*embed)(const RwLinear&, const int32_t* tokens, float scale, float* x, int64_t first, int64_t last);
    void (*turn)(const HeadsJob&, int64_t first, int64_t last);  // of tokens * heads
    void (*add_normed)(float* x, const float* y, const float* norm, float eps, int columns, int64_t first, int64_t last);  // of rows
    void (*cap)(float* x, float cap, int64_t first, int64_t last);                                                      // of values
    bool tiles;  // prompts should have tiled inputs
};

// A prompt is what tile registers take, if there are some; rows of other sequences are exact sums everywhere.
inline bool is_prompt(const RwBatch& batch, int seq) { return batch.query_starts[seq + 1] - batch.query_starts[seq] > FEW_ROWS; }

struct AppendJob {
    uint8_t* arena;
    const RwLayout* layouts;
    const RwBatch* batch;
    const RwLayer* layer;
    RwRows k, v;
    int kv_heads;
};

// One softmax in the making: a row's maximum, sum and weighted values over some of its tokens.
// Stored as float[accum_stride]: maximum, sum, 14 floats of padding, values.
constexpr int ACCUM_HEAD = 16;

struct AttendJob {
    uint8_t* arena;
    const RwLayout* layouts;
    const RwBatch* batch;
    const RwLayer* layer;
    RwRows q;
    void* out;
    int q_heads, kv_heads, share;  // share: query heads per KV head
    int k_dim, v_dim, group;
    bool raw;                      // bf16 pages
    bool residuals;                // pages that have some are read with them while they are young
    int k_padded, k_groups;        // stored width of K; padded to whole vectors if raw
    int v_width, v_groups;         // width accumulated: V's stored width, or the K prefix that must be rotated back
    int q_stride;                  // int16 per prepared query
    int accum_stride;              // floats
    int16_t* q_codes;              // [kv_heads, tokens * share, q_stride]: queries in fixed point, or bf16 high and low parts
    float* q_terms;                // [kv_heads, tokens * share, k_groups + 2]: step, q.mean, sums of each group
    int row_block;                 // rows an item may have
    int prompt_block;              // the same of a prompt in tile registers; 0: there are none, or they do not fit the pages
};

inline bool in_tiles(const AttendJob& job, int seq) { return job.prompt_block && is_prompt(*job.batch, seq); }

// A block of (query row, query head) pairs of one sequence and KV head, against spans [first_span, last_span) of its context.
struct AttendItem {
    int32_t seq, head, first_row, last_row, first_span, last_span;
    float* partial;          // where the sums of each span go, to be merged later; null: the item sees all spans, and merges them
    int64_t partial_stride;  // floats from span to span
};

// What each instruction set provides.
struct Kernels {
    void (*append)(const AppendJob&, int64_t first, int64_t last, float* scratch);         // of tokens * kv_heads
    void (*prepare)(const AttendJob&, int64_t first, int64_t last, float* scratch);        // of tokens * q_heads
    void (*attend)(const AttendJob&, const AttendItem&, float* scratch);
    void (*merge)(const AttendJob&, int seq, int head, int row, float* partials, int spans, int64_t span_stride, float* scratch);
    size_t (*scratch_bytes)(const AttendJob*);
    const LinearKernels* linear;
};
