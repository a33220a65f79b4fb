"""What the loop asks of whoever does what may only be done between two attempts: snapshots and turns."""

from typing import Protocol


class Boundaries(Protocol):
    """Implemented by `sentinel.client.turns`. Called on the loop's thread, inside the shield."""

    @property
    def needs_base(self) -> bool:
        """The state at attach, or after the user's own load, has not been copied yet."""
        ...

    def wants_step(self, step: int) -> bool:
        """Before the step of attempt `step`, in a loop without run.batches: must its update be set aside?"""
        ...

    def after_step(self, *, nothing_applied: bool = False) -> None: ...
    def state_loaded(self) -> None: ...
    def take_base(self) -> None: ...
    @property
    def undo_pending(self) -> bool:
        """What the device says of later attempts follows from the update that is being undone."""
        ...

    def undo(self, step: int) -> None:
        """A non-finite update reached the weights before the device could be read (guard "deferred")."""
        ...
