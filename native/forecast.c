/* Will this request be in time? Asked by a frontend before it touches the ring, from what the owner publishes about its queue, its predicted run times and the
 * batch that it runs. Everything here is a hint, read word by word: a wrong forecast costs one request its chance, or sends one that the owner then rejects.
 * Twin of gpuworker/scheduling/forecast.py. */
#define _GNU_SOURCE
#include "ring.h"

#define GW_ROOM_BATCHES 4
#define GW_PROBE_AFTER_NS 1000000000ull
#define WRITE(p, v) atomic_store_explicit((p), (v), memory_order_relaxed)

static uint32_t lanes_of(const gw_header *h) {
    uint32_t lanes = GW_LOAD(&h->lanes);
    return lanes > GW_LANES ? 0 : lanes;
}

/* The bucket of a request: the first that is long enough, else the last. */
static uint32_t lane_of(const gw_header *h, uint32_t lanes, uint64_t terms) {
    uint32_t i = 0;
    while (i + 1 < lanes && GW_PEEK(&h->lane[i].length) < gw_length_of(terms)) i++;
    return i;
}

/* Between the times of a batch of one and of a full one, as if it grew by the same for each request. */
static uint64_t run_ns(const gw_lane *lane, uint64_t size, uint64_t cap) {
    uint64_t one = GW_PEEK(&lane->run_one_ns), full = GW_PEEK(&lane->run_full_ns);
    return cap < 2 || full < one ? full : one + (full - one) / (cap - 1) * (size - 1);
}

int gw_is_late(const gw_port *port, uint64_t terms, gw_forecast *out) {
    const gw_header *h = port->header;
    uint64_t budget = gw_budget_of(terms), now = gw_now(), free_at = GW_PEEK(&h->free_at_ns), wait = free_at > now ? free_at - now : 0;
    if (!budget) budget = h->budget_ns;
    uint32_t lanes = lanes_of(h), mine = lane_of(h, lanes, terms), depth = 0;
    if (!h->admission || !budget || !lanes) return 0;
    uint64_t ahead = 0, my_cap = 1;
    for (uint32_t i = 0; i < lanes; i++) {
        const gw_lane *lane = &h->lane[i];
        uint64_t cap = GW_PEEK(&lane->cap), queued = GW_PEEK(&lane->queued) + GW_PEEK(&h->arrived[i]) - GW_PEEK(&lane->seen);
        if (!cap) return 0;
        if (queued > port->capacity) queued = port->capacity;
        depth += (uint32_t)queued;
        wait += queued / cap * GW_PEEK(&lane->run_full_ns);
        if (i == mine) {
            ahead = queued % cap;
            my_cap = cap;
        } else if (queued % cap) {
            wait += run_ns(lane, queued % cap, cap);
        }
    }
    const gw_lane *lane = &h->lane[mine];
    uint64_t full = GW_PEEK(&lane->run_full_ns), gap = GW_PEEK(&lane->gap_ns), size = ahead + 1 + (gap ? wait / gap : 0);
    uint64_t estimated = wait + run_ns(lane, size < my_cap ? size : my_cap, my_cap);
    if (out) *out = (gw_forecast){estimated, budget, run_ns(lane, 1, my_cap), depth};
    /* With less room than that, whether a request is in time depends on who else comes: there a forecast turns away too many. */
    uint64_t ran = GW_PEEK(&lane->ran_ns);
    if (free_at <= now && now > ran && now - ran >= GW_PROBE_AFTER_NS && !GW_PEEK(&h->batch_started_ns)) return 0; /* it may be the forecast that is wrong */
    if (gw_priority_of(terms)) return 0; /* who is queued may be behind it */
    return full && estimated > budget && (h->admission == GW_ADMIT_IN_TIME || budget >= GW_ROOM_BATCHES * full);
}

void gw_count_arrival(gw_port *port, uint64_t terms) {
    gw_header *h = port->header;
    uint32_t lanes = lanes_of(h);
    if (lanes) GW_COUNT(&h->arrived[lane_of(h, lanes, terms)], 1);
}

uint64_t gw_arrived(const gw_port *port, uint32_t lane) { return lane < GW_LANES ? GW_PEEK(&port->header->arrived[lane]) : 0; }

/* The owner's. Buckets change rarely, and their run times; frontends that look meanwhile see some of both. */
void gw_publish_lane(gw_port *port, uint32_t i, uint64_t length, uint32_t cap, uint64_t run_one_ns, uint64_t run_full_ns) {
    if (i >= GW_LANES) return;
    gw_lane *lane = &port->header->lane[i];
    WRITE(&lane->length, length);
    WRITE(&lane->cap, cap);
    WRITE(&lane->run_one_ns, run_one_ns);
    WRITE(&lane->run_full_ns, run_full_ns);
}

void gw_publish_lanes(gw_port *port, uint32_t lanes) { atomic_store_explicit(&port->header->lanes, lanes, memory_order_release); }

void gw_publish_queue(gw_port *port, uint32_t i, uint32_t queued, uint64_t gap_ns, uint64_t seen, uint64_t ran_ns) {
    if (i >= GW_LANES) return;
    gw_lane *lane = &port->header->lane[i];
    WRITE(&lane->queued, queued);
    WRITE(&lane->gap_ns, gap_ns);
    WRITE(&lane->seen, seen);
    WRITE(&lane->ran_ns, ran_ns);
}

/* keeps_news: gw_news is asked after each gw_collect. */
void gw_set_scheduling(gw_port *port, uint32_t admission, uint64_t budget_ns, uint64_t max_length, uint32_t priorities, uint32_t fair, uint32_t keeps_news) {
    gw_header *h = port->header;
    port->fair = fair;
    port->keeps_news = keeps_news;
    h->budget_ns = port->budget_ns = budget_ns;
    h->max_length = max_length;
    h->priorities = priorities;
    h->admission = admission;
    WRITE(&h->free_at_ns, 0);
    gw_publish_lanes(port, 0); /* until the new owner has published its own */
}

/* Latency budget, longest request, whether there are priorities, state. */
void gw_read_scheduling(const gw_port *port, uint64_t out[4]) {
    const gw_header *h = port->header;
    out[0] = h->budget_ns;
    out[1] = h->max_length;
    out[2] = h->priorities;
    out[3] = GW_LOAD(&h->state);
}
