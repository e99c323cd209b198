/* The shared segment: what lies where, who may write it, and when.
 *
 *     header | participants[max_participants] | slots[capacity] | areas[capacity] (request, response)
 *
 * Every process maps the segment at its own address, so the segment holds indices and offsets, never pointers. A process reads the geometry
 * once, checks it against the file's size and keeps its own copy (gw_port): a later scribble over the header cannot move anybody's reads.
 *
 * A slot's 64-bit word is the only truth about it; ready bits, semaphores, doorbell and counters are hints that a scan rebuilds.
 *
 *     word = generation (48 bits) | participant (13) | phase (3)         generation += 1 at each claim; participant 0 = nobody
 *
 *               claim           publish          take            finish         release
 *      FREE(g) -----> CLAIMED(g+1) ----> READY(g+1) ----> RUNNING(g+1) ----> DONE(g+1) -----> FREE(g+1)
 *              (frontend)      (frontend)      (owner)          (owner)        (frontend)
 *
 *      cancel (frontend): CLAIMED, READY -> FREE;  RUNNING -> ABANDONED;  the owner's finish then does ABANDONED -> FREE
 *      reap (owner, for a participant proved dead):  the same moves on its behalf, and DONE -> FREE
 *      recover (next owner): RUNNING -> READY with attempts + 1, or -> DONE when it was tried too often;  ABANDONED -> FREE
 *
 * Every move is one compare-and-swap of the whole word, so whoever was paused or mistaken gets ESTALE instead of breaking somebody's slot. */
#ifndef GPUWORKER_LAYOUT_H
#define GPUWORKER_LAYOUT_H
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define GW_MAGIC 0x676b72777570676bull
#define GW_VERSION 5u
#define GW_LINE 64
#define GW_MAX_CAPACITY 4096
#define GW_MAX_PARTICIPANTS 1024 /* the word has 13 bits; the space bitmap below has this many */
#define GW_BUCKETS 128
#define GW_INFO_BYTES 8192
#define GW_NOTE_BYTES 4096
#define GW_LANES 16 /* length buckets that a forecast can be published for */

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "the ring needs lock-free 64-bit and 32-bit atomics");

enum gw_phase { GW_FREE = 0, GW_CLAIMED, GW_READY, GW_RUNNING, GW_DONE, GW_ABANDONED };
/* Up to GW_RESTARTING requests are taken; from GW_STOPPED on this segment answers nothing any more. */
enum gw_state { GW_STARTING = 0, GW_SERVING, GW_RESTARTING, GW_DRAINING, GW_STOPPED, GW_SUPERSEDED, GW_FAILED };
enum gw_joined { GW_VACANT = 0, GW_ALIVE, GW_LEFT };
enum gw_on_full { GW_REJECT = 0, GW_BLOCK, GW_FALLBACK };
enum gw_outcome { GW_REJECTED = 0, GW_CANCELLED, GW_EXPIRED, GW_FELL_BACK, GW_FORECAST_LATE, GW_SATISFIED }; /* of a request, as its frontend counts it */
enum gw_admission { GW_ADMIT_ALL = 0, GW_ADMIT_AUTO, GW_ADMIT_IN_TIME };
enum gw_chime_word { GW_CHIME_NONE = 0, GW_CHIME_TAKEN, GW_CHIME_ARMED }; /* see chime.c */
enum gw_wake { GW_PARK = 0, GW_ADAPTIVE, GW_BUSY };

/* What a payload area holds; the codec is gpuworker/payload. Kinds from GW_KIND_ERROR up occur in responses only. */
enum gw_kind {
    GW_KIND_BYTES = 0, GW_KIND_STR, GW_KIND_ARRAY, GW_KIND_TREE, GW_KIND_PICKLE,
    GW_KIND_STREAM, GW_KIND_ERROR = 16, GW_KIND_EXPIRED, GW_KIND_DRAINING, GW_KIND_DIED, GW_KIND_STUCK, GW_KIND_FAILED, GW_KIND_LATE,
    GW_KIND_SPILLED = 0x40 /* flag: the payload lies in a file of its own, named after slot and generation (segment/spill.py) */
};

/* Why a batch left; index into gw_stats.reasons. Named in gpuworker/scheduling/decision.py. */
#define GW_REASONS 8

/* Log-linear histogram: 4 buckets an octave from 256 ns on, so a quantile read from it is within a quarter of the true one. */
typedef struct { _Atomic uint64_t count[GW_BUCKETS]; _Atomic uint64_t sum_ns; _Atomic uint64_t n; } gw_histogram;

/* Enough for the kernel to tell this process from every other one, also after its pid is used again. */
typedef struct { int64_t pid; uint64_t start_ticks; uint64_t pid_namespace; } gw_identity;

/* Written by the threads of one frontend process only (relaxed adds); folded into gw_header.departed by the owner when the frontend is gone. */
typedef struct {
    _Atomic uint64_t submitted, rejected, cancelled, expired, fallbacks, forecast_late, satisfied;
    gw_histogram claim_wait, wake;
} gw_client_stats;

/* Written by the owner only. */
typedef struct {
    _Atomic uint64_t completed, failed, expired, abandoned, reaped_slots, reaped_participants, batches, requeued, late_wakes, spins, parks;
    _Atomic uint64_t on_time, late, rejected_late;           /* of requests with a latency budget: answered within it, after it, not run */
    _Atomic uint64_t predicted, predicted_ns, ran_ns, overruns; /* of batches whose run time was predicted: how many, both sums, how many ran longer */
    _Atomic uint64_t tokens, padded_tokens;                  /* lengths of requests that ran, as they are and as padded in their batch */
    _Atomic uint64_t reasons[GW_REASONS];
    _Atomic uint64_t batch_sizes[GW_BUCKETS]; /* [n] for n < 64, then one per octave: see gw_batch_done */
    gw_histogram queue_wait, batch_wait, run;
} gw_stats;

#define GW_EXECUTION 64 /* words that owners of tensors and of generation count in: gpuworker/segment/{execution,generation}.py */

/* One length bucket as its owner last saw it, for frontends that forecast (forecast.c). All of it hints: words are read one by one. */
typedef struct {
    _Alignas(GW_LINE) _Atomic uint64_t length;         /* longest request it takes */
    _Atomic uint64_t run_one_ns, run_full_ns, gap_ns;  /* predicted run of a batch of 1, of `cap`; mean time between arrivals, 0 = unknown */
    _Atomic uint32_t cap, queued;                      /* most requests in a batch; requests queued when the owner last looked */
    _Atomic uint64_t seen;                             /* gw_header.arrived[] of this bucket at that time */
    _Atomic uint64_t ran_ns;                           /* when its last batch began or ended */
} gw_lane;

typedef struct {
    /* Written once by the creator, before `magic` is stored (release) and the file gets its public name. */
    _Alignas(GW_LINE) _Atomic uint64_t magic;
    uint32_t version, pad1;
    uint32_t capacity, max_participants;
    uint64_t request_bytes, response_bytes; /* of one slot's areas, multiples of GW_LINE */
    uint64_t max_payload_bytes;             /* what may travel through a spill file */
    uint64_t segment_bytes;
    uint64_t nonce; /* random: no two segments of one name share it, so neither do their spill files */
    /* Written by each owner before it says GW_SERVING. */
    _Alignas(GW_LINE) uint32_t on_full, wake;
    uint32_t quota_shared, quota_alone; /* slots one participant may hold while others are joined, and while it is alone */
    uint32_t allow_pickle, max_batch_size, info_bytes, admission;
    uint64_t budget_ns;  /* latency budget of a request that does not bring its own; 0 = none */
    uint64_t max_length; /* longest request that is taken; 0 = any */
    uint32_t priorities, pad0; /* whether requests may have some */
    char info[GW_INFO_BYTES]; /* JSON for people and tools: name, handler, options */
    /* Who keeps an owner running: written by whoever holds the supervisor's lock byte, an owner without a supervisor being its own. */
    _Alignas(GW_LINE) gw_identity supervisor;
    _Atomic uint64_t supervisor_epoch; /* as `epoch` below */
    _Atomic uint32_t restarts, reloads, failed_reloads, note_bytes;
    _Atomic uint32_t paused; /* no batch begins while it is not 0: written by whoever operates the worker (gw_set_paused), read by the owner */
    char note[GW_NOTE_BYTES]; /* why the last owner died, or why a reload failed; UTF-8 for people */
    /* Written by the owner, and by the supervisor while there is none. `epoch` grows with every owner of this segment, and is odd while `owner` is being written. */
    _Alignas(GW_LINE) gw_identity owner;
    _Atomic uint64_t epoch;
    _Atomic uint32_t state, alive; /* alive: joined participants, a hint for the quota. Each claim reads this line: nothing here changes with each batch */
    _Alignas(GW_LINE) _Atomic uint64_t heartbeat_ns, batch_started_ns, started_ns;
    _Atomic uint64_t run_mean_ns; /* for QueueFull.retry_after_ms: an exponentially weighted mean */
    /* Doorbell. The owner writes `owner_asleep`; frontends bump `bell`. Proof in wake.c. */
    _Alignas(GW_LINE) _Atomic uint32_t owner_asleep;
    _Atomic uint32_t bell;
    /* Room: who waits for a free slot. Each participant sets and clears its own bit (and the reaper clears it for the dead). */
    _Alignas(GW_LINE) _Atomic uint32_t space_bell;
    _Alignas(GW_LINE) _Atomic uint64_t space_wanted[GW_MAX_PARTICIPANTS / 64];
    _Alignas(GW_LINE) _Atomic uint64_t ready[GW_MAX_CAPACITY / 64]; /* frontends set bits, the owner clears words */
    _Alignas(GW_LINE) _Atomic uint64_t arrived[GW_LANES]; /* requests published, by length bucket; frontends add, while there is a forecast */
    _Alignas(GW_LINE) _Atomic uint64_t free_at_ns; /* predicted end of the running batch; 0 = idle */
    _Atomic uint32_t lanes;
    gw_lane lane[GW_LANES];
    _Alignas(GW_LINE) gw_stats stats;
    _Alignas(GW_LINE) gw_client_stats departed;
    _Alignas(GW_LINE) _Atomic uint64_t execution[GW_EXECUTION]; /* written by the owner from time to time */
} gw_header;

typedef struct {
    /* word = incarnation << 2 | gw_joined. Vacant -> alive by the joiner that holds the lock byte of this entry; alive -> left by the
       participant; alive or left -> vacant by the owner, last of all, once no slot is held under this index (ABANDONED ones are the owner's own). */
    _Alignas(GW_LINE) _Atomic uint64_t word;
    gw_identity identity; /* written by the joiner before the word says alive */
    _Atomic uint32_t chime; /* gw_chime_word: armed by the participant, taken by whoever rings it; see chime.c */
    _Alignas(GW_LINE) gw_client_stats stats;
} gw_participant;

typedef struct {
    /* First line: written by the claiming frontend between claim and publish; the word by everybody, by compare-and-swap. */
    _Alignas(GW_LINE) _Atomic uint64_t word;
    /* Atomic (relaxed), as the owner looks at these before it takes the slot, and by then it may be in its next life. */
    _Atomic uint64_t enqueue_ns, deadline_ns; /* CLOCK_MONOTONIC; deadline 0 = none */
    _Atomic uint64_t request;                 /* kind, meta and length in one: see gw_describe */
    _Atomic uint32_t attempts;        /* owners that died while this request was running: zeroed by the claimer, raised by gw_recover */
    uint32_t pad0;
    _Atomic uint64_t terms;                   /* budget, length and priority in one: see gw_terms */
    uint64_t reserved0[2];
    /* Second line: written by the owner only. */
    _Alignas(GW_LINE) uint64_t collect_ns;
    uint64_t dispatch_ns, done_ns;
    uint64_t response;
    uint64_t due_ns; /* enqueue_ns and latency budget; 0 = none */
    uint64_t reserved1[3];
    /* Third line: a post says "look at the word". Posted by the owner, waited on by the claimer; never re-initialised. See semaphore.c. */
    _Alignas(GW_LINE) _Atomic uint32_t semaphore;
    uint32_t pad1;
    /* By the claimer, where its requests are traced: generation and flags, trace id (two words), span id. See trace.c. */
    _Atomic uint64_t trace_life, trace[3];
} gw_slot;

_Static_assert(sizeof(gw_slot) == 3 * GW_LINE, "a slot header is three cache lines");
_Static_assert(offsetof(gw_slot, collect_ns) == GW_LINE && offsetof(gw_slot, semaphore) == 2 * GW_LINE, "frontend and owner write different lines");
_Static_assert(sizeof(gw_participant) % GW_LINE == 0 && sizeof(gw_header) % GW_LINE == 0, "tables start on a cache line");

/* At the front of the response area of a request that is answered piece by piece: see stream.c. */
typedef struct {
    _Alignas(GW_LINE) _Atomic uint64_t life; /* the slot's generation whose log this is */
    _Atomic uint32_t written;                /* entries */
    uint32_t entry_bytes, finish, counts[3], error_bytes;
} gw_stream;
#define GW_STREAM_ERROR 512u

static inline uint64_t gw_word(uint64_t generation, uint32_t participant, uint32_t phase) {
    return generation << 16 | (uint64_t)participant << 3 | phase;
}
static inline uint32_t gw_phase_of(uint64_t word) { return word & 7; }
static inline uint32_t gw_participant_of(uint64_t word) { return (word >> 3) & 0x1fff; }
static inline uint64_t gw_generation_of(uint64_t word) { return word >> 16; }
static inline uint64_t gw_with_phase(uint64_t word, uint32_t phase) { return (word & ~7ull) | phase; }
static inline uint64_t gw_freed(uint64_t word) { return word & ~0xffffull; }

/* A payload in one positive int64: kind (7 bits) | meta bytes (18) | total bytes (36). The area is meta, padding to a cache line, data. */
#define GW_MAX_META ((1u << 18) - 1)
static inline uint64_t gw_describe(uint32_t kind, uint32_t meta, uint64_t total) {
    return (uint64_t)(kind & 0x7f) << 54 | (uint64_t)meta << 36 | (total & 0xfffffffffull);
}
static inline uint64_t gw_total_of(uint64_t described) { return described & 0xfffffffffull; }
static inline uint32_t gw_meta_of(uint64_t described) { return (described >> 36) & GW_MAX_META; }
static inline uint32_t gw_kind_of(uint64_t described) { return (described >> 54) & 0x7f; }
/* What a frontend asks for beside the request itself: budget in us (32 bits) | length (24) | priority (8). 0 each: not given. */
#define GW_MAX_LENGTH ((1u << 24) - 1)
static inline uint64_t gw_terms(uint64_t budget_us, uint32_t length, uint32_t priority) {
    return budget_us << 32 | (uint64_t)(length & GW_MAX_LENGTH) << 8 | (priority & 0xff);
}
static inline uint64_t gw_budget_of(uint64_t terms) { return (terms >> 32) * 1000; }
static inline uint32_t gw_priority_of(uint64_t terms) { return terms & 0xff; }
static inline uint32_t gw_length_of(uint64_t terms) { return (terms >> 8) & GW_MAX_LENGTH; }
static inline uint64_t gw_align(uint64_t n) { return (n + GW_LINE - 1) & ~(uint64_t)(GW_LINE - 1); }

#endif
