"""What the daemon asked for and the loop has not done yet. At most one turn at a time.

The link's thread writes, the loop's thread reads. A healthy step costs the loop one attribute read (`turn`).
"""

import threading
import time
from collections.abc import Callable

from sentinel.records import Ack, Command, Word
from sentinel.vocabulary import Action, Quality, Reason

WORD_SECONDS = 1.0  # how long a rank holds at apply_at for commit or abort


class Turn:
    """A prepared command and the word on it."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.word: Word | None = None
        self._told = threading.Event()

    def tell(self, word: Word | None) -> None:
        self.word = word
        self._told.set()

    def verdict(self) -> Word:
        """Commit or abort; waits a second at most, and then it is abort."""
        self._told.wait(WORD_SECONDS)
        return self.word or Word(self.command.id, commit=False, reason=Reason.NO_WORD)


class Inbox:
    """Judges commands on arrival and keeps the accepted one until its boundary."""

    def __init__(
        self,
        run_id: str,
        answer: Callable[[Ack], object],
        position: Callable[[], tuple[int, int, str]],
        candidates: Callable[[], list[tuple[int, Quality, str]]],
        refusal: Callable[[Command], Reason],
    ) -> None:
        """`position` gives (generation, step, phase); `refusal` gives Reason.OK if the loop can do a command."""
        self.turn: Turn | None = None
        self.closed = False
        self.attempt = 0
        self._run_id = run_id
        self.answer = answer
        self._position = position
        self._candidates = candidates
        self._refusal = refusal
        self._sequence = 0
        self.pause_id = ""
        self.released = threading.Event()

    def command(self, command: Command) -> None:
        """Prepared or refused, with the reason; called on the link's thread."""
        generation, step, _ = self._position()
        reason = self._judge(command)
        if reason is Reason.OK:
            self._sequence = command.sequence
            turn = Turn(command)
            self.turn = turn
            # The loop may have passed apply_at while we judged; then it never saw this turn before its boundary.
            _, step, _ = self._position()
            if step >= command.apply_at:
                self.turn, reason = None, Reason.TOO_LATE
                turn.tell(None)
        prepared = reason is Reason.OK
        offered = self._candidates() if prepared and command.action is Action.ROLLBACK else []
        self.answer(
            Ack(
                seq=0,
                time=time.time(),
                command_id=command.id,
                state="prepared" if prepared else "refused",
                reason=reason,
                generation=generation,
                step=step,
                candidates=offered,
            )
        )

    def word(self, word: Word) -> None:
        turn = self.turn
        if turn is not None and turn.command.id == word.command_id:
            turn.tell(word)
        elif self.pause_id == word.command_id and not word.commit:
            self.released.set()

    def lost(self) -> None:
        """The connection is gone: no word will come for what is being prepared."""
        turn = self.turn
        if turn is not None and turn.word is None:
            turn.tell(None)

    def take(self) -> None:
        """The turn was carried out or aborted."""
        self.turn = None

    def _judge(self, command: Command) -> Reason:
        generation, step, phase = self._position()
        checks = (
            (self.closed, Reason.DETACHED),
            (command.run_id != self._run_id, Reason.WRONG_RUN),
            (bool(self.attempt) and command.attempt != self.attempt, Reason.WRONG_RUN),
            (command.generation != generation, Reason.STALE_GENERATION),
            (command.sequence <= self._sequence, Reason.REPLAYED),
            (time.monotonic() > command.not_after, Reason.EXPIRED),
            (self.turn is not None or bool(self.pause_id), Reason.BUSY),
            (phase != "train", Reason.WRONG_PHASE),
            (step >= command.apply_at, Reason.TOO_LATE),
        )
        for failed, reason in checks:
            if failed:
                return reason
        return self._refusal(command)
