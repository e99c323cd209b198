/* Ready bits and the owner's doorbell (native/wake.c, gw_publish, gw_collect). P1-P4 and O1-O5 are the steps of the proof in wake.c. */
byte ready;                         /* one bit a slot */
bool owner_asleep, owner_queued;    /* the flag that the owner sets; whether the kernel has it queued on the bell */
bool bell_moved;                    /* the bell is only ever compared with what the owner read at O1: since then, has it moved? */

inline set_ready_bit(i) { ready = ready | BIT(i) } /* P1 */

inline ring_doorbell() {
    if
#ifdef BUG_WAKER_CLEARS_FLAG
    :: atomic { owner_asleep -> owner_asleep = false };
#else
    :: owner_asleep -> /* P2 */
#endif
#ifndef BUG_BELL_STANDS_STILL
        bell_moved = true; /* P3 */
#endif
        owner_queued = false /* P4 */
    :: !owner_asleep
    fi
}

inline park() {
#ifdef BUG_PARK_LOOKS_FIRST
    if
    :: ready != 0
    :: ready == 0 ->
        bell_moved = false;
        owner_asleep = true;
        sleep_on_bell()
    fi;
#else
    bell_moved = false;  /* O1 */
    owner_asleep = true; /* O2 */
    if
    :: ready != 0        /* O3 */
    :: ready == 0 ->
        sleep_on_bell()
    fi;
#endif
    owner_asleep = false /* O5 */
}

inline sleep_on_bell() { /* O4 */
    atomic { if :: !bell_moved -> owner_queued = true :: else fi };
    !owner_queued
}
