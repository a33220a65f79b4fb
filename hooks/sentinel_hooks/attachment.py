"""What every adapter does with its Run: attach with what the framework knows, name phases, note a stop, end once."""

import contextlib
import difflib
from collections.abc import Mapping
from os import PathLike
from typing import Any, TypedDict

import sentinel
from sentinel.errors import MisuseError


class Options(TypedDict, total=False):
    """What a person may say to an adapter: the arguments of `sentinel.attach` that a framework cannot know."""

    mode: str
    guard: str
    name: str
    run_id: str
    config: Mapping[str, Any]
    settings: str | PathLike[str] | Mapping[str, Any]
    checkpoint_dir: str | PathLike[str]
    ema: Any
    state: Mapping[str, Any]


class Attachment:
    """Of one callback, on every rank: options before training, a Run during it, options again after it.

    Copies and pickles carry the options alone: a Run belongs to one process and one model.
    """

    run: sentinel.Run | None
    stopped: str  # the reason, once the run has been told to stop
    _in_phase: bool
    _phases: contextlib.ExitStack

    def __init__(self, options: Options) -> None:
        for name in options.keys() - Options.__annotations__.keys():
            near = difflib.get_close_matches(name, Options.__annotations__, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(Options.__annotations__))}"
            raise MisuseError(f"unknown option {name!r}; {hint}")
        self._options: Options = options
        self._forget()

    def begin(self, model: Any, optimizer: Any, *, config: Mapping[str, Any], **found: Any) -> None:
        """Attach, once the framework has built everything; what a person said wins over what the framework knows.

        Raises what `sentinel.attach` raises for wrong options.
        """
        self.end(RuntimeError("training began anew before it had ended"))
        said: dict[str, Any] = {**found, **self._options, "config": {**config, **self._options.get("config", {})}}
        self._forget()
        self.run = sentinel.attach(model, optimizer, on_stop=self._stop, **said)

    def enter(self, phase: str) -> None:
        """Until `leave`: the loop does something else than training. Entering again changes nothing."""
        if self.run is not None and not self._in_phase:
            self._phases.enter_context(self.run.phase(phase))
            self._in_phase = True

    def leave(self) -> None:
        self._phases.close()
        self._in_phase = False

    def end(self, error: BaseException | None = None) -> None:
        """Detach; `error` is what ended training, if something did. Without a Run, as after a first end, a no-op."""
        run, self.run = self.run, None
        if run is not None:
            self.leave()
            run.detach(error)

    def _stop(self, reason: str) -> None:
        self.stopped = reason or "stopped"

    def _forget(self) -> None:
        self.run, self.stopped, self._in_phase = None, "", False
        self._phases = contextlib.ExitStack()

    def __getstate__(self) -> Options:
        return self._options

    def __setstate__(self, options: Options) -> None:
        self._options = options
        self._forget()
