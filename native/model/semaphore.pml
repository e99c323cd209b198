/* The slot's semaphore (native/semaphore.c): no sleeper is left asleep, whoever is killed and whatever earlier lives of the slot left behind.
 *
 * Two processes use one slot in turn. Each has a thread that claims, publishes and waits, and one that cancels, whenever it likes: so a waiter may find
 * that its life of the slot is over, and the slot in its next life, in another process, with a waiter of its own. The owner's post may come late, too,
 * when the slot is in its next life. Owner and processes are killed anywhere. */
#define SLOTS 1
#include "common.pml"

#ifndef LIVES
#define LIVES 1
#endif
#ifndef CANCELS
#define CANCELS true
#endif

mtype phase = FREE; byte holder = NOBODY; byte life; /* the slot's word, moved as one */
byte ticket[FRONTENDS];                              /* the life that the process waits for; 0: none */
bool dead[FRONTENDS], gone[FRONTENDS];
bool stopped;                                        /* the owner's state says so: whoever waits is to leave */

#define MINE (holder == me && life == ticket[me])
#define UNANSWERED (MINE && (phase == READY || phase == RUNNING))
#define ANSWERED (MINE && phase == DONE)
#define LET_GO phase = FREE; holder = NOBODY

#ifdef PERMITS
#include "permits.pml"
#else
#include "sequence.pml"
#endif

inline wait() { /* gw_wait */
    do
    :: atomic { ANSWERED -> LET_GO; break }
    :: !UNANSWERED && !ANSWERED -> semaphore_stale(0); break /* cancelled */
    :: UNANSWERED ->
        semaphore_declare(0);
        if
#if defined(BUG_NO_SECOND_LOOK) || defined(PERMITS)
        :: semaphore_sleep(0)
#else
        :: !UNANSWERED
        :: UNANSWERED ->
#ifdef BUG_STATE_LOOKED_AT_LATE
            if :: stopped && woken -> break :: else fi;
#else
            if :: stopped -> break :: !stopped fi;
#endif
            semaphore_sleep(0);
            woken = true
#endif
        fi
    od
}

proctype waiter(byte me) {
    byte lives, seen;
    bool woken;
    {
        do
        :: lives < LIVES ->
            if
            :: stopped -> gone[me] = true; break
            :: !stopped
            fi;
            if
            :: atomic { phase == FREE -> phase = CLAIMED; holder = me; life++; ticket[me] = life }
            :: stopped -> gone[me] = true; break
            fi;
            semaphore_claimed(0);
            phase = READY;
            wait();
            atomic { lives++; ticket[me] = 0; seen = 0; woken = false }
        :: atomic { lives == LIVES -> gone[me] = true; break }
        od;
        false /* a process that is done may still be killed, while its other thread posts */
    } unless { atomic { KILLED; dead[me] = true; gone[me] = true; asleep_on[me] = NOBODY; kill[_pid + 2] ! 0 } } /* then its other thread */
}

proctype canceller(byte me) {
    {
        do
        :: atomic { CANCELS && ticket[me] && UNANSWERED -> if :: phase == READY -> LET_GO :: phase == RUNNING -> phase = ABANDONED fi };
#ifdef BUG_CANCEL_TRUSTS_FLAG
            semaphore_post(0)
#else
            semaphore_post_always(0)
#endif
        :: break /* nobody may count on being cancelled */
        od;
        false
    } unless { KILLED }
}

inline recover() { /* gw_recover */
    if
    :: atomic { phase == RUNNING -> phase = READY }
    :: atomic { phase == ABANDONED -> LET_GO }
    :: phase == DONE ->
#if defined(BUG_NO_REPOST)
        skip
#elif defined(BUG_REPOST_DOES_NOT_WAKE)
        posts[0]++
#else
        semaphore_post_always(0)
#endif
    :: phase == FREE || phase == CLAIMED || phase == READY
    fi
}

inline retire() { /* gw_set_state, gw_wake_all */
    stopped = true;
    if
    :: phase != FREE -> semaphore_post(0)
    :: phase == FREE
    fi
}

proctype owner() {
    do
    ::  {
            recover();
            do
            :: atomic { phase == READY && !stopped -> phase = RUNNING };
                if /* finish */
                :: atomic { phase == RUNNING -> phase = DONE }; semaphore_post(0)
                :: atomic { phase == ABANDONED -> LET_GO }
                fi
#ifdef STOPS
            :: !stopped -> retire()
#endif
            od
        } unless { KILLED }
    od
}

proctype reaper() {
    do
    :: atomic { holder != NOBODY && dead[holder] && phase != ABANDONED -> if :: phase == RUNNING -> phase = ABANDONED :: else -> LET_GO fi }
    od
}

proctype fate() {
    do
    :: atomic { crashes > 0 -> crashes-- }
    :: atomic { crashes > 0 -> crashes--; kill[1] ! 0 }
    :: atomic { crashes > 0 -> crashes--; kill[2] ! 0 }
    :: atomic { crashes > 0 -> crashes--; kill[5] ! 0 }
    od
}

init {
    atomic { run waiter(0); run waiter(1); run canceller(0); run canceller(1); run owner(); run reaper(); run fate() };
    timeout; /* nobody can move any more */
    assert(gone[0] && gone[1]);
    assert(phase == FREE || stopped)
}
