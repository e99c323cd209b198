/* Waiting for room (gw_claim_wait, gw_space_wake): three threads want one of SLOTS slots each, hold it for a while and let it go, or give up waiting.
 *
 * A sleeper says that it wants room, then scans; whoever frees a slot looks then who wants one, moves the bell and wakes one sleeper. So nobody sleeps
 * beside a free slot while nobody dies. A death may take a wake along: that of a releaser which had not come to it, or one that had reached a sleeper which
 * then died. Somebody then waits out a slice (10 ms), once for each death: `slices` counts them. (Quotas are not modelled: a wake that goes to a client
 * over its own costs a slice, too.) */
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#ifndef THREADS_A_PROCESS
#define THREADS_A_PROCESS 1 /* 2: the first two threads are of one process */
#endif
#include "common.pml"

#define THREADS 3
#define LAST (SLOTS - 1)
#define PROCESS(t) ((t) / THREADS_A_PROCESS)

byte holder[SLOTS] = NOBODY; /* thread, of a slot that is not FREE */
byte wanted;                 /* space_wanted: one bit a process */
byte unmoved, queued;        /* one bit a thread: space_bell has not moved since it was read; the kernel has it queued there */
byte blocked[THREADS];       /* by process: threads that wait */
byte gone, dead;             /* one bit a thread */
byte deaths, slices;

inline wake_one() { /* which one is the kernel's affair */
    atomic {
        if
        :: queued & BIT(0) -> queued = queued & ~BIT(0)
        :: queued & BIT(1) -> queued = queued & ~BIT(1)
        :: queued & BIT(2) -> queued = queued & ~BIT(2)
        :: queued == 0
        fi
    }
}

inline space_wake() {
    if
    :: wanted != 0 ->
#ifndef BUG_SPACE_BELL_STANDS_STILL
        unmoved = 0;
#endif
        wake_one()
    :: wanted == 0
    fi
}

inline claim() {
    if
    :: atomic { holder[0] == NOBODY -> holder[0] = me; slot = 0 }
    :: holder[0] != NOBODY ->
        if
        :: atomic { holder[LAST] == NOBODY -> holder[LAST] = me; slot = LAST }
        :: holder[LAST] != NOBODY
        fi
    fi
}

inline claim_wait() {
    blocked[PROCESS(me)]++;
    do
    ::  unmoved = unmoved | BIT(me);
#ifdef BUG_SCANS_BEFORE_WANTING
        claim();
        wanted = wanted | BIT(PROCESS(me));
#else
        wanted = wanted | BIT(PROCESS(me));
        claim();
#endif
        if
        :: atomic { slot != NOBODY || late -> break }
        :: atomic { slot == NOBODY && !late -> if :: unmoved & BIT(me) -> queued = queued | BIT(me) :: else fi }
        fi;
        if
        :: !(queued & BIT(me))
        :: atomic { hurried -> queued = queued & ~BIT(me); late = true } /* its own deadline */
        fi
    od;
    if
    :: atomic { blocked[PROCESS(me)] == 1 -> blocked[PROCESS(me)] = 0 };
        wanted = wanted & ~BIT(PROCESS(me));
        if
        :: blocked[PROCESS(me)] == 0
        :: blocked[PROCESS(me)] > 0 -> /* another thread came meanwhile, and its bit was cleared */
            wanted = wanted | BIT(PROCESS(me));
#ifdef BUG_NO_WAKE_AFTER_CLEARING
            skip
#else
            space_wake()
#endif
        fi
    :: atomic { blocked[PROCESS(me)] > 1 -> blocked[PROCESS(me)]-- }
    fi
}

proctype thread(byte me) {
    byte slot = NOBODY;
    bool hurried, late;
    {
        claim();
        if
        :: slot == NOBODY -> if :: hurried = true :: skip fi; claim_wait()
        :: else
        fi;
        if
        :: slot != NOBODY -> holder[slot] = NOBODY; space_wake()
        :: else
        fi;
        gone = gone | BIT(me)
    } unless { atomic { KILLED; deaths++; gone = gone | BIT(me); dead = dead | BIT(me); queued = queued & ~BIT(me) } }
}

inline reap(t) { /* gw_reap; t is its process's only thread */
    atomic { dead & BIT(t) -> dead = dead & ~BIT(t); held = holder[0] == t || holder[LAST] == t };
    if :: holder[0] == t -> holder[0] = NOBODY :: holder[LAST] == t -> holder[LAST] = NOBODY :: else fi;
    wanted = wanted & ~BIT(t);
    if :: held -> held = false; space_wake() :: else fi
}

proctype keeper() {
    bool held;
    do
    :: reap(0)
    :: reap(1)
    :: reap(2)
    od
}

proctype fate() {
    do
    :: atomic { crashes > 0 -> crashes-- }
    :: atomic { crashes > 0 -> crashes--; kill[1] ! 0 }
    :: atomic { crashes > 0 -> crashes--; kill[2] ! 0 }
    :: atomic { crashes > 0 -> crashes--; kill[3] ! 0 }
    od
}

init {
    atomic { run thread(0); run thread(1); run thread(2); run keeper(); run fate() };
    do
    :: timeout -> /* nobody can move any more, but for a sleeper whose slice ends */
        if
        :: gone == BIT(THREADS) - 1 -> break
        :: else -> slices++; queued = 0;
#ifdef BUG_NO_SLICES
            assert(false)
#else
            assert(slices <= deaths)
#endif
        fi
    od;
    assert(holder[0] == NOBODY && holder[LAST] == NOBODY)
}
