/* What a request is part of, for a tracing system: W3C trace context, carried through the slot.
 *
 * The words belong to the claimer. It writes them (relaxed) while the slot is CLAIMED; gw_publish's compare-and-swap releases them, and the owner's take, which
 * acquires the word, reads them while the request is RUNNING. Most lives write nothing: so `trace_life` says whose they are, and what an earlier life has left is not
 * looked at. A claimer that was paused here while another thread cancelled its request may still write into the slot's next life; it writes its own life's number,
 * so nobody takes the words for that life's, or at worst they are a mixture of two contexts: nothing but the parents of some spans hangs on them. */
#include "ring.h"
#include <errno.h>

#define READ(p) atomic_load_explicit((p), memory_order_relaxed)
#define WRITE(p, v) atomic_store_explicit((p), (v), memory_order_relaxed)

/* Of a request that is claimed and not published. -ECHILD, -ESTALE: it is not ours. */
int gw_trace(gw_port *port, int64_t ticket, uint64_t id_high, uint64_t id_low, uint64_t span, uint32_t flags) {
    gw_slot *slot = gw_slot_at(port, ticket);
    if (!slot || !port->me || gw_is_forked(port)) return -ECHILD;
    if (GW_LOAD(&slot->word) != gw_word(gw_life_of(ticket), port->me, GW_CLAIMED)) return -ESTALE;
    WRITE(&slot->trace[0], id_high);
    WRITE(&slot->trace[1], id_low);
    WRITE(&slot->trace[2], span);
    WRITE(&slot->trace_life, gw_life_of(ticket) << 8 | (flags & 0xff));
    return 0;
}

/* Those of a batch (as gw_take left it: pairs that begin with the ticket) that have a context; while they are RUNNING. -> how many. */
int gw_read_traces(const gw_port *port, const uint64_t *taken, int n, gw_traced *out) {
    int found = 0;
    for (int k = 0; k < n; k++) {
        const gw_slot *slot = gw_slot_at(port, (int64_t)taken[2 * k]);
        if (!slot) continue;
        uint64_t life = READ(&slot->trace_life);
        if (life >> 8 != gw_life_of((int64_t)taken[2 * k])) continue;
        out[found++] = (gw_traced){taken[2 * k], READ(&slot->trace[0]), READ(&slot->trace[1]), READ(&slot->trace[2]), life & 0xff,
                                   READ(&slot->enqueue_ns), slot->collect_ns, slot->dispatch_ns};
    }
    return found;
}
