/* What must be true whatever happened to the victim, once the living have gone on. Also what the table of scenarios is made of. */
#ifndef GPUWORKER_TESTS_KILLSTEP_SETTLE_H
#define GPUWORKER_TESTS_KILLSTEP_SETTLE_H
#include "killstep_world.h"

/* What happens to the victim at the point. PAUSE_ALONE: once it goes on, nobody does anything for it. */
enum fate { KILL, PAUSE, PAUSE_ALONE };

/* Hooks that run around the victim, in the harness; each may be NULL. */
typedef struct {
    const char *name;
    enum fate fate;
    void (*begin)(void);    /* before the victim is there */
    int (*each)(void);      /* after each of its steps; not 0: something was there to do */
    void (*on_sleep)(void); /* when it sleeps in a system call: what it waits for */
    void (*stopped)(void);  /* at the point: it can do nothing now */
    void (*after)(void);    /* it is dead, or has gone on and finished its calls */
} mode;

typedef struct {
    const char *name;
    void (*world)(void);    /* what there is before the victim */
    void (*prepare)(void);  /* in the victim, before the first step */
    void (*start)(void);    /* in the harness, before the first step */
    void (*body)(void);     /* in the victim: the calls to be killed in */
    void (*ease)(void);     /* in the harness, when the victim sleeps or is at the point: what this scenario waits for */
    void (*finally)(void);  /* in the harness, at the end: what this scenario still holds */
    const mode *modes;
    int n_modes;
} scenario;
#define MODES(table) table, (int)(sizeof table / sizeof *table)

/* All slots are free: each takes a request, the one that the victim had wakes its sleeper, and there is not one more. */
static inline void every_slot_works(void) {
    int64_t tickets[CAPACITY];
    uint64_t seen = 0, first_id = w.next_id;
    for (uint64_t k = 0; k < CAPACITY; k++) {
        tickets[k] = submit(w.busy, first_id + k);
        seen |= 1u << gw_slot_of(tickets[k]);
        if (gw_slot_of(tickets[k]) == w.probe) await(0, w.busy, tickets[k], first_id + k);
    }
    EQUAL(seen, (1u << CAPACITY) - 1);
    EQUAL(gw_claim(w.busy), -EAGAIN);
    EQUAL(serve(), CAPACITY);
    for (uint64_t k = 0; k < CAPACITY; k++) {
        if (gw_slot_of(tickets[k]) == w.probe) expect_told(&waiters[0]);
        else {
            EQUAL(gw_wait(w.busy, tickets[k], 0, PATIENCE_NS), gw_describe(GW_KIND_BYTES, 0, PAYLOAD_BYTES));
            receive_answer(w.busy, tickets[k], first_id + k);
        }
        EQUAL(ran[first_id + k], 1);
    }
    EQUAL(gw_count(r.owner, GW_FREE), CAPACITY);
    EQUAL(w.busy->inflight, 0);
}

/* Who is there is counted, and every other place can be taken. */
static inline void every_place_works(void) {
    EQUAL(r.owner->header->alive, 2);
    gw_port *ports[PARTICIPANTS];
    for (int i = 2; i < PARTICIPANTS; i++) {
        ports[i] = join_as_sleeper();
        EQUAL(ports[i]->me, i + 1);
    }
    EQUAL(r.owner->header->alive, PARTICIPANTS);
    for (int i = 2; i < PARTICIPANTS; i++) port_close(ports[i]);
    reap();
    EQUAL(r.owner->header->alive, 2);
}

static inline void statistics_are_sane(void) {
    uint64_t words[(sizeof(gw_stats) + sizeof(gw_client_stats)) / 8], *clients = words + sizeof(gw_stats) / 8, all = 0;
    EQUAL(gw_read_stats(r.owner, words, sizeof(gw_stats) / 8, clients, sizeof(gw_client_stats) / 8), 0);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) CHECK(words[i] < 1ull << 40); /* nothing went below nought */
    for (int id = 0; id < IDS; id++) {
        CHECK(ran[id] <= 1 + (uint32_t)w.owner_deaths); /* again only for the death of who ran it */
        all += ran[id];
    }
    gw_stats *stats = &r.owner->header->stats;
    CHECK(stats->completed + stats->abandoned <= all);
}

static inline void settle(void) {
    owner_thread_ends();
    reap();
    serve();
    for (int i = 0; i < WAITERS; i++) expect_told(&waiters[i]);
    reap();
    EQUAL(spill_sweep(r.owner), 0);
    EQUAL(gw_count(r.owner, GW_FREE), CAPACITY);
    EQUAL(gw_next_participant(r.owner, 2), 0);
    gw_header *header = r.owner->header;
    for (uint32_t i = 0; i < GW_MAX_PARTICIPANTS / 64; i++) EQUAL(header->space_wanted[i], 0);
    EQUAL(header->owner_asleep, 0);
    EQUAL(header->ready[0], 0);
    EQUAL(w.patient->inflight, 0);
    if (*report == 0) EQUAL(ran[VICTIM_ID], 0); /* "it never ran", said its cancel */
    every_slot_works();
    every_place_works();
    statistics_are_sane();
    port_close(w.patient);
    port_close(w.busy);
}

#endif
