/* What the models share: the slot's word, the kernel's futex, death.
 *
 * A step of a model is one atomic access to shared memory, or one system call; `atomic { }` around several statements makes them one step. A
 * compare-and-swap loop is the one step of its success, as a failed turn changes nothing. Between any two steps anybody else may run, for any length of
 * time: so pauses need no modelling.
 *
 * Futex. The kernel compares and queues in one step, and a wake reaches only those who are queued by then:
 *     wait:  atomic { if :: word == seen -> asleep = true :: else fi };  !asleep
 *     wake:  asleep = false
 * Nothing ends by time. Each model's `init` waits for `timeout`, Spin's word for "nobody can move any more", and then demands that nobody is left asleep
 * who should not be, and that every slot has come back.
 *
 * Death. A thread is `{ body } unless { KILLED }`: the kernel may end it between any two of its steps. `fate` has CRASHES deaths to deal out, and may keep
 * them: if it could not, a sleeper that the last death happens to save would pass for one that was woken.
 *
 * Bugs. A BUG_... switch puts one fault in; native/model/run says which must be caught. */

#define FRONTENDS 2
#ifndef SLOTS
#define SLOTS 2
#endif
#define NOBODY 255
#define BIT(i) (1 << (i))
#ifndef CRASHES
#define CRASHES 2
#endif

mtype = { FREE, CLAIMED, READY, RUNNING, DONE, ABANDONED }

byte crashes = CRASHES;
chan kill[8] = [0] of { bit }; /* by the pid that `init` gives: its children count from 1 */
#define KILLED kill[_pid] ? _
