"""Handles Ctrl-C and SIGTERM at once, even while the process waits in C++.

Python runs signal handlers in the main thread, and only after it returns from C++. A collective with a lost or
suspended rank can take minutes. So a separate thread receives the signals. It lets the main thread finish a step and
its checkpoint, and exits the process if that takes too long.
"""

from __future__ import annotations

import os
import select
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # the exit status
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAUNCHER = "TRAIN_MOE_LAUNCHER"  # environment variable: process id of the launcher of this rank
PERIOD = 0.2  # polling interval in seconds
#: seconds after which a second signal counts as a second Ctrl-C: the terminal and the launcher both send the first.
AGAIN, AGAIN_IN_RANK = 1.0, 0.5
NEVER = float("inf")
STEP, SAVING, EVALUATING = "a step", "saving", "evaluating"
#: seconds that a task may take after a signal: while its usual duration is unknown, and at least.
PATIENCE = {STEP: (10.0, 3.0), SAVING: (30.0, 5.0), EVALUATING: (30.0, 30.0)}


class StopRequest:
    """Set by SIGINT or SIGTERM; the training loop checks it between steps.

    :meth:`during` says what the process is doing. If nothing would be lost, a signal exits at once. Otherwise the task
    gets some seconds to finish, and a second Ctrl-C exits. With the patience :data:`NEVER` the main thread decides.
    """

    def __init__(self) -> None:
        self.requested = False
        self.number = signal.SIGINT
        self.what, self.patience, self.since = "the start", 0.0, time.monotonic()
        #: returns the step from which --resume would continue, "" if there is none.
        self.resumable: Callable[[], str] = lambda: ""
        self.signaled_at: float | None = None
        self.again = False
        self.seconds: dict[str, list[float]] = {what: [] for what in PATIENCE}
        self.rank = int(os.environ["RANK"]) if os.environ.get("RANK", "").isdecimal() else 0
        launcher = os.environ.get(LAUNCHER, "")
        self.launcher = int(launcher) if launcher.isdecimal() and int(launcher) == os.getppid() else None
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher has blocked them in this process
        threading.Thread(target=self._listen, name="stop", daemon=True).start()

    def during(self, what: str, patience: float | None = None) -> None:
        """Starts the task ``what``, which may take ``patience`` more seconds after a signal.

        By default ten times its usual duration, which :meth:`done` measures.
        """
        if patience is None:
            first, least = PATIENCE[what]
            known = self.seconds[what][-20:]
            patience = max(least, 10 * statistics.median(known)) if known else first
        self.what, self.patience, self.since = what, patience, time.monotonic()

    def done(self) -> None:
        """Ends the task that :meth:`during` started, and records its duration."""
        self.seconds[self.what].append(time.monotonic() - self.since)

    def leave(self) -> NoReturn:
        """Exits the process, from any thread, with a last line; of a launcher's ranks only rank 0 prints it."""
        if self.launcher is not None and self.rank > 0:
            os._exit(INTERRUPTED)
        rank = f"rank {self.rank}: " if "RANK" in os.environ else ""
        step = ""
        with suppress(OSError):
            step = self.resumable()
        kept = f"; --resume continues after step {step}" if step else ""
        self._say(f"train_moe: {rank}interrupted during {self.what}, exited at once{kept}")
        os._exit(INTERRUPTED)

    @staticmethod
    def end(status: int) -> NoReturn:
        """Exits a process that is done, without the second that the shutdown of Python and torch takes.

        During that second a Gloo thread that still has a tensor of the last collective would abort the process.
        """
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(status)

    def _handler(self, number: int, frame: FrameType | None) -> None:
        self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self.signaled_at is None:
            self.number, self.signaled_at, self.requested = signal.Signals(number), now, True
        elif number == signal.SIGINT and now - self.signaled_at > (AGAIN_IN_RANK if self.launcher else AGAIN):
            self.again = True

    def _listen(self) -> None:
        announced = False
        while True:
            if select.select([self.reader], [], [], PERIOD)[0]:
                for number in os.read(self.reader, 64):
                    if number in SIGNALS:
                        self._on_signal(number)
            if self.launcher is not None and os.getppid() != self.launcher:
                self._on_signal(signal.SIGTERM)
            if self.signaled_at is None or self.patience == NEVER:
                continue
            if self.again or time.monotonic() - max(self.signaled_at, self.since) >= self.patience:
                self.leave()
            if not announced and self.rank == 0:
                self._say(
                    f"train_moe: stopping after {self.what}; Ctrl-C again exits at once, without saving"
                )
            announced = True

    def _say(self, text: str) -> None:
        with suppress(OSError):  # the reader may have exited
            os.write(2, f"\n{text}\n".encode())
