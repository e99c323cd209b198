/* Chimes: how an event loop of a frontend learns that there is something to read, without a thread for each request.
 *
 * A chime is a FIFO beside the segment's file, made by its participant and opened by both sides for reading and writing (so that a write never raises SIGPIPE).
 * One byte in it says "look at your words", no more; it is written once per wake-up, however many answers there are.
 *
 * The participant's entry says whether it wants it: GW_CHIME_NONE (it has made no FIFO), GW_CHIME_TAKEN (it has been rung), GW_CHIME_ARMED.
 *
 * Frontend: F1 empty the FIFO; F2 chime = ARMED; F3 look at its words; F4 sleep until the FIFO can be read.
 * Ringer:   R1 the slot's word (or a stream's `written`); R2 look at the chime, and if it is ARMED: R3 chime: ARMED -> TAKEN; if that did it: R4 write a byte.
 * F2, F3, R1, R2, R3 are seq_cst, so they have one total order. If R1 comes before F3, the frontend sees the word. Otherwise F2 < F3 < R1 < R2, so R2 finds
 * ARMED, or what another ringer's R3, later than F2, has left there. Whoever did that R3 writes its byte after F2, hence after F1, and nobody empties the FIFO
 * before the next F1: so F4 does not sleep, or is woken. A byte whose R3 came before F2 may be eaten by F1, or arrive after it: the first is no loss, as its R1
 * came before F3; the second is one look too many. Between R2 and R3 may be other answers, which is the point: ringers note at R2 whom they owe a chime, and ring
 * at the end of their call. A FIFO that is full has been rung.
 *
 * A ringer killed between R3 and R4 takes one wake-up along; a FIFO may be gone, or not be ours to open. So a chime is a hint, as the doorbell is: the loop
 * looks at its words every 50 ms anyway while it waits for any (gpuworker/client/async_watch.py), and recovery rings for every answer that lies there. A word of
 * a participant's entry can be scribbled: then a FIFO is rung, or looked for in vain, once too often. */
#define _GNU_SOURCE
#include "ring.h"
#include "failpoints.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_OPEN 256u /* descriptors kept; those of further frontends are opened for each ring */

struct gw_chime { uint64_t incarnation; int fd; }; /* fd + 1 is kept, so that zeroed memory says: none */

int gw_set_chimes(gw_port *port, const char *prefix, int64_t gid) {
    if (strlen(prefix) >= sizeof port->chime_prefix) return -ENAMETOOLONG;
    strcpy(port->chime_prefix, prefix);
    port->chime_gid = gid;
    return 0;
}

static void forget(gw_port *port, struct gw_chime *known) {
    if (!known->fd) return;
    close(known->fd - 1);
    known->fd = 0;
    port->chimes_open--;
}

void gw_forget_chime(gw_port *port, uint32_t participant) {
    gw_lock_ports();
    if (port->chimes) forget(port, &port->chimes[participant - 1]);
    gw_unlock_ports();
}

/* With the ports' mutex held. */
void gw_close_chimes(gw_port *port) {
    for (uint32_t i = 0; port->chimes && i < port->max_participants; i++) forget(port, &port->chimes[i]);
    free(port->chimes);
    port->chimes = NULL;
}

/* A FIFO of our user's, or of the group's that shares the segment: anything else under that name is not what we look for. */
static int open_chime(const gw_port *port, uint32_t place, uint64_t incarnation) {
    char path[sizeof port->chime_prefix + 64];
    struct stat status;
    snprintf(path, sizeof path, "%s%u-%llu", port->chime_prefix, place, (unsigned long long)incarnation);
    int fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY);
    if (fd < 0) return -1;
    if (!fstat(fd, &status) && S_ISFIFO(status.st_mode) &&
        (status.st_uid == geteuid() || (port->chime_gid >= 0 && status.st_gid == (gid_t)port->chime_gid)))
        return fd;
    close(fd);
    return -1;
}

static void ring(gw_port *port, uint32_t place) {
    gw_participant *who = &port->participants[place - 1];
    uint32_t armed = GW_CHIME_ARMED;
    GW_POINT(chime_due);
    if (!atomic_compare_exchange_strong_explicit(&who->chime, &armed, GW_CHIME_TAKEN, memory_order_seq_cst, memory_order_seq_cst)) return; /* R3 */
    GW_POINT(chime_taken);
    uint64_t incarnation = GW_LOAD(&who->word) >> 2;
    gw_lock_ports();
    if (gw_is_forked(port)) { /* closed meanwhile */
        gw_unlock_ports();
        return;
    }
    if (!port->chimes) port->chimes = calloc(port->max_participants, sizeof *port->chimes);
    struct gw_chime *known = port->chimes ? &port->chimes[place - 1] : NULL;
    if (known && known->fd && known->incarnation != incarnation) forget(port, known);
    int fd = known && known->fd ? known->fd - 1 : open_chime(port, place, incarnation);
    if (fd >= 0) {
        ssize_t written = write(fd, "", 1); /* R4. EAGAIN: it is full */
        (void)written;
        if (!known || (!known->fd && port->chimes_open >= MOST_OPEN)) close(fd);
        else if (!known->fd) {
            *known = (struct gw_chime){incarnation, fd + 1};
            port->chimes_open++;
        }
    }
    gw_unlock_ports();
    GW_POINT(chime_rung);
}

/* R2, after R1. */
void gw_owe_chime(gw_port *port, uint32_t participant) {
    if (!participant || participant > port->max_participants) return; /* scribbled */
    if (atomic_load_explicit(&port->participants[participant - 1].chime, memory_order_seq_cst) != GW_CHIME_ARMED) return;
    atomic_fetch_or_explicit(&port->owed[(participant - 1) / 64], 1ull << ((participant - 1) % 64), memory_order_relaxed);
    atomic_store_explicit(&port->owes, 1, memory_order_release);
}

/* The same whether or not it was rung before: its ringer may have died between R3 and R4. */
void gw_owe_chime_again(gw_port *port, uint32_t participant) {
    if (!participant || participant > port->max_participants) return;
    uint32_t taken = GW_CHIME_TAKEN;
    atomic_compare_exchange_strong_explicit(&port->participants[participant - 1].chime, &taken, GW_CHIME_ARMED, memory_order_seq_cst, memory_order_seq_cst);
    gw_owe_chime(port, participant);
}

/* At the end of each call that answers. Of two threads that owe, one may ring for both: whoever takes a bit rings after the R1 that set it. */
void gw_ring_chimes(gw_port *port) {
    if (!GW_PEEK(&port->owes)) return;
    atomic_exchange_explicit(&port->owes, 0, memory_order_acq_rel);
    for (uint32_t i = 0; i < GW_MAX_PARTICIPANTS / 64; i++)
        for (uint64_t bits = atomic_exchange_explicit(&port->owed[i], 0, memory_order_relaxed); bits; bits &= bits - 1)
            ring(port, i * 64 + (uint32_t)__builtin_ctzll(bits) + 1);
}

/* Whether a look at this ticket of ours would find something new: its end, or more than `seen` entries (GW_TO_THE_END: none are looked for). */
int gw_has_news(const gw_port *port, int64_t ticket, uint32_t seen) {
    const gw_slot *slot = gw_slot_at(port, ticket);
    if (!slot) return 1;
    uint64_t word = atomic_load_explicit(&slot->word, memory_order_seq_cst);
    if (gw_generation_of(word) != gw_life_of(ticket) || gw_participant_of(word) != port->me) return 1;
    if (gw_phase_of(word) == GW_DONE || gw_phase_of(word) == GW_ABANDONED || gw_phase_of(word) == GW_FREE) return 1;
    if (seen == GW_TO_THE_END) return 0;
    const gw_stream *stream = (const gw_stream *)gw_response_area(port, gw_slot_of(ticket));
    return GW_LOAD(&stream->life) == gw_life_of(ticket) && atomic_load_explicit(&stream->written, memory_order_seq_cst) > seen;
}

/* Empties the FIFO, arms the chime and looks at the tickets (-1: none) by slot, of all slots. fd < 0: looks only.
 * -> how many have something new, their slots in `found`; -ECHILD. `is_over`: whether the worker's state says that it answers nothing any more. */
int gw_poll_many(gw_port *port, int fd, const int64_t *tickets, const uint32_t *seen, uint32_t *found, uint32_t *is_over) {
    if (!port->me || gw_is_forked(port)) return -ECHILD;
    char rung[64];
    if (fd >= 0) {
        while (read(fd, rung, sizeof rung) == sizeof rung) continue; /* F1 */
        GW_POINT(chime_emptied);
        atomic_store_explicit(&port->participants[port->me - 1].chime, GW_CHIME_ARMED, memory_order_seq_cst); /* F2 */
        GW_POINT(chime_armed);
    }
    *is_over = atomic_load_explicit(&port->header->state, memory_order_seq_cst) > GW_DRAINING;
    int n = 0;
    for (uint32_t i = 0; i < port->capacity; i++) /* F3 */
        if (tickets[i] >= 0 && gw_has_news(port, tickets[i], seen[i])) found[n++] = i;
    if (n == 1 && fd >= 0 && seen[found[0]] == GW_TO_THE_END) { /* would a brief spin have been enough? */
        const gw_slot *slot = &port->slots[found[0]];
        if (gw_phase_of(GW_LOAD(&slot->word)) == GW_DONE) gw_brief_learn(port, slot->done_ns - GW_PEEK(&slot->enqueue_ns));
    }
    return n;
}
