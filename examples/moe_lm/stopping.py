"""Ctrl-C and SIGTERM: heard at once, whatever the process waits for.

Python runs a signal's handler in the main thread, and not before that comes back from a wait in C++, which a peer
that is gone or stopped makes long. So a thread hears the signal. It lets the main thread finish what is worth
finishing, a step and its checkpoint, and ends the process where that takes too long.
"""

from __future__ import annotations

import os
import select
import signal
import statistics
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # the exit status
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LAUNCHER = "TRAIN_MOE_LAUNCHER"  # environment variable: the process that started this rank
PERIOD = 0.2  # seconds between two looks
#: seconds after which a second signal is a second wish: a terminal and a launcher both send the first.
AGAIN, AGAIN_IN_RANK = 1.0, 0.5
NEVER = float("inf")
STEP, SAVING, EVALUATING = "a step", "saving", "evaluating"
#: seconds that something may take once a stop was asked for: while nothing is known of it, and at least.
PATIENCE = {STEP: (10.0, 3.0), SAVING: (30.0, 5.0), EVALUATING: (30.0, 30.0)}


class StopRequest:
    """Set by SIGINT or SIGTERM; the training loop looks at it between steps.

    What the process does is told by :meth:`during`. Where nothing would be lost, a signal ends it at once; elsewhere
    it may take so many seconds, and a second Ctrl-C ends it. With the patience :data:`NEVER` the main thread answers.
    """

    def __init__(self) -> None:
        self.requested = False
        self.number = signal.SIGINT
        self.what, self.patience, self.since = "the start", 0.0, time.monotonic()
        self.resumable = ""  # what a run that ends here goes on from
        self.heard_at: float | None = None
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
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a launcher blocks them until here
        threading.Thread(target=self._listen, name="stop", daemon=True).start()

    def during(self, what: str, patience: float | None = None) -> None:
        """From now on the process does ``what``, which may take ``patience`` seconds more after a signal.

        Without a number: ten times as long as it took here before, as told by :meth:`done`.
        """
        if patience is None:
            first, least = PATIENCE[what]
            known = self.seconds[what][-20:]
            patience = max(least, 10 * statistics.median(known)) if known else first
        self.what, self.patience, self.since = what, patience, time.monotonic()

    def done(self) -> None:
        """Ends what :meth:`during` began."""
        self.seconds[self.what].append(time.monotonic() - self.since)

    def leave(self) -> NoReturn:
        """Ends the process now, from any thread, with a last line: one for all the ranks of a launcher."""
        if self.launcher is not None and self.rank > 0:
            os._exit(INTERRUPTED)
        rank = f"rank {self.rank}: " if "RANK" in os.environ else ""
        kept = f"; --resume goes on after step {self.resumable}" if self.resumable else ""
        self._say(f"train_moe: {rank}interrupted during {self.what}, left at once{kept}")
        os._exit(INTERRUPTED)

    @staticmethod
    def end(status: int) -> NoReturn:
        """Ends a process that is done, without the second that Python and torch take for it.

        In it a thread of Gloo that still holds a tensor of the last collective would abort the process.
        """
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(status)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._hear(number)

    def _hear(self, number: int) -> None:
        now = time.monotonic()
        if self.heard_at is None:
            self.number, self.heard_at, self.requested = signal.Signals(number), now, True
        elif number == signal.SIGINT and now - self.heard_at > (AGAIN_IN_RANK if self.launcher else AGAIN):
            self.again = True

    def _listen(self) -> None:
        told = False
        while True:
            if select.select([self.reader], [], [], PERIOD)[0]:
                for number in os.read(self.reader, 64):
                    if number in SIGNALS:
                        self._hear(number)
            if self.launcher is not None and os.getppid() != self.launcher:
                self._hear(signal.SIGTERM)
            if self.heard_at is None or self.patience == NEVER:
                continue
            if self.again or time.monotonic() - max(self.heard_at, self.since) >= self.patience:
                self.leave()
            if not told and self.rank == 0:
                self._say(
                    f"train_moe: stopping after {self.what}; Ctrl-C again leaves at once, without saving"
                )
            told = True

    def _say(self, text: str) -> None:
        with suppress(OSError):  # whoever read this may have left
            os.write(2, f"\n{text}\n".encode())
