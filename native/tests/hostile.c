/* A frontend that writes what it likes where it likes, while the owner works. The owner must come to no harm (a sanitizer watches), and as long as the
 * offender keeps to what its own requests hold, it alone suffers: every other request gets its right answer, and after its end everything is as before. */
#define _GNU_SOURCE
#include "cases.h"

enum { SLOTS = 32, ROOM = 256, PATCHES = 100000 };

static rig big;
static gw_port *victim, *offender;
static uint64_t seed = 1;

static void open_world(void) {
    big = rig_open(SLOTS, PARTICIPANTS, ROOM);
    victim = rig_join(&big, 1);
    offender = rig_join(&big, 2);
}

static void close_world(void) {
    port_close(victim);
    port_close(offender);
    rig_close(&big);
}

/* Numbers that break things: small, huge, off by one, shifted to where fields begin, and plain random. */
static uint64_t nasty(void) {
    static const uint64_t some[] = {0, 1, 2, 3, 7, 63, 64, 4095, 4096, 1ull << 31, UINT32_MAX, 1ull << 36, 1ull << 47, 1ull << 63, INT64_MAX, UINT64_MAX};
    uint64_t value = some[below(&seed, sizeof some / sizeof *some)];
    switch (below(&seed, 5)) {
    case 0: return value;
    case 1: return value - 1;
    case 2: return value << below(&seed, 64);
    case 3: return gw_now() + value;
    default: return next_random(&seed);
    }
}

/* One round of the owner as session, owner loop and keeper do it. What it reads of a request is what Python would: the described bytes, of its own area. */
static void owner_round(int reap) {
    static uint64_t taken[2 * SLOTS];
    static char copy[ROOM];
    gw_port *owner = big.owner;
    int queued = gw_collect(owner, 0);
    CHECK(queued >= 0 && queued <= 2 * SLOTS);
    for (int k = 0; k < queued; k++) CHECK(gw_slot_of((int64_t)gw_backlog(owner)[k].ticket) < SLOTS);
    static uint64_t chosen[2 * SLOTS];
    for (int k = 0; k < queued; k++) chosen[k] = gw_backlog(owner)[queued - 1 - k].ticket;
    int most = 1 + (int)below(&seed, SLOTS), n;
    if (below(&seed, 2)) {
        n = gw_take_these(owner, chosen, most < queued ? most : queued, below(&seed, 9), taken);
        for (int k = 0; k < queued; k++) gw_put_back(owner, (int64_t)chosen[k]);
    } else {
        owner->fair = below(&seed, 2);
        n = gw_take(owner, most, below(&seed, 9), taken);
    }
    owner->keeps_news = below(&seed, 2);
    const gw_item *arrived;
    const uint64_t *gone;
    int departures;
    CHECK(gw_news(owner, &arrived, &gone, &departures) <= 2 * SLOTS && departures <= 2 * SLOTS);
    gw_note_batch(owner, below(&seed, 1000), 1, 2);
    CHECK(n <= SLOTS);
    for (int k = 0; k < n; k++) {
        int64_t ticket = (int64_t)taken[2 * k];
        uint64_t request = taken[2 * k + 1], total = gw_total_of(request);
        uint32_t slot = gw_slot_of(ticket);
        CHECK(slot < SLOTS);
        int readable = request != UINT64_MAX && !(gw_kind_of(request) & GW_KIND_SPILLED);
        if (readable) memcpy(copy, gw_request_area(owner, slot), total);
        gw_respond(owner, ticket, GW_KIND_BYTES, NULL, 0, copy, readable ? total : 0); /* may be -ESTALE by now */
    }
    gw_finish(owner, taken, n);
    gw_expire(owner, gw_now());
    if (reap) {
        gw_participant_view view;
        for (uint32_t i = 0; (i = gw_next_participant(owner, i));) gw_read_participant(owner, i, &view);
        gw_count_alive(owner);
        gw_free_strays(owner);
    }
}

static void read_everything(void) {
    gw_overview overview;
    char text[GW_INFO_BYTES];
    uint64_t owner[sizeof(gw_stats) / 8], clients[sizeof(gw_client_stats) / 8];
    gw_read_header(victim, &overview);
    gw_read_info(victim, text, sizeof text);
    gw_says(victim, text, sizeof text);
    gw_read_note(victim, text, sizeof text);
    gw_read_stats(victim, owner, sizeof owner / 8, clients, sizeof clients / 8);
    gw_retry_after_ns(victim);
    gw_forecast forecast;
    gw_is_late(victim, nasty(), &forecast);
    gw_count_arrival(victim, nasty());
}

/* What the offender may do to a slot that it holds: anything but naming another frontend as its holder. */
static void patch_own(uint32_t i) {
    gw_slot *slot = &big.owner->slots[i];
    _Atomic uint64_t *fields[] = {&slot->enqueue_ns, &slot->deadline_ns, &slot->request, &slot->terms};
    switch (below(&seed, 10)) {
    case 0: case 1: case 2: *fields[below(&seed, 4)] = nasty(); break;
    case 3: slot->attempts = (uint32_t)nasty(); break;
    case 4: slot->semaphore = (uint32_t)nasty(); break;
    case 5: (below(&seed, 2) ? &slot->response : &slot->collect_ns)[0] = nasty(); break;
    case 6: slot->dispatch_ns = slot->done_ns = slot->due_ns = nasty(); break;
    case 7: {
        static const uint32_t nobody[] = {0, PARTICIPANTS, PARTICIPANTS + 1, 0x1fff};
        uint32_t whose = below(&seed, 3) ? offender->me : nobody[below(&seed, 4)];
        slot->word = gw_word(below(&seed, 2) ? gw_generation_of(slot->word) + below(&seed, 3) - 1 : nasty(), whose, 1 + below(&seed, 7));
        break;
    }
    case 8: big.owner->header->ready[0] |= 1ull << i; break;
    default: memset(gw_request_area(big.owner, i), (int)below(&seed, 256), ROOM); break;
    }
}

/* Half of the ring is the offender's: it patches slots while it holds them, and gives none away. */
static void own_slots_only(void) {
    uint32_t mine[SLOTS / 2];
    char text[32];
    for (uint32_t k = 0; k < SLOTS / 2; k++) {
        int64_t ticket = gw_submit(offender, GW_KIND_STR, NULL, 0, "mine", 4, 0, 0);
        CHECK(ticket >= 0);
        mine[k] = gw_slot_of(ticket);
    }
    for (int patches = 0, id = 0; patches < PATCHES; id++) {
        int64_t tickets[4];
        for (int k = 0; k < 4; k++) {
            snprintf(text, sizeof text, "request %d.%d", id, k);
            CHECK((tickets[k] = submit(victim, text)) >= 0);
        }
        for (int answered = 0, rounds = 0; answered < 4; rounds++) {
            CHECK(rounds < 100);
            for (int k = 0; k < 8; k++, patches++) {
                uint32_t i = mine[below(&seed, SLOTS / 2)];
                if (gw_phase_of(big.owner->slots[i].word) != GW_FREE) patch_own(i);
            }
            owner_round(0);
            for (answered = 0; answered < 4;) {
                if (gw_poll(victim, tickets[answered]) == -EINPROGRESS) break;
                answered++;
            }
        }
        for (int k = 0; k < 4; k++) {
            char back[ROOM];
            int n = snprintf(text, sizeof text, "request %d.%d", id, k);
            EQUAL(gw_wait(victim, tickets[k], 0, LONG_NS), gw_describe(GW_KIND_BYTES, 0, (uint64_t)n));
            EQUAL(gw_receive(victim, tickets[k], 0, back, (uint64_t)n), 0);
            EQUAL(memcmp(back, text, (size_t)n), 0);
        }
        for (uint32_t k = 0; k < SLOTS / 2; k++) { /* what came free is claimed again, for more of the same */
            gw_slot *slot = &big.owner->slots[mine[k]];
            if (gw_phase_of(slot->word) == GW_FREE) slot->word = gw_word(gw_generation_of(slot->word) + 1, offender->me, GW_READY);
        }
        read_everything();
    }
    gw_participant *entry = &big.owner->participants[offender->me - 1];
    memset(&entry->identity, 0xa5, sizeof entry->identity);
    EQUAL(gw_read_participant(big.owner, offender->me, &(gw_participant_view){0}), GW_ALIVE);
    gw_reap(big.owner, offender->me); /* it is killed */
    gw_free_strays(big.owner);
    EQUAL(gw_count(big.owner, GW_FREE), SLOTS);
    EQUAL(big.owner->header->alive, 1);
}

/* Everything after the first line, anywhere, any value: nothing is right afterwards but the owner itself. */
static void the_whole_segment(void) {
    static uint64_t kept[32 * 1024];
    CHECK(big.bytes <= sizeof kept);
    memcpy(kept, big.base, big.bytes);
    for (int patches = 0; patches < PATCHES;) {
        for (int k = 0; k < 20; k++, patches++) {
            uint64_t at = GW_LINE / 8 + next_random(&seed) % (big.bytes / 8 - GW_LINE / 8), value = nasty();
            memcpy((uint64_t *)big.base + at, &value, 8);
        }
        if (below(&seed, 4) == 0) gw_submit(victim, GW_KIND_STR, NULL, 0, "x", 1, below(&seed, 2) ? nasty() : 0, 0);
        owner_round(1);
        read_everything();
        if (below(&seed, 20) == 0) gw_recover(big.owner, 1 + below(&seed, 3), GW_KIND_DIED);
        if (below(&seed, 20) == 0) gw_reap(big.owner, below(&seed, PARTICIPANTS + 2));
        if (below(&seed, 50) == 0) gw_wake_all(big.owner);
        if (patches % 2000 == 0) memcpy(big.base, kept, big.bytes); /* or little would be left that passes for a request */
    }
    memcpy(big.base, kept, big.bytes);
    gw_recover(big.owner, 1, GW_KIND_DIED);
    EQUAL(gw_refuse_all(big.owner, GW_KIND_DRAINING), 0); /* all the requests of the kept image are of no time */
}

/* One thread writes while the owner's looks: nothing may be looked at twice. */
static _Atomic int over;
static void *scribble(void *argument) {
    uint64_t mine = (uint64_t)(uintptr_t)argument;
    gw_header *header = big.base;
    while (!over) {
        uint32_t i = below(&mine, SLOTS);
        gw_slot *slot = &big.owner->slots[i];
        uint64_t life = below(&mine, 3);
        atomic_store_explicit(&slot->word, gw_word(life, below(&mine, 4), below(&mine, 3) ? GW_READY : below(&mine, 8)), memory_order_relaxed);
        atomic_store_explicit(&slot->request, below(&mine, 2) ? ROOM : next_random(&mine), memory_order_relaxed);
        atomic_store_explicit(&slot->enqueue_ns, next_random(&mine), memory_order_relaxed);
        atomic_store_explicit(&header->ready[0], UINT64_MAX, memory_order_relaxed);
        atomic_fetch_add_explicit(below(&mine, 2) ? &header->epoch : &header->supervisor_epoch, 1, memory_order_relaxed);
    }
    return NULL;
}

static void while_it_is_looked_at(void) {
    pthread_t threads[2];
    over = 0;
    for (uintptr_t k = 0; k < 2; k++) CHECK(!pthread_create(&threads[k], NULL, scribble, (void *)(k + 1)));
    for (int k = 0; k < 5000; k++) {
        owner_round(k % 8 == 0);
        gw_overview overview;
        if (k % 8 == 0) gw_read_header(victim, &overview);
    }
    over = 1;
    for (int k = 0; k < 2; k++) pthread_join(threads[k], NULL);
}

/* A word that goes back and forth between two lives while the backlog is purged can leave both there. They must not stay: the backlog has room for one that
 * ended since and the present one. */
static void lives_that_alternate(void) {
    gw_port *owner = big.owner;
    const uint64_t lives[] = {5, 6};
    for (int k = 0; k < 2; k++) {
        owner->slots[0].word = gw_word(lives[k], offender->me, GW_READY);
        owner->header->ready[0] = 1;
        EQUAL(gw_collect(owner, 0), 1);
    }
    gw_item *backlog = owner->backlog;
    backlog[1] = backlog[0];
    backlog[0].ticket = (uint64_t)gw_ticket(gw_word(lives[0], 0, 0), 0);
    owner->queued = 2;
    owner->slots[0].word = gw_word(lives[0], offender->me, GW_READY);
    EQUAL(gw_collect(owner, 0), 0);
    owner->slots[0].word = 0;
}

int main(void) {
    static const named_case cases[] = {CASE(own_slots_only), CASE(the_whole_segment), CASE(while_it_is_looked_at), CASE(lives_that_alternate)};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        context = cases[k].name;
        open_world();
        cases[k].run();
        close_world();
    }
    printf("hostile: %d patches of own slots, %d of the whole segment, and two threads beside the owner\n", PATCHES, PATCHES);
    return 0;
}
