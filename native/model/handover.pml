/* Owners follow each other, by death and by `gpuworker reload`, while frontends publish: no request stays behind.
 *
 * An owner that is asked to hand over finishes its batch, leaves what is READY where it is, and drops the lock; one that dies leaves anything. The next
 * one, which may be waiting for the lock already, knows nothing but the slots' words: it clears the ready bits, sets them again from the words, and
 * serves. A frontend may stand between its word and its bit, or between its bit and the bell, all the while. Each frontend has a slot of its own here,
 * and sees its answer by itself: claims are slot.pml's matter, semaphores semaphore.pml's. */
#include "common.pml"
#include "doorbell.pml"

#ifndef REQUESTS
#define REQUESTS 1
#endif
#ifndef HANDOVERS
#define HANDOVERS 1
#endif

mtype phase[SLOTS] = FREE;
byte lock;  /* of two owners, the one that holds the owner's lock byte; the other waits for it, and is a fresh process when it gets it */
bool asked; /* the owner, to hand over */
byte handovers = HANDOVERS;
bool gone[FRONTENDS]; /* has what it wanted, or is dead */

proctype frontend(byte me) {
    byte sent;
    {
        do
        :: sent < REQUESTS ->
            phase[me] = CLAIMED;
#ifdef BUG_BIT_BEFORE_WORD
            set_ready_bit(me);
            phase[me] = READY;
#else
            phase[me] = READY;
            set_ready_bit(me);
#endif
            ring_doorbell();
            atomic { phase[me] == DONE -> phase[me] = FREE; sent++ }
        :: atomic { sent == REQUESTS -> gone[me] = true; break }
        od
    } unless { atomic { KILLED; gone[me] = true } }
}

inline recover(i) { /* gw_recover, one slot */
    if
    :: atomic { phase[i] == RUNNING -> phase[i] = READY }; set_ready_bit(i)
#ifndef BUG_BITS_NOT_REBUILT
    :: phase[i] == READY -> set_ready_bit(i)
#endif
    :: else
    fi
}

inline collect(i) {
    if
    :: atomic { bits & BIT(i) -> bits = bits & ~BIT(i); if :: phase[i] == READY -> backlog = backlog | BIT(i) :: else fi }
    :: atomic { !(bits & BIT(i)) }
    fi
}

inline take(i) {
    if
    :: atomic { backlog & BIT(i) -> backlog = backlog & ~BIT(i); assert(phase[i] == READY); phase[i] = RUNNING; taken = taken | BIT(i) }
    :: else
    fi
}

inline finish(i) {
    if
    :: atomic { taken & BIT(i) -> taken = taken & ~BIT(i); assert(lock == me && phase[i] == RUNNING); phase[i] = DONE }
    :: else
    fi
}

inline serve() {
    do
    :: atomic { bits = ready; ready = 0 };
        collect(0); collect(1);
        if
        :: atomic { asked -> backlog = 0; break } /* what is READY is left to the next owner */
        :: !asked && backlog == 0 -> park()
        :: !asked && backlog != 0;
            take(0); take(1);
#ifdef BUG_LOCK_DROPPED_BEFORE_FINISH
            atomic { if :: asked -> asked = false; lock = 1 - me :: else fi };
#endif
            finish(0); finish(1)
        fi
    od
}

proctype owner(byte me) {
    byte backlog, bits, taken; /* slots, one bit each */
    do
    ::  {
            do
            :: lock == me ->
                owner_asleep = false;
#ifdef BUG_BITS_CLEARED_LAST
                recover(0); recover(1);
                ready = 0;
#else
                ready = 0;
                recover(0); recover(1);
#endif
                serve();
                atomic { asked = false; lock = 1 - me }
            od
        } unless { atomic { KILLED; asked = false; backlog = 0; bits = 0; taken = 0; owner_queued = false; lock = 1 - me } }
    od
}

proctype fate() {
    do
    :: atomic { handovers > 0 -> handovers--; asked = true }; bell_moved = true; owner_queued = false /* gpuworker reload: gw_bell */
    :: atomic { handovers > 0 -> handovers-- }
    :: atomic { crashes > 0 -> crashes-- }
    :: atomic { crashes > 0 -> crashes--; kill[1] ! 0 }
    :: atomic { crashes > 0 -> crashes--; kill[2] ! 0 }
    :: atomic { crashes > 0 -> crashes--; kill[3 + lock] ! 0 }
    od
}

init {
    atomic { run frontend(0); run frontend(1); run owner(0); run owner(1); run fate() };
    timeout; /* nobody can move any more */
    assert(gone[0] && gone[1])
}
