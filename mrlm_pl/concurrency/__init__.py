"""The threads and event loops of a process, and which of them does what.

``MainThread``
    Lightning's loops, all updates of the weights, and checkpoints. While it waits for episodes it samples:
    ``ComputeQueue.serve_during`` runs the engine's computations in the thread that waits, so that torch computes in
    one thread at a time.
``mrlm-event-loop`` (:class:`~.event_loop.EventLoopThread`)
    Plays episodes: one coroutine per rollout (lockstep waves) or per episode (asynchronous mode). It never blocks: it
    passes sampling to a compute queue, environments that block to workers, and awaits connections and ``async``
    environments itself. Each player has its own; the players of an asynchronous collector share one.
    :func:`~.event_loop.shared_loop` is one of the process, for the user's ``async`` programs and reward functions, so
    that a client which they share lives on; the gateway has its own, so that no program blocks it.
``mrlm-event-loop-watch``
    Checks that the shared loop, or an asynchronous collector's, is not blocked, and names the blocking line.
``environment-worker`` (:class:`~.calls.Workers`)
    Calls environments that block, each within a deadline; a thread whose call is late is abandoned and replaced. A
    player has ``data.workers`` of them, ``mrlm serve`` its ``--threads``.
compute queue (:class:`~.event_loop.ComputeQueue`)
    One computation at a time on the engine: in the waiting thread, or in the queue's own thread without one, as in
    asynchronous mode while the learner updates.
``mrlm-episodes`` (:class:`~mrlm_pl.episode_files.EpisodeWriter`)
    Writes episode files behind the run.

A call that blocks belongs to workers, one that computes with torch to a compute queue, one that waits to the loop.
"""
