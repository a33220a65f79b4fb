"""Write one group of queued things in one transaction, and find the one that spoils it."""

import concurrent.futures
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import structlog

from sentinel.errors import TemporaryError
from sentinel.records import Gap, Origin
from sentinel.store.database import Entry, Store
from sentinel.vocabulary import DropReason

_log = structlog.get_logger()


class Item(NamedTuple):
    """One thing in the ordered queue: an entry, or a job with a future for whoever waits for it."""

    entry: Entry | None
    job: Callable[[Store], Any] | None
    future: "concurrent.futures.Future[Any] | None"
    critical: bool  # FULL-synced before anyone is told
    follows: bool = False  # belongs to the item before it: one commit for both


def write(store: Store, group: list[Item]) -> None:
    """One transaction, or where one item spoils it, item by item. Raises when the disk takes none of it now."""
    head = group[0]
    if head.future is not None:
        _answer(store, head)
        return
    try:
        with store.transaction(critical=any(item.critical for item in group)):
            for is_entry, items in itertools.groupby(group, key=lambda item: item.entry is not None):
                if is_entry:
                    store.write([item.entry for item in items if item.entry is not None], critical=False)
                else:
                    _run_all(store, items)
    except TemporaryError:
        raise
    except Exception:  # noqa: BLE001 - an item spoils the batch; which one is found below
        _log.exception("a batch was refused for good; its parts are tried one by one", items=len(group))
        for item in group:
            _write_or_count(store, item)


def _answer(store: Store, item: Item) -> None:
    assert item.job is not None
    try:
        result = item.job(store)
    except TemporaryError:
        raise
    except Exception as error:  # noqa: BLE001 - handed to whoever waits
        fail(item, error)
        return
    succeed(item, result)


def _run_all(store: Store, items: Iterable[Item]) -> None:
    for item in items:
        assert item.job is not None
        item.job(store)


def _write_or_count(store: Store, item: Item) -> None:
    """An entry that the database can never take becomes a gap, so that it still counts."""
    try:
        if item.entry is not None:
            store.write([item.entry], critical=item.critical)
        else:
            _run_all(store, [item])
    except TemporaryError:
        raise
    except Exception:  # noqa: BLE001 - the store refuses this one for good; the others go on
        _log.exception("this can never be stored", message=type(item.entry and item.entry.message).__name__)
        if item.entry is not None and not isinstance(item.entry.message, Gap):
            seq = item.entry.message.seq
            lost = Gap(first_seq=seq, last_seq=seq, reason=DropReason.UNEXPLAINED)
            store.write([Entry(item.entry.origin, lost)], critical=True)


def highest(entries: Iterable[Entry]) -> dict[Origin, int]:
    highest: dict[Origin, int] = {}
    for entry in entries:
        message = entry.message
        highest[entry.origin] = message.last_seq if isinstance(message, Gap) else message.seq
    return highest


def succeed(item: Item, result: object) -> None:
    if item.future is not None and item.future.set_running_or_notify_cancel():
        item.future.set_result(result)


def fail(item: Item, error: Exception) -> None:
    if item.future is not None and item.future.set_running_or_notify_cancel():
        item.future.set_exception(error)


def in_words(error: BaseException) -> str:
    return str(error) or type(error).__name__
