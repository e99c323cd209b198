/* The life of a slot, from claim to release, under the death of anybody anywhere: every request of a living frontend ends, with its own answer or a typed
 * error, and every slot comes back. Doorbell and semaphore take part as they are, with no time-out anywhere.
 *
 * Two frontends and two slots; an owner with its two threads (batches; keeper). Recovery is one piece of code, whoever runs it: the supervisor, the next
 * owner, or one after the other. A recoverer that is killed anywhere is followed by one that begins again. */
#include "common.pml"
#include "doorbell.pml"
#include "sequence.pml"

#ifndef REQUESTS
#define REQUESTS 1
#endif
#ifndef MAX_ATTEMPTS
#define MAX_ATTEMPTS 2
#endif
#define DIED 98 /* the responses GW_KIND_DIED and GW_KIND_EXPIRED; every other is the number of its request */
#define EXPIRED 99

mtype phase[SLOTS] = FREE; byte holder[SLOTS] = NOBODY, life[SLOTS]; /* the slot's word, moved as one */
byte request[SLOTS], response[SLOTS], attempts[SLOTS];
bool serving; /* an owner is past its recovery */
byte running[SLOTS]; /* the owner's own note of what it runs, for its keeper: lives */

/* What the requirements speak of, and no process sees. */
byte runs[SLOTS], deaths[SLOTS]; /* how often this life of the slot was run, and how many owners or recoverers died over it */
bool gone[FRONTENDS], dead[FRONTENDS];

#define TAKEN(i) (phase[i] == RUNNING || phase[i] == ABANDONED)

/* FREE. And forgets what nobody will look at any more, which makes fewer states. */
#define LET_GO(i) phase[i] = FREE; holder[i] = NOBODY; request[i] = 0; response[i] = 0; runs[i] = 0; deaths[i] = 0; attempts[i] = LEFT_OVER(i)
#ifdef BUG_ATTEMPTS_KEPT
#define LEFT_OVER(i) attempts[i]
#else
#define LEFT_OVER(i) 0 /* gw_claim does it */
#endif

/* --- frontend (ring.c) --- */

#define MINE (holder[slot] == me && life[slot] == ticket)
#define UNANSWERED (MINE && (phase[slot] == READY || phase[slot] == RUNNING))
#define ANSWERED (MINE && phase[slot] == DONE)
#define NUMBER (1 + me + FRONTENDS * sent)

inline claim_at(i) { phase[i] = CLAIMED; holder[i] = me; life[i]++; ticket = life[i]; slot = i }

inline claim() { /* when there is no room: room.pml */
    atomic {
        if
        :: phase[0] == FREE -> claim_at(0)
        :: phase[0] != FREE && phase[1] == FREE -> claim_at(1)
        fi;
        semaphore_claimed(slot)
    }
}

inline publish() {
#ifdef BUG_BIT_BEFORE_WORD
    set_ready_bit(slot);
#endif
    atomic { assert(MINE && phase[slot] == CLAIMED); request[slot] = NUMBER; phase[slot] = READY };
#ifndef BUG_BIT_BEFORE_WORD
    set_ready_bit(slot)
#endif
#ifndef PERFECT_DOORBELL
    ; ring_doorbell()
#endif
}

inline wait() {
    do
    :: ANSWERED -> break
    :: atomic { UNANSWERED -> semaphore_declare(slot) };
        if
        :: !UNANSWERED
        :: UNANSWERED -> semaphore_sleep(slot)
        fi
    od
}

inline release() {
    atomic {
        assert(ANSWERED); /* nobody took the slot away */
        assert(response[slot] == NUMBER || response[slot] == EXPIRED || (response[slot] == DIED && deaths[slot] >= MAX_ATTEMPTS));
        LET_GO(slot)
    }
}

inline cancel() { /* and a post, for threads that wait for the same ticket: semaphore.pml */
    if
    :: atomic { MINE && phase[slot] == READY -> LET_GO(slot) }
#ifdef BUG_CANCEL_FREES_RUNNING
    :: atomic { MINE && phase[slot] == RUNNING -> LET_GO(slot) }
#else
    :: atomic { MINE && phase[slot] == RUNNING -> phase[slot] = ABANDONED }
#endif
    :: ANSWERED; release()
    fi
}

proctype frontend(byte me) {
    byte slot, ticket, seen, sent;
    {
        do
        :: sent < REQUESTS ->
            claim();
            publish();
            if :: wait(); release() :: cancel() fi;
            atomic { sent++; slot = 0; ticket = 0; seen = 0 }
        :: atomic { sent == REQUESTS -> gone[me] = true; break }
        od
    } unless { atomic { KILLED; gone[me] = true; dead[me] = true; asleep_on[me] = NOBODY; slot = 0; ticket = 0; seen = 0 } }
}

/* --- owner and recovery (owner.c) --- */

inline finish(i, g, answer) {
    if
#ifdef BUG_POST_BEFORE_DONE
    :: life[i] == g && phase[i] == RUNNING; semaphore_post(i); atomic { phase[i] == RUNNING -> response[i] = answer; phase[i] = DONE }
#else
    :: atomic { life[i] == g && phase[i] == RUNNING -> response[i] = answer; phase[i] = DONE }; semaphore_post(i)
#endif
    :: atomic { life[i] == g && phase[i] == ABANDONED -> LET_GO(i) }
    fi
}

inline recover() { /* slot i: the later steps act on what the first one saw */
    if
#ifdef BUG_ABANDONED_FORGOTTEN
    :: phase[i] == ABANDONED
#else
    :: atomic { phase[i] == ABANDONED -> LET_GO(i) }
#endif
    :: atomic {
            phase[i] == RUNNING -> g = life[i];
#ifndef BUG_ATTEMPTS_NOT_COUNTED
            attempts[i]++
#endif
        };
        if
        :: attempts[i] >= MAX_ATTEMPTS -> finish(i, g, DIED)
        :: attempts[i] < MAX_ATTEMPTS -> untake()
        fi
    :: phase[i] == READY -> set_ready_bit(i)
    :: phase[i] == DONE ->
#ifdef BUG_NO_REPOST
        skip
#else
        semaphore_post_always(i)
#endif
    :: phase[i] == FREE || phase[i] == CLAIMED
    fi
}

inline untake() {
    if
#ifdef BUG_RECOVERY_STORES_WORD
    :: phase[i] = READY; set_ready_bit(i)
#else
    :: atomic { phase[i] == RUNNING -> phase[i] = READY };
#ifdef BUG_UNTAKE_SETS_NO_BIT
        skip
#else
        set_ready_bit(i)
#endif
    :: atomic { phase[i] == ABANDONED -> LET_GO(i) }
#endif
    fi
}

inline collect(i) {
    if
#ifdef BUG_NO_IN_BACKLOG
    :: (bits & BIT(i)) && phase[i] == READY ->
#else
    :: (bits & BIT(i)) && phase[i] == READY && in_backlog[i] != life[i] ->
#endif
        in_backlog[i] = life[i];
        assert(!(backlog ?? [eval(i), eval(life[i])]));
        backlog ! i,life[i]
    :: else
    fi
}

#if defined(STRAYS) && !defined(BUG_RUNNING_NOTED_LATE)
#define NOTE_RUNNING(i, g) running[i] = g
#else
#define NOTE_RUNNING(i, g) skip
#endif

inline take() {
    backlog ? i,g;
    if
#ifdef BUG_STALE_TICKET_TAKEN
    :: phase[i] == READY ->
#else
    :: phase[i] == READY && life[i] == g ->
#endif
        phase[i] = RUNNING; taken[i] = g; in_backlog[i] = 0;
        runs[i]++; assert(runs[i] <= MAX_ATTEMPTS);
        NOTE_RUNNING(i, g)
    :: else -> NOTE_RUNNING(i, 0)
    fi;
    i = 0; g = 0
}

inline answer(n) { i = n; g = taken[n]; taken[n] = 0; assert(life[n] == g && TAKEN(n)) } /* only the owner ends that: run_batch sees the slot itself */

inline serve() {
    do
    :: atomic { bits = ready; ready = 0 };
        atomic { collect(0); collect(1); bits = 0 };
        if
#ifdef PERFECT_DOORBELL
        :: empty(backlog) -> ready != 0
#else
        :: empty(backlog) -> park()
#endif
        :: atomic { nempty(backlog) -> take(); if :: nempty(backlog) -> take() :: true fi };
#ifdef BUG_RUNNING_NOTED_LATE
            atomic { running[0] = taken[0]; running[1] = taken[1] };
#endif
            do
            :: atomic { taken[0] -> answer(0) }; finish(i, g, request[i]); NOTE_RUNNING(i, 0)
            :: atomic { !taken[0] && taken[1] -> answer(1) }; finish(i, g, request[i]); NOTE_RUNNING(i, 0)
            :: atomic { !taken[0] && !taken[1] -> i = 0; g = 0; break }
            od
        fi
    od
}

proctype owner() {
    chan backlog = [2 * SLOTS] of { byte, byte }; /* slot, life */
    byte in_backlog[SLOTS], taken[SLOTS];         /* lives */
    byte bits, i, g;
    do
    ::  {
#ifndef PERFECT_DOORBELL
            owner_asleep = false;
#endif
            ready = 0;
            do :: i < SLOTS -> recover(); atomic { i++; g = 0 } :: atomic { i == SLOTS -> i = 0; g = 0; serving = true; break } od;
            serve()
        } unless {
            atomic {
                KILLED;
                serving = false; owner_queued = false;
                if :: TAKEN(0) -> deaths[0]++ :: else fi;
                if :: TAKEN(1) -> deaths[1]++ :: else fi;
                do :: backlog ? _,_ :: empty(backlog) -> break od;
                in_backlog[0] = 0; in_backlog[1] = 0; taken[0] = 0; taken[1] = 0; running[0] = 0; running[1] = 0; bits = 0; i = 0; g = 0;
                kill[_pid + 1] ! 0 /* the keeper with it */
            }
        }
    od
}

/* --- the owner's keeper thread --- */

inline reap(i) {
    atomic {
        serving && holder[i] != NOBODY && dead[holder[i]] && phase[i] != ABANDONED ->
        if
#ifndef BUG_REAPER_FREES_RUNNING
        :: phase[i] == RUNNING -> phase[i] = ABANDONED
#endif
        :: else -> LET_GO(i)
        fi
    }
}

inline free_stray(i) { /* gw_free_strays, and gw_reap: RUNNING or ABANDONED, but the owner does not run it; as only a scribble makes it */
    atomic { serving && (phase[i] == ABANDONED || (phase[i] == RUNNING && dead[holder[i]])) -> g = life[i]; was_running = phase[i] == RUNNING };
    if
    :: running[i] == g
    :: running[i] != g ->
        atomic {
            if
            :: life[i] == g && ((was_running && phase[i] == RUNNING) || (!was_running && phase[i] == ABANDONED)) -> LET_GO(i)
            :: else
            fi
        }
    fi;
    atomic { g = 0; was_running = false }
}

inline expire(i) {
    atomic { serving && phase[i] == READY -> phase[i] = RUNNING; g = life[i] };
    finish(i, g, EXPIRED);
    g = 0
}

proctype keeper() {
    byte g;
    bool was_running;
    do
    ::  {
            do
            :: reap(0)
            :: reap(1)
#ifdef DEADLINES
            :: expire(0)
#endif
#ifdef STRAYS
            :: free_stray(0)
#endif
#ifdef BUG_CLAIMED_REAPED_BY_TIME
            :: atomic { serving && phase[0] == CLAIMED -> LET_GO(0) }
#endif
            od
        } unless { atomic { KILLED; g = 0; was_running = false } }
    od
}

proctype fate() {
    do
    :: atomic { crashes > 0 -> crashes-- }
#ifndef ONLY_OWNERS_DIE
    :: atomic { crashes > 0 -> crashes--; kill[1] ! 0 }
    :: atomic { crashes > 0 -> crashes--; kill[2] ! 0 }
#endif
    :: atomic { crashes > 0 -> crashes--; kill[3] ! 0 }
    od
}

init {
    atomic { run frontend(0); run frontend(1); run owner(); run keeper(); run fate() };
    timeout; /* nobody can move any more */
    assert(gone[0] && gone[1]);
    assert(phase[0] == FREE && phase[1] == FREE)
}
