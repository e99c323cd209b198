/* Every call on a slot, from every phase, with a live ticket and with a stale one: what it returns and where it leaves the slot. */
#define _GNU_SOURCE
#include "rig.h"

enum { CAPACITY = 4, PARTICIPANTS = 3, AREA = 128 };
#define PHASES 6
#define NO_TICKET INT64_MIN
static const char *const phase_names[PHASES] = {"FREE", "CLAIMED", "READY", "RUNNING", "DONE", "ABANDONED"};
static const char ping[] = "ping", pong[] = "pongs"; /* sent without the final zero: 4 and 5 bytes, kind 0 */

static rig r;
static gw_port *front;

static void set_up(void) {
    r = rig_open(CAPACITY, PARTICIPANTS, AREA);
    front = rig_join(&r, 1);
}
static void tear_down(void) {
    port_close(front);
    rig_close(&r);
}

/* One request, brought to a phase by the ordinary calls. */
static int64_t bring(uint32_t phase) {
    int64_t ticket = gw_claim(front);
    CHECK(ticket >= 0);
    if (phase == GW_FREE) EQUAL(gw_cancel(front, ticket), 0);
    if (phase == GW_FREE || phase == GW_CLAIMED) return ticket;
    memcpy(gw_request_area(front, gw_slot_of(ticket)), ping, 4);
    EQUAL(gw_publish(front, ticket, gw_describe(GW_KIND_BYTES, 0, 4), gw_now() + 3600 * SECOND_NS, 0), 0);
    EQUAL(gw_collect(r.owner, 0), 1);
    if (phase == GW_READY) return ticket;
    uint64_t taken[2];
    EQUAL(gw_take(r.owner, 1, 0, taken), 1);
    EQUAL(taken[0], ticket);
    EQUAL(taken[1], 4);
    EQUAL(memcmp(gw_request_area(r.owner, gw_slot_of(ticket)), ping, 4), 0);
    if (phase == GW_RUNNING) return ticket;
    if (phase == GW_DONE) EQUAL(gw_answer(r.owner, ticket, GW_KIND_BYTES, NULL, 0, pong, 5), 0);
    else EQUAL(gw_cancel(front, ticket), 1);
    return ticket;
}

static int64_t publish(int64_t ticket) { return gw_publish(front, ticket, gw_describe(GW_KIND_STR, 0, 1), 0, 0); }
static int64_t poll(int64_t ticket) { return gw_poll(front, ticket); }
static int64_t wait(int64_t ticket) { return gw_wait(front, ticket, 0, 1000); }
static int64_t wait_past_deadline(int64_t ticket) { return gw_wait(front, ticket, 1, SECOND_NS); }
static int64_t release(int64_t ticket) { return gw_release(front, ticket); }
static int64_t receive(int64_t ticket) {
    _Alignas(GW_LINE) char into[GW_LINE];
    int result = gw_receive(front, ticket, 0, into, 5);
    if (result == 0) EQUAL(memcmp(into, pong, 5), 0);
    return result;
}
static int64_t cancel(int64_t ticket) { return gw_cancel(front, ticket); }
static int64_t collect(int64_t ticket) { return (void)ticket, gw_collect(r.owner, 0); }
static int64_t take(int64_t ticket) {
    uint64_t taken[2 * CAPACITY];
    return (void)ticket, gw_take(r.owner, CAPACITY, 0, taken);
}
static int64_t untake(int64_t ticket) { return gw_untake(r.owner, ticket); }
static int64_t refuse(int64_t ticket) { return gw_refuse(r.owner, ticket, GW_KIND_DRAINING); }
static int64_t answer(int64_t ticket) { return gw_answer(r.owner, ticket, GW_KIND_STR, NULL, 0, "again", 5); }
static int64_t answered(int64_t ticket) { return gw_answered(r.owner, ticket, gw_describe(GW_KIND_STR, 0, 1)); }
static int64_t answer_too_long(int64_t ticket) { return gw_answer(r.owner, ticket, GW_KIND_BYTES, NULL, 0, NULL, AREA + 1); }
static int64_t expire(int64_t ticket) { return (void)ticket, gw_expire(r.owner, UINT64_MAX); }
static int64_t reap(int64_t ticket) { return (void)ticket, gw_reap(r.owner, front->me); }
static int64_t reap_other(int64_t ticket) { return (void)ticket, gw_reap(r.owner, front->me + 1); }
static int64_t recover(int64_t ticket) { return (void)ticket, rig_new_owner(&r), gw_recover(r.owner, 2, GW_KIND_DIED); }
static int64_t recover_again(int64_t ticket) { return recover(ticket), recover(ticket); }
static int64_t recover_at_limit(int64_t ticket) { return (void)ticket, rig_new_owner(&r), gw_recover(r.owner, 1, GW_KIND_DIED); }

#define E (-ESTALE)
#define P (-EINPROGRESS)
#define T (-ETIMEDOUT)
#define N NO_TICKET
#define F GW_FREE
#define C GW_CLAIMED
#define R GW_READY
#define U GW_RUNNING
#define D GW_DONE
#define A GW_ABANDONED
static const struct {
    const char *name;
    int64_t (*call)(int64_t ticket);
    int64_t stale;                                          /* what a ticket of an earlier life gets */
    struct { int64_t result; uint32_t after; } from[PHASES]; /* what the ticket gets in each phase, and the phase then */
} table[] = {
    {"publish", publish, E, {{E, F}, {0, R}, {E, R}, {E, U}, {E, D}, {E, A}}},
    {"poll", poll, E, {{E, F}, {P, C}, {P, R}, {P, U}, {5, D}, {E, A}}},
    {"wait", wait, E, {{E, F}, {T, C}, {T, R}, {T, U}, {5, D}, {E, A}}},
    {"wait past the deadline", wait_past_deadline, E, {{E, F}, {T, C}, {T, R}, {T, U}, {5, D}, {E, A}}},
    {"release", release, E, {{E, F}, {E, C}, {E, R}, {E, U}, {0, F}, {E, A}}},
    {"receive", receive, E, {{E, F}, {E, C}, {E, R}, {E, U}, {0, F}, {E, A}}},
    {"cancel", cancel, E, {{E, F}, {0, F}, {0, F}, {1, A}, {2, D}, {E, A}}},
    {"collect", collect, N, {{0, F}, {0, C}, {1, R}, {0, U}, {0, D}, {0, A}}},
    {"take", take, N, {{0, F}, {0, C}, {1, U}, {0, U}, {0, D}, {0, A}}},
    {"untake", untake, E, {{E, F}, {E, C}, {E, R}, {0, R}, {E, D}, {1, F}}},
    {"refuse", refuse, E, {{E, F}, {E, C}, {0, D}, {E, U}, {E, D}, {E, A}}},
    {"answer", answer, E, {{E, F}, {E, C}, {E, R}, {0, D}, {E, D}, {1, F}}},
    {"answered", answered, E, {{E, F}, {E, C}, {E, R}, {0, D}, {E, D}, {1, F}}},
    {"answer, too long", answer_too_long, E, {{E, F}, {E, C}, {E, R}, {-EMSGSIZE, U}, {E, D}, {-EMSGSIZE, A}}},
    {"expire", expire, N, {{0, F}, {0, C}, {1, D}, {0, U}, {0, D}, {0, A}}},
    {"reap", reap, N, {{0, F}, {1, F}, {1, F}, {1, A}, {1, F}, {0, A}}},
    {"reap another", reap_other, N, {{0, F}, {0, C}, {0, R}, {0, U}, {0, D}, {0, A}}},
    {"recover", recover, N, {{0, F}, {0, C}, {0, R}, {1, R}, {0, D}, {0, F}}},
    {"recover twice", recover_again, N, {{0, F}, {0, C}, {0, R}, {0, R}, {0, D}, {0, F}}},
    {"recover at the limit", recover_at_limit, N, {{0, F}, {0, C}, {0, R}, {0, D}, {0, D}, {0, F}}},
};
enum { ROWS = sizeof table / sizeof *table };

/* The ordinary way on from wherever a call left the slot: shows that it is not stuck there, and ends with every slot free. */
static void settle(int64_t ticket) {
    uint64_t taken[2];
    uint32_t after = (uint32_t)gw_phase(front, ticket);
    switch (after) {
    case GW_CLAIMED:
        EQUAL(gw_publish(front, ticket, gw_describe(GW_KIND_BYTES, 0, 4), 0, 0), 0); /* fall through */
    case GW_READY:
        EQUAL(gw_collect(r.owner, 0), 1);
        EQUAL(gw_take(r.owner, 1, 0, taken), 1);
        EQUAL(taken[0], ticket); /* fall through */
    case GW_RUNNING: EQUAL(gw_answer(r.owner, ticket, GW_KIND_BYTES, NULL, 0, NULL, 0), 0); /* fall through */
    case GW_DONE:
        CHECK(gw_wait(front, ticket, 0, SECOND_NS) >= 0);
        EQUAL(gw_release(front, ticket), 0);
        break;
    case GW_ABANDONED: EQUAL(gw_answer(r.owner, ticket, GW_KIND_BYTES, NULL, 0, NULL, 0), 1); break;
    default: EQUAL(after, GW_FREE);
    }
    EQUAL(gw_count(r.owner, GW_FREE), CAPACITY);
    EQUAL(gw_collect(r.owner, 0), 0);
}

static void check_every_phase(void) {
    char name[64];
    for (int row = 0; row < ROWS; row++)
        for (uint32_t phase = 0; phase < PHASES; phase++) {
            snprintf(name, sizeof name, "%s, %s:", table[row].name, phase_names[phase]);
            context = name;
            set_up();
            int64_t ticket = bring(phase);
            EQUAL(gw_phase(r.owner, ticket), phase);
            EQUAL(table[row].call(ticket), table[row].from[phase].result);
            EQUAL(gw_phase(r.owner, ticket), table[row].from[phase].after);
            settle(ticket);
            if (table[row].call != reap) EQUAL(front->inflight, 0); /* the reaped are dead: their count died with them */
            tear_down();
        }
}

/* Nothing a late comer does reaches the next life of its slot. */
static void check_stale_tickets(void) {
    char name[64];
    for (int row = 0; row < ROWS; row++)
        for (uint32_t phase = 0; phase < PHASES && table[row].stale != NO_TICKET; phase++) {
            snprintf(name, sizeof name, "%s, stale, %s:", table[row].name, phase_names[phase]);
            context = name;
            set_up();
            int64_t stale = bring(GW_FREE), ticket = bring(phase);
            EQUAL(gw_slot_of(stale), gw_slot_of(ticket));
            char slot[sizeof(gw_slot)], area[AREA];
            memcpy(slot, rig_slot(&r, ticket), sizeof slot);
            memcpy(area, gw_response_area(r.owner, gw_slot_of(ticket)), AREA);
            uint64_t answers = r.owner->header->stats.completed;
            EQUAL(table[row].call(stale), table[row].stale);
            EQUAL(memcmp(slot, rig_slot(&r, ticket), sizeof slot), 0);
            EQUAL(memcmp(area, gw_response_area(r.owner, gw_slot_of(ticket)), AREA), 0);
            EQUAL(r.owner->header->stats.completed, answers);
            settle(ticket);
            EQUAL(front->inflight, 0);
            tear_down();
        }
}

int main(void) {
    check_every_phase();
    check_stale_tickets();
    printf("transitions: %d calls from %d phases\n", ROWS, PHASES);
    return 0;
}
