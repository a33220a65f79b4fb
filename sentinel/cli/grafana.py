"""Put dashboards and annotations into a Grafana server, through grafana-api: each there once, however often asked."""

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

import requests
from grafana_api.grafana_api import GrafanaClientError, GrafanaException, GrafanaServerError
from grafana_api.grafana_face import GrafanaFace
from requests.adapters import HTTPAdapter

from sentinel.errors import MisuseError, PermanentError, TemporaryError

T = TypeVar("T")

MOST_BYTES = 8 << 20  # of one answer; a list of 5000 annotations has about 2 MiB
MOST_ANNOTATIONS = 5000  # of one run that are looked at, to tell which are there
_NOT_FOUND = 404
_NOT_ALLOWED = (401, 403)
_OWN_TO_THE_SERVER = ("id", "version")  # keys of a dashboard that Grafana sets


class Change(StrEnum):
    CREATED = "created"
    UPDATED = "updated"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class Server:
    """Where, as whom, and how long it may take in all."""

    url: str  # http or https, with the path under which Grafana is served, if any
    token: str = field(repr=False)
    deadline_seconds: float = 60.0  # of a whole push, however the server drips

    def __post_init__(self) -> None:
        if "@" in self.url:
            raise MisuseError("--url names a user; a token in --token-file says who pushes")
        if not _is_plain(self.url):
            raise MisuseError(f"--url is {self.url!r}; it must be like http://localhost:3000 or https://host/grafana")


class Note(NamedTuple):
    """One annotation. `key` is the tag by which it is found again."""

    key: str
    run_id: str
    start_ms: int
    end_ms: int  # the start's, while it lasts
    text: str
    tags: tuple[str, ...] = ()


def read_token(path: Path) -> str:
    """The token in a file. Raises MisuseError, which never shows what the file holds."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise MisuseError(f"token file {str(path)!r} cannot be read: {reason}") from None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise MisuseError(
            f"token file {str(path)!r} must hold one token of a Grafana service account, and nothing else"
        )
    return token


def push(server: Server, dashboards: Sequence[Mapping[str, Any]], folder: str) -> dict[str, Change]:
    """Create or update each dashboard by its uid, in a folder of that title. Raises Temporary- or PermanentError."""

    def work(face: GrafanaFace) -> dict[str, Change]:
        folder_uid = _folder(face, folder)
        return {page["uid"]: _push_one(face, page, folder_uid) for page in dashboards}

    return _within_deadline(server, work)


def annotate(server: Server, notes: Sequence[Note]) -> dict[str, Change]:
    """Create or update one annotation for each note; all are of one run. Raises Temporary- or PermanentError."""

    def work(face: GrafanaFace) -> dict[str, Change]:
        found = _annotations(face, notes[0].run_id)
        return {note.key: _annotate_one(face, note, found.get(note.key)) for note in notes}

    return _within_deadline(server, work) if notes else {}


# ---------------------------------------------------------------- dashboards


def _folder(face: GrafanaFace, title: str) -> str:
    for found in face.folder.get_all_folders():
        if found.get("title") == title:
            return str(found["uid"])
    # The same title makes the same uid, so that two pushes at once cannot make two folders.
    uid = f"sentinel-{hashlib.sha256(title.encode()).hexdigest()[:12]}"
    return str(face.folder.create_folder(title, uid=uid)["uid"])


def _push_one(face: GrafanaFace, page: Mapping[str, Any], folder_uid: str) -> Change:
    there = _dashboard(face, page["uid"])
    if there is not None and _same(there, page, folder_uid):
        return Change.UNCHANGED
    wanted = {"dashboard": {**page, "id": None}, "folderUid": folder_uid, "overwrite": True, "message": "sentinel"}
    face.dashboard.update_dashboard(wanted)
    return Change.CREATED if there is None else Change.UPDATED


def _dashboard(face: GrafanaFace, uid: str) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = face.dashboard.get_dashboard(quote(uid, safe=""))
    except GrafanaClientError as error:
        if error.status_code == _NOT_FOUND:
            return None
        raise
    return found


def _same(there: Mapping[str, Any], page: Mapping[str, Any], folder_uid: str) -> bool:
    kept = {key: value for key, value in there["dashboard"].items() if key not in _OWN_TO_THE_SERVER}
    return kept == dict(page) and there["meta"].get("folderUid") == folder_uid


# ---------------------------------------------------------------- annotations


def _annotations(face: GrafanaFace, run_id: str) -> dict[str, Mapping[str, Any]]:
    """The run's annotations that are there, by each of their tags."""
    tags = ["sentinel", quote(run_id, safe="")]
    rows = face.annotations.get_annotation(tags=tags, limit=MOST_ANNOTATIONS)
    return {tag: row for row in rows for tag in row["tags"]}


def _annotate_one(face: GrafanaFace, note: Note, there: Mapping[str, Any] | None) -> Change:
    tags = ["sentinel", note.run_id, note.key, *note.tags]
    wanted = {"time_from": note.start_ms, "time_to": note.end_ms, "tags": tags, "text": note.text}
    if there is None:
        face.annotations.add_annotation(**wanted)
        return Change.CREATED
    known = (there["time"], there.get("timeEnd") or there["time"], set(there["tags"]), there["text"])
    if known == (note.start_ms, note.end_ms, set(tags), note.text):
        return Change.UNCHANGED
    face.annotations.update_annotation(there["id"], **wanted)
    return Change.UPDATED


# ---------------------------------------------------------------- the connection


def _is_plain(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # brackets that do not match, a port that is no number
        return False
    return (
        parts.scheme in {"http", "https"}
        and bool(parts.hostname)
        and port != 0
        and not (parts.query or parts.fragment)
    )


def _within_deadline(server: Server, work: Callable[[GrafanaFace], T]) -> T:
    """What `work` returns. A timeout of `requests` holds for one read, so the whole gets a thread to leave behind."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            with _plain_errors(server):
                result.set_result(work(_connected(server)))
        except Exception as error:  # noqa: BLE001 -- handed to the caller, who waits for it
            result.set_exception(error)

    Thread(target=run, name="grafana", daemon=True).start()
    try:
        return result.result(server.deadline_seconds)
    except TimeoutError:
        raise TemporaryError(
            f"{server.url} did not answer everything within {server.deadline_seconds:g} s; "
            "what was done stays, and the same command goes on from there"
        ) from None


def _connected(server: Server) -> GrafanaFace:
    parts = urlsplit(server.url)
    path = parts.path.strip("/")
    face = GrafanaFace(
        server.token,
        host=parts.netloc,
        protocol=parts.scheme,
        url_path_prefix=f"{path}/" if path else "",
        timeout=min(10.0, server.deadline_seconds),
    )
    # Nothing is followed, so that the token goes to nobody but the server that the person named.
    face.api.s.max_redirects = 0
    for prefix in ("http://", "https://"):
        face.api.s.mount(prefix, _BoundedAdapter())
    return face


class _BoundedAdapter(HTTPAdapter):
    """Reads at most MOST_BYTES of an answer."""

    def send(self, request: requests.PreparedRequest, *arguments: Any, **more: Any) -> requests.Response:
        response = super().send(request, *arguments, **{**more, "stream": True})
        body = response.raw.read(MOST_BYTES + 1, decode_content=True)
        response.raw.close()
        if len(body) > MOST_BYTES:
            raise requests.exceptions.ContentDecodingError(f"the answer is larger than {MOST_BYTES} bytes")
        response.raw = io.BytesIO(body)
        return response


@contextmanager
def _plain_errors(server: Server) -> Iterator[None]:
    try:
        yield
    except GrafanaServerError as error:
        raise TemporaryError(f"{server.url} failed: {_shown(error, server)}; try again later") from None
    except GrafanaException as error:
        if error.status_code in _NOT_ALLOWED:
            raise PermanentError(
                f"{server.url} refuses the token ({error.status_code}); it must be of a service account "
                "with the role Editor"
            ) from None
        raise PermanentError(f"{server.url} refuses: {_shown(error, server)}") from None
    except requests.exceptions.TooManyRedirects:
        raise PermanentError(f"{server.url} redirects elsewhere; give the address of Grafana itself") from None
    except (requests.exceptions.ConnectionError, requests.exceptions.Timeout) as error:
        raise TemporaryError(
            f"{server.url} cannot be reached ({type(error).__name__}); is Grafana running?"
        ) from None
    except (requests.exceptions.RequestException, ValueError, LookupError, TypeError, AttributeError):
        raise PermanentError(f"{server.url} does not answer as Grafana does; is the path complete?") from None


def _shown(error: GrafanaException, server: Server) -> str:
    return " ".join(str(error.message).replace(server.token, "***").split())[:200]
