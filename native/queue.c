/* The owner's queue: requests that were collected from the ring and not taken yet. */
#define _GNU_SOURCE
#include "ring.h"
#include "failpoints.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int any_ready(const gw_port *port) {
    for (uint32_t i = 0; i < gw_ready_words(port); i++)
        if (atomic_load_explicit(&port->header->ready[i], memory_order_seq_cst)) return 1;
    return 0;
}

/* Room for the backlog; call once, before the first gw_collect. */
int gw_open_backlog(gw_port *port) {
    if (!port->backlog) port->backlog = calloc(2 * (size_t)port->capacity, sizeof *port->backlog);
    if (!port->in_backlog) port->in_backlog = malloc(port->capacity * sizeof *port->in_backlog);
    if (!port->running) port->running = malloc(port->capacity * sizeof *port->running);
    if (!port->arrived) port->arrived = calloc(2 * (size_t)port->capacity, sizeof *port->arrived);
    if (!port->aside) port->aside = calloc(2 * (size_t)port->capacity, sizeof *port->aside);
    if (!port->gone) port->gone = calloc(2 * (size_t)port->capacity, sizeof *port->gone);
    if (!port->backlog || !port->in_backlog || !port->running || !port->arrived || !port->gone || !port->aside) return -ENOMEM;
    for (uint32_t i = 0; i < port->capacity; i++) port->in_backlog[i] = port->running[i] = GW_NO_TICKET;
    return 0;
}

const gw_item *gw_backlog(const gw_port *port) { return port->backlog; }

/* Drops from the backlog what was cancelled, expired or reaped since, so that a decision counts live requests only. in_backlog is asked too: a hostile
 * word may go back and forth between two lives, and each would stay. */
static void purge(gw_port *port) {
    uint32_t kept = 0;
    for (uint32_t k = 0; k < port->queued; k++) {
        gw_item item = port->backlog[k];
        uint32_t i = gw_slot_of((int64_t)item.ticket);
        uint64_t word = GW_LOAD(&port->slots[i].word);
        if (gw_phase_of(word) == GW_READY && gw_generation_of(word) == gw_life_of((int64_t)item.ticket) && port->in_backlog[i] == item.ticket)
            port->backlog[kept++] = item;
        else if (port->keeps_news && port->in_backlog[i] == item.ticket && port->departures < 2 * port->capacity)
            port->gone[port->departures++] = item.ticket;
    }
    port->queued = kept;
}

/* Moves newly published requests into the backlog, which stays sorted by enqueue time; they come nearly in that order. A life of a slot enters it once,
 * however often its bit is set (in_backlog), so a slot has at most its present life there and one that ended since the purge: 2 * capacity suffices. */
static void drain_ready_bits(gw_port *port) {
    uint64_t now = 0;
    for (uint32_t group = 0; group < gw_ready_words(port); group++) {
        _Atomic uint64_t *ready = &port->header->ready[group];
        if (!atomic_load_explicit(ready, memory_order_relaxed)) continue;
        uint64_t bits = atomic_exchange_explicit(ready, 0, memory_order_acquire);
        GW_POINT(collect_exchanged);
        for (; bits; bits &= bits - 1) {
            uint32_t i = group * 64 + (uint32_t)__builtin_ctzll(bits);
            if (i >= port->capacity) break;
            gw_slot *slot = &port->slots[i];
            uint64_t word = GW_LOAD(&slot->word);        /* pairs with the release in gw_publish */
            uint64_t ticket = (uint64_t)gw_ticket(word, i);
            if (gw_phase_of(word) != GW_READY || port->in_backlog[i] == ticket) continue; /* cancelled or reaped since; or a hostile bit */
            port->in_backlog[i] = ticket;
            GW_POINT(collect_entered);
            gw_item item = {ticket, GW_PEEK(&slot->enqueue_ns), GW_PEEK(&slot->deadline_ns), GW_PEEK(&slot->terms), gw_participant_of(word)};
            if (now < item.enqueue_ns) now = gw_now(); /* published since we began */
            slot->collect_ns = now;
            uint32_t k = port->queued++;
            for (; k > 0 && port->backlog[k - 1].enqueue_ns > item.enqueue_ns; k--) port->backlog[k] = port->backlog[k - 1];
            port->backlog[k] = item;
            if (port->keeps_news && port->arrivals < 2 * port->capacity) port->arrived[port->arrivals++] = item;
        }
    }
}

int gw_collect(gw_port *port, uint64_t until_ns) {
    port->arrivals = port->departures = 0;
    purge(port);
    uint32_t before = port->queued;
    drain_ready_bits(port);
    if (port->queued != before || !until_ns) return (int)port->queued;
    GW_POINT(collect_empty);
    gw_header *header = port->header;
    uint64_t start = gw_now();
    if (start >= until_ns || atomic_exchange_explicit(&port->nudged, 0, memory_order_seq_cst)) return (int)port->queued;
    int interrupted = 0, slept = !gw_spin_until(port, &port->request_spin, header->ready, gw_ready_words(port), 0, until_ns);
    if (!slept) {
        GW_TALLY(&header->stats.spins, 1);
    } else { /* the owner's side of the doorbell, wake.c */
        uint32_t seen = atomic_load_explicit(&header->bell, memory_order_seq_cst); /* O1 */
        GW_POINT(collect_seen);
        atomic_store_explicit(&header->owner_asleep, 1, memory_order_seq_cst);     /* O2 */
        GW_POINT(collect_asleep);
        if (!any_ready(port) && !atomic_load_explicit(&port->nudged, memory_order_seq_cst)) { /* O3 */
            GW_POINT(collect_parking);
            GW_TALLY(&header->stats.parks, 1);
            long result = gw_futex_wait(&header->bell, seen, until_ns); /* O4 */
            GW_POINT(collect_woken);
            interrupted = result == -EINTR;
            if (result == -ETIMEDOUT && any_ready(port)) GW_TALLY(&header->stats.late_wakes, 1);
        }
        atomic_store_explicit(&header->owner_asleep, 0, memory_order_relaxed); /* O5 */
        GW_POINT(collect_awake);
    }
    /* What it was about is there to be seen when we return; a plain store might be overtaken by the look at it. */
    atomic_exchange_explicit(&port->nudged, 0, memory_order_seq_cst);
    purge(port);
    before = port->queued;
    drain_ready_bits(port);
    for (uint32_t k = 0; slept && port->queued != before && k < port->queued; k++)
        if (port->backlog[k].enqueue_ns >= start) { /* the earliest arrival since we began to wait */
            gw_spin_learn(&port->request_spin, port->backlog[k].enqueue_ns - start);
            break;
        }
    return interrupted && !port->queued ? -EINTR : (int)port->queued;
}

/* Brings those `count` of the backlog to its front that are to go, in order: the first ones; but a participant that would get less than a quarter of its even
 * share of these and the next three batches, although it has more, gets a quarter of its even share of these, and at least one. So one that has queued a
 * thousand does not keep the others waiting. Twin of gpuworker/scheduling/fairness.py. */
#define GW_FAIR_BATCHES 4
void gw_fair_front(gw_port *port, uint32_t count) {
    static _Thread_local uint16_t has[GW_MAX_PARTICIPANTS + 1], soon[GW_MAX_PARTICIPANTS + 1], owed[GW_MAX_PARTICIPANTS + 1];
    if (!count || port->queued <= GW_FAIR_BATCHES * count) return;
    uint32_t clients = 0, total = 0;
    memset(has, 0, sizeof has);
    memset(soon, 0, sizeof soon);
    for (uint32_t k = 0; k < port->queued; k++) {
        uint32_t who = port->backlog[k].participant % (GW_MAX_PARTICIPANTS + 1);
        clients += !has[who];
        has[who]++;
        soon[who] += k < GW_FAIR_BATCHES * count;
    }
    uint32_t share = count / 4 / clients ? count / 4 / clients : 1;
    for (uint32_t who = 0; who <= GW_MAX_PARTICIPANTS; who++) {
        int is_owed = soon[who] < has[who] && soon[who] * 4 * clients < GW_FAIR_BATCHES * count;
        owed[who] = !is_owed ? UINT16_MAX : (uint16_t)(share < has[who] ? share : has[who]);
        if (is_owed) total += owed[who];
    }
    if (!total) return;
    uint32_t room = count > total ? count - total : 0, front = 0, back = 0;
    for (uint32_t k = 0; k < port->queued; k++) {
        uint16_t *left = &owed[port->backlog[k].participant % (GW_MAX_PARTICIPANTS + 1)];
        int goes = front < count && (*left == UINT16_MAX ? room && room-- : *left && (*left)--);
        if (goes) port->backlog[front++] = port->backlog[k];
        else port->aside[back++] = port->backlog[k];
    }
    memcpy(port->backlog + front, port->aside, back * sizeof *port->backlog);
}

/* For a request that was chosen and not taken: it arrives anew, if it is READY still. */
int gw_put_back(gw_port *port, int64_t ticket) {
    gw_slot *slot = gw_slot_at(port, ticket);
    uint32_t i = gw_slot_of(ticket);
    if (!slot || port->in_backlog[i] != (uint64_t)ticket) return -ESTALE;
    port->in_backlog[i] = GW_NO_TICKET;
    atomic_fetch_or_explicit(&port->header->ready[i / 64], 1ull << (i % 64), memory_order_seq_cst);
    return 0;
}

int gw_news(const gw_port *port, const gw_item **arrived, const uint64_t **gone, int *departures) {
    *arrived = port->arrived;
    *gone = port->gone;
    *departures = (int)port->departures;
    return (int)port->arrivals;
}
