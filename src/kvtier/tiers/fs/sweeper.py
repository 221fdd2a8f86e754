"""Keeps a root within its limit: a thread in every process that uses it, one of which sweeps.

every member:  report to the ledger, stand for election     about once a second
the sweeper:   beat, and a step of its `Term`               every `interval_s`

The thread has an ordinary priority, and works in short slices instead: with a low one it would be
descheduled for long while it holds the interpreter's lock, and the tier's threads with it.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvtier.tiers.fs.election import Election
from kvtier.tiers.fs.term import REMOVERS, SweepSettings, Term

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.core.types import BlockKey
    from kvtier.tiers.fs.shared_space import SharedSpace

    OnEvicted = Callable[[str, Sequence[BlockKey]], None]

logger = logging.getLogger(__name__)

REPORT_S = 1.0


class Sweeper:
    """The sweeper thread of this process. `start` it, `close` it.

    Args:
        space: of this process; this thread makes its reports.
        settings: intervals, ages and watermarks.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        space: SharedSpace,
        settings: SweepSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._space = space
        self._settings = settings or SweepSettings()
        self._clock = clock
        self._election = Election(space.control, self._settings.takeover_s, clock)
        self._term: Term | None = None
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._listeners_lock = threading.Lock()
        self._listeners: dict[str, list[OnEvicted]] = {}
        self._causes: set[tuple[str, int | None]] = set()
        self._report_due = 0.0
        self._beat_due = 0.0
        self._file_now = 0
        self._errors = 0
        self._past: dict[str, float] = {}  # totals of past terms
        self._pool = ThreadPoolExecutor(REMOVERS, "kvtier-fs-remover")
        self._thread = threading.Thread(target=self._run, name="kvtier-fs-sweeper", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._space.on_refused = self._wake.set
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> bool:
        """End, after the file at hand; then somebody else is elected.

        Returns:
            Whether the thread has ended. If not, it hangs in the medium: leave its space open.
        """
        self._closing.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._pool.shutdown(wait=False)
        return not self._thread.is_alive()

    def listen(self, namespace: str, on_evicted: OnEvicted) -> None:
        """Have `on_evicted(namespace, keys)` called when this process evicts blocks of a namespace.

        It is called on the sweeper's thread and must be quick.
        """
        with self._listeners_lock:
            self._listeners.setdefault(namespace, []).append(on_evicted)

    def ignore(self, namespace: str, on_evicted: OnEvicted) -> None:
        """Undo `listen`."""
        with self._listeners_lock:
            self._listeners[namespace].remove(on_evicted)

    def figures(self) -> Mapping[str, float]:
        """Levels and totals by name; those of the inventory only while this process sweeps."""
        term = self._term
        levels: Mapping[str, float] = {} if term is None else term.levels()
        totals: Mapping[str, float] = {} if term is None else term.totals()
        past = self._past
        return {
            **self._space.figures(),
            "is_sweeper": float(term is not None),
            "sweeper_errors": self._errors,
            **levels,
            **{name: past.get(name, 0) + totals.get(name, 0) for name in {**past, **totals}},
        }

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                pause = self._step()
            except Exception as error:  # noqa: BLE001 - the thread must outlive any medium
                self._note(error)
                pause = REPORT_S
            self._wake.wait(pause)
            self._wake.clear()
        self._stand_down()

    def _step(self) -> float:
        """One look at everything; seconds until the next."""
        stands = self._clock() >= self._report_due
        if stands:
            self._report_due = self._clock() + REPORT_S
            self._space.report()
        if self._term is None:
            if not (stands and self._election.run()):
                return self._settings.interval_s
            logger.info("This process sweeps %s now", self._space.root)
            self._beat_due = 0.0
            self._term = Term(
                self._space,
                self._settings,
                self._pool,
                self._closing,
                self._may_go_on,
                self._tell,
                self._clock,
            )
        if not self._may_go_on():
            self._stand_down()
            return self._settings.interval_s
        return self._term.step(self._file_clock)

    def _may_go_on(self) -> bool:
        """Renew the claim about once a second; whether this is still the sweeper, and wanted."""
        if self._closing.is_set() or not self._election.won:
            return False
        if self._clock() >= self._beat_due:
            found = self._election.beat()
            if found is None:
                logger.warning("Another process sweeps %s now", self._space.root)
                return False
            self._beat_due = self._clock() + REPORT_S
            self._file_now = found
        return True

    def _file_clock(self) -> int:
        """Now by the clock of the file system, ns, at most about a second late."""
        self._may_go_on()
        return self._file_now

    def _stand_down(self) -> None:
        if self._term is not None:
            past, totals = self._past, self._term.totals()
            self._past = {
                name: past.get(name, 0) + totals.get(name, 0) for name in {**past, **totals}
            }
            self._term = None
        self._election.stand_down()

    def _note(self, error: Exception) -> None:
        """Count a failure, and log the first of its cause."""
        self._errors += 1
        cause = (type(error).__name__, error.errno if isinstance(error, OSError) else None)
        if cause not in self._causes:
            self._causes.add(cause)
            logger.warning(
                "Sweeping %s failed and will be tried again: %s: %s (further ones are counted, not "
                "logged)",
                self._space.root,
                type(error).__name__,
                error,
                exc_info=not isinstance(error, OSError),
            )

    def _tell(self, namespace: str, keys: Sequence[BlockKey]) -> None:
        with self._listeners_lock:
            listeners = list(self._listeners.get(namespace, ()))
        for on_evicted in listeners:
            on_evicted(namespace, keys)
