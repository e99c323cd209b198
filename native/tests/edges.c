/* The edges: geometry nobody may trust, numbers at their limits, and frontends that write what they like. */
#define _GNU_SOURCE
#include "cases.h"

static void refused_geometry(void) {
#define FIELD(name) offsetof(gw_header, name), sizeof((gw_header *)0)->name
    static const struct { size_t offset, size; uint64_t value; int result; } table[] = {
        {FIELD(magic), 0, -EBADMSG},
        {FIELD(magic), GW_MAGIC + 1, -EBADMSG},
        {FIELD(version), GW_VERSION + 1, -EPROTONOSUPPORT},
        {FIELD(capacity), 0, -EILSEQ},
        {FIELD(capacity), CAPACITY + 1, -EILSEQ},
        {FIELD(capacity), GW_MAX_CAPACITY + 1, -EILSEQ},
        {FIELD(capacity), UINT32_MAX, -EILSEQ},
        {FIELD(max_participants), 0, -EILSEQ},
        {FIELD(max_participants), PARTICIPANTS + 1, -EILSEQ},
        {FIELD(max_participants), GW_MAX_PARTICIPANTS + 1, -EILSEQ},
        {FIELD(request_bytes), AREA + 1, -EILSEQ},
        {FIELD(request_bytes), AREA + GW_LINE, -EILSEQ},
        {FIELD(request_bytes), 1ull << 36, -EILSEQ},
        {FIELD(request_bytes), -(uint64_t)AREA, -EILSEQ},
        {FIELD(response_bytes), AREA - 1, -EILSEQ},
        {FIELD(response_bytes), 0, -EILSEQ},
        {FIELD(response_bytes), -(uint64_t)GW_LINE, -EILSEQ},
        {FIELD(segment_bytes), 0, -EILSEQ},
        {FIELD(segment_bytes), UINT64_MAX, -EILSEQ},
    };
    for (size_t k = 0; k < sizeof table / sizeof *table; k++) {
        char kept[8], *field = (char *)r.base + table[k].offset;
        memcpy(kept, field, table[k].size);
        memcpy(field, &table[k].value, table[k].size); /* little endian */
        EQUAL(gw_check(r.base, r.bytes), table[k].result);
        memcpy(field, kept, table[k].size);
        EQUAL(gw_check(r.base, r.bytes), 0);
    }
    EQUAL(gw_check(r.base, GW_LINE - 1), -EBADMSG);
    EQUAL(gw_check(r.base, sizeof(gw_header) - 1), -ENODATA);
    EQUAL(gw_check(r.base, r.bytes - 1), -ENODATA);
    EQUAL(gw_check(r.base, r.bytes + 4096), 0); /* a file may be rounded up */
    char other_base[1];
    EQUAL(gw_format(other_base, 0, 1, 0, 0, 0, 1), -EINVAL);
    EQUAL(gw_format(other_base, GW_MAX_CAPACITY + 1, 1, 0, 0, 0, 1), -EINVAL);
    EQUAL(gw_format(other_base, 1, 0, 0, 0, 0, 1), -EINVAL);
    EQUAL(gw_format(other_base, 1, GW_MAX_PARTICIPANTS + 1, 0, 0, 0, 1), -EINVAL);
}

/* Whatever the first lines say: what passes the check lies inside the file. */
static void scribbled_geometry(void) {
    uint64_t seed = 1, passed = 0;
    char kept[2 * GW_LINE];
    memcpy(kept, r.base, sizeof kept);
    for (int k = 0; k < 20000; k++) {
        uint32_t at = 16 + 8 * below(&seed, 6); /* the geometry, word by word */
        uint64_t bits = next_random(&seed) & next_random(&seed) & next_random(&seed) & next_random(&seed), word;
        memcpy(&word, (char *)r.base + at, 8);
        word ^= bits & (below(&seed, 2) ? 0x0000000700000007ull : UINT64_MAX);
        memcpy((char *)r.base + at, &word, 8);
        if (gw_check(r.base, r.bytes) == 0) {
            gw_port *port = port_open(r.base);
            CHECK(gw_request_area(port, port->capacity) <= (char *)r.base + r.bytes);
            port_close(port);
            passed++;
        }
        memcpy(r.base, kept, sizeof kept);
    }
    CHECK(passed > 0);
}

static void numbers_at_their_limits(void) {
    const uint64_t totals[] = {0, 1, (1ull << 36) - 1}, generations[] = {0, 1, (1ull << 48) - 1};
    const uint32_t metas[] = {0, 1, GW_MAX_META}, kinds[] = {0, GW_KIND_ERROR, GW_KIND_DIED | GW_KIND_SPILLED, 0x7f};
    for (int t = 0; t < 3; t++)
        for (int m = 0; m < 3; m++)
            for (int k = 0; k < 4; k++) {
                uint64_t described = gw_describe(kinds[k], metas[m], totals[t]);
                CHECK((int64_t)described >= 0);
                EQUAL(gw_kind_of(described), kinds[k]);
                EQUAL(gw_meta_of(described), metas[m]);
                EQUAL(gw_total_of(described), totals[t]);
            }
    for (int g = 0; g < 3; g++)
        for (uint32_t phase = GW_FREE; phase <= GW_ABANDONED; phase++) {
            uint64_t word = gw_word(generations[g], GW_MAX_PARTICIPANTS, phase);
            int64_t ticket = gw_ticket(word, GW_MAX_CAPACITY - 1);
            CHECK(ticket >= 0);
            EQUAL(gw_slot_of(ticket), GW_MAX_CAPACITY - 1);
            EQUAL(gw_life_of(ticket), generations[g]);
            EQUAL(gw_phase_of(word), phase);
            EQUAL(gw_participant_of(word), GW_MAX_PARTICIPANTS);
            EQUAL(gw_with_phase(word, GW_DONE), gw_word(generations[g], GW_MAX_PARTICIPANTS, GW_DONE));
            EQUAL(gw_freed(word), gw_word(generations[g], 0, GW_FREE));
        }
    const int64_t strangers[] = {-1, INT64_MIN, CAPACITY, GW_MAX_CAPACITY - 1};
    for (int k = 0; k < 4; k++) {
        EQUAL(gw_phase(front, strangers[k]), -EINVAL);
        EQUAL(gw_untake(r.owner, strangers[k]), -EINVAL);
        EQUAL(gw_answered(r.owner, strangers[k], 0), -EINVAL);
        EQUAL(gw_refuse(r.owner, strangers[k], GW_KIND_DRAINING), -ESTALE);
        CHECK(gw_publish(front, strangers[k], 0, 0, 0) < 0 && gw_poll(front, strangers[k]) < 0 && gw_release(front, strangers[k]) < 0);
        CHECK(gw_cancel(front, strangers[k]) < 0 && gw_wait(front, strangers[k], 0, 0) < 0);
    }
}

static void largest_segment(void) {
    rig large = rig_open(GW_MAX_CAPACITY, GW_MAX_PARTICIPANTS, 0);
    for (uint32_t i = 0; i + 1 < GW_MAX_PARTICIPANTS; i++) large.owner->participants[i].word = GW_ALIVE;
    gw_port *last = rig_join(&large, 1);
    EQUAL(last->me, GW_MAX_PARTICIPANTS);
    static int64_t tickets[GW_MAX_CAPACITY];
    static uint64_t taken[2 * GW_MAX_CAPACITY];
    for (int k = 0; k < GW_MAX_CAPACITY; k++) CHECK((tickets[k] = gw_submit(last, GW_KIND_BYTES, NULL, 0, NULL, 0, 0, 0)) >= 0);
    EQUAL(gw_claim(last), -EAGAIN);
    EQUAL(gw_claim_wait(last, 1), -ETIMEDOUT); /* its bit is taken back, whichever that is */
    for (int g = 0; g < GW_MAX_PARTICIPANTS / 64; g++) EQUAL(large.owner->header->space_wanted[g], 0);
    EQUAL(gw_collect(large.owner, 0), GW_MAX_CAPACITY);
    EQUAL(gw_take(large.owner, GW_MAX_CAPACITY, 0, taken), GW_MAX_CAPACITY);
    for (int k = 0; k < GW_MAX_CAPACITY; k++) EQUAL(gw_answered(large.owner, (int64_t)taken[2 * k], 0), 0);
    EQUAL(large.owner->header->stats.batches, 1);
    EQUAL(large.owner->header->stats.batch_sizes[70], 1);
    for (int k = 0; k < GW_MAX_CAPACITY; k += 2) EQUAL(gw_release(last, tickets[k]), 0);
    EQUAL(gw_reap(large.owner, GW_MAX_PARTICIPANTS), GW_MAX_CAPACITY / 2);
    EQUAL(gw_count(large.owner, GW_FREE), GW_MAX_CAPACITY);
    port_close(last);
    rig_close(&large);
}

static void histograms(void) {
    static const struct { uint64_t ns; int bucket; } table[] = {
        {0, 0}, {255, 0}, {256, 0}, {319, 0}, {320, 1}, {383, 1}, {384, 2}, {448, 3}, {511, 3},
        {512, 4}, {1 << 20, 48}, {UINT64_MAX, GW_BUCKETS - 1}};
    gw_histogram *h = &r.owner->header->stats.run;
    for (size_t k = 0; k < sizeof table / sizeof *table; k++) {
        uint64_t before = h->count[table[k].bucket];
        gw_observe(h, table[k].ns);
        EQUAL(h->count[table[k].bucket], before + 1);
        EQUAL(h->n, k + 1);
    }
    static const uint32_t sizes[][2] = {{1, 1}, {63, 63}, {64, 64}, {127, 64}, {128, 65}, {GW_MAX_CAPACITY, 70}};
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        uint64_t before = r.owner->header->stats.batch_sizes[sizes[k][1]];
        gw_batch_done(r.owner, &(gw_batch){.size = sizes[k][0]}, 1000, gw_now());
        EQUAL(r.owner->header->stats.batch_sizes[sizes[k][1]], before + 1);
    }
}

static void header_read_back(void) {
    gw_overview o;
    gw_set_owner(r.owner, 11, 12, 13);
    gw_set_policy(r.owner, GW_BLOCK, GW_BUSY, 2, 3, 1, 9);
    gw_heartbeat(r.owner, 99);
    gw_read_header(front, &o);
    CHECK(o.owner.pid == 11 && o.owner.start_ticks == 12 && o.owner.pid_namespace == 13 && o.epoch == 2);
    CHECK(o.on_full == GW_BLOCK && o.wake == GW_BUSY && o.quota_shared == 2 && o.quota_alone == 3 && o.allow_pickle == 1 && o.max_batch_size == 9);
    CHECK(o.heartbeat_ns == 99 && o.state == GW_SERVING && o.alive == 2 && o.capacity == CAPACITY && o.segment_bytes == r.bytes);
    r.owner->header->epoch |= 1; /* an owner died while it introduced itself */
    gw_set_owner(r.owner, 21, 22, 23);
    gw_read_header(front, &o);
    CHECK(o.owner.pid == 21 && o.epoch == 4);
    char text[GW_INFO_BYTES + 1] = "{}", back[GW_INFO_BYTES];
    EQUAL(gw_set_info(r.owner, text, GW_INFO_BYTES + 1), -EMSGSIZE);
    EQUAL(gw_set_info(r.owner, text, GW_INFO_BYTES), 0);
    EQUAL(gw_read_info(front, back, GW_INFO_BYTES - 1), -EMSGSIZE);
    EQUAL(gw_read_info(front, back, GW_INFO_BYTES), GW_INFO_BYTES);
    CHECK(gw_says(front, text, GW_INFO_BYTES) && !gw_says(front, text, 2));
    text[GW_INFO_BYTES - 1] = 'x';
    CHECK(!gw_says(front, text, GW_INFO_BYTES));
    text[GW_INFO_BYTES - 1] = 0;
    for (uint32_t state = GW_STARTING; state <= GW_FAILED; state++) {
        r.owner->header->state = state;
        EQUAL(gw_says(front, text, GW_INFO_BYTES), state >= GW_SERVING && state <= GW_DRAINING);
    }
    r.owner->header->state = GW_SERVING;
    r.owner->header->info_bytes = UINT32_MAX;
    CHECK(!gw_says(front, text, UINT32_MAX));
    EQUAL(gw_read_info(front, back, UINT32_MAX), -EMSGSIZE);
    uint64_t owner[sizeof(gw_stats) / 8], clients[sizeof(gw_client_stats) / 8];
    EQUAL(gw_read_stats(front, owner, 1, clients, sizeof clients / 8), -EINVAL);
    for (uint32_t outcome = 0; outcome <= GW_SATISFIED + 1; outcome++) gw_count_client(front, outcome);
    gw_count_client(other, 0);
    EQUAL(gw_reap(r.owner, other->me), 0); /* the departed are counted on */
    EQUAL(gw_read_stats(r.owner, owner, sizeof owner / 8, clients, sizeof clients / 8), 0);
    CHECK(clients[0] == 0 && clients[1] == 2 && clients[2] == 1 && clients[3] == 1 && clients[4] == 1 && clients[5] == 1 && clients[6] == 1);
}

/* Lengths are a frontend's claim: checked against the slot before anybody uses them. */
static void malformed_requests(void) {
    static const struct { uint64_t request; int ok; } table[] = {
        {AREA, 1}, {AREA + 1, 0}, {(1ull << 36) - 1, 0}, {UINT64_MAX, 0}, {(uint64_t)1 << 36, 0},
        {(uint64_t)GW_MAX_META << 36 | AREA, 0}, {(uint64_t)GW_KIND_SPILLED << 54 | 1 << 20, 1},
        {(uint64_t)GW_KIND_SPILLED << 54 | ((1 << 20) + 1), 0}};
    for (size_t k = 0; k < sizeof table / sizeof *table; k++) {
        int64_t ticket = gw_claim(front);
        EQUAL(gw_publish(front, ticket, table[k].request, 0, 0), 0);
        EQUAL(gw_collect(r.owner, 0), 1);
        r.owner->slots[gw_slot_of(ticket)].request = table[k].request; /* nor is what the backlog saw what counts */
        uint64_t taken[2];
        EQUAL(gw_take(r.owner, 1, 0, taken), 1);
        EQUAL(taken[1], table[k].ok ? table[k].request : UINT64_MAX);
        EQUAL(gw_cancel(front, ticket), 1);
        EQUAL(gw_answered(r.owner, ticket, 0), 1);
    }
}

/* Ready bits are hints: too many of them, or none where one should be, answer nobody twice and nothing wrongly. */
static void scribbled_ready_bits(void) {
    int64_t ready = submit(front, "x"), claimed = gw_claim(front);
    for (int k = 0; k < 3 * CAPACITY; k++) {
        r.owner->header->ready[0] = UINT64_MAX;
        CHECK(gw_collect(r.owner, 0) <= 2 * CAPACITY);
    }
    uint64_t taken[4 * CAPACITY];
    EQUAL(gw_take(r.owner, 2 * CAPACITY, 0, taken), 1);
    EQUAL(taken[0], ready);
    EQUAL(gw_answered(r.owner, ready, 0), 0);
    EQUAL(gw_collect(r.owner, 0), 0);
    EQUAL(gw_release(front, ready) | gw_cancel(front, claimed), 0);
    ready = submit(front, "x");
    r.owner->header->ready[0] = 0; /* its sender was stopped between word and bit: a scan finds it */
    EQUAL(gw_collect(r.owner, 0), 0);
    gw_recover(r.owner, 2, GW_KIND_DIED);
    EQUAL(gw_collect(r.owner, 0), 1);
    EQUAL(serve(1), 1);
    EQUAL(gw_release(front, ready), 0);
}

static void scribbled_slots(void) {
    uint64_t seed = 2, taken[2 * CAPACITY];
    for (int k = 0; k < 2000; k++) {
        gw_slot *slot = &r.owner->slots[below(&seed, CAPACITY)];
        slot->word = gw_word(below(&seed, 9), below(&seed, PARTICIPANTS + 1), below(&seed, 8));
        slot->enqueue_ns = next_random(&seed);
        slot->deadline_ns = below(&seed, 2) ? next_random(&seed) : 0;
        slot->request = next_random(&seed);
        r.owner->header->ready[0] = next_random(&seed);
        gw_collect(r.owner, 0);
        int n = gw_take(r.owner, CAPACITY, 0, taken);
        for (int j = 0; j < n; j++) {
            CHECK(taken[2 * j + 1] == UINT64_MAX || gw_total_of(taken[2 * j + 1]) <= 1 << 20);
            CHECK(gw_answer(r.owner, (int64_t)taken[2 * j], GW_KIND_BYTES, NULL, 0, "y", 1) >= 0);
        }
        gw_expire(r.owner, gw_now());
        if (k % 16 == 0) gw_recover(r.owner, 2, GW_KIND_DIED);
    }
    for (uint32_t i = 0; i < CAPACITY; i++) r.owner->slots[i].word = 0;
}

static void two_segments(void) {
    rig second = rig_open(CAPACITY, PARTICIPANTS, AREA);
    gw_port *there = rig_join(&second, 1);
    CHECK(gw_claim(front) >= 0 && gw_reap(r.owner, 1) == 1); /* one generation ahead */
    int64_t here_ticket = submit(front, "here"), there_ticket = submit(there, "there");
    EQUAL(front->me, there->me);
    EQUAL(gw_slot_of(here_ticket), gw_slot_of(there_ticket));
    EQUAL(gw_cancel(there, here_ticket), -ESTALE);
    EQUAL(gw_cancel(front, there_ticket), -ESTALE);
    EQUAL(gw_collect(second.owner, 0), 1);
    EQUAL(gw_collect(r.owner, 0), 1);
    EQUAL(gw_reap(second.owner, 1), 1);
    EQUAL(gw_phase(r.owner, here_ticket), GW_READY);
    EQUAL(gw_cancel(front, here_ticket), 0);
    EQUAL(gw_count(second.owner, GW_FREE), CAPACITY);
    port_close(there);
    rig_close(&second);
}

static void generations_wrap(void) {
    const uint64_t last = (1ull << 48) - 1;
    for (uint32_t i = 0; i < CAPACITY; i++) r.owner->slots[i].word = gw_word(last - 1, 0, GW_FREE);
    int64_t before = submit(front, "x"); /* the last generation */
    EQUAL(gw_life_of(before), last);
    EQUAL(gw_cancel(front, before), 0);
    int64_t after = submit(front, "y"); /* generation 0 */
    EQUAL(gw_slot_of(after), gw_slot_of(before));
    EQUAL(gw_life_of(after), 0);
    EQUAL(gw_cancel(front, before), -ESTALE);
    EQUAL(gw_collect(r.owner, 0), 1);
    EQUAL(serve(1), 1);
    EQUAL(gw_release(front, before), -ESTALE);
    EQUAL(gw_wait(front, after, 0, LONG_NS), gw_describe(GW_KIND_STR, 0, 1));
    EQUAL(gw_release(front, after), 0);
}

/* A trace context is its own life's, and only its claimer's to write, before the request is published. */
static void traces(void) {
    uint64_t taken[2 * CAPACITY];
    gw_traced found[CAPACITY];
    int64_t ticket = gw_claim(front);
    EQUAL(gw_trace(front, ticket, 1, 2, 3, 0x101), 0);
    EQUAL(gw_trace(other, ticket, 9, 9, 9, 9), -ESTALE);
    EQUAL(gw_trace(front, ticket ^ 1 << 20, 9, 9, 9, 9), -ESTALE);
    EQUAL(gw_trace(front, CAPACITY, 9, 9, 9, 9), -ECHILD);
    EQUAL(gw_publish(front, ticket, 0, 0, 0), 0);
    EQUAL(gw_trace(front, ticket, 9, 9, 9, 9), -ESTALE);
    int64_t plain = submit(front, "x");
    EQUAL(gw_collect(r.owner, 0), 2);
    EQUAL(gw_take(r.owner, 2, 0, taken), 2);
    EQUAL(gw_read_traces(r.owner, taken, 2, found), 1);
    CHECK(found[0].ticket == (uint64_t)ticket && found[0].id_high == 1 && found[0].id_low == 2 && found[0].span == 3 && found[0].flags == 1);
    CHECK(found[0].enqueue_ns && found[0].enqueue_ns <= found[0].collect_ns && found[0].collect_ns <= found[0].dispatch_ns);
    EQUAL(gw_answered(r.owner, ticket, 0) | gw_answered(r.owner, plain, 0), 0);
    EQUAL(gw_release(front, ticket) | gw_release(front, plain), 0);
    for (int k = 0; k < CAPACITY; k++) submit(front, "y"); /* in the same slots */
    EQUAL(gw_collect(r.owner, 0), CAPACITY);
    EQUAL(gw_take(r.owner, CAPACITY, 0, taken), CAPACITY);
    EQUAL(gw_read_traces(r.owner, taken, CAPACITY, found), 0);
    for (int k = 0; k < CAPACITY; k++) {
        EQUAL(gw_answered(r.owner, (int64_t)taken[2 * k], 0), 0);
        EQUAL(gw_release(front, (int64_t)taken[2 * k]), 0);
    }
    EQUAL(gw_read_traces(r.owner, (uint64_t[]){CAPACITY, 0}, 1, found), 0); /* no such slot */
}

static const named_case cases[] = {
    CASE(refused_geometry), CASE(scribbled_geometry), CASE(numbers_at_their_limits), CASE(largest_segment), CASE(histograms),
    CASE(header_read_back), CASE(malformed_requests), CASE(scribbled_ready_bits), CASE(scribbled_slots), CASE(two_segments),
    CASE(generations_wrap), CASE(traces)};

int main(void) { return run_cases("edges", cases, sizeof cases / sizeof *cases); }
