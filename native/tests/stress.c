/* Threads for the sanitizers: frontends that call, cancel, miss deadlines and die; one owner; one keeper; and, in half of the rounds, a rival that
 * cancels for some frontends while they wait. In half of the rounds everybody sleeps at once, in the others some spin first.
 *
 *     stress [frontends] [calls of each] [slots] [seed]
 *
 * Every answer must be the right one for its request, each request must end in exactly one way, every sleeper must be woken (no wait for an answer is
 * short enough to hide a lost wake-up), and no slot may be missing at the end. "Death" is between two calls here; crash.c kills anywhere. */
#define _GNU_SOURCE
#include "payload.h"
#include <pthread.h>

enum { MAX_FRONTENDS = 32, MAX_CAPACITY = 512, BURST = 4 };
#define LONG_NS (30 * SECOND_NS)
#define TICK_US 200

typedef struct {
    pthread_t thread;
    rig *r;
    gw_port *port;
    uint64_t seed, answered, withdrawn, abandoned, expired, refused, stolen, deaths, lost;
    uint32_t number;
    int mortal;                /* dies now and then; the rival has the others' ports */
    _Atomic int64_t exposed;   /* a published ticket that the rival may cancel, or 0 */
    _Atomic uint32_t dead;     /* the participant to reap, or 0 */
} frontend;

static frontend frontends[MAX_FRONTENDS];
static uint32_t n_frontends = 4, calls = 5000, capacity = 8;
static int with_rival, all_park;
static _Atomic uint32_t over;
static uint64_t never_run; /* abandoned while taken, and then given back */

/* ---- frontends ---- */

static void receive(frontend *f, int64_t ticket, uint64_t id, uint64_t deadline_ns, int64_t described) {
    uint32_t kind = gw_kind_of((uint64_t)described);
    if (kind == GW_KIND_BYTES) {
        receive_answer(f->port, ticket, id);
        f->answered++;
        return;
    }
    EQUAL(gw_release(f->port, ticket), 0);
    if (kind == GW_KIND_EXPIRED) CHECK(deadline_ns && deadline_ns <= gw_now());
    else EQUAL(kind, GW_KIND_DRAINING);
    *(kind == GW_KIND_EXPIRED ? &f->expired : &f->refused) += 1;
}

static void stolen(frontend *f, int64_t result) {
    EQUAL(result, -ESTALE);
    CHECK(with_rival && !f->mortal);
    f->stolen++;
}

static void cancel(frontend *f, int64_t ticket, uint64_t id, uint64_t deadline_ns) {
    int outcome = gw_cancel(f->port, ticket);
    if (outcome == 2) receive(f, ticket, id, deadline_ns, gw_poll(f->port, ticket));
    else if (outcome < 0) stolen(f, outcome);
    else *(outcome ? &f->abandoned : &f->withdrawn) += 1;
}

static void wait_for(frontend *f, int64_t ticket, uint64_t id, uint64_t deadline_ns) {
    uint64_t start = gw_now();
    int64_t described;
    do described = gw_wait(f->port, ticket, deadline_ns, LONG_NS);
    while (described == -ETIMEDOUT && !deadline_ns);
    CHECK(gw_now() - start < LONG_NS); /* else the wake-up was lost */
    if (described >= 0) receive(f, ticket, id, deadline_ns, described);
    else if (described != -ETIMEDOUT) stolen(f, described);
    else {
        CHECK(deadline_ns);
        cancel(f, ticket, id, deadline_ns);
    }
}

/* The keeper proves it dead and takes everything back; it lives on as somebody else. */
static void die(frontend *f, uint64_t held) {
    uint32_t me = f->port->me;
    if (below(&f->seed, 2)) EQUAL(gw_leave(f->port), 0);
    atomic_store(&f->dead, me);
    while (atomic_load(&f->dead)) usleep(TICK_US);
    f->deaths++;
    f->lost += held;
    port_close(f->port);
    f->port = rig_join(f->r, f->number);
}

static int64_t submit_waiting(frontend *f, uint64_t id, uint64_t deadline_ns) {
    int64_t ticket = gw_claim_wait(f->port, gw_now() + LONG_NS);
    CHECK(ticket >= 0);
    uint32_t whim = below(&f->seed, 32);
    if (whim == 0) EQUAL(gw_cancel(f->port, ticket), 0);
    if (whim == 1 && f->mortal) die(f, 0);
    if (whim == 0 || (whim == 1 && f->mortal)) return -ECANCELED;
    put_request(f->port, ticket, id);
    EQUAL(gw_publish(f->port, ticket, gw_describe(GW_KIND_BYTES, 0, PAYLOAD_BYTES), deadline_ns, 0), 0);
    return ticket;
}

static int64_t submit_at_once(frontend *f, uint64_t id, uint64_t deadline_ns) {
    uint64_t words[WORDS];
    fill(words, id);
    return gw_submit(f->port, GW_KIND_BYTES, NULL, 0, words, sizeof words, deadline_ns, 0);
}

static void *run_frontend(void *argument) {
    frontend *f = argument;
    char name[32];
    snprintf(name, sizeof name, "frontend %u:", f->number);
    context = name;
    for (uint32_t done = 0; done < calls;) {
        struct { int64_t ticket; uint64_t id, deadline_ns; } sent[BURST];
        uint32_t n = 0, wanted = 1 + below(&f->seed, BURST);
        for (; n < wanted && done < calls; done++) {
            uint64_t id = (uint64_t)f->number << 32 | done, deadline_ns = below(&f->seed, 8) ? 0 : gw_now() + below(&f->seed, 200000);
            /* Only with empty hands may it wait for room: what it waits for may be in its own. */
            int64_t ticket = n ? submit_at_once(f, id, deadline_ns) : submit_waiting(f, id, deadline_ns);
            if (n && (ticket == -EAGAIN || ticket == -EDQUOT)) break;
            if (ticket == -ECANCELED) continue;
            CHECK(ticket >= 0);
            if (!f->mortal) atomic_store(&f->exposed, ticket);
            sent[n].ticket = ticket;
            sent[n].id = id;
            sent[n++].deadline_ns = deadline_ns;
        }
        if (f->mortal && n && !below(&f->seed, 32)) {
            die(f, n);
            continue;
        }
        for (uint32_t k = 0; k < n; k++)
            if (below(&f->seed, 8)) wait_for(f, sent[k].ticket, sent[k].id, sent[k].deadline_ns);
            else cancel(f, sent[k].ticket, sent[k].id, sent[k].deadline_ns);
    }
    atomic_store(&f->exposed, 0);
    return NULL;
}

/* Another thread of the frontend's process, as when somebody gives up a future that a third waits for. */
static void *run_rival(void *argument) {
    uint64_t seed = *(uint64_t *)argument + 1000;
    context = "rival:";
    while (!atomic_load(&over)) {
        frontend *f = &frontends[below(&seed, n_frontends)];
        int64_t ticket = atomic_load(&f->exposed);
        if (ticket) gw_cancel(f->port, ticket);
        usleep(below(&seed, TICK_US));
    }
    return NULL;
}

/* ---- the owner's process ---- */

static void answer_batch(rig *r, uint64_t *seed, uint32_t most) {
    uint64_t taken[2 * MAX_CAPACITY];
    int n = gw_take(r->owner, 1 + (int)below(seed, most), 0, taken);
    for (int k = 0; k < n; k++) {
        int64_t ticket = (int64_t)taken[2 * k];
        uint64_t words[WORDS];
        work_out(r->owner, ticket, taken[2 * k + 1], words);
        if (!below(seed, 16)) {
            int abandoned = gw_untake(r->owner, ticket);
            CHECK(abandoned >= 0);
            never_run += (uint64_t)abandoned;
            continue;
        }
        if (!below(seed, 16)) sched_yield();
        CHECK(gw_answer(r->owner, ticket, GW_KIND_BYTES, NULL, 0, words, sizeof words) >= 0);
    }
}

static void *run_owner(void *argument) {
    rig *r = argument;
    uint64_t seed = r->bytes;
    context = "owner:";
    while (!atomic_load(&over)) {
        int n = gw_collect(r->owner, gw_now() + LONG_NS);
        const gw_item *queue = gw_backlog(r->owner);
        for (int k = 1; k < n; k++) CHECK(queue[k - 1].enqueue_ns <= queue[k].enqueue_ns);
        if (n > 0 && !below(&seed, 64)) gw_refuse(r->owner, (int64_t)queue[0].ticket, GW_KIND_DRAINING);
        while (n > 0 && gw_collect(r->owner, 0) > 0) answer_batch(r, &seed, r->owner->capacity);
    }
    return NULL;
}

static void *run_keeper(void *argument) {
    rig *r = argument;
    uint64_t owner[sizeof(gw_stats) / 8], clients[sizeof(gw_client_stats) / 8];
    gw_overview overview;
    gw_participant_view view;
    context = "keeper:";
    while (!atomic_load(&over)) {
        gw_heartbeat(r->owner, gw_now());
        gw_expire(r->owner, gw_now());
        for (uint32_t i = 0; i < n_frontends; i++) {
            uint32_t dead = atomic_load(&frontends[i].dead);
            if (!dead) continue;
            CHECK(gw_read_participant(r->owner, dead, &view) != GW_VACANT);
            EQUAL(view.identity.pid, i);
            CHECK(gw_reap(r->owner, dead) >= 0);
            atomic_store(&frontends[i].dead, 0);
        }
        for (uint32_t i = 1; i <= r->owner->max_participants; i++) CHECK(gw_read_participant(r->owner, i, &view) >= 0);
        gw_read_header(r->owner, &overview);
        EQUAL(gw_read_stats(r->owner, owner, sizeof owner / 8, clients, sizeof clients / 8), 0);
        usleep(TICK_US);
    }
    return NULL;
}

/* ---- the sums at the end ---- */

static void check_sums(rig *r) {
    uint64_t words[sizeof(gw_stats) / 8], clients[sizeof(gw_client_stats) / 8];
    EQUAL(gw_read_stats(r->owner, words, sizeof words / 8, clients, sizeof clients / 8), 0);
    gw_stats *stats = &r->owner->header->stats;
    frontend sum = {0};
    for (uint32_t i = 0; i < n_frontends; i++) {
        frontend *f = &frontends[i];
        EQUAL(f->port->inflight, 0);
        sum.answered += f->answered, sum.withdrawn += f->withdrawn, sum.abandoned += f->abandoned, sum.stolen += f->stolen;
        sum.expired += f->expired, sum.refused += f->refused, sum.deaths += f->deaths, sum.lost += f->lost;
    }
    uint64_t submitted = clients[0], ended = stats->completed + stats->failed + stats->expired + stats->abandoned + never_run;
    printf("stress: %lu submitted; %lu answered, %lu expired, %lu refused; %lu withdrawn, %lu abandoned, %lu cancelled by the rival; %lu deaths; "
           "%lu batches, %lu parks\n", submitted, sum.answered, sum.expired, sum.refused, sum.withdrawn, sum.abandoned, sum.stolen, sum.deaths,
           stats->batches, stats->parks);
    EQUAL(gw_count(r->owner, GW_FREE), r->owner->capacity);
    CHECK(stats->reaped_participants <= sum.deaths); /* those that left first are not counted as dead */
    EQUAL(r->owner->header->alive, n_frontends);
    EQUAL(stats->late_wakes, 0);
    CHECK(ended <= submitted && submitted <= ended + sum.withdrawn + sum.stolen + sum.lost);
    CHECK(sum.answered <= stats->completed && stats->completed <= sum.answered + sum.lost);
    EQUAL(stats->queue_wait.count[GW_BUCKETS - 1], 0); /* no negative wait */
    EQUAL(stats->batch_wait.count[GW_BUCKETS - 1], 0);
}

static void run(uint64_t seed) {
    rig r = rig_open(capacity, n_frontends + 1, PAYLOAD_AREA);
    gw_set_policy(r.owner, GW_REJECT, all_park ? GW_PARK : GW_ADAPTIVE, capacity < 4 ? capacity : capacity / 2, capacity, 0, capacity);
    pthread_t owner, keeper, rival;
    for (uint32_t i = 0; i < n_frontends; i++) {
        frontends[i] = (frontend){.r = &r, .number = i, .seed = seed + i, .mortal = i % 2 == 0, .port = rig_join(&r, i)};
        gw_set_wake(frontends[i].port, all_park ? GW_PARK : i % 3);
    }
    never_run = 0;
    atomic_store(&over, 0);
    pthread_create(&owner, NULL, run_owner, &r);
    pthread_create(&keeper, NULL, run_keeper, &r);
    for (uint32_t i = 0; i < n_frontends; i++) pthread_create(&frontends[i].thread, NULL, run_frontend, &frontends[i]);
    if (with_rival) pthread_create(&rival, NULL, run_rival, &seed);
    for (uint32_t i = 0; i < n_frontends; i++) pthread_join(frontends[i].thread, NULL);
    atomic_store(&over, 1);
    while (gw_bell(r.owner), pthread_tryjoin_np(owner, NULL)) usleep(TICK_US); /* a bell rung just before it falls asleep is not heard */
    pthread_join(keeper, NULL);
    if (with_rival) pthread_join(rival, NULL);
    while (gw_collect(r.owner, 0) > 0) answer_batch(&r, &seed, capacity); /* what the dead left */
    check_sums(&r);
    for (uint32_t i = 0; i < n_frontends; i++) port_close(frontends[i].port);
    rig_close(&r);
}

int main(int argc, char **argv) {
    uint64_t seed = 1;
    if (argc > 1) n_frontends = (uint32_t)atoi(argv[1]);
    if (argc > 2) calls = (uint32_t)atoi(argv[2]);
    if (argc > 3) capacity = (uint32_t)atoi(argv[3]);
    if (argc > 4) seed = strtoull(argv[4], NULL, 0);
    CHECK(n_frontends >= 1 && n_frontends <= MAX_FRONTENDS && capacity >= 1 && capacity <= MAX_CAPACITY);
    printf("stress: %u frontends, %u calls each, %u slots, seed %llu\n", n_frontends, calls, capacity, (unsigned long long)seed);
    for (int round = 0; round < 4; round++) {
        all_park = round < 2;
        with_rival = round % 2;
        run(seed);
    }
    return 0;
}
