/* The header and the statistics: they live in the segment, so that they can be read while the owner hangs, and after it died. */
#define _GNU_SOURCE
#include "ring.h"
#include "failpoints.h"
#include <errno.h>
#include <string.h>

#define READ(p) atomic_load_explicit((p), memory_order_relaxed)
#define WRITE(p, v) atomic_store_explicit((p), (v), memory_order_relaxed)

_Static_assert(sizeof(gw_stats) % 8 == 0 && sizeof(gw_client_stats) % 8 == 0, "statistics are read as 64-bit words");

#define LOOKS 1000 /* a writer takes nanoseconds, once; a hostile one could change the epoch for ever */

/* Identities are written under an epoch that is odd meanwhile. -> the epoch. */
static uint64_t read_identity(const _Atomic uint64_t *epoch, const gw_identity *from, gw_identity *out) {
    for (int looks = 0;; looks++) {
        uint64_t seen = GW_LOAD(epoch);
        *out = *from;
        atomic_thread_fence(memory_order_acquire);
        if (seen == READ(epoch) || looks == LOOKS) return seen;
    }
}

static void write_identity(_Atomic uint64_t *epoch, gw_identity *into, gw_identity who) {
    atomic_store_explicit(epoch, READ(epoch) | 1, memory_order_seq_cst);
    GW_POINT(identity_odd);
    atomic_thread_fence(memory_order_seq_cst);
    *into = who;
    GW_POINT(identity_written);
    atomic_fetch_add_explicit(epoch, 1, memory_order_seq_cst);
}

void gw_read_header(const gw_port *port, gw_overview *out) {
    const gw_header *h = port->header;
    gw_identity owner, supervisor;
    uint64_t epoch = read_identity(&h->epoch, &h->owner, &owner);
    uint64_t supervisor_epoch = read_identity(&h->supervisor_epoch, &h->supervisor, &supervisor);
    uint32_t in_use = 0;
    for (uint32_t i = 0; i < port->capacity; i++) in_use += gw_phase_of(READ(&port->slots[i].word)) != GW_FREE;
    *out = (gw_overview){
        .owner = owner, .epoch = epoch, .heartbeat_ns = READ(&h->heartbeat_ns), .batch_started_ns = READ(&h->batch_started_ns),
        .started_ns = READ(&h->started_ns), .supervisor = supervisor, .supervisor_epoch = supervisor_epoch,
        .max_payload_bytes = port->max_payload_bytes, .segment_bytes = h->segment_bytes, .nonce = h->nonce, .request_bytes = port->request_bytes,
        .response_bytes = port->response_bytes, .state = GW_LOAD(&h->state), .alive = READ(&h->alive), .capacity = port->capacity,
        .max_participants = port->max_participants, .on_full = h->on_full, .wake = h->wake, .quota_shared = h->quota_shared,
        .quota_alone = h->quota_alone, .allow_pickle = h->allow_pickle, .max_batch_size = h->max_batch_size, .in_use = in_use,
        .batches = READ(&h->stats.batches), .restarts = READ(&h->restarts), .reloads = READ(&h->reloads), .failed_reloads = READ(&h->failed_reloads), .paused = READ(&h->paused)};
}

int gw_read_info(const gw_port *port, char *out, uint32_t bytes) {
    uint32_t n = *(const volatile uint32_t *)&port->header->info_bytes; /* looked at once: it may change under us */
    if (n > GW_INFO_BYTES || n > bytes) return -EMSGSIZE;
    memcpy(out, port->header->info, n);
    return (int)n;
}

int gw_says(const gw_port *port, const char *known, uint32_t bytes) {
    uint32_t state = GW_LOAD(&port->header->state);
    return state != GW_STARTING && state < GW_STOPPED && bytes <= GW_INFO_BYTES &&
           *(const volatile uint32_t *)&port->header->info_bytes == bytes && !memcmp(known, port->header->info, bytes);
}

int gw_read_note(const gw_port *port, char *out, uint32_t bytes) {
    uint32_t n = GW_LOAD(&port->header->note_bytes); /* pairs with gw_set_note */
    if (n > GW_NOTE_BYTES || n > bytes) return -EMSGSIZE;
    memcpy(out, port->header->note, n);
    return (int)n;
}

int gw_read_participant(const gw_port *port, uint32_t participant, gw_participant_view *out) {
    if (!participant || participant > port->max_participants) return -EINVAL;
    const gw_participant *entry = &port->participants[participant - 1];
    uint64_t word = GW_LOAD(&entry->word);
    *out = (gw_participant_view){.word = word, .joined = word & 3};
    if (out->joined == GW_VACANT) return GW_VACANT; /* a joiner may be writing its identity */
    out->identity = entry->identity;
    for (uint32_t i = 0; i < port->capacity; i++) {
        uint64_t slot = READ(&port->slots[i].word);
        out->held += gw_phase_of(slot) != GW_FREE && gw_participant_of(slot) == participant;
    }
    return (int)out->joined;
}

/* 4 buckets an octave from 256 ns: bucket = 4 * log2(ns / 256), its last two bits from the mantissa. */
void gw_observe(gw_histogram *histogram, uint64_t ns) {
    uint32_t bucket = 0;
    if (ns >= 256) {
        uint32_t log2 = 63u - (uint32_t)__builtin_clzll(ns);
        bucket = (log2 - 8) * 4 + ((ns >> (log2 - 2)) & 3);
        if (bucket >= GW_BUCKETS) bucket = GW_BUCKETS - 1;
    }
    GW_COUNT(&histogram->count[bucket], 1);
    GW_COUNT(&histogram->sum_ns, ns);
    GW_COUNT(&histogram->n, 1);
}

/* The next entry after `participant` that is not vacant, or 0. */
uint32_t gw_next_participant(const gw_port *port, uint32_t participant) {
    for (uint32_t i = participant; i < port->max_participants; i++)
        if ((GW_LOAD(&port->participants[i].word) & 3) != GW_VACANT) return i + 1;
    return 0;
}

static void add_words(uint64_t *out, const void *from, int words) {
    const _Atomic uint64_t *p = from;
    for (int i = 0; i < words; i++) out[i] += READ(&p[i]);
}

int gw_read_stats(const gw_port *port, uint64_t *owner, int owner_words, uint64_t *clients, int client_words) {
    if (owner_words != sizeof(gw_stats) / 8 || client_words != sizeof(gw_client_stats) / 8) return -EINVAL;
    memset(owner, 0, sizeof(gw_stats));
    memset(clients, 0, sizeof(gw_client_stats));
    add_words(owner, &port->header->stats, owner_words);
    add_words(clients, &port->header->departed, client_words);
    for (uint32_t i = 0; i < port->max_participants; i++)
        if ((GW_LOAD(&port->participants[i].word) & 3) != GW_VACANT) add_words(clients, &port->participants[i].stats, client_words);
    return 0;
}

/* The owner's counters, of which it keeps the originals: words are stored one by one. */
void gw_publish_execution(gw_port *port, const uint64_t *words, uint32_t n) {
    for (uint32_t i = 0; i < n && i < GW_EXECUTION; i++) WRITE(&port->header->execution[i], words[i]);
}

void gw_read_execution(const gw_port *port, uint64_t out[GW_EXECUTION]) {
    for (uint32_t i = 0; i < GW_EXECUTION; i++) out[i] = READ(&port->header->execution[i]);
}

void gw_set_owner(gw_port *port, int64_t pid, uint64_t start_ticks, uint64_t pid_namespace) {
    WRITE(&port->header->started_ns, gw_now());
    write_identity(&port->header->epoch, &port->header->owner, (gw_identity){pid, start_ticks, pid_namespace});
}

void gw_set_supervisor(gw_port *port, int64_t pid, uint64_t start_ticks, uint64_t pid_namespace) {
    write_identity(&port->header->supervisor_epoch, &port->header->supervisor, (gw_identity){pid, start_ticks, pid_namespace});
}

void gw_count_event(gw_port *port, uint32_t event) {
    gw_header *h = port->header;
    _Atomic uint32_t *counters[] = {[GW_RESTARTED] = &h->restarts, [GW_RELOADED] = &h->reloads, [GW_RELOAD_FAILED] = &h->failed_reloads};
    if (event <= GW_RELOAD_FAILED) atomic_fetch_add_explicit(counters[event], 1, memory_order_release); /* after the note that goes with it */
}

/* Cut at GW_NOTE_BYTES. A reader may see it half written: it is for people. */
void gw_set_note(gw_port *port, const char *note, uint32_t bytes) {
    if (bytes > GW_NOTE_BYTES) bytes = GW_NOTE_BYTES;
    memcpy(port->header->note, note, bytes);
    GW_POINT(note_written);
    atomic_store_explicit(&port->header->note_bytes, bytes, memory_order_release);
}

void gw_set_policy(gw_port *port, uint32_t on_full, uint32_t wake, uint32_t quota_shared, uint32_t quota_alone, uint32_t allow_pickle, uint32_t max_batch_size) {
    gw_header *h = port->header;
    h->on_full = on_full;
    h->wake = port->wake = wake;
    h->quota_shared = quota_shared;
    h->quota_alone = quota_alone;
    h->allow_pickle = allow_pickle;
    h->max_batch_size = max_batch_size;
}

int gw_set_info(gw_port *port, const char *info, uint32_t bytes) {
    if (bytes > GW_INFO_BYTES) return -EMSGSIZE;
    memcpy(port->header->info, info, bytes);
    port->header->info_bytes = bytes;
    return 0;
}

void gw_set_wake(gw_port *port, uint32_t wake) { port->wake = wake; }
void gw_heartbeat(gw_port *port, uint64_t now_ns) { WRITE(&port->header->heartbeat_ns, now_ns); }

/* Weight 1/8 for the newest; the first value counts in full. */
static void track(_Atomic uint64_t *mean, uint64_t value) {
    uint64_t old = READ(mean);
    WRITE(mean, old ? old - old / 8 + value / 8 : value);
}

/* run_ns: since its dispatch, as its requests see it. A prediction is about the time for which it had the device. */
void gw_batch_done(gw_port *port, const gw_batch *batch, uint64_t run_ns, uint64_t now_ns) {
    gw_header *h = port->header;
    uint32_t size = batch->size;
    uint64_t alone_ns = now_ns - port->running_since_ns < run_ns ? now_ns - port->running_since_ns : run_ns;
    gw_stamp_running(port, now_ns);
    GW_POINT(batch_unstamped);
    uint32_t bucket = size < 64 ? size : 64u + 31u - (uint32_t)__builtin_clz(size) - 6u;
    GW_TALLY(&h->stats.batches, 1);
    GW_TALLY(&h->stats.reasons[batch->reason % GW_REASONS], 1);
    GW_TALLY(&h->stats.batch_sizes[bucket < GW_BUCKETS ? bucket : GW_BUCKETS - 1], 1);
    gw_observe(&h->stats.run, run_ns);
    if (batch->predicted_ns) {
        GW_TALLY(&h->stats.predicted, 1);
        GW_TALLY(&h->stats.predicted_ns, batch->predicted_ns);
        GW_TALLY(&h->stats.ran_ns, alone_ns);
        GW_TALLY(&h->stats.overruns, alone_ns > batch->predicted_ns);
    }
    track(&h->run_mean_ns, alone_ns);
}

void gw_count_client(gw_port *port, uint32_t outcome) {
    if (!port->me) return;
    gw_client_stats *s = &port->participants[port->me - 1].stats;
    _Atomic uint64_t *counters[] = {[GW_REJECTED] = &s->rejected, [GW_CANCELLED] = &s->cancelled, [GW_EXPIRED] = &s->expired, [GW_FELL_BACK] = &s->fallbacks,
                                    [GW_FORECAST_LATE] = &s->forecast_late, [GW_SATISFIED] = &s->satisfied};
    if (outcome <= GW_SATISFIED) GW_COUNT(counters[outcome], 1);
}

/* When a slot should be free again: the time one more batch takes, as batches have gone lately, less what the running one has done already. */
uint64_t gw_retry_after_ns(const gw_port *port) {
    const gw_header *h = port->header;
    uint64_t run = READ(&h->run_mean_ns), started = READ(&h->batch_started_ns), now = gw_now();
    uint64_t elapsed = started && started < now ? now - started : 0;
    return elapsed < run ? run - elapsed : run;
}
