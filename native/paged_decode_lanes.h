/* The arithmetic of paged_decode.c for vectors of LANES floats, which is included once for each kind of processor: LANES, and TARGET, the attribute that lets the
 * compiler use the instructions. Vectors are never passed between functions, whose calling conventions would depend on the processor.
 *
 * Softmax in one pass over the tokens (online, Milakov and Gimelshein, 2018), LANES of them at a time: their scores are one vector.
 */
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define OF(name) JOIN(name, LANES)

typedef float OF(v) __attribute__((vector_size(4 * LANES)));
typedef int32_t OF(i) __attribute__((vector_size(4 * LANES)));
typedef uint32_t OF(u) __attribute__((vector_size(4 * LANES)));
#define V OF(v)
#define I OF(i)
#define U OF(u)

#if LANES == 16
#define EACH(what, d) what(0, d), what(1, d), what(2, d), what(3, d), what(4, d), what(5, d), what(6, d), what(7, d), what(8, d), what(9, d), \
    what(10, d), what(11, d), what(12, d), what(13, d), what(14, d), what(15, d)
#elif LANES == 8
#define EACH(what, d) what(0, d), what(1, d), what(2, d), what(3, d), what(4, d), what(5, d), what(6, d), what(7, d)
#else
#define EACH(what, d) what(0, d), what(1, d), what(2, d), what(3, d)
#endif
#define ITSELF(i, d) (i)
#define OTHER(i, d) ((i) ^ (d))
#define LOW(i, d) ((i) & (d) ? LANES + (i) - (d) : (i))
#define HIGH(i, d) ((i) & (d) ? LANES + (i) : (i) + (d))

#define SPREAD(x) ((V){0} + (x))
#define CHOOSE(mask, a, b) ((V)(((I)(a) & (mask)) | ((I)(b) & ~(mask))))
#define LARGER(a, b) ({ const V a_ = (a), b_ = (b); CHOOSE(b_ > a_, b_, a_); })
#define AT(array) ({ V v_; memcpy(&v_, (array), sizeof v_); v_; })
#define PUT(array, v) ({ const V v_ = (v); memcpy((array), &v_, sizeof v_); })

/* 2 * LANES elements as two vectors. Those of bfloat16 are the ones at even and at odd places: each is the upper half of a float, and no shuffle is needed. */
#define LOAD(a, b, from)                                                                                                                                 \
    do {                                                                                                                                                 \
        const char *from_ = (from);                                                                                                                      \
        if (bytes == GW_DECODE_BF16) {                                                                                                                   \
            U pairs_;                                                                                                                                    \
            memcpy(&pairs_, from_, sizeof pairs_);                                                                                                       \
            (a) = (V)(pairs_ << 16), (b) = (V)(pairs_ & 0xffff0000u);                                                                                    \
        } else {                                                                                                                                         \
            memcpy(&(a), from_, sizeof(V)), memcpy(&(b), from_ + sizeof(V), sizeof(V));                                                                  \
        }                                                                                                                                                \
    } while (0)

/* bfloat16 in the upper halves: the nearest, of two the even one; NaN stays NaN. */
#define ROUND(v) ({ const U bits_ = (U)(v); const U nan_ = (U)((bits_ & 0x7fffffffu) > 0x7f800000u); ((bits_ + 0x7fffu + (bits_ >> 16 & 1)) & ~nan_) | ((bits_ | 0x400000u) & nan_); })

/* e^x for x <= 0, to a relative error of about 1e-7 * (1 - x); 0 below e^-87; NaN for NaN. 2^y = 2^n * e^(f ln 2), |f| <= 1/2, the latter by its Taylor series. */
#define EXP(x)                                                                                                                                           \
    ({                                                                                                                                                   \
        V y_ = (x) * 1.44269504088896341f;                                                                                                               \
        const I small_ = y_ < -126.0f;                                                                                                                   \
        y_ = CHOOSE(small_, SPREAD(-126.0f), y_);                                                                                                        \
        const V n_ = (y_ + 12582912.0f) - 12582912.0f, f_ = (y_ - n_) * 0.69314718055994531f;                                                            \
        const V p_ = 1.0f + f_ * (1.0f + f_ * (0.5f + f_ * (1.6666667e-1f + f_ * (4.1666667e-2f + f_ * (8.3333333e-3f + f_ * 1.3888889e-3f)))));         \
        const V power_ = (V)((__builtin_convertvector(n_, I) + 127) << 23);                                                                              \
        (V)((I)(p_ * power_) & ~small_);                                                                                                                 \
    })

/* One run of tokens, at most LANES, for `count` queries that share a head of keys. query, sums, best and total: of the first of them. tokens: the run's first
 * key; next: the next run's, of `following` tokens. bytes and count are constants where this is called. */
static inline __attribute__((always_inline)) TARGET void OF(run_)(const gw_decode *d, const float *restrict query, float *restrict sums, float *restrict best,
                                                                  float *restrict total, const char *tokens, int64_t run, const char *next,
                                                                  int64_t following, const uint32_t bytes, const int count) {
    const int64_t kw = d->key_width, vw = d->value_width, token = d->key_heads * (kw + vw) * bytes; /* token: bytes from one to the next */
    V part[GROUP][LANES];                                                                           /* a token's products, which are still to be added up */
    float weights[GROUP][LANES];
    for (int64_t t = 0; t < run; t++) {
        V sum[GROUP];
        UNROLL for (int g = 0; g < count; g++) sum[g] = (V){0};
        if (t < following)
            for (int64_t i = 0; i < (kw + vw) * bytes; i += 64) __builtin_prefetch(next + t * token + i);
        for (int64_t i = 0; i < kw; i += 2 * LANES) {
            V a, b;
            LOAD(a, b, tokens + t * token + i * bytes);
            UNROLL for (int g = 0; g < count; g++) sum[g] += AT(query + g * kw + i) * a, sum[g] += AT(query + g * kw + i + LANES) * b;
        }
        UNROLL for (int g = 0; g < count; g++) part[g][t] = sum[g];
    }
    for (int64_t t = run; t < LANES; t++)
        UNROLL for (int g = 0; g < count; g++) part[g][t] = (V){0};
    const I is_there = (I){EACH(ITSELF, 0)} < (I){0} + (int32_t)run;
    UNROLL for (int g = 0; g < count; g++) {
        /* Lane t of the sum of all is what lanes of part t add up to: half of the vectors, each of two, remain each time. */
        V *p = part[g];
#if LANES >= 16
        UNROLL for (int t = 0; t < 8; t++) p[t] = SHUFFLE(I, p[t], p[t + 8], EACH(LOW, 8)) + SHUFFLE(I, p[t], p[t + 8], EACH(HIGH, 8));
#endif
#if LANES >= 8
        UNROLL for (int t = 0; t < 4; t++) p[t] = SHUFFLE(I, p[t], p[t + 4], EACH(LOW, 4)) + SHUFFLE(I, p[t], p[t + 4], EACH(HIGH, 4));
#endif
        UNROLL for (int t = 0; t < 2; t++) p[t] = SHUFFLE(I, p[t], p[t + 2], EACH(LOW, 2)) + SHUFFLE(I, p[t], p[t + 2], EACH(HIGH, 2));
        const V scores = CHOOSE(is_there, SHUFFLE(I, p[0], p[1], EACH(LOW, 1)) + SHUFFLE(I, p[0], p[1], EACH(HIGH, 1)), SPREAD(-INFINITY));
        V most = scores;
#if LANES >= 16
        most = LARGER(most, SHUFFLE(I, most, most, EACH(OTHER, 8)));
#endif
#if LANES >= 8
        most = LARGER(most, SHUFFLE(I, most, most, EACH(OTHER, 4)));
#endif
        most = LARGER(most, SHUFFLE(I, most, most, EACH(OTHER, 2)));
        most = LARGER(most, SHUFFLE(I, most, most, EACH(OTHER, 1)));
        if (most[0] > best[g]) {
            const V shrink = EXP(SPREAD(best[g]) - most[0]);
            for (int64_t i = 0; i < vw; i += LANES) PUT(sums + g * vw + i, AT(sums + g * vw + i) * shrink);
            PUT(total + g * LANES, AT(total + g * LANES) * shrink);
            best[g] = most[0];
        }
        const V weight = EXP(scores - best[g]); /* a score that is NaN makes it, and so the result, NaN, whatever `best` is */
        PUT(total + g * LANES, AT(total + g * LANES) + weight);
        PUT(weights[g], weight);
    }
    for (int64_t i = 0; i < vw; i += 2 * LANES) {
        V even[GROUP], odd[GROUP];
        UNROLL for (int g = 0; g < count; g++) even[g] = AT(sums + g * vw + i), odd[g] = AT(sums + g * vw + i + LANES);
        for (int64_t t = 0; t < run; t++) {
            V a, b;
            LOAD(a, b, tokens + t * token + (kw + i) * bytes);
            UNROLL for (int g = 0; g < count; g++) even[g] += weights[g][t] * a, odd[g] += weights[g][t] * b;
        }
        UNROLL for (int g = 0; g < count; g++) PUT(sums + g * vw + i, even[g]), PUT(sums + g * vw + i + LANES, odd[g]);
    }
}

/* One row, `count` heads of queries from `first` on. Block by block, and in each head by head: memory is read in its order. */
#define RUN(n) case n: OF(run_)(d, query + h * kw, sums + h * vw, best + h, total + h * LANES, tokens + head * (kw + vw) * bytes, run, next + head * (kw + vw) * bytes, following, bytes, n); break
static inline __attribute__((always_inline)) TARGET void OF(row_)(const gw_decode *d, int64_t row, int64_t first, int64_t count, const uint32_t bytes) {
    const int64_t kw = d->key_width, vw = d->value_width, bt = d->block_tokens, group = d->heads / d->key_heads;
    const int64_t token = d->key_heads * (kw + vw) * bytes, end = d->lengths[row], *table = d->table + row * d->table_width;
    const char *blocks = d->blocks;
    float query[SCRATCH], sums[SCRATCH], best[SCRATCH / (2 * LANES)], total[SCRATCH / 2]; /* no width is below 2 * LANES */
    for (int64_t h = 0; h < count; h++) {
        const char *own = (const char *)d->query + (row * d->query_row + (first + h) * d->query_head) * bytes;
        for (int64_t i = 0; i < kw; i += 2 * LANES) {
            V a, b;
            LOAD(a, b, own + i * bytes);
            PUT(query + h * kw + i, a * d->scale), PUT(query + h * kw + i + LANES, b * d->scale);
        }
        best[h] = -INFINITY;
    }
    memset(sums, 0, (size_t)(count * vw) * sizeof(float));
    memset(total, 0, (size_t)(count * LANES) * sizeof(float));
    int64_t run, following, at = d->window > 0 && end > d->window ? end - d->window : 0;
    const char *tokens = blocks + (table[at / bt] * bt + at % bt) * token, *next;
    for (; at < end; at += run, tokens = next) {
        const int64_t offset = at % bt;
        run = LANES - offset % LANES;
        run = run < bt - offset ? run : bt - offset;
        run = run < end - at ? run : end - at;
        next = tokens + run * token;
        following = end - at - run < LANES ? end - at - run : LANES;
        if (following && offset + run == bt) next = blocks + table[(at + run) / bt] * bt * token;
        for (int64_t h = 0, n; h < count; h += n) {
            const int64_t head = (first + h) / group, left = (head + 1) * group - first - h;
            n = left < count - h ? left : count - h;
            n = n < GROUP ? n : GROUP;
            switch (n) { RUN(1); RUN(2); RUN(3); RUN(4); }
        }
    }
    for (int64_t h = 0; h < count; h++) {
        char *out = (char *)d->output + (row * d->heads + first + h) * vw * bytes;
        float all = 0;
        for (int lane = 0; lane < LANES; lane++) all += total[h * LANES + lane];
        for (int64_t i = 0; i < vw; i += 2 * LANES) {
            const V a = AT(sums + h * vw + i) / all, b = AT(sums + h * vw + i + LANES) / all;
            if (bytes == GW_DECODE_BF16) {
                const U pairs = (ROUND(a) >> 16) | (ROUND(b) & 0xffff0000u);
                memcpy(out + i * bytes, &pairs, sizeof pairs);
            } else {
                memcpy(out + i * bytes, &a, sizeof a), memcpy(out + (i + LANES) * bytes, &b, sizeof b);
            }
        }
    }
}
#undef RUN

static TARGET void OF(heads_)(const gw_decode *d, int64_t row, int64_t first, int64_t count) {
    if (d->element_bytes == GW_DECODE_BF16)
        OF(row_)(d, row, first, count, GW_DECODE_BF16);
    else
        OF(row_)(d, row, first, count, GW_DECODE_FP32);
}

#undef EXP
#undef ROUND
#undef LOAD
#undef PUT
#undef AT
#undef LARGER
#undef CHOOSE
#undef SPREAD
#undef HIGH
#undef LOW
#undef OTHER
#undef ITSELF
#undef EACH
#undef U
#undef I
#undef V
#undef OF
#undef JOIN
#undef JOIN_
#undef TARGET
#undef LANES
