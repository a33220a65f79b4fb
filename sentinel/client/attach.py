"""Attach sentinel to a training loop: check the arguments, build the parts, start watching."""

import atexit
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import psutil
from torch import nn

from sentinel import places as places_module
from sentinel import wire
from sentinel.client import identity, interception, plain
from sentinel.client.link import Link
from sentinel.client.loop import Loop
from sentinel.client.outbox import Outbox
from sentinel.client.probes import catalogue
from sentinel.client.probing import Probing
from sentinel.client.rank import Rank, current
from sentinel.client.ring import Ring
from sentinel.client.run import AttachedRun, Run, exit_status
from sentinel.client.subject import Subject, check_shared
from sentinel.client.voice import say
from sentinel.client.wrapping import Unwrapped, Wrappers, unwrap
from sentinel.config import Settings, load_client, run_sections
from sentinel.errors import MisuseError, SettingsError
from sentinel.places import Places
from sentinel.records import Hello, RunStart
from sentinel.vocabulary import Mode

POWER = (Mode.OFF, Mode.OBSERVE, Mode.PROTECT)

_attached: "weakref.WeakSet[AttachedRun]" = weakref.WeakSet()
_process_hooks: list[int] = []  # pids that have our atexit and fork hooks


def attach(
    model: nn.Module,
    optimizer: Any,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    state: Mapping[str, Any] | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    mode: str = "protect",
    guard: str | None = None,
    name: str | None = None,
    run_id: str | None = None,
    config: Mapping[str, Any] | None = None,
    settings: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    step: int = 0,
    on_stop: Callable[[str], object] | None = None,
) -> Run:
    """Watch and protect a training run; the returned Run may be ignored.

    Called once per process, on every rank, after model and optimizer exist. `model` may be wrapped or compiled;
    `optimizer` is one, a wrapper, or a list. What is handed over besides (`scheduler`, `scaler`, `ema`, objects with
    state in `state`) is part of every snapshot and rollback. `mode`: "protect" acts, "observe" only watches, "off"
    does nothing; SENTINEL_MODE can only lower it. `settings`: path of a sentinel.toml, or its tree. `on_stop` is for
    loops that have an end of their own, as those of frameworks do: it is called with the reason at a step boundary,
    once, where RunStopped would be raised.

    Raises MisuseError (a ValueError) for wrong arguments and SettingsError for wrong settings, at once. Trouble of
    the environment (home, port, daemon) is said once on stderr and training goes on.
    """
    chosen = _settings(settings, guard)
    power = _mode(mode, chosen.mode)
    described = _Described(name, config, settings, checkpoint_dir)
    if not isinstance(cast("Any", model), nn.Module):
        raise MisuseError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    if not isinstance(cast("Any", step), int) or isinstance(step, bool) or step < 0:
        raise MisuseError(f"step is {step!r}; pass the number of updates already made, 0 for a new run")
    if on_stop is not None and not callable(on_stop):
        raise MisuseError(f"on_stop is {on_stop!r}; pass a function of one argument, the reason")
    unwrapped = _unwrapped(optimizer)
    optimizers = [one.inner for one in unwrapped]
    check_shared(model, optimizers)
    rank = current(os.environ)
    resolved = identity.resolve_run_id(run_id, os.environ, rank)
    driven = [one for each in unwrapped for one in (each.inner, *each.outer)]
    found = scheduler if scheduler is not None else _schedulers_of(driven)
    wrappers = [Wrappers(one.outer) for one in unwrapped]
    subject = Subject(model, optimizers, wrappers=wrappers, scheduler=found, scaler=scaler, ema=ema, state=state)
    if power is Mode.OFF:
        return Run(resolved, Mode.OFF, step)
    _release(model, optimizers)
    if checkpoint_dir is not None:
        say(
            f"checkpoint_dir={os.fspath(checkpoint_dir)!r} is not used: checkpoints on disk come with a later version"
        )
    run = _build(subject, chosen, described, run_id=_distinct(resolved), mode=power, rank=rank, step=step)
    run.on_stop(on_stop)
    _attached.add(run)
    if rank.rank == 0:
        say(_greeting(run, chosen))
    return run


def _unwrapped(given: Any) -> list[Unwrapped]:
    found = [unwrap(one) for one in (given if isinstance(given, list | tuple) else [given])]
    if not found:
        raise MisuseError("optimizer is an empty list; pass at least one optimizer")
    if len({id(one.inner) for one in found}) < len(found):
        raise MisuseError(f"optimizer is a list of {len(found)} that names one twice; name each once")
    return found


class _Described:
    """What the user said about the run, for its first message."""

    def __init__(self, name: Any, config: Any, settings: Any, checkpoint_dir: Any) -> None:
        if not isinstance(name, str | None):
            raise MisuseError(f"name is {name!r}; pass a text, or leave it out")
        if config is not None and not isinstance(config, Mapping):
            raise MisuseError(f"config is a {type(config).__name__}; pass a dict, of a namespace vars(...)")
        if checkpoint_dir is not None and not isinstance(checkpoint_dir, str | os.PathLike):
            raise MisuseError(f"checkpoint_dir is {checkpoint_dir!r}; pass a path")
        self.name = plain.text(name) if name else identity.default_name(sys.argv)
        self.config = config
        is_path = isinstance(settings, str | os.PathLike)
        self.settings_path = (
            str(Path(settings).absolute()) if is_path else os.environ.get("SENTINEL_SETTINGS") or None
        )


def _build(
    subject: Subject,
    settings: Settings,
    described: _Described,
    *,
    run_id: str,
    mode: Mode,
    rank: Rank,
    step: int,
) -> AttachedRun:
    outbox = Outbox(settings.outbox.records)
    loop = Loop(subject, settings, outbox.push, step)
    ring = Ring(settings.snapshot, subject, outbox.push, rank.local_world_size)
    run = AttachedRun(
        run_id, mode, loop=loop, ring=ring, outbox=outbox, settings=settings, world_size=rank.world_size
    )
    loop.use(Probing(catalogue.build(subject, loop.watched, settings), run.on_trouble))
    process_start, nonce = psutil.Process().create_time(), secrets.token_hex(8)
    outbox.push(_start(run, settings, rank, process_start, described))
    link = Link(
        places=_places(),
        hello=lambda: Hello(
            wire.VERSION, run_id, rank.rank, rank.world_size, nonce, os.getpid(), process_start, outbox.last_seq
        ),
        outbox=outbox,
        receiver=run,
        settings=settings,
        settings_path=described.settings_path,
        may_start_daemon=rank.local_rank == 0,
    )
    _hook_process()
    run.begin(link)
    return run


def _start(run: AttachedRun, settings: Settings, rank: Rank, process_start: float, described: _Described) -> RunStart:
    known = identity.provenance(described.config)
    return RunStart(
        seq=0,
        time=time.time(),
        step=run.step,
        name=described.name,
        mode=run.mode,
        world_size=rank.world_size,
        local_rank=rank.local_rank,
        pid=os.getpid(),
        process_start=process_start,
        host=known.host,
        argv=known.argv,
        cwd=known.cwd,
        git=known.git,
        packages=known.packages,
        config=known.config,
        settings=run_sections(settings),
        devices=known.devices,
        can=["rollback", "skip_data", "pause", "stop"] if settings.rollback.enabled else ["pause", "stop"],
    )


def _settings(given: Any, guard: str | None) -> Settings:
    if given is not None and not isinstance(given, str | os.PathLike | Mapping):
        raise SettingsError(f"settings is a {type(given).__name__}; pass the path of a sentinel.toml or a dict")
    overlay: dict[str, Any] = {} if guard is None else {"reflex": {"guard": guard}}
    return load_client(given, os.environ, overlay)


def _mode(argument: str, in_settings: Mode) -> Mode:
    """The weakest of the argument, the settings and SENTINEL_MODE: nothing raises a run's power silently."""
    asked = [("mode", argument), ("SENTINEL_MODE", os.environ.get("SENTINEL_MODE") or Mode.PROTECT)]
    modes = [in_settings]
    for source, text in asked:
        if text not in tuple(Mode):
            raise MisuseError(f"{source} is {text!r}; it must be one of protect, observe, off")
        modes.append(Mode(text))
    return min(modes, key=POWER.index)


def _places() -> Places:
    return places_module.find(os.environ)


def _release(model: nn.Module, optimizers: list[Any]) -> None:
    """The same model again: the older Run ends. Another model with one of these optimizers: an error."""
    for other in list(_attached):
        if other.detached:
            continue
        subject = other.subject
        if subject.gone:
            other.detach()
        elif subject.model is model:
            say(f"this model is attached to run {other.run_id} already: that one is detached")
            other.detach()
        elif any(mine is theirs for mine in optimizers for theirs in subject.optimizers):
            raise MisuseError(
                f"this optimizer belongs to run {other.run_id} of another model; "
                "attach each optimizer to one run, or detach the other run first"
            )


def _distinct(run_id: str) -> str:
    """Two models in one process are two runs."""
    taken = {other.run_id for other in _attached if not other.detached}
    number, candidate = 2, run_id
    while candidate in taken:
        candidate, number = f"{run_id}.{number}", number + 1
    return candidate


def _schedulers_of(optimizers: list[Any]) -> list[Any] | None:
    """Schedulers that drive these optimizers although nobody handed them over: one pass over the heap, here only."""
    import gc

    from torch.optim.lr_scheduler import LRScheduler

    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, LRScheduler)}
    if not kinds:
        return None
    found = [one for one in objects if type(one) in kinds]
    mine = [one for one in found if any(getattr(one, "optimizer", None) is optimizer for optimizer in optimizers)]
    return mine or None


def _greeting(run: Run, settings: Settings) -> str:
    if run.mode is Mode.OBSERVE:
        may = "only watches"
    else:
        may = "may " + ", ".join(name for name in settings.respond.names() if name in SHOWN)
    return (
        f"run {run.run_id} ({run.mode}: {may}); look: sentinel postmortem {run.run_id}; turn off: SENTINEL_MODE=off"
    )


SHOWN = ("skip_update", "rollback", "pause", "stop")


def _hook_process() -> None:
    """Once per process: end cleanly with it, and stay out of forked children."""
    if os.getpid() in _process_hooks:
        return
    first = not _process_hooks
    _process_hooks.append(os.getpid())
    atexit.register(_at_exit, os.getpid())
    if first:
        os.register_at_fork(after_in_child=_in_forked_child)


def _at_exit(pid: int) -> None:
    if pid != os.getpid():
        return
    status, error = exit_status()
    for run in list(_attached):
        run.end(status, error)


def _in_forked_child() -> None:
    interception.forget_all()
    for run in list(_attached):
        run.abandon()
